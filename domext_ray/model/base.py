"""A base checkpoint -> its tensors in memory, under Hugging Face BERT's names.

A base is a checkpoint of one of `layouts.LAYOUTS`, as a folder or a hub id. A layout maps names to
BERT's, and `build.detach` maps them back. A process reads a base once: `load_base` returns the one that somebody
there still holds, and a base goes to another process without its tensors, which that one reads from its own disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from domext_ray.errors import BaseModelError, CorpusError, RunError, find_storage_error
from domext_ray.model.domext.configuration_domext import OWN_FIELDS, DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining
from domext_ray.model.layouts import LAYOUTS, SHARED_FIELDS, Layout
from domext_ray.storage import find_unfetched, parse_json
from domext_ray.text.data.names import SHIPPED_BASE, find_local_base
from domext_ray.text.vocabulary.extension import BaseVocabulary, read_base_vocabulary
from domext_ray.text.vocabulary.tokenizer import check_fit, find_wrong_rules, load_tokenizer

_SIZE_ERRORS = (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError)
"""What torch raises where a size is none that a tensor can have."""
SMALL_FILES = ["*.json", "*.txt", "*.model", "README.md"]
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_OTHER_WEIGHTS = (
    ("model-*-of-*.safetensors", "{0} without model.safetensors.index.json, which lists the shards; fetch that, too"),
    ("pytorch_model-*-of-*.bin", "{0} without pytorch_model.bin.index.json, which lists the shards; fetch that, too"),
    ("tf_model.h5", "{0}, which is TensorFlow's; save the weights for PyTorch"),
    ("*.ckpt*", "{0}, which is TensorFlow's; save the weights for PyTorch"),
    ("flax_model.msgpack", "{0}, which is Flax's; save the weights for PyTorch"),
    ("model*.safetensors?*", "{0}, which seems to be a part of one; fetch it again"),
    ("pytorch_model*.bin?*", "{0}, which seems to be a part of one; fetch it again"),
)
"""Files that a folder may have in place of `WEIGHT_FILES`, and what is said of them."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Of weights as they are trained; others are quantised, and mean nothing without their scales."""

_TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
HEADS = MLM_HEAD, NEXT_SENTENCE_HEAD, POOLER = "cls.predictions.", "cls.seq_relationship.", "bert.pooler."
"""What stands above the encoder, by the start of its tensors' names: MLM head, next-sentence head, pooler."""


@dataclass(frozen=True)
class BaseFiles:
    """What a process has read of a base."""

    folder: Path  # where its files are
    tokenizer: PreTrainedTokenizerBase
    tensors: dict[str, Tensor]  # fp32, by internal name; tied copies are left out
    # name in the checkpoint, by internal name; of matrices that it has in one tensor, in its order, the same name
    original_names: dict[str, str]


@dataclass(frozen=True)
class Base:
    """What a base checkpoint is, and, in a process that asks for them, its files."""

    id: str  # what the user called it
    config: DomextConfig  # shape, without extensions
    heads: tuple[str, ...]  # those of `HEADS` that it brings; a model gets the others fresh
    sha256: str  # `hash_tensors` of its tensors
    wrong_rules: str = ""  # what `find_wrong_rules` says of its tokenizer; empty: its rules fit its entries
    read: BaseFiles | None = field(default=None, repr=False, compare=False)  # None: by another process; see `files`

    def __getstate__(self) -> dict[str, Any]:
        return {attribute.name: getattr(self, attribute.name) for attribute in fields(self)} | {"read": None}

    @property
    def has_mlm_head(self) -> bool:
        """Whether the checkpoint has a masked-LM head."""
        return MLM_HEAD in self.heads

    @property
    def files(self) -> BaseFiles:
        """Its files as this process has read them, now if it has not yet.

        A RunError says that they are not those of the process that this base comes from.
        """
        return self.read or cast(BaseFiles, self._here.read)

    @property
    def folder(self) -> Path:
        """Where its files are on this machine, the tokenizer's among them."""
        return self.files.folder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, which nobody changes."""
        return self.files.tokenizer

    @cached_property
    def vocabulary(self) -> BaseVocabulary:
        """What new words stand beside; a tokenizer that takes none is a CorpusError."""
        return read_base_vocabulary(self.id, self.tokenizer, self.config.vocab_size)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, fp32, by internal name."""
        return self.files.tensors

    @property
    def original_names(self) -> dict[str, str]:
        """Names in the checkpoint, by internal name."""
        return self.files.original_names

    @cached_property
    def _here(self) -> Base:
        here = load_base(self.id, next_sentence=NEXT_SENTENCE_HEAD in self.heads)
        if here.sha256 != self.sha256:
            raise RunError(
                f"the base {self.id!r} on this node has sha256 {here.sha256[:12]}, the run was made with "
                f"{self.sha256[:12]}; give all nodes the same base."
            )
        return here


_held: WeakValueDictionary[tuple[Any, ...], Base] = WeakValueDictionary()
"""The bases that somebody in this process holds, by what they were read from."""


