"""Tagged words: layouts, schemes, and what each scheme forbids."""

from __future__ import annotations

import itertools
from pathlib import Path

import datasets
import pytest
from labelled_fixtures import dump_lines, load, refuse

from domext_ray.families.readers.examples import TaggedSentence
from domext_ray.families.readers.tagged import BadTagError, detect_scheme, to_iob2

IOB2 = "B-Gene I-Gene B-Gene O B-Drug O".split()
SAME_TAGS = {
    "iob1": "I-Gene I-Gene B-Gene O I-Drug O",
    "iob2": "B-Gene I-Gene B-Gene O B-Drug O",
    "iobes": "B-Gene E-Gene S-Gene O S-Drug O",
    "bilou": "B-Gene L-Gene U-Gene O U-Drug O",
}
LONG = {"iob1": "I-A I-A I-A", "iob2": "B-A I-A I-A", "iobes": "B-A I-A E-A", "bilou": "B-A I-A L-A"}


def as_conll(tags: str, gap: str = "\t") -> str:
    return "".join(f"w{i}{gap}{tag}\n" for i, tag in enumerate(tags.split()))


def test_every_scheme_becomes_iob2(tmp_path: Path) -> None:
    for i, (is_declared, scheme) in enumerate(itertools.product([False, True], SAME_TAGS)):
        folder = tmp_path / str(i)
        text = as_conll(SAME_TAGS[scheme]) + "\n" + as_conll(LONG[scheme])
        made = load(folder, "ner", {"train.tsv": text}, scheme=scheme if is_declared else "auto")
        assert [each.tags for each in made.train] == [tuple(IOB2), ("B-A", "I-A", "I-A")]
        assert made.labels == ("A", "Drug", "Gene")


def test_detection_reads_all_sentences() -> None:
    """No tag of the first sentence tells IOB1 from IOB2."""
    assert detect_scheme([["O", "O"], ["O", "I-A", "B-A"]]) == "iob1"
    assert detect_scheme([["O", "O"], ["O", "B-A", "B-A"]]) == "iob2"
    assert detect_scheme([["B-A", "O"], ["I-A", "O"]]) == "iob2"  # a mistake in IOB2, not IOB1
    assert detect_scheme([["I-A", "I-B"]]) == "iob1"
    assert detect_scheme([["B-A", "M-A", "E-A"]]) == "iobes"
    assert to_iob2(["B-A", "M-A", "E-A"], "iobes") == ("B-A", "I-A", "I-A")


BAD_TAGS = [
    ("iob2", "O I-A", 1),
    ("iob2", "B-A I-B", 1),
    ("iob2", "B-A E-A", 1),
    ("iob2", "B-", 0),
    ("iob1", "O B-A", 1),
    ("iob1", "I-B B-A", 1),
    ("iobes", "B-A O", 1),
    ("iobes", "B-A I-A", 1),
    ("iobes", "B-A B-A E-A", 1),
    ("iobes", "S-A E-A", 1),
    ("iobes", "B-A E-B", 1),
    ("iobes", "O U-A", 1),
    ("bilou", "B-A U-A", 1),
    ("bilou", "I-A L-A", 0),
]


def test_what_a_scheme_forbids_is_refused_with_its_line(tmp_path: Path) -> None:
    for i, (scheme, tags, place) in enumerate(BAD_TAGS):
        folder = tmp_path / str(i)
        with pytest.raises(BadTagError) as caught:
            to_iob2(tags.split(), scheme)
        assert caught.value.place == place
        message = refuse(folder, "ner", {"train.txt": as_conll("O O") + "\n" + as_conll(tags)}, scheme=scheme)
        assert message.startswith(f"train.txt:{4 + place} has the tag {tags.split()[place]!r}: ")


MENDED = [
    ("iob2", "O I-A I-A B-A", "O B-A I-A B-A", 1),
    ("iob2", "B-A I-B I-B", "B-A B-B I-B", 1),
    ("iob1", "O B-A I-A", "O B-A I-A", 1),
    ("iobes", "B-A O E-B", "B-A O B-B", 2),
    ("iobes", "B-A I-A", "B-A I-A", 1),
    ("bilou", "B-A U-A L-A", "B-A B-A B-A", 2),
]


