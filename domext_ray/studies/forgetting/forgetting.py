"""How much general language a model has lost: masked-token accuracy of many models on one mask set (AF Adapter).

Enters: models (runs, exports, bases), and general text that none of them was trained on. Leaves: for every model its
accuracy with a bootstrap 95 % interval over texts, the points it lost against the first model (paired over texts), and
both by source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.jobs import ForgettingConfig, name_scaled
from domext_ray.errors import ConfigError, RunError
from domext_ray.families.metrics.metrics import divide
from domext_ray.families.metrics.scored_models import ScoredModel
from domext_ray.families.metrics.scores import Score, compare_scores, make_score
from domext_ray.families.rows import run_by_length
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import AUTO, DomextForMaskedLM
from domext_ray.models.masked_lm import build_masked_lm, hash_model, load_to_ask, score_places
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.runtime.device import PREDICTION, as_worker
from domext_ray.studies.forgetting.mask_set import MaskedText, MaskSet, build_mask_set, choose_texts
from domext_ray.text.corpus.shards import make_settings
from domext_ray.text.corpus.unknown import check_sample
from domext_ray.text.data.sample import check_corpus
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer

ACCURACY, BY_SOURCE = "accuracy", "by_source"


@dataclass(frozen=True)
class AskedModel:
    """A model that is measured, as it was before anything was."""

    name: str  # what the user called it, and the scale where that is below 1 (`name_scaled`)
    place: str  # what it is loaded from
    scale: float  # of what it adds to its base
    tokenizer: PreTrainedTokenizerBase
    sha256: str  # `hash_model`


@dataclass(frozen=True)
class Forgetting:
    """The result of one comparison."""

    config: ForgettingConfig
    masks: MaskSet
    models: tuple[ScoredModel, ...]  # in the user's order; differences are what others have lost against the first

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the corpus' files, sorted."""
        return tuple(sorted(set(self.masks.sources)))


@dataclass(frozen=True)
class _Accuracies:
    """Sums [R, 2·S] of right and of scored tokens by source -> accuracies."""

    sources: tuple[str, ...]

    def __call__(self, sums: np.ndarray) -> dict[str, Any]:
        right, scored = np.split(sums, 2, axis=1)
        figures: dict[str, Any] = {ACCURACY: divide(right.sum(axis=1), scored.sum(axis=1))}
        if len(self.sources) > 1:
            by_source = divide(right, scored)
            figures[BY_SOURCE] = {source: by_source[:, i] for i, source in enumerate(self.sources)}
        return figures


def score_predictions(is_right: np.ndarray, masks: MaskSet) -> Score:
    """Score one model's predictions; `is_right` is bool [tokens], text after text.

    The score's examples are texts.
    """
    counts = masks.counts
    sources = tuple(sorted(set(masks.sources)))
    texts = np.repeat(np.arange(len(counts)), counts)
    right = np.bincount(texts, weights=is_right, minlength=len(counts))
    of_source = np.eye(len(sources))[[sources.index(source) for source in masks.sources]]
    statistics = np.concatenate([of_source * right[:, None], of_source * counts[:, None]], axis=1)
    return make_score(statistics, _Accuracies(sources))


def read_models(config: ForgettingConfig) -> tuple[AskedModel, ...]:
    """Read every model before any predicts, one at a time: a mistake shows at once, and memory holds one."""
    models: list[AskedModel] = []
    for name, place in config.named_models:
        start = load_to_ask(place, "--models")
        scales = sorted(config.scales)
        if scales and start.no_scale:
            _check_reference(config, start.no_scale, name, place, is_first=not models)
            scales = []
        for scale in (1.0, *scales):
            model = build_masked_lm(start if scale == 1 else load_to_ask(place, "--models", scale), "--models")
            if config.has_corpus:
                _check_length(config, name, cast(DomextConfig, model.config))
            models.append(AskedModel(name_scaled(name, scale), place, scale, start.tokenizer, hash_model(model)))
    return tuple(models)


def measure_forgetting(config: ForgettingConfig, models: Sequence[AskedModel] = ()) -> Forgetting:
    """Compare models on one mask set.

    `models` is what `read_models` found; empty: they are read here.
    """
    device = choose_device(config)
    sample = check_corpus(config.corpus, config.prepare)
    models = models or read_models(config)
    for asked in (model for model in models if model.scale == 1):
        settings = make_settings(asked.tokenizer, config.prepare, config.max_length)
        check_sample(sample, settings)
    make_folder(Path(config.output))
    texts = choose_texts(config.corpus, config.prepare, num_texts=config.num_texts, seed=config.seed)
    masks = build_mask_set(
        texts,
        {model.name: model.tokenizer for model in models},
        mask_frac=config.mask_frac,
        max_length=config.max_length,
        shared_words=config.shared_words,
    )
    scored: list[ScoredModel] = []
    for model in models:
        score = score_predictions(_predict(config, masks, model, device), masks)
        paths = [ACCURACY, *(f"{BY_SOURCE}.{source}" for source in score.values.get(BY_SOURCE, {}))]
        lost = compare_scores(score, scored[0].score, paths) if scored else {}
        intervals = score.describe()["intervals"]
        scored.append(ScoredModel(model.name, model.place, model.sha256, score, intervals, lost))
    return Forgetting(config, masks, tuple(scored))


