"""Everything that a pre-training run is made from: frozen dataclasses that refuse values outside their rules."""

from __future__ import annotations

from dataclasses import field, fields, replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from domext_ray.config.extensions.table import ADAPTER_PARTS, EXTENSIONS, MAIN_SIZES, name_options
from domext_ray.config.method import MethodConfig
from domext_ray.config.mixture import DOMAIN, GENERAL, NO_TEXT, SELF, MixtureConfig, TextPart, list_shares
from domext_ray.config.options.build import identity_of
from domext_ray.config.options.declare import (
    DIFFERENT,
    Cadence,
    Count,
    CountOrZero,
    FilePlace,
    FolderName,
    Found,
    Length,
    Main,
    Rate,
    Ratio,
    Read,
    RunFolder,
    Share,
    ShareOrZero,
    Texts,
    Workers,
    Written,
    filled,
    free,
    later,
    option_group,
    place,
    read_workers,
    require,
)
from domext_ray.config.shared import DryRun, GpuOptions, VectorOptions
from domext_ray.errors import ConfigError

TrackerName = Literal["tensorboard", "mlflow", "trackio", "wandb", "prometheus"]
CARD_TOKENS = 32_768
"""Tokens of a forward pass on a GPU, at most, where nothing else is asked."""
MOST_HELD_OUT = 0.5
"""The share of documents that is held out is below this."""
NO_GROUPS = "none"
"""What --prepare.group_field says of rows that do not belong together; empty: nothing is said of them."""


@option_group
class RunConfig:
    """Name and place of a run."""

    # name of the run; empty: the method's name (comparison for a study, sweep for a sweep)
    name: Main[FolderName] = free("")
    # folder of all runs, or s3://BUCKET/PREFIX; the run itself is DIR/NAME
    dir: Main[Written[Annotated[str, filled("a folder"), place(buckets=True)]]] = free("runs")
    keep_checkpoints: PositiveInt = free(2)  # newest checkpoints kept
    # trackers that also receive figures: tensorboard; prometheus, through Ray; mlflow, trackio and wandb, each an extra
    trackers: Annotated[tuple[TrackerName, ...], DIFFERENT] = free(("tensorboard",))


@option_group
class PrepareConfig:
    """How text becomes rows of tokens."""

    document: Literal["line", "blank_line", "file"] = "line"  # the unit that is one document of a text file
    field: str = "text"  # JSONL field, Parquet column or datasets column that holds the text
    # two such fields, such as title,body: each row is a pair of texts (--objective.kind infonce)
    pair: tuple[str, ...] = ()
    held_out_frac: Annotated[float, Field(gt=0.0, lt=MOST_HELD_OUT)] = 0.02  # share of documents kept for evaluation
    # unit that is held out: single documents, blocks of neighbours, files or groups; auto: blocks of text lines
    held_out_by: Literal["auto", "document", "block", "file", "group"] = free("auto")
    # field that identifies a row's person, such as patient_id, whose rows stay together; none: no rows belong together
    group_field: str = ""
    min_document_chars: PositiveInt = 20  # shorter documents are dropped and counted
    max_document_chars: PositiveInt = 1_000_000  # longer documents are cut into documents of this many characters
    cross_documents: bool = True  # rows may join sentences of neighbouring documents, [SEP] between them
    packed: bool = False  # rows hold several documents that do not see each other, each with its own [CLS]
    chinese_words: bool = True  # find words of Han text with jieba (whole-word masking); off: one word per character
    shard_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20  # source bytes of one reading task, which makes one shard
    # share of rows without text (null, no such field, not UTF-8) above which the corpus is refused
    max_dropped_frac: Ratio = free(0.5)
    # text with more than a third of its tokens unknown to the tokenizer, such as text in another script
    unknown: Literal["refuse", "allow"] = free("refuse")
    # place of prepared corpora: a folder, or s3://bucket/folder; empty: RUN.DIR/.corpora
    cache_dir: Written[Annotated[str, place(buckets=True)]] = free("")

    def __post_init__(self) -> None:
        require(
            self.max_document_chars >= self.min_document_chars,
            "max_document_chars",
            self.max_document_chars,
            "at least --prepare.min_document_chars",
        )
        is_pair = len(self.pair) == len({*self.pair} - {""}) == 2
        require(not self.pair or is_pair, "pair", self.pair, "two fields with a comma between them, such as title,body")
        by = "--prepare.group_field, the field that says whose a row is"
        require(self.held_out_by != "group" or bool(self.grouped_by), "held_out_by", "group", f"given with {by}")
        is_by_group = not self.grouped_by or self.held_out_by in ("auto", "group")
        require(is_by_group, "held_out_by", self.held_out_by, "auto or group with --prepare.group_field")
        is_other = self.grouped_by not in self.text_fields
        require(is_other, "group_field", self.group_field, f"another field than {self.fields_option}")
        rule = "left out with --prepare.pair, which names both fields"
        require(not self.pair or self.field == "text", "field", self.field, rule)

    @property
    def grouped_by(self) -> str:
        """The field that says whose a row is; empty: rows do not belong together, or nobody has said that they do."""
        return "" if self.group_field == NO_GROUPS else self.group_field

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        return self.pair or (self.field,)

    @property
    def fields_option(self) -> str:
        """The option that names them."""
        return "--prepare.pair" if self.pair else "--prepare.field"

    def describe_length(self, seq_length: int) -> str:
        """Say how long rows are, as it follows "rows of"."""
        return f"{'two texts of ' if self.pair else ''}{seq_length} tokens at most"


