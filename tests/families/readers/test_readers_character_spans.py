"""Entities from stretches of characters: JSON Lines of the usual tools, and folders of brat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labelled_fixtures import dump_lines, load, refuse, write
from transformers import PreTrainedTokenizerBase

from domext_ray.families.described_sets import make_description
from domext_ray.families.readers.examples import AnnotatedText, Entity, LabelledSet, RawSentence, ScatteredEntity
from domext_ray.families.sets import load_set
from domext_ray.families.tagging import TokenClassificationTask
from domext_ray.families.task import TaskOptions

TEXT = "Old gout, heart disease."
GOUT, HEART = Entity(4, 8, "Disease"), Entity(10, 23, "Disease")
SHAPES: dict[str, Any] = {
    "doccano": {"label": [[4, 8, "Disease"], [10, 23, "Disease"]]},
    "spacy": {"entities": [[10, 23, "Disease"], [4, 8, "Disease"]]},
    "prodigy": {"spans": [{"start": each.start, "end": each.end, "label": each.label} for each in (GOUT, HEART)]},
    "doccano relations": {
        "entities": [{"id": 1, "start_offset": e.start, "end_offset": e.end, "label": e.label} for e in (GOUT, HEART)]
    },
    "label studio": {
        "label": [
            {"start": e.start, "end": e.end, "labels": [e.label], "text": TEXT[e.start : e.end]} for e in (GOUT, HEART)
        ]
    },
}


def test_the_same_tags_from_the_shapes_of_all_tools(tmp_path: Path) -> None:
    for i, shape in enumerate(SHAPES.values()):
        folder = tmp_path / str(i)
        rows = dump_lines([{"id": "a", "text": TEXT, **shape}])
        made = load(folder, "ner", {"train.jsonl": rows}, reader="spans")
        (sentence,) = made.train
        assert isinstance(sentence, RawSentence) and sentence.id == "a" and sentence.text == TEXT
        assert sentence.words == ("Old", "gout", ",", "heart", "disease", ".")
        assert sentence.tags == ("O", "B-Disease", "O", "B-Disease", "I-Disease", "O")
        assert made.labels == ("Disease",) and not sentence.misplaced
        assert not [each for each in made.notes if "entity" in each]


ODD = [
    (Entity(4, 7, "Disease"), "begins or ends inside a word"),
    (Entity(10, 15, "Organ"), "overlaps another, and a word has one tag"),
    (Entity(20, 99, "Disease"), "is not where its offsets say"),
]


def test_what_no_tags_say_is_kept_and_scored(tmp_path: Path, bert: PreTrainedTokenizerBase) -> None:
    for i, (odd, fault) in enumerate(ODD):
        folder = tmp_path / str(i)
        rows = [{"text": TEXT, "spans": [[each.start, each.end, each.label] for each in (HEART, odd)]}]
        files: dict[str, str | bytes] = {f"{split}.jsonl": dump_lines(rows) for split in ("train", "dev", "test")}
        made = load(folder, "ner", files, reader="spans")
        sentence = made.test[0]
        assert isinstance(sentence, RawSentence)
        assert sentence.tags == ("O", "O", "O", "B-Disease", "I-Disease", "O") and sentence.misplaced == (odd,)
        assert f"1 x entity left out: it {fault} ({folder}/train.jsonl:1)." in made.notes
        assert any(each.startswith(f"2 x entity kept to be scored: it {fault} (") for each in made.notes)
        task = TokenClassificationTask(made, bert, TaskOptions(max_length=32))
        score = task.score(made.test, [{"tags": sentence.tags}])
        assert score.get("precision.micro") == 1.0 and score.get("recall.micro") == 0.5
        assert f": the entity {fault} (" in refuse(folder, "ner", {}, reader="spans", strict=True)


NOTES = "T1\tDisease 4 8\tgout\nR1\tCauses Arg1:T1 Arg2:T2\nT2\tDisease 10 15;16 23\theart disease\n#1\tNote T1\tyes\n"


def write_brat(folder: Path, text: str = "Old gout, heart\ndisease.\n", notes: str = NOTES) -> Path:
    write(folder / "b.txt", text)
    write(folder / "b.ann", notes)
    return folder


def test_brat_has_a_folder_per_split(tmp_path: Path) -> None:
    """What brat cuts at the end of a line is one entity."""
    for i, task in enumerate(["ner", "nested_ner"]):
        folder = tmp_path / str(i)
        for split in ("train", "dev"):
            write_brat(folder / split)
            write(folder / split / "a.txt", "Nobody read this.")
        write(folder / "test" / "c.txt", "A rose.")
        write(folder / "test" / "c.ann", "")
        made = load_set(make_description(task, "made", reader="brat", data=str(folder)))
        (text,), (rose,) = made.train, made.test
        assert text.id == "b" and text.source == f"{folder}/train/b.txt:1" and rose.id == "c"
        if isinstance(text, RawSentence):
            assert text.tags == ("O", "B-Disease", "O", "B-Disease", "I-Disease", "O")
        else:
            assert isinstance(text, AnnotatedText) and text.entities == (GOUT, HEART)
        assert any(each.startswith("2 x document left out: it has no .ann file beside it") for each in made.notes)


def test_a_scattered_entity_of_brat_is_told_and_no_prediction_equals_it(tmp_path: Path) -> None:
    notes = "T1\tDisease 0 3;10 15\tOld heart\nT2\tDisease 4 8\tgout\n"
    write_brat(tmp_path / "train", notes=notes)
    write_brat(tmp_path / "dev", notes=notes)
    made = load_set(make_description("nested_ner", "made", reader="brat", data=str(tmp_path)))
    (text,) = made.dev
    assert isinstance(text, AnnotatedText)
    assert text.entities == (GOUT,) and text.misplaced == (ScatteredEntity(0, 15, "Disease"),)
    assert Entity(0, 15, "Disease") not in text.gold
    assert f"1 x entity left out: it has several stretches ({tmp_path}/train/b.ann:1)." in made.notes
    assert f"1 x entity kept to be scored: it has several stretches ({tmp_path}/dev/b.ann:1)." in made.notes


def list_ids(made: LabelledSet) -> list[list[str]]:
    return [[each.id for each in split] for split in (made.train, made.dev, made.test)]


def test_documents_of_brat_may_be_in_folders_of_a_split(tmp_path: Path) -> None:
    """However deep, also where the split's own folder has none; but hidden ones, and each once."""
    for folder in ("train", "train/part2", "train/part2/more", "dev/x/y", "train/.ipynb_checkpoints"):
        write_brat(tmp_path / folder)
    write_brat(tmp_path / "elsewhere")
    (tmp_path / "train" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / "part3").symlink_to(tmp_path / "train" / "part2")
    write(tmp_path / "train" / "part2" / "._b.ann", b"\x00")
    write(tmp_path / "train" / "part2" / "orphan.ann", "T1\tDisease 0 3\tOld\n")
    made = load_set(make_description("ner", "made", reader="brat", data=str(tmp_path)))
    assert list_ids(made) == [["b", "linked/b", "part2/b", "part2/more/b"], ["x/y/b"], []]
    assert made.train[2].source == f"{tmp_path}/train/part2/b.txt:1"
    orphan = f"1 x document left out: it has no .txt file beside it ({tmp_path}/train/part2/orphan.ann:1)."
    assert [each for each in made.notes if "document left out" in each] == [orphan]


