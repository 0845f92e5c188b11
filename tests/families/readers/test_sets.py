"""Descriptions of sets, how splits are cut, and which labels there are."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path
from typing import Any

import make_repair_notes
import pytest
from labelled_fixtures import dump_lines, load, refuse, write

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.families.described_sets import (
    SETS,
    find_description,
    find_set,
    list_shipped,
    make_description,
    read_description,
)
from domext_ray.families.readers.examples import SPLITS, LabelledText, TaggedSentence
from domext_ray.families.registry import FAMILIES
from domext_ray.families.sets import load_labelled, load_set, read_split

SHIPPED = (
    "bc5cdr chemprot chip_cdn chip_ctc chip_sts cmeee cmeie cmrc code_entities cola euadr gad kuake_qic kuake_qqr "
    "kuake_qtr mnli mrpc ncbi_disease pubmedqa qnli qqp repair_notes rte scicite squad_v1 squad_v2 sst2 sts_b swag"
).split()


def test_shipped_descriptions() -> None:
    """Every YAML is well-formed and says what it is in a comment; no family is without metric."""
    assert list(list_shipped()) == SHIPPED
    for name, path in list_shipped().items():
        description = find_description(name, "anywhere")
        assert description.name == name and description.path == str(path)
        assert path.read_text(encoding="utf-8").startswith("# ")
        assert description.task in FAMILIES and name not in FAMILIES
    assert find_description("cola", "").metric == "matthews"
    assert find_description("sts_b", "").metric == "spearman"
    assert find_description("mrpc", "").metric == "f1.positive"
    assert find_description("gad", "").metric == "f1.micro"
    assert find_description("bc5cdr", "").metric == "f1.micro"


def test_a_near_name_is_offered_and_a_missing_file_named(tmp_path: Path) -> None:
    for wrong, near in (("NER", "ner"), ("bc5-cdr", "bc5cdr"), ("code_entites", "code_entities")):
        with pytest.raises(ConfigError, match=rf"^--task is {wrong!r}; did you mean {near}\?"):
            find_description(wrong, "anywhere")
    with pytest.raises(ConfigError, match="did you mean columns\\?"):
        read_description(write(tmp_path / "set.yaml", "task: ner\ncolums: {}\n"))
    with pytest.raises(ConfigError, match=r"mine.yaml cannot be read \(No such file"):
        read_description(tmp_path / "mine.yaml")


CBLUE = {
    "chip_ctc": ("CHIP-CTC_train.json", {"id": "s1", "text": "年龄", "label": "Age"}, ("年龄", None, "Age")),
    "kuake_qic": ("KUAKE-QIC_train.json", {"query": "头疼怎么办", "label": "治疗"}, ("头疼怎么办", None, "治疗")),
    "kuake_qtr": ("KUAKE-QTR_train.json", {"id": 1, "query": "咳嗽", "title": "咳", "label": "3"}, ("咳嗽", "咳", "3")),
    "kuake_qqr": ("KUAKE-QQR_train.json", {"id": 1, "query1": "咳", "query2": "嗽", "label": 2}, ("咳", "嗽", "2")),
    "chip_sts": (
        "CHIP-STS_train.json",
        {"text1": "咳", "text2": "嗽", "label": "1", "category": "c"},
        ("咳", "嗽", "1"),
    ),
    "scicite": ("train.jsonl", {"text": "as in [3]", "label": "method", "metadata": {}}, ("as in [3]", None, "method")),
    "rte": ("train.json", {"sentence1": "a", "sentence2": "b", "label": "entailment"}, ("a", "b", "entailment")),
    "qnli": ("train.json", {"question": "a", "sentence": "b", "label": "entailment"}, ("a", "b", "entailment")),
    "qqp": ("train.json", {"question1": "a", "question2": "b", "is_duplicate": "0"}, ("a", "b", "0")),
    "sst2": ("train.json", {"sentence": "a", "label": 1}, ("a", None, "1")),
}


def test_rows_of_shipped_descriptions(tmp_path: Path) -> None:
    for name, (file, row, expected) in CBLUE.items():
        folder = tmp_path / name
        for each in (file, file.replace("train", "dev")):
            write(folder / each, dump_lines([row]))
        made = load_set(find_description(name, str(folder))).train[0]
        assert isinstance(made, LabelledText)
        assert (made.text, made.pair, made.label) == expected


def test_mnli_takes_the_mismatched_part_as_test(tmp_path: Path) -> None:
    content = "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA cat.\tAn animal.\tneutral\tentailment\n"
    for name in ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"):
        write(tmp_path / name, content)
    made = load_set(find_description("mnli", str(tmp_path)))
    assert made.test[0].label == "entailment"  # type: ignore[union-attr]
    assert made.labels == ("entailment", "neutral", "contradiction")


def test_what_describes_a_set(tmp_path: Path) -> None:
    """A family's defaults, a folder's own file, a shipped name, a path."""
    assert find_description("ner", str(tmp_path)).name == tmp_path.name
    assert find_description("ner", "owner/name").name == "owner/name"
    write(tmp_path / "set.yaml", "task: ner\nscheme: BIOES\nfiles: {dev: [a.*, b.tsv]}\ncolumns: {tokens: form}\n")
    found = find_description("ner", str(tmp_path))
    assert (found.name, found.path) == (tmp_path.name, f"{tmp_path}/set.yaml")
    assert found.scheme == "bioes" and found.reader == "conll" and found.metric == "f1.micro"
    assert found.files == {"train": ("train.*",), "dev": ("a.*", "b.tsv"), "test": ("test.*",)}
    assert found.columns["tokens"] == ("form",) and found.columns["tags"] == ("ner_tags", "tags", "labels", "ner", -1)
    assert find_description(f"{tmp_path}/set.yaml", str(tmp_path)) == found
    with pytest.raises(ConfigError, match=r"set.yaml describes a set for ner, not for 'qa'"):
        find_description("qa", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--task is 'nre'; did you mean rte\? It must be a family \(ner, .*bc5cdr"):
        find_description("nre", str(tmp_path))


BAD_YAML = [
    ("task: nre", "task is 'nre'; it must be one of ner, "),
    ("labels: [a]", "must be a mapping with a key 'task'"),
    ("- ner", "must be a mapping with a key 'task'"),
    ("task: [", "line 1: this is no YAML"),
    ("task: ner\nmetric: a\nmetric: b", "line 3: 'metric' stands here a second time (line 2 has it)"),
    ("task: !include other.yaml", "line 1: the tag '!include' is not allowed"),
    ("task: ner\nshuffle: 1", "'shuffle' is no key of a description; use name, task, "),
    (
        "task: classification\nlabels: [yes, no]",
        "labels is [True, False]; it must be a list of different labels (quote",
    ),
    ("task: ner\nlabels: [a, a]", "labels is ['a', 'a']; it must be a list of different labels"),
    ("task: ner\nreader: squad", "reader is 'squad'; it must be one of conll, records"),
    ("task: ner\nscheme: iob3", "scheme is 'iob3'; it must be one of auto, iob1"),
    ("task: nested_ner\nends: closed", "ends is 'closed'; it must be one of auto, "),
    ("task: ner\nmetric: accuracy", "metric is 'accuracy'; it must be one of f1.*"),
    ("task: classification\nmetric: f1", "metric is 'f1'; it must be one of accuracy, "),
    (
        "task: classification\nmetric: f1.positive",
        "metric is 'f1.positive'; it must be another one unless positive_label",
    ),
    ("task: relation\nlabels: [a, b]\nnegative_label: c", "negative_label is 'c'; it must be one of labels (a, b)"),
    (
        "task: ner\nfiles: {training: a}",
        "files is {'training': 'a'}; it must be file name patterns for train, dev, test",
    ),
    ("task: ner\ncolumns: {words: a}", "a key of columns is 'words'; it must be one of id, tokens, tags, document"),
    ("task: ner\ncolumns: {tokens: []}", "columns is {'tokens': []}; it must be a mapping to column names or numbers"),
    (
        "task: ner\nfractions: {train: 0.5, dev: 0.6}",
        "fractions is {'train': 0.5, 'dev': 0.6}; it must be shares that add",
    ),
    ("task: ner\nfractions: {train: 1, dev: 0}", "it must be shares above 0"),
    ("task: relation\nmarks: [A]", "marks is ['A']; it must be two different marks"),
    ("task: relation\nmarks: [[a, b, c], B]", "it must be two different marks"),
    ("task: qa\nno_answer: 1", "no_answer is 1; it must be true or false"),
    ("task: qa\nrule: bleu", "rule is 'bleu'; it must be one of squad_v1, squad_v2, cmrc"),
]


def test_descriptions_that_break_a_rule_name_the_file(tmp_path: Path) -> None:
    for i, (text, expected) in enumerate(BAD_YAML):
        folder = tmp_path / str(i)
        path = write(folder / "mine.yaml", text)
        with pytest.raises(ConfigError) as caught:
            find_description(str(path), "")
        message = str(caught.value)
        assert message.startswith(str(path)) and expected in message and "\n" not in message
        assert message.endswith((".", ")."))


def test_a_key_that_an_earlier_version_read_is_told_and_ignored(tmp_path: Path) -> None:
    write(tmp_path / "set.yaml", "task: classification\ncounts: {train: [2, 3]}\n")
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.jsonl", dump_lines([*texts(2), *texts(1, "b")]))
    description = find_description("classification", str(tmp_path))
    told = f"{tmp_path}/set.yaml has the key 'counts', which is of version 0.1.0 and is ignored; leave it out."
    assert told in load_set(description).notes
    assert told in read_split(description, "dev")[1]


def texts(number: int, label: str = "a") -> list[dict[str, Any]]:
    return [{"text": f"text {i}", "label": label} for i in range(number)]


THREE = {"train": 0.6, "dev": 0.2, "test": 0.2}


def cut(folder: Path, names: tuple[str, ...], **description: Any) -> Any:
    for offset, name in enumerate(names):
        rows = [{"text": f"{each['text']} of {offset}", "label": each["label"]} for each in texts(300)]
        write(folder / f"{name}.jsonl", dump_lines(rows))
    return load_set(make_description("classification", "made", data=str(folder), **description))


def test_what_is_cut_from_what(tmp_path: Path) -> None:
    for i, (names, expected) in enumerate(
        (
            (("train",), (180, 60, 60)),
            (("dev",), (180, 60, 60)),
            (("train", "test"), (225, 75, 300)),
            (("dev", "test"), (225, 75, 300)),
            (("train", "dev"), (300, 300, 0)),
            (("train", "dev", "test"), (300, 300, 300)),
        )
    ):
        folder = tmp_path / str(i)
        made = cut(folder, names, fractions=THREE)
        sizes = [len(made.train), len(made.dev), len(made.test)]
        assert sum(sizes) == sum(expected)
        for size, wanted in zip(sizes, expected, strict=True):
            assert size == wanted if wanted in (0, 300) else abs(size - wanted) < 25
        ids = [each.source for split in (made.train, made.dev, made.test) for each in split]
        assert len(set(ids)) == len(ids)
        if expected[0] < 300:
            assert (
                f"{names[0]} of {folder} was cut by a hash of each text: {sizes[0]} train, {sizes[1]} dev"
                in made.notes[0]
            )


def test_a_cut_depends_on_text_alone(tmp_path: Path) -> None:
    first = cut(tmp_path / "a", ("train",), fractions=THREE)
    assert cut(tmp_path / "a", ("train",), fractions=THREE) == first
    rows = dump_lines(list(reversed(texts(300, "b") * 2)))
    write(tmp_path / "b" / "train.jsonl", rows)
    twice = load_set(make_description("classification", "made", fractions=THREE, data=str(tmp_path / "b")))
    parts = [{each.text for each in split} for split in (twice.train, twice.dev, twice.test)]
    assert len(set.union(*parts)) == 300 == sum(len(each) for each in parts)
    sides = {each.text.removesuffix(" of 0") for each in first.dev}
    renamed = load(
        tmp_path / "c",
        "classification",
        {"dev.jsonl": dump_lines([{"text": f"{each['text']} of 0", "label": "c"} for each in texts(300)])},
        fractions=THREE,
    )
    assert {each.text.removesuffix(" of 0") for each in renamed.dev} == sides  # type: ignore[union-attr]


def test_missing_and_empty_splits_are_refused(tmp_path: Path) -> None:
    row = dump_lines(texts(1))
    message = refuse(tmp_path / "a", "classification", {"dev.jsonl": row})
    assert re.search(r"a has no train \(looked for train\.\*\); name its file as files.train, or give shares", message)
    message = refuse(tmp_path / "b", "classification", {"train.jsonl": row, "test.jsonl": row})
    assert "b has no dev (looked for devel.*, dev.*, validation.*, valid.*, val.*)" in message
    message = refuse(tmp_path / "c", "classification", {"train.jsonl": row, "dev.jsonl": ""})
    assert message == f"The dev of {tmp_path}/c (dev.jsonl) has no example."
    message = refuse(tmp_path / "d", "classification", {"train.jsonl": '{"text": "", "label": 1}', "dev.jsonl": row})
    assert "d (train.jsonl) has no example; 1 x row left out: it has an empty 'text' (train.jsonl:1)." in message
    message = refuse(tmp_path / "e", "classification", {"train.jsonl": row}, files={"dev": ()}, fractions=THREE)
    assert "has only 1 examples in train, too few to cut" in message
    message = refuse(tmp_path / "f", "classification", {"test.jsonl": row}, fractions=THREE)
    assert "f has no train" in message
    made = load(tmp_path / "g", "classification", {"train.jsonl": row, "dev.jsonl": row, "test.jsonl": ""})
    assert made.test == () and f"The test of {tmp_path}/g has no example." in made.notes


def test_labels_that_train_has_not(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "train.tsv": "a\tB-X\n",
        "dev.tsv": "b\tB-X\n\nc\tB-Y\n\nd\tB-Y\n",
        "test.tsv": "e\tO\n\nf\tB-Z\n",
    }
    made = load(tmp_path, "ner", files)
    assert made.labels == ("X", "Y")
    assert made.notes == (
        f"1 x label 'Y' of dev kept: it is not in train ({tmp_path}/dev.tsv:3).",
        f"1 x label 'Z' of test kept: it is not in train ({tmp_path}/test.tsv:3).",
        "The test has no example of 2 of 2 labels ('X', 'Y').",
        "No label of test ('Z') is one of train ('X'), so its figures say nothing.",
    )
    assert refuse(tmp_path, "ner", {}, strict=True).startswith("dev.tsv:3: the label 'Y' of dev is not in train")
    assert load(tmp_path, "ner", {}, labels=("Z", "Y", "X", "W")).labels == ("Z", "Y", "X", "W")
    message = refuse(tmp_path, "ner", {}, labels=("X", "Y"))
    assert message.startswith("test.tsv:3 has the label 'Z'; labels in the description of made has X, Y only")


def test_a_negative_label_that_no_row_has_is_refused(tmp_path: Path) -> None:
    row = dump_lines([{"text": "<< a >> [[ b ]]", "label": "x"}])
    message = refuse(tmp_path, "relation", {"train.jsonl": row, "dev.jsonl": row}, negative_label="none")
    assert "negative_label 'none' is no label of" in message and message.endswith("(x).")


def test_examples_that_two_splits_share_are_counted(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "train.tsv": "a\tB-X\n\nb\tO\n",
        "dev.tsv": "a\tO\n\nc\tB-X\n",
        "test.tsv": "a\tO\n\nc\tO\n\nd\tB-X\n",
    }
    made = load(tmp_path, "ner", files, labels=("X",))
    assert made.notes == (
        f"1 dev example is in train too, which may make the score on dev too high: {tmp_path}/dev.tsv:1.",
        f"1 test example is in train too, which may make the score on test too high: {tmp_path}/test.tsv:1.",
        f"2 test examples are in dev too, which may make the score on test too high: {tmp_path}/test.tsv:1, "
        f"{tmp_path}/test.tsv:3.",
    )
    assert load(tmp_path, "ner", files, labels=("X",), strict=True).train == made.train


def test_documents_stay_whole_in_a_cut(tmp_path: Path) -> None:
    text = "".join(f"-DOCSTART- O\n\nw{i}\tO\n\nv{i}\tO\n\n" for i in range(40))
    made = load(tmp_path, "ner", {"dev.txt": text}, fractions=THREE, labels=("X",))
    sides: dict[str, set[str]] = {}
    for split in ("train", "dev", "test"):
        for each in getattr(made, split):
            assert isinstance(each, TaggedSentence)
            sides.setdefault(each.document, set()).add(split)
    assert len(sides) == 40 and all(len(each) == 1 for each in sides.values())
    assert set.union(*sides.values()) == {"train", "dev", "test"}


def test_the_rule_of_answers_stands_in_the_description() -> None:
    rules = {name: find_description(name, "").rule for name in ("squad_v1", "squad_v2", "cmrc", "ner")}
    assert rules == {"squad_v1": "squad_v1", "squad_v2": "squad_v2", "cmrc": "cmrc", "ner": None}
    assert [make_description("qa", "m", no_answer=each).rule for each in (False, True)] == ["squad_v1", "squad_v2"]


def test_the_set_that_ships() -> None:
    """Every machine reads the same one; its README's table is right, and no text of a split is in another."""
    loaded = load_labelled(FinetuneConfig())
    assert loaded.sha256.startswith("c807bffc1c15")
    assert loaded.family == "ner" and not loaded.notes
    readme = (SETS / "code_entities" / "README.md").read_text(encoding="utf-8")
    documents = []
    for split in SPLITS:
        sentences: tuple[TaggedSentence, ...] = getattr(loaded, split)
        counts = Counter(tag for each in sentences for tag in each.tags)
        figures = (len(sentences), counts.total(), *(counts[f"B-{label}"] for label in loaded.labels))
        assert f"| {split} | {' | '.join(f'{each:,}' for each in figures)} |\n" in readme
        assert not any(each.startswith("I-") for each in counts), "a name is one word"
        assert all("`" not in word and word.isascii() for each in sentences for word in each.words)
        lines = Path(sentences[0].source.rpartition(":")[0]).read_text(encoding="utf-8").splitlines()
        documents.append({line for line in lines if line.startswith("-DOCSTART-")})
    assert sum(map(len, documents)) == len(set().union(*documents))


