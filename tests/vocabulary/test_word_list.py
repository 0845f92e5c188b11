"""Lists of new words: how lines are read, and what is told of those that can be no new word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_tokenizers import MAKERS
from row_files import SPECIALS, save_wordpiece

from domext_ray.config.options.build import identity_of
from domext_ray.config.pretrain import PrepareConfig, PretrainConfig, RunConfig, TrainConfig, VocabConfig
from domext_ray.errors import CorpusError
from domext_ray.pretraining.inputs import run_preparation, run_vocabulary
from domext_ray.text.data.documents import clean_text
from domext_ray.text.vocabulary.extension import BaseVocabulary, extend_tokenizer, read_base_vocabulary
from domext_ray.text.vocabulary.learn import count_new_words
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.text.vocabulary.word_list import read_words

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_known(folder: Path, **options: bool) -> BaseVocabulary:
    entries = [*SPECIALS, *LETTERS, *LETTERS.upper(), *(f"##{char}" for char in LETTERS), "brain", "##us", "[unused1]"]
    return read_base_vocabulary("tiny", load_tokenizer(save_wordpiece(folder, entries, **options)), len(entries))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> BaseVocabulary:
    return make_known(tmp_path_factory.mktemp("base"))


def write(folder: Path, *lines: str) -> str:
    path = folder / "words.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_word_is_read_as_text_is(known: BaseVocabulary, tmp_path: Path) -> None:
    """What a list says and what a text says become one token, in whatever form either of them is written."""
    cased = make_known(tmp_path / "cased", do_lower_case=False)
    roberta = load_tokenizer(MAKERS["roberta"](tmp_path / "roberta"))
    plain = read_base_vocabulary("bytes", roberta, max(roberta.get_vocab().values()) + 1)
    for base, written, name in (
        (known, "Zoë", "zoe"),
        (known, "Zoe\u0308", "zoe"),
        (known, "\ufeff neuron\u00a0", "neuron"),
        (known, "##Lamus", "##lamus"),
        (cased, "Ne\u0301phrose", "Néphrose"),
        (cased, "k\u2126m", "kΩm"),
        (cased, "\u212aelvin", "Kelvin"),
        (cased, "\u212bngstro\u0308m", "Ångström"),
        (cased, "neu\u00adron", clean_text("neu\u00adron")),
        (plain, "Ne\u0301phrose", "Néphrose"),
        (plain, "##k\u2126", "##kΩ"),
    ):
        told = list[str]()
        words = read_words(write(tmp_path, "other", written), "vocab.words", base, (), told.append)
        assert words == ["other", name]
        assert told == [] if name == written else "1 of 2 words are taken as text is read" in told[0]
        tokenizer, text = extend_tokenizer(base, words), clean_text(written.removeprefix("##"))
        entry = base.family.to_entry(name)
        if not name.startswith("##"):
            assert entry in tokenizer.tokenize(f"the {text}"), written


def test_entries_of_another_tokenizers_vocabulary_are_no_words(known: BaseVocabulary, tmp_path: Path) -> None:
    roberta = load_tokenizer(MAKERS["roberta"](tmp_path / "roberta"))
    plain = read_base_vocabulary("bytes", roberta, max(roberta.get_vocab().values()) + 1)
    for base in (known, plain):
        for mark in "▁Ġ":
            path = write(tmp_path, f"{mark}velmarine", "nephros")
            with pytest.raises(
                CorpusError, match=rf"1 malformed \(line 1: '{mark}velmarine' begins with '{mark}', whic"
            ):
                read_words(path, "vocab.words", base)
            assert read_words(path, "vocab.words", base, ("malformed",)) == ["nephros"]
        maltese = ["Ġorġina", "kotbiet", "skejjel", "ġardinar"]
        names = [base.family.cut_name(word)[0] for word in maltese]
        assert read_words(write(tmp_path, *maltese), "vocab.words", base) == names


def test_all_faults_are_told_at_once(known: BaseVocabulary, tmp_path: Path) -> None:
    lines = ["velmarine", "Velmarine", "co-opt", "[PAD]", "brain", "", "basal ganglia", "velmarine", "</s>", "Brain"]
    path = write(tmp_path, *lines)
    with pytest.raises(CorpusError) as refused:
        read_words(path, "vocab.words", known)
    assert str(refused.value) == (
        f"--vocab.words {path!r} has 2 known (line 5: 'brain' is in the base's vocabulary already; also line 10), "
        "2 doublets (line 2: 'Velmarine' stands in line 1 already; also line 8), "
        "2 special (line 4: '[PAD]' is a special token; also line 9), "
        "3 malformed (line 3: 'co-opt' is 3 words to the base's tokenizer; also lines 6, 7); "
        "mend these lines, or leave them out with --vocab.skip known,doublets,special,malformed."
    )
    with pytest.raises(CorpusError, match=r"has 3 malformed .* --vocab.skip known,doublets,special,malformed\.$"):
        read_words(path, "vocab.words", known, ("known", "doublets", "special"))


@pytest.mark.parametrize(
    ("line", "kind", "fault"),
    [
        ("other", "doublets", "'other' stands in line 1 already"),
        ("Other", "doublets", "'Other' stands in line 1 already"),
        ("", "malformed", "'' is empty"),
        ("\t ", "malformed", "is empty"),
        ("##", "malformed", "'##' is empty"),
        ("\u0301", "malformed", "is 0 words to the base's tokenizer"),
        ("##\u0301", "malformed", "is 0 words"),
        ("##丘", "malformed", "is 2 words"),
        ("a\tb", "malformed", "is 2 words"),
        ("x" * 101, "malformed", f"'{'x' * 40}…' has more than 100 characters"),
        ("[MASK]", "special", "'[MASK]' is a special token"),
        ("<mask>", "special", "is a special token"),
        ("[unused1]", "special", "is a special token"),
        ("brain", "known", "'brain' is in the base's vocabulary already"),
        ("Bráin", "known", "'Bráin' is in the base's vocabulary already, as 'brain'"),
        ("##us", "known", "is in the base's vocabulary already"),
    ],
)
def test_kinds_of_faults(line: str, kind: str, fault: str, known: BaseVocabulary, tmp_path: Path) -> None:
    path = write(tmp_path, "other", line, "##lamus")
    with pytest.raises(CorpusError) as refused:
        read_words(path, "vocab.words", known)
    assert f" has 1 {kind} (line 2: " in str(refused.value) and fault in str(refused.value)
    told = list[str]()
    words = read_words(path, "vocab.words", known, (kind,), told.append)  # type: ignore[arg-type]
    assert words == ["other", "##lamus"]
    assert len(told) == 1 and f"1 of 3 lines are left out: 1 {kind} (line 2: " in told[0]


def test_a_vocabulary_file_is_a_list(known: BaseVocabulary, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of exBERT begins with special tokens, and has letters and words of the base."""
    path = write(tmp_path, *SPECIALS, *LETTERS, *(f"##{char}" for char in LETTERS), "brain", "thalamus", "##genic", "")
    everything = VocabConfig(words=path, skip=("known", "doublets", "special", "malformed"))
    assert count_new_words(everything, known) == 2
    told = capsys.readouterr().out
    assert told.startswith("note: ") and "58 of 60 lines are left out: 53 known" in told and "5 special" in told
    with pytest.raises(CorpusError, match=r"has no line that --vocab.skip leaves; give new words"):
        count_new_words(VocabConfig(words=write(tmp_path, "brain"), skip=("known",)), known)
    protected = VocabConfig(protected=write(tmp_path, "brain", "amygdala", "amygdala"), size=9, skip=("doublets",))
    assert count_new_words(protected, known) == 9, "a protected word may be known"


