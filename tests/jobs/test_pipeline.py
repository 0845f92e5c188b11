"""The whole path, with real Ray, DeepSpeed and processes that die: text in, the same losses and an export out.

One job is a process of its own, which is killed; the others train in this process on the session's Ray.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_processes import find_workers, kill_job, start_job, stop_job
from pretrain_jobs import (
    LONG_EVALUATIONS,
    count_steps,
    read_losses,
    run_job,
    train_here,
    wait_for_step,
    write_command,
)

from domext_ray.config.pretrain import PretrainConfig, RunConfig, SettledConfig
from domext_ray.errors import ConfigError, ReportError, RunError
from domext_ray.model import base as base_module
from domext_ray.model.base import load_base
from domext_ray.pretraining.inputs import get_or_build_tokenizer
from domext_ray.pretraining.plan import is_finished
from domext_ray.runs.events import EVENTS, STAGES
from domext_ray.runs.run_directory import read_config, read_run, resolve_paths, write_run
from domext_ray.storage import Place
from domext_ray.training.checkpoint import list_steps

pytestmark = pytest.mark.timeout(1800)  # processes that start Ray: minutes on a busy machine
NUM_STEPS = 30


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 3,000 lines over a small vocabulary."""
    random = np.random.default_rng(0)
    words = "the a house tree river small old bright runs sees finds near under over and but dog cat child".split()
    lines = [" ".join(random.choice(words, 14)) + "." for _ in range(3000)]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build_command(base: Path, corpus: Path, runs: Path, name: str, *flags: str) -> list[str]:
    options = f"--train.max_steps {NUM_STEPS} --train.save_every 5 --train.evaluate_every 15 --replay.corpus none"
    return write_command("af", base, corpus, runs, name, f"{options} --method.ffn_units 16", *flags)


BASE_READS = list[Path]()
"""The folders from which this process read a base while the undisturbed run was made."""


