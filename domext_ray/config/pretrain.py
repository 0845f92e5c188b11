"""The configuration: frozen dataclasses <- a preset <- a YAML file <- dotted command-line flags.

A field is *identity* (two runs that differ in it are different runs and may not share a directory) or *free* (it
may change when a run is resumed). Fields are identity unless declared with `free(...)`. Nothing here reads a file
except the YAML that the user names.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml

from domext_ray.config.option_values import Settings, build, list_settings, read_file, read_flags
from domext_ray.config.option_values import (
    merge_options as merge_options,  # beside to_dict and from_dict, with which it is used
)
from domext_ray.errors import OptionError

MAX_LANES = 64
"""Most lanes that a global batch is cut into; hence also the most workers of a run (see corpus/stream.py)."""


def free(default: Any) -> Any:
    """Declare a field that may differ between the attempts of one run."""
    return field(default=default, metadata={"free": True})


def added(default: Any, before: Any = dataclasses.MISSING) -> Any:
    """Declare an identity field that came after the first runs were made; hashes of older options stay as they are.

    Args:
        default: the default of new runs.
        before: what the older runs did, which do not name it; left out: the default.
    """
    return field(default=default, metadata={"before": default if before is dataclasses.MISSING else before})


def whole(default_factory: Callable[[], Any], by: Literal["file", "any"] = "any") -> Any:
    """Declare a field whose content a file, or any later place, replaces whole instead of option by option."""
    return field(default_factory=default_factory, metadata={"whole": by})


def require(condition: bool, option: str, value: object, rule: str) -> None:
    """Raise OptionError, which names the option, its value and the rule, unless the condition holds."""
    if not condition:
        raise OptionError(option, value, rule)


def require_one_of(value: str | int, option: str, allowed: Sequence[str | int]) -> None:
    """Raise OptionError unless an option's value is one of those allowed."""
    require(value in allowed, option, value, "one of " + ", ".join(str(each) for each in allowed))


MANY = 2**20
"""More than any machine has of what a bound speaks of: a slip of the finger, told before memory is asked for it."""


def require_at_most(config: object, section: str, **limits: float) -> None:
    """Raise OptionError unless fields of a section are at most what is given by their names."""
    for name, limit in limits.items():
        require(getattr(config, name) <= limit, f"{section}{name}", getattr(config, name), f"at most {limit:,}")


MAX_NAME_BYTES = 200
"""Longest name of a folder that jobs make: file systems end at 255, and jobs add endings."""


def check_folder_name(option: str, name: str) -> None:
    """Raise OptionError unless a name can be a folder's: of a run, or of a method, which names its run."""
    require(name.strip() == name != "", option, name, "a name without spaces at its ends")
    require("/" not in name and name not in (".", ".."), option, name, "a plain folder name, without a path")
    require(name[0] not in ".-", option, name, "a name that begins with neither a dot nor a dash")
    require(name.isprintable(), option, name, "a name of one line, without control characters")
    is_short = len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES
    require(is_short, option, name, f"at most {MAX_NAME_BYTES} bytes long")


def check_place(option: str, path: str, what: str = "a folder") -> None:
    """Raise OptionError unless a path is one of a file system: runs are made, locked and renamed there.

    Args:
        option: the option.
        path: its value; empty: left out.
        what: what it names.
    """
    scheme, mark, rest = path.partition(":/")
    is_address = mark and re.fullmatch("[A-Za-z][A-Za-z0-9+.-]*", scheme)
    rule = f"{what} on a file system that all nodes have (mount the storage, and give the folder where it is mounted)"
    if is_address and scheme.lower() == "file":
        rule = f"{what} as a plain path, such as /{rest.lstrip('/')}"
    require(not is_address, option, path, rule)
    require("\0" not in path, option, path, "a path without NUL characters")
    parts = path.encode("utf-8", "surrogateescape").split(b"/")
    is_short = max(map(len, parts)) <= 255 and len(path) <= 4000
    require(is_short, option, path, "a path that file systems take: parts of at most 255 bytes")
    is_known = not path.startswith("~") or not os.path.expanduser(path).startswith("~")
    require(is_known, option, path, "a path that begins with ~ or with the name of a user of this machine")


UseGpu = bool | Literal["auto"]
"""A GPU for each worker, or not; auto until it is known how many GPUs there are."""


def check_use_gpu(value: UseGpu) -> None:
    """Raise ConfigError unless `--scale.use_gpu` is one of its three values."""
    require(value in (True, False, "auto"), "scale.use_gpu", value, "auto, true or false")


