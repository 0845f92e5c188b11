"""A labelled set that every machine has: which words of documentation name functions, classes, modules, parameters.

Enters: the source of the installed Python packages. Leaves: a folder with train.tsv, devel.tsv and test.tsv (CoNLL,
IOB2) and set.json with what they are made of and how far trivial rules get. No package is in two splits, no sentence
occurs twice (names and numbers aside), and the same packages give the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from domext_ray.corpus.texts import package_docs
from domext_ray.errors import CorpusError
from domext_ray.labelled.code_entities.mentions import CodeSentence, MentionFinder
from domext_ray.labelled.code_entities.names import (
    Definitions,
    SourcePackage,
    find_packages,
    is_camel_case,
    read_docstrings,
)
from domext_ray.labelled.examples import SPLITS, LabelledSet
from domext_ray.labelled.metrics.metrics import score_tags
from domext_ray.labelled.readers.sets import load_set
from domext_ray.labelled.set_description import find_description

EXTRACTOR_VERSION = 1
TYPES = ("class", "function", "module", "parameter")
MIN_TRAIN = 200
MAX_PACKAGE_BYTES = 4 * 2**20
"""Source of a package whose docstrings are read at most; the names that it defines are all read."""
MIN_NOUN_PACKAGES = 3
"""An undefined word with a capital in the middle is a proper noun if so many packages speak of it."""
MODULE_SHARE = 0.06
"""Share of a package's sentences that are chosen for naming a module, where it has so many."""
SEARCHED_FOR_MODULES = 600
"""Sentences of a package that are read at most to find that share."""
_FILES = {"train": "train.tsv", "dev": "devel.tsv", "test": "test.tsv"}
_FACTS = "set.json"
Splits = Mapping[str, Sequence[tuple[str, CodeSentence]]]


@dataclass(frozen=True)
class SetSize:
    """How many sentences a set has at most.

    Args:
        train: sentences to learn from.
        dev: sentences to choose by.
        test: sentences to score.
        package_share: share of a split that may come from one package.
        plain_share: share of a split that may have no mention.
    """

    train: int = 8000
    dev: int = 1000
    test: int = 1500
    package_share: float = 0.15
    plain_share: float = 1 / 3

    def count_labelled(self, split: str) -> int:
        """Sentences with mentions that a split has at most."""
        return round(getattr(self, split) * (1 - self.plain_share))

    def count_package(self, split: str) -> int:
        """Sentences with mentions that a package gives to a split at most."""
        return max(1, round(self.count_labelled(split) * self.package_share))


@dataclass
class _Harvest:
    """What the documentation of a package gave: sentences in their order, all for one split."""

    name: str
    split: str
    sentences: list[CodeSentence]

    def list_labelled(self) -> list[CodeSentence]:
        return [each for each in self.sentences if each.num_entities]


def describe_code_entities(*, seed: int = 0, size: SetSize | None = None, packages: Iterable[str] | None = None) -> str:
    """Return a fingerprint of the set that this install gives, without making it.

    Args:
        seed: of the choice of sentences and of the split.
        size: how many sentences.
        packages: only these distributions; default: all that are installed.

    Returns:
        Hexadecimal digest of all packages' names and versions, the extractor's version, Python's, seed and size.
    """
    wanted = None if packages is None else {each.lower() for each in packages}
    names = [name for name, _ in package_docs.find_distributions() if wanted is None or name in wanted]
    described = [package_docs.describe_distribution(name) for name in names]
    values = [EXTRACTOR_VERSION, platform.python_version(), seed, asdict(size or SetSize()), described]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def load_code_entities(
    cache: Path, *, seed: int = 0, size: SetSize | None = None, packages: Iterable[str] | None = None
) -> LabelledSet:
    """Read the set from a cache, where it is made first if this install's is not there.

    Args:
        cache: folder of such sets; each has a folder of its own, named by its fingerprint.
        seed: of the choice of sentences and of the split.
        size: how many sentences.
        packages: only these distributions; default: all that are installed.

    Raises:
        CorpusError: the documentation gives too few sentences.
    """
    packages = None if packages is None else sorted(packages)
    folder = cache / f"code-entities-{describe_code_entities(seed=seed, size=size, packages=packages)[:16]}"
    if not (folder / _FACTS).is_file():
        make_code_entities(folder, seed=seed, size=size, packages=packages)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    data = load_set(find_description("ner", str(folder)), str(folder))
    return replace(data, name="code_entities", labels=TYPES, notes=(summarize_facts(facts), *data.notes))