def test_tags_are_mended_and_counted_on_request(tmp_path: Path) -> None:
    for i, (scheme, tags, expected, count) in enumerate(MENDED):
        folder = tmp_path / str(i)
        contents: dict[str, str | bytes] = {"train.txt": as_conll(tags), "dev.txt": as_conll(LONG[scheme])}
        assert "--labelled.repair true" in refuse(folder, "ner", contents, scheme=scheme)
        made = load(folder, "ner", contents, scheme=scheme, repair=True)
        assert made.train[0].tags == tuple(expected.split())
        assert made.notes[0].startswith(f"{count} x tag mended: it breaks a rule of {scheme} ({folder}/train.txt:")


def test_a_tag_of_no_scheme_is_not_mended(tmp_path: Path) -> None:
    message = refuse(tmp_path, "ner", {"train.txt": as_conll("B-A X-A")}, scheme="iob2", repair=True)
    assert message.startswith("train.txt:2 has the tag 'X-A'") and "--labelled.repair" not in message


def test_layouts_of_conll(tmp_path: Path) -> None:
    """Documents, further columns, white space, Windows line ends, a word that is a space or a line separator."""
    text = (
        "\ufeff-DOCSTART- -X- -X- O\r\n\r\nAspirin NN B-NP B-Drug\r\nhelps VB B-VP O\r\n\r\n\r\nWell UH O O\r\n"
        "-DOCSTART- -X- -X- O\r\n\r\nNo DT O O\r\n"
    )
    made = load(tmp_path, "ner", {"train.conll.gz": text, "dev.tsv": " \tO\nred wine\tB-Drug\n\u2028\tI-Drug"})
    assert [each.words for each in made.train] == [("Aspirin", "helps"), ("Well",), ("No",)]
    assert [each.document for each in made.train] == ["1", "1", "2"]
    assert [each.source.rsplit("/", 1)[1] for each in made.train] == [f"train.conll.gz:{n}" for n in (3, 7, 10)]
    (sentence,) = made.dev
    assert isinstance(sentence, TaggedSentence)
    assert sentence.words == (" ", "red wine", "\u2028") and sentence.tags == ("O", "B-Drug", "I-Drug")
    assert sentence.document == ""
    assert [each.id for each in made.train] == ["1", "2", "3"]


def test_only_plain_spaces_part_a_word_from_its_tag(tmp_path: Path) -> None:
    text = "5\u00a0mg  NN  B-Drug \n\u5934\u3000\u75db O\na\x85b\fO\u00a0\n"
    (sentence,) = load(tmp_path, "ner", {"train.txt": text}).train
    assert isinstance(sentence, TaggedSentence)
    assert sentence.words == ("5\u00a0mg", "\u5934\u3000\u75db", "a\x85b") and sentence.tags == ("B-Drug", "O", "O")


def test_columns_by_place(tmp_path: Path) -> None:
    text = "1\tfever\tB-Sign\tx\n2\trose\tO\ty\n"
    made = load(tmp_path, "ner", {"train.tsv": text}, columns={"tokens": (1,), "tags": (2,)})
    assert made.train[0].words == ("fever", "rose") and made.train[0].tags == ("B-Sign", "O")


def test_tags_without_a_type(tmp_path: Path) -> None:
    for i, (labels, expected) in enumerate([((), "ENTITY"), (("Disease",), "Disease")]):
        folder = tmp_path / str(i)
        made = load(folder, "ner", {"train.tsv": "old\tB\ngout\tI\nhurts\tO\n"}, labels=labels)
        assert made.train[0].tags == (f"B-{expected}", f"I-{expected}", "O")
        assert made.labels == (expected,)


SPELLED = {
    "o b-Gene i-Gene": "O B-Gene I-Gene",
    "O B_Gene_x I_Gene_x": "O B-Gene_x I-Gene_x",
    "O Gene-x-B Gene-x-I": "O B-Gene-x I-Gene-x",
    "o b_x e_x s_x": "O B-x I-x B-x",
    "O b i": "O B-ENTITY I-ENTITY",
}


def test_tags_that_are_spelled_another_way(tmp_path: Path) -> None:
    """All of a file are; of one that mixes ways a tag is refused."""
    for i, (tags, expected) in enumerate(SPELLED.items()):
        folder = tmp_path / str(i)
        made = load(folder, "ner", {"train.txt": as_conll(tags), "dev.txt": as_conll("B-x")})
        assert made.train[0].tags == tuple(expected.split()) and made.dev[0].tags == ("B-x",)
        assert any(note.startswith(f"Tags of {folder}/train.txt such as ") for note in made.notes)


