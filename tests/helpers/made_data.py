"""Labelled sets made from word lists and sentence patterns, in the layouts of the real ones.

    python tests/helpers/made_data.py OUTDIR

writes a folder a set. Patterns are the same in all splits; the words that make up an answer (names, cities, remedies, a
standard term's combination) are not, so that only the pattern helps. The same seed makes the same files.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

from made_words import (
    ADJECTIVES,
    ANSWERS,
    FINDINGS,
    FINDINGS_ZH,
    GROUPS,
    ILLNESS_MARKS,
    ILLNESSES,
    NAMES,
    REMEDIES,
    REMEDY_MARKS,
    SCENES,
    SIGN_MARKS,
    SIGNS,
    SITES,
    SITES_ZH,
    SPLITS,
    split_pool,
)

SIZES = {"train": 3000, "dev": 400, "test": 600}
Records = dict[str, list[dict[str, Any]]]

# Attribute: (sentence, question); {a} is the answer, {n} the person.
FACTS = {
    "job": ("{n} works as a {a}.", "what is the job of {n}?"),
    "city": ("{n} lives in {a}.", "where does {n} live?"),
    "animal": ("{n} keeps {j} {a} at home.", "which animal does {n} keep?"),
    "food": ("{n} eats {a} every day.", "what does {n} eat?"),
    "color": ("{n} drives a {a} car.", "what color is the car of {n}?"),
    "instrument": ("{n} plays the {a}.", "which instrument does {n} play?"),
    "subject": ("{n} studies {a}.", "what does {n} study?"),
    "country": ("{n} was born in {a}.", "in which country was {n} born?"),
    "place": ("{n} met an old friend at the {a}.", "where did {n} meet a friend?"),
}

# Predicate: (subject's type, object's type, sentences); {s} is the subject, {o} the object.
RELATIONS_EN = {
    "treatment": ("illness", "remedy", ("the {s} gets better with {o}", "doctors treat the {s} with {o}")),
    "worsening": ("illness", "remedy", ("the {s} gets worse with {o}", "doctors warn that {o} worsens the {s}")),
    "symptom": ("illness", "sign", ("the {s} causes {o}", "a sign of the {s} is {o}")),
    "population": ("illness", "group", ("the {s} is common among {o}", "mostly {o} suffer from the {s}")),
    "synonym": ("illness", "illness", ("the {s} is also called {o}", "another name of the {s} is {o}")),
}
RELATIONS_ZH = {
    "治疗": ("疾病", "药物", ("{s}可用{o}治疗", "医生用{o}缓解{s}")),
    "加重": ("疾病", "药物", ("{o}会加重{s}", "患{s}时不宜使用{o}")),
    "症状": ("疾病", "症状", ("{s}常引起{o}", "{s}的表现是{o}")),
    "人群": ("疾病", "人群", ("{s}多见于{o}", "{o}容易得{s}")),
    "同义词": ("疾病", "疾病", ("{s}又称{o}", "{s}也叫作{o}")),
}


def make_relations(seed: int = 0, *, language: str = "en", sizes: dict[str, int] = SIZES) -> Records:
    """Texts of one to three clauses about different illnesses, in CMeIE's records, with "schema" beside the splits.

    Every pair of an illness and something else of another clause is unrelated, whatever its types.
    """
    kinds = RELATIONS_EN if language == "en" else RELATIONS_ZH
    schema = [{"subject_type": s, "predicate": p, "object_type": o} for p, (s, o, _) in kinds.items()]
    pools = _make_relation_pools(seed, language)
    records: Records = {"schema": schema}
    for split in SPLITS:
        rng = random.Random(f"relations-{language}-{split}-{seed}")
        records[split] = [_make_relation_text(rng, pools[split], kinds, language) for _ in range(sizes[split])]
    return records


def _make_relation_pools(seed: int, language: str) -> dict[str, dict[str, list[str]]]:
    """Strings of each type by split: a marking word, disjoint between splits, and a kind's word, shared by them."""
    i, joint = (0, " ") if language == "en" else (1, "")
    types = [types for *types, _ in (RELATIONS_EN if i == 0 else RELATIONS_ZH).values()]
    illness, remedy, sign, group = types[0][0], types[0][1], types[2][1], types[3][1]
    pools: dict[str, dict[str, list[str]]] = {split: {} for split in SPLITS}
    for name, marks, words in ((illness, ILLNESS_MARKS, ILLNESSES), (remedy, REMEDY_MARKS, REMEDIES)):
        for split, own in split_pool(marks[i].split(), seed).items():
            pools[split][name] = [f"{mark}{joint}{word}" for mark in own for word in words[i].split()]
    for split, own in split_pool(SIGN_MARKS[i].split(), seed).items():
        pools[split][sign] = [f"{mark}{joint}{word}" for mark in own for word in SIGNS[i].split()]
    for split, own in split_pool(GROUPS[i].split(), seed).items():
        pools[split][group] = own
    return pools


