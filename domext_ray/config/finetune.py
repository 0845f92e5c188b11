"""The configuration of fine-tuning: a task, its labelled set, a model, what trains, and a grid with random restarts.

Nothing here reads a file; `presets.configure` makes it from YAML and flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields, replace
from itertools import product
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from domext_ray.config.method import MethodConfig
from domext_ray.config.options.declare import (
    DIFFERENT,
    MANY,
    SOME,
    CountOrZero,
    Described,
    FolderName,
    Found,
    LayerRange,
    Main,
    ModelPlace,
    Rate,
    Ratio,
    Read,
    RunFolder,
    ShareOrZero,
    Written,
    filled,
    free,
    later,
    option_group,
    place,
    read_layer_range,
    require,
    whole,
)
from domext_ray.config.pretrain import EngineConfig
from domext_ray.config.shared import DryRun, GpuOptions, LongTexts


@option_group
class PlaceConfig:
    """Name and place of a fine-tuning run."""

    name: Main[FolderName] = free("")  # name of the run; empty: the names of set and model
    # folder of all runs; the run itself is DIR/NAME
    dir: Main[Written[Annotated[str, filled("a folder"), place()]]] = free("runs")


@option_group
class LabelledConfig:
    """How labelled examples become rows."""

    # tokens of a row at most; longer texts are windowed, pairs are cut
    max_length: Main[Annotated[int, Field(ge=16, le=MANY)]] = 128
    stride: NonNegativeInt = 32  # tokens that neighbouring windows of a long example share
    context: bool = False  # ner: rows are filled with the document's neighbouring sentences
    metric: str = ""  # figure by which dev chooses, such as f1.macro; empty: the set's own
    embedding_recall: bool = False  # normalization: candidates are also recalled by the start model's embeddings
    class_weights: Literal["none", "balanced"] = "none"  # balanced: rare classes weigh as much as frequent ones
    strict: bool = False  # the first faulty example of a file is an error; else faulty ones are counted and left out
    # examples for training, in whole documents; dev shrinks in proportion, to 50 at least; 0: all
    num_examples: CountOrZero = later(0)
    examples_seed: NonNegativeInt = later(0)  # seed of the order in which they are taken
    # classification, multilabel, regression: cut single texts above max_length, or read them in windows
    long_texts: LongTexts = later("cut")
    repair: bool = free(False)  # ner: mend and count tags that their scheme forbids, such as a stray I-

    def __post_init__(self) -> None:
        most = self.max_length // 2
        rule = f"from 0 to half of --labelled.max_length ({most})"
        require(self.stride <= most, "stride", self.stride, rule)
        require(not (self.strict and self.repair), "repair", True, "false with --labelled.strict true")


def _check_names(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Refuse numbers that names of trainings would not tell apart."""
    if len({f"{number:g}" for number in numbers}) < len(numbers):
        raise ValueError("different numbers: a point given twice is no restart")
    return numbers


Rates = Annotated[tuple[Rate, ...], SOME, AfterValidator(_check_names)]
Numbers = Annotated[tuple[PositiveFloat, ...], SOME, AfterValidator(_check_names)]
Sizes = Annotated[tuple[PositiveInt, ...], SOME, AfterValidator(_check_names)]
Shares = Annotated[tuple[ShareOrZero, ...], SOME, AfterValidator(_check_names)]
DROPOUTS = ("word_dropout", "new_word_dropout")
POINT = ("lr", "batch_size", "epochs", *DROPOUTS)
"""Options of a grid of which a point has one value each; records leave shares of 0 out, for 0.1.0 had no `DROPOUTS`."""

ALL = "all"
"""Of numbers of labels: those that there are."""