def load_base(base: str, *, next_sentence: bool = False) -> Base:
    """Read a base checkpoint, or return the one that was read from these files and is still held.

    `base` is as for `find_local_base`. Its next-sentence head is read only where `next_sentence` asks for it.
    """
    local = find_local_base(base)
    folder = local or _fetch(base, SMALL_FILES)  # of a hub id: a wrong one costs no download
    key = base, next_sentence, _stamp(folder)
    if (held := _held.get(key)) is not None:
        return held
    if not (folder / "config.json").is_file():
        raise BaseModelError(f"--base {base!r} has no config.json on the hub; give the id of a model.")
    config, layout = _read_config(folder, base)
    try:
        tokenizer = load_tokenizer(folder)
        check_fit(tokenizer, config.vocab_size, "this base")
    except CorpusError as error:
        raise BaseModelError(f"--base {base!r}: {error}") from error
    original = read_weights(folder, base)
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in sorted(original.items()):
        internal = layout.name_internal(name)
        if internal and isinstance(tensor, Tensor) and tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise BaseModelError(
                f"--base {base!r} is quantised ({name} is {kind}); give the model with its weights as trained."
            )
        for own, part in zip(internal, tensor.chunk(len(internal)) if len(internal) > 1 else [tensor], strict=False):
            if next_sentence or not own.startswith(NEXT_SENTENCE_HEAD):
                tensors[own], names[own] = part.to(torch.float32).contiguous(), name
    if not tensors:
        first = min(original, default="")
        raise BaseModelError(
            f"--base {base!r} has no weights of a {layout.family} model under their names (the first is "
            f"{first[:60]!r}); save the model, and no more than that, with save_pretrained, or mend the model_type of "
            "its config.json."
        )
    has_head = f"{MLM_HEAD}transform.dense.weight" in tensors
    _untie(tensors, names, base)
    if not has_head:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(MLM_HEAD)}
    config.has_pooler = f"{POOLER}dense.weight" in tensors
    _check_tensors(tensors, config, base)
    names = {name: names[name] for name in tensors}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise BaseModelError(
                f"--base {base!r} has nan or infinite values in {names[name]}; save its weights again, or give another."
            )
    heads = tuple(head for head in HEADS if any(name.startswith(head) for name in tensors))
    wrong_rules = find_wrong_rules(tokenizer, base, folder, config.vocab_size)
    found = Base(base, config, heads, hash_tensors(tensors), wrong_rules, BaseFiles(folder, tokenizer, tensors, names))
    _held[key if local else (base, next_sentence, _stamp(folder))] = found  # the hub's weights are there now
    return found


