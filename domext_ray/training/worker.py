"""One rank of a pre-training run: model, engine, data position and, on rank 0, the metrics.

Enters: a `Run` and a rank. Leaves, in the run directory: metrics.jsonl, what trackers keep, and checkpoints. It
goes on from the newest checkpoint that verifies, and stops at any step that its caller names.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from domext_ray.config.pretrain import count_passes
from domext_ray.corpus.stream import Prefetch
from domext_ray.errors import DivergenceError, RunError, TrainingError
from domext_ray.model.build import describe_extensions, prepare_for_device, store_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import BASE_NAME, DomextForMaskedLM
from domext_ray.options.declare import read_seconds
from domext_ray.runs.events import (
    CHECKPOINTS,
    EVALUATION,
    FIRST_STEP,
    LOADING,
    TRAINING,
    WORKERS,
    enter_phase,
    notify_driver,
)
from domext_ray.runs.losses import DOMAIN, TRAIN, name_losses
from domext_ray.storage import Place
from domext_ray.training.checkpoint import (
    UNEVALUATED,
    agree_on_checkpoint,
    confirm_checkpoint,
    describe_resumption,
    save_checkpoint,
)
from domext_ray.training.choices import describe_choices
from domext_ray.training.cost import Roofline, count_step, measure_peak_memory, time_matmuls
from domext_ray.training.distillation import distill_new_words
from domext_ray.training.engine import Engine
from domext_ray.training.evaluate import (
    SETS,
    Scores,
    build_evaluations,
    evaluate,
    evaluate_routed,
    measure_bits,
    pack_scores,
    unpack_scores,
)
from domext_ray.training.losses import Objective, make_loss
from domext_ray.training.metrics import MetricsLog, as_written
from domext_ray.training.notices import ASK_SECONDS, ASKED, LIMIT, TAKEN, TOLD, EndAsked, Notices
from domext_ray.training.parts import PartFigures
from domext_ray.training.passages import EvalSet
from domext_ray.training.phases import BatchMaker, count_epochs, make_phases
from domext_ray.training.router import attach_routers, read_records, wants_router
from domext_ray.training.run import Run
from domext_ray.training.start import NEW_WORD_TENSORS, begin
from domext_ray.training.step import StepFigures
from domext_ray.training.tracking import list_tracked_options
from domext_ray.vocabulary.tokenizer import load_tokenizer

BASE_SCORES = "base_scores"
"""What checkpoints carry of the evaluation of step 0, in the state of their trainer."""
MAX_SKIPPED_STEPS = 10
"""Steps in a row that `--optim.on_non_finite skip` leaves out; after more of them the weights are beyond help."""
MAX_UNMASKED_STEPS = 20
"""Steps in a row without a masked token, after which the text or the tokenizer is to blame and not chance."""
QUIET_STEPS = 10
"""Steps after which what starts beside a worker (readers, above all) has started, so that products may be timed."""
ROUTER_SECONDS, ROUTER_LOOK_SECONDS = 600.0, 0.5
"""How long a run's last evaluation waits for its router, and between two looks at whether it is there."""
SAID_SECONDS = 1.0
"""Training that waits so long for a checkpoint says so."""