def is_gpu_used(value: UseGpu) -> bool:
    """Return `--scale.use_gpu` once it is known."""
    if value == "auto":
        raise ValueError("--scale.use_gpu auto is not settled yet")
    return value


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives."""

    name: str = free("")  # name of the run; empty: the method's name
    dir: str = free("runs")  # folder of all runs; the run itself is DIR/NAME
    keep_checkpoints: int = free(2)  # newest checkpoints kept
    tensorboard: bool = free(True)  # also write TensorBoard events

    def __post_init__(self) -> None:
        require(self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "1 or more")
        if self.name:
            check_folder_name("run.name", self.name)
        require(bool(self.dir.strip()), "run.dir", self.dir, "a folder")
        check_place("run.dir", self.dir)


HeldOutBy = Literal["auto", "document", "block", "file"]


@dataclass(frozen=True)
class PrepareConfig:
    """How text becomes rows of tokens."""

    document: Literal["line", "blank_line", "file"] = "line"  # what one document of a text file is
    field: str = "text"  # JSONL field, Parquet column or datasets column that holds the text
    held_out_frac: float = 0.02  # share of documents kept for evaluation
    held_out_by: HeldOutBy = free("auto")  # single documents, blocks of neighbours or files; auto: blocks of text lines
    min_document_chars: int = 20  # shorter documents are dropped and counted
    max_document_chars: int = 1_000_000  # longer documents are cut into documents of this many characters
    cross_documents: bool = True  # rows may join sentences of neighbouring documents, [SEP] between them
    chinese_words: bool = True  # find words of Han text with jieba (whole-word masking); off: one word a character
    shard_bytes: int = 8 * 2**20  # source bytes of one reading task, which makes one shard
    max_dropped_frac: float = free(0.5)  # share of rows without text (null, no such field, not UTF-8) that is refused
    cache_dir: str = free("")  # where prepared corpora are kept; empty: RUN.DIR/.corpora

    def __post_init__(self) -> None:
        require_one_of(self.document, "prepare.document", ("line", "blank_line", "file"))
        require(0.0 < self.held_out_frac < 0.5, "prepare.held_out_frac", self.held_out_frac, "between 0 and 0.5")
        require_one_of(self.held_out_by, "prepare.held_out_by", get_args(HeldOutBy))
        require(0.0 <= self.max_dropped_frac <= 1.0, "prepare.max_dropped_frac", self.max_dropped_frac, "from 0 to 1")
        require(self.min_document_chars >= 1, "prepare.min_document_chars", self.min_document_chars, "1 or more")
        require(
            self.max_document_chars >= self.min_document_chars,
            "prepare.max_document_chars",
            self.max_document_chars,
            "at least --prepare.min_document_chars",
        )
        require(self.shard_bytes >= 1024, "prepare.shard_bytes", self.shard_bytes, "1024 or more")
        check_place("prepare.cache_dir", self.cache_dir)


@dataclass(frozen=True)
class VocabConfig:
    """WordPieces that are learned on the corpus: new words beside a base's, or, with `--base none`, all of them."""

    size: int = 0  # entries to learn: new words beside the base's (0: none), or the whole vocabulary with --base none
    lowercase: bool = True  # a vocabulary learned with --base none is uncased (a base keeps its own rule)
    min_frequency: int = 5  # new words must occur this often in the corpus
    whole_words: bool = False  # new entries are whole words only, no pieces of words
    protected: str = ""  # file of words, one a line, that get an entry whatever their frequency
    words: str = ""  # new words of one's own: a file, one a line, or a folder that jobs/build_vocab.py made
    extend: str = ""  # folder of an earlier extension vocabulary, whose words and ids come first

    def __post_init__(self) -> None:
        require(self.size >= 0, "vocab.size", self.size, "0 or more")
        require_at_most(self, "vocab.", size=16 * MANY)
        require(self.min_frequency >= 1, "vocab.min_frequency", self.min_frequency, "1 or more")
        require(not (self.size and self.words), "vocab.size", self.size, "0 when --vocab.words brings the words")
        for name in ("protected", "words", "extend"):
            check_place(f"vocab.{name}", getattr(self, name), "a file or folder")

    @property
    def extends_base(self) -> bool:
        """Whether a base gets new words."""
        return bool(self.size or self.words)


@dataclass(frozen=True)
class ShapeConfig:
    """The encoder that is made when there is no base (`--base none`)."""

    num_hidden_layers: int = 4  # layers
    hidden_size: int = 256  # width d
    num_attention_heads: int = 4  # heads h; d must be divisible by it
    intermediate_size: int = 1024  # FFN units
    max_position_embeddings: int = 512  # longest row
    position_init: Literal["sinusoidal", "normal"] = "sinusoidal"  # start of the learned position table

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if each.type == "int":
                require(getattr(self, each.name) >= 1, f"shape.{each.name}", getattr(self, each.name), "1 or more")
        require_at_most(self, "shape.", num_hidden_layers=1000, hidden_size=MANY, intermediate_size=MANY)
        require_at_most(self, "shape.", max_position_embeddings=MANY)
        require_one_of(self.position_init, "shape.position_init", ("sinusoidal", "normal"))
        require(
            self.hidden_size % self.num_attention_heads == 0,
            "shape.hidden_size",
            self.hidden_size,
            f"divisible by --shape.num_attention_heads ({self.num_attention_heads})",
        )


