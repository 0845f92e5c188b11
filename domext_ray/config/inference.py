"""The configurations of jobs that put a model to work: prediction, and what its workers get.

Nothing here reads a file; `presets.configure` makes them from YAML and flags.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from domext_ray.config.options.declare import (
    MANY,
    Count,
    CountOrZero,
    Described,
    Found,
    Texts,
    Written,
    filled,
    free,
    later,
    option_group,
    place,
    require,
)
from domext_ray.config.shared import GpuOptions, LongTextsChoice
from domext_ray.errors import ConfigError

_MODEL = "a run's directory, an export, BANK:NAME or a base"
Model = Found[Annotated[str, filled(_MODEL), place("a hub id, BANK:NAME, or a folder")]]
InputFiles = Texts[Annotated[str, filled("files, globs, folders or s3:// addresses, by commas")]]
Output = Written[Annotated[str, filled("a folder, such as predictions/notes"), place()]]
FieldName = Annotated[str, filled("the name of a field or column")]
Size = Count

FILL_MASK = "fill_mask"
"""The task of a model that was pre-trained and not fine-tuned."""


@option_group
class InferenceScaleConfig(GpuOptions):
    """Workers and the resources of each; every worker holds the model once."""

    workers: CountOrZero = free(0)  # actors that predict; 0: one per CPU or, with --scale.use_gpu, per GPU
    # CPUs of a worker (Ray's share and torch's threads); 0: 1
    cpus: Annotated[float, Field(ge=0.0, le=MANY)] = free(0.0)


@option_group
class PredictConfig:
    """Which model predicts for which rows, and where the predictions go."""

    model: Model = "general-mini"  # a run's directory, an export, BANK:NAME, a base's folder, or a hub id
    task: Described[str] = ""  # empty: the model's own; fill_mask; or a described set, which is scored
    input: Texts[str] = ""  # text, JSONL, CSV or Parquet files, globs, folders or s3:// addresses, by commas
    output: Output = free("")  # folder of predictions/, malformed.jsonl and summary.json
    field: FieldName = "text"  # field or column that holds the text
    # file to make for a benchmark's server from its test file, such as QNLI.tsv or CMeEE_test.json
    submission: str = ""
    split: Literal["train", "dev", "test"] = "test"  # with a described set: train, dev or test
    format: Literal["parquet", "jsonl"] = "parquet"  # format of the files in predictions/
    keep_text: bool = False  # also write the texts next to their predictions
    top_k: Size = 5  # fill_mask: predicted tokens per mask
    # texts with a class or a number that are longer than a row: cut, or read in windows; auto: as in training
    long_texts: LongTextsChoice = later("auto")
    router: bool = True  # fill_mask: the model's router, if it has one, chooses adapter or base for each row
    max_length: CountOrZero = 0  # fill_mask: tokens of a row; 0: the model's longest row, up to 512
    block_rows: Size = 1024  # rows of a block; a block is written whole, or repeated after a stop
    batch_tokens: CountOrZero = 0  # tokens of a forward pass, with padding; 0: 2,048 on a CPU, 32,768 on a GPU
    strict: bool = free(False)  # the first malformed row is an error; else malformed.jsonl lists all
    dry_run: bool = free(False)  # check everything, count the rows, start nothing
    scale: InferenceScaleConfig = dataclasses.field(default_factory=InferenceScaleConfig)

    def __post_init__(self) -> None:
        is_named = bool(self.input.strip()) or self.task not in ("", FILL_MASK)  # a labelled set may ship
        require(is_named, "input", self.input, "files, globs, folders or s3:// addresses, by commas")

    def count_batch_tokens(self, device: str) -> int:
        """Return the tokens of a forward pass on a kind of device: a CPU's caches like small batches."""
        return self.batch_tokens or (2048 if device == "cpu" else 32_768)

    def check_length(self, longest: int) -> None:
        """Refuse rows that are longer than those of the model."""
        if self.max_length > longest:
            raise ConfigError(f"--max_length is {self.max_length}; {self.model!r} takes rows of up to {longest}.")
