"""What was read as a label, by split: told before anything trains, so that a wrong column or mark is seen.

Enters: the splits of a labelled set. Leaves: counts by label, sentences on what is odd about them, examples that two
splits share, and a refusal of training examples from which nothing can be learned.
"""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.examples import SPLITS, Example, LabelledSet, Splits, add_article
from domext_ray.families.readers.issues import list_places
from domext_ray.report.tables import NONE, format_text

MAX_SHOWN = 20
"""Labels that a table has rows for; of more, the last row sums up the seldom ones."""
_FEWEST = 20
"""Labels of one example each that are too many, if half of what is labelled has such a one."""
_FEWEST_SHARED = 5
"""Examples that two splits have are told as a warning if they are so many at least, and half of one."""
_TWINS = str.maketrans(
    "АВЕКМНОРСТУХІЅЈаеорсухіѕјΑΒΕΖΗΙΚΜΝΟΡΤΥΧο",
    "ABEKMHOPCTYXISJaeopcyxisjABEZHIKMNOPTYXo",
)
"""Letters of Cyrillic and Greek -> those of Latin that look the same."""
_TRUTH = {"true": "1", "false": "0"}
"""What a truth value is where other rows have numbers."""
Counts = dict[str, dict[str, float]]
"""Of each label, or of what stands in its place, the number in each split that has examples."""


def count_labels(splits: Splits, labels: Sequence[str] = ()) -> Counts:
    """Return how often each label stands in each split; of numbers, the least, the mean and the highest.

    The set's `labels` come first; others follow, sorted. One split at least has an example.
    """
    splits = {split: found for split, found in splits.items() if found}
    first = next(iter(splits.values()))[0]
    if first.number is not None:
        values = {split: [example.number or 0.0 for example in found] for split, found in splits.items()}
        return {
            "least": {split: min(numbers) for split, numbers in values.items()},
            "mean": {split: sum(numbers) / len(numbers) for split, numbers in values.items()},
            "highest": {split: max(numbers) for split, numbers in values.items()},
        }
    counted = {split: Counter(label for e in found for label in e.counted) for split, found in splits.items()}
    seen = sorted({label for found in counted.values() for label in found} - set(labels))
    return {label: {split: counts[label] for split, counts in counted.items()} for label in (*labels, *seen)}


