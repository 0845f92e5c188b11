"""The configuration of fine-tuning: a task, its labelled set, a model, what trains, and a grid with random restarts.

As in config.py, nothing here reads a file, and `config.parse_config` makes it from YAML and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, Literal, TypeVar

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig
from domext_ray.extensions.table import EXTENSIONS
from domext_ray.options.fields import (
    MANY,
    UseGpu,
    check_folder_name,
    check_place,
    check_use_gpu,
    free,
    is_gpu_used,
    require,
    require_at_most,
    require_one_of,
)
from domext_ray.options.option_values import read_number, read_whole

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class PlaceConfig:
    """Where a fine-tuning run lives."""

    name: str = free("")  # name of the run; empty: the set's and the model's
    dir: str = free("runs")  # folder of all runs; the run itself is DIR/NAME

    def __post_init__(self) -> None:
        if self.name:
            check_folder_name("run.name", self.name)
        require(bool(self.dir.strip()), "run.dir", self.dir, "a folder")
        check_place("run.dir", self.dir)


@dataclass(frozen=True)
class LabelledConfig:
    """How labelled examples become rows."""

    max_length: int = 128  # tokens of a row at most; longer examples are windowed, pairs are cut
    stride: int = 32  # tokens that neighbouring windows of a long example share
    context: bool = False  # ner: rows are filled with the document's neighbouring sentences
    metric: str = ""  # figure that dev chooses by, such as entity_f1.macro; empty: the set's own
    embedding_recall: bool = False  # normalization: candidates are also recalled by the start model's embeddings
    class_weights: Literal["none", "balanced"] = "none"  # balanced: rare classes weigh as much as frequent ones
    strict: bool = False  # the first dirty example of a file is an error; else dirty ones are counted and left out
    repair: bool = free(False)  # ner: tags that their scheme forbids, such as a stray I-, are mended and counted

    def __post_init__(self) -> None:
        require(self.max_length >= 16, "labelled.max_length", self.max_length, "16 or more")
        require_at_most(self, "labelled.", max_length=MANY)
        require_one_of(self.class_weights, "labelled.class_weights", ("none", "balanced"))
        require(
            0 <= self.stride <= self.max_length // 2,
            "labelled.stride",
            self.stride,
            f"from 0 to half of --labelled.max_length ({self.max_length // 2})",
        )
        require(not (self.strict and self.repair), "labelled.repair", True, "false with --labelled.strict true")


@dataclass(frozen=True)
class GridConfig:
    """The hyperparameters that dev chooses from: every combination is trained, with every restart.

    Lists are numbers separated by commas; the point with the best mean on dev over its restarts is chosen. A run goes
    on with other values, restarts or another --seed: what has ended is kept. BERT section A.3: batches of 16 or 32,
    rates 5e-5, 3e-5 and 2e-5, 2 to 4 epochs.
    """

    lr: str = "5e-5"  # peak learning rates
    batch_size: str = "32"  # rows of an optimiser step
    epochs: str = "3"  # passes over the training split
    stage_lr: str = ""  # of two-step tasks: a step's own peak rate, such as entities=1e-3; empty: --grid.lr
    stage_epochs: str = ""  # of two-step tasks: a step's own epochs, such as entities=10; empty: --grid.epochs
    restarts: int = 1  # trainings of each combination, with seeds that count up from --seed
    micro_batch_size: int = free(0)  # rows of one forward pass; 0: the whole batch
    score_every_epoch: bool = free(True)  # score dev after every epoch; else after the last one only
    patience: int = 0  # stop after this many epochs without a better dev, and keep the best; 0: train all

    def __post_init__(self) -> None:
        require(self.patience >= 0, "grid.patience", self.patience, "0 (train all epochs) or more")
        is_scored = self.score_every_epoch or not self.patience
        require(is_scored, "grid.score_every_epoch", False, "true with --grid.patience")
        require(min(self.rates) > 0.0, "grid.lr", self.lr, "above 0")
        require(min(self.batch_sizes) >= 1, "grid.batch_size", self.batch_size, "1 or more")
        require(min(self.epoch_counts) > 0.0, "grid.epochs", self.epochs, "above 0")
        for name, values in (("lr", self.rates), ("batch_size", self.batch_sizes), ("epochs", self.epoch_counts)):
            is_once = len({f"{each:g}" for each in values}) == len(values)  # as names of trainings have them
            require(
                is_once, f"grid.{name}", getattr(self, name), "different numbers: a point given twice is no restart"
            )
        rule = "steps with a number above 0, such as entities=10"
        require(all(each > 0.0 for each in self.rates_by_stage.values()), "grid.stage_lr", self.stage_lr, rule)
        require(all(each > 0.0 for each in self.epochs_by_stage.values()), "grid.stage_epochs", self.stage_epochs, rule)
        require(self.restarts >= 1, "grid.restarts", self.restarts, "1 or more")
        require_at_most(self, "grid.", restarts=1000, patience=MANY)
        require(self.micro_batch_size >= 0, "grid.micro_batch_size", self.micro_batch_size, "0 (whole batch) or more")

    @property
    def rates(self) -> tuple[float, ...]:
        """The peak learning rates."""
        return _parse_numbers(self.lr, "grid.lr", float)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes."""
        return _parse_numbers(self.batch_size, "grid.batch_size", int)

    @property
    def epoch_counts(self) -> tuple[float, ...]:
        """The numbers of epochs."""
        return _parse_numbers(self.epochs, "grid.epochs", float)

    @property
    def rates_by_stage(self) -> dict[str, float]:
        """Peak learning rates of the steps that do not take the grid's, by name."""
        return _parse_stages(self.stage_lr, "grid.stage_lr")

    @property
    def epochs_by_stage(self) -> dict[str, float]:
        """Epochs of the steps that do not take the grid's, by name."""
        return _parse_stages(self.stage_epochs, "grid.stage_epochs")

    @property
    def points(self) -> list[tuple[float, int, float]]:
        """Every combination of rate, batch size and epochs."""
        return list(product(self.rates, self.batch_sizes, self.epoch_counts))


