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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, BertConfig, PreTrainedConfig, RobertaConfig
from transformers.activations import ACT2FN

from domext_ray.config import MethodConfig, ShapeConfig
from domext_ray.errors import BaseModelError
from domext_ray.model.configuration_domext import DomextConfig
from domext_ray.model.modeling_domext import DomextForMaskedLM

SHIPPED_BASE = "general-mini"
ASSETS = Path(__file__).parent.parent / "assets"
POSITION_RULES = {"bert": "absolute", "roberta": "roberta", "xlm-roberta": "roberta"}
SMALL_FILES = ["*.json", "*.txt", "*.model", "README.md"]
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_ROBERTA_HEAD = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.decoder.": "cls.predictions.decoder.",
    "lm_head.bias": "cls.predictions.bias",
}
_SHARED_FIELDS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps pad_token_id"
).split()
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
        sha256: `hash_tensors` of `tensors`.
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
        """Trainable share of base + extension; of everything, where more than these trains."""
        return self.trainable / (self.encoder if self.trainable <= self.encoder else self.total)


def load_base(base: str) -> Base:
    """Read a base checkpoint.

    Args:
        base: "general-mini" (ships with the package), a folder, or a hub id such as bert-base-uncased.

    Raises:
        BaseModelError: it does not exist, is of another architecture, or its files are not what its config says.
    """
    folder = _find_folder(base)
    config, prefix = _read_config(folder, base)
    original = _read_tensors(_list_weight_files(folder, base))
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in sorted(original.items()):
        internal = _to_internal_name(name, prefix)
        if internal is not None:
            tensors[internal], names[internal] = tensor.to(torch.float32).contiguous(), name
    has_head = f"{_HEAD}transform.dense.weight" in tensors
    _untie(tensors, names, base)
    if not has_head:
        warnings.warn(f"The base {base!r} has no masked-LM head, so a fresh one is made and trains.", stacklevel=2)
        tensors = {name: each for name, each in tensors.items() if not name.startswith(_HEAD)}
    config.has_pooler = f"{_POOLER}dense.weight" in tensors
    _check_tensors(tensors, config, base, has_head)
    names = {name: names[name] for name in tensors}
    return Base(base, folder, config, tensors, names, hash_tensors(tensors), has_head, folder)


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 (hex) of fp32 tensors on the CPU, over sorted names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()


def _find_folder(base: str) -> Path:
    """Return the folder of a base; of a hub id, with its small files only, so that a wrong one costs no download."""
    folder = ASSETS / SHIPPED_BASE if base == SHIPPED_BASE else Path(base).expanduser()
    if base == SHIPPED_BASE and not folder.is_dir():
        raise BaseModelError(
            f"--base {base!r} is missing from this installation ({folder}); install the package again."
        )
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BaseModelError(f"--base {base!r} has no config.json; give a folder that save_pretrained wrote.")
        return folder
    if folder.exists():
        raise BaseModelError(f"--base {base!r} is a file; give the folder that holds it and its config.json.")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", base):
        raise BaseModelError(f"--base {base!r} does not exist; give a checkpoint folder or a hub id.")
    folder = _fetch(base, SMALL_FILES)
    if not (folder / "config.json").is_file():
        raise BaseModelError(f"--base {base!r} has no config.json on the hub; give the id of a BERT or RoBERTa model.")
    return folder


def _fetch(hub_id: str, patterns: list[str]) -> Path:
    """Fetch files of a hub repository, or find them in the hub's cache, and return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # the hub's client raises a dozen kinds: offline, unknown, gated, no disk …
        raise BaseModelError(
            f"--base {hub_id!r} is no folder here and could not be fetched from the hub ({type(error).__name__}); "
            "give an existing folder, or the id of an existing model and a network."
        ) from error


def _read_config(folder: Path, base: str) -> tuple[DomextConfig, str]:
    """Return the shape that config.json describes and the prefix of the encoder's tensor names."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BaseModelError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(values, dict):
        raise BaseModelError(f"{path} holds no JSON object; give a folder that save_pretrained wrote.")
    kind = values.get("model_type")
    if kind == DomextConfig.model_type:
        raise BaseModelError(f"--base {base!r} is an export of this library; give the base that it was made from.")
    if kind not in POSITION_RULES:
        raise BaseModelError(
            f"--base {base!r} has model_type {kind!r} in its config.json; give a base of "
            f"{', '.join(list(POSITION_RULES)[:-1])} or {list(POSITION_RULES)[-1]}."
        )
    try:  # transformers knows what a field that config.json leaves out means for this architecture
        found = CONFIG_MAPPING[kind].from_dict(values)
        config = _convert_config(found.to_dict(), kind)
    except Exception as error:  # its checks raise several kinds
        raise BaseModelError(f"{path} describes no {kind} model ({' '.join(str(error).split())}).") from error
    if values.get("is_decoder") or values.get("position_embedding_type", "absolute") != "absolute":
        raise BaseModelError(f"--base {base!r} is a decoder or has relative positions; give a plain encoder.")
    if config.hidden_act not in ACT2FN:
        raise BaseModelError(f"{path} names the activation {config.hidden_act!r}, which transformers does not have.")
    return config, "bert." if kind == "bert" else "roberta."