TRAINS = ("extensions", "domain", "all", "top_layers", "layer_norms", "biases")
LORA_TARGETS = ("query", "key", "value", "attention_output", "intermediate", "output")


@dataclass(frozen=True)
class MethodConfig:
    """Which extensions the model carries and which parameters train.

    trains: extensions: what the method adds, beside a frozen base; domain: of that, the parts of `domain` only; all:
    every parameter; top_layers: the last `top_layers` layers; layer_norms, biases: those of the whole encoder.
    """

    name: str = "af"  # what the method is called: names the run, unless --run.name does
    trains: Literal["extensions", "domain", "all", "top_layers", "layer_norms", "biases"] = (
        "extensions"  # what trains; extensions and domain: beside a frozen base
    )
    top_layers: int = 0  # layers that train with --method.trains top_layers
    domain: str = "domain"  # name of the domain that heads, FFN units and bottlenecks belong to
    layers: str = ""  # layers that have these, counted from 0, such as 6-11; empty: all
    heads: int = 1  # extra attention heads a layer (AF Adapter's i)
    ffn_units: int = 1024  # extra FFN units a layer (AF Adapter's a)
    bottleneck_size: int = 0  # width m of two bottlenecks a layer (Houlsby: 64); 0: none
    bottleneck_norms: bool = True  # bottlenecks shift their sublayers' LayerNorms (the base's own stay as they are)
    bottleneck_std: float = 0.01  # standard deviation of bottlenecks' weights with --method.init paper
    bottleneck_activation: Literal["gelu", "relu", "tanh"] = "gelu"  # between a bottleneck's two matrices
    bottleneck_layer_norm: bool = False  # a bottleneck normalises what it reads, with a LayerNorm of its own
    bottleneck_place: Literal["both", "attention", "output"] = "both"  # sublayers that have one; output: the FFN
    bottleneck_parallel: bool = False  # a bottleneck reads its sublayer's input instead of its output
    init: Literal["zero", "paper"] = "zero"  # the domain's start; zero: step 0 is the base; paper: the papers' own
    module_hidden_size: int = 0  # width h' of a gated extension module beside each layer (exBERT: 252); 0: no modules
    module_ffn_size: int = 0  # FFN units f' of such a module (exBERT: 1024)
    gate_bias: float = 2.0  # start of the gates' bias; the base's share starts near sigmoid(gate_bias), 0 in the paper
    word_init: Literal["random", "subword_mean"] = "random"  # new words' embeddings; or the mean of the base's pieces
    lora_rank: int = 0  # rank of LoRA's updates of the base's matrices (peft); 0: none
    lora_alpha: int = 0  # LoRA's scale times its rank; 0: twice the rank
    lora_targets: str = "query,value"  # of query,key,value,attention_output,intermediate,output
    active_domains: str = ""  # domains that take part, separated by commas; empty: all, those of --init_from too
    trainable_budget: float = (
        0.0  # trainable share of base and extension, from which sizes are solved; 0: sizes as given
    )
    train_heads: bool = False  # the base's pooler and MLM and NSP heads train too (as in exBERT's public code)

    def __post_init__(self) -> None:
        check_folder_name("method.name", self.name)
        require_one_of(self.trains, "method.trains", TRAINS)
        require_one_of(self.init, "method.init", ("zero", "paper"))
        require_one_of(self.word_init, "method.word_init", ("random", "subword_mean"))
        for name in ("heads", "ffn_units", "bottleneck_size", "module_hidden_size", "lora_rank", "lora_alpha"):
            require(getattr(self, name) >= 0, f"method.{name}", getattr(self, name), "0 or more")
        require_at_most(self, "method.", heads=1000, ffn_units=MANY, bottleneck_size=MANY, module_hidden_size=MANY)
        require_at_most(self, "method.", module_ffn_size=MANY, lora_rank=MANY, lora_alpha=MANY)
        require(abs(self.gate_bias) <= 100.0, "method.gate_bias", self.gate_bias, "from -100 to 100")
        require(self.domain.isidentifier(), "method.domain", self.domain, "letters, digits and underscores")
        require(
            (self.module_ffn_size > 0) == (self.module_hidden_size > 0) and self.module_ffn_size >= 0,
            "method.module_ffn_size",
            self.module_ffn_size,
            f"{'above 0' if self.module_hidden_size else '0'} when --method.module_hidden_size is "
            f"{self.module_hidden_size}",
        )
        self._check_bottlenecks()
        require(
            0.0 <= self.trainable_budget < 1.0, "method.trainable_budget", self.trainable_budget, "from 0 to below 1"
        )
        for target in self.lora_target_names:
            require_one_of(target, "method.lora_targets", LORA_TARGETS)
        for name in self.active_domain_names:
            require(name.isidentifier(), "method.active_domains", self.active_domains, "names separated by commas")
        require(
            not self.active_domains or not self.has_domain or self.domain in self.active_domain_names,
            "method.active_domains",
            self.active_domains,
            f"a list that has {self.domain!r}, which trains",
        )
        if self.layers:
            _parse_layers(self.layers)
        self._check_what_trains()

    def _check_bottlenecks(self) -> None:
        require(0.0 < self.bottleneck_std <= 1.0, "method.bottleneck_std", self.bottleneck_std, "above 0, at most 1")
        require_one_of(self.bottleneck_activation, "method.bottleneck_activation", ("gelu", "relu", "tanh"))
        require_one_of(self.bottleneck_place, "method.bottleneck_place", ("both", "attention", "output"))
        for name in ("activation", "layer_norm", "place", "parallel"):
            option, value = f"bottleneck_{name}", getattr(self, f"bottleneck_{name}")
            plain = getattr(MethodConfig, option)
            rule = f"{str(plain).lower()} without bottlenecks (--method.bottleneck_size 0)"
            require(self.bottleneck_size > 0 or value == plain, f"method.{option}", value, rule)

    def _check_what_trains(self) -> None:
        """Refuse parts that clash: an extension that would not train, and LoRA of matrices that train themselves."""
        require(
            (self.top_layers > 0) == (self.trains == "top_layers") and self.top_layers >= 0,
            "method.top_layers",
            self.top_layers,
            "above 0 with --method.trains top_layers"
            if self.trains == "top_layers"
            else "0, or --method.trains top_layers",
        )
        adds = self.has_domain or self.module_hidden_size > 0
        require(
            self.trains in ("extensions", "domain", "all") or not adds,
            "method.trains",
            self.trains,
            "extensions, domain or all when there are heads, FFN units, bottlenecks or modules",
        )
        require(
            self.trains == "extensions" or not self.lora_rank,
            "method.trains",
            self.trains,
            f"extensions with --method.lora_rank {self.lora_rank}",
        )
        require(
            self.trains != "domain" or self.has_domain,
            "method.trains",
            self.trains,
            "extensions when there is no domain; or give one (--method.heads, ffn_units or bottleneck_size)",
        )
        require(
            not self.trainable_budget or self.is_sized,
            "method.trainable_budget",
            self.trainable_budget,
            "0 for a method that has no size to solve (give --method.ffn_units, bottleneck_size, module_hidden_size or "
            "lora_rank a start, and --method.trains extensions or domain)",
        )

    @property
    def has_domain(self) -> bool:
        """Whether layers get extra heads, FFN units or bottlenecks."""
        return self.heads + self.ffn_units + self.bottleneck_size > 0

    @property
    def is_sized(self) -> bool:
        """Whether the method has a size from which the number of its trainable parameters follows."""
        parts = self.ffn_units + self.bottleneck_size + self.module_hidden_size + self.lora_rank
        return self.trains in ("extensions", "domain") and parts > 0

    @property
    def layer_range(self) -> tuple[int, int] | None:
        """First and last layer of the domain; None: all."""
        return _parse_layers(self.layers) if self.layers else None

    @property
    def lora_target_names(self) -> tuple[str, ...]:
        """Matrices that LoRA updates."""
        return tuple(each.strip() for each in self.lora_targets.split(","))

    @property
    def active_domain_names(self) -> tuple[str, ...]:
        """Domains that take part; empty: all."""
        return tuple(each.strip() for each in self.active_domains.split(",")) if self.active_domains else ()


