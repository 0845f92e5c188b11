"""Held-out loss, accuracy and bits per character in the domain, and the general probe: the forgetting meter.

All are fixed sets: the same rows and the same masks, whatever the seed or the number of workers, so that figures of
different runs on one corpus compare. In the domain, held-out tokens are masked by the run's own objective (whole words
and rates included). In the general probe every word of some plain sentences is masked once, over seven passes, and
accuracy counts the words that are one token of the base.

Token losses of different vocabularies do not compare. Bits per character and word bits per character, of held-out words
that are chosen by their characters, are the same words for every vocabulary (passages.py). Between models of different
vocabularies the word bits decide; with one vocabulary both do.

With a run's router (router.py), each row of a set is scored by the adapter that it is sent to, or by the base: what
users of `adapter_names="auto"` get. Rows are sent as they are asked, with their words masked. Where the base has scored
them at the run's start and the adapted model at its end, only the routes are new.

Both the probe and the bits ask for masked words, which a model that reads from left to right was never shown:
for such a run they are not measured, and its loss on held-out rows is that of the next token.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import ObjectiveConfig, SettledConfig
from domext_ray.errors import CorpusError
from domext_ray.files import ASSETS
from domext_ray.model.base import Base
from domext_ray.model.domext.modeling_domext import BASE_NAME
from domext_ray.text.corpus.manifest import Manifest, take_numbered
from domext_ray.text.corpus.views import make_masker
from domext_ray.text.data.draws import hash_counters
from domext_ray.text.data.files import HEAD_BYTES, read_list
from domext_ray.text.data.line_forms import require_plain_text
from domext_ray.text.data.readers import TEXT_FIELD
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.losses import Loss
from domext_ray.training.objective import to_batch
from domext_ray.training.passages import (
    EVALUATION_SEED,
    NOTHING,
    EvalSet,
    build_character_set,
    build_probe_set,
    build_word_set,
    read_passages,
)
from domext_ray.training.step import move_batch

HALVES = {"both": slice(None), "first": slice(0, None, 2), "second": slice(1, None, 2)}
"""Of rows or passages in the order in which they were chosen."""
_PACKED = "<f4"  # which holds a row's scores exactly: they are counts, and a sum in fp32
GENERAL_PROBE = ASSETS / "general_probe.txt"


@dataclass(frozen=True)
class Scores:
    """Sums over the rows of an evaluation, or of one of them."""

    loss_sum: float = 0.0  # negative log-likelihood of the predicted tokens, nats
    num_correct: int = 0  # of them, predicted exactly
    num_tokens: int = 0  # predicted tokens
    num_in_order: int = 0  # pairs told right
    num_pairs: int = 0

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of the predicted tokens, nats; nan without any."""
        return self.loss_sum / self.num_tokens if self.num_tokens else math.nan

    @property
    def accuracy(self) -> float:
        """Share of the predicted tokens that are exact, 0 to 1; nan without any."""
        return self.num_correct / self.num_tokens if self.num_tokens else math.nan

    @property
    def next_sentence_accuracy(self) -> float:
        """Share of pairs told right, 0 to 1; nan without pairs."""
        return self.num_in_order / self.num_pairs if self.num_pairs else math.nan

    @classmethod
    def add_up(cls, rows: np.ndarray) -> Scores:
        """Add up the scores of rows, as `evaluate` returns them."""
        loss_sum, *counts = rows.sum(0).tolist()
        return cls(loss_sum, *map(int, counts))


def measure_bits(scores: Scores, asked: EvalSet) -> float:
    """Return the bits per character of a set, given its scores; nan without any."""
    if not asked.num_chars:
        return math.nan
    return (scores.loss_sum / math.log(2) + asked.price_bits) / asked.num_chars


