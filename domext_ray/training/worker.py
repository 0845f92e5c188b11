"""One rank of a pre-training run: take a batch, step, once in a while evaluate, once in a while save.

Enters: a `Run` and a rank. Leaves, in the run directory: metrics.jsonl, what trackers keep, and checkpoints. It
goes on from the newest checkpoint that verifies, and stops at any step that its caller names. Its collaborators:
`BatchMaker` reads rows, `Engine` makes steps, `StepRecords` says what they were, `Measures` evaluates, `Saver` writes
checkpoints, and `Ranks` are the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn

from domext_ray.config.options.declare import read_seconds
from domext_ray.config.options.kinds import list_options
from domext_ray.config.pretrain import count_passes
from domext_ray.model.build import describe_extensions, prepare_for_device, store_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.runs.events import FIRST_STEP, LOADING, TRAINING, WORKERS, enter_phase, notify_driver
from domext_ray.text.corpus.stream import Prefetch
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.checkpoint import agree_on_checkpoint
from domext_ray.training.cost import Roofline
from domext_ray.training.engine import Engine, describe_choices
from domext_ray.training.evaluate import build_evaluations
from domext_ray.training.losses import make_loss
from domext_ray.training.measures import Measures
from domext_ray.training.metrics import DOMAIN, MetricsLog, name_losses
from domext_ray.training.notices import LIMIT, EndAsked, Notices
from domext_ray.training.phases import BatchMaker, make_phases
from domext_ray.training.ranks import Ranks
from domext_ray.training.records import PartFigures, StepBatch, StepRecords, find_rooflines
from domext_ray.training.run import Run, Start
from domext_ray.training.saver import Saver
from domext_ray.training.start import begin


class PretrainWorker:
    """The state of one rank; a process group exists.

    `report` takes the newest record of a step that was saved or evaluated, on every rank.
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
        self.config, self.run_dir = run.config, run.paths.run
        self.rank, self.world_size, self.device, self.report = rank, world_size, device, report
        self._enter_phase("loading the model", LOADING)
        config, inputs = run.config, run.inputs
        self.tokenizer = load_tokenizer(inputs.tokenizer.local())
        self.checkpoint = agree_on_checkpoint(
            self.run_dir / "checkpoints",
            run.goes_on_from,
            device,
            lambda sentence: notify_driver(self.run_dir, f"warning: {sentence}"),
        )
        state = self.checkpoint.trainer_state if self.checkpoint else None
        self.step = self.checkpoint.step if self.checkpoint else 0
        self.tokens = int(state["tokens"]) if state else 0
        self.clock = float(state["seconds"]) if state else 0.0  # rank 0's seconds of training, as it has last told all
        self.phases = make_phases(config, inputs.texts, world_size)
        rows = [phase.micro_batch_size for phase in self.phases]
        self.parts = PartFigures(config, self.phases, state)
        general = inputs.general_tokenizer
        general_tokenizer = load_tokenizer(general.local()) if general else self.tokenizer
        maker = BatchMaker(config, self.phases, self.tokenizer, general_tokenizer)
        # Reading starts now: its first batches are there when the model is.
        self.batches = Prefetch(maker.make(self.step, rank=rank, world_size=world_size))
        rooflines = self._build_engine(run, rows)
        tokenizers = [general_tokenizer if part.keep else self.tokenizer for part in config.parts]
        beside = [*zip(inputs.texts[0][1:], tokenizers, strict=True)]
        sets = build_evaluations(config, inputs.domain, self.tokenizer, beside, rows[0])
        is_evaluated = self.checkpoint is None or self.checkpoint.unevaluated is None
        self.log = None
        if rank == 0:
            options = {name: attrgetter(name)(config) for name in list_options(type(config))}
            options["scale.num_workers"] = world_size
            self.log = MetricsLog(self.run_dir, self.step, config.run.trackers, options, is_evaluated=is_evaluated)
        is_asked = self.log.is_asked_to_end if self.log is not None else lambda: False
        self.ranks = Ranks(rank, self.engine.sum_over_ranks, notices or Notices(), is_asked)
        self.records = StepRecords(run, self.phases, self.parts, rooflines, device, world_size, self.clock)
        enter = self._enter_phase
        self.measures = Measures(run, self.engine, self.model, sets, self.parts, self.ranks, enter, state)
        extensions = describe_extensions(cast(DomextConfig, self.model.config))
        self.saver = Saver(run, self.engine, self.fixed, extensions, self.log, enter, self.checkpoint)
        self._save_waits = False
        self._ahead: StepBatch | None = None
        for said in (*self._describe_start(run.start), *describe_choices(config, device, self.engine.fused, rows)):
            if rank == 0:
                notify_driver(self.run_dir, said)

    def _describe_start(self, start: Start | None) -> list[str]:
        """Which checkpoint the first step follows; nothing where the run begins anew."""
        if self.checkpoint is not None:
            return [f"going on from step {self.step:,}: {self.checkpoint.path}"]
        return [] if start is None else [f"starting from step {start.checkpoint.step:,}: {start.checkpoint.path}"]

    def _build_engine(self, run: Run, rows: Sequence[int]) -> dict[int, Roofline]:
        """Make model and engine; return what rank 0 holds steps against, counted before ZeRO takes the model apart."""
        config, spec = run.config, run.spec
        model = spec.build()
        if self.checkpoint is None:
            self.fixed = begin(run, model)
        else:
            self.fixed = self.checkpoint.fixed
            model.load_state_dict(self.fixed, strict=False)
        if config.engine.has_narrow_base:
            store_base(model, torch.bfloat16)
        prepare_for_device(model, self.device, bf16=config.engine.uses_bf16)
        self.model: Any = cast(nn.Module, model).to(self.device)
        loss = make_loss(config, spec.base, self.model, self.fixed, self.device, rows)
        rooflines = find_rooflines(run, self.phases, loss, self.model, self.device) if self.rank == 0 else {}
        self.engine = Engine(
            self.model,
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
        return rooflines

    def run(self, last_step: int = 0, *, evaluate_start: bool = True) -> None:
        """Train from the current step to a limit, or to the first step at which all are to end; then save.

        An evaluation that was broken off comes first, and one that is under way is broken off for such an end.
        `last_step` is another limit beside those of the configuration (0: none); a later call goes on from there.
        """
        try:
            if self.saver.unevaluated is not None:
                self.report(self._evaluate_step(self.saver.unevaluated, at_end=self._is_done()))
            elif self.step == 0 and evaluate_start:
                guess = self.measures.describe_guess(self._evaluate_step({"step": 0}))
                if guess and self.rank == 0:
                    notify_driver(self.run_dir, f"warning: {guess}")
            self._make_steps(last_step)
        except EndAsked:  # what was to be evaluated is saved
            pass
        finally:  # what was saved before a mistake is not lost with it
            self.saver.finish()
        if self.log is not None and self.end:
            self.log.confirm_end()
        self.ranks.end = LIMIT if self._is_done() and self.saver.unevaluated is None else self.end
        self._enter_phase("ending the workers", WORKERS)

    def _make_steps(self, last_step: int) -> None:
        train, done, first = self.config.train, self._is_done(last_step), self.step + 1
        self._enter_phase("reading the first rows", FIRST_STEP)
        self.records.begin()
        while not done and not self.end:
            before = self.clock
            record = self._train_step()
            self.saver.look()
            done = self._is_done(last_step)
            ends, evaluates = done or bool(self.end), done or self._is_due(train.evaluate_every, before)
            self._save_waits |= self._is_due(train.save_every, before)
            if record is None and not (ends or evaluates or self._save_waits or self.step == first):
                continue
            record = record or self.records.read()
            with self.records.paused():
                # A checkpoint waits for a step that is not skipped, which shows that the weights work.
                saves = ends or ((self._save_waits or evaluates) and self.records.num_skipped == 0)
                # At an end among skipped steps the next start looks first whether they do.
                is_open = evaluates or (ends and self.records.num_skipped > 0)
                if not is_open and self.log is not None:
                    self.log.write(record)
                if saves:
                    self._save(record if is_open else None)
                if evaluates:
                    record = self._evaluate_step(record, at_end=done and self._is_done())
                if saves or evaluates:
                    self.report(record)
                if saves or evaluates or self.step == first:
                    self._enter_phase("training", TRAINING)

    def _train_step(self) -> dict[str, Any] | None:
        """Make a step and return its record; None: it is still to be read (`StepRecords.read`)."""
        batch = self._ahead or self._look_ahead()
        read_figures = self.engine.launch_step(batch.micro_batches, batch.counts, self.step, self._measure_progress())
        self.step, self.tokens = self.step + 1, self.tokens + batch.num_tokens
        # A run that is stopped for this step goes on from what is being saved.
        before = self.records.follow(read_figures, self.step, self.tokens, batch, self.saver.finish)
        if before is not None and self.log is not None:
            self.log.write(before)
        record = None if self.records.reads_late else self.records.read()
        self._ahead = self._look_ahead()
        return record

    def _look_ahead(self) -> StepBatch:
        """Take the next step's micro batches, and hear how much they have over all ranks, and rank 0's clock."""
        started = time.perf_counter()
        micro_batches, tokens_here = next(self.batches, ([], []))  # no more behind the last step
        waited = time.perf_counter() - started
        counts_here = [batch.counts for batch in micro_batches]
        names = self.engine.loss_weights.keys()
        self.clock, *totals = self.ranks.add_up(
            self.records.seconds if self.rank == 0 else 0.0,
            sum(tokens_here),
            *(sum(counts[name] for counts in counts_here) for name in names),
            *self.parts.count(micro_batches, tokens_here),
        )
        num_tokens, *numbers = map(int, totals)
        counts, of_parts = dict(zip(names, numbers, strict=False)), numbers[len(names) :]
        return StepBatch(micro_batches, waited, num_tokens, counts, tuple(of_parts))

    def _evaluate_step(self, record: dict[str, Any], *, at_end: bool = False) -> dict[str, Any]:
        """Evaluate a step, write and return its record, and let its checkpoint count if it has one.

        `record` is what is known of the step. Where EndAsked breaks the evaluation off, the step is saved.
        """
        try:
            record = record | self.measures.evaluate(self.step, at_end=at_end)
        except EndAsked:
            if self.step > 0 and self.saver.unevaluated is None:  # a step that was skipped
                self._save(record)
            raise
        if self.log is not None:
            self.log.write(record)
        if self.saver.unevaluated is not None:
            loss = record[DOMAIN + name_losses(self.config.objective.kind).loss]
            self.saver.confirm(self.step, loss, record["eval/domain_tokens"])
        return record

    def _save(self, unevaluated: dict[str, Any] | None = None) -> None:
        """Begin to save; `unevaluated` is the step's record, where it is evaluated next."""
        self._save_waits = False
        state = {"seconds": self.records.seconds, "tokens": self.tokens, **self.parts.to_trainer_state()}
        self.saver.save(self.step, state | self.measures.to_trainer_state(), unevaluated)

    def time_steps(self, num_steps: int) -> float:
        """Train some steps, and return the seconds of one: the median of the later half."""
        self.records.begin()
        records = [self._train_step() or self.records.read() for _ in range(num_steps)]
        seconds = [float(record["time/step_seconds"]) for record in records]
        return statistics.median(seconds[num_steps // 2 :])

    def close(self) -> None:
        """Stop reading, and close the metrics."""
        self.batches.close()
        self.saver.close()
        if self.log is not None:
            self.log.close()

    @property
    def end(self) -> str:
        """Why this rank saves and ends, one of those of `training.notices`; empty: it goes on."""
        return self.ranks.end

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

    def _enter_phase(self, phase: str, stage: str) -> None:
        if self.rank == 0:
            enter_phase(self.run_dir, phase, stage)
