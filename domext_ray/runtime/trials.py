"""Trials of an experiment: each has a name and a configuration, runs once, and leaves a record.

Enters: trials, listed or drawn as workers come free, and what does a step of one. Leaves: FOLDER/NAME.json a trial, on
a disk or in a bucket, written as it begins and after each of its steps. A trial whose record has the hash of its
configuration is what its record says; the same command goes on with the steps that are missing, and more trials may
come at any time. What fails leaves its reason, and the others go on. Trials that differ in their seed alone are of one
arm, and a figure is what a step reached, by its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from domext_ray.errors import DomextError
from domext_ray.files import Kind, read_json
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.storage import Place, hash_values, write_json

Step: TypeAlias = dict[str, Any]
"""What a step of a trial reached, as JSON has it."""
_RECORD: dict[str, Kind] = {
    **{"hash": str, "config": dict, "steps": list, "status": str},
    **{"failure": str, "may_try_again": bool, "deaths": int, "seconds": (int, float)},
}


@dataclass(frozen=True)
class Trial:
    """A trial before its first step."""

    name: str  # of its record
    config: dict[str, Any]  # all that decides its result, beside what decides that of every trial; JSON


@dataclass(frozen=True)
class Outcome:
    """What a trial has left so far."""

    trial: Trial
    steps: tuple[Step, ...] = ()
    status: str = ""  # complete, pruned (by whoever watches) or failed; empty: it goes on
    failure: str = ""  # why it failed, as a sentence
    may_try_again: bool = False  # what failed was the machine, so the next start tries it again
    deaths: int = 0  # of its process, in the start that ended it
    seconds: float = 0.0  # that it held a worker, over all starts

    @property
    def name(self) -> str:
        """The trial's name."""
        return self.trial.name

    @property
    def config(self) -> dict[str, Any]:
        """The trial's configuration."""
        return self.trial.config

    @property
    def has_ended(self) -> bool:
        """Whether it needs no more steps."""
        return bool(self.status) and not self.may_try_again

    @property
    def is_complete(self) -> bool:
        """Whether it has ended well, and was not stopped."""
        return self.status == "complete"

    @property
    def reached(self) -> Step:
        """What its last step reached."""
        return self.steps[-1]

    def get(self, figure: str, step: int = -1) -> float:
        """Return a figure of a step, by default of the last one; NaN where that was not made or has none."""
        is_made = -len(self.steps) <= step < len(self.steps)
        value = self.steps[step][figure] if is_made else None
        return math.nan if value is None else float(value)

    def spend(self, seconds: float) -> Outcome:
        """Return it with so much more time spent."""
        return replace(self, seconds=self.seconds + seconds)

    def fail(self, failure: str, *, may_try_again: bool = False) -> Outcome:
        """Return it as one that failed."""
        return replace(self, status="failed", failure=failure, may_try_again=may_try_again)


@dataclass(frozen=True)
class Ledger:
    """The records of an experiment's trials."""

    place: Place  # their folder
    remedy: str = "delete it: the same command runs that trial again"  # what to do about a damaged one

    def find(self, name: str) -> Place:
        """Return the place of a trial's record."""
        return self.place / f"{name}.json"

    def read(self, trial: Trial) -> Outcome:
        """Return what a trial has left; nothing, if its name's record is of another configuration."""
        found = self._read(trial.name) if self.find(trial.name).is_file() else None
        is_its_own = found is not None and hash_values(found.config) == hash_values(trial.config)
        return found if found is not None and is_its_own else Outcome(trial)

    def read_all(self, trials: Iterable[Trial]) -> Sequence[Outcome]:
        """Return what each of some trials has left, as `read` does."""
        return [self.read(trial) for trial in trials]

    def list(self) -> list[Outcome]:
        """Return what all trials have left, in the order of their names."""
        names = [name for name in self.place.list_names() if name.endswith(".json") and not name.startswith(".")]
        return [self._read(name.removesuffix(".json")) for name in names]

    def _read(self, name: str) -> Outcome:
        values = read_json(self.find(name), self.remedy, _RECORD)
        kept = {field: values[field] for field in ("status", "failure", "may_try_again", "deaths", "seconds")}
        return Outcome(Trial(name, values["config"]), tuple(values["steps"]), **kept)

    def write(self, outcome: Outcome) -> None:
        """Keep what a trial has left."""
        values = {field: getattr(outcome, field) for field in _RECORD if field not in ("hash", "config", "steps")}
        config = outcome.config
        record = {"hash": hash_values(config), "config": config, "steps": [*outcome.steps], **values}
        write_json(self.find(outcome.name), record)


