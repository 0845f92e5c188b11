"""The configurations of jobs that train no model of their own: export, comparison, study, forgetting and bank.

As in config.py, nothing here reads a file, and `config.parse_config` makes them from YAML and flags.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from domext_ray.config.pretrain import (
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
from domext_ray.errors import ConfigError, OptionError
from domext_ray.options.fields import MANY, check_place, free, require, require_at_most, require_one_of
from domext_ray.options.option_values import read_whole


@dataclass(frozen=True)
class ExportConfig:
    """Which run to export, where to, and whether the hub gets it."""

    run: str = ""  # the run's directory, such as runs/af
    output: str = ""  # folder of the export; empty: RUN/export, RUN/adapterhub or RUN/peft, by the format
    format: Literal["huggingface", "adapterhub", "peft"] = "huggingface"  # whole model; bottlenecks alone; LoRA alone
    domain: str = ""  # domain whose bottlenecks are exported (adapterhub); empty: the one that the run trained
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # how the tensors are stored (huggingface)
    push: str = ""  # repository of the Hugging Face hub, ORG/NAME: says what would be uploaded; empty: nothing
    push_now: bool = False  # upload it, with the token in the environment variable HF_TOKEN
    push_private: bool = True  # only the repository's owners see it

    def __post_init__(self) -> None:
        require(bool(self.run.strip()), "run", self.run, "a run's directory, such as runs/af")
        check_place("run", self.run, "a run's directory")
        check_place("output", self.output)
        require_one_of(self.format, "format", ("huggingface", "adapterhub", "peft"))
        is_whole = self.format == "huggingface"
        require(is_whole or self.dtype == "float32", "dtype", self.dtype, f"float32 with --format {self.format}")
        require(self.format == "adapterhub" or not self.domain, "domain", self.domain, "left out but for adapterhub")
        rule = "ORG/NAME: letters, digits, dots, dashes and underscores, at most 96 of them, none of -- and .. in it"
        require(not self.push or _is_repository(self.push), "push", self.push, rule)
        require(bool(self.push) or not self.push_now, "push_now", self.push_now, "false without --push ORG/NAME")

    @property
    def folder_name(self) -> str:
        """Name of the folder in the run's directory when `output` is empty."""
        return "export" if self.format == "huggingface" else self.format


def _is_repository(name: str) -> bool:
    """Whether a name is one of the hub's repositories with its owner."""
    part = r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9_])?"
    is_name = re.fullmatch(f"{part}/{part}", name, re.ASCII) is not None
    return is_name and len(name) <= 96 and not re.search(r"--|\.\.|\.git$", name)


@dataclass(frozen=True)
class CompareConfig:
    """Which runs to compare."""

    runs: str = ""  # run directories, separated by commas
    output: str = "comparison.png"  # the picture

    def __post_init__(self) -> None:
        require(bool(self.runs.strip()), "runs", self.runs, "run directories, such as runs/af,runs/exbert")
        for each in self.runs.split(","):
            require(bool(each.strip()), "runs", self.runs, "run directories with one comma between them")
            check_place("runs", each.strip(), "run directories")
        require(bool(self.output.strip()), "output", self.output, "a picture's file, such as comparison.png")
        check_place("output", self.output, "a file")


def name_models(models: str) -> tuple[tuple[str, str], ...]:
    """Return names and models of `--models`: what stands before "=", or the last part of the path (before "export")."""
    pairs = []
    for entry in (each.strip() for each in models.split(",")):
        name, mark, model = entry.partition("=")
        if not mark or "/" in name:
            parts = [each for each in entry.split("/") if each] or [""]
            name, model = parts[-2] if parts[-1] == "export" and len(parts) > 1 else parts[-1], entry
        pairs.append((name.strip(), model.strip()))
    return tuple(pairs)


def check_models(value: str) -> None:
    """Refuse `--models` that name none, or one twice.

    Raises:
        OptionError: they do.
    """
    names, models = zip(*name_models(value), strict=True)
    require(all(models), "models", value, "models such as base=NAME,runs/af")
    require(len(set(names)) == len(names), "models", value, "models of different names (NAME=MODEL)")
    for model in models:
        check_place("models", model, "hub ids, or folders")
    is_once = len({model.rstrip("/") for model in models}) == len(names)
    require(is_once, "models", value, "different models, each one once")