def test_the_made_set_is_what_its_maker_writes(tmp_path: Path) -> None:
    """Its text and splits are those of the seed; its README's table is right, and no noun is in two splits."""
    make_repair_notes.make(tmp_path)
    for name in ("text.txt.gz", "train.tsv", "devel.tsv", "test.tsv"):
        made, ships = (folder / name for folder in (tmp_path, SETS / "repair_notes"))
        read = gzip.decompress if name.endswith(".gz") else bytes
        assert read(made.read_bytes()) == read(ships.read_bytes())
    data = load_labelled(FinetuneConfig(task="repair_notes"))
    readme, nouns = (SETS / "repair_notes" / "README.md").read_text(encoding="utf-8"), []
    for split in SPLITS:
        sentences: tuple[TaggedSentence, ...] = getattr(data, split)
        tagged = [pair for each in sentences for pair in zip(each.words, each.tags, strict=True)]
        counts = Counter(tag for _, tag in tagged)
        figures = (len(sentences), counts.total(), *(counts[f"B-{label}"] for label in data.labels))
        assert f"| {split} | {' | '.join(f'{each:,}' for each in figures)} |\n" in readme
        nouns += {word for word, tag in tagged if tag != "O"}
    assert len(nouns) == len(set(nouns)) == 96


def test_a_set_that_ships_takes_no_other_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data is .*; it must be empty with --task code_entities, which ships\.$"):
        find_set("code_entities", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--data is empty; --task bc5cdr needs a folder, or a name on the hub\.$"):
        find_set("bc5cdr", "")
    with pytest.raises(ConfigError, match=r"^--task is '/.*'; it must be a family"):
        find_set(str(tmp_path), str(tmp_path))


def test_a_cut_keeps_groups_together(tmp_path: Path) -> None:
    """All rows of a group are on one side, whatever their texts; a row without one is a mistake."""
    rows = [{"text": f"{each['text']} {i}", "label": each["label"], "who": i % 40} for i, each in enumerate(texts(400))]
    write(tmp_path / "train.jsonl", dump_lines(rows))
    values = {"data": str(tmp_path), "fractions": THREE, "group_field": "who"}
    description = make_description("classification", "made", **values)
    found = load_set(description)
    sides = [{int(each.text.split()[-1]) % 40 for each in split} for split in (found.train, found.dev, found.test)]
    assert sum(map(len, sides)) == 40 == len(set.union(*sides))
    assert all(each.group for each in found.train) and "by a hash of each 'who'" in found.notes[0]
    write(tmp_path / "train.jsonl", dump_lines([*rows, {"text": "nobody's", "label": rows[0]["label"]}]))
    with pytest.raises(CorpusError, match=r"train.jsonl:401 has no 'who', and group_field in .* needs it"):
        load_set(description)
    for name, content, reader in (("train.json", '{"data": []}', "squad"), ("train.tsv", "gout\tO\n", "conll")):
        write(tmp_path / reader / name, content)
        task = "qa" if reader == "squad" else "ner"
        with pytest.raises(ConfigError, match=rf"'who'; it must be left out, .*{name} \(reader: {reader}\)"):
            load_set(make_description(task, "made", data=str(tmp_path / reader), group_field="who"))
