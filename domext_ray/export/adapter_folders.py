"""A trained adapter becomes a folder of its own, in the format of AdapterHub's library or of peft.

Enters: a model with a base's weights and one domain of bottlenecks, or with LoRA. Leaves: a folder with safetensors,
JSON and a README.md that says how to load it. What such a format has no place for is refused. AdapterHub's holds
bottlenecks alone: the shifts of LayerNorms that train with them (Houlsby et al. section 2.1) go into a copy of the base
beside it. LoRA's updates are stored as they are, not merged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from domext_ray.config.method import MethodConfig
from domext_ray.errors import RunError
from domext_ray.export.card import format_card, name_base, read_terms
from domext_ray.export.folder import ADAPTERHUB, PEFT, ExportRecord, check_target, new_export
from domext_ray.export.model_folder import save_plain, save_tokenizer
from domext_ray.extensions.lora import build_lora_config
from domext_ray.extensions.table import find_others
from domext_ray.model.base import Base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.graft import detach
from domext_ray.model.layouts.layout import Layout
from domext_ray.model.layouts.table import find_layout
from domext_ray.storage import write_json
from domext_ray.training.rebuild import RebuiltRun, rebuild_run

ADAPTERS_VERSION = "1.3.0"
"""Version of AdapterHub's library whose format is written; without one it takes "gelu" for the tanh approximation."""

