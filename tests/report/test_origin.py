"""Where a run comes from: how it was started, by which code, what trains."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from domext_ray.config.method import MethodConfig
from domext_ray.model.base import load_base
from domext_ray.model.spec import UNKNOWN_WORD, ModelSpec
from domext_ray.report import summary
from domext_ray.report.summary import count_trained, describe_command, describe_start, find_commit, read_origin
from domext_ray.runs.run_directory import add_versions, list_versions, write_run
from domext_ray.storage import Place


def test_a_command_names_no_folder() -> None:
    for args, said in (
        (
            ["/opt/venv/bin/domext", "pretrain", "af", "--corpus", "/home/ann/*.txt", "--run.name", "a b"],
            "domext pretrain af --corpus '*.txt' --run.name 'a b'",
        ),
        (["/x/domext_ray/__main__.py", "pretrain", "af", "--base=/x/bert"], "domext pretrain af --base=bert"),
        (["/home/ann/domext/jobs/pretrain_af.py", "--dry_run", "true"], "python jobs/pretrain_af.py --dry_run true"),
        (["/home/ann/notebook.py", "secret"], ""),
        (["-c"], ""),
        ([], ""),
    ):
        assert describe_command(args) == said


def test_the_commit_is_that_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "domext_ray" / "report" / "summary.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    monkeypatch.setattr(summary, "__file__", str(file))
    assert find_commit() == "", "no checkout"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert find_commit() == commit[:12]
    file.write_text("x = 2\n")
    assert find_commit() == f"{commit[:12]}+"


def test_the_first_start_stays(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/domext", "pretrain", "af"])
    first = {**describe_start(Place(tmp_path)), "parameters": {}, "corpus": {"rows": 1}}
    record = {"identity": {}, "order": {}, "versions": add_versions(Place(tmp_path), 0)}
    write_run(Place(tmp_path), **record, origin={**first, "started": "2020-01-01T00:00:00+00:00"})
    write_run(Place(tmp_path), origin={**describe_start(Place(tmp_path)), "parameters": {}, "corpus": {"rows": 2}})
    again = read_origin(Place(tmp_path))
    assert again["started"].startswith("2020") and again["corpus"] == {"rows": 2}
    assert again["command"] == "domext pretrain af" and " CPU" in again["machine"]
    assert again["versions"] == list_versions()


def test_what_trains_is_counted_by_kind(tiny_base_folder: Path) -> None:
    for method, num_words, kinds in (
        (MethodConfig(heads=1, ffn_units=8), 0, {"heads", "units"}),
        (MethodConfig(heads=1, ffn_units=8, train_heads=True), 0, {"heads", "units", "heads of the model"}),
        (MethodConfig(trains="all", heads=0, ffn_units=0), 0, {"every parameter"}),
        (MethodConfig(trains="top_layers", top_layers=1, heads=0, ffn_units=0), 0, {"the top 1 layers"}),
        (MethodConfig(heads=0, ffn_units=0, module_hidden_size=16, module_ffn_size=16), 7, {"modules", "new words"}),
    ):
        base = load_base(str(tiny_base_folder))
        spec = ModelSpec(base, method, new_words=[UNKNOWN_WORD] * num_words)
        found = count_trained(spec)
        assert found.keys() == kinds and sum(found.values()) == spec.counts.trainable
