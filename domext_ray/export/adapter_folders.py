"""A trained adapter becomes a folder of its own, in the format of AdapterHub's library or of peft.

Enters: a model with a base's weights and one domain of bottlenecks, or with LoRA. Leaves: a folder with safetensors,
JSON and a README.md that says how to load it. What such a format has no place for is refused. AdapterHub's holds
bottlenecks alone: the shifts of LayerNorms that train with them (Houlsby et al. section 2.1) go into a copy of the base
beside it. LoRA's updates are stored as they are, not merged.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.method import MethodConfig
from domext_ray.errors import RunError
from domext_ray.export.card import read_terms
from domext_ray.export.folder import ADAPTERHUB, PEFT, ExportRecord, check_target, new_export
from domext_ray.export.model_folder import check_tokenizer, rebuild_run, save_plain
from domext_ray.extensions.lora import build_lora_config
from domext_ray.extensions.table import find_others, is_extension
from domext_ray.model.base import Base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.graft import detach, name_plain
from domext_ray.model.layouts.layout import Layout
from domext_ray.model.layouts.table import find_layout
from domext_ray.storage import write_json

ADAPTERS_VERSION = "1.3.0"
"""Version of AdapterHub's library whose format is written; without one it takes "gelu" for the tanh approximation."""

_SUBLAYERS = ("attention.output", "output")
_LORA_TENSOR = ".default.weight"
_CAUSAL = "attention from left to right (--objective.kind)"
_MERGED = "take the ordinary export, in which LoRA is merged"
_AUGMENTED = "take the ordinary export, which holds everything"

_ADAPTERHUB_README = """\
---
library_name: adapters
base_model: {base}
{license}---
# Bottleneck adapter {domain} on {base}

{number} of width {size} a layer (Houlsby et al. 2019), in the format of AdapterHub's library. To load it, in this
folder and after `pip install adapters=={version}`:

```python
import adapters
from transformers import AutoModelForMaskedLM

model = AutoModelForMaskedLM.from_pretrained("{checkpoint}", dtype="float32")
adapters.init(model)
model.load_adapter("adapter", use_safetensors=True, set_active=True)
```

{note}
## Terms

{terms}
"""
_PEFT_README = """\
---
library_name: peft
base_model: {base}
{license}---
# LoRA of rank {rank} on {base}

In peft's format. To load it, in this folder and after `pip install peft`:

```python
from peft import PeftModel
from transformers import AutoModelForMaskedLM

base = AutoModelForMaskedLM.from_pretrained("{base}", dtype="float32")
model = PeftModel.from_pretrained(base, ".")
```

`{base}` is the base's hub id, or stands for its folder.
## Terms

{terms}
"""


def export_adapter_run(run_dir: Path, folder: Path, *, form: str, domain: str = "") -> Path:
    """Rebuild the model of a run's newest checkpoint and export its adapter alone.

    Args:
        run_dir: the run's directory.
        folder: where to.
        form: "adapterhub" or "peft".
        domain: whose bottlenecks; empty: the domain that the run trained.

    Returns:
        `folder`.

    Raises:
        RunError: see `rebuild_run`, `export_adapterhub` and `export_peft`; or the run has no base.
        BaseModelError: the base is not to be had.
    """
    check_target(folder, form)
    run = rebuild_run(run_dir)
    if run.base is None:
        raise RunError(f"{run_dir} was trained without a base, so there is no adapter to export; {_AUGMENTED}.")
    made_from = ExportRecord(form, run_dir.resolve().name, run.checkpoint.step, run.checkpoint_sha256)
    if form == PEFT:
        return export_peft(run.model, folder, run.config.method, run.base, made_from)
    domain = domain or run.config.method.domain
    return export_adapterhub(run.model, domain, folder, run.base, run.tokenizer, made_from)