def _stamp(folder: Path) -> tuple[Any, ...]:
    """Return what changes when a file of a folder does."""
    stats = [(path, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return tuple((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


@contextlib.contextmanager
def name_base(name: str) -> Iterator[None]:
    """Let errors about a base call it as the user knows it, where that is not --base."""
    try:
        yield
    except BaseModelError as error:
        raise BaseModelError(str(error).replace("--base", name)) from error


def describe_base(config: DomextConfig) -> dict[str, Any]:
    """Return what a base's config.json decides beside its tensors."""
    shared = {name: getattr(config, name) for name in (*SHARED_FIELDS, "position_rule", "mlm_head_act")}
    return shared | config.describe_layout()


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 (hex) of fp32 tensors on the CPU, over sorted names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()


def _fetch(base: str, patterns: list[str]) -> Path:
    """Fetch files of a hub repository, or find them in the hub's cache, and return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(base, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # the hub's client raises a dozen kinds: offline, unknown, gated, no disk …
        raise BaseModelError(
            f"--base {base!r} is no folder here and could not be fetched from the hub ({type(error).__name__}); "
            f"give an existing folder, {SHIPPED_BASE} (ships with the package), or the id of an existing model and a "
            "network."
        ) from error


def _read_config(folder: Path, base: str) -> tuple[DomextConfig, Layout]:
    """Return the shape that config.json describes, and the layout."""
    path = folder / "config.json"
    _require_fetched(path)
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BaseModelError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(values, dict):
        raise BaseModelError(f"{path} holds no JSON object; give a folder that save_pretrained wrote.")
    kind = values.get("model_type")
    if is_own_config(values):
        raise BaseModelError(f"--base {base!r} is an export of this library; give the base that it was made from.")
    *others, last = LAYOUTS
    if kind is None:
        raise BaseModelError(f"{path} has no model_type, which says how the model is built; {_tell_kind(values)}.")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise BaseModelError(
            f"--base {base!r} has model_type {kind!r} in its config.json; give a base of {', '.join(others)} or {last}."
        )
    layout = LAYOUTS[kind]
    try:  # transformers knows what a field that config.json leaves out means for this architecture
        found = CONFIG_MAPPING[kind].from_dict(values)
        refusal = layout.refuse(found)
        config = DomextConfig() if refusal else layout.describe(found)
    except Exception as error:  # its checks raise several kinds
        raise BaseModelError(f"{path} describes no {kind} model ({' '.join(str(error).split())}).") from error
    if refusal:
        raise BaseModelError(f"--base {base!r} {refusal}.")
    for activation in (config.hidden_act, config.mlm_head_act or config.hidden_act):
        if activation not in ACT2FN:
            raise BaseModelError(f"{path} names the activation {activation!r}, which transformers does not have.")
    return config, layout


def _require_fetched(path: Path) -> None:
    if fault := find_unfetched(path):
        raise BaseModelError(f"{path} {fault}.")


def _tell_kind(values: dict[str, Any]) -> str:
    """Say which model_type to write into a config.json without one, such as those of BERT's first release."""
    classes = values.get("architectures") or [""]
    name = str(classes[0]) if isinstance(classes, list) else ""
    for kind in LAYOUTS:
        if name.startswith(CONFIG_MAPPING[kind].__name__.removesuffix("Config")):
            return f'write "model_type": "{kind}" into it'
    return f'write "model_type": "bert" into it, or, if it is no BERT, its own ({", ".join(LAYOUTS)})'


def is_own_config(values: dict[str, Any]) -> bool:
    """Whether a config.json is one of this library's models; an export's also names an architecture of transformers."""
    return values.get("model_type") == DomextConfig.model_type or OWN_FIELDS in values


def _list_weight_files(folder: Path, base: str) -> list[Path]:
    """Return the files that hold a base's tensors: safetensors if there are any, whole or in shards."""
    is_local = base == SHIPPED_BASE or Path(base).expanduser().is_dir()
    for name in WEIGHT_FILES:
        if not is_local:
            stem, suffix = name.rsplit(".", 1)
            _fetch(base, [name, f"{stem}-*-of-*.{suffix}"])
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                shards = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BaseModelError(f"{index} is no index of weight files; save the checkpoint again.") from error
            listed = [folder / Path(shard).name for shard in sorted(shards)]
            if absent := next((path.name for path in listed if not os.path.lexists(path)), ""):
                raise BaseModelError(f"{index} lists {absent}, which is not there; fetch that, too.")
            return listed
    for name in WEIGHT_FILES:
        _require_fetched(folder / name)
    others = ((sorted(path.name for path in folder.glob(pattern)), said) for pattern, said in _OTHER_WEIGHTS)
    fault = next((f"it has {said.format(names[0])}" for names, said in others if names), "save its weights there")
    raise BaseModelError(f"--base {base!r} has neither model.safetensors nor pytorch_model.bin; {fault}.")


def read_weights(folder: Path, base: str) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint; .bin files through torch's weights-only loader, which runs no code.

    `base` is what the user called it.
    """
    tensors: dict[str, Tensor] = {}
    for path in _list_weight_files(folder, base):
        _require_fetched(path)
        try:
            if path.suffix == ".safetensors":
                tensors.update(load_file(path))
            else:
                tensors.update(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # damaged, missing or unsafe, whatever its reader calls that
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            if isinstance(error, pickle.UnpicklingError):  # torch's own words advise to run its code
                reason = "it holds more than tensors, or is damaged; save the model with save_pretrained"
            fault = BaseModelError(f"{path} cannot be read as weights ({type(error).__name__}: {reason}).")
            raise find_storage_error(error, path) or fault from error
    return tensors


def _untie(tensors: dict[str, Tensor], names: dict[str, str], base: str) -> None:
    """Leave out copies of tied tensors, after checking that they are copies."""
    words = tensors.get("bert.embeddings.word_embeddings.weight")
    weight, bias = (tensors.pop(name, None) for name in _TIED)
    if weight is not None and words is not None and not torch.equal(weight, words):
        raise BaseModelError(f"--base {base!r} has an output projection that is not tied to its word embeddings.")
    if bias is not None and f"{MLM_HEAD}bias" not in tensors:
        tensors[f"{MLM_HEAD}bias"], names[f"{MLM_HEAD}bias"] = bias, names[_TIED[1]]


def _check_tensors(tensors: dict[str, Tensor], config: DomextConfig, base: str) -> None:
    """Refuse tensors that are not those of the model that config.json describes; heads may be absent."""
    absent = tuple(head for head in HEADS[:2] if not any(name.startswith(head) for name in tensors))
    try:
        if config.num_hidden_layers > len(tensors):  # no need to make a million
            raise ValueError(f"{config.num_hidden_layers} layers of {len(tensors)} tensors")
        with torch.device("meta"):
            model = (DomextForPreTraining if config.has_pooler else DomextForMaskedLM)(config)
    except _SIZE_ERRORS as error:
        reason = (str(error).splitlines() or [""])[0]
        raise BaseModelError(f"--base {base!r} has sizes in its config.json that no model has ({reason}).") from error
    expected = {name: tuple(param.shape) for name, param in model.named_parameters() if not name.startswith(absent)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise BaseModelError(
            f"--base {base!r} does not hold what its config.json says: {name} has shape {found.get(name, 'none')} "
            f"instead of {expected.get(name, 'none')} ({len(wrong)} tensors differ)."
        )
