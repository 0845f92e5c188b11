"""How long a user waits for each kind of start, also beside the same starts of another checkout: `starts`.

Each start is a process of its own, offline, beside the base that ships. In every turn a side has a new folder, in which
a start finds what those before it left. Sides take turns at each start, for a shared machine drifts. This code goes
first, so it is the one that waits for what the machine does not yet have in memory.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from benchmarks.output import REPOSITORY, Record, Row, describe_commit, report, show, show_ratio, show_spread
from benchmarks.timing import Seconds, Watch, compare

from domext_ray.errors import ConfigError, RunError
from domext_ray.files import ASSETS
from domext_ray.runs.events import STAGES, TRAINING, EventReader, measure_times
from domext_ray.storage import Place
from domext_ray.text.data.names import SHIPPED_BASE

OURS, OTHER = "this code", "the other"
RUN, TEXTS, NUM_TEXTS = "runs/af", "texts.txt", 100
SETTINGS = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
SETTINGS |= {"DOMEXT_SERVE_TOKEN": "only-for-this-benchmark"}
STOPPED = 128 + signal.SIGTERM
LIMIT_SECONDS, LOOK_SECONDS = 1200.0, 0.2
"""After the first a start is killed. The second lie between looks at the processors' times of what it has started."""


def has_stepped(events: EventReader, port: int) -> bool:
    """Whether the run has made its first step since the reader was made."""
    return any(event.stage == TRAINING for event in events.read())


def answers(events: EventReader, port: int) -> bool:
    """Whether a server would answer."""
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection,
    ):
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    return False


@dataclass(frozen=True)
class Start:
    """A job that is started, `{port}` in whose options is a free one, and the exit code that it must have.

    It is timed to its end, or until something is true; if it must be `STOPPED`, it is then sent SIGTERM.
    """

    job: str
    options: str
    exit_code: int = 0
    until: Callable[[EventReader, int], bool] | None = None


FIRST = "--train.max_steps 40"  # enough that it is stopped before the last
STARTS: dict[str, dict[str, Start]] = {
    "mistake": {"mistake, no base read": Start("pretrain_af", "--train.max_stepps 2", 2)},
    "base_mistake": {"mistake, base read": Start("pretrain_af", "--train.seq_length 100000", 2)},
    "dry_run": {"dry run": Start("pretrain_af", "--dry_run")},
    "training": {
        "first command, to a step": Start("pretrain_af", FIRST, STOPPED, has_stepped),
        "resumed, to a step": Start("pretrain_af", FIRST, until=has_stepped),
        "finished, again": Start("pretrain_af", FIRST),
    },
    "finetune": {"fine-tuning, one epoch": Start("finetune", "--task code_entities --grid.epochs 1")},
    "predict": {f"predict, {NUM_TEXTS} rows": Start("predict", f"--model {SHIPPED_BASE} --input {TEXTS} --output out")},
    "serve": {"serve, to an answer": Start("serve", f"--model {SHIPPED_BASE} --port {{port}}", STOPPED, answers)},
}
"""Starts by what `--only` calls them and the names of their rows; of one entry each needs those before it."""


@dataclass(frozen=True)
class Taken:
    """What a start took: seconds, those of the processors over all its processes, and of a run's stages."""

    seconds: Seconds
    stages: Mapping[str, float]  # by names of `STAGES`; empty: it was not waited for a step
    others_frac: float


def run_starts(options: argparse.Namespace) -> None:
    """Time the starts of each side in turn; print and write them.

    A RunError says that a start failed, and has no figure; the others were timed.
    """
    sides, case = {OURS: REPOSITORY}, {"base": SHIPPED_BASE}
    if options.against:
        sides[OTHER] = other = Path(options.against).expanduser().resolve()
        if not (other / "jobs").is_dir() or not (other / "domext_ray").is_dir():
            raise ConfigError(f"--against is {options.against!r}; it must be a checkout, with jobs and domext_ray.")
        case["against"] = describe_commit(other)
    for checkout in sides.values():
        compileall.compile_dir(checkout / "domext_ray", quiet=2)  # else the first start does it
    timed, errors = defaultdict[str, dict[str, list[Taken]]](dict), list[str]()
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="domext-starts-") as temporary:
            folders = {side: _make_folder(Path(temporary, str(number))) for number, side in enumerate(sides)}
            for key in (known for known in STARTS if known in options.only):
                going = dict(folders)
                for (name, start), side in itertools.product(STARTS[key].items(), sides):
                    if side not in going:  # a start that this one needs has failed
                        continue
                    try:
                        taken = time_start(start, sides[side], going[side])
                        timed[name].setdefault(side, []).append(taken)
                        print(f"{name}, {side}: {show(taken.seconds.wall)} s", flush=True)
                    except RunError as error:
                        errors.append(f"{name}, {side}: {error}")
                        print(f"error: {errors[-1]}", flush=True)
                        del going[side]
    if timed:
        report(options, [make_record(case, timed, options.repeats, errors)], torch.device("cpu"))
    if errors:
        raise RunError(f"{len(errors)} of the starts failed; the lines above that begin with 'error' say how.")


