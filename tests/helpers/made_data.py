"""Labelled sets for tasks of two steps, from word lists and patterns, in the layouts of CMeIE and CHIP-CDN.

What makes up an answer is each split's own: training knows no triple and no term of test.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from labelled_fixtures import dump_lines, write

SPLITS = ("train", "dev", "test")
# Type of all subjects, predicates with the type of their objects and a pattern, what joins clauses, and words of names.
RELATIONS = {
    "en": (
        "illness",
        {
            "treatment": ("remedy", "the {} gets better with {}"),
            "worsening": ("remedy", "the {} gets worse with {}"),
            "symptom": ("sign", "the {} causes {}"),
        },
        ", and ",
        {"illness": " fever", "remedy": " tea", "sign": " pain"},
        "river winter desert mountain harbor forest summer island valley prison garden jungle ocean autumn castle "
        "village factory market temple bridge railway tower spring canal coal silver iron copper paper cotton",
    ),
    "zh": (
        "疾病",
        {"治疗": ("药物", "{}可用{}治疗"), "加重": ("药物", "{}忌{}"), "症状": ("症状", "{}常引起{}")},
        "，",
        {"疾病": "热", "药物": "茶", "症状": "疼痛"},
        "河谷 冬季 沙漠 山地 港口 森林 夏季 海岛 草原 城堡 花园 丛林 海洋 秋季 村庄 工厂 市场 寺庙 铁路 塔楼 "
        "春天 运河 煤矿 银色 铁器 铜器 纸坊 棉花 羊毛 皮革",
    ),
}
# A finding's standard name with what people say instead and its abbreviation, and sites with theirs.
FINDINGS = {
    "en": {
        "fracture": ("broken", "fx"),
        "inflammation": ("sore and swollen", "infl"),
        "infection": ("full of germs", "inf"),
        "bleeding": ("losing blood", "bldg"),
        "numbness": ("no feeling in", "nmb"),
        "wound": ("cut open", "wnd"),
        "stiffness": ("hard to bend", "stf"),
        "bruise": ("black and blue", "brs"),
    },
    "zh": {
        "骨折": ("断了", "骨折"),
        "炎症": ("又红又肿", "炎"),
        "感染": ("化脓了", "感染"),
        "出血": ("流血", "出血"),
        "麻木": ("没有感觉", "麻"),
        "瘫痪": ("动不了", "瘫"),
        "烧伤": ("被烫了", "烧伤"),
        "挫伤": ("青了一块", "挫伤"),
    },
}
SITES = {
    "en": [
        f"{side} {site}" for site in "wrist knee shoulder ankle ear eye foot hip".split() for side in ("left", "right")
    ],
    "zh": [f"{side}{site}" for site in "腕部 膝部 肩部 踝部 耳部 眼部 足部 髋部".split() for side in ("左侧", "右侧")],
}


def write_relations(folder: Path, language: str, sizes: Mapping[str, int]) -> Path:
    """Write texts of one to three clauses, each about another illness, and a schema, as JSON lines."""
    subject, predicates, joint, ends, marks = RELATIONS[language]
    schema = [
        {"subject_type": subject, "predicate": name, "object_type": kind} for name, (kind, _) in predicates.items()
    ]
    write(folder / "schema.jsonl", dump_lines(schema))
    for i, split in enumerate(SPLITS):
        rng, rows = random.Random(f"relations-{language}-{split}"), []
        for _ in range(sizes[split]):
            chosen = rng.sample(sorted(predicates), rng.randint(1, 3))
            names = iter(rng.sample(marks.split()[i::3], 2 * len(chosen)))  # none twice, so that each has one place
            clauses, triples = [], []
            for name in chosen:
                kind, pattern = predicates[name]
                head, tail = next(names) + ends[subject], next(names) + ends[kind]
                clauses.append(pattern.format(head, tail))
                triple = {"predicate": name, "subject": head, "subject_type": subject, "Combined": False}
                triples.append({**triple, "object": {"@value": tail}, "object_type": {"@value": kind}})
            rows.append({"text": joint.join(clauses), "spo_list": triples})
        write(folder / f"{split}.jsonl", dump_lines(rows))
    return folder


def write_mentions(folder: Path, language: str, sizes: Mapping[str, int]) -> Path:
    """Write wordings of terms, a sixth of them of two terms, and the catalogue of all.

    A wording has everyday words, an abbreviation or a typing error.
    """
    name = "{0} of the {1}" if language == "en" else "{1}{0}"
    pairs = [(finding, site) for finding in FINDINGS[language] for site in SITES[language]]
    write(folder / "catalogue.txt", "".join(f"{name.format(*pair)}\n" for pair in pairs))
    random.Random(language).shuffle(pairs)
    for i, split in enumerate(SPLITS):
        rng, rows = random.Random(f"mentions-{language}-{split}"), []
        for _ in range(sizes[split]):
            drawn = rng.sample(pairs[i::3], 2 if rng.random() < 1 / 6 else 1)
            text = (" and " if language == "en" else "、").join(_word_term(rng, language, *pair) for pair in drawn)
            rows.append({"text": text, "normalized_result": "##".join(name.format(*pair) for pair in drawn)})
        write(folder / f"{split}.json", json.dumps(rows, ensure_ascii=False, indent=1))
    return folder


def _word_term(rng: random.Random, language: str, finding: str, site: str) -> str:
    everyday, short = FINDINGS[language][finding]
    gap, kind = " " if language == "en" else "", rng.random()
    if kind < 0.7 or language == "zh":
        return f"{site}{gap}{everyday if kind < 0.5 else short}"
    i = rng.randrange(1, len(finding) - 2)  # a letter is dropped
    return f"{site} {finding[:i]}{finding[i + 1 :]}"
