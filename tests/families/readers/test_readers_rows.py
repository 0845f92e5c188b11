"""Rows of tables and JSON: texts, pairs, numbers, marked pairs, questions, choices and terms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from labelled_fixtures import dump_lines, dump_parquet, load, refuse, write

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import find_description, make_description
from domext_ray.families.normalization import NormalizationTask
from domext_ray.families.readers.examples import Choice, Entity, LabelledText, MarkedText, Mention
from domext_ray.families.sets import load_labelled, load_set, read_split
from domext_ray.inference.labelled_input import plan_labelled


def shown(made: Any) -> list[tuple[str, str | None, str]]:
    return [(each.text, each.pair, each.label) for each in made.train]


ROWS = [("It rains, again", "Wet", "yes"), ('She said "go', "Now", "no")]
TABLES: dict[str, str | bytes] = {
    "train.tsv": "text\tpair\tlabel\n" + "".join("\t".join(row) + "\n" for row in ROWS),
    "train.tsv.gz": "\ufefftext\tpair\tlabel\r\n\r\n" + "".join("\t".join(row) + "\r\n" for row in ROWS),
    "train.csv": 'label,text,pair\nyes,"It rains, again",Wet\nno,"She said ""go",Now\n',
    "train.jsonl": dump_lines([dict(zip(("text", "pair", "label"), row, strict=True)) for row in ROWS]),
    "train.json": json.dumps([dict(zip(("text", "pair", "label"), row, strict=True)) for row in ROWS], indent=2),
    "train.parquet": dump_parquet([dict(zip(("text", "pair", "label"), row, strict=True)) for row in ROWS]),
    "train.json.gz": json.dumps({str(i): {"text": r[0], "pair": [r[1]], "label": r[2]} for i, r in enumerate(ROWS)}),
}


def test_the_same_rows_from_every_layout(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, a comma in quotes, a lone literal quote in TSV."""
    for i, name in enumerate(TABLES):
        folder = tmp_path / str(i)
        made = load(folder, "classification", {name: TABLES[name]})
        assert shown(made) == ROWS
        assert made.labels == ("no", "yes")


def test_literal_quotes_do_not_join_lines(tmp_path: Path) -> None:
    text = 'text\tlabel\n"An open quote\t1\nsecond\t0\nthird closes"\t1\n'
    made = load(tmp_path, "classification", {"train.tsv": text})
    assert [each.text for each in made.train] == ['"An open quote', "second", 'third closes"']
    assert [each.source.rsplit(":", 1)[1] for each in made.train] == ["2", "3", "4"]


def test_lines_of_csv_with_line_breaks_in_cells(tmp_path: Path) -> None:
    made = load(tmp_path, "classification", {"train.csv": 'text,label\n"two\nlines",a\nnext,b\n'})
    assert [(each.text, each.source.rsplit(":", 1)[1]) for each in made.train] == [("two\nlines", "2"), ("next", "4")]


def test_ids_and_kinds_of_labels(tmp_path: Path) -> None:
    rows = [{"id": 5, "text": "a", "label": 1}, {"id": 5, "text": "b", "label": True}, {"text": "c", "label": " x "}]
    made = load(tmp_path, "classification", {"train.jsonl": dump_lines(rows)})
    assert [(each.id, each.label) for each in made.train] == [("5", "1"), ("5#2", "true"), ("3", "x")]


def test_whole_numbers_written_as_floats_are_the_same_labels_in_every_split(tmp_path: Path) -> None:
    """What pandas writes of a column of whole numbers with a gap in it."""
    contents: dict[str, str | bytes] = {
        "train.csv": "text,label\na,1.0\nb,0.0\nc,-2.00\nd,1\ne,v1.0\n",
        "dev.jsonl": dump_lines(
            [{"text": "a", "label": 1.0}, {"text": "b", "label": 0}, {"text": "c", "label": 1e300}]
        ),
    }
    made = load(tmp_path, "classification", contents)
    assert [each.label for each in made.train] == ["1", "0", "-2", "1", "v1.0"]
    assert [each.label for each in made.dev] == ["1", "0"] and "1 x row left out: it has no label" in made.notes[0]
    declared = load(tmp_path, "classification", {"train.csv": "text,label\na,1.0\nb,0.0\n"}, labels=("0.0", "1.0"))
    assert [each.label for each in declared.train] == ["1.0", "0.0"], "as the description spells them"


