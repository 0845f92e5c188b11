"""Text of people: nobody is on both sides of the split, and no word that few people have becomes an entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from made_patients import NAME, NUM_PATIENTS, TERM, list_entries_of, number_of, write_notes
from row_files import SPECIALS, save_wordpiece, write_kinds, write_rows

from domext_ray.config.pretrain import PrepareConfig, PretrainConfig, ReplayConfig, VocabConfig
from domext_ray.errors import CorpusError
from domext_ray.storage import Place
from domext_ray.text.corpus.estimate import count_near_duplicates
from domext_ray.text.corpus.manifest import SPLITS, Manifest
from domext_ray.text.corpus.shards import prepare_corpus
from domext_ray.text.data.documents import read_grouped
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.sample import check_corpus
from domext_ray.text.data.sources import resolve_sources
from domext_ray.text.vocabulary.learn import learn_wordpiece
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.text.vocabulary.word_counts import Groups, add_groups, add_packed, keep_counts, pack_groups

pytestmark = pytest.mark.usefixtures("local_ray")
PREPARE = PrepareConfig(group_field="patient_id", held_out_frac=0.2, shard_bytes=8192, cross_documents=False)
ROWS = [{"patient_id": patient, "text": f"a note of some length, number {patient}"} for patient in ("a", "b")]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_notes(tmp_path_factory.mktemp("notes") / "notes.jsonl")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Path:
    """A tokenizer that has every word of the notes whole, so that rows can be read back."""
    words = sorted({word.strip(".") for word in notes.read_text().replace('"', " ").split()})
    entries = [*SPECIALS, ".", *words]
    return save_wordpiece(tmp_path_factory.mktemp("tokenizer"), entries)


def list_patients(manifest: Manifest, tokenizer_dir: Path) -> list[set[int]]:
    """The patients of the training rows, and those of the held-out rows."""
    tokenizer = load_tokenizer(tokenizer_dir)
    found = []
    for split in SPLITS:
        tables = [pa.ipc.open_file(shard.path).read_all() for shard in manifest.shards(split)]
        rows = [ids for table in tables for ids in table.column("input_ids").to_pylist()]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
        found.append({number_of(text[text.index("patient ") :]) for text in texts})
    return found


def test_nobody_is_on_both_sides(notes: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    """Whatever the tasks, the file and the kind of number are."""
    sides = []
    for prepare in (PREPARE, replace(PREPARE, shard_bytes=2**20)):
        manifest = prepare_corpus(str(notes), prepare, tokenizer_dir, 512, Place(tmp_path))
        train, held_out = list_patients(manifest, tokenizer_dir)
        assert not train & held_out and train | held_out == {*range(NUM_PATIENTS)}
        assert 0.1 < len(held_out) / NUM_PATIENTS < 0.3
        assert manifest.settings["held_out_by"] == "group" and manifest.dropped["duplicate"] >= NUM_PATIENTS
        sides.append(held_out)
    assert sides[0] == sides[1]
    half = notes.with_name("half.jsonl")  # other patients' rows decide nothing
    half.write_text("".join(line + "\n" for line in notes.read_text().splitlines()[::2]))
    made = prepare_corpus(str(half), PREPARE, tokenizer_dir, 512, Place(tmp_path))
    assert list_patients(made, tokenizer_dir)[1] <= sides[0]


def test_without_groups_these_notes_are_on_both_sides(notes: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    manifest = prepare_corpus(str(notes), replace(PREPARE, group_field=""), tokenizer_dir, 512, Place(tmp_path))
    train, held_out = list_patients(manifest, tokenizer_dir)
    assert len(train & held_out) > 10


def test_few_patients_are_divided(tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If none falls into the share, four of them are held out, of fewer a quarter; one patient is nobody to test on."""
    for number, expected in ((2, 1), (6, 1), (12, 3), (86, 4)):
        few = tmp_path / f"{number}.jsonl"
        texts = [f"patient {i % number}. a note with the number {i}" for i in range(172)]
        rows = [{"patient_id": i % number, "text": text} for i, text in enumerate(texts)]
        write_rows(few, rows)
        prepare = replace(PREPARE, held_out_frac=0.0001, unknown="allow")
        prepare_corpus(str(few), prepare, tokenizer_dir, 64, Place(tmp_path / "cache"))
        assert f"held out: all rows of {expected} of {number} different 'patient_id'" in capsys.readouterr().err
    write_rows(few, [{**row, "patient_id": 0} for row in rows])
    with pytest.raises(CorpusError, match="has rows of 1 different 'patient_id', .* so one of the two has none; give"):
        prepare_corpus(str(few), prepare, tokenizer_dir, 64, Place(tmp_path / "cache"))


def read_groups(path: Path) -> list[tuple[str, int]]:
    tasks = resolve_sources(str(path), PREPARE).tasks
    return [pair for task in tasks for pair in read_grouped(task, PREPARE, Dropped())]


def test_a_group_is_one_in_every_kind_of_file(tmp_path: Path) -> None:
    first, *others = (read_groups(path) for path in write_kinds(tmp_path, ROWS))
    assert [text for text, _ in first] == [row["text"] for row in ROWS] and first[0][1] != first[1][1]
    assert others == [first] * 7


