"""What a user calls a model -> what it is and where, by names of files alone: no tensor is read.

Enters: a run's directory, an export, a fine-tuned run or its export, an ONNX folder, BANK:NAME, a base's folder, or a
hub id. Leaves: a `Source`, which says which of these it is. Who takes some of them only says so with `require`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from domext_ray.errors import BaseModelError
from domext_ray.export.onnx_graph import is_graph
from domext_ray.families.task_file import TASK_FILE
from domext_ray.model.base import is_own_config
from domext_ray.models.head import find_head, read_config
from domext_ray.runs.run_directory import CONFIG, TRAININGS
from domext_ray.storage import Place

BANK = "bank.json"


class SourceKind(Enum):
    """What a user may call a model: what a sentence calls it, and what it tells to give where it is not taken."""

    RUN = "a run of pre-training", "its export, {id}/export"
    FINETUNED = "a fine-tuned run", "its export, {id}/export"
    EXPORT = "an export of this library", "the run that it was made from"  # with extensions of its own
    BASE = "a base", "a run or an export"  # a plain model, which an export may be, too; on the hub, or nowhere
    GRAPHS = "an ONNX folder, which domext predict alone takes", "what it was made from"
    ADAPTER = "an adapter of a bank", "the run that was added to the bank"


@dataclass(frozen=True)
class Source:
    """A model that was looked at."""

    id: str  # what the user called it
    option: str  # the command's option that named it
    kind: SourceKind
    folder: Path  # of a bank's adapter, of a hub's model, and of one that is nowhere, no folder

    @property
    def bank(self) -> Place:
        """Where the bank of an adapter is."""
        return Place(self.id.rpartition(":")[0])

    @property
    def adapter(self) -> str:
        """Name of an adapter in its bank."""
        return self.id.rpartition(":")[2]

    @cached_property
    def does_task(self) -> bool:
        """Whether it was fine-tuned; of a bank's adapter the bank knows."""
        folder = self.folder
        return self.kind == SourceKind.FINETUNED or (folder / TASK_FILE).is_file() or find_head(folder) is not None

    def require(self, *kinds: SourceKind) -> None:
        """Refuse another kind than these."""
        if self.kind not in kinds:
            what, instead = self.kind.value
            raise BaseModelError(f"{self.option} {self.id!r} is {what}; give {instead.format(id=self.id)}.")


def name_run(folder: Path) -> str:
    """Return the name of the run that a folder is, or is the export of."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "export" else folder.name


def open_model(model: str, option: str = "--model") -> Source:
    """Look at what an option names."""
    folder = Path(model).expanduser()
    bank, colon, _ = model.rpartition(":")
    if colon and (Place(bank) / BANK).is_file():
        kind = SourceKind.ADAPTER
    elif (folder / TRAININGS).is_dir():
        kind = SourceKind.FINETUNED
    elif (folder / CONFIG).is_file():
        kind = SourceKind.RUN
    elif is_graph(folder) or ((folder / TASK_FILE).is_file() and any(map(is_graph, folder.iterdir()))):
        kind = SourceKind.GRAPHS
    else:
        kind = SourceKind.EXPORT if is_own_config(read_config(folder)) else SourceKind.BASE
    return Source(model, option, kind, folder)