def test_a_long_cell_is_a_text(tmp_path: Path) -> None:
    text = "word " * 60_000
    made = load(tmp_path, "classification", {"train.csv": f'text,label\n"{text}",a\nshort,b\n'})
    assert made.train[0].text == text.strip() and len(made.train) == 2


DIRTY = [
    ({"text": " ", "label": "a"}, "it has an empty 'text'"),
    ({"text": 3, "label": "a"}, "it has no text as 'text'"),
    ({"text": "t", "label": ""}, "it has no label"),
    ({"text": "t", "label": 0.5}, "it has no label"),
    ({"text": "t"}, "it has no column for 'label'"),
    ({"text": "t\ud83d", "label": "a"}, "it has half a surrogate pair in 'text'"),
    ({"text": "t", "label": "a\ud83d"}, "it has half a surrogate pair in 'label'"),
    ({"text": "t", "label": "a", "id": "\udc00"}, "it has half a surrogate pair in 'id'"),
    ({"text": "t", "pair": "", "label": "a"}, "it has an empty 'pair'"),
]


def test_dirty_rows_are_counted_or_refused(tmp_path: Path) -> None:
    for i, (row, fault) in enumerate(DIRTY):
        folder = tmp_path / str(i)
        good = {"text": "fine", "label": "a"}
        content = json.dumps(good) + "\n" + "\n".join([json.dumps(row)] * 5)
        made = load(folder, "classification", {"train.jsonl": content, "dev.jsonl": json.dumps(good)})
        path = f"{folder}/train.jsonl"
        assert shown(made) == [("fine", None, "a")]
        assert made.notes[0] == f"5 x row left out: {fault} ({path}:2, {path}:3, {path}:4 and 2 more)."
        message = refuse(folder, "classification", {}, strict=True)
        assert message.startswith(f"train.jsonl:2: the row {fault.removeprefix('it ')}")
        assert message.endswith("mend it, or leave out --labelled.strict.")


def test_rows_of_another_width(tmp_path: Path) -> None:
    text = "text\tlabel\nfine\ta\nbroken\nlong\ta\tb\n"
    made = load(tmp_path, "classification", {"train.tsv": text})
    assert shown(made) == [("fine", None, "a")]
    assert made.notes[0].startswith("4 x row left out: it has not 2 fields as the first line")


def test_a_header_that_stands_again_is_no_row(tmp_path: Path) -> None:
    """As in files that were joined; without names a row may be like any other."""
    made = load(tmp_path / "named", "classification", {"train.csv": "text,label\na,x\ntext,label\nlabel,text\n"})
    assert shown(made) == [("a", None, "x"), ("label", None, "text")]
    assert made.notes[0].startswith(f"2 x row left out: it repeats the header ({tmp_path}/named/train.csv:3, ")
    places = {"columns": {"text": (0,), "label": (1,)}}
    made = load(tmp_path / "places", "classification", {"train.csv": "a,x\na,x\nlabel,text\n"}, **places)
    assert shown(made) == [("a", None, "x"), ("a", None, "x"), ("label", None, "text")]


def test_pairs_in_one_split_alone_are_refused(tmp_path: Path) -> None:
    """Its files call the column of the second text otherwise; a single text among pairs is told."""
    for i, task in enumerate(("classification", "multilabel", "regression")):
        values = {"label": 1, "labels": ["x"], "value": 1}
        pairs = [{"text": "a", "pair": "b", **values}, {"text": "c", "pair": "d", **values}]
        contents: dict[str, str | bytes] = {"train.jsonl": dump_lines(pairs)}
        contents["dev.jsonl"] = dump_lines([{"text": "a", "reply": "b", **values}])
        said = "dev.jsonl:1 has no second text, as all of dev, and all of train have one; set columns.pair to all names"
        assert refuse(tmp_path / str(i), task, contents).startswith(said)
        contents["dev.jsonl"] = dump_lines([pairs[0], {"text": "c", "pair": None, **values}])
        made = load(tmp_path / str(i), task, contents)
        assert f"1 x dev example without a second text ({tmp_path}/{i}/dev.jsonl:2)." in made.notes