def test_a_folder_of_brat_that_is_one_split_leaves_the_others_alone(tmp_path: Path) -> None:
    for folder in (".", "first", "second/half", "dev", "test/a"):
        write_brat(tmp_path / folder)
    made = load_set(make_description("ner", "made", reader="brat", data=str(tmp_path)))
    assert list_ids(made) == [["b", "first/b", "second/half/b"], ["b"], ["a/b"]]
    for folder in (".", "first", "second/half", "second/other"):
        write_brat(tmp_path / "named" / folder)
    files = {"train": "first", "dev": ".", "test": "second/half"}
    made = load_set(make_description("ner", "made", reader="brat", files=files, data=str(tmp_path / "named")))
    assert list_ids(made) == [["b"], ["b", "second/other/b"], ["b"]]
    for i, name in enumerate(["Train", "devel", "TEST"]):
        for folder in (f"{i}/a", f"{i}/dev", f"{i}/{name}"):
            write_brat(tmp_path / "odd" / folder)
        message = refuse(tmp_path / "odd" / str(i), "ner", {}, reader="brat")
        assert message.startswith(f"{name} is named as a {('train', 'dev', 'test')[i]}, and would be read with all of ")
    for folder in ("dev", "test"):
        write_brat(tmp_path / "held" / folder)
    message = refuse(tmp_path / "held", "ner", {}, reader="brat")
    assert "has no train (looked for train, .)" in message, "what is of dev is not of train, too"
    write(tmp_path / "held" / "README.txt", "About it.")
    assert "has no train (looked for train, .)" in refuse(tmp_path / "held", "ner", {}, reader="brat")
    write(tmp_path / "held" / "train" / "a.txt", "Nobody read this.")
    message = refuse(tmp_path / "held", "ner", {}, reader="brat")
    assert "has no example; 1 x document left out: it has no .ann file beside it (train/a.txt:1)." in message


def test_offsets_of_brat_may_count_utf_16(tmp_path: Path) -> None:
    """As tools in Java write them; what lies between stretches is counted so, too."""
    notes = "T1\tDisease 7 11\tgout\nT2\tDisease 13 18;19 26\theart disease\nT3\tDisease 3 6;13 18\tOld heart\n"
    for split in ("train", "dev"):
        write_brat(tmp_path / split, "\U0001f525 Old gout, heart\ndisease.\n", notes)
    made = load_set(make_description("nested_ner", "made", reader="brat", data=str(tmp_path)))
    (text,) = made.train
    assert isinstance(text, AnnotatedText)
    assert [text.text[each.start : each.end] for each in text.entities] == ["gout", "heart\ndisease"]
    notes = " ".join(made.notes)
    assert f"4 x entity moved: it has offsets in UTF-16 code units ({tmp_path}/train/b.ann:1, " in notes
    assert f"1 x entity left out: it has several stretches ({tmp_path}/train/b.ann:3)" in notes


def test_a_folder_of_brat_without_folders_is_cut(tmp_path: Path) -> None:
    for i in range(40):
        write(tmp_path / f"{i}.txt", f"gout {i}")
        write(tmp_path / f"{i}.ann", "T1\tDisease 0 4\tgout\n")
    made = load_set(
        make_description("ner", "m", reader="brat", fractions={"train": 0.5, "dev": 0.5}, data=str(tmp_path))
    )
    assert len(made.train) + len(made.dev) == 40 and made.train and made.dev


def test_a_bad_line_of_brat_is_one_sentence(tmp_path: Path) -> None:
    write_brat(tmp_path / "train", notes="T1\tDisease 4 8\tgout\nT2 Disease 10 15 heart\n")
    message = refuse(tmp_path, "ner", {}, reader="brat")
    assert message.startswith("train/b.ann:2 has another layout: an entity is its id, a tab, its type and places")
