"""Base checkpoint -> augmented model; which parameters train; how many there are; the base back, bit for bit.

A base is any BERT, RoBERTa or XLM-R checkpoint, as a folder or a hub id. Its tensors are read under Hugging Face BERT's
names; RoBERTa's names map to these one to one, and `detach` maps them back.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from domext_ray.config import MethodConfig, ShapeConfig
from domext_ray.errors import BaseModelError
from domext_ray.model.configuration_domext import DomextConfig
from domext_ray.model.modeling_domext import DomextForMaskedLM

SHIPPED_BASE = "general-mini"
ASSETS = Path(__file__).parent.parent / "assets"
POSITION_RULES = {"bert": "absolute", "roberta": "roberta", "xlm-roberta": "roberta"}
HUB_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "pytorch_model*.bin"]

_ROBERTA_HEAD = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.decoder.": "cls.predictions.decoder.",
    "lm_head.bias": "cls.predictions.bias",
}
_TIED = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
_HEAD = "cls.predictions."
_POOLER = "bert.pooler."


@dataclass(frozen=True)
class Base:
    """A base checkpoint in memory.

    Args:
        id: what the user called it.
        folder: where its files are.
        config: shape, without extensions.
        tensors: fp32 tensors by internal name; tied copies are left out.
        original_names: name in the checkpoint by internal name.
        sha256: hash over the sorted names, shapes and fp32 bytes.
        has_mlm_head: the checkpoint has a masked-LM head.
        tokenizer_folder: where its tokenizer is.
    """

    id: str
    folder: Path
    config: DomextConfig
    tensors: dict[str, Tensor]
    original_names: dict[str, str]
    sha256: str
    has_mlm_head: bool
    tokenizer_folder: Path


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of an augmented model, in closed form.

    Args:
        total: all of them, the MLM head included, tied ones once.
        trainable: those that the method trains.
        encoder: base and extensions, pooler in, MLM head out: the denominator of the papers' shares.
        num_hidden_layers: layers.
        hidden_size: width d.
    """

    total: int
    trainable: int
    encoder: int
    num_hidden_layers: int
    hidden_size: int

    @property
    def trainable_frac(self) -> float:
        """Trainable share of base + extension."""
        return self.trainable / self.encoder


def load_base(base: str) -> Base:
    """Read a base checkpoint.

    Args:
        base: "general-mini" (ships with the package), a folder, or a hub id such as bert-base-uncased.

    Raises:
        BaseModelError: it does not exist, is of another architecture, or its files are not what its config says.
    """
    folder = _find_folder(base)
    config, prefix = _read_config(folder, base)
    original = _read_tensors(folder)
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in sorted(original.items()):
        internal = _to_internal_name(name, prefix)
        if internal is not None:
            tensors[internal], names[internal] = tensor.to(torch.float32).contiguous(), name
    has_head = f"{_HEAD}transform.dense.weight" in tensors
    _untie(tensors, names, base)
    if not has_head:
        warnings.warn(f"the base {base!r} has no masked-LM head: a fresh one is made and trains.", stacklevel=2)
        tensors = {name: each for name, each in tensors.items() if not name.startswith(_HEAD)}
    config.has_pooler = f"{_POOLER}dense.weight" in tensors
    _check_tensors(tensors, config, base, has_head)
    names = {name: names[name] for name in tensors}
    return Base(base, folder, config, tensors, names, hash_tensors(tensors), has_head, folder)


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 of tensors, over sorted names, shapes and fp32 bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def _find_folder(base: str) -> Path:
    folder = ASSETS / SHIPPED_BASE if base == SHIPPED_BASE else Path(base).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise BaseModelError(f"--base {base!r} has no config.json; give a folder that save_pretrained wrote.")
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) or base.startswith("."):
        raise BaseModelError(f"--base {base!r} does not exist; give a checkpoint folder or a hub id.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises a dozen kinds: offline, unknown, gated, no disk …
        raise BaseModelError(
            f"--base {base!r} is no folder here and could not be fetched from the hub ({type(error).__name__}); "
            "give an existing folder, or a hub id and a network."
        ) from error


def _read_config(folder: Path, base: str) -> tuple[DomextConfig, str]:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise BaseModelError(f"{folder / 'config.json'} is not valid JSON ({error}).") from error
    kind = values.get("model_type")
    if kind not in POSITION_RULES:
        raise BaseModelError(
            f"--base {base!r} is of architecture {kind!r}; give a base of one of {', '.join(POSITION_RULES)}."
        )
    if values.get("is_decoder") or values.get("position_embedding_type", "absolute") != "absolute":
        raise BaseModelError(f"--base {base!r} is a decoder or has relative positions; give a plain encoder.")
    defaults = {"pad_token_id": 0 if kind == "bert" else 1, "position_rule": POSITION_RULES[kind]}
    names = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
        "attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps "
        "pad_token_id"
    ).split()
    kept = {name: values[name] for name in names if values.get(name) is not None}
    prefix = "bert." if kind == "bert" else "roberta."
    return DomextConfig(**{**defaults, **kept}), prefix


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint, from safetensors or through torch's weights-only loader."""
    for pattern, read in (
        ("*.safetensors", load_file),
        ("pytorch_model*.bin", lambda path: torch.load(path, map_location="cpu", weights_only=True)),
    ):
        files = sorted(folder.glob(pattern))
        if not files:
            continue
        tensors: dict[str, Tensor] = {}
        for path in files:
            try:
                tensors.update(read(path))
            except Exception as error:  # a damaged file, whatever its reader calls that
                raise BaseModelError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
        return tensors
    raise BaseModelError(f"{folder} has neither model.safetensors nor pytorch_model.bin.")