def _make_relation_text(
    rng: random.Random, pools: dict[str, list[str]], kinds: dict[str, Any], language: str
) -> dict[str, Any]:
    clauses, relations, used = [], [], [""]
    for predicate in rng.sample(sorted(kinds), rng.randint(1, 3)):
        subject_type, object_type, patterns = kinds[predicate]
        names = []
        for each in (subject_type, object_type):
            # No name occurs twice or within another, so that it has one place in the text.
            taken = "|".join(used)
            free = [name for name in pools[each] if name not in taken and not any(n in name for n in used[1:])]
            names.append(rng.choice(free))
            used.append(names[-1])
        clauses.append(rng.choice(patterns).format(s=names[0], o=names[1]))
        relations.append(_make_relation(names[0], subject_type, predicate, names[1], object_type))
    joint, end = (rng.choice((", and ", "; ", ", but ")), ".") if language == "en" else ("，", "。")
    return {"text": joint.join(clauses) + end, "spo_list": relations}


def _make_relation(subject: str, subject_type: str, predicate: str, name: str, object_type: str) -> dict[str, Any]:
    return {
        "Combined": False,
        "predicate": predicate,
        "subject": subject,
        "subject_type": subject_type,
        "object": {"@value": name},
        "object_type": {"@value": object_type},
    }


def make_mentions(
    seed: int = 0, *, language: str = "en", num_terms: int = 200, sizes: dict[str, int] = SIZES
) -> tuple[Records, list[str]]:
    """Wordings of standard terms in CHIP-CDN's records, and the catalogue of all splits' terms.

    A term is a finding and a site, such as "fracture of the left wrist"; no term of a split is one of another's. A
    wording has the site first, the everyday words or abbreviations of either part, and perhaps a typing error; one of
    six means two terms.
    """
    findings, sites = (FINDINGS, SITES) if language == "en" else (FINDINGS_ZH, SITES_ZH)
    combinations = [(finding, site) for finding in findings for site in sites]
    chosen = random.Random(f"terms-{language}-{seed}").sample(combinations, min(num_terms, len(combinations)))
    pools = split_pool([f"{finding}|{site}" for finding, site in chosen], seed)
    name = "{0} of the {1}".format if language == "en" else "{1}{0}".format
    records: Records = {}
    for split in SPLITS:
        rng = random.Random(f"mentions-{language}-{split}-{seed}")
        records[split] = []
        for _ in range(sizes[split]):
            drawn = [each.split("|") for each in rng.sample(pools[split], 2 if rng.random() < 1 / 6 else 1)]
            wordings = [_word_term(rng, *each, language) for each in drawn]
            joint = rng.choice((" and ", ", ", " with ")) if language == "en" else rng.choice("，、伴")
            records[split].append(
                {"text": joint.join(wordings), "normalized_result": "##".join(name(*each) for each in drawn)}
            )
    return records, sorted(name(*each) for each in chosen)


