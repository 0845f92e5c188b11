"""What every task family is made of: examples -> rows of tokens -> logits -> predictions -> scores.

A task turns a set's examples into rows that fit the encoder, says which head reads them, computes the loss from the
head's logits, and turns logits back into predictions in the examples' own terms. Fine-tuning and ablations know tasks
through this interface only. A row has one or more segments of tokens (a choice has one segment per option); a long
example may make several rows (windows), none of its labelled parts is ever lost.

Some tasks take several models, or a model and a search: their stages are tasks with labelled sets of their own, trained
one by one on labels, never on each other's predictions. Any other task is its own only stage.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from domext_ray.config.shared import LongTexts
from domext_ray.errors import ConfigError
from domext_ray.families.family import Family, Prediction
from domext_ray.families.metrics.scores import Score, flatten, over_clusters
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.rows import Row, pad_rows
from domext_ray.families.state import Rule, State, check_state
from domext_ray.text.vocabulary.tokenizer import make_backend

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ONLY_STAGE = "model"
"""Name of the stage of a task that has one model."""
Predict: TypeAlias = Callable[[Sequence[Any]], list[Prediction]]
"""Examples of a stage -> a prediction each."""
Embed: TypeAlias = Callable[[list[str]], np.ndarray]
"""Texts -> float [texts, d], such as the means of an encoder's last states."""
Outputs: TypeAlias = Sequence[tuple[np.ndarray, ...]]
"""For each row what `Task.read_outputs` gave, without the batch dimension, of token outputs without padding."""

_DIGITS = 6


@dataclass(frozen=True)
class TaskOptions:
    """How examples become rows."""

    max_length: int = 128  # tokens of a row at most, special tokens included
    stride: int = 32  # tokens that neighbouring windows of a long example share
    context: bool = False  # surrounding sentences of the document fill a row (token classification only)
    long_texts: LongTexts = "cut"  # of families that cut texts otherwise (`Family.cuts_texts`)


@dataclass(frozen=True)
class TaskBatch:
    """Rows side by side, ready for the model."""

    inputs: dict[str, Any]
    """Arguments of the model's forward: those of `pad_rows`, and what `Row.targets` names input_*."""
    targets: dict[str, Tensor]  # the other targets, stacked and padded
    num_targets: int  # what the mean loss divides by (labelled tokens, rows, ...), 0 or more


@dataclass(frozen=True)
class ScoredSplit:
    """What trained stages reached on a split."""

    score: Score  # of the whole chain
    predictions: list[Prediction]
    steps: dict[str, Score]  # of single steps, by name


