"""A trial as Ray Tune runs it: a step is a rung.

A trial is one process, which serves one trial after another and keeps its imports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray import tune

from domext_ray.errors import DomextError, RunError
from domext_ray.search.trial import SweepWork, Trial, list_shares, record_failure
from domext_ray.storage import write_json
from domext_ray.training.engine import join_alone

TRIALS = "trials"


class SweepTrial(tune.Trainable):
    """Reports a rung's figures at every step; a trial that cannot be trained as it is configured says why and ends."""

    def setup(self, config: dict[str, Any], work: SweepWork | None = None) -> None:
        """Begin a trial, or go on with it."""
        assert work is not None, "tune.with_parameters gives it"
        self.work = work
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another trial in this process."""
        self._close()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self.point = config["point"]
        self.folder = self.work.folder / TRIALS / config["name"]
        self.trial: Trial | None = None
        self.rung = 0

    def step(self) -> dict[str, Any]:
        """Train to the next rung and score it."""
        objectives = self.work.config.search.objectives
        try:
            record = self._run_rung()
            missing = [name for name in objectives if record[name] is None]
            if missing:
                raise RunError(f"--search.objectives has {missing[0]}, which this base and its probe do not give.")
        except DomextError as error:
            record_failure(self.folder, self.point, str(error))
            return {
                **{str(name): float("nan") for name in objectives},
                "done": True,
            }  # without a resource: nothing for the scheduler to compare with
        shares = list_shares(self.work.config)
        self.rung += 1
        result = {str(name): record[name] for name in objectives}
        resource = self.work.config.search.reduction ** (self.rung - 1)
        return {**result, "resource": resource, "done": self.rung == len(shares)}

    def _run_rung(self) -> dict[str, Any]:
        join_alone()
        if self.trial is None:
            self.trial = Trial(self.work, self.folder, self.point)
        return self.trial.run_rung(self.rung)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Keep which rung comes next; tensors are in the trial's own checkpoints."""
        write_json(Path(checkpoint_dir, "rung.json"), {"rung": self.rung})

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on with the rung that comes next."""
        self.rung = int(json.loads(Path(checkpoint, "rung.json").read_text(encoding="utf-8"))["rung"])

    def cleanup(self) -> None:
        """End the trial."""
        self._close()

    def _close(self) -> None:
        if self.trial is not None:
            self.trial.close()
            self.trial = None
