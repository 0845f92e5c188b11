"""A run in a bucket: trained, killed, gone on with, exported, loaded; and what is said when storage fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import FEW_SENTENCES, write_corpus
from job_processes import find_workers, heed_signals, kill_job
from lone_process import check_export
from object_store import BUCKET, KEYS, Proxy, serve_objects, use_objects

from domext_ray.config.pretrain import SettledConfig
from domext_ray.pretraining.plan import is_finished
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place
from domext_ray.training.checkpoint import find_latest, list_steps
from domext_ray.training.metrics import read_metrics

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
NUM_STEPS = 24
PATIENCE_SECONDS = 300


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serve_objects() as address:
        yield address


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", 1500)


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What stands between a job and the server; this process asks the server itself."""
    made = Proxy(server)
    use_objects(server, monkeypatch)
    yield made
    made.close()


class Job:
    """A pre-training job as a process of its own, whose home and caches are below a folder of the test's."""

    def __init__(
        self, base: Path, corpus: Path, runs: str, name: str, home: Path, address: str, code: str = "", *more: str
    ) -> None:
        home.mkdir(exist_ok=True)
        code += "; from domext_ray.commands.main import main; main()"
        command = [
            *(sys.executable, "-c", code.lstrip("; "), "pretrain", "af", "--base", str(base), "--corpus", str(corpus)),
            *("--run.dir", runs, "--run.name", name, "--train.max_steps", str(NUM_STEPS)),
            *("--train.global_batch_size", "8", "--train.seq_length", "32", "--train.save_every", "6"),
            *("--train.evaluate_every", "12", "--train.eval_rows", "16", "--train.general_probe", str(FEW_SENTENCES)),
            *("--engine.precision", "fp32", "--method.ffn_units", "8", "--optim.lr", "1e-3"),
            *("--scale.use_gpu", "false", "--replay.corpus", "none", *more),
        ]
        env = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": address, "HOME": str(home)}
        env.pop("XDG_CACHE_HOME", None)
        env.pop("RAY_ADDRESS", None)
        self.log = home / f"{name}-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, cwd=home, start_new_session=True, preexec_fn=heed_signals
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self, code: int = 0) -> None:
        """Wait for its end."""
        assert self.process.wait(PATIENCE_SECONDS) == code, self.said[-4000:]
        assert "Traceback" not in self.said, self.said[-4000:]

    def wait_until(self, happened: Any) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            assert self.process.poll() is None, self.said[-4000:]
            assert time.monotonic() < deadline, self.said[-4000:]
            time.sleep(0.1)


