"""The configuration: frozen dataclasses <- a YAML file <- dotted command-line flags.

A field is *identity* (two runs that differ in it are different runs and may not share a directory) or *free* (it
may change when a run is resumed). Fields are identity unless declared with `free(...)`. Nothing here reads a file
except the YAML that the user names; draccus is imported in this module only.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import draccus
import yaml
from draccus.utils import DraccusException

from domext_ray.errors import ConfigError

MAX_LANES = 64
"""Most lanes that a global batch is cut into; hence also the most workers of a run (see corpus/stream.py)."""


def free(default: Any) -> Any:
    """Declare a field that may differ between the attempts of one run."""
    return field(default=default, metadata={"free": True})


def require(condition: bool, option: str, value: object, rule: str) -> None:
    """Raise ConfigError that names the option, its value and the rule, unless the condition holds."""
    if not condition:
        raise ConfigError(f"--{option} is {value!r}; it must be {rule}.")


def require_one_of(value: str | int, option: str, allowed: Sequence[str | int]) -> None:
    """Raise ConfigError unless an option's value is one of those allowed."""
    require(value in allowed, option, value, "one of " + ", ".join(str(each) for each in allowed))


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives."""

    name: str = free("")  # name of the run; empty: the method's name
    dir: str = free("runs")  # folder of all runs; the run itself is DIR/NAME
    keep_checkpoints: int = free(2)  # newest checkpoints kept
    tensorboard: bool = free(True)  # also write TensorBoard events

    def __post_init__(self) -> None:
        require(self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "1 or more")
        require("/" not in self.name, "run.name", self.name, "a plain folder name; the folder above it is --run.dir")


@dataclass(frozen=True)
class PrepareConfig:
    """How text becomes rows of tokens."""

    document: Literal["line", "blank_line", "file"] = "line"  # what one document of a text file is
    field: str = "text"  # JSONL field, Parquet column or datasets column that holds the text
    held_out_frac: float = 0.02  # share of documents kept for evaluation, chosen by document hash
    min_document_chars: int = 20  # shorter documents are dropped and counted
    max_document_chars: int = 1_000_000  # longer documents are cut into documents of this many characters
    cross_documents: bool = True  # rows may join sentences of neighbouring documents, [SEP] between them
    chinese_words: bool = True  # find words of Han text with jieba (whole-word masking); off: one word a character
    shard_bytes: int = 8 * 2**20  # source bytes of one reading task, which makes one shard
    cache_dir: str = free("")  # where prepared corpora are kept; empty: RUN.DIR/.corpora

    def __post_init__(self) -> None:
        require_one_of(self.document, "prepare.document", ("line", "blank_line", "file"))
        require(0.0 < self.held_out_frac < 0.5, "prepare.held_out_frac", self.held_out_frac, "between 0 and 0.5")
        require(self.min_document_chars >= 1, "prepare.min_document_chars", self.min_document_chars, "1 or more")
        require(
            self.max_document_chars >= self.min_document_chars,
            "prepare.max_document_chars",
            self.max_document_chars,
            "at least --prepare.min_document_chars",
        )
        require(self.shard_bytes >= 1024, "prepare.shard_bytes", self.shard_bytes, "1024 or more")


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
        require(self.min_frequency >= 1, "vocab.min_frequency", self.min_frequency, "1 or more")
        require(not (self.size and self.words), "vocab.size", self.size, "0 when --vocab.words brings the words")

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
    trains: Literal["extensions", "domain", "all", "top_layers", "layer_norms", "biases"] = "extensions"  # see above
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
        require(self.name.strip() != "" and "/" not in self.name, "method.name", self.name, "a plain name")
        require_one_of(self.trains, "method.trains", TRAINS)
        require_one_of(self.init, "method.init", ("zero", "paper"))
        require_one_of(self.word_init, "method.word_init", ("random", "subword_mean"))
        for name in ("heads", "ffn_units", "bottleneck_size", "module_hidden_size", "lora_rank", "lora_alpha"):
            require(getattr(self, name) >= 0, f"method.{name}", getattr(self, name), "0 or more")
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


@dataclass(frozen=True)
class ObjectiveConfig:
    """Masked-language modelling, and next-sentence prediction (BERT section 3.1; AF Adapter masks whole words).

    kind: masked: some tokens are predicted from both sides; left_to_right: every token from those before it, which is
    all that a token attends to (BERT section 5.1, "LTR"), and nothing is masked.
    """

    kind: Literal["masked", "left_to_right"] = "masked"  # see above
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

    max_steps: int = free(1000)  # optimiser steps, at most
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
    general_probe: str = free("")  # sentences of the forgetting meter, one a line; empty: those that ship

    def __post_init__(self) -> None:
        for name in ("max_steps", "global_batch_size", "checkpoint_every", "eval_every", "eval_rows"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "1 or more")
        require(self.micro_batch_size >= 0, "train.micro_batch_size", self.micro_batch_size, "0 (automatic) or more")
        require(self.seq_length >= 8, "train.seq_length", self.seq_length, "8 or more")
        for name in ("max_tokens", "max_seconds", "long_micro_batch_size"):
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
    use_gpu: bool = free(False)  # one GPU a worker
    cpus_per_worker: float = free(
        0.0
    )  # CPUs of a worker (Ray's share and torch's threads); 0: an even share of the machine

    def __post_init__(self) -> None:
        require(1 <= self.num_workers <= MAX_LANES, "scale.num_workers", self.num_workers, f"from 1 to {MAX_LANES}")
        require(self.cpus_per_worker >= 0.0, "scale.cpus_per_worker", self.cpus_per_worker, "0 or more")


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that a pre-training run is made from."""

    base: str = "general-mini"  # general-mini (ships with the package), a folder, a hub id, or none (random weights)
    corpus: str = "package-docs"  # package-docs, or comma-separated files, globs, folders, hub names, s3:// addresses
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
        require(bool(self.corpus.strip()), "corpus", self.corpus, "package-docs, or at least one file or folder")
        require(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2^63 - 1")
        if self.base == "none":
            require(self.vocab.size > 0, "vocab.size", self.vocab.size, "set when --base is none, for example 8192")
            require(self.vocab.size >= 64, "vocab.size", self.vocab.size, "64 or more when --base is none")
            for option in ("words", "extend", "protected"):
                value = getattr(self.vocab, option)
                require(not value, f"vocab.{option}", value, "empty when --base is none")
            require(self.method.trains == "all", "method.trains", self.method.trains, "all when --base is none")
            require(
                not self.method.has_domain,
                "method.heads",
                self.method.heads,
                "0, and no units or bottlenecks, without a base",
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
    """Build a configuration from a YAML file and dotted flags, the flags winning.

    Args:
        config_class: the frozen dataclass to build.
        default_path: YAML used when the user gives no `--config_path`.
        args: command line without the program's name; None reads `sys.argv`.

    Raises:
        ConfigError: a file that is missing or no YAML, an unknown option, or a value outside its rule.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    names_own_file = any(each == "--config_path" or each.startswith("--config_path=") for each in arguments)
    try:
        return draccus.parse(config_class, None if names_own_file else default_path, arguments, exit_on_error=False)
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"--config_path names {error.filename!r}, which does not exist.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file is not valid YAML ({' '.join(str(error).split())}).") from error
    except (DraccusException, Exception) as error:
        cause = _find_config_error(error)
        if cause is not None:
            raise cause from error
        if isinstance(error, (ValueError, TypeError, DraccusException)) or type(error).__module__.startswith(
            "argparse"
        ):
            raise ConfigError(f"{' '.join(str(error).split())} (see --help for the options).") from error
        raise


def _find_config_error(error: BaseException | None) -> ConfigError | None:
    while error is not None:
        if isinstance(error, ConfigError):
            return error
        error = error.__cause__ or error.__context__
    return None


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries of plain values (the YAML's layout)."""
    return dataclasses.asdict(config)


def from_dict(config_class: type[ConfigT], values: dict[str, Any]) -> ConfigT:
    """Build a configuration from nested dictionaries, as `to_dict` made them."""
    return draccus.decode(config_class, values)


def merge_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options with some of them changed."""
    merged = dict(options)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = merge_options(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def identity_of(config: Any) -> dict[str, Any]:
    """Return the identity fields as nested dictionaries; equal identities may share a run directory."""
    kept: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            kept[each.name] = identity_of(value)
        elif not each.metadata.get("free"):
            kept[each.name] = value
    return {name: value for name, value in kept.items() if value != {}}


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