def _parse_layers(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    last = last or first
    is_range = first.strip().isdigit() and last.strip().isdigit() and int(first) <= int(last)
    require(is_range, "method.layers", text, "a layer, or the first and the last one, such as 6-11")
    return int(first), int(last)


_SIZES = ("heads", "ffn_units", "bottleneck_size", "module_hidden_size", "lora_rank")
_ADDS = ("extensions", "domain", "all")


@dataclass(frozen=True)
class KnownMethod:
    """What a method of a known name is made of.

    Args:
        sizes: fields of `MethodConfig`, one of which is above 0; all others are 0.
        trains: what may train.
        is_words: new words alone are such a method too.
    """

    sizes: tuple[str, ...] = ()
    trains: tuple[str, ...] = _ADDS
    is_words: bool = False

    def fits(self, method: MethodConfig, has_words: bool) -> bool:
        """Whether a method, with new words or without, is one of this name."""
        given = {name for name in _SIZES if getattr(method, name)}
        has_part = bool(given) or not self.sizes or (self.is_words and has_words)
        return method.trains in self.trains and given <= set(self.sizes) and has_part

    def __str__(self) -> str:
        parts = [f"--method.{name} above 0" for name in self.sizes] + (["new words"] if self.is_words else [])
        trains = "" if self.trains == _ADDS else f"--method.trains {self.trains[0]}"
        return " and ".join(each for each in (" or ".join(parts), trains, "no other size") if each)


_FULL = KnownMethod(trains=("all",))
KNOWN_METHODS = {
    "af": KnownMethod(("heads", "ffn_units")),
    "fl_tuning": KnownMethod(("ffn_units",)),
    "bottleneck": KnownMethod(("bottleneck_size",)),
    "exbert": KnownMethod(("module_hidden_size",), is_words=True),
    "lora": KnownMethod(("lora_rank",), ("extensions",)),
    "bert": _FULL,
    "full": _FULL,
    **{name: KnownMethod(trains=(name,)) for name in ("top_layers", "layer_norms", "biases")},
}
"""The names that say a method; all others are of one's own."""


def list_names(method: MethodConfig, has_words: bool) -> list[str]:
    """Return the known names that a method, with new words or without, may be called."""
    return [name for name, known in KNOWN_METHODS.items() if known.fits(method, has_words)]


@dataclass(frozen=True)
class ObjectiveConfig:
    """Masked-language modelling, and next-sentence prediction (BERT section 3.1; AF Adapter masks whole words).

    kind: masked: some tokens are predicted from both sides; left_to_right: every token from those before it, which is
    all that a token attends to (BERT section 5.1, "LTR"), and nothing is masked.
    """

    kind: Literal["masked", "left_to_right"] = "masked"  # left_to_right: each token is predicted from those before it
    mask_prob: float = 0.15  # share of tokens that are predicted
    mask_token_frac: float = 0.8  # of these: replaced by [MASK]
    random_token_frac: float = 0.1  # of these: replaced by a random ordinary token; the rest is kept
    whole_word: bool = True  # all tokens of a word are predicted together
    next_sentence: bool = False  # rows are pairs of text, and half of the second ones come from another document

    def __post_init__(self) -> None:
        require_one_of(self.kind, "objective.kind", ("masked", "left_to_right"))
        require(
            not (self.is_left_to_right and self.next_sentence),
            "objective.next_sentence",
            self.next_sentence,
            "false with --objective.kind left_to_right, where the first token sees nothing of the pair",
        )
        require(0.0 < self.mask_prob < 1.0, "objective.mask_prob", self.mask_prob, "between 0 and 1")
        for name in ("mask_token_frac", "random_token_frac"):
            require(0.0 <= getattr(self, name) <= 1.0, f"objective.{name}", getattr(self, name), "from 0 to 1")
        require(
            self.mask_token_frac + self.random_token_frac <= 1.0 + 1e-9,
            "objective.random_token_frac",
            self.random_token_frac,
            "at most 1 - --objective.mask_token_frac",
        )

    @property
    def is_left_to_right(self) -> bool:
        """Whether every token is predicted from those before it."""
        return self.kind == "left_to_right"


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, on what batches, and how often to look."""

    max_steps: int = free(1000)  # optimiser steps, at most; 0: as many as --train.epochs or --train.max_tokens make
    epochs: float = free(0.0)  # passes over the corpus, at most; 0: no limit
    max_tokens: int = free(0)  # tokens read, at most; 0: no limit
    max_seconds: float = free(0.0)  # seconds spent in training steps, at most; 0: no limit
    global_batch_size: int = 32  # rows of one optimiser step, over all workers
    micro_batch_size: int = free(0)  # rows of one forward pass; 0: the largest divisor of a worker's share up to 32
    seq_length: int = 128  # tokens of a row, [CLS] and [SEP] included
    long_seq_length: int = 0  # tokens of a row in a second phase (BERT: 512); 0: one phase
    long_frac: float = 0.1  # share of --optim.decay_steps that the second phase takes
    long_micro_batch_size: int = free(0)  # rows of a forward pass there; 0: as many tokens as in the first phase
    dropout: float = 0.1  # dropout of hidden states and attention
    checkpoint_every: int = free(200)  # steps between checkpoints (one more at the end)
    eval_every: int = free(200)  # steps between evaluations (also at the start and at the end)
    eval_rows: int = free(400)  # held-out rows of an evaluation, at most
    max_failures: int = free(3)  # worker failures after which the job gives up
    tokens_per_second: float = free(0.0)  # rate that a dry run reckons with; 0: it times a few steps on this machine
    general_probe: str = free("")  # sentences of the forgetting meter, one a line; empty: those that ship

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "checkpoint_every", "eval_every", "eval_rows"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "1 or more")
        is_limited = self.epochs > 0 or self.max_tokens > 0
        rule = "0 or more" if is_limited else "1 or more, or 0 with --train.epochs or --train.max_tokens"
        require(self.max_steps >= (0 if is_limited else 1), "train.max_steps", self.max_steps, rule)
        require(self.micro_batch_size >= 0, "train.micro_batch_size", self.micro_batch_size, "0 (automatic) or more")
        require(self.seq_length >= 8, "train.seq_length", self.seq_length, "8 or more")
        require_at_most(self, "train.", global_batch_size=MANY, seq_length=MANY, long_seq_length=MANY)
        for name in ("epochs", "max_tokens", "max_seconds", "long_micro_batch_size", "tokens_per_second"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        require(
            self.long_seq_length == 0 or self.long_seq_length > self.seq_length,
            "train.long_seq_length",
            self.long_seq_length,
            f"0, or above --train.seq_length ({self.seq_length})",
        )
        require(0.0 < self.long_frac < 1.0, "train.long_frac", self.long_frac, "between 0 and 1")
        require(0.0 <= self.dropout < 1.0, "train.dropout", self.dropout, "from 0 to below 1")
        require(self.max_failures >= 0, "train.max_failures", self.max_failures, "0 or more")
        check_place("train.general_probe", self.general_probe, "a file")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and linear decay to zero."""

    lr: float = 4e-4  # peak learning rate
    warmup_steps: int = 0  # steps from 0 to the peak; 0: one tenth of the horizon, 1,000 at most
    decay_steps: int = 0  # schedule's horizon, the step at which the rate is 0; 0: --train.max_steps of the first start
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    eps: float = 1e-8  # added to the denominator
    weight_decay: float = 0.01  # on matrices; never on biases and LayerNorms
    max_grad_norm: float = 1.0  # gradients are clipped to this global norm; 0: no clipping
    on_non_finite: Literal["stop", "skip"] = free(
        "stop"
    )  # a loss or gradient that is not finite: stop, or skip the step

    def __post_init__(self) -> None:
        require(self.lr > 0.0, "optim.lr", self.lr, "above 0")
        require_at_most(self, "optim.", weight_decay=10, eps=1)
        for name in ("warmup_steps", "decay_steps", "weight_decay", "max_grad_norm"):
            require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "0 or more")
        for name in ("beta1", "beta2"):
            require(0.0 <= getattr(self, name) < 1.0, f"optim.{name}", getattr(self, name), "from 0 to below 1")
        require(self.eps > 0.0, "optim.eps", self.eps, "above 0")
        require_one_of(self.on_non_finite, "optim.on_non_finite", ("stop", "skip"))


