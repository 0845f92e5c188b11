"""Tokenizers: what loads, what a fingerprint is of, and how a vocabulary is learned."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from row_files import SPECIALS, make_wordpiece
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from domext_ray.config.pretrain import PrepareConfig, VocabConfig
from domext_ray.errors import CorpusError
from domext_ray.storage import Place
from domext_ray.text.vocabulary.learn import learn_wordpiece
from domext_ray.text.vocabulary.tokenizer import (
    LAST_FILE,
    check_fit,
    fingerprint_tokenizer,
    load_tokenizer,
    replace_folder,
)

PREPARE = PrepareConfig(min_document_chars=5)


def make_tokenizer(*words: str, **options: bool) -> BertTokenizer:
    return make_wordpiece([*SPECIALS, *words], **options)


def test_the_fingerprint_is_of_what_decides_ids(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("a", "b", "##c")
    fingerprint = fingerprint_tokenizer(tokenizer)
    tokenizer(["a b", "a"], padding="max_length", truncation=True, max_length=9)
    assert tokenizer.backend_tokenizer.padding and tokenizer.backend_tokenizer.truncation
    assert fingerprint_tokenizer(tokenizer) == fingerprint
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint_tokenizer(load_tokenizer(tmp_path)) == fingerprint
    others = [make_tokenizer("a", "b", "##d"), make_tokenizer("b", "a", "##c"), make_tokenizer("a", "b")]
    others.append(make_tokenizer("a", "b", "##c", do_lower_case=False))
    assert len({fingerprint, *map(fingerprint_tokenizer, others)}) == 5


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is no folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="has no tokenizer"):
        load_tokenizer(tmp_path / "empty")
    make_tokenizer("a").save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    with pytest.raises(CorpusError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "damaged")
    plain = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(tmp_path / "plain")
    with pytest.raises(CorpusError, match="has no cls token"):
        load_tokenizer(tmp_path / "plain")


def test_a_tokenizer_in_python_is_refused_whatever_is_installed(tmp_path: Path) -> None:
    """Japanese ones ask for MeCab, and would be refused once it is there."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "本"]))
    for file, name in ((LAST_FILE, "BertJapaneseTokenizer"), ("config.json", "PhobertTokenizer")):
        (tmp_path / LAST_FILE).unlink(missing_ok=True)
        (tmp_path / file).write_text(json.dumps({"model_type": "bert", "tokenizer_class": name}))
        with pytest.raises(CorpusError) as refused:
            load_tokenizer(tmp_path)
        assert f"is a {name}, which has no fast implementation" in str(refused.value)
        assert "install" not in str(refused.value)
    (tmp_path / "config.json").unlink()
    make_tokenizer("a").save_pretrained(tmp_path)
    config = json.loads((tmp_path / LAST_FILE).read_text())
    (tmp_path / LAST_FILE).write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizer"}))
    assert load_tokenizer(tmp_path).is_fast, "the name of all of them"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorpusError, match="holds no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = "walker walking talker talking reader reading painter painting teacher teaching".split()
    lines = [f"The {words[i % 10]} {words[i * 7 % 10]} was {words[i // 3 % 10]}, said Zoë." for i in range(300)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_learned_vocabularies(text: Path, tmp_path: Path) -> None:
    vocab = VocabConfig(size=70)
    folder = learn_wordpiece(str(text), PREPARE, vocab, tmp_path / "first", 64)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, BertTokenizer) and tokenizer.model_max_length == 64
    assert len(tokenizer) == 70
    assert tokenizer.convert_tokens_to_ids(SPECIALS) == [0, 1, 2, 3, 4]
    assert tokenizer.tokenize("The walking") == tokenizer.tokenize("the walking")
    assert "[UNK]" not in tokenizer.tokenize(text.read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == ["first"]

    again = load_tokenizer(learn_wordpiece(str(text), PREPARE, vocab, tmp_path / "second", 64))
    assert fingerprint_tokenizer(again) == fingerprint_tokenizer(tokenizer)
    cased = learn_wordpiece(str(text), PREPARE, VocabConfig(size=70, lowercase=False), tmp_path / "cased", 64)
    assert load_tokenizer(cased).tokenize("Zoë")[0].startswith("Z")


def test_a_learned_vocabulary_is_kept_while_its_record_matches(text: Path, tmp_path: Path) -> None:
    """Documents of another kind are other text: short lines count, or do not."""
    path = tmp_path / "text.txt"
    path.write_text("xq\n" * 2000 + text.read_text(encoding="utf-8"), encoding="utf-8")
    folder = learn_wordpiece(str(path), PREPARE, VocabConfig(size=70), tmp_path / "learned", 64)
    assert load_tokenizer(folder).tokenize("xq") == ["[UNK]"]
    others = PrepareConfig(min_document_chars=2)
    learn_wordpiece(str(path), others, VocabConfig(size=70), folder, 64)
    assert load_tokenizer(folder).tokenize("xq") == ["xq"]
    record = json.loads((folder / "learned_from.json").read_text())
    assert record["prepare"]["min_document_chars"] == 2
    for content, is_kept in ((json.dumps(record), True), ("{", False), ("[]", False), ("[1]", False)):
        (folder / "learned_from.json").write_text(content)
        before = (folder / "tokenizer.json").stat().st_ino
        learn_wordpiece(str(path), others, VocabConfig(size=70), folder, 64)
        assert ((folder / "tokenizer.json").stat().st_ino == before) == is_kept
    learn_wordpiece(str(path), others, VocabConfig(size=64), folder, 64)
    assert len(load_tokenizer(folder)) == json.loads((folder / "learned_from.json").read_text())["size"] == 64


def test_a_vocabulary_never_exceeds_its_size(tmp_path: Path) -> None:
    """A hundred letters, each at the start and inside of words, want 200 entries."""
    letters = [chr(first + i) for first, number in ((0x430, 32), (0x3B1, 24), (0x561, 38)) for i in range(number)]
    path = tmp_path / "text.txt"
    lines = [" ".join(letters[(i * 13 + j) % 94] + letters[(i + j * 29) % 94] for j in range(20)) for i in range(94)]
    path.write_text("\n".join(lines), encoding="utf-8")
    folder = learn_wordpiece(str(path), PREPARE, VocabConfig(size=140), tmp_path / "learned", 64)
    assert len(load_tokenizer(folder)) <= 140


def test_texts_that_make_no_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for content, message in (
        ("\n\n \n", "has no usable line"),
        ("abcdefghijklmnopqrstuvwxyz 0123456789 " * 3, "alphabet of 36 characters"),
    ):
        path.write_text(content)
        with pytest.raises(CorpusError, match=message):
            learn_wordpiece(str(path), PREPARE, VocabConfig(size=64), tmp_path / "learned", 64)
        assert [entry.name for entry in tmp_path.iterdir()] == ["text.txt"]


def test_a_tokenizer_of_other_things_than_words() -> None:
    """Models of proteins read one capital per residue; a tokenizer that makes them small letters is not theirs."""
    residues = "LAGVSERTIDPKQNFYMHWC"
    check_fit(make_tokenizer(*residues, do_lower_case=False), 25, "--base proteins")
    with pytest.raises(CorpusError, match="of its own entries; .* tokenizer_config.json, which may say that case"):
        check_fit(make_tokenizer(*residues), 25, "--base proteins")


def test_a_folder_is_made_anew_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    killed = tmp_path / f".tokenizer.{socket.gethostname()}-{2**22 + 1}-0a1b2c3d"  # no process has that number
    killed.mkdir()
    with replace_folder(Place(folder)) as temporary:
        (temporary / "vocab.txt").write_text("old")
        (temporary / LAST_FILE).write_text("{}")
    assert not killed.exists()
    with pytest.raises(KeyboardInterrupt), replace_folder(Place(folder)) as temporary:
        (temporary / "vocab.txt").write_text("new")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    assert (folder / "vocab.txt").read_text() == "old"
    with replace_folder(Place(folder)) as temporary:
        (temporary / LAST_FILE).write_text("{}")
    assert [*tmp_path.rglob("*")] == [folder, folder / LAST_FILE]
    (folder / "notes.md").write_text("mine")
    with pytest.raises(CorpusError, match=r"notes\.md is no part of the vocabulary"), replace_folder(Place(folder)):
        pass
    assert (folder / "notes.md").read_text() == "mine"