def test_columns_that_are_not_read_may_be_several(tmp_path: Path) -> None:
    made = load(tmp_path, "classification", {"train.csv": ",text,label,,accept,accept\n0,fine,a,,0,1\n1,long,b,,1,0\n"})
    assert shown(made) == [("fine", None, "a"), ("long", None, "b")]


def test_glue_tables(tmp_path: Path) -> None:
    """CoLA has no header; MRPC begins with a byte-order mark and has literal quotes; STS-B has numbers."""
    cola = "src1\t1\t\tThe cat sat.\nsrc1\t0\t*\tThe sat cat the.\n"
    mrpc = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t10\t11\t" We agree , he said .\tHe said " yes " .\n'
    stsb = "index\tgenre\tsentence1\tsentence2\tscore\n0\tnews\tOne dog.\tA dog.\t4.250\n1\tnews\tA cat.\tRain.\tnan\n"
    stsb += "2\tnews\tSnow.\tIce.\t1e308\n"
    for name, content in (("cola", cola), ("mrpc", mrpc), ("sts_b", stsb)):
        write(tmp_path / name / "train.tsv", content)
        write(tmp_path / name / "dev.tsv.gz", content)
    made = {n: load_set(find_description(n, str(tmp_path / n))) for n in ("cola", "sts_b")}
    assert shown(made["cola"]) == [("The cat sat.", None, "1"), ("The sat cat the.", None, "0")]
    (pair,) = made["sts_b"].train
    assert isinstance(pair, LabelledText)
    assert (pair.text, pair.pair, pair.label, pair.value) == ("One dog.", "A dog.", "", 4.25)
    assert any("it has no finite number" in note for note in made["sts_b"].notes)
    paraphrases = load_set(find_description("mrpc", str(tmp_path / "mrpc")))
    assert shown(paraphrases) == [('" We agree , he said .', 'He said " yes " .', "1")]
    assert paraphrases.labels == ("0", "1") and paraphrases.positive_label == "1"


def test_pubmedqa(tmp_path: Path) -> None:
    """An object by PMID; contexts are joined; one file is cut in three."""
    rows = {
        str(i): {
            "QUESTION": f"Is it {i}?",
            "CONTEXTS": ["One.", f"Two {i}."],
            "final_decision": ("yes", "no", "maybe")[i % 3],
        }
        for i in range(60)
    }
    write(tmp_path / "ori_pqal.json", json.dumps(rows, indent=2))
    made = load_set(find_description("pubmedqa", str(tmp_path)))
    every = sorted((*made.train, *made.dev, *made.test), key=lambda each: int(each.id))
    assert [(each.id, each.text, each.pair, each.label) for each in every[:2]] == [
        ("0", "Is it 0?", "One. Two 0.", "yes"),
        ("1", "Is it 1?", "One. Two 1.", "no"),
    ]
    assert every[0].source == f"{tmp_path}/ori_pqal.json:['0']"
    assert len(every) == 60 and made.labels == ("yes", "no", "maybe")


def test_a_row_by_id_is_named_by_its_id(tmp_path: Path) -> None:
    """Which may have colons: what was read is still of one file."""
    rows = {"doi:10/a": {"text": "a", "label": "x"}, "b:3": {"text": "b", "label": "y"}}
    write(tmp_path / "train.json", json.dumps(rows, indent=1))
    write(tmp_path / "dev.json", json.dumps(rows, indent=1))
    loaded = load_labelled(FinetuneConfig(task="classification", data=str(tmp_path)))
    assert [example.source for example in loaded.dev] == [
        f"{tmp_path}/dev.json:['doi:10/a']",
        f"{tmp_path}/dev.json:['b:3']",
    ]
    files = [str(tmp_path / name) for name in ("train.json", "dev.json")]
    assert [path for path, _ in loaded.files] == files
    assert [path for path, _ in plan_labelled("classification", str(tmp_path), "dev", 8, strict=True).list_files()] == [
        files[1]
    ]


