"""Texts to be scored that the start model's own run has trained on: on those it may be better than on others.

Enters: the start model and a labelled set. Leaves: a sentence a split. Only whole documents are found, by their hashes,
which prepared corpora keep: a sentence out of a document that was read is not.
"""

from __future__ import annotations

import numpy as np

from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import CorpusError
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.models.start import StartModel
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place
from domext_ray.text.corpus.overlap import count_common, read_hashes
from domext_ray.text.corpus.shards import hash_document
from domext_ray.text.data.documents import clean_text
from domext_ray.training.run import find_domain_text

_TOLD_FRAC, _FEWEST = 0.05, 3
"""Of fewer texts figures are hardly another."""


def describe_seen(start: StartModel, data: LabelledSet) -> list[str]:
    """Warn of splits of which a twentieth or more was read; a run whose prepared text has gone is not asked."""
    if start.kind != "run":
        return []
    folder = Place(start.id).resolve()
    place = find_domain_text(folder, read_config(folder, SettledConfig))
    if place is None:
        return []
    try:
        read = read_hashes(place).train
    except CorpusError:  # the run says so where it needs them
        return []
    said = []
    for split in ("dev", "test"):
        texts = {clean_text(example.shown) for example in data.splits[split]}
        hashes = np.sort(np.frombuffer(b"".join(map(hash_document, texts)), ">u8").astype(np.uint64))
        number = count_common(hashes, read)
        if number >= max(_FEWEST, _TOLD_FRAC * len(texts)):
            said.append(
                f"warning: {number:,} of the {len(texts):,} different texts of {split} are training documents of "
                f"{start.name}, which may score higher on them than on text that it has not read; leave them out of "
                "its --corpus if figures are to hold for new text."
            )
    return said