@dataclass(frozen=True)
class ForgettingConfig:
    """Which models predict the same masked words of general text, and of which text."""

    models: str = ""  # [NAME=]MODEL by commas; MODEL is a run's directory, an export, a base's folder or a hub id
    corpus: str = ""  # general text that no model was trained on: files, globs or folders, by commas
    output: str = "forgetting"  # folder of results.json, forgetting.md, forgetting.png and what was predicted before
    num_texts: int = 10_000  # texts that are drawn from the corpus (AF Adapter: 10,000)
    mask_frac: float = 0.15  # share of the tokens that is masked, once and for all models
    max_length: int = 128  # tokens of a row; longer texts are cut, at the same character for all models
    shared_words: bool = True  # models with different vocabularies are compared on the words that all have as one token
    batch_size: int = 32  # rows of a forward pass; the figures do not depend on it
    route: bool = False  # a model with a router sends each text to the domain, or the base, that it belongs to
    seed: int = 0  # of the texts and masks
    prepare: PrepareConfig = field(default_factory=PrepareConfig)

    def __post_init__(self) -> None:
        check_models(self.models)
        require(bool(self.corpus.strip()), "corpus", self.corpus, "at least one file or folder of general text")
        require(bool(self.output.strip()), "output", self.output, "a folder")
        check_place("output", self.output)
        for name, least in (("num_texts", 1), ("max_length", 8), ("batch_size", 1), ("seed", 0)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"{least} or more")
        require_at_most(self, "", num_texts=100 * MANY, max_length=MANY, batch_size=MANY)
        require(0.0 < self.mask_frac < 1.0, "mask_frac", self.mask_frac, "between 0 and 1")
        rule = "left out here: general text is one text a row (--prepare.field)"
        require(not self.prepare.pair, "prepare.pair", self.prepare.pair, rule)

    @property
    def named_models(self) -> tuple[tuple[str, str], ...]:
        """See `name_models`."""
        return name_models(self.models)


@dataclass(frozen=True)
class StudyConfig:
    """Several methods at an equal trainable budget and for an equal time, several seeds each.

    All further sections hold for every method; what a method's preset says goes first. General text (--replay.corpus)
    is read by the methods alone whose presets have replay, or objective.keep or keep_weight.
    """

    methods: str = free("full,lora,fl_tuning,af,bottleneck,exbert")  # names of presets, separated by commas
    budget: float = 0.17  # trainable share of base and extension, where a method has a size; 0: the presets' own sizes
    budgets: str = free("")  # several such shares by commas, in the place of --budget: a sized method runs at each
    seconds: float = 0.0  # training seconds of a run; or give --tokens
    tokens: int = 0  # tokens that a run reads; or give --seconds
    tokens_by_method: dict[str, Any] = field(default_factory=dict, metadata={"free": True})  # other numbers by method
    seeds: int = free(3)  # runs of each method
    seed: int = free(0)  # the first run's seed; the others count up from it
    rates: str = ""  # peak rates by commas, of which each method takes its best; empty: the presets' rates
    tune_frac: float = 0.5  # share of --seconds or --tokens that a run takes which tries a rate
    retention: str = free("")  # general text that no model was trained on: what each model still predicts of it
    retention_texts: int = free(10_000)  # texts that are drawn from it
    presets: dict[str, Any] = field(default_factory=dict, metadata={"free": True})  # further methods: options by name
    base: str = "general-mini"  # general-mini (ships with the package), a folder, or a hub id
    corpus: str = "package-docs"  # as in a training job
    dry_run: bool = free(False)  # validate, print the plan and the counts, start nothing
    run: RunConfig = field(default_factory=RunConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)

    def __post_init__(self) -> None:
        names = self.method_names
        require(all(names) and len(set(names)) == len(names), "methods", self.methods, "different names, by commas")
        require(0.0 <= self.budget < 1.0, "budget", self.budget, "from 0 to below 1")
        self._check_lists()
        for name in ("seconds", "tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(
            (self.seconds > 0) != (self.tokens > 0),
            "seconds",
            self.seconds,
            f"{'0' if self.tokens else 'above 0'} when --tokens is {self.tokens}; give one of the two",
        )
        for name, tokens in self.tokens_by_method.items():
            require(name in names, "tokens_by_method", name, "a method of --methods")
            require(self.tokens > 0, "tokens_by_method", name, "left out without --tokens")
            number, rule = read_whole(tokens)
            require(number is not None and number >= 1, f"tokens_by_method.{name}", tokens, rule or "1 or more")
        require(self.seeds >= 1, "seeds", self.seeds, "1 or more")
        require_at_most(self, "", seeds=1000, retention_texts=100 * MANY)
        require(self.retention_texts >= 1, "retention_texts", self.retention_texts, "1 or more")
        require(0 <= self.seed < 2**63 - self.seeds, "seed", self.seed, "from 0 to below 2^63 - --seeds")
        require(bool(self.base.strip()) and self.base != "none", "base", self.base, "a name, a folder or a hub id")
        check_place("base", self.base, "a hub id, or a folder")
        check_place("run.dir", self.run.dir)
        require(bool(self.corpus.strip()), "corpus", self.corpus, "package-docs, or at least one file or folder")
        check_limits(self.train, self.optim)
        require(self.optim.lr == OptimConfig.lr, "optim.lr", self.optim.lr, "left out: presets have it, or --rates")
        check_batch(self.train, self.scale)

    def _check_lists(self) -> None:
        budgets, rates = self.budget_list, self.rate_list
        rule = "different shares between 0 and 1, by commas"
        require(all(0.0 < each < 1.0 for each in budgets), "budgets", self.budgets, rule)
        require(len(set(budgets)) == len(budgets), "budgets", self.budgets, rule)
        rule = "two or more different rates above 0, by commas"
        require(not self.rates or len(set(rates)) == len(rates) > 1, "rates", self.rates, rule)
        require(all(0.0 < each < math.inf for each in rates), "rates", self.rates, rule)
        require(0.0 < self.tune_frac <= 1.0, "tune_frac", self.tune_frac, "above 0, at most 1")

    @property
    def method_names(self) -> tuple[str, ...]:
        """The methods in their order."""
        return tuple(each.strip() for each in self.methods.split(","))

    def count_tokens(self, method: str) -> int:
        """Return how many tokens a run of a method reads; 0: its seconds end it."""
        return read_whole(self.tokens_by_method.get(method, self.tokens))[0] or 0

    @property
    def budget_list(self) -> tuple[float, ...]:
        """What --budgets has, in its order."""
        return _read_numbers("budgets", self.budgets)

    @property
    def rate_list(self) -> tuple[float, ...]:
        """What --rates has, ascending."""
        return tuple(sorted(_read_numbers("rates", self.rates)))