@dataclass(frozen=True)
class EngineConfig:
    """DeepSpeed, precision and memory."""

    zero_stage: int = free(0)  # 0: nothing sharded, 1: optimizer state, 2: and gradients, 3: and parameters
    precision: Literal["bf16", "fp32"] = free("bf16")  # bf16: autocast over fp32 trainables
    base_dtype: Literal["auto", "fp32", "bf16"] = free("auto")  # how the frozen base is stored; auto: bf16 on a GPU
    offload: bool = free(False)  # keep optimizer state in CPU memory (ZeRO 1 to 3)
    activation_checkpointing: bool = free(False)  # recompute activations in the backward pass
    compile: bool = free(False)  # torch.compile the model (needs a C++ compiler on CPU)

    def __post_init__(self) -> None:
        require_one_of(self.zero_stage, "engine.zero_stage", (0, 1, 2, 3))
        require_one_of(self.precision, "engine.precision", ("bf16", "fp32"))
        require_one_of(self.base_dtype, "engine.base_dtype", ("auto", "fp32", "bf16"))
        require(
            not (self.base_dtype == "bf16" and self.precision == "fp32"),
            "engine.base_dtype",
            "bf16",
            "fp32 or auto when --engine.precision is fp32",
        )
        # ZeRO-3's hooks, which gather parameters, would break the compiled graph at every module.
        require(not (self.compile and self.zero_stage == 3), "engine.compile", True, "false at --engine.zero_stage 3")
        require(not (self.offload and self.zero_stage == 0), "engine.offload", True, "false at --engine.zero_stage 0")


