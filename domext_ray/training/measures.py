"""What a run measures of its model as it trains: held-out text, everyday language, and both with its router."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from torch import nn

from domext_ray.config.pretrain import resolve_micro_batch_sizes
from domext_ray.errors import RunError
from domext_ray.model.domext.modeling_domext import BASE_NAME
from domext_ray.model.spec import build_base
from domext_ray.runs.events import EVALUATION
from domext_ray.training.engine import Engine
from domext_ray.training.evaluate import (
    SETS,
    Evaluations,
    Evaluator,
    LoneEvaluator,
    Scores,
    build_base_evaluations,
    evaluate,
    evaluate_routed,
    measure_bits,
    pack_scores,
    unpack_scores,
)
from domext_ray.training.losses import MaskedLoss, count_chunks
from domext_ray.training.metrics import name_losses
from domext_ray.training.passages import EvalSet
from domext_ray.training.ranks import Ranks
from domext_ray.training.records import PartFigures
from domext_ray.training.router import attach_routers, read_records, wants_router
from domext_ray.training.run import Run
from domext_ray.training.start import find_base_beside

BASE_SCORES = "base_scores"
"""What checkpoints carry of the evaluation of step 0, in the state of their trainer."""
ROUTER_SECONDS, ROUTER_LOOK_SECONDS = 600.0, 0.5
"""How long a run's last evaluation waits for its router, and between two looks at whether it is there."""

_GUESS_FRAC = 0.95
"""Of the loss of a guess: a base that has been trained on any text is far below it."""


