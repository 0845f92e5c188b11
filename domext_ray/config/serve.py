"""The configuration of serving: a bank or one model, how its rows become batches, and what a client may ask for.

Nothing here reads a file; `presets.configure` makes it from YAML and flags.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from domext_ray.config.options.declare import (
    DIFFERENT,
    MANY,
    Count,
    CountOrZero,
    FilePlace,
    Found,
    Identifier,
    ModelPlace,
    filled,
    option_group,
    place,
    require,
)
from domext_ray.config.shared import GpuOptions

MOST_SECONDS = 86_400.0


@option_group
class BatchConfig:
    """How rows of several requests and adapters form one pass."""

    rows: Count = 64  # rows that are taken from the queue together
    tokens: CountOrZero = 0  # tokens of a pass, with padding; 0: 1,024 on a CPU, 16,384 on a GPU
    # milliseconds that a row waits for others while nothing runs
    wait_ms: Annotated[float, Field(ge=0.0, le=10_000.0)] = 3.0

    def count_tokens(self, *, on_gpu: bool) -> int:
        """Return the tokens of a pass: on a CPU more of them leave its caches, and take longer each."""
        return self.tokens or (16_384 if on_gpu else 1024)


@option_group
class LimitConfig:
    """Limits for clients; requests above them are refused with status 413, 422 or 429."""

    bytes: Annotated[int, Field(ge=1, le=1024 * MANY)] = 2**20  # bytes of a request
    texts: Count = 64  # texts of a request
    characters: Annotated[int, Field(ge=1, le=1024 * MANY)] = 20_000  # characters of a text
    queue: Count = 1024  # rows that wait or run; further requests get status 429
    # seconds until an answer; after that a request gets status 503
    seconds: Annotated[float, Field(ge=0.1, le=MOST_SECONDS)] = 60.0

    def __post_init__(self) -> None:
        require(self.queue >= self.texts, "queue", self.queue, f"at least --limit.texts ({self.texts})")


@option_group
class ServeScaleConfig(GpuOptions):
    """Resources of a replica."""

    threads: Annotated[int, Field(ge=1, le=1024)] = 1  # CPU threads of a replica, which it also reserves


@option_group
class ServeConfig:
    """What to serve, where, and to whom."""

    bank: Found[Annotated[str, place(buckets=True)]] = ""  # a bank's folder (domext bank)
    # names of the bank's adapters to serve; empty: all, also those added later
    adapters: Annotated[tuple[Identifier, ...], DIFFERENT] = ()
    model: ModelPlace = ""  # a run, also a fine-tuned one, an export, a base's folder, or a hub id; instead of a bank
    base: ModelPlace = ""  # the bank's base (a folder or a hub id), if it has moved
    # address to listen on; 0.0.0.0: every network of this machine
    host: Annotated[str, filled("an address, such as 127.0.0.1")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000  # port to listen on
    token_file: Found[FilePlace] = ""  # a file with the token of requests; empty: DOMEXT_SERVE_TOKEN, or a new one
    replicas: Annotated[int, Field(ge=1, le=4096)] = 1  # copies of the model, each in a separate process
    max_length: CountOrZero = 0  # tokens of a row; 0: the model's longest row, up to 512
    # seconds that open requests may take when the server ends
    drain_seconds: Annotated[float, Field(ge=0.0, le=MOST_SECONDS)] = 60.0
    dry_run: bool = False  # check everything, print what would be served, start nothing
    batch: BatchConfig = field(default_factory=BatchConfig)
    limit: LimitConfig = field(default_factory=LimitConfig)
    scale: ServeScaleConfig = field(default_factory=ServeScaleConfig)

    def __post_init__(self) -> None:
        require(bool(self.bank.strip()) != bool(self.model.strip()), "bank", self.bank, "given, or else --model")
        require(bool(self.bank) or not self.adapters, "adapters", self.adapters, "left out without --bank")
        require(bool(self.bank) or not self.base, "base", self.base, "left out without --bank")
        require(self.max_length == 0 or self.max_length >= 8, "max_length", self.max_length, "0, or 8 or more")
