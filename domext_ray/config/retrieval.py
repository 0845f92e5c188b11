"""The configuration of the job that searches with models: which, and in which collection."""

from __future__ import annotations

from typing import Annotated

from domext_ray.config.inference import Size
from domext_ray.config.jobs import ModelList, name_models
from domext_ray.config.options.declare import FolderName, Found, Length, Written, filled, option_group, place
from domext_ray.config.vectors import PoolingChoice


@option_group
class RetrievalConfig:
    """Which models search, and in which collection."""

    models: ModelList = ()  # [NAME=]MODEL by commas; MODEL is a run's directory, an export, a base's folder or a hub id
    # folder in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv
    data: Found[Annotated[str, filled("a folder with corpus.jsonl, queries.jsonl and qrels"), place()]] = ""
    split: Annotated[FolderName, filled("a name")] = "test"  # which judgements: qrels/SPLIT.tsv
    # folder of results.json and retrieval.md
    output: Written[Annotated[str, filled("a folder"), place()]] = "retrieval"
    pooling: PoolingChoice = "auto"  # tokens' mean, or the first one's state; auto: as the model's run had it
    max_length: Length = 256  # tokens of a text at most; a model with shorter rows cuts earlier
    batch_size: Size = 64  # texts of a forward pass; the figures do not depend on it

    @property
    def named_models(self) -> tuple[tuple[str, str], ...]:
        """See `name_models`."""
        return name_models(self.models)
