"""An adapter bank: many tasks over one frozen base in one folder, to which a task is added without touching the others.

Enters: a base, then one trained domain after another, each with its task's head. Leaves: a folder

    BANK/bank.json                           the base's id, sha256 and shape; written once
    BANK/.base_folder                        where the base is on this machine, if it is a folder
    BANK/adapters/NAME/adapter.safetensors   tensors of the domain, and those of the head under `head.`
                       adapter.json          sizes and layers, architecture, labels, origin, sha256; written last

and, from that folder, the model of one adapter, or adapters for a model in memory (serving.py: for a batch of many
tasks). Tensors carry no name of the domain, so a folder may be renamed. An adapter's folder is built under a temporary
name and renamed when all of it is on the disk; what it holds is compared with its sha256 whenever it is read.

Source: Houlsby et al., sections 1 and 2: tasks that arrive in a stream add a few parameters each; none is forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from domext_ray.adapters.entry import (
    ADD_AGAIN,
    ARCHITECTURES,
    DESCRIPTION,
    ENTRY_TYPES,
    MASKED_LM,
    SHAPE_TYPES,
    TENSORS,
    BankEntry,
    check_encoder,
    check_entry,
    check_model,
    check_task,
    check_types,
    configure_adapter,
    count_parameters,
    describe_shape,
    describe_tensors,
    fill_parameters,
    find_architecture,
    list_domain,
    list_head,
    put_domain,
    read_domain,
    read_labels,
)
from domext_ray.downstream.finetune.exported import load_exported
from domext_ray.downstream.start.model import name_run
from domext_ray.downstream.tasks.description import TaskDescription
from domext_ray.errors import DomextError, RunError
from domext_ray.extensions.table import DOMAIN_PARTS, name_options
from domext_ray.model.base import SHIPPED_BASE, Base, load_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import NO_DOMAIN, DomextModel
from domext_ray.options.places import hide_places
from domext_ray.storage import hash_file, new_folder, remove_folder, write_json
from domext_ray.training.rebuild import rebuild_run
from domext_ray.training.start import read_run_config

FORMAT = 1
BANK, ADAPTERS, BASE_FOLDER = "bank.json", "adapters", ".base_folder"


class AdapterBank:
    """A bank on the disk; `create` and `open` make one.

    Args:
        folder: the bank.
        header: what its bank.json says.
        base_id: where its base is.
    """

    def __init__(self, folder: Path, header: dict[str, Any], base_id: str) -> None:
        self.folder = folder
        self.base_sha256: str = header["base_sha256"]
        self.shape: dict[str, Any] = header["shape"]
        self.base_id = base_id

    @classmethod
    def create(cls, folder: str | Path, base: str) -> AdapterBank:
        """Make an empty bank.

        Args:
            folder: must not exist, or be empty.
            base: "general-mini", a folder, or a hub id; for every adapter of the bank.

        Raises:
            RunError: the folder holds something, or the disk refuses.
            BaseModelError: the base is not to be had.
        """
        folder = Path(folder).expanduser().resolve()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists already; give a new folder for a bank, or open the bank that is there.")
        loaded = load_base(base)
        is_folder = base != SHIPPED_BASE and Path(base).expanduser().is_dir()
        base_id = str(Path(base).expanduser().resolve()) if is_folder else base
        header = {
            "format": FORMAT,
            "base": hide_places(base_id),  # a bank is passed on
            "base_sha256": loaded.sha256,
            "shape": describe_shape(loaded.config),
        }
        with _place_folder(folder) as temporary:
            (temporary / ADAPTERS).mkdir()
            write_json(temporary / BANK, header, sort_keys=True)
            if is_folder:
                (temporary / BASE_FOLDER).write_text(f"{base_id}\n", encoding="utf-8")
        return cls(folder, header, base_id)

    @classmethod
    def open(cls, folder: str | Path, base: str = "") -> AdapterBank:
        """Open a bank; its base is read when it is first needed.

        Args:
            folder: the bank.
            base: where its base is, if it has moved.

        Raises:
            RunError: it is no bank, or of another version.
        """
        folder = Path(folder).expanduser()
        path = folder / BANK
        if not path.is_file():
            raise RunError(f"{folder} is no adapter bank: it has no {BANK}; give a folder that domext bank made.")
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
            if header["format"] == FORMAT:
                check_types(header, {"base": str, "base_sha256": str, "shape": dict})
                check_types(header["shape"], SHAPE_TYPES)
                place = folder / BASE_FOLDER
                own = place.read_text(encoding="utf-8").strip() if place.is_file() else ""
                return cls(folder.resolve(), header, base or own or header["base"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(f"{path} is damaged ({error}); make the bank again.") from error
        raise RunError(f"{path} has format {header['format']!r}, and this version reads {FORMAT}.")

    @cached_property
    def base(self) -> Base:
        """The base, in fp32 on the CPU.

        Raises:
            BaseModelError: it is not to be had.
            RunError: it is another one than the bank was made with.
        """
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
        return sorted(each.name for each in folders if each.name.isidentifier())

    def describe(self, name: str) -> BankEntry:
        """Return what adapter.json says of an adapter.

        Raises:
            RunError: there is none of that name, or the file is damaged or of another version.
        """
        path = self.find_folder(name) / DESCRIPTION
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["sha256"] != _hash_json(values["adapter"]):
                raise ValueError("it differs from its sha256")
            if values["format"] == FORMAT:
                adapter = values["adapter"]
                check_types(adapter, ENTRY_TYPES)
                domain = read_domain(name, adapter["domain"], self.shape["num_hidden_layers"])
                entry = BankEntry(**{**adapter, "domain": domain})
                check_entry(entry)
                if entry.id2label is None:
                    return entry
                labels = {int(number): label for number, label in entry.id2label.items()}  # JSON's keys are text
                return replace(entry, id2label=dict(sorted(labels.items())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else error
            raise RunError(f"{path} is damaged or missing ({reason}); {ADD_AGAIN}.") from error
        raise RunError(f"{path} has format {values['format']!r}, and this version reads {FORMAT}.")

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

        Raises:
            RunError: the name is taken, the model is more or something else than a bank holds, or the task is not its
                head's.
        """
        target = self._claim(name)
        architecture = find_architecture(model)
        check_model(model, domain, self.base)
        own = list_domain(model, domain) | list_head(model, self.base)
        tensors = {key: each.detach().cpu().contiguous() for key, each in own.items()}
        config = cast(DomextConfig, model.config)
        is_masked_lm = architecture == MASKED_LM
        if task is not None:
            try:
                check_task(task, architecture, tuple(read_labels(config).values()))
            except ValueError as error:
                raise RunError(f"the task cannot be kept beside the adapter {name!r}: {error}.") from error
        with _place_folder(target) as temporary:
            path = temporary / TENSORS
            save_file(tensors, path, metadata={"format": "pt"})
            entry = BankEntry(
                base_sha256=self.base_sha256,
                architecture=architecture,
                domain=config.domains[domain],
                id2label=None if is_masked_lm else read_labels(config),
                problem_type=None if is_masked_lm else config.problem_type,
                origin=origin or {},
                num_parameters=count_parameters(tensors),
                num_bytes=path.stat().st_size,
                sha256=hash_file(path),
                task=None if task is None else task.to_json(),
            )
            values = json.loads(json.dumps(asdict(entry)))  # as it is read: JSON's keys are text
            write_json(
                temporary / DESCRIPTION,
                {"format": FORMAT, "sha256": _hash_json(values), "adapter": values},
                sort_keys=True,
            )
            shutil.copymode(temporary / DESCRIPTION, path)  # safetensors makes files that only their owner can read
        return entry

    def add_run(self, name: str, run_dir: str | Path) -> BankEntry:
        """Add the domain that a training run made, from the run's newest checkpoint.

        Args:
            name: what the bank calls it.
            run_dir: the run's directory (config.yaml, tokenizer/, checkpoints/).

        Raises:
            RunError: the name is taken, or the run has no usable checkpoint, another base, no domain, or more.
            BaseModelError: the run's base is not to be had.
        """
        self._claim(name)
        run_dir = Path(run_dir).expanduser()
        config = read_run_config(run_dir)
        if not config.method.has_domain:
            raise RunError(
                f"the run {run_dir} trained no domain, and a bank holds domains; give a run with one of "
                f"{name_options(DOMAIN_PARTS)}."
            )
        if config.objective.next_sentence:
            raise RunError(
                f"the run {run_dir} also trained next-sentence prediction, which a bank does not hold; give a run "
                "without --objective.next_sentence."
            )
        run = rebuild_run(run_dir)
        if run.base_sha256 != self.base_sha256:
            raise RunError(
                f"the run {run_dir} was trained on a base of sha256 {run.base_sha256[:12]}, and the bank's is "
                f"{self.base_sha256[:12]}; give each base a bank of its own."
            )
        origin = {"run": run_dir.resolve().name, "method": config.method.name, "step": run.step}
        origin |= {"pooling": config.objective.pooling} if config.objective.makes_vectors else {}
        return self.add(name, cast(nn.Module, run.model), config.method.domain, origin)

    def add_finetuned(self, name: str, folder: str | Path) -> BankEntry:
        """Add the domain and the head of a fine-tuned model, with its task.

        Args:
            name: what the bank calls it.
            folder: the model's export, or the fine-tuning run that has one.

        Raises:
            RunError: the name is taken, there is no such export, or the model is more or something else than a bank
                holds.
            BaseModelError: the model's files are not what its configuration says.
        """
        self._claim(name)
        exported = load_exported(folder, torch.device("cpu"))
        if len(exported.fitted) > 1:
            raise RunError(f"{folder} takes {len(exported.fitted)} models for its task, and an adapter is one model.")
        (fitted,) = exported.fitted.values()
        config = cast(DomextConfig, fitted.model.config)
        active = list(config.domains) if config.active_domains is None else config.active_domains
        if not active:
            raise RunError(
                f"{folder} trained no domain, and a bank holds domains; fine-tune with one of "
                f"{name_options(DOMAIN_PARTS)} beside a frozen base (--method.trains extensions)."
            )
        origin = {"run": name_run(exported.folder), "set": exported.description.set_name}
        return self.add(name, fitted.model, active[-1], origin, exported.description)

    def remove(self, name: str) -> None:
        """Delete an adapter.

        Raises:
            RunError: there is none of that name, or the disk refuses.
        """
        folder = self.find_folder(name)
        foreign = sorted(each.name for each in folder.iterdir() if each.name not in (TENSORS, DESCRIPTION))
        if foreign:
            raise RunError(f"{folder / foreign[0]} is no part of the adapter; move it away before it is removed.")
        try:
            remove_folder(folder)
        except OSError as error:
            raise RunError(f"{folder} cannot be removed ({error.strerror or error}).") from error

    def verify(self) -> list[str]:
        """Compare the base and every file with their hashes; return a sentence about each that is damaged."""
        problems = []
        read: Callable[[str], object] = self.read_adapter
        try:
            _ = self.base
        except DomextError as error:
            problems.append(str(error))
            read = self._read_hashed  # without the base nobody can tell which tensors an adapter needs
        for name in self.names():
            try:
                read(name)
            except RunError as error:
                problems.append(str(error))
        return problems

    def load(self, name: str) -> PreTrainedModel:
        """Return the model of one adapter, as it was when it was added: base, domain and head, in `eval` mode.

        Raises:
            RunError: there is none of that name, or a file is damaged.
        """
        entry, tensors = self.read_adapter(name)
        config = configure_adapter(self.base, entry)
        config.domains = {name: entry.domain}
        with torch.random.fork_rng(devices=[]):  # every parameter is overwritten; the caller's draws stay as they were
            model = ARCHITECTURES[entry.architecture](config)
        model.load_state_dict(self.base.tensors, strict=False)
        own = list_domain(model, name) | list_head(model, self.base)
        fill_parameters(own, tensors, self.find_folder(name))
        return model.eval()

    def attach(self, model: nn.Module, name: str) -> None:
        """Put an adapter's domain into a model in memory, on its device and in its dtype; heads stay as they are.

        `set_active_domains` and `drop_domain` of the encoder switch it and take it out again.

        Args:
            model: an encoder, or a model that has one in `bert`, with the bank's base in it.
            name: the adapter; the domain is called like it.

        Raises:
            RunError: the model has another base or a domain of that name, there is no such adapter, or it is damaged.
        """
        entry, tensors = self.read_adapter(name)
        encoder = cast(DomextModel, getattr(model, "bert", model))
        check_encoder(encoder, self.base)
        scores_words = entry.architecture == MASKED_LM and hasattr(model, "cls")
        put_domain(model if scores_words else encoder, name, entry, tensors, self.find_folder(name))

    def find_folder(self, name: str) -> Path:
        names = self.names()
        if name not in names:
            raise RunError(f"the bank {self.folder} has no adapter {name!r}; it has {', '.join(names) or 'none'}.")
        return self.folder / ADAPTERS / name

    def _claim(self, name: str) -> Path:
        """Return the folder of a new adapter, after checking its name."""
        # What every ModuleDict has as an attribute, such as `keys`, cannot be a submodule's name in torch.
        if not name.isidentifier() or name == NO_DOMAIN or hasattr(nn.ModuleDict(), name):
            raise RunError(
                f"an adapter cannot be called {name!r}; give letters, digits and underscores, and no word of torch's "
                "own such as 'keys' or 'forward'."
            )
        target = self.folder / ADAPTERS / name
        if target.exists():
            raise RunError(f"the bank {self.folder} has an adapter {name!r} already; give another name or remove it.")
        return target

    def read_adapter(self, name: str) -> tuple[BankEntry, dict[str, Tensor]]:
        """Return an adapter's description and tensors, after comparing both with their hashes and with each other.

        Raises:
            RunError: there is none of that name, or it is damaged.
            BaseModelError: the base is not to be had.
        """
        entry, tensors = self._read_hashed(name)
        shapes = describe_tensors(self.base, name, entry, self.find_folder(name))
        found = {key: tuple(each.shape) for key, each in tensors.items()}
        wrong = sorted(key for key in shapes.keys() | found.keys() if shapes.get(key) != found.get(key))
        if wrong:
            raise RunError(
                f"{self.find_folder(name) / DESCRIPTION} describes a tensor {wrong[0]} of shape "
                f"{shapes.get(wrong[0], 'none')}, and {TENSORS} has {found.get(wrong[0], 'none')}; {ADD_AGAIN}."
            )
        return entry, tensors

    def _read_hashed(self, name: str) -> tuple[BankEntry, dict[str, Tensor]]:
        """Return an adapter's description and tensors, after comparing both with their hashes."""
        entry = self.describe(name)
        path = self.find_folder(name) / TENSORS
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error.strerror or error}); {ADD_AGAIN}.") from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise RunError(f"{path} differs from the sha256 in {DESCRIPTION}, so it is damaged; {ADD_AGAIN}.")
        if entry.base_sha256 != self.base_sha256:
            raise RunError(
                f"the adapter {name!r} was trained on a base of sha256 {entry.base_sha256[:12]}, and the bank's is "
                f"{self.base_sha256[:12]}; put it back into its own bank."
            )
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise RunError(f"{path} is damaged ({error}); {ADD_AGAIN}.") from error
        num_parameters = count_parameters(tensors)
        if (num_parameters, len(content)) != (entry.num_parameters, entry.num_bytes):
            raise RunError(
                f"{path} has {num_parameters:,} parameters in {len(content):,} bytes, and {DESCRIPTION} says "
                f"{entry.num_parameters:,} in {entry.num_bytes:,}; {ADD_AGAIN}."
            )
        return entry, tensors


@contextlib.contextmanager
def _place_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that gets its name when the block ends without an error.

    Nothing is replaced: where two processes add the same name, the system refuses to rename the second one's.
    """
    try:
        with new_folder(target, replaces=False) as temporary:
            yield temporary
    except OSError as error:
        taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        reason = "another process made it meanwhile" if taken else error.strerror or error
        raise RunError(f"{target} cannot be written ({reason}).") from error


def _hash_json(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