def test_a_stem_that_is_no_text_and_a_context_that_is_none_are_counted(tmp_path: Path) -> None:
    good = {
        "context": "Rain.",
        "stem": "It",
        "ending0": "a",
        "ending1": "b",
        "ending2": "c",
        "ending3": "d",
        "label": 0,
    }
    rows = [good, {**good, "stem": 5}, {**good, "context": 5, "ending0": 7}, {**good, "stem": " "}]
    made = load(tmp_path, "multiple_choice", {"train.jsonl": dump_lines(rows)})
    assert [choice.stem for choice in made.train] == ["It", ""]
    assert [note.split(" (")[0] for note in made.notes[:2]] == [
        "2 x row left out: it has no text as 'stem'",
        "2 x row left out: it has no text as 'context'",
    ]


def test_placeholders(tmp_path: Path) -> None:
    """GAD: train without header, test with one, an empty dev that is cut from train."""
    sentences = [f"Does @DISEASE$ need @GENE$ number {i}?\t{i % 2}\n" for i in range(50)]
    extra = "Only @GENE$ here.\t1\n@GENE$ and @GENE$ and @DISEASE$.\t0\n"
    test = "index\tsentence\tlabel\n0\t@GENE$ causes @DISEASE$.\t1\n"
    for name, content in (("train.tsv", "".join(sentences) + extra), ("dev.tsv", ""), ("test.tsv.gz", test)):
        write(tmp_path / name, content)
    made = load_set(find_description("gad", str(tmp_path)))
    assert len(made.train) + len(made.dev) == 50 and 1 <= len(made.dev) <= 15
    (example,) = made.test
    assert example == MarkedText(
        "1",
        f"{tmp_path}/test.tsv.gz:2",
        "@GENE$ causes @DISEASE$.",
        Entity(0, 6, "GENE"),
        Entity(14, 23, "DISEASE"),
        "1",
    )
    first = next(each for each in (*made.train, *made.dev) if each.source.endswith(":1"))
    assert isinstance(first, MarkedText)
    assert first.text[first.head.start : first.head.end] == "@GENE$" and first.head.start > first.tail.start
    assert made.negative_label == "0" and made.labels == ("0", "1")
    assert [note.split(" (")[0] for note in made.notes if "row left out" in note] == [
        "1 x row left out: it has no @DISEASE$",
        "1 x row left out: it has @GENE$ more than once",
    ]


BRACKETS = [
    ("<< Iron >> binds [[ heme ]].", "Iron binds heme.", "Iron", "heme"),
    ("[[ Heme ]] holds a << iron >>", "Heme holds a iron", "iron", "Heme"),
    ("<<Iron>> binds [[heme]].", "Iron binds heme.", "Iron", "heme"),
    (
        "<< Iron >> >> zinc [[1]-x] by [[ heme [[a]] b ]].",
        "Iron >> zinc [[1]-x] by heme [[a]] b.",
        "Iron",
        "heme [[a]] b",
    ),
    ("The << [[ iron ]] pump >> runs", "The iron pump runs", "iron pump", "iron"),
    ("a <<  wide >> b [[ x ]]", "a wide b x", "wide", "x"),
]


def test_brackets_are_taken_out(tmp_path: Path) -> None:
    for i, (marked, plain, head, tail) in enumerate(BRACKETS):
        folder = tmp_path / str(i)
        made = load(folder, "relation", {"train.jsonl": dump_lines([{"text": marked, "label": "BINDS"}])})
        (example,) = made.train
        assert isinstance(example, MarkedText)
        assert example.text == plain
        stretches = (example.head, example.tail)
        assert tuple(plain[each.start : each.end] for each in stretches) == (head, tail)
        assert [each.label for each in stretches] == ["", ""]


