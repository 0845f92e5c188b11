"""Documents -> rows: layout, cuts and word starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import BertTokenizer, PreTrainedTokenizerBase, RobertaTokenizer

from domext_ray.corpus.rows import RowSettings, build_rows, tokenize_sentences
from domext_ray.data.sentences import split_sentences

HAN = "我喜欢北京大学的老师。今天天气很好"
WORDS = ["the", "cat", "dog", "runs", "very", "##ly", "fast", "##er", "a", "and", ".", "!", ",", "[SEPARATE]"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def wordpiece() -> BertTokenizer:
    tokens = [*SPECIALS, *WORDS, *sorted(set(HAN))]
    return BertTokenizer(vocab={token: i for i, token in enumerate(tokens)})


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
    return RowSettings(
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        seq_length,
        cross_documents,
        chinese_words,
        packed=packed,
    )


def show_rows(documents: Sequence[str], tokenizer: BertTokenizer, **settings: int | bool) -> list[str]:
    rows = build_rows(documents, make_settings(tokenizer, **settings))  # type: ignore[arg-type]
    return [" ".join(tokenizer.convert_ids_to_tokens(ids.tolist())) for ids, _ in rows]


@pytest.mark.parametrize(
    ("document", "sentences"),
    [
        ("One. Two! Three? Four… five", ["One.", "Two!", "Three?", "Four…", "five"]),
        ('He said "no." Then left.', ['He said "no."', "Then left."]),
        ("Version 1.5 of it (really.) works", ["Version 1.5 of it (really.)", "works"]),
        ("你好。我很好！“真的？”他说；走", ["你好。", "我很好！", "“真的？”", "他说；", "走"]),
        ("完。 空格 mixed. text", ["完。", "空格 mixed.", "text"]),
        ("no end", ["no end"]),
        ("end.", ["end."]),
    ],
)
def test_split_sentences(document: str, sentences: list[str]) -> None:
    assert split_sentences(document) == sentences


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
    expected = [i for each in documents for i in wordpiece.encode(each, add_special_tokens=False)]
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
        monkeypatch.setattr("domext_ray.corpus.rows.SENTENCES_PER_CALL", number)
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
    return [tokenizer.decode(each.tolist()).replace(" ", "") for each in np.split(ids, firsts[1:])]


@pytest.mark.parametrize("name", ["wordpiece", "byte_level"])
def test_jieba_words_of_chinese(name: str, request: pytest.FixtureRequest) -> None:
    """Also where the tokenizer's own pre-tokens take a run of Han text for one word."""
    pytest.importorskip("jieba")
    tokenizer = request.getfixturevalue(name)
    assert group_words(tokenizer, "我喜欢北京大学的老师", True) == ["我", "喜欢", "北京大学", "的", "老师"]
    assert group_words(tokenizer, "我喜欢", False) == ["我", "喜", "欢"]


def test_chinese_among_spaced_words(wordpiece: BertTokenizer) -> None:
    pytest.importorskip("jieba")
    sentences = ["the cat faster", "the 老师 runs faster", "a dog"]
    settings = make_settings(wordpiece)
    starts = [each.tolist() for _, each in tokenize_sentences(sentences, settings)]
    assert starts == [
        [True, True, True, False],
        [True, True, False, True, True, False],
        [True, True],
    ]