@dataclass(frozen=True)
class FinetuneOptimConfig:
    """AdamW with linear warm-up and linear decay, and rates of their own for the head and the top layers.

    exBERT fine-tuned with --optim.top_layers 3 --optim.top_layers_lr 1e-5 and 1e-4 for the rest and the head.
    """

    head_lr: float = 0.0  # peak rate of the task's head; 0: the grid's
    top_layers: int = 0  # layers, from the last one down, that have a rate of their own
    top_layers_lr: float = 0.0  # their peak rate
    warmup_frac: float = 0.1  # share of the steps from 0 to the peak
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    eps: float = 1e-8  # added to the denominator
    weight_decay: float = 0.01  # on matrices; never on biases and LayerNorms
    max_grad_norm: float = 1.0  # gradients are clipped to this global norm; 0: no clipping
    dropout: float = 0.1  # of hidden states, attention weights and the head's input
    label_smoothing: float = 0.0  # share of a label that is spread over all classes

    def __post_init__(self) -> None:
        for name in ("head_lr", "top_layers_lr", "weight_decay", "max_grad_norm", "top_layers"):
            require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "0 or more")
        require(
            (self.top_layers > 0) == (self.top_layers_lr > 0),
            "optim.top_layers_lr",
            self.top_layers_lr,
            f"{'above 0' if self.top_layers else '0'} when --optim.top_layers is {self.top_layers}",
        )
        for name in ("warmup_frac", "beta1", "beta2", "dropout", "label_smoothing"):
            require(0.0 <= getattr(self, name) < 1.0, f"optim.{name}", getattr(self, name), "from 0 to below 1")
        require(self.eps > 0.0, "optim.eps", self.eps, "above 0")
        require_at_most(self, "optim.", head_lr=10, top_layers_lr=10, weight_decay=10, eps=1)