CHEMISTRY, ELEMENTS = (("<<", ">>"), ("[[", "]]")), (("<e1>", "</e1>"), ("<e2>", "</e2>"))
MARKED_BADLY: list[tuple[Any, str, str]] = [
    (CHEMISTRY, "<< a >> b", "has no [[ ]] around an argument"),
    (CHEMISTRY, "<< a >> [[ ]]", "has no [[ ]] around an argument"),
    (CHEMISTRY, "<< a >> << b >> [[ c ]]", "has << >> more than once"),
    (CHEMISTRY, "<<a>> [[b]] [[c]]", "has [[ ]] more than once"),
    (CHEMISTRY, "<< a [[ b >> c ]]", "has << >> and [[ ]] that cross"),
    (ELEMENTS, "<e1>a</e1> b", "has no <e2> </e2> around an argument"),
    (ELEMENTS, "<e1>a</e1> <e2>b", "has no </e2>"),
    (ELEMENTS, "<e1>a</e1> <e1> b </e1> <e2>c</e2>", "has <e1> more than once"),
    (ELEMENTS, "<e1>a<e2>b</e1>c</e2>", "has <e1> </e1> and <e2> </e2> that cross"),
]


def test_rows_whose_arguments_are_not_marked_once_each(tmp_path: Path) -> None:
    for i, (marks, text, fault) in enumerate(MARKED_BADLY):
        folder = tmp_path / str(i)
        good = "".join(f"{opening} {name} {closing} " for name, (opening, closing) in zip("ab", marks, strict=True))
        rows = [{"text": good, "label": "x"}, {"text": text, "label": "x"}]
        made = load(folder, "relation", {"train.jsonl": dump_lines(rows)}, marks=marks)
        assert len(made.train) == 1 and f"2 x row left out: it {fault} (" in made.notes[0], text
    message = refuse(folder, "relation", {}, files={"dev": ("train.*",)}, marks=marks, strict=True)
    assert message.startswith(f"train.jsonl:2: the row {fault}")


CONTEXT = "The bridge was built in 1901. It was rebuilt in 1950, and again in 1901 style."


def make_squad(questions: list[dict[str, Any]], **paragraph: Any) -> str:
    body = {"qas": questions, "context": CONTEXT, **paragraph}
    return json.dumps({"version": "v", "data": [{"title": "t", "paragraphs": [body]}]}, indent=1)


def answer(text: str, start: int) -> dict[str, Any]:
    return {"text": text, "answer_start": start}


def test_questions(tmp_path: Path) -> None:
    """Qas before their context, as many answers as there are, a question without one."""
    questions = [
        {"id": "q1", "question": "When?", "answers": [answer("1901", 24), answer("in 1901", 21)]},
        {
            "id": "q2",
            "question": "Why?",
            "answers": [],
            "is_impossible": True,
            "plausible_answers": [answer("1950", 48)],
        },
        {"id": "q2", "question": "Who?", "answers": []},
    ]
    made = load(tmp_path, "qa", {"train.json": make_squad(questions)})
    assert [each.id for each in made.train] == ["q1", "q2", "q2#2"]
    assert [each.answer_texts for each in made.train] == [("1901", "in 1901"), (), ()]
    assert made.train[0].answers == (Entity(24, 28, ""), Entity(21, 28, ""))
    assert [each.source for each in made.train][:2] == [
        f"{tmp_path}/train.json:data[0].paragraphs[0].qas[{i}]" for i in range(2)
    ]
    made = load(tmp_path, "qa", {"train.json": make_squad(questions)}, no_answer=False)
    assert [each.id for each in made.train] == ["q1"]
    assert "4 x question left out: it has no answer" in made.notes[0]


MOVED = [
    ("did paint and pain in it", "in", 0, 19),  # not the end of `paint`, which is nearer
    ("paint and painting", "in", 0, 2),  # nothing else has it
    ("\u4e2d\u6587\uff1a\u80c3\u708e\u75c5\u80c3\u708e", "\u80c3\u708e", 4, 3),  # no alphabet: the nearest
]


