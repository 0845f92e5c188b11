"""A small run is killed again and again, where a seed says, and ends with the tensors of one that was left alone.

    python tests/faults/kills.py --kills 200 --seed 1      # about forty minutes on two quiet cores

Each round is a run in a bucket of a real S3 server, with a corpus that it prepares itself. Its processes are killed at
named points (`inject/sitecustomize.py`): a task that prepares text, a worker, or the driver. A job without a driver is
given again, while what the dead one started may still be at work. At its end the checkpoint's files, the export, the
prepared corpus, and every step's loss and tokens must equal those of the undisturbed run to the byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from conftest import FEW_SENTENCES, make_tiny_base, write_corpus  # noqa: E402
from object_store import BUCKET, KEYS, serve_objects  # noqa: E402

from domext_ray.report.summary import read_summary  # noqa: E402
from domext_ray.storage import Place  # noqa: E402
from domext_ray.training.checkpoint import check_all  # noqa: E402
from domext_ray.training.metrics import read_metrics  # noqa: E402

INJECT = TESTS / "faults" / "inject"
WORKER, CHECKPOINT = "domext_ray.training.worker:PretrainWorker", "domext_ray.training.checkpoint"
POINTS = {
    "preparation": ("domext_ray.text.corpus.shards:_hash_task", "domext_ray.text.corpus.shards:_write_task"),
    "step": (f"{WORKER}._train_step",),
    "save": ("domext_ray.training.saver:Saver.save", f"{CHECKPOINT}:save_checkpoint", f"{CHECKPOINT}:_prune"),
    "upload": (f"{CHECKPOINT}:_write_files",),
    "evaluation": ("domext_ray.training.measures:Measures.evaluate",),
    "report": ("domext_ray.pretraining.pipeline:report_run",),
    "export": ("domext_ray.pretraining.pipeline:export_run",),
}
"""What a run is doing when it is killed, and where that is known."""
SHARES = {"preparation": 4, "step": 3, "save": 4, "upload": 4, "evaluation": 4, "report": 1, "export": 1}
"""Kills of each in a round."""
NUM_STEPS, PATIENCE_SECONDS = 60, 1800


def choose_faults(draw: random.Random) -> list[dict[str, Any]]:
    """Choose where a round is killed: at calls whose numbers rise, before a point or some time into it."""
    faults = []
    for kind, number in SHARES.items():
        calls = Counter[str]()
        for _ in range(number):
            point = draw.choice(POINTS[kind])
            calls[point] += draw.randint(1, 4 if kind in ("preparation", "save", "upload", "evaluation") else 1)
            calls[point] += draw.randint(0, 20) if kind == "step" else 0
            by_driver = kind not in ("report", "export") and draw.random() < 0.25
            action = "kill_driver" if by_driver else "kill"
            delay = draw.choice([None, draw.uniform(0.0, 0.03)])
            faults.append({"kind": kind, "point": point, "call": calls[point], "action": action, "delay": delay})
    return faults


def list_command(base: Path, corpus: Path, run: Place, workers: int) -> list[str]:
    """The run: small, at fp32, with dropout, and with all that it does at short intervals."""
    return [
        *(sys.executable, "-c", "from domext_ray.commands.main import main; main()", "pretrain", "af"),
        *("--base", str(base), "--corpus", str(corpus), "--run.dir", str(run.parent), "--run.name", run.name),
        *("--train.max_steps", str(NUM_STEPS), "--train.save_every", "3", "--train.evaluate_every", "4"),
        *("--train.global_batch_size", "8", "--train.seq_length", "32", "--train.eval_rows", "16"),
        *("--train.general_probe", str(FEW_SENTENCES), "--engine.precision", "fp32", "--optim.lr", "1e-3"),
        *("--method.ffn_units", "8", "--replay.corpus", "none", "--run.trackers", "[]"),
        *("--prepare.shard_bytes", "8192", "--scale.use_gpu", "false", "--scale.max_failures", "1000"),
        *("--scale.num_workers", str(workers)),
    ]


def find_left(folder: Path) -> list[psutil.Process]:
    """Find what a job has started: Ray's processes are nobody's children once it is dead."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FAULTS_DIR") == str(folder):
                left.append(process)
    return left