_INSTEAD = {
    ADAPTERHUB: "take the ordinary export, which holds everything",
    PEFT: "take the ordinary export, in which LoRA is merged",
}
_CARD = """{what}. To load it, in this folder and after `pip install {package}`:

```python
{imports}
from transformers import AutoModelForMaskedLM

model = AutoModelForMaskedLM.from_pretrained("{base}", dtype="float32")
{loading}
```"""


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
        RunError: see `rebuild_run`; the model has no such adapter, or parts that the format does not hold; `folder`
            holds something else, or the disk refuses.
        BaseModelError: the base is not to be had.
    """
    check_target(folder, form)
    run = rebuild_run(run_dir)
    if form == PEFT:
        export_peft(run, folder)
    else:
        export_adapterhub(run, domain or run.config.method.domain, folder)
    return folder


def export_adapterhub(run: RebuiltRun, domain: str, folder: Path) -> None:
    """Write a domain's bottlenecks in AdapterHub's format; `run` has its model in fp32.

    The folder holds adapter/ and README.md, and base/ where the model's encoder or head is not the base's own: the base
    with the domain's shifts added to its LayerNorms.

    Source: Houlsby et al. section 2.1, `LN(A(sublayer(x)) + x)` with a skip connection in A.
    """
    (base, layout), model = _open_run(run, ADAPTERHUB), run.model
    config, name = cast(DomextConfig, model.config), name_base(base.id)
    _check_bottlenecks(model, domain)
    sizes = config.domains[domain]
    plain = copy.deepcopy(model)
    tensors = {}
    for place, sublayer, bottleneck in _list_bottlenecks(plain, domain):
        for own, theirs in (("down", "adapter_down.0"), ("up", "adapter_up")):
            for kind, tensor in getattr(bottleneck, own).named_parameters():
                tensors[f"{layout.prefix}{place}.adapters.{domain}.{theirs}.{kind}"] = tensor.detach().float()
        if bottleneck.norm is not None:  # the forward pass adds them, too
            sublayer.LayerNorm.weight.data += bottleneck.norm.weight
            sublayer.LayerNorm.bias.data += bottleneck.norm.bias
    for each in config.domains:
        plain.bert.drop_domain(each)
    has_base = bool(_find_changed(plain, base))
    with new_export(folder, ExportRecord.of(ADAPTERHUB, run), base.folder) as temporary:
        (temporary / "adapter").mkdir()
        described = _describe_adapter(config, layout, domain, name)
        write_json(temporary / "adapter" / "adapter_config.json", described, sort_keys=True)
        save_file(tensors, temporary / "adapter" / "adapter.safetensors")
        if has_base:
            save_tokenizer(run.tokenizer, temporary / "base", config.vocab_size)
            save_plain(plain, temporary / "base", torch.float32)
        number = "Two adapters" if sizes.bottleneck_place == "both" else "An adapter"
        width = f"{number} of width {sizes.bottleneck_size} a layer (Houlsby et al. 2019)"
        readme = _CARD.format(
            what=f"{width}, in the format of AdapterHub's library",
            package=f"adapters=={ADAPTERS_VERSION}",
            imports="import adapters",
            base="base" if has_base else name,
            loading='adapters.init(model)\nmodel.load_adapter("adapter", use_safetensors=True, set_active=True)',
        )
        note = f"`base/` is `{name}` with what trained besides the adapter; on another base it gives other results."
        _write_card(temporary, f"Bottleneck adapter {domain}", base, "adapters", readme, note if has_base else "")


def export_peft(run: RebuiltRun, folder: Path) -> None:
    """Write a model's LoRA in peft's format; `run` has its model in fp32, LoRA not merged."""
    from peft import get_peft_model_state_dict

    (base, layout), model, method = _open_run(run, PEFT), run.model, run.config.method
    _check_lora(model, method, base)
    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {f"base_model.model.{layout.name_plain(name)}": each.contiguous() for name, each in found.items()}
    config = build_lora_config(method)
    config.base_model_name_or_path = name_base(base.id)
    config.inference_mode = True
    kind = layout.config_class.model_type
    loads_into = {
        "base_model_class": f"{layout.family}ForMaskedLM",
        "parent_library": f"transformers.models.{kind}.modeling_{kind}",
    }
    with new_export(folder, ExportRecord.of(PEFT, run), base.folder) as temporary:
        config.save_pretrained(temporary, auto_mapping_dict=loads_into)
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        readme = _CARD.format(
            what="In peft's format",
            package="peft",
            imports="from peft import PeftModel",
            base=name_base(base.id),
            loading='model = PeftModel.from_pretrained(model, ".")',
        )
        _write_card(temporary, f"LoRA of rank {method.lora_rank}", base, "peft", readme)


def _write_card(folder: Path, title: str, base: Base, library: str, text: str, note: str = "") -> None:
    name = name_base(base.id)
    sections = [text, note or f"`{name}` is the base's hub id, or stands for its folder."]
    terms, title = read_terms(base.folder), f"{title} on {name}"
    card = format_card(title, base.id, terms, sections, relation="adapter", library_name=library)
    (folder / "README.md").write_text(card, encoding="utf-8")


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
    active = config.domains if config.active_domains is None else config.active_domains
    others += [f"the active domain {name!r} besides {domain!r}" for name in active if name != domain]
    _refuse(others, model, ADAPTERHUB)


def _check_lora(model: DomextForMaskedLM, method: MethodConfig, base: Base) -> None:
    """Refuse a model that is more than the base and LoRA."""
    if not method.lora_rank:
        raise RunError("the model has no LoRA that peft's format could hold; train one (--method.lora_rank).")
    others = ["extensions beside LoRA"] if cast(DomextConfig, model.config).has_extension else []
    others += [
        f"tensors besides LoRA that are not the base's own, such as {name}" for name in _find_changed(model, base)
    ]
    _refuse(others, model, PEFT)


def _refuse(others: list[str], model: DomextForMaskedLM, form: str) -> None:
    if cast(DomextConfig, model.config).causal:
        others = ["attention from left to right (--objective.kind)", *others]
    if others:
        raise RunError(f"the model has {others[0]}, which the format of {form} does not hold; {_INSTEAD[form]}.")


def _find_changed(model: DomextForMaskedLM, base: Base) -> list[str]:
    """Return the names of tensors, extensions aside, that the base does not bring or that training has changed."""
    return sorted(
        name
        for name, tensor in detach(model).items()
        if name not in base.tensors or not torch.equal(tensor.cpu(), base.tensors[name])
    )


def _list_bottlenecks(model: DomextForMaskedLM, domain: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each sublayer's output that has a bottleneck of the domain, that module and the bottleneck."""
    for index, layer in enumerate(model.bert.encoder.layer):
        for place in ("attention.output", "output"):
            sublayer = cast(Any, layer.get_submodule(place))
            if domain in sublayer.domains:
                yield f"encoder.layer.{index}.{place}", sublayer, sublayer.domains[domain]


def _describe_adapter(config: DomextConfig, layout: Layout, domain: str, base_name: str) -> dict[str, Any]:
    """Return adapter_config.json of AdapterHub's library: its DoubleSeqBnConfig, every choice spelt out."""
    sizes = config.domains[domain]
    layers = range(sizes.first_layer, sizes.last_layer + 1)
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
    whole, rest = divmod(hidden_size, bottleneck_size)
    return hidden_size / (bottleneck_size + 0.5) if rest else whole


def _open_run(run: RebuiltRun, form: str) -> tuple[Base, Layout]:
    """Return a model's base and layout; refuse one whose layers the format's library does not know by BERT's names."""
    if run.base is None:
        raise RunError(f"{run.name} was trained without a base, so there is no adapter to export; {_INSTEAD[form]}.")
    layout = find_layout(cast(DomextConfig, run.model.config))
    if form not in layout.formats:
        raise RunError(f"the format of {form} is not written for bases of the kind {layout.family}; {_INSTEAD[form]}.")
    return run.base, layout
