"""An adapter bank: many tasks over one frozen base in one place, to which a task is added without touching the others.

Enters: a base, then one trained adapter after another, each with its task's head. Leaves: a folder, or a bucket's,

    BANK/bank.json                               the base's id, sha256 and shape; written once
    BANK/.base_folder                            where the base is on this machine, if it is a folder
    BANK/adapters/NAME/adapter-SHA.safetensors   tensors of the adapter and of its head, named after their sha256
                       adapter.json              sizes and layers, architecture, labels, task, origin, sha256

and, from that folder, the model of one adapter, or adapters for a model in memory (mixed_adapters.py: for a batch of
many tasks). Tensors carry no name of the adapter, so a folder may be renamed. An adapter is there when its
adapter.json is, which comes last and replaces none: of two that add one name at once, neither touches the other's
tensors. Each file is compared with its sha256 whenever it is read.

Source: Houlsby et al., sections 1 and 2: tasks that arrive in a stream add a few parameters each; none is forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from domext_ray.config.options.declare import check_place
from domext_ray.config.options.submitted import find_input, find_output, hide_places
from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import BaseModelError, DomextError, RunError, StorageError
from domext_ray.families.task_description import TaskDescription
from domext_ray.files import newest_format, read_json, read_text
from domext_ray.model.base import Base, load_base
from domext_ray.model.domext.configuration_domext import DomextConfig, is_adapter_name
from domext_ray.models.bank_entry import (
    MASKED_LM,
    BankEntry,
    check_base,
    check_model,
    check_task,
    describe_shape,
    find_architecture,
    list_own,
    make_model,
    name_own,
    put_adapter,
)
from domext_ray.models.exported import load_exported
from domext_ray.models.source import BANK, open_model
from domext_ray.runs.run_directory import name_run, read_config
from domext_ray.storage import NEW, Place, Where, hash_values, write_text
from domext_ray.text.data.names import SHIPPED_BASE
from domext_ray.training.start import rebuild_run

FORMAT = newest_format("adapter bank")
ADAPTERS, BASE_FOLDER, DESCRIPTION = "adapters", ".base_folder", "adapter.json"
_ADD_AGAIN = "remove the adapter and add it again"


class AdapterBank:
    """A bank on a disk, or in a bucket (s3://, gs://); `create` and `open` make one.

    Every method raises a RunError where a name is unknown or taken, a file is damaged or of another version, what is
    added is something else than a bank holds, or the storage refuses; a BaseModelError where the base is not to be had.
    """

    def __init__(self, folder: Place, base_id: str, base_sha256: str, shape: dict[str, Any]) -> None:
        self.folder = folder.resolve()
        self.base_id, self.base_sha256, self.shape = base_id, base_sha256, shape
        self._adapters = self.folder / ADAPTERS

    @classmethod
    def create(cls, folder: Where, base: str) -> AdapterBank:
        """Make an empty bank.

        Args:
            folder: must not exist, or be empty.
            base: "general-mini", a folder, or a hub id; for every adapter of the bank.
        """
        place = folder if isinstance(folder, Place) else Place(find_output(os.fspath(folder)))
        taken = "exists already; give a new folder for a bank, or open the bank that is there."
        if place.is_file() or place.list_names():
            raise RunError(f"{place} {taken}")
        loaded, local = _load_base(base), Path(base).expanduser()
        is_folder = base != SHIPPED_BASE and local.is_dir()
        base_id = str(local.resolve()) if is_folder else base
        bank = cls(place, base_id, loaded.sha256, describe_shape(loaded.config))
        bank.base = loaded
        shown = hide_places(base_id)  # a bank is passed on
        try:
            _put_new(place / BANK, {"base": shown, "base_sha256": bank.base_sha256, "shape": bank.shape})
        except FileExistsError:
            raise RunError(f"{place} {taken}") from None
        if is_folder:
            write_text(place / BASE_FOLDER, f"{base_id}\n")
        return bank

    @classmethod
    def open(cls, folder: Where, base: str = "") -> AdapterBank:
        """Open a bank; its base is read when it is first needed, from `base`, if it has moved."""
        place = folder if isinstance(folder, Place) else Place(find_input(os.fspath(folder)))
        if not (place / BANK).is_file():
            raise RunError(f"{place} is no adapter bank: it has no {BANK}; give a folder that domext bank made.")
        header, own = _read_hashed(place / BANK, "make the bank again"), place / BASE_FOLDER
        if not base:
            remedy = "delete it, and say where the base is (--base)"
            base = read_text(own, remedy).strip() if own.is_file() else header["base"]
        return cls(place, base, header["base_sha256"], header["shape"])

    @cached_property
    def base(self) -> Base:
        """The base, in fp32 on the CPU."""
        base = _load_base(self.base_id)
        if base.sha256 != self.base_sha256 or describe_shape(base.config) != self.shape:
            raise RunError(
                f"the bank {self.folder} is one of a base of sha256 {self.base_sha256[:12]}, and {self.base_id!r} now "
                f"has {base.sha256[:12]} or another config.json; bring the original base back, or say where it is "
                "(--base)."
            )
        return base

    def names(self) -> list[str]:
        """Return the adapters' names, sorted."""
        return [*self.list_files()]

    def list_files(self) -> dict[str, frozenset[str]]:
        """Return the adapters' files by their names, sorted: their names have the hash of what is in them.

        The bank is listed once, and nothing of it is read.
        """
        files: dict[str, set[str]] = {}
        for path in self._adapters.list_files():
            folder, _, file = path.partition("/")
            files.setdefault(folder, set()).add(file)
        whole = (name for name, own in files.items() if DESCRIPTION in own and is_adapter_name(name))
        return {name: frozenset(files[name]) for name in sorted(whole)}

    def find_folder(self, name: str) -> Place:
        """Return where an adapter is."""
        folder = self._adapters / name
        is_elsewhere = folder.is_local and os.path.islink(folder)  # what a bank does not list
        if is_elsewhere or not (is_adapter_name(name) and (folder / DESCRIPTION).is_file()):
            names = ", ".join(self.names()) or "none"
            raise RunError(f"the bank {self.folder} has no adapter {name!r}; it has {names}.")
        return folder

    def describe(self, name: str) -> BankEntry:
        """Return what adapter.json says of an adapter."""
        return BankEntry.from_json(_read_hashed(self.find_folder(name) / DESCRIPTION, _ADD_AGAIN))

    def read_adapter(self, name: str) -> tuple[BankEntry, dict[str, Tensor]]:
        """Return an adapter's description, and its tensors by the names that they have in a model."""
        entry = self.describe(name)
        path = self._adapters / name / _name_tensors(entry.sha256)
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
        """Return the model of one adapter, as it was when it was added: base, adapter and head, in `eval` mode."""
        entry, tensors = self.read_adapter(name)
        config = entry.configure(self.base, name)
        return cast(PreTrainedModel, make_model(entry.architecture, config, self.base.tensors | tensors))

    def attach(self, model: nn.Module, name: str) -> None:
        """Put an adapter into a model in memory, on its device and in its dtype; heads stay as they are.

        `set_active_adapters` and `detach_adapter` of the encoder switch it and take it out again.

        Args:
            model: an encoder, or a model that has one in `bert`, with the bank's base in it.
            name: the adapter, also in the model.
        """
        entry, tensors = self.read_adapter(name)
        check_base(model, self.base, only_encoder=True)
        put_adapter(model, name, entry, tensors)

    def verify(self) -> list[str]:
        """Compare the base and every file with their hashes; return a sentence about each that is damaged."""
        problems = []
        for name in (None, *self.names()):
            try:
                _ = self.base if name is None else self.read_adapter(name)
            except StorageError:  # of which nothing is known
                raise
            except DomextError as error:
                problems.append(str(error))
        return problems

    def add(
        self,
        name: str,
        model: nn.Module,
        adapter: str,
        origin: dict[str, Any] | None = None,
        task: TaskDescription | None = None,
    ) -> BankEntry:
        """Add a trained adapter and its task's head; no file of the bank but the new ones is written.

        Args:
            name: what the bank calls it: letters, digits and underscores.
            model: `DomextForMaskedLM`, `DomextForTokenClassification` or `DomextForSequenceClassification`, with the
                base's tensors as they were.
            adapter: the model's adapter; the only one that is active.
            origin: JSON that says where it comes from.
            task: what the head was fine-tuned for, a family of `bank_entry.TASKS`; None: nobody needs to know.
        """
        self._check_free(name)
        architecture = find_architecture(model)
        check_model(model, adapter, self.base)
        config = cast(DomextConfig, model.config)
        has_labels = architecture != MASKED_LM
        labels = tuple(label for _, label in sorted((config.id2label or {}).items())) if has_labels else ()
        if task is not None:
            check_task(task, architecture, labels)
        tensors = list_own(model, adapter, self.base)
        content = save(tensors, metadata={"format": "pt"})
        entry = BankEntry(
            base_sha256=self.base_sha256,
            architecture=architecture,
            adapter=config.adapters[adapter],
            labels=labels,
            problem_type=config.problem_type if has_labels else None,
            origin=origin or {},
            num_parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
            num_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            task=task,
        )
        path = self._adapters / name / _name_tensors(entry.sha256)
        path.put(content)
        try:
            _put_new(self._adapters / name / DESCRIPTION, entry.to_json())
        except FileExistsError:
            if self.describe(name).sha256 != entry.sha256:
                path.delete()
            raise RunError(f"{path.parent} cannot be written (another process made it meanwhile).") from None
        return entry

    def add_run(self, name: str, run_dir: Where) -> BankEntry:
        """Add the adapter that a run made; of a fine-tuning run with its head and its task.

        Args:
            name: what the bank calls it.
            run_dir: of a training run, whose newest checkpoint counts; of a fine-tuning run, or its export.
        """
        self._check_free(name)
        place = Place(run_dir)
        if place.is_local and open_model(str(place.local())).does_task:
            return self._add_finetuned(name, place.local())
        config = read_config(place, SettledConfig)
        if config.objective.next_sentence:
            raise RunError(
                f"the run {place} also trained next-sentence prediction, which a bank does not hold; give a run "
                "without --objective.next_sentence."
            )
        run = rebuild_run(place)
        origin = {"run": place.name, "method": config.method.name, "step": run.step}
        origin |= {"pooling": config.objective.pooling} if config.objective.makes_vectors else {}
        return self.add(name, cast(nn.Module, run.model), config.method.adapter, origin)

    def _add_finetuned(self, name: str, folder: Path) -> BankEntry:
        exported = load_exported(folder, torch.device("cpu"))
        if len(exported.stages) > 1:
            raise RunError(f"{folder} takes {len(exported.stages)} models for its task, and an adapter is one model.")
        (only,) = exported.stages.values()
        config = cast(DomextConfig, only.model.config)
        active = list(config.adapters) if config.active_adapters is None else config.active_adapters
        origin = {"run": name_run(folder), "set": exported.description.set_name}
        return self.add(name, only.model, active[-1] if active else "", origin, exported.description)

    def remove(self, name: str) -> None:
        """Delete an adapter."""
        folder = self.find_folder(name)
        files = folder.list_names()
        if foreign := [file for file in files if not file.lstrip(".").startswith("adapter")]:
            raise RunError(f"{folder / foreign[0]} is no part of the adapter; move it away before it is removed.")
        for file in (DESCRIPTION, *files):  # without its description it counts no longer
            (folder / file).delete()
        if folder.is_local:
            with contextlib.suppress(OSError):  # it is added again already
                os.rmdir(folder)

    def _check_free(self, name: str) -> None:
        if not is_adapter_name(name):
            raise RunError(
                f"an adapter cannot be called {name!r}; give letters, digits and underscores, and no word of torch's "
                "own such as 'keys' or 'forward'."
            )
        if (self._adapters / name / DESCRIPTION).is_file():
            raise RunError(f"the bank {self.folder} has an adapter {name!r} already; give another name or remove it.")


def _load_base(base: str) -> Base:
    """Load a base whose name comes from Python or from a file of a bank, and that no option has checked."""
    try:
        check_place(base)
    except ValueError as error:
        raise BaseModelError(f"--base is {base!r}; it must be {error}, or a hub id.") from None
    return load_base(base)


def _name_tensors(sha256: str) -> str:
    return f"adapter-{sha256[:16]}.safetensors"


def _put_new(place: Place, values: dict[str, Any]) -> None:
    values = json.loads(json.dumps(values))  # as they are read: JSON's keys are text
    content = {"format": FORMAT, "sha256": hash_values(values), "values": values}
    place.put(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True).encode(), NEW)


def _read_hashed(path: Place, remedy: str) -> dict[str, Any]:
    """Read what `_put_new` wrote; behind this guard its values are what they were."""
    found = read_json(path, remedy, {"values": dict, "sha256": str}, "adapter bank")
    if found["sha256"] != hash_values(found["values"]):
        raise RunError(f"{path} is damaged: it differs from its sha256; {remedy}.")
    return found["values"]
