"""What a user calls a model -> what it is, by names of files alone; and its encoder, when it is loaded.

Enters: a run's directory, an export, a fine-tuned run or its export, an ONNX folder, BANK:NAME, a base's folder, or a
hub id. Leaves: a `Source`, whose class says which of these it is. A kind of model takes one class, and a place in
`KINDS`; whatever starts from an encoder then takes it. What is done with some kinds only (graphs predict, banks serve)
names them, and refuses others with `require`. Code that a folder brings along is never run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from domext_ray.errors import BaseModelError, ConfigError, find_storage_error
from domext_ray.export.card import Terms, read_terms
from domext_ray.export.onnx_graph import is_graph
from domext_ray.families.task_file import TASK_FILE
from domext_ray.model.base import MLM_HEAD, is_own_config, load_base, name_base
from domext_ray.model.build import refuse_scale, scale_extensions
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.models.head import find_head, read_config, read_head
from domext_ray.models.start import ENCODER, StartModel, pick_tensors, take_tensors
from domext_ray.progress import quiet_libraries
from domext_ray.runs.run_directory import CONFIG, TRAININGS
from domext_ray.storage import Place, require_readable
from domext_ray.text.vocabulary.tokenizer import check_fit, load_tokenizer
from domext_ray.training.start import rebuild_run

BANK = "bank.json"
_NO_ADAPTER = "with a model that has no adapter, such as a base or an export of LoRA"


@dataclass(frozen=True)
class Source:
    """A model that was looked at; its class is its kind."""

    id: str  # what the user called it
    option: str  # the command's option that named it
    what: ClassVar[str]  # a sentence calls it this
    instead: ClassVar[str]  # what a sentence tells to give where it is not taken

    @property
    def folder(self) -> Path:
        """Where it is; of a bank's adapter, of a hub's model, and of one that is nowhere, no folder."""
        return Path(self.id).expanduser()

    @cached_property
    def does_task(self) -> bool:
        """Whether it was fine-tuned; of a bank's adapter the bank knows."""
        return (self.folder / TASK_FILE).is_file() or find_head(self.folder) is not None

    def require(self, *kinds: type[Source]) -> None:
        """Refuse another kind than these."""
        if not isinstance(self, kinds):
            raise self._refuse()

    def is_one(self) -> bool:
        """Whether what was named is of this kind."""
        raise NotImplementedError

    def read(self, step: int, scale: float) -> StartModel:
        """Read the encoder; a kind that has none to start from is refused. See `load`."""
        raise self._refuse()

    def load(self, *, step: int = 0, keep_head: bool = False, scale: float = 1.0) -> StartModel:
        """Read the encoder, and the head that goes on.

        `step` is a run's checkpoint, 0 the newest. `scale` is of what a run's method adds (`scale_extensions`), or of
        what an export's adapter adds, beside its own.
        """
        if step and not isinstance(self, Run):
            raise ConfigError(
                f"--model_step is {step}; it must be 0 unless --model is a run's directory ({self.id!r} is not)."
            )
        start = self.read(step, scale)
        if scale != 1 and start.no_scale:
            raise ConfigError(f"--scale is {scale:g}; it must be 1 {start.no_scale}.")
        return replace(start, head=read_head(start.files, self.id, self.option)) if keep_head else start

    def _refuse(self) -> BaseModelError:
        instead = self.instead.format(id=self.id)
        return BaseModelError(f"{self.option} {self.id!r} is {self.what}; give {instead}.")

    def _start(
        self, kind: str, config: DomextConfig, tensors: dict[str, Tensor], files: Path, **values: Any
    ) -> StartModel:
        own, head = pick_tensors(tensors), pick_tensors(tensors, MLM_HEAD)
        values |= {"mlm_head": head, "files": files, "brings": find_head(files), "option": self.option}
        return StartModel(self.id, kind, config, own, **values)


class BankAdapter(Source):
    """An adapter of a bank, BANK:NAME."""

    what, instead = "an adapter of a bank", "the run that was added to the bank"

    @property
    def bank(self) -> Place:
        """Where the bank is."""
        return Place(self.id.rpartition(":")[0])

    @property
    def adapter(self) -> str:
        """Name of the adapter in its bank."""
        return self.id.rpartition(":")[2]

    def is_one(self) -> bool:
        """The bank is there."""
        return ":" in self.id and (self.bank / BANK).is_file()


class FinetunedRun(Source):
    """The directory of a fine-tuning run."""

    what, instead = "a fine-tuned run", "its export, {id}/export"
    does_task = True

    def is_one(self) -> bool:
        """It has trainings."""
        return (self.folder / TRAININGS).is_dir()