def make_code_entities(
    folder: Path, *, seed: int = 0, size: SetSize | None = None, packages: Iterable[str] | None = None
) -> dict[str, Any]:
    """Make the set of this install and write its files.

    Args:
        folder: where train.tsv, devel.tsv, test.tsv and set.json come to; they appear together or not at all.
        seed: of the choice of sentences and of the split.
        size: how many sentences.
        packages: only these distributions; default: all that are installed.

    Returns:
        The content of set.json.

    Raises:
        CorpusError: the documentation gives too few sentences.
    """
    size = size or SetSize()
    packages = None if packages is None else sorted(packages)
    found = sorted(find_packages(packages), key=lambda each: _hash(seed, each.name))
    splits = _choose_sentences(_harvest(found, size, seed), size, seed)
    facts = _collect_facts(splits, found)
    facts |= {"seed": seed, "fingerprint": describe_code_entities(seed=seed, size=size, packages=packages)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for split in SPLITS:
            (made / _FILES[split]).write_text(_format_split(splits[split]), encoding="utf-8")
        (made / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        made.chmod(0o755)
        os.replace(made, folder)
    except OSError:
        if not (folder / _FACTS).is_file():  # else another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return facts


def summarize_facts(facts: Mapping[str, Any]) -> str:
    """Return one sentence on a set: what it is made of, and what trivial rules score.

    Args:
        facts: the content of set.json.
    """
    counts = ", ".join(f"{facts['splits'][split]['sentences']} {split}" for split in SPLITS)
    scores = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in facts["baselines"].items())
    return (
        f"code_entities was made from the documentation of {len(facts['packages'])} installed packages ({counts} "
        f"sentences); entity F1 of trivial rules on test: {scores}."
    )


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _harvest(packages: Sequence[SourcePackage], size: SetSize, seed: int) -> list[_Harvest]:
    """Read sentences, package after package; what an earlier one has said is not taken again.

    Every package goes to the split that is farthest from full.
    """
    definitions = Definitions(packages)
    filled = dict.fromkeys(SPLITS, 0.0)
    seen: set[tuple[str, ...]] = set()
    harvests = []
    for package in packages:
        split = min(SPLITS, key=lambda each: filled[each])
        limit = size.count_package(split)
        harvest = _Harvest(package.name, split, [])
        num_labelled = num_modules = num_bytes = 0
        for module, path in sorted(package.files, key=lambda each: _hash(seed, each[0])):
            has_modules = num_modules >= MODULE_SHARE * limit or num_labelled > SEARCHED_FOR_MODULES
            if (num_labelled > 1.5 * limit and has_modules) or num_bytes > MAX_PACKAGE_BYTES:
                break
            scope, docstrings = read_docstrings(module, path)
            num_bytes += path.stat().st_size if docstrings else 0
            for docstring in docstrings:
                for sentence in MentionFinder(docstring, scope, definitions).read_sentences():
                    key = _mask_names(sentence)
                    if key not in seen:
                        seen.add(key)
                        harvest.sentences.append(sentence)
                        num_labelled += sentence.num_entities > 0
                        num_modules += "B-module" in sentence.tags
        filled[split] += min(num_labelled, limit) / size.count_labelled(split)
        harvests.append(harvest)
    return _drop_doubtful(harvests)


def _mask_names(sentence: CodeSentence) -> tuple[str, ...]:
    """What two sentences have in common that differ in names and numbers only."""
    words = zip(sentence.words, sentence.tags, strict=True)
    return tuple(re.sub(r"\d+", "0", word.lower()) if tag == "O" else tag for word, tag in words)


def _drop_doubtful(harvests: list[_Harvest]) -> list[_Harvest]:
    """Leave out sentences with words of which only all documentation together tells that they may be names."""
    speakers: defaultdict[str, set[str]] = defaultdict(set)
    named: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for harvest in harvests:
        for sentence in harvest.sentences:
            for noun in sentence.nouns:
                speakers[noun].add(harvest.name)
            for word, tag in zip(sentence.words, sentence.tags, strict=True):
                (plain if tag == "O" else named)[word] += 1
    # "func" is nearly always a name, also where nobody marked it; "data" is nearly always a word.
    names = {word for word, count in named.items() if count >= 3 and count >= plain[word]}
    return [
        _Harvest(
            harvest.name,
            harvest.split,
            [
                each
                for each in harvest.sentences
                if all(len(speakers[noun]) >= MIN_NOUN_PACKAGES for noun in each.nouns)
                and not any(tag == "O" and word in names for word, tag in zip(each.words, each.tags, strict=True))
            ],
        )
        for harvest in harvests
    ]


def _choose_sentences(
    harvests: Sequence[_Harvest], size: SetSize, seed: int
) -> dict[str, list[tuple[str, CodeSentence]]]:
    """Choose the sentences of every split by a hash."""
    chosen = {split: _choose_split([each for each in harvests if each.split == split], size, seed) for split in SPLITS}
    counts = {split: len(each) for split, each in chosen.items()}
    if counts["train"] < MIN_TRAIN or not counts["dev"] or not counts["test"]:
        raise CorpusError(
            f"code_entities has only {counts['train']} train, {counts['dev']} dev and {counts['test']} test sentences "
            f"from the {len(harvests)} installed packages, but it needs {MIN_TRAIN} to learn from; install more "
            "packages with documentation in their source, or give a labelled set of your own."
        )
    return chosen


def _choose_split(harvests: Sequence[_Harvest], size: SetSize, seed: int) -> list[tuple[str, CodeSentence]]:
    def draw(name: str, sentence: CodeSentence) -> str:
        return _hash(seed, name, *sentence.words)

    labelled: list[tuple[str, CodeSentence]] = []
    for harvest in harvests:
        limit = size.count_package(harvest.split)
        order = sorted(harvest.list_labelled(), key=lambda each: draw(harvest.name, each))
        # Modules are rare in prose: a small set that left them to chance could hardly score them.
        rare = [each for each in order if "B-module" in each.tags][: round(limit * MODULE_SHARE)]
        order = rare + [each for each in order if each not in rare]
        labelled += [(harvest.name, each) for each in order[:limit]]
    labelled.sort(key=lambda each: draw(*each))
    labelled = labelled[: size.count_labelled(harvests[0].split)] if harvests else []
    counts = Counter(name for name, _ in labelled)
    chosen = {(name, id(each)) for name, each in labelled}
    for harvest in harvests:
        plain = sorted(
            (each for each in harvest.sentences if not each.num_entities), key=lambda each: draw(harvest.name, each)
        )
        share = size.plain_share / (1 - size.plain_share)
        chosen |= {(harvest.name, id(each)) for each in plain[: int(counts[harvest.name] * share)]}
    by_name = sorted(harvests, key=lambda each: each.name)
    return [
        (harvest.name, each)
        for harvest in by_name
        for each in sorted(harvest.sentences, key=lambda each: each.module)
        if (harvest.name, id(each)) in chosen
    ]


def _format_split(sentences: Iterable[tuple[str, CodeSentence]]) -> str:
    """A word and its tag a line; the module that sentences come from is their document."""
    lines: list[str] = []
    document = ("", "")
    for name, sentence in sentences:
        if document != (name, sentence.module):
            document = (name, sentence.module)
            lines += [f"-DOCSTART- {name} {sentence.module}\tO", ""]
        lines += [f"{word}\t{tag}" for word, tag in zip(sentence.words, sentence.tags, strict=True)]
        lines.append("")
    return "\n".join(lines) + "\n"


def _collect_facts(splits: Splits, packages: Sequence[SourcePackage]) -> dict[str, Any]:
    versions = {each.name: each.version for each in packages}
    described = {}
    for split in SPLITS:
        tags = Counter(tag for _, each in splits[split] for tag in each.tags)
        described[split] = {
            "sentences": len(splits[split]),
            "words": sum(tags.values()),
            "entities": {kind: tags[f"B-{kind}"] for kind in TYPES},
            "plain_sentences": sum(not each.num_entities for _, each in splits[split]),
        }
    return {
        "name": "code_entities",
        "extractor_version": EXTRACTOR_VERSION,
        "python": platform.python_version(),
        "splits": described,
        "baselines": _score_baselines(splits),
        "packages": {
            name: {"version": versions[name], "split": split, "sentences": count}
            for split in SPLITS
            for name, count in Counter(name for name, _ in splits[split]).items()
        },
    }


def _score_baselines(splits: Splits) -> dict[str, float]:
    """Micro entity F1 on test of rules that look at one word at a time."""
    by_word: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by_shape: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for _, each in splits["train"]:
        for word, tag in zip(each.words, each.tags, strict=True):
            by_word[word][tag] += 1
            by_shape[_shape_of(word)][tag] += 1
    tag_of_word = {word: tags.most_common(1)[0][0] for word, tags in by_word.items()}
    tag_of_shape = {shape: tags.most_common(1)[0][0] for shape, tags in by_shape.items()}
    gold = [each.tags for _, each in splits["test"]]
    rules = {
        "all_o": lambda word: "O",
        "word": lambda word: tag_of_word.get(word, "O"),
        "shape": lambda word: tag_of_shape.get(_shape_of(word), "O"),
        "word_then_shape": lambda word: tag_of_word.get(word, tag_of_shape.get(_shape_of(word), "O")),
    }
    scores = {}
    for name, rule in rules.items():
        predicted = [[rule(word) for word in each.words] for _, each in splits["test"]]
        scores[name] = round(float(score_tags(gold, predicted, TYPES).get("entity_f1.micro")), 4)
    return scores


def _shape_of(word: str) -> str:
    """The look of a word: what a reader who knows no English would go by."""
    owner, dot, last = word.rpartition(".")
    look = (
        "camel"
        if is_camel_case(last)
        else "snake"
        if "_" in last.strip("_")
        else "upper"
        if last.isupper()
        else "other"
    )
    if look == "other" and last[:1].isupper():
        look = "title"
    return ("dotted " if dot and owner and last else "") + ("private " if word.startswith("_") else "") + look
