"""The configurations of jobs that train no model of their own, from export to verify and env.

Nothing here reads a file; `presets.configure` makes them from YAML and flags.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PlainValidator, PositiveInt

from domext_ray.config.finetune import ALL, FinetuneConfig, SetPlaces, SeveralSets
from domext_ray.config.inference import Size
from domext_ray.config.options.declare import (
    DIFFERENT,
    SOME,
    Count,
    Described,
    FolderName,
    Found,
    Length,
    Main,
    ModelPlace,
    Models,
    Options,
    Rate,
    Read,
    Scale,
    Share,
    ShareOrZero,
    Texts,
    Written,
    check_different,
    check_place,
    filled,
    free,
    later,
    option_group,
    place,
    require,
    require_disk,
)
from domext_ray.config.options.kinds import suggest
from domext_ray.config.pretrain import (
    Base,
    Corpus,
    EngineConfig,
    ObjectiveConfig,
    OptimConfig,
    PrepareConfig,
    ReplayConfig,
    RunConfig,
    ScaleConfig,
    TrainConfig,
    check_batch,
)
from domext_ray.config.shared import PoolingChoice, UseGpu
from domext_ray.errors import ConfigError


def _check_repository(name: str) -> str:
    """Return the name of a repository of the hub with its owner's; empty: none is given."""
    part = r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9_])?"
    is_name = re.fullmatch(f"{part}/{part}", name, re.ASCII) is not None and len(name) <= 96
    if name and (not is_name or re.search(r"--|\.\.|\.git$", name)):
        raise ValueError(
            "ORG/NAME: letters, digits, dots, dashes and underscores, at most 96 of them, none of -- and .. in it"
        )
    return name


@option_group
class ExportConfig:
    """Which run to export, where to, and whether the hub gets it."""

    # the run's directory, such as runs/af
    run: Found[
        Annotated[str, filled("a run's directory, such as runs/af"), place("a run's directory", buckets=True)]
    ] = ""
    # folder of the export, or s3://BUCKET/FOLDER; empty: RUN/export, or RUN/FORMAT
    output: Written[Annotated[str, place(buckets=True)]] = ""
    # huggingface, onnx: the whole model; adapterhub: bottlenecks alone; peft: LoRA alone
    format: Literal["huggingface", "onnx", "adapterhub", "peft"] = "huggingface"
    # adapterhub: adapter of the bottlenecks, empty: the run's; onnx: adapters, separated by commas, empty: the only one
    adapter: str = ""
    int8: bool = False  # onnx: also a graph in int8, in the folder int8
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # type of the stored tensors (huggingface)
    scale: Scale = 1.0  # factor on everything that the adapter adds: 1: as it was trained; 0: the base
    # repository of the Hugging Face hub, ORG/NAME: print what would be uploaded; empty: nothing
    push: Annotated[str, AfterValidator(_check_repository)] = ""
    push_now: bool = False  # upload it, with the token in the environment variable HF_TOKEN
    push_private: bool = True  # only the repository's owners can see it

    def __post_init__(self) -> None:
        is_whole = self.format == "huggingface"
        require(is_whole or self.dtype == "float32", "dtype", self.dtype, f"float32 with --format {self.format}")
        has_adapter = self.format in ("adapterhub", "onnx")
        require(has_adapter or not self.adapter, "adapter", self.adapter, "left out but for adapterhub and onnx")
        require(self.format == "onnx" or not self.int8, "int8", self.int8, "false but for onnx")
        rule = (
            f"a folder of its own with --scale {self.scale:g}: RUN/{self.folder_name} is of the model as it was trained"
        )
        require(bool(self.output) or self.scale == 1, "output", self.output, rule)
        require(bool(self.push) or not self.push_now, "push_now", self.push_now, "false without --push ORG/NAME")

    @property
    def folder_name(self) -> str:
        """Name of the folder in the run's directory when `output` is empty."""
        return "export" if self.format == "huggingface" else self.format


