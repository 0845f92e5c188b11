"""Trials with real Ray: what has ended stays, what died or failed is told, and parts of a GPU are shared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from conftest import REPOSITORY
from object_store import BUCKET

from domext_ray.errors import ConfigError, DivergenceError, DomextError, RunError, TrainingError
from domext_ray.runtime.on_tune import run_trials
from domext_ray.runtime.tasks import Pool
from domext_ray.runtime.trials import Ledger, Outcome, Rules, Trial, Watch, run_here
from domext_ray.storage import Place

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.slow)])
def ledger(request: pytest.FixtureRequest, tmp_path: Path, objects: str) -> Ledger:
    """Where records are kept; not there yet."""
    return Ledger(Place(tmp_path / "records") if request.param == "disk" else Place(f"{BUCKET}/{tmp_path.name}"))


@dataclass
class Stub:
    """A trial's step: it says how often it was called, and fails or dies where its configuration says so."""

    folder: Path

    def __call__(self, item: tuple[Trial, int | None]) -> dict[str, Any]:
        trial, step = item
        marks = self.folder / f"{trial.name}-{step}"
        with marks.open("a") as file:
            file.write("x")
        if trial.config.get("dies", 0) >= marks.stat().st_size:
            os.kill(os.getpid(), signal.SIGKILL)
        if trial.config.get("sleeps"):
            (self.folder / "pid").write_text(str(os.getpid()))
            time.sleep(600)
        if trial.config.get("fails"):
            raise TrainingError("step 3 has a loss of nan.")
        if trial.config.get("mistaken"):
            raise ConfigError("--seed is -1; it must be 0 or more.")
        return {"value": trial.config["value"] + (step or 0)}


class Listening(Watch):
    """Notes what it hears, and stops what is below its bar."""

    def __init__(self, bar: float = 0.0) -> None:
        super().__init__(9, 0)
        self.bar, self.heard = bar, list[Outcome]()

    def step(self, outcome: Outcome) -> bool:
        """Stop what is too low."""
        return bool(outcome.steps[-1]["value"] < self.bar)

    def end(self, outcome: Outcome) -> None:
        """Note a trial."""
        self.heard.append(outcome)


def test_the_time_left_counts_from_the_first_part_of_a_trial_that_is_seen() -> None:
    watch = Listening()
    watch.line.started -= 100
    assert watch.describe_left(0.2) == "", "a process has started and read its data, and a checkpoint has had a part"
    watch.line.started -= 10
    assert watch.describe_left(1.2) == "about 1:18 left", "10 s for one of nine, of which 7.8 are left"
    whole = Listening()
    whole.line.started -= 100
    whole.num_ended = 2
    assert whole.describe_left() == "about 5:50 left"


def run(ledger: Ledger, folder: Path, trials: list[Trial], bar: float = 0.0, **options: Any) -> list[Outcome]:
    watch, pool = Listening(bar), Pool(partial(Stub, folder), workers=2, cpus=0.1)
    rules = Rules("trying", lambda trial, n: f"{trial.name} died {n}x.", failures=TrainingError, **options)
    run_trials(pool, trials, ledger, watch, rules)
    return sorted(watch.heard, key=lambda each: each.trial.name)


@pytest.mark.usefixtures("local_ray")
def test_what_has_ended_stays_and_more_may_come(ledger: Ledger, tmp_path: Path) -> None:
    trials = [Trial(name, {"value": value}) for value, name in enumerate("abc")]
    first = run(ledger, tmp_path, trials[:2], num_steps=2)
    assert [[each["value"] for each in one.steps] for one in first] == [[0, 1], [1, 2]]
    assert [each.status for each in first] == ["complete"] * 2 and ledger.list() == first
    changed = Trial("b", {"value": 7})
    grown = run(ledger, tmp_path, [trials[0], changed, trials[2]], num_steps=2)
    assert [each.trial for each in grown] == [changed, trials[2]], "one of another configuration is another trial"
    assert (tmp_path / "a-0").read_text() == "x"
    begun = replace(grown[1], steps=grown[1].steps[:1], status="")
    ledger.write(begun)
    assert run(ledger, tmp_path, [trials[2]], num_steps=2)[0].steps == grown[1].steps
    assert (tmp_path / "c-0").read_text() == "x" and (tmp_path / "c-1").read_text() == "xx"


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_what_fails_is_recorded_and_what_died_is_tried_again(tmp_path: Path) -> None:
    ledger = Ledger(Place(tmp_path / "records"))
    trials = [
        Trial("bad", {"value": 0, "fails": True}),
        Trial("dies", {"value": 0, "dies": 3}),
        Trial("good", {"value": 1}),
    ]
    bad, dies, good = run(ledger, tmp_path, trials, max_deaths=1)
    assert (bad.status, bad.failure, bad.has_ended) == ("failed", "step 3 has a loss of nan.", True)
    assert (dies.status, dies.failure, dies.has_ended) == ("failed", "dies died 2x.", False)
    assert good.status == "complete"
    (dies,) = run(ledger, tmp_path, trials, max_deaths=1)
    assert dies.status == "complete" and dies.failure == "" and (tmp_path / "bad-0").read_text() == "x"
    with pytest.raises(ConfigError, match=r"^--seed is -1; it must be 0 or more\.$"):
        run(ledger, tmp_path, [Trial("wrong", {"value": 0, "mistaken": True})])
    ledger.find("good").put(b'{"hash": ')
    with pytest.raises(RunError, match=r"good\.json .*; delete it: the same command runs that trial again"):
        run(ledger, tmp_path, trials)