def export_adapterhub(
    model: DomextForMaskedLM,
    domain: str,
    folder: Path,
    base: Base,
    tokenizer: PreTrainedTokenizerBase,
    made_from: ExportRecord | None = None,
) -> Path:
    """Write a domain's bottlenecks in AdapterHub's format; an earlier such export is replaced when this is complete.

    Args:
        model: the model, in fp32.
        domain: a domain that has bottlenecks and nothing else.
        folder: where to; made if missing. Holds adapter/ and README.md, and base/ where the model's encoder or head is
            not the base's own: the base with the domain's shifts added to its LayerNorms.
        base: what the model was made from.
        tokenizer: goes into base/.
        made_from: the checkpoint; None: the model was in memory.

    Returns:
        `folder`.

    Raises:
        RunError: the model has parts that the format does not hold, `folder` holds something else, or the disk refuses.

    Source: Houlsby et al. section 2.1, `LN(A(sublayer(x)) + x)` with a skip connection in A.
    """
    _find_layout(model, ADAPTERHUB)
    _check_bottlenecks(model, domain)
    config = cast(DomextConfig, model.config)
    plain = copy.deepcopy(model)
    _fold_shifts(plain, domain)
    for name in config.domains:
        plain.bert.drop_domain(name)
    has_base = bool(_find_changed(plain, base))
    name = _name_base(base)
    with new_export(folder, made_from or ExportRecord(ADAPTERHUB), base.folder) as temporary:
        (temporary / "adapter").mkdir()
        described = _describe_adapter(model, domain, name)
        write_json(temporary / "adapter" / "adapter_config.json", described, sort_keys=True)
        save_file(_name_bottlenecks(model, domain), temporary / "adapter" / "adapter.safetensors")
        if has_base:
            tokenizer.save_pretrained(temporary / "base")
            check_tokenizer(tokenizer, temporary / "base", config.vocab_size)
            save_plain(plain, temporary / "base", torch.float32)
        note = (
            f"`base/` is `{name}` with what trained besides the adapter (LayerNorms above all); on another base the "
            "adapter gives\nother results."
            if has_base
            else f"`{name}` is the base's hub id, or stands for its folder."
        )
        checkpoint = "base" if has_base else name
        sizes = config.domains[domain]
        readme = _ADAPTERHUB_README.format(
            base=name,
            domain=domain,
            number="Two adapters" if sizes.bottleneck_place == "both" else "An adapter",
            size=sizes.bottleneck_size,
            version=ADAPTERS_VERSION,
            checkpoint=checkpoint,
            note=note,
            **_describe_terms(base),
        )
        (temporary / "README.md").write_text(readme, encoding="utf-8")
        _open_to_all(temporary)
    return folder


def export_peft(
    model: DomextForMaskedLM, folder: Path, method: MethodConfig, base: Base, made_from: ExportRecord | None = None
) -> Path:
    """Write a model's LoRA in peft's format; an earlier such export is replaced when this is complete.

    `PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base, dtype=torch.float32), folder)` loads it.

    Args:
        model: the model, in fp32, LoRA not yet merged.
        folder: where to; made if missing.
        method: with which LoRA was injected.
        base: what the model was made from.
        made_from: the checkpoint; None: the model was in memory.

    Returns:
        `folder`.

    Raises:
        RunError: the model has no LoRA or more than that, `folder` holds something else, or the disk refuses.
    """
    tensors = _name_lora(model)
    _check_lora(model, base, tensors)
    config = build_lora_config(method)
    config.base_model_name_or_path = _name_base(base)
    config.inference_mode = True
    layout = _find_layout(model, PEFT)
    kind = layout.config_class.model_type
    loads_into = {
        "base_model_class": f"{layout.family}ForMaskedLM",
        "parent_library": f"transformers.models.{kind}.modeling_{kind}",
    }
    with new_export(folder, made_from or ExportRecord(PEFT), base.folder) as temporary:
        config.save_pretrained(temporary, auto_mapping_dict=loads_into)
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        readme = _PEFT_README.format(base=_name_base(base), rank=method.lora_rank, **_describe_terms(base))
        (temporary / "README.md").write_text(readme, encoding="utf-8")
        _open_to_all(temporary)
    return folder


