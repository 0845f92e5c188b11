"""Texts and pairs of texts -> one class or one number each.

The classifier reads BERT's pooled first token (Devlin et al., 2019, section 4.1). A pair is one row, as the tokenizer
writes it: `[CLS] a [SEP] b [SEP]` with segment types for BERT, `<s> a </s></s> b </s>` for RoBERTa. A pair that is too
long is cut at its end, the longer text first. A single text is cut, too, or read in windows: each is an example of its
label in training, and what a text is follows from the mean of their outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from scipy.special import softmax
from tokenizers import Encoding, Tokenizer

from domext_ray.errors import CorpusError
from domext_ray.families.family import Prediction, SplitRows
from domext_ray.families.losses import NO_TARGET, ClassTask, balance
from domext_ray.families.metrics.metrics import score_classes
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.cells import as_whole
from domext_ray.families.readers.examples import LabelledText, MarkedText
from domext_ray.families.readers.issues import DataIssues, SetRow, list_places
from domext_ray.families.rows import Row
from domext_ray.families.state import BOOL, State
from domext_ray.families.task import Outputs, Task
from domext_ray.families.windows import RowTemplate, make_cutting_backend, plan_windows, read_template

if TYPE_CHECKING:
    from torch import Tensor

HAS_PAIRS = "has_pairs"
"""What the state of a task calls it that all of its training were pairs."""
_UNLABELLED = ("-1", "-")
MOST_UNLABELLED, MOST_UNLABELLED_PAIRS = 0.05, 0.5
"""Share of texts, and of pairs, with a label that may say "none" above which it may be a class as well: opinions about
a text are often -1, 0 and 1, those about a pair hardly ever."""


class SingleLabelTask(ClassTask):
    """What tasks with one class an example have in common. A prediction has "label", and "probabilities" by label.

    The set's negative label, where it has one, is no part of micro and macro averages; "f1.positive" is the F1 of its
    positive label, or of the second of two. A label of dev or test that is none of the set's has no part in the loss,
    and no prediction of it is right.
    """

    fields = {"label": pa.string()}
    weighs_labels = True
    found = "label"
    hub_task = "text-classification"

    def prepare(self) -> None:
        """Number the classes, and choose the positive one."""
        labels, positive = self.data.labels, self.data.positive_label
        self.positive = labels[1] if positive is None and len(labels) == 2 else positive
        self._label_ids = {label: i for i, label in enumerate(labels)}
        self.nothing = {"label": next(iter(labels), "")}

    @classmethod
    def read_together(cls, splits: SplitRows, issues: DataIssues) -> SplitRows:
        """Leave out the rows whose label says that they have none: -1 beside whole numbers from 0, - beside words.

        SNLI and MNLI have "-" where annotators did not agree (Bowman et al., 2015, section 2.2), and such texts are
        part of no score; `datasets` writes -1 for it, and for all labels of a test that is kept secret. Labels that are
        named in the description are labels.
        """
        every = [row for split in splits.values() for row in split]
        counts = {split: Counter(filter(None, map(_find_class, own))) for split, own in splits.items()}
        labels = {label for counter in counts.values() for label in counter}
        mark = next(
            (label for label in _UNLABELLED if label in labels and label not in every[0].description.labels), None
        )
        others = labels - {*_UNLABELLED}
        if mark is None or not (all(map(str.isdecimal, others)) if mark == "-1" else "+" not in others):
            return splits
        # a split with no other label is a test that is kept secret
        shown = [counter for counter in counts.values() if counter.keys() != {mark}]
        share = sum(counter[mark] for counter in shown) / max(1, sum(counter.total() for counter in shown))
        has_pairs = any(row.get("pair") is not None for row in every)
        description = every[0].description
        if share > (MOST_UNLABELLED_PAIRS if has_pairs else MOST_UNLABELLED) and not description.labels:
            names = ", ".join(sorted(others))
            raise CorpusError(
                f"{share:.0%} of the examples of {description.name} have the label {mark!r}, which often says that "
                f"there is none; name the classes as labels in {description.yaml}: [{names}], or with {mark!r} where "
                "it is one."
            )
        for row in every:
            if _find_class(row) == mark:
                issues.add(row.source, "row", f"has the label {mark!r}, which says that it has none")
        return {split: [row for row in own if _find_class(row) != mark] for split, own in splits.items()}

    def make_targets(self, example: LabelledText | MarkedText) -> dict[str, np.ndarray]:
        """Return the target "labels", int64 [], of an example."""
        return {"labels": np.array(self._label_ids.get(example.label, NO_TARGET), dtype=np.int64)}

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        return self.sum_cross_entropy(outputs.logits.float(), targets["labels"])

    def balance_classes(self) -> np.ndarray:
        """Return the weights of the classes; see `losses.balance`."""
        return balance((example.label for example in self.data.train), self.data.labels)

    def decode_row(self, example: Any, output: np.ndarray) -> Prediction:
        """Return the class with the highest logit, and the probabilities of all, the highest first."""
        labels = self.data.labels
        assert len(output) == len(labels), "classes are no tokens that padding could be cut from"
        probabilities = softmax(output.astype(np.float64))
        ranked = {labels[i]: float(probabilities[i]) for i in np.argsort(-probabilities, kind="stable")}
        return {"label": labels[int(output.argmax())], "probabilities": ranked}

    def score(self, examples: Sequence[Any], predictions: Sequence[Prediction]) -> Score:
        """Score classes; see `metrics.score_classes`."""
        return score_classes(
            [example.label for example in examples],
            [prediction["label"] for prediction in predictions],
            self.data.labels,
            negative=self.data.negative_label,
            positive=self.positive,
        )

    def predict_baseline(self, examples: Sequence[Any]) -> list[Prediction]:
        """Return the most frequent class of training for every example."""
        counts = Counter(example.label for example in self.data.train)
        return [{"label": max(self.data.labels, key=counts.__getitem__)}] * len(examples)


class TextRows(Task):
    """Rows of `LabelledText` and `MultiLabelText`: a single text or a pair, cut to a row, or a text's windows.

    Its state says whether all of training are pairs, so that a text alone is none for such a model. It is left out of
    files where they are not, and was unknown to 0.1.0.
    """

    cuts_texts = True
    state_rules = {HAS_PAIRS: BOOL}

    def learn(self) -> dict[str, Any]:
        """Find out whether the examples are pairs."""
        train = self.data.train
        return {**super().learn(), HAS_PAIRS: bool(train) and all(example.pair is not None for example in train)}

    def state_dict(self) -> dict[str, Any]:
        """See `StagedTask.state_dict`."""
        return {name: value for name, value in super().state_dict().items() if name != HAS_PAIRS or value}

    def load_state_dict(self, state: State) -> None:
        """See `StagedTask.load_state_dict`."""
        super().load_state_dict({HAS_PAIRS: False, **state})

    @classmethod
    def check_set(cls, splits: Mapping[str, Sequence[Any]], side: Any, issues: DataIssues) -> None:
        """Refuse a split of single texts beside one of pairs, and count the single texts among pairs."""
        singles = {split: [own.source for own in found if own.pair is None] for split, found in splits.items() if found}
        paired = next((split for split, sources in singles.items() if not sources), "")
        for split, sources in singles.items():
            if paired and len(sources) == len(splits[split]):
                raise CorpusError(
                    f"{sources[0]} has no second text, as all of {split}, and all of {paired} have one; set "
                    "columns.pair to all names that the column has."
                )
            if sources and len(sources) < len(splits[split]):
                issues.say(f"{len(sources):,} x {split} example without a second text ({list_places(sources)}).")

    @cached_property
    def backend(self) -> Tokenizer:
        """One that cuts."""
        return make_cutting_backend(self.tokenizer, self.options.max_length)

    @cached_property
    def _template(self) -> RowTemplate:
        return read_template(self.tokenizer, pair=False)

    def encode(self, examples: Sequence[Any], *, is_training: bool) -> list[Row]:
        pairs = [text.text if text.pair is None else (text.text, text.pair) for text in examples]
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        rows, overlong = list[Row](), list[str]()
        for i, (example, encoding) in enumerate(zip(examples, self.backend.encode_batch(pairs), strict=True)):
            targets = self.make_targets(example)
            if encoding.overflowing and example.pair is None and self.options.long_texts == "windows":
                rows += [Row(i, ids, None, targets) for ids in self._list_windows(encoding)]
                continue
            types = np.array(encoding.type_ids, dtype=np.int64) if has_types and example.pair is not None else None
            rows.append(Row(i, np.array(encoding.ids, dtype=np.int64), types, targets))
            if encoding.overflowing:
                overlong.append(example.source)
        what = f"texts have more than {self.options.max_length} tokens and are cut, of a pair the longer one first"
        self.note_cases(overlong, len(examples), what)
        return rows

    def _list_windows(self, encoding: Encoding) -> list[np.ndarray]:
        """Return the rows of a text, all of one length, from the parts that the engine has cut it into."""
        before, after = self._template.specials
        parts = [part.ids[len(before) : len(part.ids) - len(after)] for part in (encoding, *encoding.overflowing)]
        ids = np.concatenate(parts).astype(np.int64)
        windows = plan_windows(len(ids), len(parts[0]), self.options.stride)
        return [self._template.join(ids[first:end])[0] for first, end in windows]

    def decode(self, examples: Sequence[Any], rows: Sequence[Row], outputs: Outputs) -> list[Prediction]:
        """Decode the mean of the outputs of each text's windows."""
        windows: list[list[np.ndarray]] = [[] for _ in examples]
        for row, (output,) in zip(rows, outputs, strict=True):
            windows[row.example].append(output)
        # In float32 the mean of one is itself.
        return [self.decode_row(example, np.mean(own, axis=0)) for example, own in zip(examples, windows, strict=True)]

    @abstractmethod
    def make_targets(self, example: Any) -> dict[str, np.ndarray]:
        """Return an example's targets."""


def read_texts(row: SetRow) -> tuple[str, str | None]:
    """Return a text and its pair, which is optional unless the description names its column, or a model reads pairs."""
    text, has_pair = row.read_text("text"), row.get("pair") is not None
    if not has_pair and row.state.get(HAS_PAIRS):
        named = " or ".join(map(repr, row.fields["pair"]))
        row.leave_out(f"has no field {named}; the model has learned from pairs of texts")
    return text, row.read_text("pair") if has_pair or "pair" in row.description.required else None


def _find_class(row: SetRow) -> str:
    """Return a row's label, as `SetRow.read_label` reads it; empty: it has none."""
    value = row.get("label")
    return "" if value is None else str(as_whole(value)).strip()