def identify_documents(prepare: PrepareConfig) -> dict[str, Any]:
    """Return the identity of what decides a text's documents: without groups they are the same, said or not."""
    return identity_of(replace(prepare, group_field=prepare.grouped_by))


@option_group
class ReplayConfig:
    """General text for training in addition to the domain's, so that the model forgets less (--objective.keep)."""

    # general text, from the same kinds of places as --corpus; self: the base writes it; none or empty: none
    corpus: Texts[Annotated[str, AfterValidator(lambda place: "" if place == NO_TEXT else place)]] = ""
    frac: Share = 0.25  # share of all rows that are general

    @property
    def is_written(self) -> bool:
        """Whether the base writes it."""
        return self.corpus == SELF

    @property
    def share(self) -> Fraction:
        """`frac` as it is written, so that counts of rows are exact."""
        return Fraction(str(self.frac))


VocabPlace = Read[Annotated[str, place("a file or folder")]]
WordFault = Literal["known", "doublets", "special", "malformed"]
WORD_FAULTS: tuple[WordFault, ...] = get_args(WordFault)
"""Why a line of a list can be no new word: the base has it, the list has it already, it is a token such as [PAD], or it
is anything but one word."""


@option_group
class VocabConfig:
    """Words that are learned on the corpus: new ones for a base, or, with `--base none`, WordPieces for all words."""

    # entries to learn: new words for the base (0: none), or the whole vocabulary with --base none
    size: CountOrZero = 0
    lowercase: bool = True  # a vocabulary learned with --base none is uncased (a base keeps its own rule)
    min_frequency: PositiveInt = 5  # new words must occur this often in the corpus
    # groups of --prepare.group_field in whose rows a new word must occur; 0: 20
    min_groups: Annotated[int, Field(ge=0, le=1000)] = 0
    whole_words: bool = False  # new entries are whole words only, no pieces of words
    protected: VocabPlace = ""  # file of words, one per line, that get an entry whatever their frequency
    words: Found[VocabPlace] = ""  # your own new words: a file, one per line, or a folder that domext build vocab made
    # lines of --vocab.words and --vocab.protected that are left out: known, doublets, special, malformed
    skip: Annotated[tuple[WordFault, ...], DIFFERENT] = later(())
    extend: VocabPlace = ""  # folder of an earlier extension vocabulary, whose words and ids come first

    def __post_init__(self) -> None:
        require(not (self.size and self.words), "size", self.size, "0 when --vocab.words brings the words")
        rule = "empty without --vocab.words or --vocab.protected, whose lines it is about"
        require(bool(self.words or self.protected) or not self.skip, "skip", ",".join(self.skip), rule)

    @property
    def extends_base(self) -> bool:
        """Whether a base gets new words."""
        return bool(self.size or self.words)

    @property
    def learned_by(self) -> str:
        """The option by which words are learned on --corpus, for sentences; empty: none are."""
        return f"--vocab.size {self.size}" if self.size else ""


