"""A notebook: its bar, what it shows of a run and of a mistake, and the guide that is one."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPOSITORY
from report_records import make_records
from report_records import make_run as make_summarised_run

import domext_ray
from domext_ray.api import Folder
from domext_ray.errors import DomextError
from domext_ray.progress import StatusLine, draw_bar
from domext_ray.runtime.stopping import Stopped

GUIDE = REPOSITORY / ".github" / "guides" / "text-to-entities.ipynb"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the shell of this process be a notebook's, as what asks IPython sees it."""
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def show_work() -> None:
    line = StatusLine()
    line.show("preparing: 3 of 12 MB", 0.25)
    line.show("preparing: 4 of 12 MB", 1 / 3)  # it is too early for another one
    line.keep("a worker died")
    line.keep("preparing: 12 MB in 0:01", 1.0)


def is_due_after_a_second() -> bool:
    line = StatusLine()
    line.show("")
    line._shown -= 1.0
    return line.is_due


def test_elsewhere_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with draw_bar():
        show_work()
        assert capsys.readouterr() == ("", "preparing: 3 of 12 MB\na worker died\npreparing: 12 MB in 0:01\n")
        assert not is_due_after_a_second()


def test_a_notebook_has_one_bar_while_there_is_work(kernel: None, capsys: pytest.CaptureFixture[str]) -> None:
    with draw_bar():
        assert is_due_after_a_second()
        capsys.readouterr()
        show_work()
    shown, drawn = capsys.readouterr()
    assert shown == "a worker died\npreparing: 12 MB in 0:01\n"
    states = [state.strip() for state in drawn.split("\r") if state.strip()]
    assert [(state.partition("%")[0], state.rpartition("| ")[2]) for state in states] == [
        ("25", "preparing: 3 of 12 MB"),
        ("25", "a worker died"),
        ("100", "preparing: 12 MB in 0:01"),
    ]
    assert drawn.endswith("\r"), "what is done leaves no bar"
    show_work()
    assert capsys.readouterr().err.startswith("preparing: 3 of 12 MB\n")


def test_notes_speak_of_arguments(kernel: None, capsys: pytest.CaptureFixture[str]) -> None:
    note = "5 steps read 1% of the corpus; --train.max_steps 0 reads all, and {} does it"
    command = "pandoc -f html -t plain --wrap none FILE > NEW.txt"
    for with_bar, said in ((False, "--train.max_steps"), (True, "train.max_steps")):
        with draw_bar() if with_bar else contextlib.nullcontext():
            print(f"note: {note.format(command)}")
            print(f"warning: {note.format(command)}", file=sys.stderr)
            print("a line about --train.max_steps that is none")
        out, err = capsys.readouterr()
        told = note.format(command).replace("--train.max_steps", said)
        assert out == f"note: {told}\na line about --train.max_steps that is none\n"
        assert f"warning: {told}" in err
    assert DomextError(f"a is HTML; run {command}")._render_traceback_() == [f"a is HTML; run {command}"]


def test_a_folder_of_results_is_a_path_and_a_short_table(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out")
    assert isinstance(folder, Path) and folder == tmp_path / "out" and Path(folder / "a") == tmp_path / "out" / "a"
    assert folder._repr_markdown_() is None, "nothing is there"
    folder.mkdir()
    summary = folder / "summary.json"
    counts = {"rows": 1200, "empty": 0, "malformed": 1, "labels": {"B": 7}}
    summary.write_text(json.dumps(counts))
    shown = "|  | number |\n|---|---:|\n| rows | 1,200 |\n| empty | 0 |\n| malformed | 1 |\n| label B | 7 |"
    assert folder._repr_markdown_() == f"{shown}\n\n`{folder}`"
    for broken in ("{", '{"rows": 1}', "[]"):
        summary.write_text(broken)
        assert folder._repr_markdown_() is None
    (folder / "comparison.md").write_text("# Title\n\nText.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nMore.\n| c |\n")
    assert folder._repr_markdown_() == f"| a | b |\n|---|---|\n| 1 | 2 |\n\n`{folder}`"


def test_a_run_is_its_table_and_a_link_to_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_summarised_run(tmp_path / "a&b <#1>", make_records())
    shown = domext_ray.Run(folder)._repr_html_()
    assert shown is not None and "<td>4.800</td><td>3.600</td><td>-25.0%</td>" in shown
    assert "<p>2,632,704 parameters trained, 32.1% of base and extension; 60 steps," in shown
    link = '<a href="a%26b%20%3C%231%3E/report.html">a&amp;b &lt;#1&gt;/report.html</a>'
    assert shown.endswith(f"<p>{link}</p>")
    (folder / "summary.json").unlink()
    assert domext_ray.Run(folder)._repr_html_() is None, "as text: not finished"


def test_a_mistake_is_a_sentence_about_arguments() -> None:
    for said, shown in (
        ("--optim.lr is -1.0; it must be above 0.", "optim.lr is -1.0; it must be above 0."),
        ("--seed is '--lr'; give --seed 1 (see --help).", "seed is '--lr'; give seed 1 (see --help)."),
        ("a head, as domext finetune --task ner makes it.", "a head, as domext finetune --task ner makes it."),
    ):
        for error in (DomextError(said), Stopped(said)):
            assert error._render_traceback_() == [shown] and str(error) == said


def test_ipython_shows_both(tmp_path: Path) -> None:
    """In a process of its own, because there is one shell in each."""
    pytest.importorskip("IPython")
    make_summarised_run(tmp_path / "af", make_records())
    shows = "get_ipython().display_formatter.format(Run('af'))"
    cells = "from domext_ray import Run, pretrain", "pretrain(seed='a')", shows
    code = f"from IPython import InteractiveShell\nfor cell in {cells}: InteractiveShell.instance().run_cell(cell)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    first, second = done.stdout.split("\n", 1)
    assert first == "seed is 'a'; it must be a whole number." and done.returncode == 0
    assert "'text/html': '<div" in second and "60 steps" in second


def read_cells(kind: str) -> list[str]:
    """The cells of the guide: code, or markdown."""
    cells = json.loads(GUIDE.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def test_the_guide_is_a_notebook_without_outputs() -> None:
    """What nbformat asks of version 4.5, and code that any notebook runs: ten lines or so, and public names alone."""
    notebook = json.loads(GUIDE.read_text(encoding="utf-8"))
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"].keys() == {"name", "display_name", "language"}
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", each) for each in ids)
    for cell in notebook["cells"]:
        of_code = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        assert cell == {name: cell[name] for name in ("cell_type", "id", "source")} | {"metadata": {}} | of_code
    code = "\n".join(read_cells("code"))
    assert len([line for line in code.splitlines() if line]) <= 12
    nodes = [*ast.walk(ast.parse(code))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported == {"domext_ray", "pandas", "pathlib"}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "domext_ray"}
    assert used == {"pretrain", "finetune", "predict"}


def run_cell(code: str, names: dict[str, Any]) -> Any:
    """Run a cell; return what its last expression is, which a notebook shows."""
    *before, last = ast.parse(code).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.jobs
@pytest.mark.timeout(3600)
def test_the_guide_finds_entities(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run, tuned, found = (run_cell(code, names) for code in read_cells("code"))
    for made, says in ((run, "held-out domain loss"), (tuned, "f1.micro, exported model")):
        assert says in made._repr_html_() and 'report.html">runs/' in made._repr_html_()
    assert tuned.scores["test"] > 0.6 and {"start", "end", "label", "text"} < {*found.columns}
    assert {*found.label} <= {"class", "function", "module", "option", "file"} and len(found) >= 2
