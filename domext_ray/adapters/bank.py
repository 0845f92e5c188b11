"""An adapter bank: many tasks over one frozen base in one folder, to which a task is added without touching the others.

Enters: a base, then one trained domain after another, each with its task's head. Leaves: a folder

    BANK/bank.json                           the base's id, sha256 and shape; written once
    BANK/.base_folder                        where the base is on this machine, if it is a folder
    BANK/adapters/NAME/adapter.safetensors   tensors of the domain and of its head
                       adapter.json          sizes and layers, architecture, labels, task, origin, sha256

and, from that folder, the model of one adapter, or adapters for a model in memory (serving.py: for a batch of many
tasks). Tensors carry no name of the domain, so a folder may be renamed. An adapter's folder is built under a temporary
name and renamed when all of it is on the disk; each file is compared with its sha256 whenever it is read.

Source: Houlsby et al., sections 1 and 2: tasks that arrive in a stream add a few parameters each; none is forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from domext_ray.adapters.entry import (
    DESCRIPTION,
    MASKED_LM,
    TENSORS,
    BankEntry,
    check_base,
    check_model,
    check_task,
    describe_shape,
    find_architecture,
    list_own,
    make_model,
    name_own,
    put_domain,
)
from domext_ray.downstream.finetune.exported import is_finetuned_model, load_exported
from domext_ray.downstream.start.model import name_run
from domext_ray.downstream.tasks.description import TaskDescription
from domext_ray.errors import DomextError, RunError, name_file
from domext_ray.files import read_json
from domext_ray.model.base import Base, load_base
from domext_ray.model.base_folder import SHIPPED_BASE
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.options.places import hide_places
from domext_ray.storage import hash_file, hash_values, new_folder, remove_folder, write_json
from domext_ray.training.rebuild import rebuild_run
from domext_ray.training.start import read_run_config

FORMAT = 2
BANK, ADAPTERS, BASE_FOLDER = "bank.json", "adapters", ".base_folder"
_ADD_AGAIN = "remove the adapter and add it again"


class AdapterBank:
    """A bank on the disk; `create` and `open` make one.

    Every method raises a RunError where a name is unknown or taken, a file is damaged or of another version, what is
    added is something else than a bank holds, or the disk refuses; a BaseModelError where the base is not to be had.

    Args:
        folder: the bank.
        base_id: where its base is.
        base_sha256: of its base.
        shape: what decides what its base computes, by field.
    """

    def __init__(self, folder: Path, base_id: str, base_sha256: str, shape: dict[str, Any]) -> None:
        self.folder, self.base_id, self.base_sha256, self.shape = folder, base_id, base_sha256, shape

    @classmethod
    def create(cls, folder: str | Path, base: str) -> AdapterBank:
        """Make an empty bank.

        Args:
            folder: must not exist, or be empty.
            base: "general-mini", a folder, or a hub id; for every adapter of the bank.
        """
        folder = Path(folder).expanduser().resolve()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists already; give a new folder for a bank, or open the bank that is there.")
        loaded = load_base(base)
        is_folder = base != SHIPPED_BASE and Path(base).expanduser().is_dir()
        base_id = str(Path(base).expanduser().resolve()) if is_folder else base
        shape = describe_shape(loaded.config)
        with _place_folder(folder) as temporary:
            (temporary / ADAPTERS).mkdir()
            shown = hide_places(base_id)  # a bank is passed on
            _write_hashed(temporary / BANK, {"base": shown, "base_sha256": loaded.sha256, "shape": shape})
            if is_folder:
                (temporary / BASE_FOLDER).write_text(f"{base_id}\n", encoding="utf-8")
        return cls(folder, base_id, loaded.sha256, shape)

    @classmethod
    def open(cls, folder: str | Path, base: str = "") -> AdapterBank:
        """Open a bank; its base is read when it is first needed.

        Args:
            folder: the bank.
            base: where its base is, if it has moved.
        """
        folder = Path(folder).expanduser().resolve()
        if not (folder / BANK).is_file():
            raise RunError(f"{folder} is no adapter bank: it has no {BANK}; give a folder that domext bank made.")
        header = _read_hashed(folder / BANK, "make the bank again")
        place = folder / BASE_FOLDER
        own = place.read_text(encoding="utf-8").strip() if place.is_file() else header["base"]
        return cls(folder, base or own, header["base_sha256"], header["shape"])

    @cached_property
    def base(self) -> Base:
        """The base, in fp32 on the CPU."""
        base = load_base(self.base_id)
        if base.sha256 != self.base_sha256 or describe_shape(base.config) != self.shape:
            raise RunError(
                f"the bank {self.folder} is one of a base of sha256 {self.base_sha256[:12]}, and {self.base_id!r} now "
                f"has {base.sha256[:12]} or another config.json; bring the original base back, or say where it is "
                "(--base)."
            )
        return base

    def names(self) -> list[str]:
        """Return the adapters' names, sorted."""
        folder = self.folder / ADAPTERS
        if not folder.is_dir():
            raise RunError(f"{folder} is missing; make the bank again.")
        folders = (each for each in folder.iterdir() if each.is_dir() and not each.is_symlink())
        return sorted(each.name for each in folders if _is_name(each.name))

    def find_folder(self, name: str) -> Path:
        """Return where an adapter is."""
        names = self.names()
        if name not in names:
            raise RunError(f"the bank {self.folder} has no adapter {name!r}; it has {', '.join(names) or 'none'}.")
        return self.folder / ADAPTERS / name

    def describe(self, name: str) -> BankEntry:
        """Return what adapter.json says of an adapter."""
        return BankEntry.from_json(_read_hashed(self.find_folder(name) / DESCRIPTION, _ADD_AGAIN))

    def read_adapter(self, name: str) -> tuple[BankEntry, dict[str, Tensor]]:
        """Return an adapter's description, and its tensors by the names of a model whose domain is called like it."""
        entry, path = self.describe(name), self.find_folder(name) / TENSORS
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error.strerror or error}); {_ADD_AGAIN}.") from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise RunError(f"{path} differs from the sha256 in {DESCRIPTION}, so it is damaged; {_ADD_AGAIN}.")
        if entry.base_sha256 != self.base_sha256:
            raise RunError(
                f"the adapter {name!r} was trained on a base of sha256 {entry.base_sha256[:12]}, and the bank's is "
                f"{self.base_sha256[:12]}; put it back into its own bank."
            )
        return entry, name_own(load(content), name)

    def load(self, name: str) -> PreTrainedModel:
        """Return the model of one adapter, as it was when it was added: base, domain and head, in `eval` mode."""
        entry, tensors = self.read_adapter(name)
        config = entry.configure(self.base, name)
        return cast(PreTrainedModel, make_model(entry.architecture, config, self.base.tensors | tensors))

    def attach(self, model: nn.Module, name: str) -> None:
        """Put an adapter's domain into a model in memory, on its device and in its dtype; heads stay as they are.

        `set_active_domains` and `drop_domain` of the encoder switch it and take it out again.

        Args:
            model: an encoder, or a model that has one in `bert`, with the bank's base in it.
            name: the adapter; the domain is called like it.
        """
        entry, tensors = self.read_adapter(name)
        check_base(model, self.base, only_encoder=True)
        put_domain(model, name, entry, tensors)

    def verify(self) -> list[str]:
        """Compare the base and every file with their hashes; return a sentence about each that is damaged."""
        problems = []
        for name in (None, *self.names()):
            try:
                _ = self.base if name is None else self.read_adapter(name)
            except DomextError as error:
                problems.append(str(error))
        return problems

    def add(
        self,
        name: str,
        model: nn.Module,
        domain: str,
        origin: dict[str, Any] | None = None,
        task: TaskDescription | None = None,
    ) -> BankEntry:
        """Add a trained domain and its task's head; no file of the bank but the new ones is written.

        Args:
            name: what the bank calls it: letters, digits and underscores.
            model: `DomextForMaskedLM`, `DomextForTokenClassification` or `DomextForSequenceClassification`, with the
                base's tensors as they were.
            domain: the model's domain; the only one that is active.
            origin: JSON that says where it comes from.
            task: what the head was fine-tuned for, a family of `entry.TASKS`; None: nobody needs to know.
        """
        target = self._claim(name)
        architecture = find_architecture(model)
        check_model(model, domain, self.base)
        config = cast(DomextConfig, model.config)
        has_labels = architecture != MASKED_LM
        labels = tuple(label for _, label in sorted((config.id2label or {}).items())) if has_labels else ()
        if task is not None:
            check_task(task, architecture, labels)
        tensors = list_own(model, domain, self.base)
        with _place_folder(target) as temporary:
            path = temporary / TENSORS
            save_file(tensors, path, metadata={"format": "pt"})
            entry = BankEntry(
                base_sha256=self.base_sha256,
                architecture=architecture,
                domain=config.domains[domain],
                labels=labels,
                problem_type=config.problem_type if has_labels else None,
                origin=origin or {},
                num_parameters=sum(each.numel() for each in tensors.values() if each.is_floating_point()),
                num_bytes=path.stat().st_size,
                sha256=hash_file(path),
                task=task,
            )
            _write_hashed(temporary / DESCRIPTION, entry.to_json())
            shutil.copymode(temporary / DESCRIPTION, path)  # safetensors makes files that only their owner can read
        return entry

    def add_run(self, name: str, run_dir: str | Path) -> BankEntry:
        """Add the domain that a run made; of a fine-tuning run with its head and its task.

        Args:
            name: what the bank calls it.
            run_dir: of a training run, whose newest checkpoint counts; of a fine-tuning run, or its export.
        """
        self._claim(name)
        run_dir = Path(run_dir).expanduser()
        if is_finetuned_model(run_dir):
            return self._add_finetuned(name, run_dir)
        config = read_run_config(run_dir)
        if config.objective.next_sentence:
            raise RunError(
                f"the run {run_dir} also trained next-sentence prediction, which a bank does not hold; give a run "
                "without --objective.next_sentence."
            )
        run = rebuild_run(run_dir)
        origin = {"run": run_dir.resolve().name, "method": config.method.name, "step": run.step}
        origin |= {"pooling": config.objective.pooling} if config.objective.makes_vectors else {}
        return self.add(name, cast(nn.Module, run.model), config.method.domain, origin)

    def _add_finetuned(self, name: str, folder: Path) -> BankEntry:
        exported = load_exported(folder, torch.device("cpu"))
        if len(exported.fitted) > 1:
            raise RunError(f"{folder} takes {len(exported.fitted)} models for its task, and an adapter is one model.")
        (fitted,) = exported.fitted.values()
        config = cast(DomextConfig, fitted.model.config)
        active = list(config.domains) if config.active_domains is None else config.active_domains
        origin = {"run": name_run(exported.folder), "set": exported.description.set_name}
        return self.add(name, fitted.model, active[-1] if active else "", origin, exported.description)

    def remove(self, name: str) -> None:
        """Delete an adapter."""
        folder = self.find_folder(name)
        foreign = sorted(each.name for each in folder.iterdir() if each.name not in (TENSORS, DESCRIPTION))
        if foreign:
            raise RunError(f"{folder / foreign[0]} is no part of the adapter; move it away before it is removed.")
        with name_file(folder):
            remove_folder(folder)

    def _claim(self, name: str) -> Path:
        """Return the folder of a new adapter, after checking its name."""
        if not _is_name(name):
            raise RunError(
                f"an adapter cannot be called {name!r}; give letters, digits and underscores, and no word of torch's "
                "own such as 'keys' or 'forward'."
            )
        target = self.folder / ADAPTERS / name
        if target.exists():
            raise RunError(f"the bank {self.folder} has an adapter {name!r} already; give another name or remove it.")
        return target