MIN_GROUPS = 20
"""Groups that must have a new word where nothing else is asked: silence would let a name become a word."""


def resolve_min_groups(prepare: PrepareConfig, vocab: VocabConfig) -> int:
    """Return how many groups must have a new word; 0: rows have no groups."""
    return (vocab.min_groups or MIN_GROUPS) if prepare.grouped_by else 0


Width = Count


@option_group
class ShapeConfig:
    """The encoder of a run without a base (`--base none`)."""

    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)] = 4  # layers
    hidden_size: Width = 256  # width d
    num_attention_heads: PositiveInt = 4  # heads h; d must be divisible by it
    intermediate_size: Width = 1024  # FFN units
    max_position_embeddings: Width = 512  # longest row
    position_init: Literal["sinusoidal", "normal"] = "sinusoidal"  # start of the learned position table

    def __post_init__(self) -> None:
        require(
            self.hidden_size % self.num_attention_heads == 0,
            "hidden_size",
            self.hidden_size,
            f"divisible by --shape.num_attention_heads ({self.num_attention_heads})",
        )


@option_group
class ObjectiveConfig(VectorOptions):
    """Masked-language modelling, and next-sentence prediction (BERT section 3.1; AF Adapter masks whole words).

    keep: what rows of general text (--replay.corpus) teach: kl: the base's own predictions, by the divergence
    KL(base || model) at the predicted positions; replay: their masked words, like rows of the domain, in a separate
    mean; none: they are rows like the others.

    kind: masked: the model predicts some tokens from both sides; causal: it predicts every token from those before it,
    and a token attends only to these (BERT section 5.1, "LTR"), without masks; infonce: the model learns to make a
    vector of a row.
    """

    # causal: each token from those before it; infonce: a row's vector
    kind: Literal["masked", "causal", "infonce"] = "masked"
    mask_prob: Share = 0.15  # share of tokens that are predicted
    mask_token_frac: Ratio = 0.8  # of these: replaced by [MASK]
    random_token_frac: Ratio = 0.1  # of these: replaced by a random ordinary token; the rest is kept
    whole_word: bool = True  # all tokens of a word are predicted together, up to 16 of them
    next_sentence: bool = False  # rows are pairs of texts; half of the second texts come from another document
    keep: Literal["kl", "replay", "none"] = "kl"  # what rows of --replay.corpus teach; kl: the base's predictions
    keep_weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 3.0  # weight of that mean relative to the domain's

    def __post_init__(self) -> None:
        require(
            not (self.is_causal and self.next_sentence),
            "next_sentence",
            self.next_sentence,
            "false with --objective.kind causal, where the first token sees nothing of the pair",
        )
        rule = f"false with --objective.kind {self.kind}, which reads no pairs"
        require(not (self.makes_vectors and self.next_sentence), "next_sentence", True, rule)
        require(
            self.mask_token_frac + self.random_token_frac <= 1.0 + 1e-9,
            "random_token_frac",
            self.random_token_frac,
            "at most 1 - --objective.mask_token_frac",
        )

    @property
    def is_causal(self) -> bool:
        """Whether every token is predicted from those before it."""
        return self.kind == "causal"

    @property
    def makes_vectors(self) -> bool:
        """Whether a row's vector is learned, and no word of it is masked."""
        return self.kind == "infonce"

    @property
    def reads_words(self) -> bool:
        """Whether the MLM head is read, hence trained where the method trains it."""
        return not self.makes_vectors

    @property
    def inseparable_rows(self) -> int:
        """Rows that only one forward pass may have, together."""
        return self.group_rows if self.makes_vectors else 1