def _check_bottlenecks(model: DomextForMaskedLM, domain: str) -> None:
    """Refuse a model whose forward pass is more than a plain encoder's and the domain's bottlenecks."""
    config = cast(DomextConfig, model.config)
    if domain not in config.domains:
        raise RunError(f"the model has no domain {domain!r} to export; it has {', '.join(config.domains) or 'none'}.")
    sizes = config.domains[domain]
    if not sizes.bottleneck_size:
        raise RunError(f"the domain {domain!r} has no bottlenecks, so AdapterHub's format has no place for it.")
    others = [*find_others("adapterhub", config, [name for name, _ in model.named_parameters()], domain)]
    if sizes.bottleneck_layer_norm:  # that library's LayerNorm has another epsilon than the base's
        others.append(f"a LayerNorm inside the bottlenecks of the domain {domain!r}")
    others += [_CAUSAL] if config.causal else []
    active = config.domains if config.active_domains is None else config.active_domains
    others += [f"the active domain {name!r} besides {domain!r}" for name in active if name != domain]
    if others:
        raise RunError(f"the model has {others[0]}, which AdapterHub's format does not hold; {_AUGMENTED}.")


def _check_lora(model: DomextForMaskedLM, base: Base, tensors: dict[str, Tensor]) -> None:
    if not tensors:
        raise RunError("the model has no LoRA that peft's format could hold; train one (--method.lora_rank).")
    if cast(DomextConfig, model.config).causal:
        raise RunError(f"the model has {_CAUSAL}, which peft's format does not hold; {_MERGED}.")
    if cast(DomextConfig, model.config).has_extension:
        raise RunError(f"the model has extensions beside LoRA, which peft's format does not hold; {_MERGED}.")
    changed = _find_changed(model, base)
    if changed:
        raise RunError(
            f"{changed[0]} is not the base's own ({len(changed)} tensors differ), and peft's format holds LoRA alone; "
            f"{_MERGED}."
        )


def _find_changed(model: DomextForMaskedLM, base: Base) -> list[str]:
    """Return the names of tensors, extensions aside, that the base does not bring or that training has changed."""
    return sorted(
        name
        for name, tensor in detach(model).items()
        if name not in base.tensors or not torch.equal(tensor.cpu(), base.tensors[name])
    )


def _fold_shifts(model: DomextForMaskedLM, domain: str) -> None:
    """Add a domain's shifts to the LayerNorms, as the forward pass does."""
    with torch.no_grad():
        for _, sublayer, bottleneck in _list_bottlenecks(model, domain):
            if bottleneck.norm is not None:
                sublayer.LayerNorm.weight += bottleneck.norm.weight
                sublayer.LayerNorm.bias += bottleneck.norm.bias


def _list_bottlenecks(model: DomextForMaskedLM, domain: str) -> list[tuple[str, Any, Any]]:
    """Return the name of each sublayer's output that has a bottleneck of the domain, that module and the bottleneck."""
    found = []
    for index, layer in enumerate(model.bert.encoder.layer):
        for place in _SUBLAYERS:
            sublayer = cast(Any, layer.get_submodule(place))
            if domain in sublayer.domains:
                found.append((f"encoder.layer.{index}.{place}", sublayer, sublayer.domains[domain]))
    return found


def _name_bottlenecks(model: DomextForMaskedLM, domain: str) -> dict[str, Tensor]:
    """Return a domain's bottlenecks under the names of AdapterHub's library."""
    prefix = _find_layout(model, ADAPTERHUB).prefix
    tensors = {}
    for place, _, bottleneck in _list_bottlenecks(model, domain):
        for own, theirs in (("down", "adapter_down.0"), ("up", "adapter_up")):
            for name, tensor in getattr(bottleneck, own).named_parameters():
                tensors[f"{prefix}{place}.adapters.{domain}.{theirs}.{name}"] = tensor.detach().float().contiguous()
    return tensors


