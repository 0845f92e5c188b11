"""Checkpoints of a run, written behind its training, one at a time.

Those of a step that is evaluated next are provisional: the step may have ruined the weights, unseen as yet.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from domext_ray.errors import DivergenceError
from domext_ray.model.build import Extensions
from domext_ray.runs.events import CHECKPOINTS, notify_driver
from domext_ray.storage import Place
from domext_ray.training.checkpoint import UNEVALUATED, Checkpoint, confirm_checkpoint, save_checkpoint
from domext_ray.training.engine import Engine
from domext_ray.training.metrics import MetricsLog, as_written
from domext_ray.training.run import Run

SAID_SECONDS = 1.0
"""Training that waits so long for a checkpoint says so."""


class Saver:
    """Saves what an engine trains. All ranks make one together, and call `save` together.

    `fixed` are frozen tensors that differ from the base, by name, which checkpoints carry. Rank 0 alone has a `log`.
    `checkpoint` is the one that the run goes on from; None: it begins.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        fixed: dict[str, Tensor],
        extensions: Extensions,
        log: MetricsLog | None,
        enter_phase: Callable[[str, str], None],
        checkpoint: Checkpoint | None,
    ) -> None:
        self.run, self.engine, self.fixed, self.log, self.enter_phase = run, engine, fixed, log, enter_phase
        self.run_info = {
            "base": run.config.base,
            "base_sha256": run.spec.base_sha256,
            "corpus_fingerprint": run.inputs.domain.fingerprint,
            "tokenizer_fingerprint": run.inputs.domain.tokenizer_fingerprint,
            "extensions": asdict(extensions),
        }
        # What ranks exchange about a checkpoint must not meet what their steps exchange.
        self._thread, self._group = ThreadPoolExecutor(1, "saver"), None
        if engine.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        self._saving: tuple[int, Future[Any]] | None = None
        self.unevaluated: dict[str, Any] | None = None
        """The record of the newest checkpoint's step, if it is provisional; None: it counts, or there is none."""
        self._wait: Callable[[], Place]
        if checkpoint is not None and checkpoint.unevaluated is not None:
            path = checkpoint.path
            self.unevaluated, self._wait = checkpoint.unevaluated, lambda: path

    def save(self, step: int, trainer_state: Mapping[str, Any], unevaluated: dict[str, Any] | None = None) -> None:
        """Begin to save a step; `unevaluated` is its record if it is evaluated next."""
        self.finish()
        self.enter_phase(f"saving the checkpoint of step {step:,}", CHECKPOINTS)
        if self.log is not None:
            self.log.publish()  # first: a run that goes on from this checkpoint has all figures up to it
        later = {UNEVALUATED: as_written(unevaluated)} if unevaluated is not None else {}
        copied = self.engine.copy_state()
        save = functools.partial(
            save_checkpoint,
            self.run.paths.run / "checkpoints",
            step,
            fixed=self.fixed,
            trainer_state={**trainer_state, **later},
            run_info=self.run_info,
            keep=self.run.config.run.keep_checkpoints,
            group=self._group,
        )
        saving = self._thread.submit(lambda: save(state=copied()))
        self._saving, self.unevaluated, self._wait = (step, saving), unevaluated, saving.result

    def confirm(self, step: int, loss: float, num_tokens: int) -> None:
        """Let the provisional checkpoint count, or delete it where the weights cannot predict.

        `loss` is that of held-out text, a mean over `num_tokens`.
        """
        wait, self.unevaluated = self._wait, None
        if num_tokens and not math.isfinite(loss):
            path = wait()
            if self.engine.rank == 0:
                path.delete()
            raise DivergenceError(
                f"after step {step:,} the held-out loss is {loss:g}, so the weights are "
                "not kept; give a lower --optim.lr under another --run.name."
            )
        if self.log is not None:
            self.log.publish()
            keep = self.run.config.run.keep_checkpoints
            self._saving = step, self._thread.submit(lambda: confirm_checkpoint(wait(), keep))

    def look(self) -> None:
        """Raise what has kept a checkpoint from being whole, if it has ended."""
        if self._saving is not None and self._saving[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is whole; raise what has kept it from that."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        started = time.perf_counter()
        if not saving.done():
            self.enter_phase(f"writing the checkpoint of step {step:,}", CHECKPOINTS)
        saving.result()
        waited = time.perf_counter() - started
        if waited >= SAID_SECONDS and self.engine.rank == 0:
            said = f"waited {waited:.1f} s for the checkpoint of step {step:,} to be written"
            notify_driver(self.run.paths.run, said)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
