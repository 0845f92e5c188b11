"""A pre-training run, as everything from its plan to its export has it.

`plan.plan_run` makes a `Run`, `pipeline.prepare_run` adds what only its texts tell, and it travels to the workers as it
is, but for its base, of which each loads its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.manifest import Manifest
from domext_ray.model.base import Base
from domext_ray.model.build import Extensions
from domext_ray.model.counts import ParameterCounts
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.runs.run_directory import RunPaths
from domext_ray.storage import Place
from domext_ray.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Start:
    """The run whose parameters another one starts from (`init_from`).

    Args:
        run_dir: its directory.
        checkpoint: where the other one starts; once that has checkpoints, its own newest.
        sha256: of the tensors that it started from.
    """

    run_dir: Path
    checkpoint: Checkpoint
    sha256: str


@dataclass(frozen=True)
class Inputs:
    """What a run reads, prepared.

    Args:
        tokenizer: folder of the run's tokenizer.
        texts: those of `config.texts`, in this order, for each length phase.
        general_tokenizer: the tokenizer that general text was prepared with; None: the run's.
        overlaps: a sentence for every two texts that share documents.
    """

    tokenizer: Place
    texts: tuple[tuple[Manifest, ...], ...]
    general_tokenizer: Place | None = None
    overlaps: tuple[str, ...] = ()

    @property
    def domain(self) -> Manifest:
        """The text of --corpus, in the first phase."""
        return self.texts[0][0]


@dataclass(frozen=True)
class Run:
    """A run.

    Args:
        config: paths that workers read are absolute, sizes solved, the schedule fixed as far as it is known.
        paths: where the run lives.
        base_sha256: hash of the base's tensors, or "none".
        shape: its model. Until the texts are prepared it has as many new words as options tell.
        counts: the model's parameters.
        base: the driver's copy of the base; None for random weights, and on workers.
        start: the run that it starts from, if any.
        goes_on_from: its own checkpoint that the driver chose; None: it begins.
        prepared: what it reads; None before that is prepared.
    """

    config: PretrainConfig
    paths: RunPaths
    base_sha256: str
    shape: DomextConfig
    counts: ParameterCounts
    base: Base | None = None
    start: Start | None = None
    goes_on_from: Checkpoint | None = None
    prepared: Inputs | None = None

    @property
    def inputs(self) -> Inputs:
        """What it reads."""
        assert self.prepared is not None, "prepare_run comes first"
        return self.prepared

    @property
    def earlier(self) -> Extensions | None:
        """Extensions that the model has beside the method's own."""
        return self.start.checkpoint.extensions if self.start else None

    def at(self, run_dir: Place) -> Run:
        """Return the run in another directory, or as the attempt has it that works on it."""
        return replace(self, paths=replace(self.paths, run=run_dir))
