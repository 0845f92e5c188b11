"""A pre-training run, as everything from its plan to its export has it.

`plan.plan_run` makes a `Run`, `pipeline.prepare_run` adds what only its texts tell, and it travels to the workers as it
is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.manifest import Manifest
from domext_ray.model.spec import ModelSpec
from domext_ray.runs.run_directory import RunPaths
from domext_ray.storage import Place
from domext_ray.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Start:
    """The run whose parameters another one starts from (`init_from`)."""

    run_dir: Place
    checkpoint: Checkpoint  # where the other one starts; once that has checkpoints, its own newest
    sha256: str  # of the tensors that it started from


@dataclass(frozen=True)
class Inputs:
    """What a run reads, prepared."""

    tokenizer: Place  # folder of the run's tokenizer
    texts: tuple[tuple[Manifest, ...], ...]  # those of `config.texts`, in this order, for each length phase
    general_tokenizer: Place | None = None  # what general text was prepared with; None: the run's
    overlaps: tuple[str, ...] = ()  # a sentence for every two texts that share documents

    @property
    def domain(self) -> Manifest:
        """The text of --corpus, in the first phase."""
        return self.texts[0][0]


@dataclass(frozen=True)
class Run:
    """A run."""

    config: PretrainConfig  # its paths are absolute, sizes solved, the schedule fixed as far as it is known
    paths: RunPaths
    spec: ModelSpec  # of its model; until the texts are prepared it has as many new words as options tell
    start: Start | None = None
    goes_on_from: Checkpoint | None = None  # its own, as the driver chose; None: it begins
    prepared: Inputs | None = None  # None before that is prepared
    awaits_router: bool = False  # which the driver is fitting
    preset: str = ""  # that its options stand on, for its page; empty: the defaults

    @property
    def inputs(self) -> Inputs:
        """What it reads."""
        assert self.prepared is not None, "prepare_run comes first"
        return self.prepared

    def at(self, run_dir: Place) -> Run:
        """Return the run in another directory, or as the attempt has it that works on it."""
        return replace(self, paths=replace(self.paths, run=run_dir))