def list_label_rows(counts: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Return the rows of a table of what `count_labels` returned, under a header; of many labels the frequent ones."""
    rows: list[tuple[str, ...]] = [("label", *SPLITS)]
    shown = sorted(counts, key=lambda label: -sum(counts[label].values()))[:MAX_SHOWN]
    shown = list(counts) if len(counts) <= MAX_SHOWN + 1 else [label for label in counts if label in shown]
    for label in shown:
        rows.append((" ".join(label.split()), *(_show(counts[label].get(split)) for split in SPLITS)))
    if others := [counts[label] for label in counts if label not in shown]:
        sums = (sum(numbers[split] for numbers in others) if split in others[0] else None for split in SPLITS)
        rows.append((f"({len(others):,} more labels)", *map(_show, sums)))
    return rows


def describe_labels(split: str, examples: tuple[Example, ...]) -> str:
    """Say in a sentence what `count_labels` finds in one split."""
    _, *rows = list_label_rows(count_labels({split: examples}))
    column = 1 + SPLITS.index(split)
    return f"Labels of {split}: {', '.join(f'{row[0]} {row[column]}' for row in rows)}."


def describe_set(data: LabelledSet) -> str:
    """Return what a plan says of a set: examples and labels of each split, and its notes."""
    sizes = " / ".join(f"{len(examples):,}" for examples in data.splits.values())
    labels = format_text(list_label_rows(count_labels(data.splits, data.labels)))
    notes = (f"note: {note}" for note in data.notes if note not in data.warnings)
    return "\n".join([f"set: {data.name}, {sizes} examples (train / dev / test)", labels, *notes])


def _show(value: float | None) -> str:
    return NONE if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def count_shared(data: LabelledSet) -> dict[str, int]:
    """Return how many examples of dev and of test are in train, too."""
    return {split: len(_list_shared(data.splits, split, "train")) for split in ("dev", "test")}


def _list_shared(splits: Splits, held_out: str, seen: str) -> list[str]:
    """Return where the examples of one split stand that another one has, too."""
    known = {example.seen for example in splits.get(seen, ())}
    return [example.source for example in splits.get(held_out, ()) if example.seen in known]


def find_oddities(splits: Splits, labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return notes on a set's splits and their labels, and warnings, which must be heard before training."""
    notes, warnings = list[str](), list[str]()
    for held_out, seen in (("dev", "train"), ("test", "train"), ("test", "dev")):
        if shared := _list_shared(splits, held_out, seen):  # their scores are too good
            is_copy = splits[held_out][0].path != splits[seen][0].path  # of a file, not of a part of one
            is_most = len(shared) >= max(_FEWEST_SHARED, len(splits[held_out]) / 2)
            is_told = is_copy and is_most
            (warnings if is_told else notes).append(
                f"{len(shared)} {held_out} example{'s are' if len(shared) > 1 else ' is'} in {seen} too, which "
                f"{'makes' if is_told else 'may make'} the score on {held_out} too high: {list_places(shared)}."
            )
    folded = defaultdict[str, list[str]](list)
    for label in labels:
        folded[_fold(label)].append(label)
    for same in folded.values():
        if len(same) > 1:
            how = "differ in case alone" if len({*map(str.casefold, same)}) == 1 else "look alike"
            how = "may mean the same" if _TRUTH.keys() & {*map(str.casefold, same)} else how
            is_alike = how == "look alike"
            *others, last = (ascii(e) if is_alike and e.translate(_TWINS) != e else _show_label(e) for e in same)
            warnings.append(f"The labels {', '.join(others)} and {last} {how}; they are {len(same)} labels here.")
    known = Counter(label for example in splits.get("train", ()) for label in example.list_labels())
    num_single = sum(number == 1 for number in known.values())
    if num_single >= max(_FEWEST, known.total() / 2):
        warnings.append(
            f"{num_single:,} of {len(known):,} labels of train have one example each; is it the right column? "
            "(Numbers are for --task regression.)"
        )
    for split, examples in splits.items():
        if not examples:
            continue
        if split != "train":
            warnings += _find_absent(split, examples)
            held = {label for example in examples for label in example.list_labels()}
            if held and known and held.isdisjoint(known):
                own, theirs = (", ".join(map(_show_label, sorted(each)[:3])) for each in (held, known))
                warnings.append(f"No label of {split} ({own}) is one of train ({theirs}), so its figures say nothing.")
            missing = [label for label in labels if label not in held]
            if held and missing:
                shown = ", ".join(map(repr, missing[:3])) + (" …" if len(missing) > 3 else "")
                notes.append(f"The {split} has no example of {len(missing)} of {len(labels)} labels ({shown}).")
        notes += _find_contradictions(split, examples)
    return notes, warnings


def _fold(label: str) -> str:
    """What two labels that look alike have in common."""
    shown = "".join(char for char in unicodedata.normalize("NFKC", label) if unicodedata.category(char) != "Cf")
    folded = " ".join(shown.translate(_TWINS).casefold().split())
    return _TRUTH.get(folded, folded)


def _show_label(label: str) -> str:
    return repr(label) if unicodedata.is_normalized("NFC", label) else ascii(label)


def _find_absent(split: str, examples: Sequence[Example]) -> list[str]:
    """Say that a split to be scored has no gold at all, or that all of it has the same."""
    first, says_nothing = examples[0], "so its figures say nothing"
    if first.gold_names is not None and not any(example.has_gold for example in examples):
        noun, plural = first.gold_names
        return [f"None of the {len(examples):,} {plural} of {split} has {add_article(noun)}, {says_nothing}."]
    is_same = bool(first.verdict) and len(examples) > 1 and len({example.verdict for example in examples}) == 1
    return [f"All {len(examples):,} examples of {split} have the {first.verdict}, {says_nothing}."] if is_same else []


def _find_contradictions(split: str, examples: Sequence[Example]) -> list[str]:
    """Say how many examples have the text of an earlier one and other labels, as two annotators' rows have."""
    known: dict[Any, Any] = {}
    golds = ((example, _take_gold(example)) for example in examples)
    places = [example.source for example, gold in golds if known.setdefault(example.seen, gold) != gold]
    if not places:
        return []
    return [f"{len(places)} x {split} example that contradicts an earlier one of the same text: {list_places(places)}."]


def _take_gold(example: Example) -> Any:
    """All that is neither seen by a model nor the name or the place of an example."""
    left_out = {*example.inputs, "id", "source", "path", "group", "document", "text", "offsets"}
    return {name: value for name, value in vars(example).items() if name not in left_out}


def require_learnable(data: LabelledSet, place: str, advice: str = "") -> None:
    """Refuse training examples that have no label, or all the same one."""
    train, first = data.train, data.train[0]
    shown = f"({first.source} is the first)"
    if first.gold_names is not None and not any(example.teaches for example in train):
        noun, plural = first.gold_names
        cure = advice or next(_find_left_out(data, noun.partition(" ")[0]), f"label some {plural}.")
        raise CorpusError(f"no training example of {place} has {add_article(noun)} {shown}; {cure}")
    alike = {example.verdict for example in train} - {""}
    if len(alike) == 1:
        lost = "" if advice else next((f" {note}" for note in _find_left_out(data, "row")), "")
        raise CorpusError(
            f"all {len(train):,} training examples of {place} have the {alike.pop()} {shown}: nothing can be learned "
            f"from them; {advice or 'is it the right column?'}{lost}"
        )


def _find_left_out(data: LabelledSet, what: str) -> Iterator[str]:
    return (note for note in data.notes if f" x {what} left out: " in note)
