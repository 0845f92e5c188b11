"""Records of a run's steps and parts: what metrics.jsonl says of each, and whether training can go on after it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import DivergenceError, TrainingError
from domext_ray.training.checkpoint import describe_resumption
from domext_ray.training.cost import Roofline, count_step, measure_peak_memory
from domext_ray.training.losses import Loss
from domext_ray.training.metrics import TRAIN, name_losses
from domext_ray.training.objective import KEEP_LOSS, LOSS, NEXT_SENTENCE_LOSS
from domext_ray.training.phases import Phase, count_epochs
from domext_ray.training.run import Run
from domext_ray.training.step import StepFigures

PART_TOKENS = "part_tokens"
"""What a checkpoint calls the tokens of each part."""
MAX_SKIPPED_STEPS = 10
"""Steps in a row that `--optim.on_non_finite skip` leaves out; after more of them the weights are beyond help."""
MAX_UNMASKED_STEPS = 20
"""Steps in a row without a masked token, after which the text or the tokenizer is to blame and not chance."""


class PartFigures:
    """What a run reads of each part of its mixture: tokens, epochs, the loss of its rows, and its held-out loss.

    Counts on, step after step, from what the checkpoint says that the run goes on from; nothing without parts. Entries
    of metrics.jsonl are `parts/NAME/FIGURE`.
    """

    def __init__(self, config: SettledConfig, phases: Sequence[Phase], trainer_state: Mapping[str, Any] | None) -> None:
        self.names, self._phases = [text.name for text in config.texts] if config.parts else [], phases
        self._tokens = [0 if trainer_state is None else int(trainer_state[PART_TOKENS][name]) for name in self.names]

    def count(self, micro_batches: Sequence[Any], tokens: Sequence[int]) -> list[int]:
        """Return what is to be added up over ranks: tokens of every part, given here, and then predicted ones."""
        if not self.names:
            return []
        predicted = [batch.count_predicted(len(self.names)) for batch in micro_batches]
        return [*tokens, *(sum(numbers) for numbers in zip(*predicted, strict=True))]

    def describe(self, step: int, counts: Sequence[int], loss_sums: Sequence[float]) -> dict[str, Any]:
        """Return the entries of a step, from 1, given the sums over ranks of counts and of losses by part, nats."""
        record: dict[str, Any] = {}
        if not self.names:
            return record
        tokens, predicted = counts[: len(self.names)], counts[len(self.names) :]
        self._tokens = [before + here for before, here in zip(self._tokens, tokens, strict=True)]
        figures = zip(self.names, self._tokens, count_epochs(self._phases, step), predicted, loss_sums, strict=True)
        for name, read, epochs, number, loss in figures:
            record |= {f"parts/{name}/tokens": read, f"parts/{name}/epochs": epochs}
            record |= {f"parts/{name}/train_loss": loss / number} if number else {}
        return record

    def describe_held_out(self, losses: Sequence[float]) -> dict[str, Any]:
        """Return the entries of an evaluation, given the loss on each part's held-out rows, nats."""
        return {f"parts/{name}/held_out_loss": loss for name, loss in zip(self.names, losses, strict=True)}

    def to_trainer_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {PART_TOKENS: dict(zip(self.names, self._tokens, strict=True))}


@dataclass(frozen=True)
class StepBatch:
    """What one step reads: this rank's micro batches, and how much they have over all ranks."""

    micro_batches: Sequence[Any]
    waited: float  # seconds until they were there
    num_tokens: int
    counts: Mapping[str, int]  # what each loss is a mean of, by its name
    of_parts: tuple[int, ...]  # see `PartFigures.count`


