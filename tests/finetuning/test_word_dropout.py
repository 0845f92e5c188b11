"""Tokenizers without some of their words: what is dropped, what stays, and how texts are read then."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_tokenizers import MAKERS, PROSE, save_xlm_roberta
from tokenizers import Tokenizer

from domext_ray.finetuning.word_dropout import DROPPING, WordDropout, drop_words, name_model
from domext_ray.text.vocabulary.extension import extend_tokenizer, read_base_vocabulary
from domext_ray.text.vocabulary.tokenizer import load_tokenizer, make_backend

NEW = ("thalamus", "amygdala", "hypoxia", "nephritis", "fibrosis", "sarcoma", "stenosis", "ischemia")
TEXTS = [*PROSE[:60], f"The {' and the '.join(NEW)} of cats."]


@pytest.fixture(scope="module", params=["bert", *MAKERS])
def folder(request: pytest.FixtureRequest, tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bert":
        return tiny_base_folder
    return MAKERS[request.param](tmp_path_factory.mktemp("base"))


def extend(folder: Path) -> tuple[Tokenizer, Tokenizer, int]:
    """Engines of a base and of the same with new words, and the first new id."""
    base = load_tokenizer(folder)
    first_new = max(base.get_vocab().values()) + 1
    extended = extend_tokenizer(read_base_vocabulary("tiny", base, first_new), NEW)
    return make_backend(base), make_backend(extended), first_new


def read(backend: Tokenizer) -> list[list[int]]:
    return [each.ids for each in backend.encode_batch(TEXTS, add_special_tokens=False)]


def test_without_new_words_texts_are_read_as_the_base_does(folder: Path) -> None:
    base, extended, first_new = extend(folder)
    assert max(read(extended)[-1]) >= first_new
    nearly_all = drop_words(extended, WordDropout(0.0, 1 - 1e-12, first_new), 3, 0)
    assert read(nearly_all) == read(base)
    assert read(drop_words(extended, WordDropout(0.0, 0.0, first_new), 3, 0)) == read(extended)


def test_texts_are_read_whole_by_what_is_left(folder: Path) -> None:
    _, extended, first_new = extend(folder)
    whole, thinned = read(extended), drop_words(extended, WordDropout(0.4, 0.6, first_new), 3, 0)
    assert sum(map(len, read(thinned))) > 1.1 * sum(map(len, whole))
    unknown = extended.token_to_id("[UNK]")
    for text, ids, fewer in zip(TEXTS, whole, read(thinned), strict=True):
        assert fewer.count(unknown) == ids.count(unknown), text
        assert thinned.decode(fewer).replace(" ", "") == extended.decode(ids).replace(" ", ""), text


def test_shares_and_draws(folder: Path) -> None:
    _, extended, first_new = extend(folder)
    dropout = WordDropout(0.3, 0.5, first_new)
    words = extended.get_vocab(with_added_tokens=False)
    kept, again, later, other = (
        drop_words(extended, dropout, *each).get_vocab(with_added_tokens=False)
        for each in ((3, 0), (3, 0), (3, 1), (4, 0))
    )
    assert kept == again and len({frozenset(each) for each in (kept, later, other)}) == 3
    assert all(words[entry] == i for entry, i in kept.items())
    assert {each for each in words if len(each.removeprefix("##")) == 1} <= kept.keys()
    long = [entry for entry, i in words.items() if i < first_new and len(entry.removeprefix("##")) > 1]
    assert sum(each in kept for each in long) / len(long) == pytest.approx(0.7, abs=3 / len(long) ** 0.5)


def test_kinds_of_models(bert: object, tmp_path: Path) -> None:
    assert {name_model(bert), name_model(load_tokenizer(MAKERS["roberta"](tmp_path / "bytes")))} == {*DROPPING}
    assert name_model(load_tokenizer(save_xlm_roberta(tmp_path / "pieces"))) == "Unigram"