@dataclass(frozen=True)
class ScaleConfig:
    """Workers and what each of them gets."""

    num_workers: int = free(1)  # training processes (ranks)
    use_gpu: UseGpu = free("auto")  # one GPU per worker; auto: where there are as many GPUs as workers
    cpus_per_worker: float = free(
        0.0
    )  # CPUs of a worker (Ray's share and torch's threads); 0: an even share of the machine

    def __post_init__(self) -> None:
        require(1 <= self.num_workers <= MAX_LANES, "scale.num_workers", self.num_workers, f"from 1 to {MAX_LANES}")
        check_use_gpu(self.use_gpu)
        require(self.cpus_per_worker >= 0.0, "scale.cpus_per_worker", self.cpus_per_worker, "0 or more")

    @property
    def uses_gpu(self) -> bool:
        """Whether each worker has a GPU; `auto` has been settled (`cluster.settle_gpu`)."""
        return is_gpu_used(self.use_gpu)


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that a pre-training run is made from."""

    base: str = "general-mini"  # general-mini (ships with the package), a folder, a hub id, or none (random weights)
    corpus: str = "package-docs"  # package-docs, or comma-separated files, globs, folders, s3:// addresses, hf://NAME
    init_from: str = ""  # directory of a finished run whose parameters this run starts from (exBERT's second stage)
    seed: int = 0  # seed of initialisation, data order, masks and dropout
    dry_run: bool = free(False)  # validate, print the resolved configuration and the counts, start nothing
    run: RunConfig = field(default_factory=RunConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)

    def __post_init__(self) -> None:
        require(bool(self.base.strip()), "base", self.base, "a name, a folder or a hub id")
        check_place("base", self.base, "a hub id, or a folder")
        require(bool(self.corpus.strip()), "corpus", self.corpus, "package-docs, or at least one file or folder")
        require(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2^63 - 1")
        check_place("init_from", self.init_from, "a run's directory")
        if self.base == "none":
            require(self.vocab.size > 0, "vocab.size", self.vocab.size, "set when --base is none, for example 8192")
            require(self.vocab.size >= 64, "vocab.size", self.vocab.size, "64 or more when --base is none")
            for option in ("words", "extend", "protected"):
                value = getattr(self.vocab, option)
                require(not value, f"vocab.{option}", value, "empty when --base is none")
            require(self.method.trains == "all", "method.trains", self.method.trains, "all when --base is none")
            for size in ("heads", "ffn_units", "bottleneck_size"):
                require(
                    not getattr(self.method, size), f"method.{size}", getattr(self.method, size), "0 without a base"
                )
            require(not self.init_from, "init_from", self.init_from, "empty when --base is none")
            longest = max(self.train.seq_length, self.train.long_seq_length)
            require(
                longest <= self.shape.max_position_embeddings,
                "train.seq_length" if longest == self.train.seq_length else "train.long_seq_length",
                longest,
                f"at most --shape.max_position_embeddings ({self.shape.max_position_embeddings})",
            )
        elif self.method.trains == "extensions":
            method = self.method
            require(
                method.has_domain or method.module_hidden_size > 0 or method.lora_rank > 0 or self.vocab.extends_base,
                "method.trains",
                method.trains,
                "all when there is no extension; or give one (--method.heads, --method.ffn_units, "
                "--method.bottleneck_size, --method.module_hidden_size, --method.lora_rank, --vocab.size)",
            )
        elif self.method.trains != "all":
            require(
                self.method.trains == "domain" or not self.vocab.extends_base,
                "method.trains",
                self.method.trains,
                "extensions or all with new words (--vocab.size, --vocab.words), which would not train",
            )
        require(
            not self.optim.decay_steps or self.optim.warmup_steps < self.optim.decay_steps,
            "optim.warmup_steps",
            self.optim.warmup_steps,
            f"below --optim.decay_steps ({self.optim.decay_steps})",
        )
        check_batch(self.train, self.scale)


def check_batch(train: TrainConfig, scale: ScaleConfig) -> None:
    """Refuse batch sizes that workers and micro batches do not divide.

    Raises:
        ConfigError: they do not.
    """
    num_lanes = count_lanes(train.global_batch_size)
    require(
        num_lanes % scale.num_workers == 0,
        "scale.num_workers",
        scale.num_workers,
        f"a divisor of {num_lanes}, the lanes that --train.global_batch_size {train.global_batch_size} makes",
    )
    rows_per_rank = train.global_batch_size // scale.num_workers
    require(
        train.micro_batch_size == 0 or rows_per_rank % train.micro_batch_size == 0,
        "train.micro_batch_size",
        train.micro_batch_size,
        f"a divisor of {rows_per_rank}, a worker's share of --train.global_batch_size "
        f"({train.global_batch_size} rows over {scale.num_workers} workers)",
    )
    require(
        train.long_micro_batch_size == 0 or rows_per_rank % train.long_micro_batch_size == 0,
        "train.long_micro_batch_size",
        train.long_micro_batch_size,
        f"a divisor of {rows_per_rank}, a worker's share of --train.global_batch_size",
    )


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is not above `at_most`."""
    return next(each for each in range(min(number, at_most), 0, -1) if number % each == 0)


