"""What is left in texts of another form is told by a sample, before a run, and nothing else is."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.text.data import folders
from domext_ray.text.data.sample import check_corpus

TEXT = "The patient said that the café “Zoë” was closed, and was noted on day {}."
MENDED = {
    "UTF-8 that was read as Latin-1": [TEXT.encode().decode("cp1252", "replace"), TEXT.encode().decode("latin-1")],
    "U+FFFD, where a character was lost": [TEXT.replace("é", "\ufffd")],
    "tags or entities of HTML or XML": [
        f"<p>{TEXT}</p>",
        f"{TEXT}<br/>",
        f"{TEXT}<br>more",
        f'<doc id="1" title="a">{TEXT}',
        f"{TEXT} &amp; more",
        f"{TEXT}&#8217;s",
        f"<jats:sup>2</jats:sup>{TEXT}",
    ],
    "escapes (": [rf"{TEXT}\n\nAnd more.", rf"caf\u00e9 {TEXT}", rf"{TEXT} \"quoted\""],
    "ligatures of a PDF": [TEXT.replace("was", "ﬁne was")],
    "a word that a line's end has cut": [TEXT + " The exam-"],
    "commands of LaTeX": [
        rf"\\section*{{Findings}} {TEXT}",
        rf"{TEXT} \\citep[see][p. 2]{{smith}}",
        rf"\\item {TEXT}",
        rf"\\textbf{{Note}} {TEXT}",
    ],
    "marks of a wiki": [f"{TEXT} [[Fever|feverish]]", f"{TEXT} {{{{cite|a=b}}}}"],
    "times of subtitles": ["00:01:02,000 --> 00:01:04,500", "01:02.000 --> 01:04.500 align:start"],
    "headers or codes of e-mails": [
        "Content-Type: text/plain; charset=utf-8",
        f"Message-ID: <1@host>\n{TEXT}",
        f"From: smith@host.edu (A. Smith)\n{TEXT}",
        f"{TEXT} caf=C3=A9",
        f"{TEXT}=20",
    ],
    "records of a reference manager": [
        "PMID- 12345678, of day {}",
        f"AB  - {TEXT}",
        f"TI  - {TEXT}",
        "@inproceedings{smith2019effect{},",
        f"abstract = {{{TEXT}}},",
    ],
    "a value as Python or JSON spells it": [
        repr(b"The patient was noted on day {}."),
        f"[{TEXT!r}, 'and another']",
        json.dumps([TEXT], ensure_ascii=False),
        json.dumps({"body": TEXT}, ensure_ascii=False),
    ],
}
GOOD = [
    TEXT,
    "São João, Âncora, ÂMBITO and NÃO are words of day {}: 3 < 5 and 7 > 2, a<b and b>c.",
    r"In \LaTeX{} a \nu, a \times, a \text and C:\new\texts are of day {} & R&D; see <https://a.b> <NAME> [**DATE**]",
    "\"It was,\" she said on day {}, \"no list ['a'], and b'c' no bytes.\"",
    "[1] A reference of day {} ends like one [2]",
    "On day {} 00:01:02 --> 3; x[[1, 2], 3] = {{y}}, {{ name }} and a=b are code; Subject: an item of 5 = 20",
    "From: day {} to the end, the title = 3 and AB - a group - had a PMID: 3; @article is a word",
]


@pytest.mark.parametrize("what", MENDED)
def test_what_is_left_of_another_form_is_told_with_its_cure(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, text in enumerate(MENDED[what]):
        path = tmp_path / f"{kind}.jsonl"
        rows = [text if i % 10 == 9 else TEXT for i in range(60)]
        path.write_text("".join(json.dumps({"text": row.replace("{}", str(i))}) + "\n" for i, row in enumerate(rows)))
        folders.say.cache_clear()
        check_corpus(str(path), PrepareConfig())
        told = capsys.readouterr().err
        assert f"note: 6 of 60 texts of {str(path)!r} that were looked at have {what}" in told, text
        assert told.endswith(f", unless they are meant; the first is in {path}.\n")


def test_other_texts_are_not_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for good in GOOD:
        folders.say.cache_clear()
        (tmp_path / "a.txt").write_text("".join(good.replace("{}", str(i)) + "\n" for i in range(60)))
        check_corpus(str(tmp_path / "a.txt"), PrepareConfig())
        assert not capsys.readouterr().err, good
    few = [*[f"<p>{TEXT}</p>"] * 2, *[TEXT] * 98]
    (tmp_path / "a.txt").write_text("".join(text.replace("{}", str(i)) + "\n" for i, text in enumerate(few)))
    check_corpus(str(tmp_path / "a.txt"), PrepareConfig())
    assert not capsys.readouterr().err


def test_lines_that_a_program_has_cut_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    paragraphs = [
        TEXT.replace("{}", str(i)) + f" In the {i}th week, the café was open, and nobody came." * 3 for i in range(20)
    ]
    chinese = [f"第{i}天病人说咖啡馆已经关门，" * 9 + "后来没有人来。" for i in range(20)]

    def tell(text: str, document: Any = "line") -> str:
        path.write_text(text)
        folders.say.cache_clear()
        check_corpus(str(path), PrepareConfig(document=document))
        return capsys.readouterr().err

    wrapped = "\n\n".join(textwrap.fill(text, 70) for text in paragraphs)
    told = tell(wrapped)
    assert told.startswith("note: 40 of 79 lines of "), told
    assert "as where a program cuts text at about 69 characters" in told
    assert told.endswith(f"set --prepare.document blank_line, else join the lines before; the first is in {path}.\n")
    assert not tell(wrapped, "blank_line")
    assert "at about 40 characters" in tell(
        "\n".join(text[i : i + 40] for text in chinese for i in range(0, len(text), 40))
    )
    for lines in (paragraphs, chinese):  # a paragraph a line
        assert not tell("\n".join(lines))
    sentences = [part.strip() for text in paragraphs for part in text.replace(",", ",\n").split("\n")]
    assert not tell("\n".join(sentences))  # parts of sentences, of any length
    assert not tell("\n".join(f"{'was it so long ago ' * (1 + i % 5)}or not on day {i}" for i in range(60)))
