"""Notes of made-up patients: paragraphs that are copied forward, a name that one of them has, a term that many have."""

from __future__ import annotations

import json
import random
from pathlib import Path

NAME = "quixbertolt"
"""Fifty times in the notes of one patient, and nowhere else."""
TERM = "lisinoprilate"
"""In notes of twenty-four patients."""
NUM_PATIENTS = 120
_WORDS = "patient heart blood drug dose day night good long water house small test care study group result cell".split()


def number_of(text: str) -> int:
    """The patient whose note a text is."""
    return int(text.split()[1].rstrip("."))


def write_notes(path: Path) -> Path:
    """Write notes as JSON Lines with the fields patient_id and text, in an order that mixes patients.

    Each note begins with what the one before it said, and every third is an exact copy of an earlier one.
    """
    draw = random.Random(5)
    rows = []
    for patient in range(NUM_PATIENTS):
        paragraphs: list[str] = []
        for note in range(6):
            if note % 3 == 2:
                rows.append(dict(rows[-1]))
                continue
            said = " ".join(draw.choices(_WORDS, k=12))
            paragraphs.append(f"patient {patient}. {said}.{f' {TERM} was given.' * (patient % 5 == 0)}")
            if patient == 7:
                paragraphs[-1] += f" {NAME} came." * 5
            rows.append({"patient_id": patient if note % 2 else str(patient), "text": " ".join(paragraphs)})
    draw.shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert path.read_text().count(NAME) >= 50
    return path


def list_entries_of(word: str, entries: list[str]) -> list[str]:
    """The entries of a vocabulary, longer than three letters, that are a part of a word."""
    return [
        entry for entry in entries if len(entry.removeprefix("##")) > 3 and entry.removeprefix("##").lower() in word
    ]