class Measures:
    """Evaluates a run's model; `evaluate` and `score` are collective.

    `state` is the trainer state of the checkpoint that the run goes on from; None: the run begins.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        model: nn.Module,
        sets: Evaluations,
        parts: PartFigures,
        ranks: Ranks,
        enter_phase: Callable[[str, str], None],
        state: Mapping[str, Any] | None,
    ) -> None:
        self.run, self.engine, self.model, self.sets, self.parts = run, engine, model, sets, parts
        self.ranks, self.enter_phase = ranks, enter_phase
        self.losses, self._doing = name_losses(run.config.objective.kind), ""
        self.of_base = unpack_scores(state.get(BASE_SCORES, {}) if state else {}, sets)
        """What the base has got for each row of the sets, where the run began with it and it is still known."""

    def to_trainer_state(self) -> dict[str, Any]:
        """Return what the next attempt cannot measure any more."""
        return {BASE_SCORES: pack_scores(self.of_base, self.sets)} if self.of_base else {}

    def evaluate(self, step: int, *, at_end: bool = False) -> dict[str, Any]:
        """Score the sets and return figures of a step. At a run's start and end also what takes as long as the rest.

        At the start, what the base itself scores has names of its own, where the model does not begin as its base. At
        the end, what users get who let the run's router choose, if it has one, has names of its own.
        EndAsked is raised when the ranks are to end.
        """
        self._doing = f"evaluating {f'step {step:,}' if step else 'the start'}"
        names = [*SETS] if at_end or step == 0 else [*SETS][:-1]
        rows = {name: self._score_set(name, self.sets, self.engine) for name in names}
        masks_words = self.run.config.objective.kind == "masked"
        if masks_words and step == 0 and wants_router(self.run.config) and self._stays_beside_base():
            self.of_base = rows
        record = self._describe("eval/", rows, self.sets)
        domain, general = Scores.add_up(rows["domain"]), Scores.add_up(rows["general"])
        record |= {
            "eval/domain_tokens": domain.num_tokens,
            "eval/domain_characters": self.sets.characters.num_chars,
            "eval/general_words": general.num_tokens,
        }
        if domain.num_pairs:
            record["eval/domain_next_sentence_accuracy"] = domain.next_sentence_accuracy
        if self.parts.names:
            self._enter("other texts")
            losses = [domain.loss, *(Scores.add_up(self.score(part)).loss for part in self.sets.parts)]
            record |= self.parts.describe_held_out(losses)
        if step == 0:
            record |= self._measure_base()
        if masks_words and at_end and self._has_router():
            record |= self._describe("eval/routed_", self._score_routed(rows), self.sets)
        return record

    def describe_guess(self, record: Mapping[str, Any]) -> str:
        """Say of an evaluation of the start that the base predicts as one guesses; empty: it does not, or nobody asks.

        A base whose tokenizer has other ids trains well, and from nothing: its loss is all that shows it.
        """
        config, base = self.run.config, self.run.spec.base
        if base is None or not base.has_mlm_head or config.init_from or config.objective.kind != "masked":
            return ""
        name, number = f"domain_{self.losses.loss}", base.config.vocab_size
        loss, guess = record.get(f"eval/base_{name}", record[f"eval/{name}"]), math.log(number)
        if not loss > _GUESS_FRAC * guess:
            return ""
        return (
            f"the base {base.id!r} predicts masked tokens of this text no better than a guess among its {number:,} "
            f"entries (loss {loss:.1f}, of a guess {guess:.1f}): its tokenizer may be that of another model, or its "
            "weights have never been trained, or not on such text; look at --base before you go on."
        )

    def _measure_base(self) -> dict[str, Any]:
        """Score the base itself, where the model does not begin as it: in a model that is there for that alone."""
        config, spec, device = self.run.config, self.run.spec, self.engine.device
        if (base := find_base_beside(config, spec)) is None:
            return {}
        sizes, text = resolve_micro_batch_sizes(config, self.engine.world_size), self.run.inputs.domain
        sets = build_base_evaluations(config, base, text, self.sets, sizes[0], new_words=bool(spec.new_words))
        bf16, num_chunks = config.engine.uses_bf16, count_chunks(config, base.config.vocab_size, sizes)
        model = build_base(base, device, config.engine)
        loss = MaskedLoss(cast(nn.Module, model), device, bf16=bf16, num_chunks=num_chunks)
        evaluator, self._doing = LoneEvaluator(loss, device, self.engine), "evaluating the base"
        rows = {name: self._score_set(name, sets, evaluator) for name in SETS}
        record = self._describe("eval/base_", rows, sets)
        return {**record, "eval/base_general_words": Scores.add_up(rows["general"]).num_tokens}

    def score(self, asked: EvalSet) -> np.ndarray:
        """Score a fixed set of rows; see `evaluate.evaluate`."""
        return evaluate(self.engine, asked, self.ranks.listen)

    def _score_set(self, name: str, sets: Evaluations, evaluator: Evaluator) -> np.ndarray:
        self._enter(SETS[name])
        return evaluate(evaluator, getattr(sets, name), self.ranks.listen)

    def _has_router(self) -> bool:
        """Whether the run has one, as rank 0 sees it; all ranks wait for it, which its driver may still be fitting."""
        run_dir, adapter, is_first = self.run.paths.run, self.run.config.method.adapter, self.ranks.rank == 0

        def is_there() -> bool:
            found = read_records(run_dir)
            return adapter in found if self.run.awaits_router else bool(found)

        (is_expected,) = self.ranks.listen(is_first and (self.run.awaits_router or is_there()))
        ends = math.inf
        while is_expected:
            num_missing, is_late = self.ranks.listen(not is_there(), is_first and time.monotonic() > ends)
            if not num_missing:
                return True
            if is_late:
                raise RunError(
                    f"the router of {run_dir} was not fitted within {ROUTER_SECONDS:g} s after the last step; the "
                    "same command goes on from there, and fits it."
                )
            if ends == math.inf:
                ends = time.monotonic() + ROUTER_SECONDS
                self.enter_phase("waiting for the router, which the job's own process fits", EVALUATION)
            time.sleep(ROUTER_LOOK_SECONDS)
        return False

    def _stays_beside_base(self) -> bool:
        """Whether the model begins as its base, and is it with its adapter left out, for nothing else trains."""
        adapter = f".adapters.{self.run.config.method.adapter}."
        trained = [name for name, param in self.model.named_parameters() if param.requires_grad]
        begins_as_base = self.run.spec.begins_as_base and not self.run.config.init_from
        return begins_as_base and all(adapter in name for name in trained)

    def _score_routed(self, adapted: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Score the sets as users get them who let the router choose, given what the model as a whole has scored."""
        network, adapter, found = cast(Any, self.model), self.run.config.method.adapter, dict[str, np.ndarray]()
        attach_routers(network, self.run.paths.run)
        for name, rows in adapted.items():
            self._enter(f"{SETS[name]}, with the router")
            known = {adapter: rows} if [*network.config.adapters] == [adapter] else {}
            known |= {BASE_NAME: self.of_base[name]} if name in self.of_base else {}
            asked = getattr(self.sets, name)
            found[name] = evaluate_routed(self.engine, network, asked, known, self.ranks.listen)
        return found

    def _describe(self, prefix: str, rows: Mapping[str, np.ndarray], sets: Evaluations) -> dict[str, Any]:
        scores = {name: Scores.add_up(figures) for name, figures in rows.items()}
        domain, general = scores["domain"], scores["general"]
        record = {
            f"{prefix}domain_{self.losses.loss}": domain.loss,
            f"{prefix}domain_{self.losses.accuracy}": domain.accuracy,
            f"{prefix}domain_bits_per_character": measure_bits(scores["characters"], sets.characters),
            f"{prefix}general_mlm_accuracy": general.accuracy if general.num_tokens else None,
        }
        if "words" in scores:
            record[f"{prefix}domain_word_bits_per_character"] = measure_bits(scores["words"], sets.words)
        return record

    def _enter(self, what: str) -> None:
        """Each part of an evaluation is a phase: all of them together may take minutes, and something moves."""
        self.enter_phase(f"{self._doing}: {what}", EVALUATION)