def test_an_answer_is_moved_to_whole_words(tmp_path: Path) -> None:
    for i, (context, text, offset, place) in enumerate(MOVED):
        row = {"question": "What?", "context": context, "answers": [{"text": text, "answer_start": offset}]}
        made = load(tmp_path / str(i), "qa", {"train.jsonl": dump_lines([row])}, reader="records")
        assert [answer.start for answer in made.train[0].answers] == [place]


def test_answers_that_are_not_at_their_offset(tmp_path: Path) -> None:
    answers = [answer("1950", 46), answer("1901", 70), answer("rebuilt", -1), answer("1902", 24), answer(" ", 3)]
    questions = [
        {"id": "a", "question": "When?", "answers": answers},
        {"id": "b", "question": "When?", "answers": [answer("1901", 46)]},  # twice in the context, neither is near
    ]
    made = load(tmp_path, "qa", {"train.json": make_squad(questions)})
    assert [each.answer_texts for each in made.train] == [("1950", "1901", "rebuilt", "1902", " ")]
    assert made.train[0].answers[1].start == 67
    starts = [" ".join(note.split(" (")[0].split()) for note in made.notes]
    assert starts[:4] == [
        "6 x answer moved: it is not at its offset",
        "4 x answer left out: it is not in the context near its offset",
        "2 x answer left out: it is empty",
        "2 x question left out: it has none of its answers in the context",
    ]
    message = refuse(tmp_path, "qa", {}, files={"dev": ("train.*",)}, strict=True)
    assert message.split(": ", 1)[1].startswith("the answer is not at its offset ('1950')")


SWAG = (
    ",video-id,fold-ind,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
    '0,v1,1,"A man, tired, sits.",He,gold,drinks tea.,flies.,melts.,sings to a wall.,0\n'
    "1,v2,2,A dog runs.,It,gen,reads.,stops.,votes.,,1\n"
    "2,v3,3,A dog runs.,It,gen,reads.,stops.,votes.,barks.,4\n"
)


def test_choices(tmp_path: Path) -> None:
    made = load(tmp_path, "multiple_choice", {"train.csv": SWAG})
    options = ("drinks tea.", "flies.", "melts.", "sings to a wall.")
    assert made.train == (Choice("1", f"{tmp_path}/train.csv:2", "A man, tired, sits.", "He", options, 0),)
    assert [note.split(" (")[0] for note in made.notes[:2]] == [
        "2 x row left out: it has an empty option",
        "2 x row left out: it names no option as its answer",
    ]
    write(tmp_path / "swag" / "train.csv", SWAG)
    write(tmp_path / "swag" / "val.csv.gz", SWAG)
    assert load_set(find_description("swag", str(tmp_path / "swag"))).dev[0].options == options  # type: ignore[union-attr]


def test_choices_in_one_column(tmp_path: Path) -> None:
    rows = [
        {"context": "Rain.", "choices": ["wet", "dry"], "answer": 0},
        {"context": "Sun.", "choices": ["a", "b", "c"], "answer": 0},
    ]
    columns = {"options": ("choices",)}
    made = load(tmp_path, "multiple_choice", {"train.jsonl": dump_lines(rows[:1])}, columns=columns)
    assert made.train[0].options == ("wet", "dry")  # type: ignore[union-attr]
    message = refuse(tmp_path, "multiple_choice", {"train.jsonl": dump_lines(rows)}, columns=columns)
    assert message == "train.jsonl:2 has 3 options; it must have 2 as the first row."
    with pytest.raises(CorpusError, match=r"train.jsonl:2 has 3 options; it must have 2 as the first row\.$"):
        read_split(make_description("multiple_choice", "made", columns=columns, data=str(tmp_path)), "train")
    parted: list[dict[str, Any]] = [{"context": "Rain.", "choices": {"A": "wet", "B": "dry"}, "answer": "B"}]
    lettered = {"options": ("choices.A", "choices.B")}
    made = load(tmp_path / "parted", "multiple_choice", {"train.jsonl": dump_lines(parted)}, columns=lettered)
    assert made.train[0].options == ("wet", "dry") and made.train[0].answer == 1  # type: ignore[union-attr]
    rows[0]["choices"] = ["a"]
    message = refuse(tmp_path, "multiple_choice", {"train.jsonl": dump_lines(rows)}, columns=columns)
    assert message == "train.jsonl:1 has \"['a']\" as 'options'; give 2 texts or more, or set columns.options."
    message = refuse(tmp_path, "multiple_choice", {"train.jsonl": dump_lines(rows)})
    assert "has no column 'ending0' and 'ending1' and 'ending2' and 'ending3' for 'options'" in message