def _to_internal_name(name: str, prefix: str) -> str | None:
    """Return BERT's name of a checkpoint's tensor; None for those that no masked LM uses."""
    internal = name.replace(".gamma", ".weight").replace(".beta", ".bias")  # TensorFlow's names in old checkpoints
    for old, new in _ROBERTA_HEAD.items():
        if internal.startswith(old):
            return new + internal[len(old) :]
    if internal.startswith(("embeddings.", "encoder.", "pooler.")):  # saved without a head
        internal = "bert." + internal
    elif internal.startswith(prefix):
        internal = "bert." + internal[len(prefix) :]
    known = internal.startswith(("bert.embeddings.", "bert.encoder.", _POOLER, _HEAD))
    return internal if known and not internal.endswith(("position_ids", "token_type_ids")) else None


def _untie(tensors: dict[str, Tensor], names: dict[str, str], base: str) -> None:
    """Leave out copies of tied tensors, after checking that they are copies."""
    words = tensors.get("bert.embeddings.word_embeddings.weight")
    weight, bias = (tensors.pop(name, None) for name in _TIED)
    if weight is not None and words is not None and not torch.equal(weight, words):
        raise BaseModelError(f"--base {base!r} has an output projection that is not tied to its word embeddings.")
    if bias is not None and f"{_HEAD}bias" not in tensors:
        tensors[f"{_HEAD}bias"], names[f"{_HEAD}bias"] = bias, names[_TIED[1]]


def _check_tensors(tensors: dict[str, Tensor], config: DomextConfig, base: str, has_head: bool) -> None:
    expected = _describe_tensors(config, has_head=has_head)
    found = {name: tuple(each.shape) for name, each in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise BaseModelError(
            f"--base {base!r} does not hold what its config.json says: {name} has shape {found.get(name, 'none')}, "
            f"expected {expected.get(name, 'none')} ({len(wrong)} tensors differ)."
        )


def _describe_tensors(config: DomextConfig, *, has_head: bool) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = DomextForMaskedLM(config)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    return {name: each for name, each in shapes.items() if has_head or not name.startswith(_HEAD)}


def describe_shape(
    base: Base | None, shape: ShapeConfig, method: MethodConfig, *, vocab_size: int, pad_token_id: int = 0
) -> DomextConfig:
    """Return the configuration of the augmented model.

    Args:
        base: the base, or None for random weights of `shape`.
        shape: encoder to make when there is no base.
        method: its extensions are added to the base.
        vocab_size: rows of the word embedding table when there is no base.
        pad_token_id: id of [PAD] when there is no base.
    """
    if base is None:
        config = DomextConfig(
            vocab_size=vocab_size,
            pad_token_id=pad_token_id,
            num_hidden_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_position_embeddings,
        )
    else:
        config = DomextConfig(**_own_values(base.config))
    if method.name == "af":
        config.domains = {method.domain: {"heads": method.heads, "ffn_units": method.ffn_units}}
        config.domain_init = method.init
    return config


def _own_values(config: DomextConfig) -> dict[str, Any]:
    values = config.to_dict()
    return {name: value for name, value in values.items() if name not in ("transformers_version", "model_type")}


def build_model(
    base: Base | None,
    shape: ShapeConfig,
    method: MethodConfig,
    *,
    vocab_size: int,
    pad_token_id: int = 0,
    dropout: float,
    seed: int,
) -> DomextForMaskedLM:
    """Make the augmented model, with `requires_grad` set by the method's rule.

    Args:
        base: the base, or None for random weights of `shape`.
        shape: encoder to make when there is no base.
        method: extensions, and the rule that says what trains.
        vocab_size: rows of the word embedding table; must be the base's when there is one.
        pad_token_id: id of [PAD].
        dropout: of hidden states and attention weights.
        seed: of everything that starts at random; torch's own generator is left as it was.

    Raises:
        BaseModelError: the tokenizer has more entries than the base has rows.
    """
    config = describe_shape(base, shape, method, vocab_size=vocab_size, pad_token_id=pad_token_id)
    if vocab_size > config.vocab_size:
        raise BaseModelError(f"the tokenizer has ids up to {vocab_size - 1}, the base {config.vocab_size} embeddings.")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DomextForMaskedLM(config)
    if base is not None:
        missing, unexpected = model.load_state_dict(base.tensors, strict=False)
        assert not unexpected, unexpected
        assert all(".domains." in name or name.startswith(_HEAD) for name in missing), missing
    elif shape.position_init == "sinusoidal":
        _start_from_sinusoids(model.bert.embeddings.position_embeddings.weight, config.initializer_range)
    names = trainable_names(model, method, base is not None and base.has_mlm_head)
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    return model


def _start_from_sinusoids(table: Tensor, scale: float) -> None:
    """Fill a learned position table with sinusoids of root mean square `scale` (Vaswani et al. 2017, section 3.5).

    From random positions a small model stays at word frequencies for millions of tokens, because "the next token" must
    be learned for every place on its own; between sinusoids it is one linear map.
    """
    places = torch.arange(table.shape[0], dtype=torch.float32)[:, None]
    width = table.shape[1] + table.shape[1] % 2
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / table.shape[1]))
    waves = torch.stack([torch.sin(places * rates), torch.cos(places * rates)], dim=-1).flatten(1)
    with torch.no_grad():
        table.copy_(waves[:, : table.shape[1]] * scale * math.sqrt(2.0))