@option_group
class CompareConfig:
    """Which runs to compare."""

    gone: ClassVar = {"format": "the table is Markdown, which pandoc makes LaTeX of"}

    # run directories
    runs: Found[Annotated[tuple[Annotated[str, place("run directories")], ...], SOME, DIFFERENT]] = ()
    # the picture
    output: Written[Annotated[str, filled("a picture's file, such as comparison.png"), place("a file")]] = (
        "comparison.png"
    )


def name_models(models: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return names and models of `--models`: what stands before "=", or the last part of the path (before "export")."""
    pairs = []
    for entry in models:
        name, mark, model = entry.partition("=")
        if not mark or "/" in name:
            parts = [part for part in entry.split("/") if part] or [""]
            name, model = parts[-2] if parts[-1] == "export" and len(parts) > 1 else parts[-1], entry
        pairs.append((name.strip(), model.strip()))
    return tuple(pairs)


def name_scaled(name: str, scale: float) -> str:
    """Return what a model is called at a scale of what it adds to its base."""
    return name if scale == 1 else f"{name} at {scale}"


def _check_models(models: tuple[str, ...]) -> tuple[str, ...]:
    """Return models of which none is empty or there twice."""
    names, places = zip(*name_models(models), strict=True) if models else ((), ())
    if not models or not all(places):
        raise ValueError("models such as base=NAME,runs/af")
    if len(set(names)) < len(names):
        raise ValueError("models of different names (NAME=MODEL)")
    check_different([check_place(path, "hub ids, or folders").rstrip("/") for path in places])
    return models


ModelList = Models[Annotated[tuple[str, ...], AfterValidator(_check_models)]]


@option_group
class ForgettingConfig:
    """Which models predict the same masked words of general text, and of which text."""

    models: ModelList = ()  # [NAME=]MODEL by commas; MODEL is a run's directory, an export, a base's folder or a hub id
    # general text that no model was trained on: files, globs or folders, separated by commas; optional with --scales
    corpus: Texts[str] = ""
    # smaller scales of what a model adds to its base, such as 0.25,0.5,0.75, to measure in addition
    scales: Annotated[tuple[Share, ...], DIFFERENT] = ()
    # folder of results.json, forgetting.md and forgetting.png
    output: Written[Annotated[str, filled("a folder"), place()]] = "forgetting"
    num_texts: Count = 10_000  # texts that are drawn from the corpus (AF Adapter: 10,000)
    mask_frac: Share = 0.15  # share of the tokens that is masked, the same ones for all models
    max_length: Length = 128  # tokens of a row; longer texts are cut, at the same character for all models
    shared_words: bool = True  # compare models with different vocabularies on words that are one token for all
    batch_size: Count = 32  # rows of a forward pass; the figures do not depend on it
    use_gpu: UseGpu = free("auto")  # predict on a GPU; auto: if there is one
    route: bool = False  # a model with a router sends each text to its adapter or to the base
    seed: NonNegativeInt = 0  # seed of the texts and masks
    prepare: PrepareConfig = field(default_factory=PrepareConfig)

    def __post_init__(self) -> None:
        rule = "left out here: general text is one text a row (--prepare.field)"
        require(not self.prepare.pair, "prepare.pair", self.prepare.pair, rule)
        is_asked = self.has_corpus or bool(self.scales)
        require(is_asked, "corpus", self.corpus, "at least one file or folder of general text")
        names = [name_scaled(name, scale) for name, _ in self.named_models for scale in (1.0, *self.scales)]
        rule = "models of which none has a name that another one has at a scale of --scales"
        require(len({*names}) == len(names), "models", ",".join(self.models), rule)

    @property
    def has_corpus(self) -> bool:
        """Whether models are compared on general text; else runs are measured by what they evaluated alone."""
        return bool(self.corpus.strip())

    @property
    def named_models(self) -> tuple[tuple[str, str], ...]:
        """See `name_models`."""
        return name_models(self.models)


@option_group
class RetrievalConfig:
    """Which models search, and in which collection."""

    models: ModelList = ()  # [NAME=]MODEL by commas; MODEL is a run's directory, an export, a base's folder or a hub id
    # a folder in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv
    data: Found[Annotated[str, filled("a folder with corpus.jsonl, queries.jsonl and qrels"), place()]] = ""
    split: Annotated[FolderName, filled("a name")] = "test"  # name of the judgements: qrels/SPLIT.tsv
    # folder of results.json and retrieval.md
    output: Written[Annotated[str, filled("a folder"), place()]] = "retrieval"
    pooling: PoolingChoice = "auto"  # tokens' mean, or the first one's state; auto: as in the model's run
    max_length: Length = 256  # tokens of a text at most; a model with shorter rows cuts earlier
    batch_size: Size = 64  # texts of a forward pass; the figures do not depend on it

    @property
    def named_models(self) -> tuple[tuple[str, str], ...]:
        """See `name_models`."""
        return name_models(self.models)


def _check_labels(values: Any) -> tuple[int | str, ...]:
    """Return numbers of labels, ascending, `ALL` at the end; none are no question."""
    numbers = sorted({number for number in values if type(number) is int and number > 0})
    found: list[int | str] = [*numbers, *(word for word in (ALL,) if word in values)]
    if len(found) < len(values) or len(found) == 1:
        raise ValueError(f"two or more different numbers, such as 100,300,1000,{ALL}, for a curve runs through them")
    return tuple(found)


@option_group
class StudyConfig(SeveralSets):
    """Several methods at an equal trainable budget and for an equal time, several seeds each.

    All further sections apply to every method; a method's preset takes precedence. Only methods whose presets have
    replay, or objective.keep or keep_weight, read general text (--replay.corpus).
    """

    # names of presets
    methods: Main[Annotated[tuple[str, ...], SOME, DIFFERENT]] = free(
        ("full", "lora", "fl_tuning", "af", "bottleneck", "exbert")
    )
    # share that trains, for methods with a size; 0: the presets' own sizes
    budget: Main[ShareOrZero] = 0.17
    # several such shares instead of --budget: a method with a size runs at each
    budgets: Main[Annotated[tuple[Share, ...], DIFFERENT]] = free(())
    seconds: Main[NonNegativeFloat] = 0.0  # training seconds of a run; or give --tokens
    tokens: Main[NonNegativeInt] = 0  # tokens that a run reads; or give --seconds
    tokens_by_method: dict[str, PositiveInt] = free(dict)  # other numbers of tokens for some methods
    seeds: Main[Annotated[int, Field(ge=1, le=1000)]] = free(3)  # runs of each method
    seed: NonNegativeInt = free(0)  # the first run's seed; the others count up from it
    # peak rates, from which each method uses its best; empty: the presets' rates
    rates: Main[Annotated[tuple[Rate, ...], DIFFERENT]] = ()
    # what chooses the rate: loss, bits of held-out text; or dev, after fine-tuning, the mean over --tasks
    rates_by: Literal["loss", "dev"] = later("loss")
    # share of --seconds or --tokens for a run that tries a rate
    tune_frac: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    # general text that no model was trained on, to measure forgetting
    retention: Main[Texts[str]] = free("")
    retention_texts: Count = free(10_000)  # texts that are drawn from it
    # labelled sets to fine-tune all models on: families, described sets, YAML
    tasks: Main[Described[tuple[str, ...]]] = free(())
    data: Main[SetPlaces] = free(())  # folders (or hub names) of the tasks' sets
    # numbers of labels for fine-tuning all models, such as 100,300,1000,all; empty: all
    labels: Annotated[tuple[int | str, ...], PlainValidator(_check_labels)] = free(())
    presets: Main[Options[dict[str, Any]]] = free(dict)  # further methods: options by name
    # general-mini (ships with the package), a folder, or a hub id
    base: Main[Base] = "general-mini"
    # package-docs, or comma-separated files, globs, folders, s3:// addresses, hf://NAME:CONFIG@REVISION
    corpus: Main[Corpus] = "package-docs"
    dry_run: Main[bool] = free(False)  # check everything, print the plan and the counts, start nothing
    run: RunConfig = field(default_factory=RunConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)  # of every model, on every set of --tasks

    def __post_init__(self) -> None:
        self._check_lengths()
        self.check_sets("the study", ("dry_run", "export"))
        require(bool(self.tasks) or not self.labels, "labels", self.labels, "left out without --tasks")
        require_disk("run.dir", self.run.dir)
        require(self.seed < 2**63 - self.seeds, "seed", self.seed, "from 0 to below 2^63 - --seeds")
        require(self.base != "none", "base", self.base, "a name, a folder or a hub id")
        require(len(self.rates) != 1, "rates", self.rates, "two or more, or left out")
        has_dev = bool(self.rates and self.tasks) or self.rates_by == "loss"
        require(has_dev, "rates_by", self.rates_by, "loss without --rates and --tasks")
        check_limits(self.train, self.optim)
        require(self.optim.lr == OptimConfig.lr, "optim.lr", self.optim.lr, "left out: presets have it, or --rates")
        check_batch(self.train, self.scale)
        for name in (method for method in self.methods if method not in self.presets):
            near = suggest(name, self.presets)
            rule = f"one of {', '.join(self.presets)}, or a name in --presets or in presets: of a --config file."
            raise ConfigError(
                f"--methods names {name!r}; " + (f"did you mean {' or '.join(near)}?" if near else f"it must be {rule}")
            )

    def _check_lengths(self) -> None:
        rule = f"{'0' if self.tokens else 'above 0'} when --tokens is {self.tokens}; give one of the two"
        require((self.seconds > 0) != (self.tokens > 0), "seconds", self.seconds, rule)
        for name in self.tokens_by_method:
            require(name in self.methods, "tokens_by_method", name, "a method of --methods")
            require(self.tokens > 0, "tokens_by_method", name, "left out without --tokens")

    @property
    def sizes(self) -> tuple[int | str, ...]:
        """Numbers of labels that the models are fine-tuned on, ascending, `ALL` at the end."""
        return self.labels or (ALL,)

    def count_tokens(self, method: str) -> int:
        """Return how many tokens a run of a method reads; 0: its seconds end it."""
        return self.tokens_by_method.get(method, self.tokens)


def check_limits(train: TrainConfig, optim: OptimConfig) -> None:
    """Refuse options by which a run of a study would end, or its rate fall, in another way than the others'."""
    for name in ("max_steps", "epochs", "max_tokens", "max_seconds"):
        value = getattr(train, name)
        require(value == getattr(TrainConfig, name), f"train.{name}", value, "left out: --seconds or --tokens rules")
    for name in ("schedule", "decay_steps"):
        value = getattr(optim, name)
        rule = "left out: the rate falls as --seconds or --tokens end (wsd)"
        require(value == getattr(OptimConfig, name), f"optim.{name}", value, rule)
    require(not train.long_seq_length, "train.long_seq_length", train.long_seq_length, "0 in a study")


@option_group
class BankConfig:
    """An adapter bank and what to do with it; without --add, --remove and --verify it is listed."""

    # the bank's folder, or s3://BUCKET/BANK; the first --add makes it
    bank: Read[Written[Annotated[str, filled("a folder, such as bank"), place(buckets=True)]]] = ""
    # the directory of a run, such as runs/clinic, whose adapter is added; a fine-tuned one brings its head
    add: Found[Annotated[str, place("a run's directory", buckets=True)]] = ""
    name: str = ""  # name of the added adapter in the bank: letters, digits and underscores
    remove: str = ""  # name of an adapter to delete
    verify: bool = False  # compare the base and every file with their hashes
    # the bank's base (a folder or a hub id), if it has moved; empty: its old place, or in a new bank its run's base
    base: ModelPlace = ""

    def __post_init__(self) -> None:
        require(
            self.name.isidentifier() if self.add else not self.name,
            "name",
            self.name,
            "a name of letters, digits and underscores with --add" if self.add else "empty without --add",
        )
        asked = [name for name in ("add", "remove", "verify") if getattr(self, name)]
        if len(asked) > 1:
            raise ConfigError(f"--{asked[0]} and --{asked[1]} are both given; give one of them.")


@option_group
class VerifyConfig:
    """The folder to verify."""

    # a run, a corpus, a vocabulary, a bank or an export, here or s3://BUCKET/…
    path: Found[Annotated[str, filled("a folder, such as runs/af"), place(buckets=True)]] = ""


@option_group
class EnvConfig:
    """The format of the report, and the storage to try."""

    json: bool = False  # print JSON
    run: RunConfig = field(default_factory=RunConfig)
