"""A pre-training run, as everything from its plan to its export has it.

`plan.resolve` makes a `Plan` of what a user asked for, `inputs.prepare_run` makes a `Run` of that once its texts are
there, and a `Run` travels to the workers as it is. How many these are belongs to the attempt: each is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from domext_ray.config.mixture import GENERAL
from domext_ray.config.options.build import identity_of_run
from domext_ray.config.pretrain import RunOptions, SettledConfig
from domext_ray.model.base import describe_base
from domext_ray.model.spec import ModelSpec
from domext_ray.runs.run_directory import RunPaths, read_identity
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import MANIFEST, Manifest
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
class Plan:
    """A run before its texts are prepared."""

    config: SettledConfig  # what the options that were asked for come to
    paths: RunPaths
    spec: ModelSpec  # of its model; it has as many new words as options tell
    start: Start | None = None
    preset: str = ""  # that its options stand on, for its page; empty: the defaults

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the run this one and no other, as far as options tell."""
        identity = {**identity_of_run(self.config), "base_sha256": self.spec.base_sha256}
        if self.spec.base is not None:
            identity["base_shape"] = describe_base(self.spec.base.config)
        if self.start is not None:
            identity["init_sha256"] = self.start.sha256
        return identity


@dataclass(frozen=True)
class Run(Plan):
    """A run whose texts are prepared, and whose directory is held."""

    inputs: Inputs = field(kw_only=True)
    goes_on_from: Checkpoint | None = field(default=None, kw_only=True)  # its own, as the driver chose; None: it begins
    awaits_router: bool = field(default=False, kw_only=True)  # which the driver is fitting

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the run this one and no other, the contents of its texts included."""
        prepared = zip(name_fingerprints(self.config), self.inputs.texts[0], strict=True)
        return {**super().identity, **{name: manifest.fingerprint for name, manifest in prepared}}


def find_corpora(run_dir: Place, config: SettledConfig) -> Place:
    """Return the folder of prepared corpora of a run, wherever that was moved to with the runs beside it."""
    return Place(config.prepare.cache_dir or run_dir.parent / ".corpora")


def find_domain_text(run_dir: Place, config: SettledConfig) -> Place | None:
    """Return the folder of a run's prepared text of --corpus, in the first phase; None: it has gone."""
    fingerprint = (read_identity(run_dir) or {}).get("corpus_fingerprint", "")
    place = find_corpora(run_dir, config) / fingerprint[:16]
    return place if fingerprint and (place / MANIFEST).is_file() else None


def name_fingerprints(config: RunOptions) -> list[str]:
    """Return what an identity calls the fingerprints of a run's prepared texts, in the order of these."""
    names = {GENERAL: "replay_fingerprint"}
    return ["corpus_fingerprint", *(names.get(part.name, f"part_fingerprint.{part.name}") for part in config.parts)]
