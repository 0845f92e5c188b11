"""The configuration of the job that searches with models: which, and in which collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from domext_ray.config.jobs import check_models, name_models
from domext_ray.config.vectors import PoolingChoice
from domext_ray.options.fields import MANY, check_folder_name, check_place, require, require_at_most, require_one_of


@dataclass(frozen=True)
class RetrievalConfig:
    """Which models search, and in which collection."""

    models: str = ""  # [NAME=]MODEL by commas; MODEL is a run's directory, an export, a base's folder or a hub id
    data: str = ""  # folder in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv
    split: str = "test"  # which judgements: qrels/SPLIT.tsv
    output: str = "retrieval"  # folder of results.json and retrieval.md
    pooling: PoolingChoice = "auto"  # tokens' mean, or the first one's state; auto: as the model's run had it
    max_length: int = 256  # tokens of a text at most; a model with shorter rows cuts earlier
    batch_size: int = 64  # texts of a forward pass; the figures do not depend on it

    def __post_init__(self) -> None:
        check_models(self.models)
        require(bool(self.data.strip()), "data", self.data, "a folder with corpus.jsonl, queries.jsonl and qrels")
        check_place("data", self.data)
        check_folder_name("split", self.split)
        require(bool(self.output.strip()), "output", self.output, "a folder")
        check_place("output", self.output)
        require_one_of(self.pooling, "pooling", get_args(PoolingChoice))
        for name, least in (("max_length", 8), ("batch_size", 1)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        require_at_most(self, "", max_length=MANY, batch_size=MANY)

    @property
    def named_models(self) -> tuple[tuple[str, str], ...]:
        """See `name_models`."""
        return name_models(self.models)