def _word_term(rng: random.Random, finding: str, site: str, language: str) -> str:
    findings, sites = (FINDINGS, SITES) if language == "en" else (FINDINGS_ZH, SITES_ZH)
    everyday, short = findings[finding]
    place = sites[site] if rng.random() < 0.3 else site
    if language == "zh":
        return rng.choice((f"{place}{everyday}", f"{place}{short}", f"{place}有点{everyday}"))
    kind = rng.random()
    if kind < 0.5:
        before = everyday.endswith((" in", " on", "move", "broken", "scratch", "open"))
        return f"{everyday} {place}" if before else f"{place} {everyday}"
    if kind < 0.7:
        return f"{place} {short}"
    return _mistype(rng, rng.choice((f"{place} {finding}", f"{finding} {place}")))


def _mistype(rng: random.Random, text: str) -> str:
    """Drop one letter or exchange two neighbours, somewhere in the middle."""
    i = rng.randrange(1, len(text) - 2)
    return rng.choice((text[:i] + text[i + 1 :], text[:i] + text[i + 1] + text[i] + text[i + 2 :]))


def make_choices(seed: int = 0, *, sizes: dict[str, int] = SIZES) -> Records:
    """Four endings that differ in one thing, in SWAG's columns; right is the thing that belongs to the first sentence.

    In half of the examples the first sentence names the thing itself, in the other half one of the same scene. A
    split's things are its own, and each is right as often as wrong ones are, on average.
    """
    pools = {scene: split_pool(words.split(), seed) for scene, words in SCENES.items()}
    records: Records = {}
    for split in SPLITS:
        rng = random.Random(f"choices-{split}-{seed}")
        names = split_pool(NAMES, seed)[split]
        records[split] = [_make_choice(rng, names, pools, split, i) for i in range(sizes[split])]
    return records


def _make_choice(
    rng: random.Random, names: list[str], pools: dict[str, dict[str, list[str]]], split: str, place: int
) -> dict[str, Any]:
    scenes = rng.sample(sorted(pools), 4)
    things = [rng.choice(pools[scene][split]) for scene in scenes]
    own = things[0] if rng.random() < 0.5 else rng.choice([e for e in pools[scenes[0]][split] if e != things[0]])
    others = rng.sample([each for each in pools[scenes[0]]["train"] if each not in things], 2)
    name = rng.choice(names)
    sentence = rng.choice(
        (
            f"{name} comes to the {scenes[0]} and sees the {own}.",
            f"in the {scenes[0]}, {name} looks for the {others[0]} and the {own}.",
            f"near the {others[0]} and the {others[1]}, {name} finds the {own}.",
        )
    )
    ending = rng.choice(
        ("then talks about the {}.", "now points at the {} and smiles.", "says that the {} is important.")
    )
    order = rng.sample(range(4), 4)
    return {
        "video-id": f"made_{split}_{place}",
        "fold-ind": str(place),
        "startphrase": f"{sentence} {name}",
        "sent1": sentence,
        "sent2": name,
        "gold-source": "gold",
        **{f"ending{i}": ending.format(things[order[i]]) for i in range(4)},
        "label": order.index(0),
    }