@dataclass(frozen=True)
class FeaturesConfig:
    """Feature-based use of a frozen encoder (BERT section 5.3): a BiLSTM reads the outputs of its layers."""

    layers: str = ""  # layers whose outputs are features, from 1 on, such as 9-12 (0: embeddings); empty: none
    combine: str = "concat"  # concat, or mix: a learned weighted mean
    hidden_size: int = 768  # units of the BiLSTM, both directions together
    num_layers: int = 2  # layers of the BiLSTM

    def __post_init__(self) -> None:
        require(self.combine in ("concat", "mix"), "features.combine", self.combine, "concat or mix")
        is_even = self.hidden_size >= 2 and self.hidden_size % 2 == 0
        require(is_even, "features.hidden_size", self.hidden_size, "even, 2 or more")
        require_at_most(self, "features.", hidden_size=MANY, num_layers=100)
        require(self.num_layers >= 1, "features.num_layers", self.num_layers, "1 or more")
        if self.layers:
            _ = self.layer_numbers

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The layers, in order: 0 is the embeddings' output, L the last layer's."""
        first, _, last = self.layers.partition("-")
        last = last or first
        is_range = first.strip().isdigit() and last.strip().isdigit() and int(first) <= int(last)
        require(is_range, "features.layers", self.layers, "a layer, or the first and the last one, such as 9-12")
        return tuple(range(int(first), int(last) + 1))


@dataclass(frozen=True)
class TrainingScaleConfig:
    """Trainings at once and what each of them gets; a training is one process."""

    parallel: int = free(0)  # trainings at once; 0: as many as there are CPUs or, with --scale.use_gpu, GPUs
    cpus: float = free(0.0)  # CPUs of a training (Ray's share and torch's threads); 0: an even share
    use_gpu: UseGpu = free("auto")  # one GPU per training; auto: where there is a GPU

    def __post_init__(self) -> None:
        require(self.parallel >= 0, "scale.parallel", self.parallel, "0 (as many as fit) or more")
        check_use_gpu(self.use_gpu)
        require(self.cpus >= 0.0, "scale.cpus", self.cpus, "0 or more")

    @property
    def uses_gpu(self) -> bool:
        """Whether each training has a GPU; `auto` has been settled (`cluster.settle_gpu`)."""
        return is_gpu_used(self.use_gpu)


FULL = MethodConfig(name="full", trains="all", domain="task", heads=0, ffn_units=0)
"""Every parameter trains."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tune a model on a labelled set, choose by dev, score test once."""

    task: str = "code_entities"  # a family (ner, qa, ...), a described set (bc5cdr, rte, ...), or a YAML of your own
    data: str = ""  # folder (or hub name) of the set's files; empty: code_entities, which ships
    model: str = "general-mini"  # a run's directory, an export, a base's folder, or a hub id
    model_step: int = 0  # checkpoint of a run; 0: the newest
    keep_head: bool = False  # the head of a model that was fine-tuned before goes on; its labels must be the set's
    head_bilstm: int = 0  # width of each direction of a BiLSTM between encoder and head (BERT section 5.1); 0: none
    seed: int = 0  # seed of the head's start, data order and dropout
    dry_run: bool = free(False)  # validate, print the plan and the counts, start nothing
    num_resamples: int = 1000  # bootstrap samples of an interval
    export: bool = free(True)  # write the best model as a Hugging Face folder
    run: PlaceConfig = field(default_factory=PlaceConfig)
    method: MethodConfig = field(default_factory=lambda: FULL)
    labelled: LabelledConfig = field(default_factory=LabelledConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    optim: FinetuneOptimConfig = field(default_factory=FinetuneOptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scale: TrainingScaleConfig = field(default_factory=TrainingScaleConfig)

    def __post_init__(self) -> None:
        require(bool(self.task.strip()), "task", self.task, "a task, a described set, or a YAML")
        require(bool(self.model.strip()), "model", self.model, "a run's directory, an export, a base or a hub id")
        check_place("model", self.model, "a hub id, or a folder")
        check_place("data", self.data, "a hub name, or a folder")
        require(self.model_step >= 0, "model_step", self.model_step, "0 or more")
        require(self.head_bilstm >= 0, "head_bilstm", self.head_bilstm, "0 or more")
        require(
            not (self.head_bilstm and self.features.layers), "head_bilstm", self.head_bilstm, "0 with --features.layers"
        )
        require(0 <= self.seed < 2**62, "seed", self.seed, "from 0 to below 2^62")
        require(self.num_resamples >= 100, "num_resamples", self.num_resamples, "100 or more")
        require_at_most(self, "", num_resamples=MANY, head_bilstm=MANY)
        for extension in EXTENSIONS:
            for name in () if extension.tunes_tasks else extension.sizes:
                value, rule = getattr(self.method, name), "0 in fine-tuning; the task's own extension is a bottleneck"
                require(value == 0, f"method.{name}", value, rule)
        require(not self.method.trainable_budget, "method.trainable_budget", self.method.trainable_budget, "0 here")
        require(not self.engine.compile, "engine.compile", True, "false in fine-tuning")
        if self.features.layers:
            self._check_features()

    @property
    def head_values(self) -> dict[str, Any]:
        """Values of the model's configuration that say what is between the encoder and the task's head."""
        features = self.features
        if not features.layers:
            return {"head_bilstm": self.head_bilstm}
        return {
            "head_bilstm": features.hidden_size // 2,
            "head_bilstm_layers": features.num_layers,
            "head_layers": list(features.layer_numbers),
            "head_mix": features.combine == "mix",
        }

    def _check_features(self) -> None:
        """With features the encoder is frozen, and a BiLSTM between it and the head trains."""
        for each in fields(MethodConfig):
            if each.name != "name":
                value, only = getattr(self.method, each.name), getattr(FULL, each.name)
                require(value == only, f"method.{each.name}", value, f"{only!r} with --features.layers")
        for option, value in (
            ("optim.top_layers", self.optim.top_layers),
            ("engine.activation_checkpointing", self.engine.activation_checkpointing),
        ):
            require(not value, option, value, f"{type(value)(0)!r} with --features.layers")


def _parse_numbers(text: str, option: str, kind: type[NumberT]) -> tuple[NumberT, ...]:
    read = read_whole if kind is int else read_number
    found = [kind(number) for number, _ in map(read, text.split(",")) if number is not None]
    name = "whole numbers" if kind is int else "finite numbers"
    require(len(found) == text.count(",") + 1, option, text, f"{name} separated by commas")
    return tuple(found)


def _parse_stages(text: str, option: str) -> dict[str, float]:
    pairs = [each.partition("=") for each in text.split(",") if text]
    names = [name.strip() for name, _, _ in pairs]
    require(len(set(names)) == len(names), option, text, "different steps, each one once")
    return {name.strip(): _parse_numbers(number, option, float)[0] for name, _, number in pairs}


STUDIES = ("spans", "sigma", "size")
BOTTLENECK = MethodConfig(
    name="bottleneck", trains="extensions", domain="task", heads=0, ffn_units=0, bottleneck_size=64
)
"""Houlsby's adapters: two bottlenecks a layer and their LayerNorms train, beside a frozen base."""


@dataclass(frozen=True)
class AblateConfig(FinetuneConfig):
    """Studies of bottlenecks in fine-tuning (Houlsby et al. section 3.6), beside the options of fine-tuning.

    spans: parts of a domain are removed from a fine-tuned model, over every span of layers, without retraining; its set
    and model are the run's (--data and --model say where they are now, should they have moved). sigma: fine-tuning from
    bottlenecks of several initial magnitudes. size: bottlenecks of several sizes, top layers, LayerNorms alone, and
    everything.
    """

    method: MethodConfig = field(default_factory=lambda: BOTTLENECK)
    study: Literal["spans", "sigma", "size"] = "spans"  # remove parts by layers; vary their start; vary their size
    finetuned: str = ""  # spans: directory of a fine-tuning run that has ended, such as runs/af-ner
    domain: str = ""  # spans: domain whose parts are removed; empty: the run's own, or the only one
    remove_norms: bool = False  # spans: the shifts of the span's LayerNorms are removed too
    sigmas: str = "1e-7,1e-6,1e-5,1e-4,1e-3,1e-2,1e-1,1"  # sigma: standard deviations of the bottlenecks' start
    sizes: str = "1,2,4,8,16,32,64,128,256,512"  # size: widths m of the bottlenecks
    top_layers: str = "all"  # size: numbers of top layers that train instead; all: from 1 to all layers; or none
    output: str = ""  # folder of figures and tables; empty: FINETUNED/ablation, or RUN.DIR/NAME-sigma and NAME-size

    def __post_init__(self) -> None:
        require(not self.features.layers, "features.layers", self.features.layers, "empty in these studies")
        super().__post_init__()
        require_one_of(self.study, "study", STUDIES)
        is_spans = self.study == "spans"
        rule = "the directory of a fine-tuning run with --study spans" if is_spans else "empty without --study spans"
        require(bool(self.finetuned.strip()) == is_spans, "finetuned", self.finetuned, rule)
        for option, values in (("sigmas", self.sigma_values), ("sizes", self.size_values)):
            require(len(set(values)) == len(values), option, getattr(self, option), "different numbers, by commas")
        in_range = all(0.0 < each <= 1.0 for each in self.sigma_values)
        require(in_range, "sigmas", self.sigmas, "numbers above 0, at most 1")
        require(min(self.size_values) >= 1, "sizes", self.sizes, "numbers of 1 or more")
        check_place("finetuned", self.finetuned, "a run's directory")
        check_place("output", self.output)
        layers = self.top_layer_values
        require(min(layers, default=1) >= 1, "top_layers", self.top_layers, "all, none, or numbers of 1 or more")
        require(len(set(layers)) == len(layers), "top_layers", self.top_layers, "different numbers, by commas")
        if not is_spans:
            self._check_method()

    def _check_method(self) -> None:
        method = self.method
        require(method.bottleneck_size > 0, "method.bottleneck_size", method.bottleneck_size, "above 0 in this study")
        trains = method.trains in ("extensions", "domain")
        require(trains, "method.trains", method.trains, "extensions or domain in this study")
        require(not method.active_domains, "method.active_domains", method.active_domains, "empty in this study")

    @property
    def sigma_values(self) -> tuple[float, ...]:
        """The standard deviations."""
        return _parse_numbers(self.sigmas, "sigmas", float)

    @property
    def size_values(self) -> tuple[int, ...]:
        """The bottlenecks' widths."""
        return _parse_numbers(self.sizes, "sizes", int)

    @property
    def top_layer_values(self) -> tuple[int, ...]:
        """The numbers of top layers that are named; none for "all"."""
        return () if self.top_layers in ("all", "none") else _parse_numbers(self.top_layers, "top_layers", int)

    def make_finetune_config(self) -> FinetuneConfig:
        """Return the options of fine-tuning alone."""
        return FinetuneConfig(**{each.name: getattr(self, each.name) for each in fields(FinetuneConfig)})