@option_group
class TrainConfig:
    """How long to train, with which batches, and how often to evaluate and save."""

    gone: ClassVar = {
        "eval_scales": "domext evaluate forgetting --scales measures a run at them once it has ended",
        "teraflops": "give --train.tokens_per_second: all workers' operations per second, by a dry run's per token",
    }

    # optimiser steps, at most; 0: as many as --train.epochs or --train.max_tokens need
    max_steps: Main[NonNegativeInt] = free(1000)
    epochs: NonNegativeFloat = free(0.0)  # passes over the corpus, at most; 0: no limit
    max_tokens: NonNegativeInt = free(0)  # tokens read, at most; 0: no limit
    max_seconds: NonNegativeFloat = free(0.0)  # seconds spent in training steps, at most; 0: no limit
    global_batch_size: Main[Width] = 32  # rows of one optimiser step, over all workers
    # rows of one forward pass; 0: an equal part of a worker's share, up to 32 (on a GPU: up to 32,768 tokens)
    micro_batch_size: NonNegativeInt = free(0)
    seq_length: Main[Length] = 128  # tokens of a row, [CLS] and [SEP] included
    long_seq_length: CountOrZero = 0  # tokens of a row in a second phase (BERT: 512); 0: one phase
    long_frac: Share = 0.1  # share of --optim.decay_steps that the second phase takes
    # rows of a forward pass in the second phase; 0: as many tokens as in the first phase
    long_micro_batch_size: NonNegativeInt = free(0)
    dropout: ShareOrZero = 0.1  # dropout of hidden states and attention
    # dropout of attention only; same: equal to --train.dropout. At 0 a GPU attends in bf16 without masks and padding
    attention_dropout: ShareOrZero | Literal["same"] = "same"
    # steps between checkpoints, or time in training steps, such as 15m (one more before each evaluation and at the end)
    save_every: Cadence = free(200)
    # steps, or time in training steps, between evaluations (one more at the start and at the end)
    evaluate_every: Cadence = free(200)
    eval_rows: PositiveInt = free(400)  # held-out rows of an evaluation, at most
    # both halves of these rows, or one: choose on the first, report on the second
    eval_half: Literal["both", "first", "second"] = free("both")
    # tokens per second that a dry run assumes; 0: it times a few steps on this machine
    tokens_per_second: NonNegativeFloat = free(0.0)
    # a file of sentences that measure forgetting, one per line; empty: those that ship
    general_probe: Found[FilePlace] = free("")

    def __post_init__(self) -> None:
        is_limited = self.epochs > 0 or self.max_tokens > 0
        rule = "1 or more, or 0 with --train.epochs or --train.max_tokens"
        require(self.max_steps > 0 or is_limited, "max_steps", self.max_steps, rule)
        require(
            self.long_seq_length == 0 or self.long_seq_length > self.seq_length,
            "long_seq_length",
            self.long_seq_length,
            f"0, or above --train.seq_length ({self.seq_length})",
        )

    @property
    def attention_dropout_prob(self) -> float:
        """Dropout of attention weights."""
        return self.dropout if self.attention_dropout == "same" else self.attention_dropout

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a row in each length phase, rising."""
        return (self.seq_length, self.long_seq_length) if self.long_seq_length else (self.seq_length,)


@option_group
class OptimConfig:
    """AdamW with linear warm-up and a decay to zero.

    schedule: linear: from the peak to 0 (BERT appendix A.2); cosine: half a cosine; wsd: the rate stays at its peak and
    falls linearly to 0 in the last share of the budget of steps, seconds or tokens, so that every run ends at rate 0
    (warm-up, stable, decay; Hu et al. 2024, "MiniCPM", section 4).
    """

    lr: Main[Rate] = 4e-4  # peak learning rate
    # width of the bases for which a preset's rate was chosen; a base half or twice as wide gets a warning; 0: unknown
    lr_width: CountOrZero = free(0)
    schedule: Literal["linear", "cosine", "wsd"] = "linear"  # after the warm-up; wsd: stable, then decay
    # with --optim.schedule wsd: share of the budget in which the rate falls
    decay_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    # steps from 0 to the peak; 0: one tenth of --optim.decay_steps, 1,000 at most (wsd: 100 at most)
    warmup_steps: NonNegativeInt = 0
    # step at which the rate is 0 (the schedule's horizon); 0: --train.max_steps of the first start
    decay_steps: NonNegativeInt = 0
    beta1: ShareOrZero = 0.9  # decay of the first moment
    beta2: ShareOrZero = 0.999  # decay of the second moment
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-8  # added to the denominator
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 0.01  # on matrices; never on biases and LayerNorms
    max_grad_norm: NonNegativeFloat = 1.0  # gradients are clipped to this global norm; 0: no clipping
    # after a loss or gradient that is not finite: stop, or skip the step
    on_non_finite: Literal["stop", "skip"] = free("stop")


@option_group
class EngineConfig:
    """DeepSpeed, precision and memory."""

    # what is sharded: 0: nothing, 1: optimizer state, 2: also gradients, 3: also parameters
    zero_stage: Annotated[int, Field(ge=0, le=3)] = free(0)
    # bf16: autocast over fp32 trainables; auto: bf16 on GPUs and CPUs with units for it, else fp32 (on GPUs: TF32)
    precision: Literal["auto", "bf16", "fp32"] = free("auto")
    base_dtype: Literal["auto", "fp32", "bf16"] = free("auto")  # storage of the frozen base; auto: like precision
    offload: bool = free(False)  # keep optimizer state in CPU memory (ZeRO 1 to 3)
    activation_checkpointing: bool = free(False)  # recompute activations in the backward pass
    compile: bool = free(False)  # torch.compile the layers (needs a C++ compiler on a CPU)
    fused: bool = free(False)  # this library's own kernels on a GPU, unmeasured (needs a C compiler)
    # all batches of packed rows have one shape, for which --engine.compile generates its code
    fixed_shapes: bool = free(False)
    # forward and backward as one CUDA graph, unmeasured: one GPU, ZeRO 0, fixed shapes
    capture: bool = free(False)
    # compute products of base and extension together, not at ZeRO 3 or compiled; auto: on GPUs
    joined: bool | Literal["auto"] = free("auto")

    def __post_init__(self) -> None:
        require(
            not (self.base_dtype == "bf16" and self.precision == "fp32"),
            "base_dtype",
            "bf16",
            "fp32 or auto when --engine.precision is fp32",
        )
        # ZeRO-3's hooks, which gather parameters, would break the compiled graph at every module.
        require(not (self.compile and self.zero_stage == 3), "compile", True, "false at --engine.zero_stage 3")
        require(not (self.offload and self.zero_stage == 0), "offload", True, "false at --engine.zero_stage 0")
        is_asked = self.joined is True
        require(not (is_asked and self.zero_stage == 3), "joined", True, "auto or false at --engine.zero_stage 3")
        require(not (is_asked and self.compile), "joined", True, "auto or false with --engine.compile true")
        excluded = {"zero_stage": self.zero_stage > 0, "compile": self.compile}
        excluded["activation_checkpointing"] = self.activation_checkpointing
        for name, is_given in excluded.items():
            rule = f"false with --engine.{name} {str(getattr(self, name)).lower()}"
            require(not (self.capture and is_given), "capture", True, rule)
        require(self.fixed_shapes or not self.capture, "capture", True, "false without --engine.fixed_shapes true")

    @property
    def uses_bf16(self) -> bool:
        """Whether products are computed in bf16; `auto` is, until it is settled (`ray_cluster.resolve_precision`)."""
        return self.precision != "fp32"

    @property
    def has_narrow_base(self) -> bool:
        """Whether the frozen base is stored in bf16, LayerNorms apart: autocast would round nearly all of it anyway."""
        return self.uses_bf16 if self.base_dtype == "auto" else self.base_dtype == "bf16"

    def joins_products(self, *, on_gpu: bool) -> bool:
        """Whether layers compute joined products (`model.joined`), which on CPUs are no faster.

        ZeRO-3 gathers a layer's parameters as it is written, and so does a compiler fuse it.
        """
        return (on_gpu if self.joined == "auto" else self.joined) and self.zero_stage < 3 and not self.compile


@option_group
class ScaleConfig(GpuOptions):
    """Workers and the resources of each."""

    # training processes (ranks), or a range, 1-8: as many as there is room for
    num_workers: Main[Workers] = free(1)
    # CPUs of a worker (Ray's share and torch's threads); 0: an even share of the machine
    cpus_per_worker: NonNegativeFloat = free(0.0)
    max_failures: NonNegativeInt = free(3)  # deaths of workers after which the job gives up
    # machines taken back, such as spot nodes, after which the job gives up; any: no limit
    max_preemptions: NonNegativeInt | Literal["any"] = free("any")

    @property
    def least_workers(self) -> int:
        """The workers without which training does not start."""
        return read_workers(self.num_workers)[0]

    @property
    def most_workers(self) -> int:
        """The workers that training has where there is room."""
        return read_workers(self.num_workers)[1]


REPAIR_NOTES = "repair-notes"
"""The made text that ships, for sweeps; see `assets/sets/repair_notes`."""
Base = Found[Annotated[str, filled("a name, a folder or a hub id"), place("a hub id, or a folder")]]
Corpus = Texts[Annotated[str, filled("package-docs, or at least one file or folder")]]


@option_group
class RunOptions:
    """The options of a pre-training run, and what they decide together, whether some are left open or none."""

    # general-mini (ships with the package), a folder, a hub id, or none (random weights)
    base: Main[Base] = "general-mini"
    # package-docs, or comma-separated files, globs, folders, s3:// addresses, hf://NAME:CONFIG@REVISION
    corpus: Main[Corpus] = "package-docs"
    # directory of a finished run from whose parameters this run starts (exBERT's second stage)
    init_from: RunFolder = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # seed of initialisation, data order, masks and dropout
    # start nothing; print whether the run fits, how long it takes and what it needs; full: also all options as YAML
    dry_run: Main[DryRun] = free(False)
    run: RunConfig = field(default_factory=RunConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)

    def check_lengths(self, longest: int) -> None:
        """Refuse rows that are longer than the base has positions for."""
        for name in ("seq_length", "long_seq_length"):
            length = getattr(self.train, name)
            if length > longest:
                raise ConfigError(f"--train.{name} is {length}; the base {self.base!r} has positions for {longest}.")

    def __post_init__(self) -> None:
        writes = self.base == "none" and self.replay.is_written
        require(not writes, "replay.corpus", SELF, "general text, or none, when --base is none: nothing can write it")
        require(
            not self.has_general_text or self.base != "none" or self.objective.keep == "none",
            "objective.keep",
            self.objective.keep,
            "none when --base is none, for there is no base to keep",
        )
        rule = "left out without --prepare.group_field, the field that says whose a row is"
        is_asked = self.vocab.min_groups > 0 and not self.prepare.grouped_by
        require(not is_asked, "vocab.min_groups", self.vocab.min_groups, rule)
        self._check_packed()
        self._check_vectors()
        if self.base == "none":
            require(self.vocab.size > 0, "vocab.size", self.vocab.size, "set when --base is none, for example 8192")
            require(self.vocab.size >= 64, "vocab.size", self.vocab.size, "64 or more when --base is none")
            for option in ("words", "extend", "protected"):
                value = getattr(self.vocab, option)
                require(not value, f"vocab.{option}", value, "empty when --base is none")
            require(self.method.trains == "all", "method.trains", self.method.trains, "all when --base is none")
            for part in ADAPTER_PARTS:
                value = getattr(self.method, part.size)
                require(not value, f"method.{part.size}", value, "0 without a base")
            require(not self.init_from, "init_from", self.init_from, "empty when --base is none")
            longest = max(self.train.seq_length, self.train.long_seq_length)
            require(
                longest <= self.shape.max_position_embeddings,
                "train.seq_length" if longest == self.train.seq_length else "train.long_seq_length",
                longest,
                f"at most --shape.max_position_embeddings ({self.shape.max_position_embeddings})",
            )
        elif self.method.trains == "extensions":
            has_size = any(getattr(self.method, size) for size in MAIN_SIZES)
            require(
                has_size or self.vocab.extends_base,
                "method.trains",
                self.method.trains,
                f"all when there is no extension; or give one ({name_options(EXTENSIONS)}, --vocab.size)",
            )
        elif self.method.trains != "all":
            require(
                self.method.trains == "adapter" or not self.vocab.extends_base,
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

    def _check_vectors(self) -> None:
        """Refuse what an objective that makes vectors of rows does not read or train."""
        objective, kind = self.objective, f"--objective.kind {self.objective.kind}"
        rule = "left out without --objective.kind infonce, which compares two texts of a row"
        require(not self.prepare.pair or objective.makes_vectors, "prepare.pair", self.prepare.pair, rule)
        if not objective.makes_vectors:
            return
        require(self.base != "none", "objective.kind", objective.kind, "masked or causal when --base is none")
        for option in ("size", "words"):
            value = getattr(self.vocab, option)
            require(not value, f"vocab.{option}", value, f"left out with {kind}: learn new words in a run before it")
        require(not self.replay.corpus, "replay.corpus", self.replay.corpus, f"empty with {kind}, which keeps nothing")
        require(not self.mixture.parts, "mixture.parts", self.mixture.parts, f"empty with {kind}, which reads one text")
        require(not self.prepare.packed, "prepare.packed", True, f"false with {kind}: a row has one vector")
        self._check_groups()

    def _check_groups(self) -> None:
        """Refuse two views that are one, and groups that forward passes would cut."""
        objective, train, pair = self.objective, self.train, self.prepare.pair
        rule = "left out with --prepare.pair, whose two texts are a row's views"
        require(not pair or objective.views == "dropout", "objective.views", objective.views, rule)
        rule = "above 0 with --objective.views dropout: without it, a row's two views are one (or give crop)"
        needs_dropout = objective.views == "dropout" and not pair
        require(not needs_dropout or train.dropout > 0, "train.dropout", train.dropout, rule)
        value, size = objective.group_rows, train.global_batch_size
        require(size % value == 0, "objective.group_rows", value, f"a divisor of --train.global_batch_size ({size})")
        rule = f"at most {size // value}, for each worker needs a group of --objective.group_rows"
        require(self.scale.most_workers <= size // value, "scale.num_workers", self.scale.num_workers, rule)
        for name in ("micro_batch_size", "long_micro_batch_size"):
            rows = getattr(train, name)
            require(rows % value == 0, f"train.{name}", rows, f"a multiple of --objective.group_rows ({value})")

    def _check_packed(self) -> None:
        """Refuse packed rows for objectives that read a row as one text."""
        reads_whole = self.objective.is_causal or self.objective.next_sentence
        rule = "false with --objective.next_sentence or causal, which read a row as one text"
        require(not (self.prepare.packed and reads_whole), "prepare.packed", True, rule)
        has_one_shape = self.prepare.packed and not (self.has_general_text and self.objective.keep != "none")
        rule = "false without --prepare.packed true, and beside general text unless --objective.keep is none"
        require(has_one_shape or not self.engine.fixed_shapes, "engine.fixed_shapes", True, rule)
        is_one = self.scale.most_workers == 1 and self.scale.use_gpu is not False
        rule = "false unless one worker trains, on a GPU (--scale.num_workers 1)"
        require(is_one or not self.engine.capture, "engine.capture", True, rule)

    @property
    def parts(self) -> tuple[TextPart, ...]:
        """The texts beside --corpus, in canonical order: --replay.corpus, then those of the mixture."""
        replay = (TextPart(GENERAL, self.replay.corpus, (), keep=True),) if self.replay.corpus else ()
        return (*replay, *self.mixture.list_parts())

    @property
    def texts(self) -> tuple[TextPart, ...]:
        """All that the run reads: --corpus, then `parts`."""
        return (TextPart(DOMAIN, self.corpus, (), keep=False), *self.parts)

    def prepare_for(self, part: TextPart) -> PrepareConfig:
        """Return how a text becomes rows: general text is nobody's, so its rows have no groups."""
        if not part.keep:
            return self.prepare
        held_out_by = "auto" if self.prepare.grouped_by else self.prepare.held_out_by
        return replace(self.prepare, group_field=NO_GROUPS, held_out_by=held_out_by)

    @property
    def part_shares(self) -> list[tuple[Fraction, tuple[Fraction, ...]]]:
        """Shares of all rows that --corpus and `parts` have, from some shares of the horizon on (see `list_shares`)."""
        return list_shares(self.mixture.weight, self.parts, self.replay.share)

    @property
    def has_general_text(self) -> bool:
        """Whether there are rows that --objective.keep speaks of."""
        return any(part.keep for part in self.parts)


