"""Term normalisation in two steps: a free wording -> candidates of the catalogue -> the standard terms that it means.

Enters: mentions with their standard terms, and the catalogue of all terms (CHIP-CDN's layout). Leaves: one or more
terms a mention. Step 1 recalls the catalogue's nearest terms by character n-grams, and by embeddings where they are
given, without any training; step 2 is a model that reads mention and candidate as a pair and says whether they mean the
same. These are the two steps of CHIP-CDN in the AF Adapter paper's evaluation on CBLUE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from transformers import PreTrainedTokenizerBase

from domext_ray.downstream.tasks.learned import Learned, check_learned, read_bool, read_whole
from domext_ray.downstream.tasks.records import round_score
from domext_ray.downstream.tasks.stages import Predict, Records, StagedTask, choose_metric
from domext_ray.downstream.tasks.task import Row, Task, TaskOptions
from domext_ray.downstream.tasks.texts import ClassificationTask
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.labelled.examples import AnyExample, LabelledSet, LabelledText, Mention
from domext_ray.labelled.metrics.metrics import score_classes, score_terms
from domext_ray.labelled.metrics.scores import Score

RANKING = "ranking"
SAME, DIFFERENT = "same", "different"
METRICS = ("f1.micro", "accuracy", "precision.micro", "recall.micro")

Embed: TypeAlias = Callable[[list[str]], np.ndarray]
"""Texts -> float [texts, d], such as the means of an encoder's last states."""

_MENTIONS_AT_A_TIME = 256  # x 40,000 terms of ICD-10: 80 MB of similarities
_FUSION = 60  # Cormack et al.'s constant
_NEVER = 1.01  # above every probability


@dataclass(frozen=True)
class RecallOptions:
    """How candidates are found.

    Args:
        num_candidates: terms that are recalled for a mention, 1 or more.
        num_negatives: recalled terms that a training mention is paired with, the nearest wrong ones, 1 or more.
        ngrams: lengths of the character n-grams, from and to.
        embed: makes embeddings for a second ranking; None: n-grams only.
    """

    num_candidates: int = 20
    num_negatives: int = 6
    ngrams: tuple[int, int] = (1, 3)
    embed: Embed | None = None

    def __post_init__(self) -> None:
        if self.num_candidates < 1 or self.num_negatives < 1:
            raise ConfigError(
                f"num_candidates {self.num_candidates} and num_negatives {self.num_negatives} must be 1 or more."
            )


class TermRecall:
    """Finds the catalogue's terms that look like a mention.

    Terms are ranked by the cosine of TF-IDF weights of character n-grams, lower-cased. With embeddings, a second
    ranking by their cosine is merged with it: a term's score is the sum over both rankings of 1 / (60 + rank), nothing
    from the first where no n-gram is shared. Of equal terms the catalogue's first goes first.

    Args:
        catalogue: the terms, without duplicates.
        options: how candidates are found.

    Source:
        Cormack, Clarke and Büttcher, Reciprocal rank fusion (2009).
    """

    def __init__(self, catalogue: Sequence[str], options: RecallOptions) -> None:
        self.catalogue, self.options = list(catalogue), options
        self._vectorizer = TfidfVectorizer(analyzer="char", ngram_range=options.ngrams, dtype=np.float32)
        self._terms = self._vectorizer.fit_transform(self.catalogue).T.tocsr()
        self._embeddings = _embed_units(options.embed, self.catalogue) if options.embed else None

    def find(self, mentions: Sequence[str]) -> list[list[str]]:
        """Return the candidates of each mention, nearest first."""
        found: list[list[str]] = []
        for first in range(0, len(mentions), _MENTIONS_AT_A_TIME):
            batch = list(mentions[first : first + _MENTIONS_AT_A_TIME])
            scores = (self._vectorizer.transform(batch) @ self._terms).toarray()
            if self._embeddings is not None and self.options.embed is not None:
                similar = _embed_units(self.options.embed, batch) @ self._embeddings.T
                by_ngrams = np.where(scores > 0, 1 / (_FUSION + _rank(scores)), 0.0)
                scores = by_ngrams + 1 / (_FUSION + _rank(similar))
            order = np.argsort(-scores, axis=1, kind="stable")[:, : self.options.num_candidates]
            found += [[self.catalogue[i] for i in row] for row in order]
        return found