def make_questions(seed: int = 0, *, unanswerable: bool = False, sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    """Questions about passages of facts on three people, in SQuAD's layout, v1.1 or v2.0.

    Unanswerable are a third of v2.0's: what is asked of one person is told of another, or of none. Names and answers of
    a split are its own.
    """
    names = split_pool(NAMES, seed)
    pools = {key: split_pool(words.split(), seed) for key, words in ANSWERS.items()}
    files: dict[str, Any] = {}
    for split in SPLITS:
        rng = random.Random(f"questions-{unanswerable}-{split}-{seed}")
        paragraphs: list[dict[str, Any]] = []
        left = sizes[split]
        while left:
            words = {key: pool[split] for key, pool in pools.items()}
            paragraph = _make_passage(rng, names[split], words, min(left, 3), unanswerable)
            for i, each in enumerate(paragraph["qas"]):
                each["id"] = f"{split}-{len(paragraphs)}-{i}"
            left -= len(paragraph["qas"])
            paragraphs.append(paragraph)
        files[split] = {
            "version": "v2.0" if unanswerable else "1.1",
            "data": [
                {"title": f"people {i}", "paragraphs": paragraphs[i : i + 20]} for i in range(0, len(paragraphs), 20)
            ],
        }
    return files


def _make_passage(
    rng: random.Random, names: list[str], words: dict[str, list[str]], num_questions: int, unanswerable: bool
) -> dict[str, Any]:
    people = rng.sample(names, 3)
    facts: dict[tuple[str, str], str] = {}
    for person in people:
        for key in rng.sample(sorted(FACTS), 2):
            # No answer stands twice in a passage.
            facts[person, key] = rng.choice([each for each in words[key] if each not in facts.values()])
    context, starts = "", {}
    for person, key in rng.sample(sorted(facts), len(facts)):
        adjective = rng.choice(["a", *(f"a {each}" for each in ADJECTIVES.split() if each[0] not in "aeiou")])
        before, after = FACTS[key][0].format(n=person, j=adjective, a="|").split("|")
        starts[person, key] = len(context) + len(before)
        context += f"{before}{facts[person, key]}{after} "
    questions = []
    for person, key in rng.sample(sorted(facts), num_questions):
        is_impossible = unanswerable and rng.random() < 1 / 3
        if is_impossible:
            told = [each for each in FACTS if any((other, each) in facts for other in people)]
            absent = [each for each in (told if rng.random() < 0.5 else FACTS) if (person, each) not in facts]
            key = rng.choice(absent or [each for each in FACTS if (person, each) not in facts])
        answer = [] if is_impossible else [{"text": facts[person, key], "answer_start": starts[person, key]}]
        questions.append({"id": "", "question": FACTS[key][1].format(n=person), "answers": answer})
        if unanswerable:
            questions[-1]["is_impossible"] = is_impossible
    return {"context": context.rstrip(), "qas": questions}


def write_relations(folder: Path, records: Records) -> None:
    """Write CMeIE's JSON lines, and its schema."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in records.items():
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in each)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def write_mentions(folder: Path, records: Records, catalogue: list[str]) -> None:
    """Write CHIP-CDN's JSON lists, and the catalogue, a term a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, each in records.items():
        (folder / f"{split}.json").write_text(json.dumps(each, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "catalogue.txt").write_text("".join(f"{term}\n" for term in catalogue), encoding="utf-8")


def write_choices(folder: Path, records: Records) -> None:
    """Write CSV files with SWAG's columns, the first the row's number."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, each in records.items():
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["", *each[0]])
            writer.writeheader()
            writer.writerows({"": i, **record} for i, record in enumerate(each))


def write_questions(folder: Path, files: dict[str, Any]) -> None:
    """Write SQuAD's JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, each in files.items():
        (folder / f"{split}.json").write_text(json.dumps(each), encoding="utf-8")


def write_all(folder: Path, seed: int = 0, sizes: dict[str, int] = SIZES) -> None:
    """Write every set into a folder of its own."""
    for language, ending in (("en", ""), ("zh", "_zh")):
        write_relations(folder / f"relations{ending}", make_relations(seed, language=language, sizes=sizes))
        write_mentions(folder / f"normalization{ending}", *make_mentions(seed, language=language, sizes=sizes))
    write_choices(folder / "multiple_choice", make_choices(seed, sizes=sizes))
    write_questions(folder / "qa_v1", make_questions(seed, sizes=sizes))
    write_questions(folder / "qa_v2", make_questions(seed, unanswerable=True, sizes=sizes))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/helpers/made_data.py OUTDIR")
    write_all(Path(sys.argv[1]))