@option_group
class GridConfig:
    """The hyperparameters that dev chooses from: every combination is trained, with every restart.

    The point with the best mean on dev over its restarts is chosen. A run resumes also with other values, restarts or
    another --seed, and keeps finished trainings. BERT section A.3: batches of 16 or 32, rates 5e-5, 3e-5 and 2e-5,
    2 to 4 epochs.
    """

    lr: Main[Rates] = (5e-5,)  # peak learning rates
    batch_size: Main[Sizes] = (32,)  # rows of an optimiser step
    epochs: Main[Numbers] = (3.0,)  # passes over the training split
    # shares of the vocabulary that training leaves out at random, so that its words are read in smaller pieces
    word_dropout: Shares = later((0.0,))
    new_word_dropout: Shares = later((0.0,))  # the same shares of the new words
    stage_lr: dict[str, Rate] = whole(dict)  # two-step tasks: rate of a step, such as entities=1e-3; empty: lr
    # two-step tasks: epochs of a step, such as entities=10; empty: epochs
    stage_epochs: dict[str, PositiveFloat] = whole(dict)
    # trainings of each combination, with seeds that count up from --seed
    restarts: Main[Annotated[int, Field(ge=1, le=1000)]] = 1
    # rows of one forward pass at most; 0: as many as have 1,024 tokens on a CPU, 32,768 on a GPU
    micro_batch_size: NonNegativeInt = free(0)
    score_every_epoch: bool = free(True)  # score dev after every epoch; else only after the last one
    # stop after this many epochs without a better score on dev, and keep the best epoch; 0: train all
    patience: CountOrZero = 0

    def __post_init__(self) -> None:
        is_scored = self.score_every_epoch or not self.patience
        require(is_scored, "score_every_epoch", False, "true with --grid.patience")

    def list_points(self, *, new_words: bool = True) -> list[dict[str, Any]]:
        """Return every combination, each by the names of its options; a model without new words cannot drop any."""
        values = {name: getattr(self, name) for name in POINT} | ({} if new_words else {"new_word_dropout": (0.0,)})
        combined = (zip(values, each, strict=True) for each in product(*values.values()))
        return [{name: value for name, value in each if value} for each in combined]

    def at(self, point: Mapping[str, Any]) -> GridConfig:
        """Return the grid of a single one of its points."""
        values: dict[str, Any] = {name: (point.get(name, 0.0),) for name in POINT}
        return replace(self, **values)

    def for_labels(self, number: int | str, total: int) -> GridConfig:
        """Return the grid for so many of all labels, or `ALL`: with more epochs, so in as many steps as with all."""
        if number == ALL:
            return self
        batch = max(self.batch_size)
        more = math.ceil(total / batch) / math.ceil(int(number) / batch)

        def add(epochs: float) -> float:
            return float(f"{more * epochs:g}")

        of_stages = {name: add(epochs) for name, epochs in self.stage_epochs.items()}
        return replace(self, epochs=tuple(map(add, self.epochs)), stage_epochs=of_stages)


@option_group
class FinetuneOptimConfig:
    """AdamW with linear warm-up and linear decay, and separate rates for the head and the top layers.

    exBERT's authors used --optim.top_layers 3 --optim.top_layers_lr 1e-5, and 1e-4 for the rest and the head.
    """

    head_lr: Ratio = 0.0  # peak rate of the task's head; 0: the grid's
    top_layers: NonNegativeInt = 0  # number of last layers with a separate rate
    top_layers_lr: Ratio = 0.0  # their peak rate
    warmup_frac: ShareOrZero = 0.1  # share of the steps from 0 to the peak
    beta1: ShareOrZero = 0.9  # decay of the first moment
    beta2: ShareOrZero = 0.999  # decay of the second moment
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-8  # added to the denominator
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 0.01  # on matrices; never on biases and LayerNorms
    max_grad_norm: NonNegativeFloat = 1.0  # gradients are clipped to this global norm; 0: no clipping
    dropout: ShareOrZero = 0.1  # dropout of hidden states, attention weights and the head's input
    label_smoothing: ShareOrZero = 0.0  # share of a label that is spread over all classes

    def __post_init__(self) -> None:
        rule = f"{'above 0' if self.top_layers else '0'} when --optim.top_layers is {self.top_layers}"
        require((self.top_layers > 0) == (self.top_layers_lr > 0), "top_layers_lr", self.top_layers_lr, rule)


def _check_even(number: int) -> int:
    if number % 2:
        raise ValueError("even, for both directions have as many")
    return number


