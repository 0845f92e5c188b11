"""Term normalisation in two steps: a free wording -> candidates of the catalogue -> the standard terms that it means.

Enters: mentions with their standard terms, and the catalogue of all terms (CHIP-CDN's layout). Leaves: one or more
terms a mention. Step 1 recalls the catalogue's nearest terms by character n-grams, and by embeddings where they are
given, without any training; step 2 is a model that reads mention and candidate as a pair and says whether they mean the
same. These are the two steps of CHIP-CDN in the AF Adapter paper's evaluation on CBLUE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from domext_ray.errors import CorpusError
from domext_ray.families.classification import ClassificationTask
from domext_ray.families.comparison import Compared, compare_sets
from domext_ray.families.family import ID, Prediction
from domext_ray.families.metrics.metrics import score_terms
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.cells import shorten, split_cell
from domext_ray.families.readers.examples import LabelledSet, LabelledText, Mention
from domext_ray.families.readers.issues import DataIssues, SetRow
from domext_ray.families.readers.records import list_items, parse_document, read_table, read_text
from domext_ray.families.state import BOOL, COUNT, NOTHING_LEARNED, RANGE, State
from domext_ray.families.task import Embed, Predict, StagedTask, Task
from domext_ray.text.data.files import find_suffix

RANKING = "ranking"
SAME, DIFFERENT = "same", "different"


_MENTIONS_AT_A_TIME = 256  # x 40,000 terms of ICD-10: 80 MB of similarities
_FUSION = 60  # Cormack et al.'s constant
_NEVER = 1.01  # above every probability


@dataclass(frozen=True)
class RecallOptions:
    """How candidates are found."""

    num_candidates: int = 20  # terms that are recalled for a mention
    num_negatives: int = 6  # recalled terms that a training mention is paired with, the nearest wrong ones
    ngrams: tuple[int, int] = (1, 3)  # lengths of the character n-grams, from and to


class TermRecall:
    """Finds the catalogue's terms that look like a mention.

    Terms are ranked by the cosine of TF-IDF weights of character n-grams, lower-cased. With `embed`, a second
    ranking by their cosine is merged with it: a term's score is the sum over both rankings of 1 / (60 + rank), nothing
    from the first where no n-gram is shared (Cormack, Clarke and Büttcher, Reciprocal rank fusion, 2009). Of equal
    terms the catalogue's first goes first; it has no duplicates.
    """

    def __init__(self, catalogue: Sequence[str], options: RecallOptions, embed: Embed | None = None) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer  # loads slowly, and only this task needs it

        self.catalogue, self.options, self._embed = list(catalogue), options, embed
        self._vectorizer = TfidfVectorizer(analyzer="char", ngram_range=options.ngrams, dtype=np.float32)
        self._terms = self._vectorizer.fit_transform(self.catalogue).T.tocsr()
        self._embeddings = _embed_units(embed, self.catalogue) if embed else None

    def find(self, mentions: Sequence[str]) -> list[list[str]]:
        """Return the candidates of each mention, nearest first."""
        found: list[list[str]] = []
        for first in range(0, len(mentions), _MENTIONS_AT_A_TIME):
            batch = list(mentions[first : first + _MENTIONS_AT_A_TIME])
            scores = (self._vectorizer.transform(batch) @ self._terms).toarray()
            if self._embed is not None and self._embeddings is not None:
                similar = _embed_units(self._embed, batch) @ self._embeddings.T
                by_ngrams = np.where(scores > 0, 1 / (_FUSION + _rank(scores)), 0.0)
                scores = by_ngrams + 1 / (_FUSION + _rank(similar))
            order = np.argsort(-scores, axis=1, kind="stable")[:, : self.options.num_candidates]
            found += [[self.catalogue[i] for i in row] for row in order]
        return found


class NormalizationTask(StagedTask):
    """Normalisation by recall and ranking.

    A prediction has "terms", "candidates" with their probabilities that they and the mention mean the same, the highest
    first, and "recalled": the candidates as step 1 found them. The best candidate is always an answer; every other
    candidate is one whose probability reaches a threshold, one half before dev chooses it.
    """

    family = "normalization"
    readers = {"records": ("text", "terms")}
    columns = {**ID, "text": ("text",), "terms": ("terms", "normalized_result")}
    side_file = "catalogue"
    metrics = ("f1.*", "accuracy", "precision.*", "recall.*")
    metric = "f1.micro"
    fields = {
        "terms": pa.list_(pa.string()),
        "candidates": pa.list_(pa.struct({"term": pa.string(), "probability": pa.float64()})),
    }
    found = "terms"
    nothing = {"terms": []}
    step_options = RecallOptions()
    state_rules = {"num_candidates": COUNT, "ngrams": RANGE, "embedding_recall": BOOL}

    def learn(self) -> dict[str, Any]:
        """Return how candidates are found."""
        own, embeds = self.step_options, self.embed is not None
        return {"num_candidates": own.num_candidates, "ngrams": list(own.ngrams), "embedding_recall": embeds}

    def prepare(self) -> None:
        """Make what recalls terms, and the stage that ranks them."""
        data, state = self.data, self.state
        if not data.catalogue:
            raise CorpusError(f"{data.name} has no catalogue of standard terms; normalisation needs one.")
        embeds = self.embed is not None
        if state["embedding_recall"] and not embeds:
            raise ValueError("candidates were recalled by embeddings too, and there is no encoder that makes them")
        if embeds and not state["embedding_recall"]:
            raise ValueError("candidates were recalled without embeddings, and an encoder is given that makes them")
        found = {"num_candidates": state["num_candidates"], "ngrams": tuple(state["ngrams"])}
        self.step_options = replace(self.step_options, **found)
        self.recall = TermRecall(data.catalogue, self.step_options, self.embed)
        self.thresholds = {"threshold": 0.5}
        ranking_data = LabelledSet(
            f"{data.name} pairs",
            train=self._label_pairs(data.train, is_training=True),
            dev=self._label_pairs(data.dev, is_training=False),
            test=self._label_pairs(data.test, is_training=False),
            labels=(DIFFERENT, SAME),
            positive_label=SAME,
        )
        parts = (self.tokenizer, self.options)
        self.ranking_task = ClassificationTask(ranking_data, *parts, metric="f1.positive", state={})

    @property
    def stages(self) -> dict[str, Task]:
        return {RANKING: self.ranking_task}

    def run(self, predictors: Mapping[str, Predict], examples: Sequence[Mention]) -> list[Prediction]:
        """Recall candidates, then rank them; the predictor is that of "ranking"."""
        recalled = self.recall.find([mention.text for mention in examples])
        pairs = [_pair_up(*candidate, DIFFERENT) for candidate in _flatten(examples, recalled)]
        probabilities = iter([prediction["probabilities"][SAME] for prediction in predictors[RANKING](pairs)])
        found = []
        for terms in recalled:
            scored = [{"term": term, "probability": next(probabilities)} for term in terms]
            # Sorting is stable: of equally probable candidates the nearer goes first.
            found.append(
                {"candidates": sorted(scored, key=lambda candidate: -candidate["probability"]), "recalled": terms}
            )
        return self.decide_all(examples, found)

    def decide(self, example: Mention, prediction: Prediction) -> Prediction:
        """Choose the best candidate, and all others that reach the threshold."""
        return {**prediction, "terms": _choose(prediction, self.thresholds["threshold"])}

    def fit_thresholds(self, examples: Sequence[Mention], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Choose the threshold of further terms that is best on dev; of equally good ones the highest."""
        further = [other["probability"] for prediction in predictions for other in prediction["candidates"][1:]]
        tried = sorted({_NEVER, *np.quantile(further, np.linspace(0.5, 1, 101)).tolist()} if further else {_NEVER})
        figures = []
        for threshold in tried:
            chosen = [{"terms": _choose(prediction, threshold)} for prediction in predictions]
            figures.append((self.score(examples, chosen).get(self.metric), threshold))
        self.thresholds = {"threshold": max(figures)[1]}
        return self.thresholds

    def score(self, examples: Sequence[Mention], predictions: Sequence[Prediction]) -> Score:
        """Score chosen terms; see `score_terms`."""
        return score_terms([mention.terms for mention in examples], [prediction["terms"] for prediction in predictions])

    def score_steps(self, examples: Sequence[Mention], predictions: Sequence[Prediction]) -> dict[str, Score]:
        """Score the candidates of each step: "recall.at_1" and so on, "recall.micro" of all candidates."""
        gold = [mention.terms for mention in examples]
        recalled = [prediction["recalled"] for prediction in predictions]
        ranked = [[other["term"] for other in prediction["candidates"]] for prediction in predictions]
        return {
            "recall": score_terms(gold, recalled, ranked=recalled),
            RANKING: score_terms(gold, ranked, ranked=ranked),
        }

    @classmethod
    def read(cls, row: SetRow) -> Mention:
        """Make a wording with its terms: in one cell with the set's separator (CHIP-CDN: "##"), or as a list."""
        text, value = row.read_text("text"), row.get("terms") if row.is_labelled else []
        parts = split_cell(value, row.description.separator) if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or any(not isinstance(part, str) for part in parts):
            parts = []
        terms = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
        if not terms and row.is_labelled:
            row.leave_out("has no term", value if value not in (None, "") else "")
        return Mention("", row.source, text, terms)

    @classmethod
    def read_side(cls, path: Path) -> tuple[str, ...]:
        """Read the catalogue without duplicates: a .json list, the last column of .csv or .tsv, or a term per line."""
        if find_suffix(str(path)) == ".json":
            terms = list_items(path, parse_document(path, read_text(path)), "")
            for i, term in enumerate(terms):
                if not isinstance(term, str):
                    raise CorpusError(f"{path}:[{i}] must be a text, a standard term; found {shorten(term, 40)}.")
        else:
            terms = [cells[-1] for _, cells in read_table(path)]
        catalogue = tuple(dict.fromkeys(term.strip() for term in terms if term.strip()))
        if not catalogue:
            raise CorpusError(f"{path} has no term; give one standard term a line.")
        return catalogue

    @classmethod
    def check_set(cls, splits: Mapping[str, Sequence[Mention]], side: Any, issues: DataIssues) -> None:
        """Count the examples with a term that is not in the catalogue; refuse a train of nothing else."""
        known, train = set(side), splits["train"]
        if train and known.isdisjoint(term for example in train for term in example.terms):
            raise CorpusError(
                f"{train[0].source} has the term {train[0].terms[0]!r}, and no term of train is in the catalogue, "
                f"which begins with {side[0]!r}; give the terms as they stand there (a table's last column)."
            )
        for example in (example for split in splits.values() for example in split):
            if strange := [term for term in example.terms if term not in known]:
                issues.add(example.source, "term", "is not in the catalogue", strange, outcome="kept")

    @classmethod
    def compare(cls, example: Mention, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        return compare_sets(
            example, example.text, *({(t, "") for t in own} for own in (example.terms, prediction["terms"]))
        )

    def predict_baseline(self, examples: Sequence[Mention]) -> list[Prediction]:
        """Predict training's most frequent term."""
        counts = Counter(term for mention in self.data.train for term in mention.terms)
        return [{"terms": [min(counts, key=lambda term: (-counts[term], term))]}] * len(examples)

    def predict_baselines(self, examples: Sequence[Mention]) -> dict[str, list[Prediction]]:
        """Predict, as "recall", the nearest term, too."""
        nearest = self.recall.find([mention.text for mention in examples])
        return {**super().predict_baselines(examples), "recall": [{"terms": terms[:1]} for terms in nearest]}

    def _label_pairs(self, mentions: Sequence[Mention], *, is_training: bool) -> tuple[LabelledText, ...]:
        """Mentions with their terms and near wrong ones for training; with all candidates to choose and score by."""
        candidates = self.recall.find([example.text for example in mentions])
        if is_training:
            limit = self.step_options.num_negatives
            for i, mention in enumerate(mentions):
                wrong = [term for term in candidates[i] if term not in mention.terms]
                candidates[i] = [*mention.terms, *wrong[:limit]]
        pairs = _flatten(mentions, candidates)
        return tuple(
            _pair_up(example, i, term, SAME if term in example.terms else DIFFERENT) for example, i, term in pairs
        )


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


def _choose(prediction: Prediction, threshold: float) -> list[str]:
    candidates = prediction["candidates"]
    return [
        candidate["term"] for i, candidate in enumerate(candidates) if i == 0 or candidate["probability"] >= threshold
    ]


def _flatten(mentions: Sequence[Mention], terms: Sequence[Sequence[str]]) -> list[tuple[Mention, int, str]]:
    """Each mention with each of its terms and the term's place."""
    return [(mention, i, term) for mention, own in zip(mentions, terms, strict=True) for i, term in enumerate(own)]


def _pair_up(mention: Mention, place: int, term: str, label: str) -> LabelledText:
    return LabelledText(f"{mention.id}/{place}", mention.source, mention.text, term, label)
