"""Sentences, words and rows; the remembered chunks give exactly what the tokenizer gives."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertTokenizer

from domext_ray.corpus.rows import SentenceTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHINESE = "患者口服降压药，血压平稳。高血压病人可以口服党参吗？"
TEXTS = [
    "Don't tokenise (e.g. U.S.A.) 3.14% of café naïveté: $5+6, x_y! [SEP] [MASK]##ing",
    "Ünïcödé ﬁ Ｆｕｌｌ İstanbul straße ΑΣ — “quotes”… 50€ a\u200cb \u0301x !\u0301y",
    "中文ABC混排café123，B超检查。和English words混在一起",
    "한국어 텍스트 ไทย 日本語のテキスト",
    CHINESE,
]


@pytest.fixture(scope="module")
def bert_json() -> str:
    characters = [*LETTERS, *"0123456789'.,;:!?()$%+[]#_，。？", *sorted({*CHINESE} - {*"，。？"})]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{each}" for each in characters)]
    tokens += ["token", "##ise", "the", "cafe", "##ing", "words", "word"]
    return BertTokenizer(vocab={each: i for i, each in enumerate(tokens)}).backend_tokenizer.to_str()


@pytest.fixture(scope="module")
def byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(["tokenising the cafes of the words"], trainer)
    return tokenizer.to_str()


def encode_directly(tokenizer_json: str, text: str) -> list[int]:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


def words_of(tokenizer_json: str, text: str, chinese_words: bool) -> list[str]:
    """The text of every word, put together from its tokens."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    words: list[list[int]] = []
    for token in SentenceTokenizer(tokenizer_json, chinese_words).encode([text])[0]:
        words += [[]] if token & 1 else []
        words[-1].append(token >> 1)
    return [tokenizer.decode(each).replace(" ", "") for each in words]


@pytest.mark.parametrize("chinese_words", [True, False])
def test_remembered_chunks_give_the_tokenizers_ids(bert_json: str, chinese_words: bool) -> None:
    if chinese_words:
        pytest.importorskip("jieba")
    tokenizer = SentenceTokenizer(bert_json, chinese_words)
    assert tokenizer.splits_at_spaces
    for _ in range(2):  # the second time everything is remembered
        encoded = tokenizer.encode(TEXTS)
        assert [[each >> 1 for each in tokens] for tokens in encoded] == [encode_directly(bert_json, t) for t in TEXTS]


def test_any_unicode_text_gives_the_tokenizers_ids(bert_json: str) -> None:
    random = np.random.default_rng(0)
    codes = [*range(33, 127), *range(0xA1, 0x180), *range(0x300, 0x320), *range(0x4E00, 0x4E20), 0xFF0C, 0x2014, 0xAC00]
    texts = [" ".join("".join(map(chr, random.choice(codes, 5))) for _ in range(8)) for _ in range(200)]
    encoded = SentenceTokenizer(bert_json, False).encode(texts)
    assert [[each >> 1 for each in tokens] for tokens in encoded] == [encode_directly(bert_json, t) for t in texts]


def test_the_memory_is_bounded(bert_json: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("domext_ray.corpus.rows.MAX_CACHED_CHARS", 50)
    tokenizer = SentenceTokenizer(bert_json, False)
    for number in range(100):
        tokenizer.encode([f"word{number} the"])
    assert sum(map(len, tokenizer._cache)) < 70


def test_special_tokens_in_a_text_are_text(bert_json: str, byte_level_json: str) -> None:
    for tokenizer_json, text, special_ids in (
        (bert_json, "a [SEP] [MASK] b", {0, 2, 3, 4}),
        (byte_level_json, "a </s> b", {0, 1}),
    ):
        tokens = SentenceTokenizer(tokenizer_json, False).encode([text])[0]
        assert not {each >> 1 for each in tokens} & special_ids


def test_words_of_spaced_scripts_are_pre_tokens(bert_json: str, byte_level_json: str) -> None:
    assert words_of(bert_json, "tokenising the cafes.", True) == ["tokenising", "the", "cafes", "."]
    assert words_of(byte_level_json, "tokenising the cafes.", True) == ["tokenising", "the", "cafes", "."]


@pytest.mark.parametrize("kind", ["bert", "byte_level"])
def test_chinese_words_are_jiebas(kind: str, bert_json: str, byte_level_json: str) -> None:
    pytest.importorskip("jieba")
    tokenizer_json = bert_json if kind == "bert" else byte_level_json
    words = words_of(tokenizer_json, CHINESE, True)
    assert {"患者", "口服", "血压", "高血压", "可以"} <= set(words)
    characters = words_of(tokenizer_json, CHINESE, False)
    assert "患" in characters and "血" in characters


def test_latin_in_chinese_text_keeps_its_words(bert_json: str) -> None:
    pytest.importorskip("jieba")
    assert words_of(bert_json, "患者 the words口服", True) == ["患者", "the", "words", "口服"]