@pytest.fixture(scope="module")
def undisturbed(
    local_ray: None, tiny_base_folder: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of one worker at ZeRO 0 that nothing disturbs; without dropout, so that more workers have its losses.

    That a run with dropout goes on exactly is in the matrix (test_methods.py) and in test_engine.py.
    """
    runs = tmp_path_factory.mktemp("runs")
    real = base_module.read_weights

    def read_weights(folder: Path, base: str) -> dict[str, Any]:
        BASE_READS.append(folder)
        return real(folder, base)

    base_module._held.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_module, "read_weights", read_weights)
        train_here(build_command(tiny_base_folder, corpus_file, runs, "plain"))
    return runs / "plain"


def test_a_job_reads_its_base_once(undisturbed: Path, tiny_base_folder: Path) -> None:
    """For its plan, and not again for the report and the export; its worker, another process, reads it, too."""
    assert [tiny_base_folder] == BASE_READS


def test_a_run_leaves_everything_and_says_when_it_is_finished(
    undisturbed: Path, tiny_base_folder: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics.jsonl", "summary.json", "report.html", "config.yaml", "run.json", "tensorboard"):
        assert (undisturbed / name).exists(), name
    assert (undisturbed / "export" / "model.safetensors").exists()
    summary: dict[str, Any] = json.loads((undisturbed / "summary.json").read_text())
    assert summary["train"]["steps"] == NUM_STEPS
    assert summary["domain"]["mlm_loss"]["after"] < summary["domain"]["mlm_loss"]["before"]
    assert 0 < summary["parameters"]["trainable_frac"] < 1
    before = (undisturbed / "metrics.jsonl").read_bytes()
    start_again(undisturbed, tiny_base_folder, corpus_file)
    assert "nothing is left to do" in capsys.readouterr().out
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_says_where_its_time_went(undisturbed: Path) -> None:
    times = json.loads((undisturbed / "summary.json").read_text())["job_seconds"]
    assert list(times) == list(STAGES) and all(seconds > 0 for seconds in times.values())
    page = (undisturbed / "report.html").read_text(encoding="utf-8")
    page = page[page.index("Where the time went") :]
    shown = [page.find(f">{title}<") for title in STAGES.values()]
    assert shown[:-2] == sorted(shown[:-2]) and shown[0] > 0  # the page is written before the model is exported


@pytest.fixture
def copied(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the undisturbed run, to be damaged."""
    return Path(shutil.copytree(undisturbed, tmp_path / "plain"))


def start_again(run: Path, base: Path, corpus: Path, *flags: str) -> None:
    """Give a run's command again, in this process: of what ends before Ray starts."""
    train_here(build_command(base, corpus, run.parent, run.name, *flags))


def test_a_moved_base_and_a_moved_text_are_the_same_run(
    copied: Path, tiny_base_folder: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(tiny_base_folder, tmp_path / "moved" / "base")
    corpus = shutil.copy(corpus_file, tmp_path / "moved" / "text.txt")
    start_again(copied, base, Path(corpus))
    assert "nothing is left to do" in capsys.readouterr().out
    assert read_config(Place(copied), SettledConfig).base == str(base), "an export finds it"
    with Path(corpus).open("a") as file:
        file.write("one line more than the run was made with\n")
    with pytest.raises(RunError, match=r"belongs to another run \(--corpus was .* and is .*text\.txt now\)"):
        start_again(copied, base, Path(corpus))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(RunError, match=r"the base's hidden_act was gelu and is relu now"):
        start_again(copied, base, corpus_file)


def test_where_all_checkpoints_are_damaged_nothing_begins_anew(
    copied: Path, tiny_base_folder: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "report.html").unlink()  # not finished
    older, newer = sorted((copied / "checkpoints").iterdir())
    flip(newer / "tensors.safetensors")
    start_again(copied, tiny_base_folder, corpus_file, "--dry_run", "true")
    said = capsys.readouterr().out
    assert f"{newer} is passed over (tensors.safetensors differs" in said and "goes on from step 25" in said
    (older / "moments.safetensors").unlink()
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    for flags in ((), ("--dry_run", "true")):
        with pytest.raises(
            RunError, match=r"step-00000030-\d+: tensors.* step-00000025-\d+: moments.* is missing"
        ) as raised:
            start_again(copied, tiny_base_folder, corpus_file, *flags)
        assert f"delete {copied / 'checkpoints'}" in str(raised.value)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.jobs
@pytest.mark.parametrize("log_fails", [False, True])
def test_a_report_that_fails_keeps_no_model_back(
    log_fails: bool, copied: Path, tiny_base_folder: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does a page of before the end stay, whatever else fails."""
    (copied / "curves.png").unlink()
    shutil.rmtree(copied / "export")
    blocked = copied / "report_error.log" / "not empty"
    if log_fails:
        blocked.mkdir(parents=True)
    (copied / "curves.png" / "not empty").mkdir(parents=True)  # so no picture can take its place
    with pytest.raises(
        ReportError, match=r"export is whole, but .*curves\.png.*report_error\.log\); the same"
    ) as raised:
        start_again(copied, tiny_base_folder, corpus_file)
    assert raised.value.exit_code == 3 and len(str(raised.value).splitlines()) == 1
    assert (copied / "export" / "model.safetensors").exists() and not (copied / "report.html").exists()
    if log_fails:
        blocked.rmdir()
        blocked.parent.rmdir()
    else:
        assert "Traceback" in (copied / "report_error.log").read_text()
    (copied / "curves.png" / "not empty").rmdir()
    (copied / "curves.png").rmdir()
    start_again(copied, tiny_base_folder, corpus_file)
    assert (copied / "report.html").exists() and not (copied / "report_error.log").exists()
    capsys.readouterr()
    start_again(copied, tiny_base_folder, corpus_file)
    assert "nothing is left to do" in capsys.readouterr().out


def test_more_steps_than_the_schedule_has_are_refused(
    copied: Path, tiny_base_folder: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"--train\.max_steps is 45; .* ends at step 30.*max_steps 15 trains"):
        start_again(copied, tiny_base_folder, corpus_file, "--train.max_steps", "45")
    start_again(copied, tiny_base_folder, corpus_file, "--train.max_steps", "45", "--train.max_tokens", "9999999")
    said = capsys.readouterr().out
    assert "the run ends at step 30 at the latest" in said and f"--init_from {copied} --run.name NEW trains" in said
    flags = ("--train.max_steps", "45", "--optim.decay_steps", "40", "--dry_run", "true")
    with pytest.raises(ConfigError, match=r"--train\.max_steps is 45; it must be at most --optim\.decay_steps \(40\)"):
        start_again(copied.with_name("fresh"), tiny_base_folder, corpus_file, *flags)


def test_a_run_is_finished_when_its_newest_checkpoint_is_exported(copied: Path) -> None:
    config = read_config(Place(copied), SettledConfig)
    assert is_finished(Place(copied), config)
    marker = copied / "export" / "domext_export.json"
    record = json.loads(marker.read_text())
    for change in ({"step": 25}, {"checkpoint_sha256": "0" * 64}):  # killed before a later step's export
        marker.write_text(json.dumps({**record, **change}))
        assert not is_finished(Place(copied), config), change
    marker.unlink()
    assert not is_finished(Place(copied), config)
    marker.write_text(json.dumps(record))
    shutil.rmtree(copied / "checkpoints")
    assert is_finished(Place(copied), config), "they were deleted to save space"


def test_a_version_that_draws_in_another_way_does_not_go_on(
    copied: Path, tiny_base_folder: Path, corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "report.html").unlink()  # not finished
    run = read_run(Place(copied))
    assert run["versions"][0]["from_step"] == 0 and run["order"]["max_lanes"] == 64
    run["versions"][0] |= {"torch": "1.0", "domext_ray": "0.0.9"}
    write_run(Place(copied), **run)
    start_again(copied, tiny_base_folder, corpus_file, "--dry_run", "true")
    said = capsys.readouterr().out
    assert "note: torch: '1.0' -> " in said and "python" not in said
    write_run(Place(copied), order={**run["order"], "version": 0})
    with pytest.raises(RunError, match=r"version: 0 -> 1.*finish it with domext_ray 0\.0\.9"):
        start_again(copied, tiny_base_folder, corpus_file)


def test_another_identity_is_refused(undisturbed: Path, tiny_base_folder: Path, corpus_file: Path) -> None:
    with pytest.raises(RunError, match=r"--method\.heads was 1 and is 2 now"):
        start_again(undisturbed, tiny_base_folder, corpus_file, "--method.heads", "2")


@pytest.mark.jobs
def test_killed_worker_and_killed_job_leave_the_same_losses(
    undisturbed: Path, tiny_base_folder: Path, corpus_file: Path
) -> None:
    """SIGKILL of a worker at step 7, of the whole job at step 13, then the same command, on the session's Ray."""
    command = build_command(tiny_base_folder, corpus_file, undisturbed.parent, "killed")
    run = undisturbed.parent / "killed"
    process = start_job([*command, *LONG_EVALUATIONS])
    wait_for_step(run, 7, process)
    find_workers(process, "TrainWorker")[0].kill()
    wait_for_step(run, 13, process)
    said = (run / EVENTS).read_text(encoding="utf-8")  # which the driver's terminal shows
    assert "worker 0 failed (" in said and "failure 1 of at most 3 (--scale.max_failures); all workers start" in said
    kill_job(process)
    assert count_steps(run) < NUM_STEPS
    train_here(command)
    assert read_losses(run, NUM_STEPS) == read_losses(undisturbed, NUM_STEPS)
    newest = max(path.name for path in (run / "checkpoints").iterdir())
    assert newest == f"step-{NUM_STEPS:08d}-0003", "workers that start again are an attempt of their own"


@pytest.mark.jobs
def test_workers_of_which_one_is_sent_sigterm_save_the_next_step(
    undisturbed: Path, tiny_base_folder: Path, corpus_file: Path
) -> None:
    """As a machine does that goes down: whichever rank hears of it, all save at one step, and nothing is lost."""
    options = ("--scale.num_workers", "2", "--scale.max_failures", "0", "--train.save_every", "1000")
    command = build_command(tiny_base_folder, corpus_file, undisturbed.parent, "told", *options)
    run = undisturbed.parent / "told"
    process = start_job([*command, *LONG_EVALUATIONS])
    for number, step in enumerate((3, 12)):
        wait_for_step(run, step, process)
        find_workers(process, "TrainWorker")[number].terminate()
    assert process.wait(600) == 0
    said = [json.loads(line) for line in (run / EVENTS).read_text(encoding="utf-8").splitlines()]
    assert sum(event.get("note", "").startswith("a worker was sent SIGTERM; ") for event in said) == 2
    saves = [event for event in said if event.get("phase", "").startswith("saving the checkpoint")]
    assert len(saves) == 2 + 2, "before the evaluations in the middle and at the end, too"
    np.testing.assert_allclose(read_losses(run, NUM_STEPS), read_losses(undisturbed, NUM_STEPS), atol=1e-4)


@pytest.mark.jobs
def test_a_job_that_sigterm_ends_saves_and_goes_on_with_the_same_losses(
    undisturbed: Path, tiny_base_folder: Path, corpus_file: Path
) -> None:
    command = build_command(tiny_base_folder, corpus_file, undisturbed.parent, "stopped")
    run = undisturbed.parent / "stopped"
    process = start_job([*command, *LONG_EVALUATIONS, "--train.evaluate_every", "1"], stderr=subprocess.PIPE)
    wait_for_step(run, 3, process)
    said = stop_job(process, signal.SIGTERM)
    newest = max(list_steps(Place(run / "checkpoints")))
    assert said.endswith(f"stopped at step {newest} by SIGTERM; the same command goes on from there.\n")
    run_job(command)
    assert read_losses(run, NUM_STEPS) == read_losses(undisturbed, NUM_STEPS)


def test_a_mistake_ends_a_job(tiny_base_folder: Path, tmp_path: Path) -> None:
    """On a machine where Ray was never started, too: the corpus is looked at before Ray is."""
    missing, home = tmp_path / "missing.txt", tmp_path / "home"
    home.mkdir()
    command = build_command(tiny_base_folder, missing, tmp_path / "runs", "bad")
    result = run_job(command, expect=2, env={**os.environ, "HOME": str(home)})
    assert not (home / ".ray").exists()
    assert result.stderr.startswith("error: ") and str(missing) in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_half_a_copy_of_the_bases_tokenizer_is_replaced(tiny_base_folder: Path, tmp_path: Path) -> None:
    """A job that was killed while it copied it would find it again."""
    config = PretrainConfig(base=str(tiny_base_folder), run=RunConfig(dir=str(tmp_path), name="run"))
    base, paths = load_base(config.base), resolve_paths(config)
    folder = get_or_build_tokenizer(config, base, paths)
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    assert get_or_build_tokenizer(config, base, paths) == folder
    assert (folder / "tokenizer.json").read_bytes() == whole
    assert paths.run.list_names() == ["tokenizer"]


SHAPES = [(2, 3, 4), (1, 1, 8), (1, 2, 4), (1, 3, 8), (2, 0, 4), (2, 0, 2), (2, 1, 2), (2, 2, 4), (4, 0, 2), (4, 3, 1)]


@pytest.mark.jobs
@pytest.mark.parametrize(("num_workers", "zero_stage", "micro_batch_size"), SHAPES)
def test_losses_do_not_depend_on_workers_stage_or_accumulation(
    tiny_base_folder: Path,
    corpus_file: Path,
    undisturbed: Path,
    num_workers: int,
    zero_stage: int,
    micro_batch_size: int,
) -> None:
    name = f"w{num_workers}-z{zero_stage}-m{micro_batch_size}"
    flags = ("--scale.num_workers", str(num_workers), "--engine.zero_stage", str(zero_stage))
    flags += ("--train.micro_batch_size", str(micro_batch_size))
    train_here(build_command(tiny_base_folder, corpus_file, undisturbed.parent, name, *flags))
    found, expected = read_losses(undisturbed.parent / name, NUM_STEPS), read_losses(undisturbed, NUM_STEPS)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.usefixtures("far_cluster")
def test_dry_run_starts_nothing(
    tiny_base_folder: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(build_command(tiny_base_folder, corpus_file, tmp_path / "runs", "dry", "--dry_run", "true"))
    said = capsys.readouterr().out
    assert "trainable" in said and "without Python and its libraries, on a CPU (--scale.use_gpu true" in said
    assert "training time         not known: the cluster trains, not this machine; give --train.tok" in said
    assert not (tmp_path / "runs").exists()