class StepRecords:
    """Makes the record of one step after the other, and keeps the time that steps take.

    The first rank alone has `rooflines`, by a phase's first step. `seconds` are those that training has taken before.
    """

    def __init__(
        self,
        run: Run,
        phases: Sequence[Phase],
        parts: PartFigures,
        rooflines: Mapping[int, Roofline],
        device: torch.device,
        world_size: int,
        seconds: float,
    ) -> None:
        self.config, self.run_dir, self.phases, self.parts = run.config, run.paths.run, phases, parts
        self.losses, self.device, self.world_size = name_losses(run.config.objective.kind), device, world_size
        self.rooflines, self.seconds = rooflines, seconds
        self.num_skipped = self._num_unmasked = 0  # steps in a row
        self.reads_late = device.type != "cpu"
        """Whether a step is read when the next one was launched, so that a GPU always has one to work at."""
        self._unread: tuple[Callable[[], StepFigures], int, int, StepBatch, Callable[[], None]] | None = None
        self._since = 0.0

    def begin(self) -> None:
        """Let the next step's time begin now."""
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done meanwhile out of the time of steps."""
        started = time.perf_counter()
        yield
        self._since += time.perf_counter() - started

    def follow(
        self,
        read_figures: Callable[[], StepFigures],
        step: int,
        tokens: int,
        batch: StepBatch,
        stop: Callable[[], None],
    ) -> dict[str, Any] | None:
        """Take a step that was launched, counted from 1; return the record of the one before, if nobody has read it.

        `tokens` are those that the run has read up to it. `stop` is called before the run is stopped for a loss that is
        not finite, because the error says which step is saved.
        """
        before = None if self._unread is None else self.read()
        self._unread = read_figures, step, tokens, batch, stop
        return before

    def read(self) -> dict[str, Any]:
        """Return the record of the step that was launched last, whose end is waited for."""
        assert self._unread is not None, "no step was launched"
        (read_figures, step, tokens, batch, stop), self._unread = self._unread, None
        figures = read_figures()
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        self._check(figures, batch.counts[LOSS], step, stop)
        record = {
            "step": step,
            TRAIN + self.losses.loss: figures.loss,
            "train/lr": figures.learning_rate,
            "train/grad_norm": figures.grad_norm,
            TRAIN + self.losses.count: batch.counts[LOSS],
            "train/tokens": tokens,
            "train/skipped": int(figures.skipped),
            "throughput/tokens_per_second": batch.num_tokens / seconds,
            "data/wait_seconds": batch.waited,
            "time/step_seconds": seconds,
            "time/seconds": self.seconds,
            **self._describe_speed(step, batch.num_tokens, seconds),
        }
        if batch.counts.get(NEXT_SENTENCE_LOSS):
            record["train/next_sentence_loss"] = figures.losses[NEXT_SENTENCE_LOSS]
        record |= self.parts.describe(step, batch.of_parts, figures.part_losses)
        if self.config.parts:
            record["train/domain_epochs"], *beside = count_epochs(self.phases, step)
            record |= {"train/replay_epochs": beside[0]} if self.config.replay.corpus else {}
        if self.config.has_general_text and self.config.objective.keep != "none":
            record |= {"train/keep_loss": figures.losses[KEEP_LOSS], "train/keep_tokens": batch.counts[KEEP_LOSS]}
        return record

    def _describe_speed(self, step: int, num_tokens: int, seconds: float) -> dict[str, float]:
        if not self.rooflines:
            return {}
        phase = max(first for first in self.rooflines if first < step)
        speed = self.rooflines[phase].describe(num_tokens, seconds, self.world_size)
        return speed | {"memory/peak_mb": measure_peak_memory(self.device)}

    def _check(self, figures: StepFigures, num_masked: int, number: int, stop: Callable[[], None]) -> None:
        """Stop a run that diverges or learns nothing; a single batch without a masked token is as it should be."""
        self.num_skipped = 0 if figures.finite else self.num_skipped + 1
        self._num_unmasked = 0 if num_masked else self._num_unmasked + 1
        step = f"step {number:,} has a loss of {figures.loss:g} and a gradient norm of {figures.grad_norm:g}"
        another = "give a lower --optim.lr under another --run.name"
        if not figures.finite and self.config.optim.on_non_finite == "stop":
            stop()
            raise DivergenceError(
                f"{step}; {another}, or --optim.on_non_finite skip, with which the same command "
                f"{describe_resumption(self.run_dir / 'checkpoints')} and leaves such steps out."
            )
        if self.num_skipped > MAX_SKIPPED_STEPS:
            raise DivergenceError(
                f"{step}, as have the {MAX_SKIPPED_STEPS} steps before it, which --optim.on_non_finite skip left out: "
                f"the weights are beyond help; {another}."
            )
        if self._num_unmasked >= min(MAX_UNMASKED_STEPS, self.config.train.max_steps):
            raise TrainingError(
                f"no token was masked in {self._num_unmasked} steps up to step {number:,}, so that nothing is "
                "learned: the texts of --corpus are too short, or unknown words alone to the tokenizer of --base, or "
                f"--objective.mask_prob ({self.config.objective.mask_prob:g}) is too low."
            )


def find_rooflines(
    run: Run, phases: Sequence[Phase], loss: Callable[..., Loss], model: nn.Module, device: torch.device
) -> dict[int, Roofline]:
    """Return what steps are held against, by a phase's first step; counted before ZeRO takes the model apart."""
    config, vocab_size = run.config, run.spec.shape.vocab_size
    if config.objective.makes_vectors:  # whose two views of a row differ in length
        return {}
    module = loss(model, device, bf16=config.engine.uses_bf16, num_chunks=1)
    return {phase.first_step: count_step(config, module, vocab_size, phase.manifest.seq_length) for phase in phases}