class PretrainWorker:
    """The state of one rank; a process group exists.

    Args:
        run: what to train, prepared.
        rank: from 0 to `world_size` - 1.
        world_size: number of ranks.
        device: where to train.
        report: takes the newest record after every checkpoint and evaluation, on every rank.
        notices: where the rank hears that its machine is going.
    """

    def __init__(
        self,
        run: Run,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device,
        report: Callable[[dict[str, Any]], None] = lambda record: None,
        notices: Notices | None = None,
    ) -> None:
        self.plan, self.config, self.run_dir = run, run.config, run.paths.run
        self.losses = name_losses(self.config.objective.kind)
        self.rank, self.world_size, self.device, self.report = rank, world_size, device, report
        self.notices, self._ask_due = notices or Notices(), 0.0
        self.end = ""
        """Why this rank saves and ends, one of those of `training.notices`; empty: it goes on."""
        self._enter_phase("loading the model", LOADING)
        inputs = run.inputs
        self.manifest, self.tokenizer = inputs.domain, load_tokenizer(inputs.tokenizer.local())
        self.checkpoint = agree_on_checkpoint(
            self.run_dir / "checkpoints",
            run.goes_on_from,
            device,
            lambda sentence: notify_driver(self.run_dir, f"warning: {sentence}"),
        )
        self.step = self.start_step = self.checkpoint.step if self.checkpoint else 0
        state = self.checkpoint.trainer_state if self.checkpoint else None
        self.seconds, self.tokens = (float(state["seconds"]), int(state["tokens"])) if state else (0.0, 0)
        self.clock = self.seconds  # rank 0's, as it has last told all
        self.phases = make_phases(self.config, inputs.texts, world_size)
        rows = [each.micro_batch_size for each in self.phases]
        self.parts = PartFigures(self.config, self.phases, state)
        general = inputs.general_tokenizer
        general_tokenizer = load_tokenizer(general.local()) if general else self.tokenizer
        maker = BatchMaker(self.config, self.phases, self.tokenizer, general_tokenizer)
        # Reading starts now: its first batches are there when the model is.
        self.batches = Prefetch(maker.make(self.step, rank=rank, world_size=world_size))
        self.base = run.spec.base
        self.engine = self._build_engine(rows)
        tokenizers = [general_tokenizer if part.keep else self.tokenizer for part in self.config.parts]
        shortest = zip(inputs.texts[0][1:], tokenizers, strict=True)
        self.evaluations = build_evaluations(self.config, self.manifest, self.tokenizer, [*shortest], rows[0])
        self.of_base = unpack_scores(state.get(BASE_SCORES, {}) if state else {}, self.evaluations)
        """What the base has got for each row of the sets, where the run began with it and it is still known."""
        self.num_skipped = self.num_unmasked = 0  # steps in a row
        self._save_waits = False
        # A thread writes checkpoints, one at a time; what its ranks exchange must not meet what steps exchange.
        self._saver = ThreadPoolExecutor(1, "saver")
        self._saving: tuple[int, Future[Any]] | None = None
        self._unevaluated: tuple[dict[str, Any], Callable[[], Place]] | None = None
        """Of the newest checkpoint, if it is provisional: its step's record, and what waits until it is whole."""
        if self.checkpoint is not None and self.checkpoint.unevaluated is not None:
            path = self.checkpoint.path
            self._unevaluated = self.checkpoint.unevaluated, lambda: path
        self._saving_group = dist.new_group(backend="gloo") if world_size > 1 else None
        self.reads_late = device.type != "cpu"  # a GPU is still at a step that was launched
        self._unread: Callable[[], dict[str, Any]] | None = None
        self._ahead: tuple[list[Any], list[int], float] | None = None
        self.log = self._open_log() if rank == 0 else None
        choices = describe_choices(self.config, device, self.engine.fused, rows)
        for said in (*self._describe_start(), *choices) if rank == 0 else ():
            notify_driver(self.run_dir, said)

    def _describe_start(self) -> list[str]:
        """Which checkpoint the first step follows; nothing where the run begins anew."""
        if self.checkpoint is not None:
            return [f"going on from step {self.step:,}: {self.checkpoint.path}"]
        start = self.plan.start
        return [] if start is None else [f"starting from step {start.checkpoint.step:,}: {start.checkpoint.path}"]

    def _open_log(self) -> MetricsLog:
        trackers, options = self.config.run.trackers, list_tracked_options(self.config)
        return MetricsLog(self.run_dir, self.step, trackers, options, is_evaluated=self._unevaluated is None)

    def _build_engine(self, rows: Sequence[int]) -> Engine:
        config = self.config
        model = self.plan.spec.build()
        self.extensions = describe_extensions(cast(DomextConfig, model.config))
        if self.checkpoint is None:
            self.fixed = begin(self.plan, model, lambda: self._distill_words(model))
        else:
            self.fixed = self.checkpoint.fixed
            model.load_state_dict(self.fixed, strict=False)
        self.plan.spec.attach_decoder(model)
        if config.engine.has_narrow_base:
            store_base(model, torch.bfloat16)
        prepare_for_device(model, self.device, bf16=config.engine.uses_bf16)
        self.model = network = cast(nn.Module, model).to(self.device)
        loss = make_loss(config, self.base, network, self.fixed, self.device, rows)
        self.rooflines = self._find_rooflines(loss)
        return Engine(
            network,
            engine=config.engine,
            optim=config.optim,
            warmup_steps=config.optim.warmup_steps,
            micro_batch_size=rows[0],
            accumulation_steps=count_passes(config, rows[0], self.world_size),
            seed=config.seed,
            device=self.device,
            objective=loss,
            state=None if self.checkpoint is None else self.checkpoint.state,
        )

    def _find_rooflines(self, loss: Callable[..., Objective]) -> dict[int, Roofline]:
        """What rank 0 holds steps against, by a phase's first step; counted before ZeRO takes the model apart."""
        config = self.config
        if self.rank != 0 or config.objective.makes_vectors:  # whose two views of a row differ in length
            return {}
        module = loss(self.model, self.device, bf16=config.engine.uses_bf16, num_chunks=1)
        vocab_size = cast(DomextConfig, self.model.config).vocab_size
        return {
            each.first_step: count_step(config, module, vocab_size, each.manifest.seq_length) for each in self.phases
        }

    def _describe_speed(self, step: int, num_tokens: int, seconds: float) -> dict[str, float]:
        """Figures of one of rank 0's steps."""
        if not self.rooflines:
            return {}
        phase = max(first for first in self.rooflines if first < step)
        if step - max(phase, self.start_step) == QUIET_STEPS and self.device.type == "cpu":
            bf16 = self.config.engine.uses_bf16
            self.rooflines[phase] = time_matmuls(self.rooflines[phase], self.device, bf16=bf16)
            self._since = time.perf_counter()
        speed = self.rooflines[phase].describe(num_tokens, seconds, self.world_size)
        return speed | {"memory/peak_mb": measure_peak_memory(self.device)}

    def _distill_words(self, model: DomextForMaskedLM) -> None:
        """Fit the new words on every rank; the first one's result counts."""
        assert self.base is not None, "new words stand beside a base"
        self._enter_phase("fitting the new words", LOADING)
        distill_new_words(
            model,
            self.manifest,
            self.tokenizer,
            load_tokenizer(self.base.folder),
            self.config.objective,
            seed=self.config.seed,
            device=self.device,
            tell=lambda text: notify_driver(self.run_dir, text) if self.rank == 0 else None,
        )
        for param in (model.get_parameter(name) for name in NEW_WORD_TENSORS):
            values = param.detach().to(self.device)
            dist.broadcast(values, src=0)
            param.data.copy_(values)

    def run(self, last_step: int = 0, *, evaluate_start: bool = True) -> None:
        """Train from the current step to a limit, or to the first step at which the driver asks to end; then save.

        An evaluation that was broken off comes first, and one that is under way is broken off for the driver.

        Args:
            last_step: another limit beside those of the configuration; 0: none. A later call goes on from there.
            evaluate_start: whether step 0 is evaluated, too.
        """
        try:
            if self._unevaluated is not None:
                self.report(self._evaluate_step(self._unevaluated[0], at_end=self._is_done()))
            elif self.step == 0 and evaluate_start:
                self._evaluate_step({"step": 0})
            self._make_steps(last_step)
        except EndAsked:  # what was to be evaluated is saved
            pass
        finally:  # what was saved before a mistake is not lost with it
            self._finish_save()
        if self.log is not None and self.end:
            self.log.confirm_end()
        self.end = LIMIT if self._is_done() and self._unevaluated is None else self.end
        self._enter_phase("ending the workers", WORKERS)

    def _make_steps(self, last_step: int) -> None:
        train, done, first = self.config.train, self._is_done(last_step), self.step + 1
        self._enter_phase("reading the first rows", FIRST_STEP)
        self._since = time.perf_counter()
        while not done and not self.end:
            before = self.clock
            record = self._train_step()
            if self._saving is not None and self._saving[1].done():
                self._finish_save()
            done = self._is_done(last_step)
            ends, evaluates = done or bool(self.end), done or self._is_due(train.evaluate_every, before)
            self._save_waits |= self._is_due(train.save_every, before)
            if record is None and not (ends or evaluates or self._save_waits or self.step == first):
                continue
            record = record or self._read_step()
            paused = time.perf_counter()
            # A checkpoint waits for a step that is not skipped, which shows that the weights work.
            saves = ends or ((self._save_waits or evaluates) and self.num_skipped == 0)
            if not evaluates and self.log is not None:
                self.log.write(record)
            if saves:
                self._save(record if evaluates else None)
            if evaluates:
                record = self._evaluate_step(record, at_end=done and self._is_done())
            if saves or evaluates:
                self.report(record)
            if saves or evaluates or self.step == first:
                self._enter_phase("training", TRAINING)
            self._since += time.perf_counter() - paused

    def time_steps(self, num_steps: int) -> float:
        """Train some steps without a trace and return the seconds of one: the median of the later half."""
        self._since = time.perf_counter()
        records = [self._train_step() or self._read_step() for _ in range(num_steps)]
        seconds = [float(each["time/step_seconds"]) for each in records]
        return statistics.median(seconds[num_steps // 2 :])

    def close(self) -> None:
        """Stop reading, and close the metrics."""
        self.batches.close()
        self._saver.shutdown()
        if self.log is not None:
            self.log.close()

    def _is_done(self, last_step: int = 0) -> bool:
        """Whether a limit is reached; rank 0's clock has told all."""
        train = self.config.train
        limit = min(train.max_steps, last_step or train.max_steps)
        return self.step >= limit or 0 < train.max_tokens <= self.tokens or 0 < train.max_seconds <= self.clock

    def _measure_progress(self) -> float:
        """Share of the budget that is spent, by the limit that is nearest; rank 0's clock has told all."""
        train, horizon = self.config.train, self.config.optim.decay_steps
        spent = [(self.step, horizon), (self.tokens, train.max_tokens), (self.clock, train.max_seconds)]
        return min(1.0, max(done / limit for done, limit in spent if limit))

    def _is_due(self, every: int | str, before: float) -> bool:
        """Whether the newest step ends a number of steps, or a time; the clock stood at `before` when it began."""
        if isinstance(every, int):
            return self.step % every == 0
        period = read_seconds(every)
        return self.clock // period > before // period

    def _look_ahead(self) -> tuple[list[Any], list[int], float]:
        """Take the next step's micro batches, what they count over all ranks, and the seconds that this took to come.

        Rank 0's clock is added up with the counts.
        """
        started = time.perf_counter()
        micro_batches, tokens_here = next(self.batches, ([], []))  # no more behind the last step
        waited = time.perf_counter() - started
        self.clock, *counts = self._hear(
            self.seconds if self.rank == 0 else 0.0,
            sum(each.num_masked for each in micro_batches),
            sum(tokens_here),
            sum(each.num_pairs for each in micro_batches),
            sum(each.num_distilled for each in micro_batches),
            *self.parts.count(micro_batches, tokens_here),
        )
        return micro_batches, [*map(int, counts)], waited

    def _hear(self, *figures: float) -> list[float]:
        """Add figures up over the ranks, and with them whether one was asked or told to end (`end`); collective.

        All are tensors of the CPU, whose ranks talk while their GPUs are at the step before.
        """
        here = [
            self.log is not None and self.log.is_asked_to_end(),
            self.notices.is_told(),
            self.rank == 0 and self.notices.is_taken is not None and time.monotonic() >= self._ask_due,
            *figures,
        ]
        sums = torch.tensor(here, dtype=torch.float64)
        self.engine.sum_over_ranks(sums)
        asked, told, asks, *totals = sums.tolist()
        taken = False
        if asks and self.notices.is_taken is not None:
            taken, self._ask_due = self.notices.is_taken(), time.monotonic() + ASK_SECONDS
        self.end = self.end or (ASKED if asked else TOLD if told else TAKEN if taken else "")
        return totals

    def _listen(self, *figures: float) -> list[float]:
        """Break an evaluation off where a rank has heard that all are to end, or add up figures; collective.

        Raises:
            EndAsked: that is so.
        """
        totals = self._hear(*figures)
        if self.end not in ("", LIMIT):  # a run that has reached it may be asked for more figures
            raise EndAsked
        return totals

    def _train_step(self) -> dict[str, Any] | None:
        """Make a step and return its record; None: its figures are still to be read (`_read_step`).

        Then those of the step before are: a GPU always has a step to work at.
        """
        micro_batches, counts, waited = self._ahead or self._look_ahead()
        num_masked, num_tokens, num_pairs, num_distilled, *_ = counts
        read_figures = self.engine.launch_step(
            micro_batches, num_masked, self.step, num_pairs, num_distilled, self._measure_progress()
        )
        self.step, self.tokens = self.step + 1, self.tokens + num_tokens
        before = None if self._unread is None else self._read_step()
        if before is not None and self.log is not None:
            self.log.write(before)
        self._unread = functools.partial(
            self._make_record, read_figures, self.step, self.tokens, counts=counts, waited=waited
        )
        record = None if self.reads_late else self._read_step()
        self._ahead = self._look_ahead()
        return record

    def _read_step(self) -> dict[str, Any]:
        """Return the record of the step that was launched last, whose end is waited for."""
        assert self._unread is not None, "no step was launched"
        make_record, self._unread = self._unread, None
        return make_record()

    def _make_record(
        self, read_figures: Callable[[], StepFigures], step: int, tokens: int, *, counts: list[int], waited: float
    ) -> dict[str, Any]:
        num_masked, num_tokens, num_pairs, num_distilled, *of_parts = counts
        figures = read_figures()
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        self._check_step(figures, num_masked, step)
        record = {
            "step": step,
            TRAIN + self.losses.loss: figures.loss,
            "train/lr": figures.learning_rate,
            "train/grad_norm": figures.grad_norm,
            TRAIN + self.losses.count: num_masked,
            "train/tokens": tokens,
            "train/skipped": int(figures.skipped),
            "throughput/tokens_per_second": num_tokens / seconds,
            "data/wait_seconds": waited,
            "time/step_seconds": seconds,
            "time/seconds": self.seconds,
            **self._describe_speed(step, num_tokens, seconds),
        }
        record |= {"train/next_sentence_loss": figures.next_sentence_loss} if num_pairs else {}
        record |= self.parts.describe(step, of_parts, figures.part_losses)
        if self.config.parts:
            record["train/domain_epochs"], *beside = count_epochs(self.phases, step)
            record |= {"train/replay_epochs": beside[0]} if self.config.replay.corpus else {}
        if self.config.has_general_text and self.config.objective.keep != "none":
            record |= {"train/keep_loss": figures.distill_loss, "train/keep_tokens": num_distilled}
        return record

    def _check_step(self, figures: StepFigures, num_masked: int, number: int) -> None:
        """Stop a run that diverges or learns nothing; a single batch without a masked token is as it should be."""
        self.num_skipped = 0 if figures.finite else self.num_skipped + 1
        self.num_unmasked = 0 if num_masked else self.num_unmasked + 1
        step = f"step {number:,} has a loss of {figures.loss:g} and a gradient norm of {figures.grad_norm:g}"
        another = "give a lower --optim.lr under another --run.name"
        if not figures.finite and self.config.optim.on_non_finite == "stop":
            self._finish_save()  # the run goes on from there
            raise DivergenceError(
                f"{step}; {another}, or --optim.on_non_finite skip, with which the same command "
                f"{describe_resumption(self.run_dir / 'checkpoints')} and leaves such steps out."
            )
        if self.num_skipped > MAX_SKIPPED_STEPS:
            raise DivergenceError(
                f"{step}, as have the {MAX_SKIPPED_STEPS} steps before it, which --optim.on_non_finite skip left out: "
                f"the weights are beyond help; {another}."
            )
        if self.num_unmasked >= min(MAX_UNMASKED_STEPS, self.config.train.max_steps):
            raise TrainingError(
                f"no token was masked in {self.num_unmasked} steps up to step {number:,}, so that nothing is "
                "learned: the texts of --corpus are too short, or unknown words alone to the tokenizer of --base, or "
                f"--objective.mask_prob ({self.config.objective.mask_prob:g}) is too low."
            )

    def score(self, asked: EvalSet) -> np.ndarray:
        """Score a fixed set of rows; collective, see `evaluate`."""
        return evaluate(self.engine, asked, self._listen)

    def _evaluate_step(self, record: dict[str, Any], *, at_end: bool = False) -> dict[str, Any]:
        """Evaluate a step, write its record, and let its checkpoint count if it has one; collective.

        Args:
            record: what is known of the step; the record that is returned has all of it.
            at_end: see `_evaluate`.

        Raises:
            DivergenceError: the held-out loss is not finite; the step's checkpoint is deleted.
            EndAsked: the evaluation was broken off, and the step is saved.
        """
        try:
            record = record | self._evaluate(at_end=at_end)
        except EndAsked:
            if self.step > 0 and self._unevaluated is None:  # a step that was skipped
                self._save(record)
            raise
        if self.log is not None:
            self.log.write(record)
        if self._unevaluated is not None:
            self._confirm(record)
        return record

    def _confirm(self, record: dict[str, Any]) -> None:
        """Let the provisional checkpoint count, or delete it where the weights cannot predict; see `_evaluate_step`."""
        assert self._unevaluated is not None
        (_, wait), self._unevaluated = self._unevaluated, None
        loss = record[DOMAIN + self.losses.loss]
        if record["eval/domain_tokens"] and not math.isfinite(loss):
            path = wait()
            if self.rank == 0:
                path.delete()
            raise DivergenceError(
                f"after step {self.step:,} the held-out loss is {loss:g}, so the weights are "
                "not kept; give a lower --optim.lr under another --run.name."
            )
        if self.log is not None:
            self.log.publish()  # first: a run that goes on from this checkpoint has all figures up to it
            keep = self.config.run.keep_checkpoints
            self._saving = self.step, self._saver.submit(lambda: confirm_checkpoint(wait(), keep))

    def _evaluate(self, *, at_end: bool = False) -> dict[str, Any]:
        """Score the fixed sets. At a run's start and end also what takes as long as the rest of an evaluation.

        At the end, what users get who let the run's router choose, if it has one, has names of its own.
        """
        rows = self._score_sets([*SETS] if at_end or self.step == 0 else [*SETS][:-1])
        masks_words = self.config.objective.kind == "masked"
        if masks_words and self.step == 0 and wants_router(self.config) and self._stays_beside_base():
            self.of_base = rows
        record = self._describe_scores("eval/", rows)
        domain, general = Scores.add_up(rows["domain"]), Scores.add_up(rows["general"])
        record |= {
            "eval/domain_tokens": domain.num_tokens,
            "eval/domain_characters": self.evaluations.characters.num_chars,
            "eval/general_words": general.num_tokens,
        }
        if domain.num_pairs:
            record["eval/domain_next_sentence_accuracy"] = domain.next_sentence_accuracy
        if self.parts.names:
            self._enter_evaluation("other texts")
            losses = [domain.loss, *(Scores.add_up(self.score(each)).loss for each in self.evaluations.parts)]
            record |= self.parts.describe_held_out(losses)
        if masks_words and at_end and self._has_router():
            record |= self._describe_scores("eval/routed_", self._score_routed(rows))
        return record

    def _has_router(self) -> bool:
        """Whether the run has one; that which its driver is still fitting is waited for; collective.

        Raises:
            RunError: it does not come.
            EndAsked: see `_listen`.
        """
        adapter, ends = self.config.method.adapter, 0.0
        while self.plan.awaits_router and any(self._listen(adapter not in read_records(self.run_dir))):
            if not ends:
                ends = time.monotonic() + ROUTER_SECONDS
                self._enter_phase("waiting for the router, which the job's own process fits", EVALUATION)
            elif time.monotonic() > ends:
                raise RunError(
                    f"the router of {self.run_dir} was not fitted within {ROUTER_SECONDS:g} s after the last step; the "
                    "same command goes on from there, and fits it."
                )
            time.sleep(ROUTER_LOOK_SECONDS)
        return bool(read_records(self.run_dir))

    def _stays_beside_base(self) -> bool:
        """Whether the model begins as its base, and is it with its adapter left out, for nothing else trains."""
        method, has_head = self.config.method, self.base is not None and self.base.has_mlm_head
        begins_at_base = has_head and method.init == "zero" and not self.config.init_from
        trained = [name for name, each in self.model.named_parameters() if each.requires_grad]
        return begins_at_base and all(f".adapters.{method.adapter}." in name for name in trained)

    def _score_sets(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        found = dict[str, np.ndarray]()
        for name in names:
            self._enter_evaluation(SETS[name])
            found[name] = self.score(getattr(self.evaluations, name))
        return found

    def _score_routed(self, adapted: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Score the sets as users get them who let the router choose, given what the model as a whole has scored."""
        network, adapter, found = cast(Any, self.model), self.config.method.adapter, dict[str, np.ndarray]()
        attach_routers(network, self.run_dir)
        for name, rows in adapted.items():
            self._enter_evaluation(f"{SETS[name]}, with the router")
            known = {adapter: rows} if [*network.config.adapters] == [adapter] else {}
            known |= {BASE_NAME: self.of_base[name]} if name in self.of_base else {}
            asked = getattr(self.evaluations, name)
            found[name] = evaluate_routed(self.engine, network, asked, known, self._listen)
        return found

    def _describe_scores(self, prefix: str, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
        scores = {name: Scores.add_up(each) for name, each in rows.items()}
        domain, general, sets = scores["domain"], scores["general"], self.evaluations
        record = {
            f"{prefix}domain_{self.losses.loss}": domain.loss,
            f"{prefix}domain_{self.losses.accuracy}": domain.accuracy,
            f"{prefix}domain_bits_per_character": measure_bits(scores["characters"], sets.characters),
            f"{prefix}general_mlm_accuracy": general.accuracy if general.num_tokens else None,
        }
        if "words" in scores:
            record[f"{prefix}domain_word_bits_per_character"] = measure_bits(scores["words"], sets.words)
        return record

    def _enter_evaluation(self, what: str) -> None:
        """Each part of an evaluation is a phase: all of them together may take minutes, and something moves."""
        self._enter_phase(f"evaluating {f'step {self.step:,}' if self.step else 'the start'}: {what}", EVALUATION)

    def _enter_phase(self, phase: str, stage: str) -> None:
        if self.rank == 0:
            enter_phase(self.run_dir, phase, stage)

    def _save(self, unevaluated: dict[str, Any] | None = None) -> None:
        """Begin to save.

        Args:
            unevaluated: the step's record, where the step is evaluated next: it may have ruined the weights, unseen as
                yet, so that the checkpoint is provisional until then.
        """
        self._save_waits = False
        self._finish_save()
        self._enter_phase(f"saving the checkpoint of step {self.step:,}", CHECKPOINTS)
        if self.log is not None:
            self.log.publish()  # first: a run that goes on from this checkpoint has all figures up to it
        trainer_state = {"seconds": self.seconds, "tokens": self.tokens, **self.parts.to_trainer_state()}
        trainer_state |= {BASE_SCORES: pack_scores(self.of_base, self.evaluations)} if self.of_base else {}
        trainer_state |= {UNEVALUATED: as_written(unevaluated)} if unevaluated is not None else {}
        copied = self.engine.copy_state()
        save = functools.partial(
            save_checkpoint,
            self.run_dir / "checkpoints",
            self.step,
            fixed=self.fixed,
            trainer_state=trainer_state,
            run_info={
                "base": self.config.base,
                "base_sha256": self.plan.spec.base_sha256,
                "corpus_fingerprint": self.manifest.fingerprint,
                "tokenizer_fingerprint": self.manifest.tokenizer_fingerprint,
                "extensions": asdict(self.extensions),
            },
            keep=self.config.run.keep_checkpoints,
            group=self._saving_group,
        )
        saving = self._saver.submit(lambda: save(state=copied()))
        self._saving = self.step, saving
        self._unevaluated = None if unevaluated is None else (unevaluated, saving.result)

    def _finish_save(self) -> None:
        """Wait until the checkpoint that is being written is whole; raise what has kept it from that."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        started = time.perf_counter()
        if not saving.done():
            self._enter_phase(f"writing the checkpoint of step {step:,}", CHECKPOINTS)
        saving.result()
        waited = time.perf_counter() - started
        if waited >= SAID_SECONDS and self.rank == 0:
            notify_driver(self.run_dir, f"waited {waited:.1f} s for the checkpoint of step {step:,} to be written")
