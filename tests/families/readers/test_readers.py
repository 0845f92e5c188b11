"""Where the splits of a set are: files by their names, saved datasets, the hub."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from labelled_fixtures import write

from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import find_description, make_description
from domext_ray.families.readers.examples import LabelledText, Question, TaggedSentence
from domext_ray.families.sets import load_set
from domext_ray.families.splits import find_split_files


def test_files_go_by_the_first_pattern_that_matches(tmp_path: Path) -> None:
    for name in ("train.tsv.gz", "dev.tsv", "devel.tsv", "training.tsv", "test.old/part.tsv"):
        write(tmp_path / name, "a\tO\n")
    description = make_description("ner", "made", data=str(tmp_path))
    assert {k: v.name for k, v in find_split_files(description).items()} == {
        "train": "train.tsv.gz",
        "dev": "devel.tsv",
    }
    files = {"train": (str(tmp_path / "dev.*"),), "dev": ()}
    elsewhere = make_description("ner", "made", data=str(tmp_path / "test.old"), files=files)
    assert {k: v.name for k, v in find_split_files(elsewhere).items()} == {"train": "dev.tsv"}


def test_brackets_in_the_folder_name_are_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "set [1]"
    write(folder / "train.tsv", "a\tO\n")
    assert set(find_split_files(make_description("ner", "made", data=str(folder)))) == {"train"}


def test_a_saved_dataset_with_class_names(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "tokens": datasets.List(datasets.Value("string")),
            "ner_tags": datasets.List(datasets.ClassLabel(names=["O", "B-Drug", "I-Drug"])),
        }
    )
    rows = {"id": ["x", "y"], "tokens": [["Old", "aspirin"], ["No"]], "ner_tags": [[0, 1], [0]]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "validation": made}).save_to_disk(tmp_path / "saved")
    loaded = load_set(find_description("ner", str(tmp_path / "saved")))
    assert loaded.dev == (
        TaggedSentence("x", f"{tmp_path}/saved/validation:1", ("Old", "aspirin"), ("O", "B-Drug")),
        TaggedSentence("y", f"{tmp_path}/saved/validation:2", ("No",), ("O",)),
    )
    assert loaded.labels == ("Drug",) and loaded.name == "saved" and loaded.test == ()


def test_class_numbers_are_names_unless_the_labels_are_numbers(tmp_path: Path) -> None:
    """MRPC on the hub calls its classes otherwise than the files; SQuAD has an object of lists."""
    features = datasets.Features(
        {
            "sentence1": datasets.Value("string"),
            "sentence2": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["not_equivalent", "equivalent"]),
        }
    )
    rows = {"sentence1": ["A rose.", "Rain.", "?"], "sentence2": ["One rose.", "Sun.", "!"], "label": [1, 0, -1]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "validation": made, "test": made}).save_to_disk(tmp_path / "pairs")
    loaded = load_set(find_description("mrpc", str(tmp_path / "pairs")))
    assert [each.label for each in loaded.train if isinstance(each, LabelledText)] == ["1", "0"]
    assert loaded.test == () and "row left out: it has no label" in loaded.notes[0]
    named = load_set(make_description("classification", "made", data=str(tmp_path / "pairs")))
    assert named.labels == ("equivalent", "not_equivalent")


def test_a_saved_dataset_of_one_split(tmp_path: Path) -> None:
    rows = {
        "id": [str(i) for i in range(40)],
        "question": ["When?"] * 40,
        "context": [f"It was in 19{i:02}." for i in range(40)],
        "answers": [{"text": [f"19{i:02}"], "answer_start": [10]} for i in range(40)],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    halves = {"train": 0.5, "dev": 0.5}
    loaded = load_set(make_description("qa", "made", data=str(tmp_path / "saved"), fractions=halves))
    assert len(loaded.train) + len(loaded.dev) == 40 and loaded.dev
    for each in (*loaded.train, *loaded.dev):
        assert isinstance(each, Question)
        assert each.answer_texts == (f"19{int(each.id):02}",)


def test_a_saved_dataset_has_its_files_in_its_own_folder(tmp_path: Path) -> None:
    for name in ("saved", "other"):
        datasets.Dataset.from_dict({"words": [["a"]], "tags": [["O"]]}).save_to_disk(tmp_path / name)
    state = tmp_path / "saved" / "state.json"
    state.write_text(state.read_text().replace('"data-', '"../other/data-'))
    with pytest.raises(CorpusError, match=r"other/data-.* outside of it; a saved dataset has its data files"):
        load_set(make_description("ner", "made", data=str(tmp_path / "saved")))


def test_what_is_no_data_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for data, expected in (
        ("nobody/nothing:plain", "'nobody/nothing:plain' is no folder of labelled files here and could not be read"),
        ("no/such/folder", "'no/such/folder' is no folder here and no hub name"),
        (str(write(tmp_path / "train.tsv", "a\tO\n")), f"{tmp_path}/train.tsv is a file; give the folder"),
    ):
        with pytest.raises(CorpusError) as caught:
            load_set(make_description("ner", "made", data=data))
        assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
    write(tmp_path / "broken" / "dataset_dict.json", "{")
    with pytest.raises(CorpusError, match="could not be read as a dataset"):
        load_set(make_description("ner", "made", data=str(tmp_path / "broken")))
    datasets.Dataset.from_dict({"words": [["a"]]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(CorpusError, match=r"saved/train:1 has no column 'ner_tags' or .* or 'ner' or -1 for 'tags'"):
        load_set(make_description("ner", "made", data=str(tmp_path / "saved")))