class PairRankingTask(ClassificationTask):
    """Whether a mention and a candidate mean the same; a prediction is the probability of it."""

    def decode(
        self, examples: Sequence[AnyExample], rows: Sequence[Row], outputs: Sequence[tuple[np.ndarray, ...]]
    ) -> list[Any]:
        """Return the probability of "same" of every pair; see `Task.decode`."""
        same = self.head_labels.index(SAME)
        probabilities = [0.0] * len(examples)
        for row, (logits,) in zip(rows, outputs, strict=True):
            probabilities[row.example] = float(softmax(logits.astype(np.float64))[same])
        return probabilities

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[float]) -> Score:
        """Score the pairs whose probability is a half or more as "same"."""
        gold = [each.label for each in cast(Sequence[LabelledText], examples)]
        predicted = [SAME if each >= 0.5 else DIFFERENT for each in predictions]
        return score_classes(gold, predicted, self.head_labels, positive=SAME, primary=self.metric)

    def predict_majority(self, examples: Sequence[AnyExample]) -> list[Any]:
        """Return 0: most pairs do not mean the same."""
        return [0.0] * len(examples)


@dataclass(frozen=True)
class RankedTerms:
    """Candidates of a mention.

    Args:
        recalled: as step 1 found them, nearest first.
        ranked: the same as step 2 ranks them, with its probability that candidate and mention mean the same.
    """

    recalled: tuple[str, ...]
    ranked: tuple[tuple[str, float], ...]


class NormalizationTask(StagedTask):
    """Normalisation by recall and ranking.

    The best candidate is always an answer; every other candidate is one whose probability reaches a threshold, which
    `tune` chooses on dev (one half before).

    Args:
        data: mentions and the catalogue.
        tokenizer: the model's.
        options: how pairs become rows.
        metric: path of the figure that dev chooses by; empty: "f1.micro".
        recall_options: how candidates are found; None: the defaults.
        learned: as of `Task`; of `recall_options` only `embed` counts then.

    Raises:
        CorpusError: the set has no catalogue.
        ConfigError: there is no figure `metric`.
        ValueError: `learned` is not what such a task finds out, or its embeddings are not there.
    """

    def __init__(
        self,
        data: LabelledSet,
        tokenizer: PreTrainedTokenizerBase,
        options: TaskOptions,
        *,
        metric: str = "",
        recall_options: RecallOptions | None = None,
        learned: Learned | None = None,
    ) -> None:
        super().__init__(data, choose_metric(metric, METRICS, data))
        if not data.catalogue:
            raise CorpusError(f"{data.name} has no catalogue of standard terms; normalisation needs one.")
        self.recall_options = recall_options or RecallOptions()
        if learned is not None:
            self.recall_options = _recall_options(learned, self.recall_options.embed)
        self.recall = TermRecall(tuple(dict.fromkeys(data.catalogue)), self.recall_options)
        self.threshold = 0.5
        self._train = cast(tuple[Mention, ...], data.train)
        ranking_data = LabelledSet(
            f"{data.name} pairs",
            train=self._label_pairs(self._train, is_training=True),
            dev=self._label_pairs(cast(tuple[Mention, ...], data.dev), is_training=False),
            test=self._label_pairs(cast(tuple[Mention, ...], data.test), is_training=False),
            labels=(DIFFERENT, SAME),
        )
        known: Learned | None = None if learned is None else {}
        self.ranking_task = PairRankingTask(ranking_data, tokenizer, options, metric="f1.positive", learned=known)

    @property
    def learned(self) -> dict[str, Any]:
        """How candidates are found."""
        recall = self.recall_options
        return {
            "num_candidates": recall.num_candidates,
            "ngrams": list(recall.ngrams),
            "embedding_recall": recall.embed is not None,
        }

    @property
    def stages(self) -> dict[str, Task]:
        return {RANKING: self.ranking_task}

    def run_steps(self, predictors: Mapping[str, Predict], examples: Sequence[AnyExample]) -> list[RankedTerms]:
        """Recall candidates, then rank them; the predictor is that of "ranking"."""
        mentions = cast(Sequence[Mention], examples)
        recalled = self.recall.find([each.text for each in mentions])
        pairs = [_pair_up(*each, DIFFERENT) for each in _flatten(mentions, recalled)]
        probabilities = iter(predictors[RANKING](pairs))
        ranked = []
        for candidates in recalled:
            scored = [(term, float(next(probabilities))) for term in candidates]
            # Sorting is stable: of equally probable candidates the nearer goes first.
            ranked.append(RankedTerms(tuple(candidates), tuple(sorted(scored, key=lambda each: -each[1]))))
        return ranked

    def decode(self, examples: Sequence[AnyExample], steps: Sequence[RankedTerms]) -> list[list[str]]:
        return [_choose(each, self.threshold) for each in steps]

    def tune(self, examples: Sequence[AnyExample], steps: Sequence[RankedTerms]) -> dict[str, float]:
        """Choose the threshold of further terms that is best on dev; of equally good ones the highest."""
        further = [probability for each in steps for _, probability in each.ranked[1:]]
        tried = sorted({_NEVER, *np.quantile(further, np.linspace(0.5, 1, 101)).tolist()} if further else {_NEVER})
        figures = []
        for threshold in tried:
            predictions = [_choose(each, threshold) for each in steps]
            figures.append((self.score(examples, predictions).get(self.metric), threshold))
        self.apply({"threshold": max(figures)[1]})
        return {"threshold": self.threshold}

    @property
    def thresholds(self) -> dict[str, float]:
        """The probability from which a further candidate is an answer."""
        return {"threshold": self.threshold}

    def apply(self, thresholds: dict[str, float]) -> None:
        self.threshold = thresholds["threshold"]

    def to_records(
        self, examples: Sequence[AnyExample], steps: Sequence[RankedTerms], stages: Mapping[str, Records]
    ) -> Records:
        """Return "terms", and "candidates" with their probabilities, the highest first; see `Task.to_records`."""
        return [
            {
                "terms": _choose(each, self.threshold),
                "candidates": [{"term": term, "probability": round_score(score)} for term, score in each.ranked],
            }
            for each in steps
        ]

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Sequence[str]]) -> Score:
        """Score chosen terms; see `score_terms`."""
        return score_terms([each.terms for each in cast(Sequence[Mention], examples)], predictions)

    def score_steps(self, examples: Sequence[AnyExample], steps: Sequence[RankedTerms]) -> dict[str, Score]:
        """Score the candidates of each step: "recall.at_1" and so on, "recall.micro" of all candidates."""
        gold = [each.terms for each in cast(Sequence[Mention], examples)]
        recalled = [each.recalled for each in steps]
        ranked = [[term for term, _ in each.ranked] for each in steps]
        return {
            "recall": score_terms(gold, recalled, ranked=recalled),
            RANKING: score_terms(gold, ranked, ranked=ranked),
        }

    def predict_baselines(self, examples: Sequence[AnyExample]) -> dict[str, list[Any]]:
        """Predict, as "majority", training's most frequent term, and as "recall" the nearest term."""
        counts = Counter(term for each in self._train for term in each.terms)
        most_frequent = min(counts, key=lambda term: (-counts[term], term))
        nearest = self.recall.find([each.text for each in cast(Sequence[Mention], examples)])
        return {"majority": [[most_frequent] for _ in examples], "recall": [each[:1] for each in nearest]}

    def _label_pairs(self, mentions: Sequence[Mention], *, is_training: bool) -> tuple[LabelledText, ...]:
        """Mentions with their terms and near wrong ones for training; with all candidates to choose and score by."""
        candidates = self.recall.find([each.text for each in mentions])
        if is_training:
            limit = self.recall_options.num_negatives
            for i, mention in enumerate(mentions):
                wrong = [term for term in candidates[i] if term not in mention.terms]
                candidates[i] = [*mention.terms, *wrong[:limit]]
        pairs = _flatten(mentions, candidates)
        return tuple(_pair_up(each, i, term, SAME if term in each.terms else DIFFERENT) for each, i, term in pairs)


