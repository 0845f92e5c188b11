"""Trials on Ray Tune, which places them on the cluster, lets it grow, and starts processes again that have died.

Enters: trials, and what does their steps. Leaves: their records, which are all that the same command goes on with: Tune
keeps its own state in a temporary folder, and takes no checkpoints.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayTaskError
from ray.tune.search import Searcher

from domext_ray.errors import StorageError, find_user_error
from domext_ray.runtime.ray_cluster import ask_waiting, describe_waiting
from domext_ray.runtime.tasks import END_SECONDS, Pool
from domext_ray.runtime.trials import Ledger, Outcome, Rules, Step, Trial, Watch
from domext_ray.runtime.waiting import RoomTimer, StallTimer

SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # no table on the terminal
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a relative path of the user's is one from where the job was started
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # its own answer to Ctrl-C returns as if all trials had ended
}
"""Of Ray Tune, in the environment."""
LOOK_SECONDS = 1.0


def run_trials(pool: Pool, trials: Iterable[Trial], ledger: Ledger, watch: Watch, rules: Rules) -> None:
    """Run the steps of trials that have no record yet on Ray Tune; Ray is initialised.

    The pool's function is given a trial and a step's number, one after another, or None for the number where the trial
    was stopped. Trials are taken as workers come free; a mistake that they share, or no room for any, ends all.
    """
    os.environ.update(SETTINGS)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what matters of it the watch says in a line
    coming = (outcome for outcome in map(ledger.read, trials) if not outcome.has_ended)
    if (first := next(coming, None)) is None:
        return
    session = _Session(pool, chain([first], coming), ledger, watch, rules)
    with tempfile.TemporaryDirectory(prefix="trials-") as folder:
        tuner = tune.Tuner(
            tune.with_resources(_Process, {"CPU": pool.cpus, "GPU": pool.gpus}),
            tune_config=tune.TuneConfig(
                num_samples=-1,
                search_alg=session,
                max_concurrent_trials=pool.workers,
                reuse_actors=rules.reuses,
                trial_name_creator=lambda trial: str(trial.config["name"]),
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=folder,
                stop=session,
                callbacks=[session],
                failure_config=tune.FailureConfig(max_failures=rules.max_deaths),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except KeyboardInterrupt as stopped:
            traceback.clear_frames(stopped.__traceback__)  # Tune gives back what it holds when nobody refers to it
            gc.collect()
            raise
        finally:
            session.end()


class _Process(tune.Trainable):
    """A process that is given one trial after another; a step of Tune's is a step of the trial's."""

    function: Callable[[tuple[Trial, int | None]], Step] | None = None
    trial: Trial | None = None  # that the function may still hold something of

    def take(self, pool: list[Any], trial: Trial, number: int, num_steps: int) -> None:
        """Take a trial and its next step; the pool comes as a reference: an error in reading it is one of the step."""
        (self.pool,), self.trial, self.number, self.num_steps = pool, trial, number, num_steps

    def step(self) -> dict[str, Any]:
        assert self.trial is not None
        try:
            self.function = self.function or ray.get(self.pool).make()
            reached = self.function((self.trial, self.number))
        except Exception as error:  # a value, because Tune would try again
            self.trial = None
            return {"error": find_user_error(error) or RayTaskError("step", traceback.format_exc(), error)}
        self.number += 1
        self.trial = None if self.number == self.num_steps else self.trial
        return {"reached": reached}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        return True

    def cleanup(self) -> None:
        if self.trial is not None and self.function is not None:
            self.function((self.trial, None))
            self.trial = None


class _Session(tune.Callback, tune.Stopper, Searcher):  # type: ignore[misc]  # get_state: none is kept
    """What Tune asks (which trial comes next, whether one is stopped) and tells (processes that start and die)."""

    def __init__(self, pool: Pool, coming: Iterator[Outcome], ledger: Ledger, watch: Watch, rules: Rules) -> None:
        super().__init__()
        self.pool, self.coming, self.ledger, self.watch, self.rules = ray.put(pool), coming, ledger, watch, rules
        self.running, self.since = dict[str, Outcome](), dict[str, float]()
        self.trials: list[Any] = []  # Tune's
        self.error: Exception | None = None
        self.stall, self.place, self.looked = StallTimer(watch.line, describe_waiting), object(), time.monotonic()
        self.room, self.placed = RoomTimer(ask_waiting), set[str]()  # ids of trials that have a process

    def __reduce__(self) -> Any:
        return object, ()  # for the state that Tune keeps

    def save(self, checkpoint_path: str) -> None:
        """Keep nothing: the ledger has all."""

    def on_trial_complete(self, *args: Any, **kwargs: Any) -> None:
        """Know it already."""

    def on_trial_result(self, *args: Any, **kwargs: Any) -> None:
        """Know it already."""

    def suggest(self, trial_id: str) -> Any:
        if (outcome := next(self.coming, None)) is None:
            return Searcher.FINISHED
        self.running[trial_id] = replace(outcome, status="", failure="", may_try_again=False, deaths=0)
        self.watch.begin(self.running[trial_id])
        return {"name": outcome.name, "trial": outcome.config}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        outcome, self.trials, self.since[trial.trial_id] = self.running[trial.trial_id], trials, time.monotonic()
        self.placed.add(trial.trial_id)
        with self._keep_error():
            self.ledger.write(outcome)  # its name is known from now on, and so is what it leaves before its first step
        step = len(outcome.steps), self.rules.num_steps
        trial.temporary_state.ray_actor.take.remote([self.pool], outcome.trial, *step)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        with self._keep_error():
            outcome, found = self.running[trial_id], result.get("error")
            if found is None:
                outcome = replace(outcome, steps=(*outcome.steps, result["reached"]))
                is_stopped, is_complete = self.watch.step(outcome), len(outcome.steps) == self.rules.num_steps
                outcome = replace(outcome, status="complete" if is_complete else "pruned" if is_stopped else "")
            elif isinstance(found, self.rules.failures) and not isinstance(found, StorageError):
                outcome = outcome.fail(str(found), may_try_again=getattr(found, "may_try_again", False))
            else:
                raise found
            self._record(trial_id, outcome)
            return bool(outcome.status)
        return True

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note_death(trial, is_last=False)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note_death(trial, is_last=True)

    def _note_death(self, trial: Any, *, is_last: bool) -> None:
        self.placed.discard(trial.trial_id)
        if self.error is not None:
            return
        with self._keep_error():
            outcome = replace(self.running[trial.trial_id], deaths=trial.num_failures)
            if is_last:
                outcome = outcome.fail(self.rules.explain_death(outcome.trial, outcome.deaths), may_try_again=True)
            self._record(trial.trial_id, outcome)

    def _record(self, trial_id: str, outcome: Outcome) -> None:
        now = time.monotonic()
        outcome = outcome.spend(now - self.since.get(trial_id, now))
        self.running[trial_id], self.since[trial_id] = outcome, now
        self.stall.note_move()
        self.ledger.write(outcome)
        if outcome.status:
            del self.running[trial_id]
            self.placed.discard(trial_id)
            self.watch.num_ended += 1
            self.watch.end(outcome)

    @contextlib.contextmanager
    def _keep_error(self) -> Iterator[None]:
        """Keep an error for `stop_all`: Tune would make a text of it."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def stop_all(self) -> bool:
        if self.error is not None:
            self.end()
            raise self.error
        if time.monotonic() - self.looked >= LOOK_SECONDS:
            seen, self.place = self.place, self.watch.look([outcome.trial for outcome in self.running.values()])
            self.stall.look(self.rules.verb) if self.place == seen else self.stall.note_move()
            with self._keep_error():  # raised at the next look
                self.room.note_work() if self.placed else self.room.check(self.rules.verb)
            self.looked = time.monotonic()
        return False

    def end(self) -> None:
        """End processes that are still there: what they write would come after what their job tidies up."""
        actors = [actor for trial in self.trials if (actor := trial.temporary_state.ray_actor) is not None]
        for process in actors:
            ray.kill(process)
        if asked := [process.get_current_ip_pid.remote() for process in actors]:
            ray.wait(asked, num_returns=len(asked), timeout=END_SECONDS)