def read_losses(run: Place) -> list[float]:
    steps = [record for record in read_metrics(run / "metrics.jsonl") if "train/mlm_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    return [record["train/mlm_loss"] for record in steps]


def test_a_run_in_a_bucket_survives_its_driver(
    tiny_base_folder: Path, corpus: Path, proxy: Proxy, tmp_path: Path, server: str
) -> None:
    undisturbed = Job(tiny_base_folder, corpus, str(tmp_path / "runs"), "plain", tmp_path / "home", server)
    undisturbed.wait()
    runs, run = f"{BUCKET}/{tmp_path.name}", Place(f"{BUCKET}/{tmp_path.name}/killed")
    first = Job(tiny_base_folder, corpus, runs, "killed", tmp_path / "home", server)
    first.wait_until(lambda: max(list_steps(run / "checkpoints"), default=0) >= 12)
    kill_job(first.process)
    assert max(list_steps(run / "checkpoints")) < NUM_STEPS, "it was killed half-way"
    second = Job(tiny_base_folder, corpus, runs, "killed", tmp_path / "home", server)
    second.wait()
    assert read_losses(run) == pytest.approx(read_losses(Place(tmp_path / "runs" / "plain")), abs=1e-6)
    names = {*run.list_names()}
    assert {"attempts", "checkpoints", "export", "config.yaml", "run.json"} <= names
    assert {"events.jsonl", "metrics.jsonl", "tokenizer", "tensorboard", "summary.json"} <= names
    assert {"report.html", "curves.png"} <= names and (run.parent / "index.html").is_file()
    assert is_finished(run, read_config(run, SettledConfig))
    left = {path.relative_to(tmp_path / "home").parts[:1] for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert {name for (name,) in left if not name.endswith(".log")} <= {".cache"}, left
    again = Job(tiny_base_folder, corpus, runs, "killed", tmp_path / "home", server)
    again.wait()
    assert "nothing is left to do" in again.said
    check_export(run / "export")


def test_a_corpus_in_a_bucket_is_prepared_through_deaths_and_read_by_three_workers(
    tiny_base_folder: Path, corpus: Path, tmp_path: Path, server: str, proxy: Proxy
) -> None:
    """A task's process is killed while the text is prepared, then the job; the next one ends as one on the disk."""
    more = ("--prepare.shard_bytes", "1024", "--train.global_batch_size", "12", "--scale.num_workers", "3")
    runs, run = f"{BUCKET}/{tmp_path.name}", Place(f"{BUCKET}/{tmp_path.name}/three")
    first = Job(tiny_base_folder, corpus, runs, "three", tmp_path / "home", server, "", *more)

    def count_parts() -> int:
        return sum("/parts/" in name for name in (run.parent / ".corpora").list_files())

    first.wait_until(lambda: count_parts() >= 3)
    first.wait_until(lambda: any(worker.kill() is None for worker in find_workers(first.process, "ray::_perform")))
    first.wait_until(lambda: "a worker died (WorkerCrashedError); its task is done again" in first.said)
    kill_job(first.process)
    names = [name for name in (run.parent / ".corpora").list_names() if not name.startswith(".hashes-")]
    (folder,) = (run.parent / ".corpora" / name for name in names)
    assert not (folder / "manifest.json").is_file() and run.list_names() != []
    second = Job(tiny_base_folder, corpus, runs, "three", tmp_path / "home", server, "", *more)
    second.wait()
    assert "parts were finished before" in second.said
    undisturbed = Job(tiny_base_folder, corpus, str(tmp_path / "runs"), "plain", tmp_path / "home", server, "", *more)
    undisturbed.wait()
    on_disk = Place(tmp_path / "runs" / ".corpora" / folder.name)
    names = [name for name in on_disk.list_files() if not name.startswith(("attempts/", ".hashes"))]
    assert names == [name for name in folder.list_files() if not name.startswith("attempts/")] and len(names) > 200
    assert [name for name in names if (folder / name).read_bytes() != (on_disk / name).read_bytes()] == []
    assert read_losses(run) == pytest.approx(read_losses(Place(tmp_path / "runs" / "plain")), abs=1e-6)
    assert list((tmp_path / "home").rglob("objects/*/train-*.arrow")), "it was read from this machine's copies"


def test_a_run_in_a_bucket_is_stopped_and_saved(
    tiny_base_folder: Path, corpus: Path, proxy: Proxy, tmp_path: Path, server: str
) -> None:
    run = Place(f"{BUCKET}/{tmp_path.name}/x")
    job = Job(tiny_base_folder, corpus, str(run.parent), "x", tmp_path / "home", server)
    job.wait_until(lambda: max(list_steps(run / "checkpoints"), default=0) >= 6)
    job.process.send_signal(signal.SIGTERM)
    job.wait(128 + signal.SIGTERM)
    saved = max(list_steps(run / "checkpoints"))
    assert f"stopped at step {saved} by SIGTERM; the same command goes on from there." in job.said
    newest = find_latest(run / "checkpoints", provisional=True)
    assert newest is not None and newest.step == saved
    is_evaluated = newest.unevaluated is None  # else its line comes behind its evaluation, which was broken off
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")][-1] == saved - (not is_evaluated)


def test_storage_that_refuses(tiny_base_folder: Path, corpus: Path, tmp_path: Path, proxy: Proxy) -> None:
    job = Job(tiny_base_folder, corpus, "s3://no-such-bucket/runs", "x", tmp_path / "home", proxy.address)
    job.wait(2)
    assert re.fullmatch(r"error: s3://no-such-bucket/runs/x.* cannot be read: there is no bucket .*\n", job.said)
    proxy.refused = "PUT"
    job = Job(tiny_base_folder, corpus, f"{BUCKET}/{tmp_path.name}", "x", tmp_path / "home", proxy.address)
    job.wait(2)
    place = f"{BUCKET}/{tmp_path.name}/x/attempts/000001.json"
    assert f"error: {place} cannot be written (AccessDenied): see to" in job.said


def test_storage_that_does_not_answer_for_a_minute(
    tiny_base_folder: Path, corpus: Path, tmp_path: Path, proxy: Proxy
) -> None:
    run = Place(f"{BUCKET}/{tmp_path.name}/x")
    job = Job(tiny_base_folder, corpus, str(run.parent), "x", tmp_path / "home", proxy.address)
    job.wait_until(lambda: max(list_steps(run / "checkpoints"), default=0) >= 6)
    proxy.silent_until = time.monotonic() + 60
    job.wait()
    assert re.search(
        r"note: s3://runs does not answer \((SlowDown|status 503)\); this job asks again for 120 s", job.said
    )
    assert "note: s3://runs answers again." in job.said
    assert len(read_losses(run)) == NUM_STEPS


def test_a_job_that_was_frozen_cannot_overwrite(
    tiny_base_folder: Path, corpus: Path, tmp_path: Path, server: str, proxy: Proxy
) -> None:
    """All of it is stopped half-way, another job takes the run over, and the first one comes back."""
    run = Place(f"{BUCKET}/{tmp_path.name}/x")
    first = Job(tiny_base_folder, corpus, str(run.parent), "x", tmp_path / "one", server)
    first.wait_until(lambda: max(list_steps(run / "checkpoints"), default=0) >= 6)
    processes = [first.process.pid, *(worker.pid for worker in find_workers(first.process, ""))]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    frozen_at = max(list_steps(run / "checkpoints"))
    assert frozen_at < NUM_STEPS
    impatient = "from domext_ray.runs import attempts; attempts.STALE_SECONDS = 3.0"
    second = Job(tiny_base_folder, corpus, str(run.parent), "x", tmp_path / "two", server, impatient)
    second.wait()
    losses, files = read_losses(run), {name: (run / name).info() for name in run.list_files()}
    for pid in reversed(processes):
        os.kill(pid, signal.SIGCONT)
    first.wait(2)
    assert "another job has taken over the run in" in first.said, first.said
    assert read_losses(run) == losses
    changed = [name for name in run.list_files() if files.get(name) != (run / name).info()]
    assert [name for name in changed if name != "events.jsonl"] == []
    assert json.loads((run / "summary.json").read_text())["train"]["steps"] == NUM_STEPS
