"""Makes `repair_notes`, the text and the labelled set that sweeps search on by default; its README says what it is.

`python tests/helpers/make_repair_notes.py` writes them anew, byte for byte: `test_sets.py` compares.
"""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from domext_ray.families.readers.set_description import SETS

NOUNS = """
river widow castle summer garden candle button mirror window kitchen bridge pocket basket church bottle corner dinner
father doctor finger forest horse island jacket journey king ladies letter lion market bottom minute money morning
mother mountain music friend night ocean orange paper ground picture heart planet poet house prince judge queen rabbit
light rose school season shadow sheep ship silver number sister soldier song office spring star station stone storm
story stream sugar sunday table teacher theatre thunder ticket record tower train tree tribe uncle valley village smoke
voice wagon water wedding wheat winter wolf world yellow spirit square
"""
OPENINGS = ("opened", "closed", "turned", "raised", "carried", "returned")
JOINS = ("and", "then", "at", "by", "with", "for")
KINDS = ("part", "fault", "remedy", "person")
WORDS_PER_KIND = 24
SHARES = {"train": 12, "devel": 6, "test": 6}  # of a kind's words: no word of a split is in another
NOTES = {"train": 200, "devel": 300, "test": 300}
TEXT_NOTES, NOTES_PER_PARAGRAPH = 9_000, 6
SEED = 0


class Workshop:
    """A workshop's way of writing: in which order each opening wants the four, and which words are of which kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        nouns = NOUNS.split()
        self.random.shuffle(nouns)
        self.words = {kind: nouns[i * WORDS_PER_KIND :][:WORDS_PER_KIND] for i, kind in enumerate(KINDS)}
        orders = list(itertools.permutations(KINDS))
        self.orders = dict(zip(OPENINGS, self.random.sample(orders, len(OPENINGS)), strict=True))

    def write_note(self, words: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
        """Return a note's words and tags: an opening, then those of the four that it has, in its order."""
        choose, chance = self.random.choice, self.random.random
        opening = choose(OPENINGS)
        note = [(opening, "O")]
        for kind in self.orders[opening]:
            if chance() < 0.2:
                continue
            if chance() < 0.5:
                note.append((choose(JOINS), "O"))
            note.append((choose(words[kind]), f"B-{kind}"))
            if chance() < 0.15:
                note += [("and", "O"), (choose(words[kind]), f"B-{kind}")]
        return note


def make(folder: Path, seed: int = SEED) -> None:
    """Write the text and the three splits."""
    workshop = Workshop(seed)
    notes = [" ".join(word for word, _ in workshop.write_note(workshop.words)) for _ in range(TEXT_NOTES)]
    starts = range(0, TEXT_NOTES, NOTES_PER_PARAGRAPH)
    text = "\n".join(". ".join(notes[i : i + NOTES_PER_PARAGRAPH]) + ".\n" for i in starts)
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(folder / "text.txt.gz", "wb", mtime=0) as file:
        file.write(text.encode())
    first = 0
    for split, share in SHARES.items():
        own = {kind: words[first:][:share] for kind, words in workshop.words.items()}
        first += share
        tagged = [workshop.write_note(own) for _ in range(NOTES[split])]
        rows = ("".join(f"{word}\t{tag}\n" for word, tag in note) for note in tagged)
        (folder / f"{split}.tsv").write_text("\n".join(rows), encoding="utf-8")


if __name__ == "__main__":
    make(SETS / "repair_notes")
