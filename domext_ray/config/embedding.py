"""The configuration of the job that makes vectors of texts."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from domext_ray.config.inference import FieldName, InferenceScaleConfig, InputFiles, Model, Output, Size
from domext_ray.config.options.declare import MANY, free, later, option_group
from domext_ray.config.shared import LongTexts, PoolingChoice
from domext_ray.errors import ConfigError

_LAYERS = re.compile(r"\d{1,4}(-\d{1,4})?")


def _read_layers(layers: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in layers.split(",") if layers else ():
        if not _LAYERS.fullmatch(part.strip()):
            raise ValueError("numbers of layers, such as 12, 9-12 or 1,12")
        first, _, last = part.strip().partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if (layers and not numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("numbers of layers, such as 12, 9-12 or 1,12")
    return tuple(numbers)


def _check_layers(layers: str) -> str:
    _ = _read_layers(layers)
    return layers


@option_group
class EmbedConfig:
    """Which model makes vectors for which texts, and where they go."""

    model: Model = "general-mini"  # a run's directory, an export, BANK:NAME, a base's folder, or a hub id
    input: InputFiles = ""  # text, JSONL, CSV or Parquet files, globs, folders or s3:// addresses, by commas
    output: Output = free("")  # folder of vectors, malformed.jsonl and summary.json
    field: FieldName = "text"  # field or column that holds the text
    pooling: PoolingChoice = "auto"  # tokens' mean, or the first one's state; auto: as in the model's run
    # layers whose states are averaged first: 12, 9-12 or 1,12, 0 for the embeddings; empty: the last
    layers: Annotated[str, AfterValidator(_check_layers)] = ""
    normalize: bool = False  # vectors of length 1, whose products are cosines
    # tokens of a text at most; a model with shorter rows cuts earlier
    max_length: Annotated[int, Field(ge=3, le=MANY)] = 512
    # longer texts: cut, or read in windows, whose mean is the text's vector
    long_texts: LongTexts = later("cut")
    format: Literal["parquet", "npy"] = "parquet"  # predictions/*.parquet; or vectors.npy, with its rows in ids.jsonl
    block_rows: Size = 2048  # rows of a block; a block is written whole, or repeated after a stop
    batch_size: Size = 64  # texts of a forward pass
    strict: bool = free(False)  # the first malformed row is an error; else malformed.jsonl lists all
    dry_run: bool = free(False)  # check everything, count the rows, start nothing
    scale: InferenceScaleConfig = dataclasses.field(default_factory=InferenceScaleConfig)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The layers, in the order that they were given in."""
        return _read_layers(self.layers)

    def check_layers(self, number: int) -> None:
        """Refuse layers above those that the model has."""
        if max(self.layer_numbers, default=0) > number:
            raise ConfigError(f"--layers is {self.layers!r}; {self.model!r} has {number} layers.")