class StagedTask(Family):
    """A family over one labelled set and one tokenizer (a fast one); an empty `metric` is the family's.

    With `state`, the `state_dict` of a task of the same set, `data` needs no examples. Any other state raises a
    ValueError. `embed` makes embeddings of texts, for a family that searches by them. `base_words` are the entries of
    the vocabulary that a base was trained with, the first ones; 0: all.
    """

    limits: list[str]
    """Sentences of a model's card on what its figures do not hold for; they name no file."""
    nothing: Prediction
    """A prediction, if a poor one."""
    state_rules: ClassVar[Mapping[str, Rule]] = {}
    """What the family finds out from its set beside labels, by name."""

    def __init__(
        self,
        data: LabelledSet,
        tokenizer: PreTrainedTokenizerBase,
        options: TaskOptions,
        *,
        metric: str = "",
        embed: Embed | None = None,
        state: State | None = None,
        base_words: int = 0,
    ) -> None:
        self.data, self.tokenizer, self.options, self.embed = data, tokenizer, options, embed
        self.base_words = base_words
        self.metric = metric or self.metric
        self.notes: list[str] = []
        self.limits: list[str] = []
        self.cases: Counter[str] = Counter()
        self.thresholds: dict[str, float] = {}
        self.load_state_dict(self.learn() if state is None else state)
        self.prepare()
        if state is None:
            self._check_metric()

    def _check_metric(self) -> None:
        examples = self.data.dev or self.data.train
        figures = flatten(self.score(examples, [self.nothing] * len(examples)).values)
        if self.metric not in figures:
            raise ConfigError(
                f"the metric of {self.data.name} is {self.metric!r}; its figures are {', '.join(sorted(figures))}."
            )

    def learn(self) -> dict[str, Any]:
        """Find out from `data` what predictions depend on beside labels and options. Default: nothing."""
        return {}

    def prepare(self) -> None:  # noqa: B027
        """Make what the family needs beside the constructor's arguments. Default: nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `learn` found out, as JSON has it."""
        return dict(self.state)

    @property
    def identity(self) -> dict[str, Any]:
        """What trainings depend on beside options, set and model, where 0.1.0 would have chosen otherwise."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Take over what another task's `state_dict` gave."""
        check_state(state, self.state_rules)
        self.state = dict(state)

    @property
    @abstractmethod
    def stages(self) -> dict[str, Task]:
        """What has to be trained, by name."""

    @property
    def is_chain(self) -> bool:
        """Whether its stages are other tasks than itself."""
        return self.stages.get(ONLY_STAGE) is not self

    @abstractmethod
    def run(self, predictors: Mapping[str, Predict], examples: Sequence[Any]) -> list[Prediction]:
        """Return a prediction an example, with a predictor for each of `stages` and the thresholds as they are."""

    def show(self, prediction: Prediction) -> Prediction:
        """Return a prediction as a user reads it, numbers rounded to six digits."""
        return {name: _round(prediction[name]) for name in self.list_shown()}

    @abstractmethod
    def score(self, examples: Sequence[Any], predictions: Sequence[Prediction]) -> Score:
        """Score predictions against the examples' labels."""

    def score_steps(self, examples: Sequence[Any], predictions: Sequence[Prediction]) -> dict[str, Score]:
        """Score what single steps found: where a chain loses. Default: there is one step, which is the whole."""
        return {}

    def fit_thresholds(self, examples: Sequence[Any], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Choose `thresholds` on dev (SQuAD v2.0's tau, say), and return them. Default: none."""
        return self.thresholds

    def set_thresholds(self, thresholds: Mapping[str, float]) -> None:
        """Take over what `fit_thresholds` returned earlier."""
        assert thresholds.keys() == self.thresholds.keys(), thresholds
        self.thresholds = dict(thresholds)

    def decide(self, example: Any, prediction: Prediction) -> Prediction:
        """Return a prediction as the thresholds have it now. Default: as it is."""
        return prediction

    def decide_all(self, examples: Sequence[Any], predictions: Sequence[Prediction]) -> list[Prediction]:
        """Return all predictions as the thresholds have them now."""
        return [self.decide(*pair) for pair in zip(examples, predictions, strict=True)]

    def evaluate(
        self, predictors: Mapping[str, Predict], splits: Sequence[str] = ("dev", "test")
    ) -> dict[str, ScoredSplit]:
        """Score trained stages, split by split; an empty one is left out.

        On dev, which comes first, the thresholds are tuned; without it they are as they were.
        """
        scored = dict[str, ScoredSplit]()
        for split in splits:
            if not (examples := getattr(self.data, split)):
                continue
            predictions = self.run(predictors, examples)
            if split == "dev":
                self.fit_thresholds(examples, predictions)
                predictions = self.decide_all(examples, predictions)
            score = over_clusters(self.score(examples, predictions), examples)
            scored[split] = ScoredSplit(score, predictions, self.score_steps(examples, predictions))
        return scored

    @abstractmethod
    def predict_baseline(self, examples: Sequence[Any]) -> list[Prediction]:
        """Return the predictions of the trivial baseline (most frequent label of `data.train`, best constant, ...)."""

    def predict_baselines(self, examples: Sequence[Any]) -> dict[str, list[Prediction]]:
        """Return the predictions of all trivial baselines, by name."""
        return {"majority": self.predict_baseline(examples)}

    def score_baselines(self, split: str) -> dict[str, Score]:
        """Return what trivial baselines score on a split, by their names."""
        examples = getattr(self.data, split)
        return {name: self.score(examples, made) for name, made in self.predict_baselines(examples).items()}

    def list_notes(self) -> list[str]:
        """Return what it, and each of its stages, has counted so far."""
        stages = self.stages if self.is_chain else {}
        own = [f"{name}: {note}" for name, stage in stages.items() for note in stage.notes]
        return list(dict.fromkeys([*self.notes, *own]))

    def keep_note(self, note: str) -> None:
        """Add a sentence to `notes` unless it is there: a split may be encoded more than once."""
        if note not in self.notes:
            self.notes.append(note)

    def note_cases(self, sources: Sequence[str], total: int, what: str) -> None:
        """Keep in `notes` how many of all cases are odd, and the first; add their number to `cases`.

        `sources` are FILE:PLACE of the odd ones; `what` follows the numbers in a sentence, such as "texts have ...".
        """
        if sources:
            self.cases[what] += len(sources)
            self.keep_note(f"{len(sources):,} of {total:,} {what}; the first is at {sources[0]}.")


class Task(StagedTask):
    """A task of one model."""

    head_config: ClassVar[Mapping[str, Any]] = {}
    """Further values of the model's configuration that the head needs, such as problem_type."""
    has_token_outputs: ClassVar[bool] = False
    """Whether the first dimension of what `read_outputs` gives, B apart, is the row's tokens."""
    target_pads: ClassVar[dict[str, float]] = {}
    """Filler of each target whose first dimension differs between rows; other targets are stacked as they are."""

    @property
    def stages(self) -> dict[str, Task]:
        """The task itself."""
        return {ONLY_STAGE: self}

    def run(self, predictors: Mapping[str, Predict], examples: Sequence[Any]) -> list[Prediction]:
        return predictors[ONLY_STAGE](examples)

    @cached_property
    def backend(self) -> Tokenizer:
        """See `make_backend`; made once, as that takes longer than to tokenise a text."""
        return make_backend(self.tokenizer)

    def read_by(self, backend: Tokenizer) -> Self:
        """Return this task with another engine that cuts texts into pieces; its notes and cases are its own."""
        other = copy.copy(self)
        other.__dict__["backend"] = backend
        other.notes, other.cases = [], Counter()
        return other

    @property
    def head_labels(self) -> tuple[str, ...]:
        """Labels of the head's outputs in order (config.id2label)."""
        return self.list_outputs(self.data.labels)

    def make_card_values(self, thresholds: Mapping[str, float]) -> dict[str, Any]:
        """Return what the template of a model card says of this family alone; `thresholds` are the model's."""
        return {}

    @abstractmethod
    def encode(self, examples: Sequence[Any], *, is_training: bool) -> list[Row]:
        """Make the rows of examples, in their order; those for training may differ (windows around labels, say)."""

    @abstractmethod
    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the summed loss (fp32 scalar, nats) of a batch; the caller divides by the sum of `num_targets`."""

    def read_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the tensors of the head's outputs that `decode` needs, first dimension B (fp32). Default: logits."""
        return (outputs.logits.float(),)

    def decode(self, examples: Sequence[Any], rows: Sequence[Row], outputs: Outputs) -> list[Prediction]:
        """Return one prediction an example, from the outputs of the rows that `encode` made of them."""
        return [self.decode_row(example, *output) for example, output in zip(examples, outputs, strict=True)]

    def decode_row(self, example: Any, output: np.ndarray) -> Prediction:
        """Return the prediction of an example that has one row, in a family whose examples have one each."""
        raise NotImplementedError

    def count_targets(self, targets: dict[str, Tensor], num_rows: int) -> int:
        """Return what the mean loss of a batch divides by; default: its rows."""
        return num_rows

    def collate(self, rows: Sequence[Row]) -> TaskBatch:
        """Put rows side by side, padded to the longest."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        inputs = pad_rows(rows, self.tokenizer.pad_token_id or 0)
        targets: dict[str, Tensor] = {}
        for name in rows[0].targets:
            values = [torch.from_numpy(row.targets[name]) for row in rows]
            pad = self.target_pads.get(name)
            stacked = torch.stack(values) if pad is None else pad_sequence(values, True, pad)
            if name.startswith("input_"):
                inputs[name.removeprefix("input_")] = stacked
            else:
                targets[name] = stacked
        return TaskBatch(inputs, targets, self.count_targets(targets, len(rows)))


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_round(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value