def _describe_adapter(model: DomextForMaskedLM, domain: str, base_name: str) -> dict[str, Any]:
    """Return adapter_config.json of AdapterHub's library: its DoubleSeqBnConfig, every choice spelt out."""
    config = cast(DomextConfig, model.config)
    sizes = config.domains[domain]
    layers = range(sizes.first_layer, sizes.last_layer + 1)
    layout = _find_layout(model, ADAPTERHUB)
    return {
        "config": {
            "mh_adapter": sizes.bottleneck_place != "output",
            "output_adapter": sizes.bottleneck_place != "attention",
            "cross_adapter": False,
            "non_linearity": sizes.bottleneck_activation,
            "reduction_factor": find_reduction_factor(config.hidden_size, sizes.bottleneck_size),
            "original_ln_before": False,
            "original_ln_after": True,
            "residual_before_ln": True,
            "adapter_residual_before_ln": False,
            "ln_before": False,
            "ln_after": False,
            "init_weights": "houlsby",
            "is_parallel": sizes.bottleneck_parallel,
            "scaling": 1.0,
            "use_gating": False,
            "dropout": 0.0,
            "inv_adapter": None,
            "inv_adapter_reduction_factor": None,
            "phm_layer": False,
            "leave_out": [index for index in range(config.num_hidden_layers) if index not in layers],
        },
        "hidden_size": config.hidden_size,
        "model_class": f"{layout.family}ForMaskedLM",
        "model_name": base_name,
        "model_type": layout.config_class.model_type,
        "name": domain,
        "version": f"adapters.{ADAPTERS_VERSION}",
    }


def find_reduction_factor(hidden_size: int, bottleneck_size: int) -> int | float:
    """Return the factor from which AdapterHub's library computes a width: `int(hidden_size // factor)`.

    The quotient itself will not do: 32 // (32 / 5) is 4 in floating point. Aiming between m and m + 1 is safe.

    Args:
        hidden_size: d.
        bottleneck_size: m.
    """
    if hidden_size % bottleneck_size == 0:
        return hidden_size // bottleneck_size
    factor = hidden_size / (bottleneck_size + 0.5)
    assert int(hidden_size // factor) == bottleneck_size
    return factor


def _name_lora(model: DomextForMaskedLM) -> dict[str, Tensor]:
    """Return LoRA's tensors under the names of peft's folders, those of transformers' own model inside."""
    tensors = {}
    params = dict(model.named_parameters())
    for own, plain in name_plain(model).items():
        if is_extension(own) and own.endswith(_LORA_TENSOR) and (".lora_A." in own or ".lora_B." in own):
            name = f"base_model.model.{plain.removesuffix(_LORA_TENSOR)}.weight"
            tensors[name] = params[own].detach().contiguous()
    return tensors


def _find_layout(model: nn.Module, form: str) -> Layout:
    """Return a model's layout; refuse one whose layers the format's library does not know by BERT's names."""
    layout = find_layout(cast(DomextConfig, model.config))
    if form not in layout.formats:
        advice = _MERGED if form == PEFT else _AUGMENTED
        raise RunError(f"the format of {form} is not written for bases of the kind {layout.family}; {advice}.")
    return layout


def _describe_terms(base: Base) -> dict[str, str]:
    """Return what a README says of the base's terms: lines of its header, and a paragraph."""
    terms = read_terms(base.folder)
    return {"license": yaml.safe_dump(terms.header), "terms": terms.describe()}


def _name_base(base: Base) -> str:
    """Return the base's id; of a folder only the last part, which tells nothing about the machine."""
    return base.folder.resolve().name if Path(base.id).expanduser().is_dir() else base.id


def _open_to_all(folder: Path) -> None:
    """Give safetensors files, which only their owner can read when they are made, the mode of the other files."""
    for path in folder.rglob("*.safetensors"):
        shutil.copymode(folder / "README.md", path)