def _check_reference(config: ForgettingConfig, rule: str, name: str, place: str, *, is_first: bool) -> None:
    """Refuse scales of a model that has none, unless it is what others are held against."""
    if is_first and config.has_corpus and len(config.named_models) > 1:
        return
    scales = ",".join(map(str, config.scales))
    held_against = "give it first, as what the others are held against, or leave it out"
    remedy = held_against if config.has_corpus else "leave it out: without --corpus nothing is held against it"
    raise ConfigError(f"--scales is {scales}; it must be left out {rule} (--models {name}={place}); {remedy}.")


def make_folder(folder: Path) -> None:
    """Make a folder within --output; ConfigError: that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {str(folder.parent)!r} cannot be written to ({error.strerror}).") from error


def _check_length(config: ForgettingConfig, name: str, shape: DomextConfig) -> None:
    if config.max_length > shape.max_row_length:
        raise ConfigError(
            f"--max_length is {config.max_length}; the model {name!r} of --models has positions for "
            f"{shape.max_row_length} tokens."
        )


def _predict(config: ForgettingConfig, masks: MaskSet, asked: AskedModel, device: torch.device) -> np.ndarray:
    """Return which tokens a model predicts, bool [tokens]."""
    model = build_masked_lm(load_to_ask(asked.place, "--models", asked.scale), "--models")
    if hash_model(model) != asked.sha256:
        raise RunError(f"--models {asked.name}={asked.place} has changed since this job began; start the job again.")
    with as_worker(PREDICTION):
        return predict_masked(
            model,
            masks.rows[fingerprint_tokenizer(asked.tokenizer)],
            asked.tokenizer.pad_token_id,
            config.batch_size,
            asked.name,
            device=device,
            adapter_names=AUTO if config.route and model.bert.router.adapters else None,
        )


def choose_device(config: ForgettingConfig) -> torch.device:
    """Return where models compute; ConfigError: it is asked to be a GPU, and there is none."""
    has_gpu = torch.cuda.is_available()
    if config.use_gpu is True and not has_gpu:
        raise ConfigError(
            "--use_gpu is True, and torch finds no GPU; leave it out, or start the job where there is one."
        )
    return torch.device("cuda" if has_gpu and config.use_gpu else "cpu")


def predict_masked(
    model: DomextForMaskedLM,
    rows: Sequence[MaskedText],
    pad_id: int,
    batch_size: int,
    name: str = "",
    *,
    device: torch.device | str = "cpu",
    adapter_names: str | None = None,
) -> np.ndarray:
    """Predict the masked tokens of rows, those of a length side by side, with a model in evaluation mode.

    The result is bool [tokens], row after row: whether the most likely entry of the vocabulary is the right one. With
    `adapter_names` "auto" the model's routers choose each row's adapter; None: its active adapters take part.
    """
    cast(nn.Module, model).to(torch.device(device))
    progress = _Progress(name, len(rows))

    def ask(own: list[MaskedText]) -> list[np.ndarray]:
        logits = score_places(model, own, [row.places for row in own], pad_id, adapter_names)
        labels = np.concatenate([row.labels for row in own])
        is_right = logits.argmax(dim=-1).cpu().numpy() == labels
        progress.advance(len(own), sum(row.length for row in own))
        return np.split(is_right, np.cumsum([len(row.places) for row in own])[:-1])

    found = run_by_length(rows, ask, max_rows=batch_size)
    progress.close()
    return np.concatenate(found)


class _Progress:
    """One model's texts, rate, time left by tokens."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.name, self.num_rows = name, num_rows
        self.line = StatusLine(is_due=False)
        self.num_done = self.num_tokens = 0

    def advance(self, num_rows: int, num_tokens: int) -> None:
        """Count finished rows."""
        self.num_done, self.num_tokens = self.num_done + num_rows, self.num_tokens + num_tokens
        # Long rows come first, so what is left is not slower than what was.
        left = self.line.seconds / self.num_done * (self.num_rows - self.num_done)
        self.line.show(self._describe(f"at most {format_seconds(left)} left"))

    def close(self) -> None:
        """Show the last line."""
        self.line.keep(self._describe(f"done in {format_seconds(self.line.seconds)}"))

    def _describe(self, rest: str) -> str:
        seconds = self.line.seconds
        return (
            f"{self.name}: {self.num_done:,}/{self.num_rows:,} texts  {self.num_done / seconds:,.1f} texts/s  "
            f"{self.num_tokens / seconds:,.0f} tokens/s  {rest}"
        )