@option_group
class FeaturesConfig:
    """Feature-based use of a frozen encoder (BERT section 5.3): a BiLSTM reads the outputs of its layers."""

    layers: LayerRange = ""  # layers whose outputs are features, from 1, such as 9-12 (0: embeddings); empty: none
    combine: Literal["concat", "mix"] = "concat"  # how outputs are combined: concat, or mix: a learned weighted mean
    # units of the BiLSTM, both directions together
    hidden_size: Annotated[int, Field(ge=2, le=MANY), AfterValidator(_check_even)] = 768
    num_layers: Annotated[int, Field(ge=1, le=100)] = 2  # layers of the BiLSTM

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The layers, in order: 0 is the embeddings' output, L the last layer's."""
        first, last = read_layer_range(self.layers)
        return tuple(range(first, last + 1))


@option_group
class TrainingScaleConfig(GpuOptions):
    """Concurrent trainings and the resources of each; a training is one process."""

    parallel: NonNegativeInt = free(0)  # trainings at once; 0: as many as there are CPUs or, with --scale.use_gpu, GPUs
    cpus: NonNegativeFloat = free(0.0)  # CPUs of a training (Ray's share and torch's threads); 0: an even share
    # GPUs of a training, with --scale.use_gpu; 0.25: four trainings share a card
    gpus: Annotated[float, Field(gt=0.0, le=1.0)] = free(1.0)


Model = Found[
    Annotated[str, filled("a run's directory, an export, a base or a hub id"), place("a hub id, or a folder")]
]
FULL = MethodConfig(name="full", trains="all", adapter="task", heads=0, ffn_units=0)
"""Every parameter trains."""
SetPlaces = Read[tuple[Annotated[str, place("hub names, or folders")], ...]]


@option_group
class FinetuneConfig:
    """Fine-tune a model on a labelled set, choose on dev, score test once."""

    # a family (ner, qa, ...), a described set (bc5cdr, rte, ...), or your own YAML file
    task: Main[Described[Annotated[str, filled("a task, a described set, or a YAML")]]] = "code_entities"
    # folder (or hub name) of the set's files; empty: code_entities, which ships
    data: Main[Read[Annotated[str, place("a hub name, or a folder")]]] = ""
    model: Main[Model] = "general-mini"  # a run's directory, an export, a base's folder, or a hub id
    model_step: NonNegativeInt = 0  # checkpoint of a run; 0: the newest
    # a base, a run or an export to fine-tune in the same way; the job ends with the difference; empty: none
    against: Main[ModelPlace] = free("")
    keep_head: bool = False  # keep the head of a model that was fine-tuned before; its labels must be the set's
    # width of each direction of a BiLSTM between encoder and head (BERT section 5.1); 0: none
    head_bilstm: CountOrZero = 0
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0  # seed of the head's start, data order and dropout
    # start nothing; print the trainings, their disk, their time once one has ended; full: also all options as YAML
    dry_run: Main[DryRun] = free(False)
    num_resamples: Annotated[int, Field(ge=100, le=MANY)] = 1000  # bootstrap samples of an interval
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
        is_same = self.against == self.model and not self.model_step  # an earlier checkpoint is another model
        require(not (self.against and is_same), "against", self.against, f"another model than --model ({self.model})")
        is_one = not (self.head_bilstm and self.features.layers)
        require(is_one, "head_bilstm", self.head_bilstm, "0 with --features.layers")
        rule = "0 in fine-tuning, which has no corpus to say which words are frequent"
        require(not self.method.word_rows, "method.word_rows", self.method.word_rows, rule)
        require(not self.method.trainable_budget, "method.trainable_budget", self.method.trainable_budget, "0 here")
        require(not self.engine.compile, "engine.compile", True, "false in fine-tuning")
        require(not self.engine.fused, "engine.fused", True, "false in fine-tuning")
        require(self.engine.joined == "auto", "engine.joined", self.engine.joined, "auto in fine-tuning")
        require(not self.engine.fixed_shapes, "engine.fixed_shapes", True, "false in fine-tuning")
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
        for own in fields(MethodConfig):
            if own.name != "name":
                value, only = getattr(self.method, own.name), getattr(FULL, own.name)
                require(value == only, f"method.{own.name}", value, f"{only!r} with --features.layers")
        for option, value in (
            ("optim.top_layers", self.optim.top_layers),
            ("engine.activation_checkpointing", self.engine.activation_checkpointing),
        ):
            require(not value, option, value, f"{type(value)(0)!r} with --features.layers")


class SeveralSets:
    """What a sweep and a study have in common: several labelled sets, and options of fine-tuning that hold for all."""

    tasks: tuple[str, ...]
    data: tuple[str, ...]
    finetune: FinetuneConfig

    @property
    def places(self) -> tuple[str, ...]:
        """Where the tasks' sets are."""
        return self.data or ("",) * len(self.tasks)

    def check_sets(self, owner: str, decided: tuple[str, ...]) -> None:
        """Refuse sets without places, the same one twice, and options of fine-tuning that `owner` decides itself."""
        always = ("task", "data", "model", "model_step", "against", "keep_head", "run.name", "run.dir")
        for name in (*always, "labelled.num_examples", "labelled.examples_seed", *decided):
            value, default = (attrgetter(name)(config) for config in (self.finetune, FinetuneConfig()))
            require(value == default, f"finetune.{name}", value, f"left out: {owner} decides it")
        rule = f"as many as --tasks ({len(self.tasks)})"
        require(not self.data or len(self.data) == len(self.tasks), "data", self.data, rule)
        pairs = list(zip(self.tasks, self.places, strict=True))
        require(len(set(pairs)) == len(pairs), "tasks", self.tasks, "different tasks, or of different --data")