def test_a_row_without_a_group_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for row, fault in (
        ({}, "has no 'patient_id'"),
        ({"patient_id": None}, "has no 'patient_id'"),
        ({"patient_id": "  "}, "has no 'patient_id'"),
        ({"patient_id": True}, "has neither text nor a whole number as 'patient_id'"),
        ({"patient_id": 1.5}, "has neither text nor a whole number"),
        ({"patient_id": ["Smith"]}, "has neither text nor a whole number"),
    ):
        write_rows(path, [*ROWS, {**row, "text": "a note of some length"}])
        with pytest.raises(CorpusError) as raised:
            check_corpus(str(path), PREPARE)
        assert str(raised.value).startswith(f"{path}:3 {fault}") and "--prepare.group_field" in str(raised.value)
        assert "Smith" not in str(raised.value)


def test_numbers_are_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    names = ["7", "7.0", '"7"', '" 7 "', "9" * 5000]
    path.write_text("".join(f'{{"patient_id": {name}, "text": "a note of some length"}}\n' for name in names))
    groups = [group for _, group in read_groups(path)]
    assert len({*groups[:4]}) == 1 and len({*groups}) == 2


def test_general_text_is_nobodys() -> None:
    config = PretrainConfig(corpus="x.jsonl", prepare=PREPARE, replay=ReplayConfig(corpus="wiki.txt"))
    assert [config.prepare_for(part).grouped_by for part in config.parts] == [""]


def test_words_of_few_people_are_not_there(notes: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    """Twenty-four patients have the term, one has the name, more often than anyone has the term."""
    tokenizer_json = load_tokenizer(tokenizer_dir).backend_tokenizer.to_str()
    for min_groups, shard_bytes in ((1, 8192), (24, 8192), (25, 8192), (24, 2**20)):
        prepare = replace(PREPARE, shard_bytes=shard_bytes)
        sources = resolve_sources(str(notes), prepare)
        with keep_counts(sources, prepare, tokenizer_json, Place(tmp_path), min_groups) as words:
            pass
        assert (NAME in words) == (min_groups == 1) and (TERM in words) == (min_groups <= 24)


def test_groups_of_words_are_counted_up_to_what_is_enough() -> None:
    first: Groups = {}
    for group in (5, 2**64 - 1, 5, 7, 8):
        add_groups(first, "word", (group,), 3)
    add_groups(first, "rare", (5,), 3)
    assert first == {"word": (5, 2**64 - 1, 7), "rare": (5,)}
    joined: Groups = {"rare": (9,)}
    add_packed(joined, ["rare", "word"], pack_groups(first, ["rare", "word"]), 3)
    assert joined == {"word": (5, 2**64 - 1, 7), "rare": (9, 5)}


def test_a_vocabulary_without_a_base_has_no_name(notes: Path, tmp_path: Path) -> None:
    made = {
        enough: [*load_tokenizer(learn_wordpiece(str(notes), PREPARE, vocab, tmp_path / str(enough), 64)).get_vocab()]
        for enough in (0, 1)
        for vocab in [VocabConfig(size=300, min_groups=enough)]
    }
    assert not list_entries_of(NAME, made[0]) and TERM in made[0]
    assert NAME in made[1]


def test_a_dry_run_divides_its_sample_by_group(notes: Path) -> None:
    """None of a held-out patient's copied paragraphs is in the training part of the sample."""
    found = count_near_duplicates(check_corpus(str(notes), PREPARE, to_end=True))
    assert found is not None and found.num_similar == 0
    assert 0 < found.num_held_out < found.num_train
    few = replace(PREPARE, held_out_frac=1e-9)
    found = count_near_duplicates(check_corpus(str(notes), few, to_end=True))
    assert found is not None and found.num_similar == 0 and 0 < found.num_held_out < found.num_train


def test_what_a_sample_does_not_show_is_told_before_anything_is_learned(
    tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows of a patient are in a stretch of the file that no sample has; and `none` changes no document."""
    path = tmp_path / "x.jsonl"
    rows = [{"text": f"a note of some length, number {i}", "patient_id": i, "image": "0" * 1000} for i in range(1500)]
    write_rows(path, [*rows[:71], {**rows[71], "patient_id": 70}, *rows[72:]])
    counted = check_corpus(str(path), PrepareConfig()).dropped.values
    assert {*counted["patient_id"].values()} == {1}
    tokenizer_json, prepare = load_tokenizer(tokenizer_dir).backend_tokenizer.to_str(), PrepareConfig(unknown="allow")
    sources, words, vocab = resolve_sources(str(path), prepare), tmp_path / "words", VocabConfig(size=200)
    said = replace(prepare, group_field="none")
    refused = pytest.raises(CorpusError, match="1,499 different 'patient_id' in 1,500 rows .*--vocab.size 200 learns")
    with refused, keep_counts(sources, prepare, tokenizer_json, Place(tmp_path), learned=vocab.learned_by):
        pass
    with keep_counts(sources, said, tokenizer_json, Place(tmp_path), learned=vocab.learned_by) as words_of_text:
        assert "note" in words_of_text
    with pytest.raises(CorpusError, match="--vocab.size 200 learns new words"):
        learn_wordpiece(str(path), prepare, vocab, words, 64)
    assert not words.exists()
    learn_wordpiece(str(path), said, vocab, words, 64)
    assert "note" in load_tokenizer(words).get_vocab()
    capsys.readouterr()
    manifest = prepare_corpus(str(path), prepare, tokenizer_dir, 64, Place(tmp_path))
    assert "has 1,499 different 'patient_id' in 1,500 rows" in capsys.readouterr().err
    assert prepare_corpus(str(path), said, tokenizer_dir, 64, Place(tmp_path)).folder == manifest.folder