@pytest.mark.usefixtures("local_ray")
def test_a_stopped_trial_has_ended_and_its_worker_is_told(tmp_path: Path) -> None:
    ledger = Ledger(Place(tmp_path / "records"))
    trials = [Trial("high", {"value": 5}), Trial("low", {"value": 1}), Trial("next", {"value": 6})]
    high, low, last = run(ledger, tmp_path, trials, bar=3.0, num_steps=3)
    assert [len(each.steps) for each in (high, low, last)] == [3, 1, 3]
    assert (high.status, low.status, low.has_ended) == ("complete", "pruned", True)
    assert (tmp_path / "low-None").exists() and not (tmp_path / "high-None").exists()
    assert run(ledger, tmp_path, trials, num_steps=3) == []


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_trial_whose_process_died_goes_on_with_its_step(tmp_path: Path) -> None:
    ledger = Ledger(Place(tmp_path / "records"))
    (found,) = run(ledger, tmp_path, [Trial("dies", {"value": 3, "dies": 1})], num_steps=2, max_deaths=2)
    assert (found.status, found.deaths) == ("complete", 2) and [each["value"] for each in found.steps] == [3, 4]
    assert [(tmp_path / f"dies-{step}").read_text() for step in (0, 1)] == ["xx", "xx"], "no step is made twice"


class Stopping(Watch):
    """Gets a Ctrl-C while a trial works."""

    def __init__(self, begun: Path) -> None:
        super().__init__(1, 0)
        self.begun = begun

    def look(self, running: Sequence[Trial]) -> object:
        """Stop."""
        if self.begun.exists() and self.begun.read_text():
            raise KeyboardInterrupt
        return None


@pytest.mark.usefixtures("local_ray")
def test_ctrl_c_leaves_no_process_and_holds_no_cpus(tmp_path: Path) -> None:
    """A notebook goes on after it, and its next job needs them."""
    ledger, trials = Ledger(Place(tmp_path / "records")), [Trial("a", {"value": 0, "sleeps": True})]
    pool, rules = Pool(partial(Stub, tmp_path), 1, 0.1), Rules("trying", lambda trial, n: "it died")
    with pytest.raises(KeyboardInterrupt):
        run_trials(pool, trials, ledger, Stopping(tmp_path / "pid"), rules)
    pid, ends = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while psutil.pid_exists(pid) or ray.available_resources()["CPU"] < ray.cluster_resources()["CPU"]:
        assert time.monotonic() < ends
        time.sleep(0.1)
    assert ledger.list() == [Outcome(trials[0])], "it has begun, under a name that it keeps"


def test_trials_run_in_this_process(tmp_path: Path) -> None:
    ledger, made = Ledger(Place(tmp_path)), list[str]()

    def work(trial: Trial) -> dict[str, Any]:
        made.append(trial.name)
        if trial.config["rate"] > 1:
            raise DivergenceError("step 3 has a loss of nan.")
        return {"bits": trial.config["rate"]}

    trials = [Trial(str(rate), {"rate": rate}) for rate in (2, 1)]
    for _ in range(2):
        bad, good = run_here(trials, work, ledger, DivergenceError)
        assert bad.failure == "step 3 has a loss of nan." and good.steps == ({"bits": 1},)
    assert made == ["2", "1"]
    with pytest.raises(DomextError):
        run_here([Trial("3", {"rate": 3})], work, ledger, ConfigError)


SHARED = """
import sys, time
from functools import partial
from pathlib import Path
import psutil
import ray
from domext_ray.config.finetune import FinetuneConfig, GridConfig, TrainingScaleConfig
from domext_ray.finetuning.finetune import plan_resources
from domext_ray.runtime.on_tune import run_trials
from domext_ray.runtime.trials import Ledger, Rules, Trial, Watch
from domext_ray.runtime.tasks import Pool
from domext_ray.storage import Place

def work(folder, item):
    (folder / item[0].name).touch()
    ends = time.monotonic() + 60
    while len(list(folder.glob("t*"))) < 4 and time.monotonic() < ends:
        time.sleep(0.05)
    context, title = ray.get_runtime_context(), psutil.Process().cmdline()[0]
    seen, share = len(list(folder.glob("t*"))), context.get_assigned_resources()["GPU"]
    return {"seen": seen, "share": share, "gpus": context.get_accelerator_ids()["GPU"], "title": title}

def make(folder):
    return partial(work, folder)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False)
    scale = TrainingScaleConfig(use_gpu=True, gpus=0.25)
    config = FinetuneConfig(scale=scale, grid=GridConfig(lr=(1e-5, 2e-5, 3e-5), restarts=2))
    cpus, gpus, parallel = plan_resources(config)
    assert (cpus, gpus, parallel) == (1.0, 0.25, 4), "of six trainings"
    pool = Pool(partial(make, folder), parallel, cpus, gpus)
    trials = [Trial(f"t{i}", {"i": i}) for i in range(4)]
    ledger = Ledger(Place(folder / "records"))
    run_trials(pool, trials, ledger, Watch(4, 0), Rules("trying", lambda trial, n: "it died"))
    expected = {"seen": 4, "share": 0.25, "gpus": ["0"], "title": "ray::ResourceTrainable.train"}  # Ray Tune's
    assert [each.steps[0] for each in ledger.list()] == [expected] * 4, ledger.list()
"""


@pytest.mark.jobs
@pytest.mark.timeout(300)
def test_four_trials_share_a_card(tmp_path: Path) -> None:
    """A pretended one, as --scale.gpus 0.25 has it: each trial waits until it has seen that the other three run."""
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    environment = {**os.environ, "RAY_ADDRESS": "", "PYTHONPATH": str(REPOSITORY)}
    started = time.monotonic()
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - started < 200
