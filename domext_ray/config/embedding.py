"""The configuration of the job that makes vectors of texts."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal, get_args

from domext_ray.config.inference import InferenceScaleConfig, check_input, check_output
from domext_ray.config.vectors import PoolingChoice
from domext_ray.options.fields import MANY, check_place, free, require, require_at_most, require_one_of

_LAYERS = re.compile(r"\d{1,4}(-\d{1,4})?")


@dataclass(frozen=True)
class EmbedConfig:
    """Which model makes vectors, of which texts, and where they go."""

    model: str = "general-mini"  # a run's directory, an export, BANK:NAME, a base's folder, or a hub id
    input: str = ""  # text, JSONL, CSV or Parquet files, globs, folders or s3:// addresses, by commas
    output: str = free("")  # folder of vectors, malformed.jsonl and summary.json
    field: str = "text"  # field or column that holds the text
    pooling: PoolingChoice = "auto"  # tokens' mean, or the first one's state; auto: as the model's run had it
    layers: str = ""  # layers whose states are averaged first: 12, 9-12 or 1,12, 0 for the embeddings; empty: the last
    normalize: bool = False  # vectors of length 1, whose products are cosines
    max_length: int = 512  # tokens of a text at most; a model with shorter rows cuts earlier
    format: Literal["parquet", "npy"] = "parquet"  # predictions/*.parquet; or vectors.npy, its rows named in ids.jsonl
    block_rows: int = 2048  # rows of a block, the unit that is written, and done again after a stop
    batch_size: int = 64  # texts of a forward pass
    strict: bool = free(False)  # the first malformed row is an error; else they are listed in malformed.jsonl
    dry_run: bool = free(False)  # validate, count the rows, start nothing
    scale: InferenceScaleConfig = dataclasses.field(default_factory=InferenceScaleConfig)

    def __post_init__(self) -> None:
        require(bool(self.model.strip()), "model", self.model, "a run's directory, an export, BANK:NAME or a base")
        check_place("model", self.model, "a hub id, BANK:NAME, or a folder")
        check_input(self.input)
        check_output(self.output, "vectors/notes")
        require(bool(self.field.strip()), "field", self.field, "the name of a field or column")
        require_one_of(self.pooling, "pooling", get_args(PoolingChoice))
        parts = self.layers.split(",") if self.layers else []
        rule = "numbers of layers, such as 12, 9-12 or 1,12"
        require(all(_LAYERS.fullmatch(each.strip()) for each in parts), "layers", self.layers, rule)
        numbers = self.layer_numbers
        require(not parts or (bool(numbers) and len(set(numbers)) == len(numbers)), "layers", self.layers, rule)
        require_one_of(self.format, "format", ("parquet", "npy"))
        for name, least in (("max_length", 3), ("block_rows", 1), ("batch_size", 1)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        require_at_most(self, "", max_length=MANY, block_rows=MANY, batch_size=MANY)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The layers, in the order that they were given in."""
        numbers: list[int] = []
        for each in self.layers.split(",") if self.layers else ():
            first, _, last = each.strip().partition("-")
            numbers += range(int(first), int(last or first) + 1)
        return tuple(numbers)