def trainable_names(model: DomextForMaskedLM, method: MethodConfig, has_mlm_head: bool) -> set[str]:
    """Return the names of the parameters that a method trains.

    `af`: the extensions, and the MLM head (without the tied word embeddings) when it is fresh. `full`: everything that
    has a gradient under masked-language modelling, which the pooler has not.
    """
    names = [name for name, _ in model.named_parameters()]
    if method.name == "full":
        return {name for name in names if not name.startswith(_POOLER)}
    return {name for name in names if ".domains." in name or (name.startswith(_HEAD) and not has_mlm_head)}


def store_base(model: DomextForMaskedLM, dtype: torch.dtype) -> None:
    """Store the frozen matrices in another dtype, for use under autocast; vectors (biases, LayerNorms) stay fp32."""
    for param in model.parameters():
        if not param.requires_grad and param.ndim >= 2:
            param.data = param.data.to(dtype)


def count_parameters(config: DomextConfig, method: MethodConfig, has_mlm_head: bool) -> ParameterCounts:
    """Count parameters in closed form.

    Args:
        config: the augmented model.
        method: the rule that says what trains.
        has_mlm_head: the base brings an MLM head; a fresh one trains.

    Source: AF Adapter section 3.2; an extra head adds 4·d·d_k + 3·d_k parameters a layer, b'_O adds d once a domain, and
    a units add 2·d·a + a + d.
    """
    d, layers, ffn = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    head_size = d // config.num_attention_heads
    embeddings = (config.vocab_size + config.max_position_embeddings + config.type_vocab_size) * d + 2 * d
    layer = 4 * (d * d + d) + 2 * d * ffn + ffn + d + 4 * d
    pooler = d * d + d if config.has_pooler else 0
    head = d * d + d + 2 * d + config.vocab_size
    extension = 0
    for domain in config.domains.values():
        heads, units = domain["heads"], domain["ffn_units"]
        extension += layers * (heads * (4 * d * head_size + 3 * head_size) + (d if heads else 0))
        extension += layers * (2 * d * units + units + d if units else 0)
    encoder = embeddings + layers * layer + pooler + extension
    total = encoder + head
    trainable = total - pooler if method.name == "full" else extension + (0 if has_mlm_head else head)
    return ParameterCounts(total, trainable, encoder, layers, d)


def detach(model: DomextForMaskedLM, original_names: dict[str, str]) -> dict[str, Tensor]:
    """Return the base's tensors of a model under the names of the checkpoint that they came from.

    Args:
        model: an augmented model whose base is stored in fp32.
        original_names: `Base.original_names`.
    """
    tensors = dict(_named_tensors(model))
    return {original: tensors[name].detach() for name, original in original_names.items()}


def _named_tensors(model: DomextForMaskedLM) -> Iterable[tuple[str, Tensor]]:
    return model.named_parameters()