def _is_name(name: str) -> bool:
    """Whether a domain can be called so: as torch calls a submodule, and none of the names of `adapter_names`."""
    return name.isidentifier() and not name.startswith("__") and not hasattr(nn.ModuleDict(), name)


def _write_hashed(path: Path, values: dict[str, Any]) -> None:
    values = json.loads(json.dumps(values))  # as they are read: JSON's keys are text
    write_json(path, {"format": FORMAT, "sha256": hash_values(values), "values": values}, sort_keys=True)


def _read_hashed(path: Path, remedy: str) -> dict[str, Any]:
    """Read what `_write_hashed` wrote; behind this guard its values are what they were."""
    found = read_json(path, remedy, {"format": int})
    if found["format"] != FORMAT:
        raise RunError(f"{path} has format {found['format']}, and this version reads {FORMAT}; {remedy}.")
    values = found.get("values")
    if not isinstance(values, dict) or found.get("sha256") != hash_values(values):
        raise RunError(f"{path} is damaged: it differs from its sha256; {remedy}.")
    return values


@contextlib.contextmanager
def _place_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that gets its name when the block ends without an error.

    Nothing is replaced: where two processes add the same name, the system refuses to rename the second one's.
    """
    try:
        with new_folder(target) as temporary:
            yield temporary
    except OSError as error:
        taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        reason = "another process made it meanwhile" if taken else error.strerror or error
        raise RunError(f"{target} cannot be written ({reason}).") from error
