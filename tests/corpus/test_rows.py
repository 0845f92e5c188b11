"""Documents -> rows: layout, cuts and word starts; remembered chunks give exactly what the tokenizer gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from row_files import SPECIALS, make_wordpiece
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, RobertaTokenizer

from domext_ray.text.corpus.rows import RowSettings, SentenceTokenizer, build_rows, tokenize_sentences
from domext_ray.text.data.documents import split_sentences

HAN = "我喜欢北京大学的老师。今天天气很好"
WORDS = ["the", "cat", "dog", "runs", "very", "##ly", "fast", "##er", "a", "and", ".", "!", ",", "[SEPARATE]"]


@pytest.fixture(scope="module")
def wordpiece() -> BertTokenizer:
    return make_wordpiece([*SPECIALS, *WORDS, *sorted(set(HAN))])


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> RobertaTokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(["the cat runs faster and the dog runs"] * 3, vocab_size=280, show_progress=False)
    learned.save_model(str(folder))
    return RobertaTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def make_settings(
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int = 10,
    cross_documents: bool = True,
    chinese_words: bool = True,
    packed: bool = False,
) -> RowSettings:
    record, ids = tokenizer.backend_tokenizer.to_str(), (tokenizer.cls_token_id, tokenizer.sep_token_id)
    return RowSettings(record, *ids, seq_length, cross_documents, chinese_words, packed=packed)


def show_rows(documents: Sequence[str], tokenizer: BertTokenizer, **settings: int | bool) -> list[str]:
    rows = build_rows(documents, make_settings(tokenizer, **settings))  # type: ignore[arg-type]
    return [" ".join(tokenizer.convert_ids_to_tokens(ids.tolist())) for ids, _ in rows]


def test_split_sentences() -> None:
    for sentences in (
        ["One.", "Two!", "Three?", "Four…", "five"],
        ['He said "no."', "Then left."],
        ["Version 1.5 of it (really.)", "works"],
        ["no end"],
        ["end."],
    ):
        assert split_sentences(" ".join(sentences)) == sentences
    assert split_sentences("你好。我很好！“真的？”他说；走") == ["你好。", "我很好！", "“真的？”", "他说；", "走"]
    assert split_sentences("完。 空格 mixed. text") == ["完。", "空格 mixed.", "text"]


def test_layout_of_rows(wordpiece: BertTokenizer) -> None:
    documents = ["the cat runs. the dog runs.", "a cat!", "the dog runs very fast."]
    assert show_rows(documents, wordpiece, seq_length=16) == [
        "[CLS] the cat runs . the dog runs . [SEP] a cat ! [SEP]",
        "[CLS] the dog runs very fast . [SEP]",
    ]
    assert show_rows(documents, wordpiece, seq_length=16, cross_documents=False) == [
        "[CLS] the cat runs . the dog runs . [SEP]",
        "[CLS] a cat ! [SEP]",
        "[CLS] the dog runs very fast . [SEP]",
    ]


def test_packed_documents_have_a_first_token_of_their_own(wordpiece: BertTokenizer) -> None:
    documents = ["the cat runs. the dog runs.", "a cat!", "the dog runs very fast."]
    assert show_rows(documents, wordpiece, seq_length=16, packed=True) == [
        "[CLS] the cat runs . the dog runs . [SEP] [CLS] a cat ! [SEP]",
        "[CLS] the dog runs very fast . [SEP]",
    ]
    for seq_length in range(12, 17):  # a row never ends with the beginning of a document that has no room in it
        rows = show_rows(documents, wordpiece, seq_length=seq_length, packed=True)
        assert all(row.startswith("[CLS]") and row.endswith(" [SEP]") and "[CLS] [SEP]" not in row for row in rows)
        tokens = " ".join(rows).replace("[CLS] ", "").replace("[SEP]", "").split()
        assert tokens == wordpiece.tokenize(" ".join(documents))


def test_rows_keep_every_token_in_order(wordpiece: BertTokenizer) -> None:
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(["the", "cat", "faster", ".", "very"], size=n)) for n in rng.integers(1, 60, 200)]
    expected = [i for document in documents for i in wordpiece.encode(document, add_special_tokens=False)]
    for cross_documents in (True, False):
        settings = make_settings(wordpiece, seq_length=12, cross_documents=cross_documents)
        rows = list(build_rows(documents, settings))
        specials = {wordpiece.cls_token_id, wordpiece.sep_token_id}
        assert [i for ids, _ in rows for i in ids.tolist() if i not in specials] == expected
        for ids, starts in rows:
            assert ids.dtype == np.int32 and starts.dtype == bool and len(ids) == len(starts)
            assert 3 <= len(ids) <= 12
            assert ids[0] == wordpiece.cls_token_id and ids[-1] == wordpiece.sep_token_id
            assert ids[-2] != wordpiece.sep_token_id and wordpiece.cls_token_id not in ids[1:]
            np.testing.assert_array_equal(starts[np.isin(ids, list(specials))], True)


def test_rows_do_not_depend_on_how_many_sentences_are_tokenised_at_once(
    wordpiece: BertTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = ["the cat runs. the dog!", "a dog runs faster.", "the cat."] * 5
    expected = show_rows(documents, wordpiece)
    for number in (1, 2, 7):
        monkeypatch.setattr("domext_ray.text.corpus.rows.SENTENCES_PER_CALL", number)
        assert show_rows(documents, wordpiece) == expected


def test_documents_without_tokens_leave_no_trace(wordpiece: BertTokenizer) -> None:
    documents = ["the cat.", "\u0301", " ", "\u0301", "a dog."]
    assert show_rows(documents, wordpiece, seq_length=16) == ["[CLS] the cat . [SEP] a dog . [SEP]"]
    assert show_rows([" ", "\u0301"], wordpiece) == []


def test_a_long_sentence_is_cut_before_a_word(wordpiece: BertTokenizer) -> None:
    assert show_rows(["the cat runs very faster and a dog runs faster"], wordpiece, seq_length=8) == [
        "[CLS] the cat runs very fast ##er [SEP]",
        "[CLS] and a dog runs fast ##er [SEP]",
    ]
    assert show_rows(["the cat runs very a faster and the dog"], wordpiece, seq_length=8) == [
        "[CLS] the cat runs very a [SEP]",
        "[CLS] fast ##er and the dog [SEP]",
    ]


def test_a_word_longer_than_a_row_is_cut_inside(wordpiece: BertTokenizer) -> None:
    rows = show_rows(["fast" + "er" * 12], wordpiece, seq_length=8)
    assert rows[0] == "[CLS] fast " + "##er " * 5 + "[SEP]"
    assert " ".join(rows).count("##er") == 12
    rows = show_rows(["the cat fast" + "er" * 6], wordpiece, seq_length=8)  # else most of the row is empty
    assert rows == ["[CLS] the cat fast ##er ##er ##er [SEP]", "[CLS] ##er ##er ##er [SEP]"]


def test_word_starts_of_wordpiece(wordpiece: BertTokenizer) -> None:
    (ids, starts) = next(tokenize_sentences(["The cat runs faster, veryly."], make_settings(wordpiece)))
    assert wordpiece.convert_ids_to_tokens(ids.tolist()) == "the cat runs fast ##er , very ##ly .".split()
    assert starts.tolist() == [True, True, True, True, False, True, True, False, True]


def test_word_starts_of_byte_level_bpe(byte_level: RobertaTokenizer) -> None:
    sentence = "the cats run faster"
    (ids, starts) = next(tokenize_sentences([sentence], make_settings(byte_level)))
    assert ids.tolist() == byte_level.encode(sentence, add_special_tokens=False)
    words = "".join("|" * int(start) + byte_level.decode([i]) for i, start in zip(ids.tolist(), starts, strict=True))
    assert words == "|the| cats| run| faster"


def group_words(tokenizer: PreTrainedTokenizerBase, sentence: str, chinese_words: bool) -> list[str]:
    ids, starts = next(tokenize_sentences([sentence], make_settings(tokenizer, chinese_words=chinese_words)))
    firsts = np.flatnonzero(starts)
    assert firsts[0] == 0
    return [tokenizer.decode(word.tolist()).replace(" ", "") for word in np.split(ids, firsts[1:])]


def test_chinese_words_are_jiebas(wordpiece: BertTokenizer, byte_level: RobertaTokenizer) -> None:
    """Also where the tokenizer's own pre-tokens take a run of Han text for one word, and beside spaced words."""
    pytest.importorskip("jieba")
    for tokenizer in (wordpiece, byte_level):
        assert group_words(tokenizer, "我喜欢北京大学的老师", True) == ["我", "喜欢", "北京大学", "的", "老师"]
        assert group_words(tokenizer, "我喜欢", False) == ["我", "喜", "欢"]
    assert group_words(wordpiece, "老师 the faster北京大学", True) == ["老师", "the", "faster", "北京大学"]


LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHINESE = "患者口服降压药，血压平稳。高血压病人可以口服党参吗？"
TEXTS = [
    "Don't tokenise (e.g. U.S.A.) 3.14% of café naïveté: $5+6, x_y! [SEP] [MASK]##ing",
    "Ünïcödé ﬁ Ｆｕｌｌ İstanbul straße ΑΣ — “quotes”… 50€ a\u200cb \u0301x !\u0301y",
    "中文ABC混排café123，B超检查。和English words混在一起",
    "한국어 텍스트 ไทย 日本語のテキスト",
    CHINESE,
]


@pytest.mark.parametrize("chinese_words", [True, False])
def test_remembered_chunks_give_the_tokenizers_ids(chinese_words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any text, also where the memory is full; special tokens in a text are text."""
    if chinese_words:
        pytest.importorskip("jieba")
    characters = [*LETTERS, *"0123456789'.,;:!?()$%+[]#_，。？", *sorted({*CHINESE} - {*"，。？"})]
    tokens = [*SPECIALS, *characters, *(f"##{character}" for character in characters)]
    tokens += ["token", "##ise", "the", "cafe", "##ing", "words", "word"]
    record = make_wordpiece(tokens).backend_tokenizer.to_str()
    direct = Tokenizer.from_str(record)
    direct.encode_special_tokens = True
    random = np.random.default_rng(0)
    codes = [*range(33, 127), *range(0xA1, 0x180), *range(0x300, 0x320), *range(0x4E00, 0x4E20), 0xFF0C, 0x2014, 0xAC00]
    texts = [*TEXTS, *(" ".join("".join(map(chr, random.choice(codes, 5))) for _ in range(8)) for _ in range(200))]
    for most in (10**6, 50):
        monkeypatch.setattr("domext_ray.text.corpus.rows.MAX_CACHED_CHARS", most)
        tokenizer = SentenceTokenizer(record, chinese_words)
        assert tokenizer.splits_at_spaces
        for _ in range(2):  # the second time everything is remembered
            found = [[token >> 1 for token in tokens] for tokens in tokenizer.encode(texts)]
            assert found == [direct.encode(text, add_special_tokens=False).ids for text in texts]
    for number in range(100):
        tokenizer.encode([f"word{number} the"])
    assert sum(map(len, tokenizer._cache)) < 70


def test_special_tokens_in_a_text_are_text(wordpiece: BertTokenizer, byte_level: RobertaTokenizer) -> None:
    for tokenizer, text in ((wordpiece, "a [SEP] [MASK] cat"), (byte_level, "a </s> cat")):
        (ids, _) = next(tokenize_sentences([text], make_settings(tokenizer)))
        assert not {*ids.tolist()} & {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