def count_lanes(global_batch_size: int) -> int:
    """Return the number of lanes that a global batch takes its rows from; it depends on nothing else."""
    return largest_divisor(global_batch_size, MAX_LANES)


def resolve_micro_batch_size(config: PretrainConfig) -> int:
    """Return the rows of one forward pass on one worker."""
    share = config.train.global_batch_size // config.scale.num_workers
    return config.train.micro_batch_size or largest_divisor(share, 32)


def resolve_long_micro_batch_size(config: PretrainConfig) -> int:
    """Return the rows of one forward pass in the second phase: by default as many tokens as in the first, at most."""
    share = config.train.global_batch_size // config.scale.num_workers
    rows = resolve_micro_batch_size(config) * config.train.seq_length // max(config.train.long_seq_length, 1)
    return config.train.long_micro_batch_size or largest_divisor(share, max(rows, 1))


def resolve_first_long_step(config: PretrainConfig) -> int:
    """Return the first step of the second phase, given a configuration whose `optim.decay_steps` is resolved."""
    return config.optim.decay_steps - round(config.optim.decay_steps * config.train.long_frac)


def resolve_warmup_steps(config: PretrainConfig) -> int:
    """Return the warm-up's length, given a configuration whose `optim.decay_steps` is resolved."""
    return config.optim.warmup_steps or min(1000, config.optim.decay_steps // 10)


ConfigT = TypeVar("ConfigT")


def parse_config(
    config_class: type[ConfigT], default_path: str | None = None, args: Sequence[str] | None = None
) -> ConfigT:
    """Build a configuration from a preset, a YAML file and flags, each standing on the one before.

    Args:
        config_class: the frozen dataclass to build.
        default_path: the preset, a YAML file; the file of `--config_path` changes what it says, option by option.
        args: command line without the program's name; None reads `sys.argv`.

    Raises:
        ConfigError: a file that is missing or no YAML, an unknown option, or a value outside its rule.
    """
    line = read_flags(config_class, sys.argv[1:] if args is None else args)
    preset: Settings = read_file(config_class, Path(default_path), "the preset") if default_path else {}
    file: Settings = read_file(config_class, Path(line.file)) if line.file else {}
    config = build(config_class, [preset, file, line.settings])
    if isinstance(config, PretrainConfig):
        _check_name(config.method, config.vocab.extends_base, (preset, file, line.settings))
    else:
        method = getattr(config, "method", None)
        if method is not None:
            _check_name(method, False, (preset, file, line.settings))
    return config


def _check_name(method: MethodConfig, has_words: bool, layers: Sequence[Settings]) -> None:
    """Refuse a name that says one method while the sizes say another; warn where it is the preset's.

    Who says a name and all sizes (a run's config.yaml, a sweep's best.yaml) may call them what they are not.
    """
    name = method.name.lower().replace("-", "_")
    fitting = list_names(method, has_words)
    if name not in KNOWN_METHODS or name in fitting:
        return
    said = next((each for each in reversed(layers) if "method.name" in each), layers[0])
    if said is layers[0] or all(f"method.{each}" in said for each in ("trains", *_SIZES)):
        if fitting:
            print(f"warning: --method.name is {method.name!r}, and what trains is {fitting[0]}.", flush=True)
        return
    rule = f"{', '.join([*fitting, 'a name of your own'])}, or the sizes must change: {name} has {KNOWN_METHODS[name]}"
    raise OptionError("method.name", method.name, rule, said["method.name"].place)


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries of plain values (the YAML's layout)."""
    return dataclasses.asdict(config)


def from_dict(config_class: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build a configuration from nested dictionaries, as `to_dict` made them.

    Raises:
        ConfigError: an unknown option, or a value outside its rule.
    """
    return build(config_class, [list_settings(config_class, values)])


def identity_of(config: Any) -> dict[str, Any]:
    """Return the identity fields as nested dictionaries; equal identities may share a run directory."""
    return _pick(config, lambda field, value: True)


def hashed_options(config: Any) -> dict[str, Any]:
    """Return the identity fields as they go into a hash: `added` ones only where they are not as it was before them."""
    return _pick(config, lambda field, value: field.metadata.get("before", dataclasses.MISSING) != value)


def _pick(config: Any, wanted: Callable[[dataclasses.Field[Any], Any], bool]) -> dict[str, Any]:
    """The identity fields that are wanted, as nested dictionaries, empty ones left out."""
    kept: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            kept[each.name] = _pick(value, wanted)
        elif not each.metadata.get("free") and wanted(each, value):
            kept[each.name] = value
    return {name: value for name, value in kept.items() if value != {}}


def defaults_before(config_class: type, *, identity_only: bool, made: Any = None) -> dict[str, Any]:
    """Return what a stored run means by the fields that it does not name, as nested dictionaries.

    A field that was added after a run was made stands for its default, or for what `added` says that runs did before.

    Args:
        config_class: the configuration's class.
        identity_only: leave the free fields out.
        made: the defaults, where they are not those of the class.
    """
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for each in dataclasses.fields(config_class):
        default = getattr(made, each.name) if made is not None else each.default
        if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        if dataclasses.is_dataclass(hints[each.name]):
            nested = None if default is dataclasses.MISSING else default
            values[each.name] = defaults_before(hints[each.name], identity_only=identity_only, made=nested)
        elif not (identity_only and each.metadata.get("free")):
            values[each.name] = each.metadata.get("before", default)
    return {name: value for name, value in values.items() if value is not dataclasses.MISSING and value != {}}


def describe_difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """List the options in which two identities differ, as `option: old -> new`."""
    lines: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += describe_difference(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {before!r} -> {after!r}")
    return lines


def dump_yaml(config: Any) -> str:
    """Return a configuration as YAML that `parse_config` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