def test_comments_and_tabs_at_line_ends(tmp_path: Path) -> None:
    """A word may be the sign that opens comments."""
    comments = "# id 1 text = Vitamin O\n#\tO\nIron\tB-x\n\n# id 2\tdomain=en\nIron\tB-x\n# is\tO\n"
    spaces = "# id 2\n#\thttp://a [2001]\nIron NN B-x\n\n# NN O\nIron NN B-x\n"
    contents: dict[str, str | bytes] = {"train.txt": comments, "dev.txt": spaces, "test.txt": "Iron\tB-x\t\nis\tO\t\n"}
    made = load(tmp_path, "ner", contents)
    assert [each.words for each in made.train] == [("#", "Iron"), ("Iron", "# is")]
    assert [each.words for each in made.dev] == [("Iron",), ("#", "Iron")]
    assert made.test[0].words == ("Iron", "is") and made.test[0].tags == ("B-x", "O")
    path = f"{tmp_path}/train.txt"
    assert f"2 x line of {path} is a comment and left out ({path}:1 is the first)." in made.notes


def test_words_of_conllu(tmp_path: Path) -> None:
    """Ranges of words and empty nodes are none, and lines behind a range are still named."""
    rows = ["# sent_id = 1", "1-2\tdu\t_", "1\tde\tO", "2\tle\tO", "2.1\tvu\tO", "3\tParis\tB-Place", "", "1\tRain\tO"]
    files: dict[str, str | bytes] = {"train.conllu": "\n".join(rows) + "\n"}
    made = load(tmp_path / "words", "ner", files, columns={"tokens": (1,)})
    assert [each.words for each in made.train] == [("de", "le", "Paris"), ("Rain",)]
    path = f"{tmp_path}/words/train.conllu"
    assert [each.source for each in made.train] == [f"{path}:2", f"{path}:8"]
    left_out = f"4 x line left out: it is a range of words, or an empty node, of CoNLL-U ({path}:2, {path}:5"
    assert made.notes[0].startswith(left_out)
    message = refuse(tmp_path / "numbers", "ner", {"train.conllu": files["train.conllu"]})
    assert message.startswith("train.conllu numbers the words in its first column, as CoNLL-U does; set columns.tokens")


def test_a_file_without_blank_lines_is_told(tmp_path: Path) -> None:
    words = [f"w{i}\tB-x\n" for i in range(501)]
    made = load(tmp_path / "one", "ner", {"train.tsv": "".join(words), "dev.tsv": "".join(words[1:])})
    told = "train.tsv has no blank line, so that its 501 words are one sentence; put one behind each."
    assert made.warnings == (f"{tmp_path}/one/{told}",)
    parts: dict[str, str | bytes] = {"train.tsv": "\n".join(["".join(words), words[0]]), "dev.tsv": words[0]}
    assert not load(tmp_path / "two", "ner", parts).warnings, "it may be so long"


def test_tags_that_are_numbers_have_names(tmp_path: Path) -> None:
    rows = [{"tokens": ["Old", "gout"], "ner_tags": [0, 1]}, {"tokens": ["gout"], "ner_tags": ["1"]}]
    names = {"tags": ("O", "B-D", "I-D")}
    contents: dict[str, str | bytes] = {"train.jsonl": dump_lines([*rows, {"tokens": ["a"], "ner_tags": [1.0]}])}
    made = load(tmp_path / "rows", "ner", contents, reader="records", **names)
    assert [each.tags for each in made.train] == [("O", "B-D"), ("B-D",), ("B-D",)] and made.labels == ("D",)
    columns: dict[str, str | bytes] = {"train.tsv": as_conll("0 1 2")}
    assert load(tmp_path / "columns", "ner", columns, **names).train[0].tags == ("O", "B-D", "I-D")
    feature = datasets.Sequence(datasets.ClassLabel(names=["O", "B-Own"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": feature})
    (tmp_path / "parquet").mkdir()
    datasets.Dataset.from_list(rows[:1], features=features).to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    made = load(tmp_path / "parquet", "ner", {}, reader="records", files={"dev": ("train.*",)})
    assert made.train[0].tags == ("O", "B-Own"), "the names that datasets keeps"


def test_rows_with_lists(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "tokens": ["Old", "gout"], "ner_tags": ["O", "B-D"], "doc_id": 7},
        {"tokens": [], "ner_tags": []},
    ]
    text = dump_lines(rows)
    made = load(tmp_path, "ner", {"train.jsonl": text}, reader="records")
    assert made.train == (TaggedSentence("a", f"{tmp_path}/train.jsonl:1", ("Old", "gout"), ("O", "B-D"), "7"),)
    assert any("row left out: it has no words" in note and "train.jsonl:2" in note for note in made.notes)
