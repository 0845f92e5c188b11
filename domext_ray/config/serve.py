"""The configuration of serving: a bank or one model, how its rows become batches, and what a client may ask for.

As in config.py, nothing here reads a file, and `config.parse_config` makes it from YAML and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from domext_ray.options.fields import MANY, UseGpu, check_place, check_use_gpu, require, require_at_most

MOST_SECONDS = 86_400.0


@dataclass(frozen=True)
class BatchConfig:
    """How rows of different requests, and of different adapters, become one pass."""

    rows: int = 64  # rows that are taken from the queue together
    tokens: int = 0  # tokens of a pass, padding counted; 0: 1,024 on a CPU, 16,384 on a GPU
    wait_ms: float = 3.0  # milliseconds that a row waits for others when nothing runs

    def __post_init__(self) -> None:
        require(self.rows >= 1, "rows", self.rows, "1 or more")
        require(self.tokens >= 0, "tokens", self.tokens, "0 or more")
        require(0.0 <= self.wait_ms <= 10_000.0, "wait_ms", self.wait_ms, "from 0 to 10,000")
        require_at_most(self, "", rows=MANY, tokens=64 * MANY)

    def count_tokens(self, *, on_gpu: bool) -> int:
        """Return the tokens of a pass: on a CPU more of them leave its caches, and take longer each."""
        return self.tokens or (16_384 if on_gpu else 1024)


@dataclass(frozen=True)
class LimitConfig:
    """What a client may ask for; more is refused with status 413, 422 or 429."""

    bytes: int = 2**20  # bytes of a request
    texts: int = 64  # texts of a request
    characters: int = 20_000  # characters of a text
    queue: int = 1024  # rows that wait or run; further requests get status 429
    rate: float = 0.0  # requests per second of one client address, in bursts of two seconds; 0: any number
    seconds: float = 60.0  # a request that has no answer by then gets status 503

    def __post_init__(self) -> None:
        for name in ("bytes", "texts", "characters", "queue"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.queue >= self.texts, "queue", self.queue, f"at least the texts of a request ({self.texts})")
        require(self.rate == 0.0 or 0.01 <= self.rate <= MANY, "rate", self.rate, "0, or 0.01 or more")
        require(0.1 <= self.seconds <= MOST_SECONDS, "seconds", self.seconds, "from 0.1 to 86,400")
        require_at_most(self, "", bytes=1024 * MANY, texts=MANY, characters=1024 * MANY, queue=16 * MANY)


@dataclass(frozen=True)
class ServeScaleConfig:
    """What a replica uses."""

    use_gpu: UseGpu = "auto"  # true: one GPU per replica; auto: if there are as many
    threads: int = 1  # CPU threads of a replica, which it also reserves

    def __post_init__(self) -> None:
        check_use_gpu(self.use_gpu)
        require(1 <= self.threads <= 1024, "threads", self.threads, "from 1 to 1,024")


@dataclass(frozen=True)
class ServeConfig:
    """What is served, where, and to whom."""

    bank: str = ""  # a bank's folder (domext bank)
    adapters: str = ""  # names of the bank's adapters to begin with, by commas; empty: all of them
    model: str = ""  # instead of a bank: a run, also a fine-tuned one, an export, a base's folder, or a hub id
    base: str = ""  # where the bank's base is, if it has moved
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: every network of this machine
    port: int = 8000  # port to listen on
    token_file: str = ""  # file with the token that requests show; empty: DOMEXT_SERVE_TOKEN, or a new one
    replicas: int = 1  # copies of the model, each with a process of its own
    max_length: int = 0  # tokens of a row; 0: as many as the model takes, up to 512
    drain_seconds: float = 60.0  # at the end: how long requests that are there may take
    dry_run: bool = False  # validate, print what would be served, start nothing
    batch: BatchConfig = field(default_factory=BatchConfig)
    limit: LimitConfig = field(default_factory=LimitConfig)
    scale: ServeScaleConfig = field(default_factory=ServeScaleConfig)

    def __post_init__(self) -> None:
        require(bool(self.bank.strip()) != bool(self.model.strip()), "bank", self.bank, "given, or else --model")
        check_place("bank", self.bank)
        check_place("model", self.model, "a hub id, or a folder")
        check_place("base", self.base, "a hub id, or a folder")
        check_place("token_file", self.token_file, "a file")
        require(bool(self.bank) or not self.adapters, "adapters", self.adapters, "left out without --bank")
        require(bool(self.bank) or not self.base, "base", self.base, "left out without --bank")
        names = self.adapter_names
        rule = "different names with one comma between them"
        require(all(each.isidentifier() for each in names), "adapters", self.adapters, rule)
        require(len(set(names)) == len(names), "adapters", self.adapters, rule)
        require(bool(self.host.strip()), "host", self.host, "an address, such as 127.0.0.1")
        require(1 <= self.port <= 65_535, "port", self.port, "from 1 to 65,535")
        require(1 <= self.replicas <= 4096, "replicas", self.replicas, "from 1 to 4,096")
        require(self.max_length == 0 or 8 <= self.max_length <= MANY, "max_length", self.max_length, "0, or 8 or more")
        require(0.0 <= self.drain_seconds <= MOST_SECONDS, "drain_seconds", self.drain_seconds, "from 0 to 86,400")

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """What --adapters names; empty: all of the bank."""
        return tuple(each.strip() for each in self.adapters.split(",")) if self.adapters.strip() else ()