def _recall_options(learned: Learned, embed: Embed | None) -> RecallOptions:
    """How candidates were found."""
    check_learned(learned, "num_candidates", "ngrams", "embedding_recall")
    ngrams = learned["ngrams"]
    is_range = isinstance(ngrams, list) and len(ngrams) == 2 and all(type(each) is int for each in ngrams)
    if not is_range or not 1 <= ngrams[0] <= ngrams[1]:
        raise ValueError(f"ngrams is {ngrams!r}; it must be two whole numbers, from and to")
    if read_bool(learned, "embedding_recall") != (embed is not None):
        raise ValueError("candidates were recalled by embeddings too, and there is no encoder that makes them")
    return RecallOptions(read_whole(learned, "num_candidates", 1), ngrams=(ngrams[0], ngrams[1]), embed=embed)


def _embed_units(embed: Embed, texts: list[str]) -> np.ndarray:
    """Embeddings of length 1."""
    vectors = np.asarray(embed(texts), np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def _rank(scores: np.ndarray) -> np.ndarray:
    """Ranks from 1 along each row, highest score first."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(1, scores.shape[1] + 1)[None, :], axis=1)
    return ranks


def _choose(candidates: RankedTerms, threshold: float) -> list[str]:
    """The best candidate, and all others that reach the threshold."""
    return [term for i, (term, probability) in enumerate(candidates.ranked) if i == 0 or probability >= threshold]


def _flatten(mentions: Sequence[Mention], terms: Sequence[Sequence[str]]) -> list[tuple[Mention, int, str]]:
    """Each mention with each of its terms and the term's place."""
    return [(mention, i, term) for mention, each in zip(mentions, terms, strict=True) for i, term in enumerate(each)]


def _pair_up(mention: Mention, place: int, term: str, label: str) -> LabelledText:
    return LabelledText(f"{mention.id}/{place}", mention.source, mention.text, term, label)
