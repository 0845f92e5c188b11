"""A notebook: its bar."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from domext_ray.progress import StatusLine, draw_bar


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