def _read_numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(",")) if text else ()
    except ValueError as error:
        raise OptionError(option, text, "numbers with one comma between them") from error


def check_limits(train: TrainConfig, optim: OptimConfig) -> None:
    """Refuse options by which a run of a study would end, or its rate fall, in another way than the others'.

    Raises:
        ConfigError: one of them is given.
    """
    for name in ("max_steps", "epochs", "max_tokens", "max_seconds"):
        value = getattr(train, name)
        require(value == getattr(TrainConfig, name), f"train.{name}", value, "left out: --seconds or --tokens rules")
    for name in ("schedule", "decay_steps"):
        value = getattr(optim, name)
        rule = "left out: the rate falls as --seconds or --tokens end (wsd)"
        require(value == getattr(OptimConfig, name), f"optim.{name}", value, rule)
    require(not train.long_seq_length, "train.long_seq_length", train.long_seq_length, "0 in a study")


@dataclass(frozen=True)
class BankConfig:
    """An adapter bank and what to do with it; without --add, --remove and --verify it is listed."""

    bank: str = ""  # the bank's folder; the first --add makes it
    add: str = ""  # directory of a run, such as runs/clinic, whose domain is added, of a fine-tuned one with its head
    name: str = ""  # what the bank calls the adapter that is added: letters, digits and underscores
    remove: str = ""  # name of an adapter to delete
    verify: bool = False  # compare the base and every file with their hashes
    base: str = ""  # where the bank's base is, if it has moved; empty: where it was, of a new bank where its run began

    def __post_init__(self) -> None:
        require(bool(self.bank.strip()), "bank", self.bank, "a folder, such as bank")
        check_place("bank", self.bank)
        check_place("add", self.add, "a run's directory")
        check_place("base", self.base, "a hub id, or a folder")
        require(
            self.name.isidentifier() if self.add else not self.name,
            "name",
            self.name,
            "a name of letters, digits and underscores with --add" if self.add else "empty without --add",
        )
        asked = [name for name in ("add", "remove", "verify") if getattr(self, name)]
        if len(asked) > 1:
            raise ConfigError(f"--{asked[0]} and --{asked[1]} are both given; give one of them.")
