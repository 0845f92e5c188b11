"""The configurations of jobs that put a model to work: prediction, and what its workers get.

As in config.py, nothing here reads a file, and `config.parse_config` makes them from YAML and flags.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from domext_ray.options.fields import (
    MANY,
    UseGpu,
    check_place,
    check_use_gpu,
    free,
    is_gpu_used,
    require,
    require_at_most,
    require_one_of,
)

FILL_MASK = "fill_mask"
"""The task of a model that was pre-trained and not fine-tuned."""


@dataclass(frozen=True)
class InferenceScaleConfig:
    """Workers and what each of them gets; every worker holds the model once."""

    workers: int = free(0)  # actors that predict; 0: as many as there are CPUs or, with --scale.use_gpu, GPUs
    cpus: float = free(0.0)  # CPUs of a worker (Ray's share and torch's threads); 0: 1
    use_gpu: UseGpu = free("auto")  # one GPU per worker; auto: where there is a GPU

    def __post_init__(self) -> None:
        require(self.workers >= 0, "scale.workers", self.workers, "0 (as many as fit) or more")
        require(self.cpus >= 0.0, "scale.cpus", self.cpus, "0 (one) or more")
        require_at_most(self, "scale.", workers=MANY, cpus=MANY)
        check_use_gpu(self.use_gpu)

    @property
    def uses_gpu(self) -> bool:
        """Whether each worker has a GPU; `auto` has been settled (`cluster.settle_gpu`)."""
        return is_gpu_used(self.use_gpu)


def check_input(spec: str) -> None:
    """Raise OptionError unless `--input` names something."""
    require(bool(spec.strip()), "input", spec, "files, globs, folders or s3:// addresses, by commas")


def check_output(folder: str, example: str) -> None:
    """Raise OptionError unless `--output` names a folder."""
    require(bool(folder.strip()), "output", folder, f"a folder, such as {example}")
    check_place("output", folder)


@dataclass(frozen=True)
class PredictConfig:
    """What a model predicts, of which rows, and where the predictions go."""

    model: str = "general-mini"  # a run's directory, an export, BANK:NAME, a base's folder, or a hub id
    task: str = ""  # empty: the model's own; fill_mask; or a described set, whose folder is --input, to be scored
    input: str = ""  # text, JSONL, CSV or Parquet files, globs, folders or s3:// addresses, by commas
    output: str = free("")  # folder of predictions/, malformed.jsonl and summary.json
    field: str = "text"  # field or column that holds the text
    split: str = "test"  # with a described set: train, dev or test
    format: Literal["parquet", "jsonl"] = "parquet"  # of the files in predictions/
    keep_text: bool = False  # write the texts beside their predictions, too
    top_k: int = 5  # fill_mask: tokens in the place of each mask
    max_length: int = 0  # fill_mask: tokens of a row; 0: as many as the model takes, up to 512
    block_rows: int = 1024  # rows of a block, the unit that is written, and done again after a stop
    batch_tokens: int = 0  # tokens of a forward pass, padding counted; 0: 2,048 on a CPU, 32,768 on a GPU
    strict: bool = free(False)  # the first malformed row is an error; else they are listed in malformed.jsonl
    dry_run: bool = free(False)  # validate, count the rows, start nothing
    scale: InferenceScaleConfig = dataclasses.field(default_factory=InferenceScaleConfig)

    def __post_init__(self) -> None:
        require(bool(self.model.strip()), "model", self.model, "a run's directory, an export, BANK:NAME or a base")
        check_place("model", self.model, "a hub id, BANK:NAME, or a folder")
        if self.task in ("", FILL_MASK):  # a labelled set may ship
            check_input(self.input)
        check_output(self.output, "predictions/notes")
        require(bool(self.field.strip()), "field", self.field, "the name of a field or column")
        require_one_of(self.split, "split", ("train", "dev", "test"))
        require_one_of(self.format, "format", ("parquet", "jsonl"))
        for name, least in (("top_k", 1), ("max_length", 0), ("block_rows", 1), ("batch_tokens", 0)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        require_at_most(self, "", top_k=MANY, max_length=MANY, block_rows=MANY, batch_tokens=64 * MANY)

    def count_batch_tokens(self, device: str) -> int:
        """Return the tokens of a forward pass on a kind of device: a CPU's caches like small batches."""
        return self.batch_tokens or (2048 if device == "cpu" else 32_768)