BOTTLENECK = MethodConfig(
    name="bottleneck", trains="extensions", adapter="task", heads=0, ffn_units=0, bottleneck_size=64
)
"""Houlsby's adapters: two bottlenecks a layer and their LayerNorms train, beside a frozen base."""


SIGMAS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@option_group
class AblateConfig(FinetuneConfig):
    """Studies of bottlenecks in fine-tuning (Houlsby et al. section 3.6), in addition to the options of fine-tuning.

    spans: remove parts of an adapter from a fine-tuned model, over every span of layers, without retraining. Set and
    model are the run's; if they have moved, give --data and --model. sigma: fine-tune from bottlenecks of several
    initial magnitudes. size: fine-tune bottlenecks of several sizes, top layers, LayerNorms alone, and everything.
    """

    # a run's directory, an export, a base's folder, or a hub id; empty: general-mini, or for spans the run's model
    model: Main[Found[Annotated[str, place("a hub id, or a folder")]]] = ""
    method: MethodConfig = field(default_factory=lambda: BOTTLENECK)
    # spans: remove parts by layers; sigma: vary their start; size: vary their size
    study: Main[Literal["spans", "sigma", "size"]] = "spans"
    finetuned: Main[Found[RunFolder]] = ""  # the directory of a finished fine-tuning run, such as runs/af-ner (spans)
    adapter: Main[str] = ""  # spans: the adapter whose parts are removed; empty: the run's own, or the only one
    remove_norms: bool = False  # spans: also remove the shifts of the span's LayerNorms
    # sigma: standard deviations of the bottlenecks' start
    sigmas: Main[Annotated[tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], SOME, DIFFERENT]] = SIGMAS
    # size: widths m of the bottlenecks
    sizes: Main[Annotated[tuple[PositiveInt, ...], SOME, DIFFERENT]] = SIZES
    # size: numbers of top layers that train instead; all: from 1 to all layers; or none
    top_layers: Main[Literal["all", "none"] | Annotated[tuple[PositiveInt, ...], DIFFERENT]] = "all"
    # folder of figures and tables; empty: FINETUNED/ablation, or RUN.DIR/NAME-sigma and NAME-size
    output: Main[Written[Annotated[str, place()]]] = ""

    def __post_init__(self) -> None:
        require(not self.features.layers, "features.layers", self.features.layers, "empty in these studies")
        require(not self.against, "against", self.against, "empty in these studies")
        super().__post_init__()
        is_spans = self.study == "spans"
        rule = "the directory of a fine-tuning run with --study spans" if is_spans else "empty without --study spans"
        require(bool(self.finetuned.strip()) == is_spans, "finetuned", self.finetuned, rule)
        if not is_spans:
            self._check_method()

    def _check_method(self) -> None:
        method = self.method
        require(method.bottleneck_size > 0, "method.bottleneck_size", method.bottleneck_size, "above 0 in this study")
        trains = method.trains in ("extensions", "adapter")
        require(trains, "method.trains", method.trains, "extensions or adapter in this study")
        require(not method.active_adapters, "method.active_adapters", method.active_adapters, "empty in this study")

    def make_finetune_config(self) -> FinetuneConfig:
        """Return the options of fine-tuning alone."""
        values = {option.name: getattr(self, option.name) for option in fields(FinetuneConfig)}
        return FinetuneConfig(**{**values, "model": self.model or FinetuneConfig.model})