def _convert_config(values: dict[str, Any], kind: str) -> DomextConfig:
    kept = {name: values[name] for name in _SHARED_FIELDS if values.get(name) is not None}
    head_act = None if kind == "bert" else "gelu"  # RoBERTa's masked-LM head does not read hidden_act
    return DomextConfig(**kept, position_rule=POSITION_RULES[kind], mlm_head_act=head_act)


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
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BaseModelError(f"{index} is no index of weight files; save the checkpoint again.") from error
            return [folder / Path(each).name for each in sorted(shards)]
    raise BaseModelError(
        f"--base {base!r} has neither model.safetensors nor pytorch_model.bin; save its weights there."
    )


def _read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Read the tensors of weight files; .bin files through torch's weights-only loader, which runs no code."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            if path.suffix == ".safetensors":
                tensors.update(load_file(path))
            else:
                tensors.update(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # damaged, missing or unsafe, whatever its reader calls that
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            raise BaseModelError(f"{path} cannot be read as weights ({type(error).__name__}: {reason}).") from error
    return tensors


def _to_internal_name(name: str, prefix: str) -> str | None:
    """Return BERT's name of a checkpoint's tensor; None for those that no masked LM uses."""
    internal = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)  # TensorFlow's names, in old checkpoints
    internal = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", internal)
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
            f"--base {base!r} does not hold what its config.json says: {name} has shape {found.get(name, 'none')} "
            f"instead of {expected.get(name, 'none')} ({len(wrong)} tensors differ)."
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
        torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
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

    Source: AF Adapter section 3.2. In a layer, an extra head adds 4·d·d_k + 3·d_k parameters, b'_O adds d once a
    domain, and a units add 2·d·a + a + d.
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


def detach(model: DomextForMaskedLM, original_names: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a model without its extensions.

    Args:
        model: an augmented model whose base is stored in fp32 (a base that `store_base` rounded has lost its bits).
        original_names: `Base.original_names`, for just the base's tensors under its checkpoint's names; None: all but
            the extensions, under Hugging Face BERT's names.

    Returns:
        fp32 tensors that share memory with the model; tied copies are left out, as in `Base.tensors`.
    """
    params = dict(model.named_parameters())
    if original_names is None:
        original_names = {name: name for name in params if ".domains." not in name}
    assert all(params[name].dtype == torch.float32 for name in original_names), "the base is stored in fp32"
    return {original: params[name].detach() for name, original in original_names.items()}


def describe_plain(config: DomextConfig) -> PreTrainedConfig:
    """Return the configuration of transformers' own BERT or RoBERTa that a model without extensions is."""
    assert not config.domains
    shared = {name: getattr(config, name) for name in _SHARED_FIELDS}
    is_roberta = config.position_rule == "roberta"
    return (RobertaConfig if is_roberta else BertConfig)(
        **shared, architectures=["RobertaForMaskedLM" if is_roberta else "BertForMaskedLM"]
    )


def name_plain(model: DomextForMaskedLM) -> dict[str, str]:
    """Return the name that transformers' own BERT or RoBERTa gives to each parameter, by internal name."""
    config = cast(DomextConfig, model.config)
    names = {name: name for name, _ in model.named_parameters()}
    if config.position_rule != "roberta":
        return names
    heads = {internal: original for original, internal in _ROBERTA_HEAD.items()}
    for name in names:
        prefix = next((each for each in heads if name.startswith(each)), "bert.")
        names[name] = heads.get(prefix, "roberta.") + name[len(prefix) :]
    return names