def train(
    command: list[str],
    folder: Path,
    address: str,
    faults: list[dict[str, Any]],
    draw: random.Random,
    *,
    mistakes: bool = False,
) -> int:
    """Give a job again until it ends well; return how often.

    Args:
        command: of the job.
        folder: counts its calls and keeps what it says.
        address: of the S3 server.
        faults: what happens to it.
        draw: says how long what a dead driver has started goes on beside the next one.
        mistakes: it may also end with a sentence and code 2 or 3, and is given again.
    """
    home = folder / "home"
    home.mkdir(parents=True)
    path = os.pathsep.join([str(INJECT), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    given = {"FAULTS": json.dumps(faults), "FAULTS_DIR": str(folder), "PYTHONPATH": path, "HOME": str(home)}
    env = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": address, **given}
    deadline, left = time.monotonic() + PATIENCE_SECONDS, list[psutil.Process]()
    for number in range(1, 1000):
        log = folder / f"job-{number:03d}.log"
        with log.open("w") as file:
            job = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True, cwd=home)
        (folder / "driver").write_text(str(job.pid))
        time.sleep(draw.choice([0.0, draw.uniform(0.0, 12.0)]) if left else 0.0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            code, late = job.wait(max(1.0, deadline - time.monotonic())), ""
        except subprocess.TimeoutExpired:
            code, late = 1, f", for the round had not ended after {PATIENCE_SECONDS} s"
        left = find_left(folder)
        said = log.read_text()
        if code not in ((-9, 2, 3) if mistakes else (-9,)) or "Traceback" in said:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            assert code == 0 and "Traceback" not in said, f"{folder}: {code}{late}\n{said[-6000:]}"
            return number
        is_sentence = said.splitlines()[-1].startswith("error: ") if code > 0 else True
        assert is_sentence, said[-6000:]
    raise AssertionError("it was given a thousand times")


def describe_run(run: Place) -> dict[str, Any]:
    """All that must not depend on what happened to a run."""
    (newest, found), *_ = check_all(run / "checkpoints")
    assert not isinstance(found, str), found
    steps = [record for record in read_metrics(run / "metrics.jsonl") if "train/mlm_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1)), "each step once"
    names = ("train/mlm_loss", "train/tokens", "train/grad_norm", "eval/domain_mlm_loss", "eval/general_mlm_accuracy")
    corpora = run.parent / ".corpora"
    summary = read_summary(run / "summary.json")
    figures = {name: value for name, value in summary.items() if name not in ("job_seconds", "train")}
    counts = {name: value for name, value in summary["train"].items() if isinstance(value, int)}
    prepared = [name for name in corpora.list_files() if "/attempts/" not in f"/{name}" and ".hashes" not in name]
    return {
        "checkpoint": (newest.name.split("-")[1], {name: file["sha256"] for name, file in found.files.items()}),
        "steps": [[record.get(name) for name in names] for record in steps],
        "summary": (figures, counts),
        "export": (run / "export" / "model.safetensors").read_bytes(),
        "corpus": {name: (corpora / name).read_bytes() for name in prepared},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--least", type=int, default=25, help="of preparation, save, upload and evaluation each")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    draw, kills, given, started = random.Random(asked.seed), Counter[str](), 0, time.monotonic()
    expected: dict[int, Any] = {}
    with serve_objects() as address, tempfile.TemporaryDirectory(prefix="kills-") as name:
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": address})
        folder = Path(name)
        base, corpus = make_tiny_base(folder / "base"), write_corpus(folder / "corpus.txt", 900)
        for number in range(1, 100):
            workers = 1 + number % 2
            if workers not in expected:
                run = Place(f"{BUCKET}/alone-{workers}/run")
                train(list_command(base, corpus, run, workers), folder / f"alone-{workers}", address, [], draw)
                expected[workers] = describe_run(run)
            run, own = Place(f"{BUCKET}/killed-{number}/run"), folder / f"killed-{number}"
            times = train(list_command(base, corpus, run, workers), own, address, choose_faults(draw), draw)
            found = describe_run(run)
            for what, value in expected[workers].items():
                assert found[what] == value, f"round {number}: {what} differs from the undisturbed run"
            fired = [json.loads(line) for line in (own / "fired").read_text().splitlines()]
            kills.update(fault["kind"] for fault in fired)
            kills["driver"] += sum(fault["action"] == "kill_driver" for fault in fired)
            given += times
            print(
                f"round {number}: {len(fired)} kills, {times} jobs, {workers} workers, equal; so far {dict(kills)}, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
            is_enough = all(kills[kind] >= asked.least for kind in ("preparation", "save", "upload", "evaluation"))
            if is_enough and sum(kills[kind] for kind in POINTS) >= asked.kills:
                break
    total = sum(kills[kind] for kind in POINTS)
    print(f"{total} kills in {number} runs, {given} jobs: every run equal to the undisturbed one")


if __name__ == "__main__":
    main()