class Evaluator(Protocol):
    """What scores batches: a run's engine, or a model that trains no more."""

    rank: int
    world_size: int
    device: torch.device

    def evaluate(self, batch: Any) -> Tensor:
        """Score this rank's batch without dropout; return the fields of `Scores` of each row, float64 [B, 5 or 3]."""

    def sum_over_ranks(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""


class LoneEvaluator:
    """Scores batches with another model than a run's engine, on the ranks of `beside`; None: in one process."""

    def __init__(self, objective: Loss, device: torch.device, beside: Evaluator | None = None) -> None:
        self.objective, self.device, self.beside = objective.eval(), device, beside
        self.rank, self.world_size = (beside.rank, beside.world_size) if beside else (0, 1)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        scores: Tensor = self.objective(move_batch(batch, self.device))
        return scores

    def sum_over_ranks(self, tensor: Tensor) -> None:
        if self.beside is not None:
            self.beside.sum_over_ranks(tensor)


def evaluate(engine: Evaluator, asked: EvalSet, listen: Callable[[], object] = lambda: None) -> np.ndarray:
    """Score a fixed set, the same one on every rank, of which each scores its share; collective.

    Every rank runs the same number of forwards (ZeRO-3 would wait for ever otherwise): one with fewer batches repeats
    its last one, and leaves out what comes of that. `listen` is called before each batch, on every rank; what it raises
    breaks the evaluation off.

    Returns the fields of `Scores` of every row, in the order of the set, float64 [R, 5], or [R, 3] without pairs: the
    same on every rank, however many there are.
    """
    if not len(asked.rows):  # on any rank
        return np.zeros((0, 3))
    own = asked.find_share(engine.rank, engine.world_size)
    batches = asked.collate(asked.rows.take(own)) or asked.batches[:1]
    num_passes = torch.tensor(len(batches))
    if engine.world_size > 1:
        dist.all_reduce(num_passes, dist.ReduceOp.MAX)
    batches = [*batches, *[batches[-1]] * (int(num_passes) - len(batches))]
    scored = list[torch.Tensor]()
    for batch in batches:
        listen()
        scored.append(engine.evaluate(batch))
    figures = torch.cat(scored).cpu()
    rows = torch.zeros(len(asked.rows), figures.shape[1], dtype=torch.float64)
    rows[own] = figures[: len(own)]
    engine.sum_over_ranks(rows)
    return rows.numpy()


def evaluate_routed(
    engine: Evaluator, model: nn.Module, asked: EvalSet, known: Mapping[str, np.ndarray], listen: Callable[[], object]
) -> np.ndarray:
    """Score each row of a set by whom the routers of an engine's model send it to; collective, see `evaluate`.

    `known` are scores of all rows, as `evaluate` returns them, by the names that routers give; whoever is missing
    scores its rows now. Returns the first three scores of every row: whether pairs were told right is left out.
    """
    network: Any = model
    config, rows = network.config, np.zeros((len(asked.rows), 3))
    routes = [name for batch in asked.batches for name in network.bert.route(batch.input_ids.to(engine.device))]
    before = config.active_adapters
    try:
        for name in sorted({*routes}):  # the same on every rank
            own = np.flatnonzero(np.array(routes) == name)
            if name in known:
                rows[own] = known[name][own, :3]
                continue
            config.active_adapters = [] if name == BASE_NAME else [name]
            rows[own] = evaluate(engine, replace(asked, rows=asked.rows.take(own)), listen)[:, :3]
    finally:
        config.active_adapters = before
    return rows


def build_domain_set(
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    objective: ObjectiveConfig,
    *,
    num_rows: int,
    batch_size: int,
    packed: bool = False,
    half: str = "both",
) -> EvalSet:
    """Mask a fixed choice of rows, or make views of them.

    Which rows these are depends on the corpus only, and the seed of the draws is the evaluation's own.
    """
    order = np.argsort(hash_counters(EVALUATION_SEED, np.arange(manifest.num_rows("held_out"))), kind="stable")
    order = order[:num_rows][HALVES[half]]
    # A smaller group of inseparable rows would be an easier one.
    num_grouped = len(order) // objective.inseparable_rows * objective.inseparable_rows
    table = take_numbered(manifest.shards("held_out"), np.sort(order[: num_grouped or len(order)]))
    masker: Any = make_masker(tokenizer, objective, EVALUATION_SEED, packed=packed)
    return EvalSet(
        masker.mask(table, epoch=0),
        lambda rows: [*map(to_batch, masker.collate(rows, batch_size))],
        group_rows=objective.inseparable_rows,
    )


def read_probe(path: str | Path = "") -> list[str]:
    """Read the sentences of the general probe, one per line; without a path, those that ship with the package."""
    source = Path(path) if path else GENERAL_PROBE
    named = f"--train.general_probe {str(source)!r}"
    text = read_list(source, named)
    require_plain_text(named, text[:HEAD_BYTES].encode(), (TEXT_FIELD,), {})
    lines = text.split("\n")
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise CorpusError(f"{named} has no sentence; give one per line.")
    return sentences


@dataclass(frozen=True)
class Evaluations:
    """The fixed sets of a run's evaluations; those of masked words are `NOTHING` where the run masks none."""

    domain: EvalSet  # held-out rows, masked by the run's objective, or their views
    parts: Sequence[EvalSet] = ()  # those of each text beside the corpus
    general: EvalSet = NOTHING  # the general probe; `NOTHING`, too, if no word of it is one token
    characters: EvalSet = NOTHING  # held-out text, the same words masked for every vocabulary
    words: EvalSet = NOTHING  # the same words, each one masked alone


SETS = {
    "domain": "held-out text",
    "general": "the general probe",
    "characters": "bits per character",
    "words": "word bits per character",
}
"""Fields of `Evaluations` that a router is measured on, and what a run calls them; the last takes longest."""


def pack_scores(rows: Mapping[str, np.ndarray], evaluations: Evaluations) -> dict[str, dict[str, str]]:
    """Return the first three scores of rows, by set, as JSON, with what says which rows these are."""
    return {
        name: {
            "asked": getattr(evaluations, name).fingerprint,
            "rows": base64.b64encode(figures[:, :3].astype(_PACKED).tobytes()).decode(),
        }
        for name, figures in rows.items()
    }


def unpack_scores(packed: Mapping[str, Mapping[str, str]], evaluations: Evaluations) -> dict[str, np.ndarray]:
    """Return what `pack_scores` has packed, [R, 3], of those sets that still ask the same."""
    return {
        name: np.frombuffer(base64.b64decode(entry["rows"]), _PACKED).reshape(-1, 3).astype(np.float64)
        for name, entry in packed.items()
        if entry["asked"] == getattr(evaluations, name).fingerprint
    }


def build_evaluations(
    config: SettledConfig,
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    beside: Sequence[tuple[Manifest, PreTrainedTokenizerBase]],
    batch_size: int,
) -> Evaluations:
    """Build what `Evaluations` holds, for a corpus and the texts beside it, each with its tokenizer."""
    options: dict[str, Any] = {"num_rows": config.train.eval_rows, "batch_size": batch_size}
    options |= {"packed": config.prepare.packed, "half": config.train.eval_half}
    texts = ((manifest, tokenizer), *beside)
    domain, *parts = (build_domain_set(*text, config.objective, **options) for text in texts)
    found = Evaluations(domain, parts)
    return _ask_words(found, config, manifest, tokenizer, batch_size) if config.objective.kind == "masked" else found


def _ask_words(
    found: Evaluations, config: SettledConfig, manifest: Manifest, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Evaluations:
    """Return evaluations with the sets of masked words, which compare between vocabularies."""
    length = config.train.seq_length
    sizes = {"batch_size": batch_size, "full_length": length}
    probe = build_probe_set(read_probe(config.train.general_probe), tokenizer, max_length=length, **sizes)
    passages = read_passages(manifest, tokenizer, num_passages=config.train.eval_rows, max_length=length)
    passages = passages[HALVES[config.train.eval_half]]
    characters, words = (build(passages, tokenizer, **sizes) for build in (build_character_set, build_word_set))
    return replace(found, general=probe, characters=characters, words=words)


def build_base_evaluations(
    config: SettledConfig, base: Base, manifest: Manifest, own: Evaluations, batch_size: int, *, new_words: bool
) -> Evaluations:
    """Build what the base itself is asked of a run that is asked its `own`; of pairs the order is left out.

    With new words that is what compares between vocabularies, in the base's own.
    """
    if new_words:
        return _ask_words(Evaluations(NOTHING), config, manifest, load_tokenizer(base.folder), batch_size)
    return replace(own, domain=NOTHING) if config.objective.next_sentence else own