class Watch:
    """Looks on while trials run: on the terminal, and wherever else it is told.

    `num_ended` of the experiment's `number` of trials have ended before.
    """

    def __init__(self, number: int, num_ended: int) -> None:
        self.number, self.num_kept, self.num_ended = number, num_ended, num_ended
        self.line = StatusLine(is_due=False)
        self._begun: tuple[float, float] = (0.0, 0.0)  # seconds, and trials that had ended by then

    def begin(self, outcome: Outcome) -> None:
        """A trial begins, or goes on."""

    def step(self, outcome: Outcome) -> bool:
        """A step has ended; say whether its trial is to be stopped, where that was not the last one."""
        return False

    def end(self, outcome: Outcome) -> None:
        """A trial has ended."""

    def look(self, running: Sequence[Trial]) -> object:
        """A second has passed; return something that stays equal while nothing moves."""
        return time.monotonic()  # who cannot see it takes it for moving

    def describe_left(self, running: float = 0.0) -> str:
        """Return about how long the others will take, where that can be said; `running` counts parts of trials.

        What passes before the first part of one is seen is no measure: a process starts, and reads its data.
        """
        ended = self.num_ended - self.num_kept + running
        if running and not self._begun[0]:
            self._begun = (self.line.seconds, ended)
        seconds, before = self._begun
        done, number = ended - before, self.number - self.num_kept
        left = (self.line.seconds - seconds) / done * (number - ended) if done > 0.05 else -1.0
        return f"about {format_seconds(left)} left" if left >= 0.0 else ""


@dataclass(frozen=True)
class Rules:
    """What holds for all trials that are run together."""

    verb: str  # what the work is called where nothing moves
    explain_death: Callable[[Trial, int], str]  # why a trial whose process died so often has failed
    num_steps: int = 1  # of a trial that is not stopped
    max_deaths: int = 0  # of a trial's process, after which it has failed for this start
    reuses: bool = True  # a process is given one trial after another
    failures: type[DomextError] = DomextError  # mistakes that are one trial's own; any other error ends all


def run_here(
    trials: Iterable[Trial],
    work: Callable[[Trial], Step],
    ledger: Ledger,
    failures: type[DomextError] | tuple[()] = (),
) -> list[Outcome]:
    """Run trials of one step in this process, one after another, but for those that have ended; return what all left.

    `failures` are mistakes that are one trial's own; any other error ends all.
    """
    outcomes = []
    for trial in trials:
        outcome = ledger.read(trial)
        if not outcome.has_ended:
            started = time.monotonic()
            try:
                outcome = replace(outcome, steps=(work(trial),), status="complete", failure="", may_try_again=False)
            except failures as error:
                outcome = outcome.fail(str(error))
            ledger.write(outcome := outcome.spend(time.monotonic() - started))
        outcomes.append(outcome)
    return outcomes


def group_by_arm(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return outcomes by arm: trials that differ in their seed alone are of one."""
    arms = dict[str, list[Outcome]]()
    for outcome in outcomes:
        config = {name: value for name, value in outcome.config.items() if name != "seed"}
        arms.setdefault(hash_values(config), []).append(outcome)
    return [*arms.values()]


def choose_arm(outcomes: Iterable[Outcome], figure: str) -> list[Outcome]:
    """Return the complete trials of the arm whose figure has the highest mean over them; one trial is complete.

    Of equal arms the earliest is chosen, and one of which a trial failed only where there is no other.
    """
    arms = [arm for arm in group_by_arm(outcomes) if any(outcome.is_complete for outcome in arm)]
    whole = [arm for arm in arms if all(outcome.is_complete for outcome in arm)]
    complete = [[outcome for outcome in arm if outcome.is_complete] for arm in whole or arms]
    return max(complete, key=lambda arm: np.mean([outcome.get(figure) for outcome in arm]))


def describe_amount(outcomes: Iterable[Outcome], number: int, num_bytes: float, seconds: float = 0.0) -> str:
    """Return what so many trials take, given what they have left so far, as a dry run says it.

    One takes at most `num_bytes` of the disk, and as long as those that have ended took on average; `seconds` is what
    it takes before any has ended.
    """
    took = [outcome.seconds for outcome in outcomes if outcome.has_ended]
    left, mean = max(0, number - len(took)), sum(took) / len(took) if took else seconds
    hours = f"about {left * mean / 3600:.2f} hours one after another" if mean else "hours are told once one has ended"
    return f"{left} of {number} trials are left ({hours}); all take at most {number * num_bytes / 1e9:.2f} GB of disk"