def _make_folder(folder: Path) -> Path:
    """Make a folder with the texts that are predicted: everyday sentences without their first word."""
    folder.mkdir()
    sentences = (ASSETS / "general_probe.txt").read_text(encoding="utf-8").splitlines()[:NUM_TEXTS]
    masked = (f"[MASK] {sentence.split(maxsplit=1)[1]}\n" for sentence in sentences)
    (folder / TEXTS).write_text("".join(masked), encoding="utf-8")
    return folder


def time_start(start: Start, checkout: Path, folder: Path, limit: float = LIMIT_SECONDS) -> Taken:
    """Start a job of a checkout in a folder, and see it to its end; after `limit` seconds it is killed.

    A RunError says that it was, or that it ended otherwise than it must.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(checkout / "jobs" / f"{start.job}.py"), *start.options.format(port=port).split()]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    search = filter(None, [str(checkout), os.environ.get("PYTHONPATH")])
    environment |= {**SETTINGS, "PYTHONPATH": os.pathsep.join(search)}
    events, until, log = EventReader(Place(folder / RUN)), start.until, folder / "log.txt"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        with Watch(LOOK_SECONDS, weighs=False) as watch:
            began = time.perf_counter()
            job = psutil.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(_kill, job)
            has_come = _wait(job, limit, until and (lambda: until(events, port)))
            seconds = time.perf_counter() - began
        stages = measure_times(Place(folder / RUN)) if until is has_stepped else {}
        if has_come and start.exit_code == STOPPED:
            job.terminate()
        _wait(job, limit)
        code = job.wait()
    if code != start.exit_code or has_come != bool(until):
        *_, said = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
        raise RunError(f"it ended with exit code {code}, and must with {start.exit_code}; its last line is: {said}")
    return Taken(Seconds(seconds, watch.child_seconds), stages, watch.others_frac)


def _wait(job: psutil.Popen, limit: float, until: Callable[[], bool] | None = None) -> bool:
    """Wait until something is true, or the job is a zombie, whose times are still there; return whether it is true."""
    deadline = time.monotonic() + limit
    while job.status() != psutil.STATUS_ZOMBIE:
        if until and until():
            return True
        if time.monotonic() > deadline:
            raise RunError(f"it was killed after {limit:g} seconds.")
        time.sleep(0.1 if until else 0.01)
    return bool(until and until())


def _kill(job: psutil.Popen) -> None:
    """Kill a job that has not ended, with all that it started."""
    if job.poll() is None:
        for process in [*job.children(recursive=True), job]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.wait()


def make_record(
    case: Mapping[str, str],
    timed: Mapping[str, Mapping[str, Sequence[Taken]]],
    repeats: int,
    errors: Sequence[str] = (),
) -> Record:
    """Return what was timed, by names of rows and by sides, as a record; what failed in a turn has no figure."""
    columns = defaultdict[str, dict[str, list[float]]](dict)  # by row
    for name, side, turns in ((name, *pair) for name, found in timed.items() for pair in found.items()):
        if len(turns) == repeats:
            columns[name][f"{side}, s"] = [turn.seconds.wall for turn in turns]
            columns[name][f"{side}, processor s"] = [turn.seconds.cpu for turn in turns]
            for stage in (known for known in STAGES if any(known in turn.stages for turn in turns)):
                columns[f"{name}: {STAGES[stage]}"][f"{side}, s"] = [turn.stages.get(stage, 0.0) for turn in turns]
    rows, ratios = list[Row](), dict[str, dict[str, float]]()
    for name, own in columns.items():
        row = {"": name, **{column: show_spread(values) for column, values in own.items()}}
        for what in ("s", "processor s"):
            ours, other = (own.get(f"{side}, {what}", []) for side in (OURS, OTHER))
            if ours and min(other, default=0.0) > 0:
                ratios[f"{name}, {what}"] = compare(ours, other)
                row[f"ratio, {what}"] = show_ratio(ratios[f"{name}, {what}"])
        rows.append(row)
    every = [turn for found in timed.values() for turns in found.values() for turn in turns]
    others = sum(turn.others_frac * turn.seconds.wall for turn in every) / sum(turn.seconds.wall for turn in every)
    results = {f"{name}, {column}": values for name, own in columns.items() for column, values in own.items()}
    return Record("starts", case, rows, "s", results, {"ratios": ratios, "errors": [*errors]}, others)