class Run(Source):
    """The directory of a pre-training run."""

    what, instead = "a run of pre-training", "its export, {id}/export"

    def is_one(self) -> bool:
        """It has a run's configuration."""
        return (self.folder / CONFIG).is_file()

    def read(self, step: int, scale: float) -> StartModel:
        """Read a checkpoint; LoRA's updates are merged."""
        run = rebuild_run(Place(self.folder), step)
        network, method = cast(nn.Module, run.model), run.config.method
        no_scale = refuse_scale(network, method)
        if scale != 1:
            scale_extensions(network, method, scale)
        return self._start(
            *("run", cast(DomextConfig, run.model.config), take_tensors(run.model), self.folder),
            tokenizer=run.tokenizer,
            terms=read_terms(run.spec.base.folder) if run.spec.base else Terms(),
            step=run.step,
            no_scale=no_scale,
        )


class Graphs(Source):
    """A folder of ONNX graphs: of a model, or of the models of a task."""

    what, instead = "an ONNX folder, which domext predict alone takes", "what it was made from"

    def is_one(self) -> bool:
        """It is a graph, or a task's folder that holds one."""
        folder = self.folder
        return is_graph(folder) or ((folder / TASK_FILE).is_file() and any(map(is_graph, folder.iterdir())))


class Export(Source):
    """An export of this library with extensions of its own."""

    what, instead = "an export of this library", "the run that it was made from"

    def is_one(self) -> bool:
        """Its configuration is this library's."""
        return is_own_config(read_config(self.folder))

    def read(self, step: int, scale: float) -> StartModel:
        """Read its files; LoRA's updates and scales are merged."""
        config, tensors = self._load(scale)
        tokenizer = load_tokenizer(self.folder)
        check_fit(tokenizer, config.vocab_size, f"{self.option} {self.id!r}")
        terms, no_scale = read_terms(self.folder), _refuse_scale(config)
        return self._start("export", config, tensors, self.folder, tokenizer=tokenizer, terms=terms, no_scale=no_scale)

    def _load(self, scale: float) -> tuple[DomextConfig, dict[str, Tensor]]:
        with quiet_libraries():
            try:
                loaded, info = cast(Any, DomextForMaskedLM).from_pretrained(
                    str(self.folder), dtype=torch.float32, output_loading_info=True
                )
            except Exception as error:  # a damaged folder raises whatever its reader raises
                reason = " ".join(str(error).split())[:200]
                require_readable(self.folder)
                fault = f"{self.option} {self.id!r} cannot be read as an export of this library ({reason})."
                raise find_storage_error(error, self.folder) or BaseModelError(fault) from error
        missing = sorted(info["missing_keys"])
        if lacking := [name for name in missing if name.startswith(ENCODER)]:
            raise BaseModelError(
                f"{self.option} {self.id!r} lacks the tensor {lacking[0]} that its config.json asks for; export it "
                "again."
            )
        if scale != 1 and not _refuse_scale(loaded.config):
            for name, adapter in loaded.config.adapters.items():
                loaded.set_adapter_scale(name, scale * adapter.scale)
        tensors = take_tensors(loaded)
        return loaded.config, pick_tensors(tensors) if missing else tensors


class BaseModel(Source):
    """A plain model, which an export may be, too: a folder, on the hub, or nowhere."""

    what, instead = "a base", "a run or an export"

    def is_one(self) -> bool:
        """What is nothing else; whoever reads it says what is wrong with it."""
        return True

    def read(self, step: int, scale: float) -> StartModel:
        """Read a folder or a hub id."""
        with name_base(self.option):
            base = load_base(self.id)
        config = copy.deepcopy(base.config)  # a model changes its own, and others may hold the base
        return self._start(
            *("base", config, base.tensors, base.folder),
            tokenizer=load_tokenizer(base.folder),
            terms=read_terms(base.folder),
            wrong_rules=base.wrong_rules.replace("--base", self.option),
            no_scale=_NO_ADAPTER,
        )


KINDS: Sequence[type[Source]] = (BankAdapter, FinetunedRun, Run, Graphs, Export, BaseModel)
"""Every kind of model; the first one that a name fits is its kind."""


def open_model(model: str, option: str = "--model") -> Source:
    """Look at what an option names."""
    return next(source for kind in KINDS if (source := kind(model, option)).is_one())


def _refuse_scale(config: DomextConfig) -> str:
    """Say with what an export has no scale; empty: it has one, its adapter's."""
    if config.extension_vocab_size:
        return "with new words, which have no scale"
    if config.module_hidden_size:
        return "with gated modules, which have no scale"
    if len(config.adapters) > 1:
        return f"with several adapters ({', '.join(config.adapters)}), of which a scale is one's; give the run"
    return "" if config.adapters else _NO_ADAPTER