CATALOGUES = {
    "catalogue.txt": "胃炎\n\n慢性 胃炎\n头痛\n胃炎\n",
    "catalogue.tsv": "K1\t胃炎\nK2\t慢性 胃炎\nR5\t头痛\n",
    "catalogue.csv": 'K1,胃炎\nK2,"慢性 胃炎"\nR5,头痛\n',
    "catalogue.json.gz": '["胃炎", "慢性 胃炎",\n "头痛"]',
}


def test_catalogues(tmp_path: Path) -> None:
    for i, name in enumerate(CATALOGUES):
        folder = tmp_path / str(i)
        assert NormalizationTask.read_side(write(folder / name, CATALOGUES[name])) == ("胃炎", "慢性 胃炎", "头痛")


def test_terms(tmp_path: Path) -> None:
    rows = [
        {"text": "胃不好头疼", "normalized_result": "胃炎##头痛##胃炎"},
        {"text": "晕", "normalized_result": "头晕"},
        {"text": "?", "normalized_result": "##"},
    ]
    files: dict[str, str | bytes] = {
        "CHIP-CDN_train.json": json.dumps(rows),
        "ICD-10 list.txt": CATALOGUES["catalogue.txt"],
    }
    files["CHIP-CDN_dev.json"] = json.dumps(rows[:1])
    for name, content in files.items():
        write(tmp_path / name, content)
    made = load_set(find_description("chip_cdn", str(tmp_path)))
    assert [each.terms for each in made.train if isinstance(each, Mention)] == [("胃炎", "头痛"), ("头晕",)]
    assert made.catalogue == ("胃炎", "慢性 胃炎", "头痛")
    assert [note.split(" (")[0] for note in made.notes[:2]] == [
        "1 x row left out: it has no term",
        "1 x term kept: it is not in the catalogue",
    ]
    (tmp_path / "ICD-10 list.txt").unlink()
    with pytest.raises(CorpusError, match=r"has no catalogue \(looked for catalogue"):
        load_set(find_description("chip_cdn", str(tmp_path)))
    write(tmp_path / "catalogue.json", '["a",\n3]')
    with pytest.raises(CorpusError, match=r"catalogue.json:\[1\] must be a text"):
        load_set(find_description("chip_cdn", str(tmp_path)))
    write(tmp_path / "catalogue.json", "[]")
    with pytest.raises(CorpusError, match=r"catalogue.json has no term"):
        load_set(find_description("chip_cdn", str(tmp_path)))
    write(tmp_path / "catalogue.json", '{"K1": "a"}')
    with pytest.raises(CorpusError, match=r"catalogue.json has another layout: it must be a list, but"):
        load_set(find_description("chip_cdn", str(tmp_path)))


def test_terms_none_of_which_is_in_the_catalogue_are_refused(tmp_path: Path) -> None:
    """Its last column has codes."""
    files: dict[str, str | bytes] = {"train.jsonl": dump_lines([{"text": "a", "terms": ["Gout"]}])}
    files["catalogue.tsv"] = "Gout\tM10\nFever\tR50\n"
    message = refuse(tmp_path, "normalization", files, files={"dev": ("train.*",)})
    assert message == (
        "train.jsonl:1 has the term 'Gout', and no term of train is in the catalogue, which begins with 'M10'; give "
        "the terms as they stand there (a table's last column)."
    )