@option_group
class PretrainConfig(RunOptions):
    """All options of a pre-training run, as a user gives them: `auto` and 0 leave something open."""


@option_group
class SettledConfig(RunOptions):
    """The options of a run as it trains, which its config.yaml keeps.

    Its text and the files that workers read are named for all machines, sizes are solved, and what a run keeps however
    often it goes on is settled: precision, schedule, GPUs. Before its texts are prepared the steps may be open (0), and
    before Ray runs on a cluster what its machines are (auto). What each start decides anew stays as it was asked for.
    """

    @classmethod
    def of(cls, options: RunOptions) -> SettledConfig:
        """Return options that whoever calls this has settled."""
        return cls(**{option.name: getattr(options, option.name) for option in fields(cls)})

    def with_horizon(self, decay_steps: int) -> SettledConfig:
        """Return the run with a schedule that ends at a step, and the warm-up that follows from it."""
        most = 100 if self.optim.schedule == "wsd" else 1000  # a budget of seconds has no horizon in steps to go by
        warmup_steps = self.optim.warmup_steps or min(most, decay_steps // 10)
        return replace(self, optim=replace(self.optim, decay_steps=decay_steps, warmup_steps=warmup_steps))

    def with_steps(self, max_steps: int) -> SettledConfig:
        """Return the run with a limit of some steps."""
        return replace(self, train=replace(self.train, max_steps=max_steps))


def check_batch(train: TrainConfig, scale: ScaleConfig) -> None:
    """Refuse more workers than rows of a batch, and micro batches that no worker fills."""
    size = train.global_batch_size
    rule = f"at most {size}, for each worker needs a row of --train.global_batch_size"
    require(scale.most_workers <= size, "scale.num_workers", scale.num_workers, rule)
    share = -(-size // scale.most_workers)
    rule = f"at most {share}, a worker's share of --train.global_batch_size ({size} rows)"
    for name in ("micro_batch_size", "long_micro_batch_size"):
        require(getattr(train, name) <= share, f"train.{name}", getattr(train, name), rule)


def find_largest_share(config: RunOptions, num_workers: int = 0) -> int:
    """Return the rows of a global batch that a worker has at most; `num_workers` 0: of as many as the run may have."""
    group, number = config.objective.inseparable_rows, num_workers or config.scale.most_workers
    return group * -(-(config.train.global_batch_size // group) // number)


def count_passes(config: RunOptions, micro_batch_size: int, num_workers: int = 0) -> int:
    """Return the forward passes of a step, on every worker: as many as its largest share takes."""
    return -(-find_largest_share(config, num_workers) // micro_batch_size)


def resolve_micro_batch_sizes(config: RunOptions, num_workers: int = 0) -> list[int]:
    """Return the rows of a worker's forward pass in each length phase; `num_workers` 0: as many as it may have."""
    train = config.train
    first = train.micro_batch_size or _choose_rows(config, _count_rows(config, train.seq_length), num_workers)
    if not train.long_seq_length:
        return [first]
    rows = max(first * train.seq_length // train.long_seq_length, 1)  # by default as many tokens as in the first phase
    if config.scale.use_gpu is True and not train.micro_batch_size:
        rows = _count_rows(config, train.long_seq_length)
    return [first, train.long_micro_batch_size or _choose_rows(config, rows, num_workers)]


def _count_rows(config: RunOptions, length: int) -> int:
    """The rows that a device computes at once: a GPU waits for its launches below so many tokens."""
    return max(CARD_TOKENS // length, 1) if config.scale.use_gpu is True else 32


def _choose_rows(config: RunOptions, at_most: int, num_workers: int) -> int:
    """The rows of a pass that cut no group of rows, in passes of about one size, as few as a number of rows allows."""
    group = config.objective.inseparable_rows
    groups, most = find_largest_share(config, num_workers) // group, max(at_most // group, 1)
    passes = -(-groups // most)
    return group * -(-groups // passes)


def find_first_long_step(config: RunOptions, decay_steps: int) -> int:
    """Return the first step of the second phase, given the schedule's horizon."""
    return decay_steps - round(decay_steps * config.train.long_frac)