def test_what_a_list_skips_is_in_a_runs_identity() -> None:
    skipping = VocabConfig(words="w.txt", skip="known,special")
    assert skipping.skip == ("known", "special") and identity_of(skipping)["skip"] == ["known", "special"]
    assert "skip" not in identity_of(VocabConfig(words="w.txt")), "runs that were made before the option go on"


def test_lists_that_cannot_be_read(known: BaseVocabulary, tmp_path: Path) -> None:
    for content, message in (
        (None, "cannot be read as UTF-8"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "is empty; give one"),
    ):
        path = tmp_path / "list.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CorpusError, match=message):
            read_words(str(path), "vocab.words", known)
    path.write_bytes(b"\xef\xbb\xbfneuron\r\ncortex\r\n")
    assert read_words(str(path), "vocab.words", known) == ["neuron", "cortex"]
    path.write_bytes(b"neuron\rcortex\r")
    assert read_words(str(path), "vocab.words", known) == ["neuron", "cortex"]


def test_words_that_the_text_lacks_are_told(
    local_ray: None, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the patient {i} has a thalamus in the brain\n" for i in range(60)))
    options = PretrainConfig(
        base=str(tiny_base_folder),
        corpus=str(text),
        vocab=VocabConfig(words=write(tmp_path, "Thalamus", "amygdala", "##genic", "thalamus"), skip="doublets"),
        prepare=PrepareConfig(min_document_chars=5),
        run=RunConfig(dir=str(tmp_path / "runs"), name="words"),
        train=TrainConfig(seq_length=32),
    )
    dry = replace(options, dry_run=True)
    for run in (run_preparation, run_vocabulary):
        run(dry)
        told = capsys.readouterr().out
        assert told.count("1 of 4 lines are left out: 1 doublets (line 4: 'thalamus' stands in line 1 already)") == 1
        assert told.count("first line 1, 'Thalamus' as 'thalamus'") == 1
        with pytest.raises(CorpusError, match="has 1 doublets"):
            run(replace(dry, vocab=replace(options.vocab, skip=())))
    assert not (tmp_path / "runs").exists()
    run_preparation(options)
    said = "note: 2 of 3 new words are in no training row and learn nothing: amygdala, ##genic."
    assert said in capsys.readouterr().out
    run_vocabulary(replace(options, run=replace(options.run, name="vocab")))
    assert "given words that the text never has: 2 (for example amygdala, ##genic)" in capsys.readouterr().out
