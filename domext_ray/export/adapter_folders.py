"""A trained adapter becomes a folder of its own, in the format of AdapterHub's library or of peft.

Enters: a model with a base's weights and one adapter of bottlenecks, or with LoRA. Leaves: a folder with safetensors,
JSON and a README.md that says how to load it. What such a format has no place for is refused. AdapterHub's holds
bottlenecks alone: the shifts of LayerNorms that train with them (Houlsby et al. section 2.1) go into a copy of the base
beside it. LoRA's updates are stored as they are, not merged.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from domext_ray.config.extensions.table import build_lora_config, find_others
from domext_ray.errors import RunError
from domext_ray.export.card import describe_scale, name_base, read_terms, render_card
from domext_ray.export.folder import ADAPTERHUB, PEFT, ExportRecord, new_export
from domext_ray.export.model_folder import save_model, save_tokenizer
from domext_ray.model.base import Base
from domext_ray.model.build import detach
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import Layout, find_layout
from domext_ray.storage import Place, write_json
from domext_ray.training.start import RebuiltRun

ADAPTERS_VERSION = "1.3.0"
"""Version of AdapterHub's library whose format is written; without one it takes "gelu" for the tanh approximation."""

_INSTEAD = {
    ADAPTERHUB: "take the ordinary export, which holds everything",
    PEFT: "take the ordinary export, in which LoRA is merged",
}


def export_adapterhub(run: RebuiltRun, adapter: str, folder: Place, scale: float = 1.0) -> None:
    """Write an adapter's bottlenecks in AdapterHub's format, at a scale; `run` has its model in fp32.

    The folder holds adapter/ and README.md, and base/ where the model's encoder or head is not the base's own: the base
    with the adapter's shifts added to its LayerNorms.

    Source: Houlsby et al. section 2.1, `LN(A(sublayer(x)) + x)` with a skip connection in A.
    """
    (base, layout), config = _open_run(run, ADAPTERHUB), cast(DomextConfig, run.model.config)
    if adapter not in config.adapters:
        raise RunError(
            f"the model has no adapter {adapter!r} to export; it has {', '.join(config.adapters) or 'none'}."
        )
    sizes = config.adapters[adapter]
    if not sizes.bottleneck_size:
        raise RunError(f"the adapter {adapter!r} has no bottlenecks, so AdapterHub's format has no place for it.")
    others = [*find_others("adapterhub", config, [name for name, _ in run.model.named_parameters()], adapter)]
    if sizes.bottleneck_layer_norm:  # that library's LayerNorm has another epsilon than the base's
        others.append(f"a LayerNorm inside the bottlenecks of the adapter {adapter!r}")
    active = config.adapters if config.active_adapters is None else config.active_adapters
    others += [f"the active adapter {other!r} besides {adapter!r}" for other in active if other != adapter]
    _refuse(others, run, ADAPTERHUB)
    plain, tensors = copy.deepcopy(run.model), {}
    places = [f"{i}.{part}" for i in range(config.num_hidden_layers) for part in ("attention.output", "output")]
    for place in places:
        sublayer = cast(Any, plain.bert.encoder.layer.get_submodule(place))
        if adapter not in (adapters := sublayer.adapters):
            continue
        for own, theirs in (("down", "adapter_down.0"), ("up", "adapter_up")):
            for kind, tensor in getattr(adapters[adapter], own).named_parameters():
                name = f"{layout.prefix}encoder.layer.{place}.adapters.{adapter}.{theirs}.{kind}"
                tensors[name] = tensor.detach().float()
        if (shift := adapters[adapter].norm) is not None:  # the forward pass adds them, too
            for kind, values in sublayer.LayerNorm.named_parameters():
                values.data.add_(getattr(shift, kind), alpha=scale)
    for known in config.adapters:
        plain.bert.detach_adapter(known)
    with new_export(folder, ExportRecord.of(ADAPTERHUB, run), base.folder) as temporary:
        (temporary / "adapter").mkdir()
        described = _describe_adapter(config, layout, adapter, name_base(base.id), scale)
        write_json(Place(temporary / "adapter" / "adapter_config.json"), described, sort_keys=True)
        save_file(tensors, temporary / "adapter" / "adapter.safetensors")
        if has_base := bool(_find_changed(plain, base)):
            save_tokenizer(run.tokenizer, temporary / "base", config.vocab_size)
            save_model(plain, temporary / "base")
        number = "Two adapters" if sizes.bottleneck_place == "both" else "An adapter"
        what = f"{number} of width {sizes.bottleneck_size} a layer (Houlsby et al. 2019), in the format of AdapterHub's"
        title = f"Bottleneck adapter {adapter}"
        _write_card(
            temporary, base, title, "adapters", f"adapters=={ADAPTERS_VERSION}", f"{what} library", has_base, scale
        )


def export_peft(run: RebuiltRun, folder: Place, scale: float = 1.0) -> None:
    """Write a model's LoRA in peft's format, at a scale; `run` has its model in fp32, LoRA not merged."""
    from peft import get_peft_model_state_dict

    (base, layout), method = _open_run(run, PEFT), run.config.method
    if not method.lora_rank:
        raise RunError("the model has no LoRA that peft's format could hold; train one (--method.lora_rank).")
    others = ["extensions beside LoRA"] if cast(DomextConfig, run.model.config).has_extension else []
    if changed := _find_changed(run.model, base):
        others.append(f"tensors besides LoRA that are not the base's own, such as {changed[0]}")
    _refuse(others, run, PEFT)
    found = get_peft_model_state_dict(run.model, save_embedding_layers=False)
    tensors = {f"base_model.model.{layout.name_plain(name)}": tensor.contiguous() for name, tensor in found.items()}
    config = build_lora_config(method)
    if scale != 1:
        config.lora_alpha *= scale
    config.base_model_name_or_path, config.inference_mode = name_base(base.id), True
    kind = layout.config_class.model_type
    loads_into = {
        "base_model_class": f"{layout.family}ForMaskedLM",
        "parent_library": f"transformers.models.{kind}.modeling_{kind}",
    }
    with new_export(folder, ExportRecord.of(PEFT, run), base.folder) as temporary:
        config.save_pretrained(temporary, auto_mapping_dict=loads_into)
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_card(
            temporary, base, f"LoRA of rank {method.lora_rank}", "peft", "peft", "In peft's format", False, scale
        )


def _write_card(
    folder: Path, base: Base, title: str, library: str, package: str, what: str, has_base: bool, scale: float
) -> None:
    name = name_base(base.id)
    card = render_card(
        f"{title} on {name}",
        base.id,
        read_terms(base.folder),
        {"library_name": library},
        relation="adapter",
        library=library,
        package=package,
        what=f"{what}, at the scale {said}" if (said := describe_scale(scale)) else what,
        has_base=has_base,
        name=name,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _open_run(run: RebuiltRun, form: str) -> tuple[Base, Layout]:
    """Return a model's base and layout; refuse one whose layers the format's library does not know by BERT's names."""
    if run.spec.base is None:
        raise RunError(f"{run.name} was trained without a base, so there is no adapter to export; {_INSTEAD[form]}.")
    layout = find_layout(cast(DomextConfig, run.model.config))
    if form not in layout.formats:
        raise RunError(f"the format of {form} is not written for bases of the kind {layout.family}; {_INSTEAD[form]}.")
    return run.spec.base, layout


def _refuse(others: list[str], run: RebuiltRun, form: str) -> None:
    if cast(DomextConfig, run.model.config).causal:
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


def _describe_adapter(
    config: DomextConfig, layout: Layout, adapter: str, base_name: str, scale: float
) -> dict[str, Any]:
    """Return adapter_config.json of AdapterHub's library: its DoubleSeqBnConfig, every choice spelt out."""
    sizes = config.adapters[adapter]
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
            "scaling": scale,
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
        "name": adapter,
        "version": f"adapters.{ADAPTERS_VERSION}",
    }


def find_reduction_factor(hidden_size: int, bottleneck_size: int) -> int | float:
    """Return the factor from which AdapterHub's library computes a width: `int(hidden_size // factor)`.

    The quotient itself will not do: 32 // (32 / 5) is 4 in floating point. For a width of m, aiming between m and m + 1
    is safe.
    """
    whole, rest = divmod(hidden_size, bottleneck_size)
    return hidden_size / (bottleneck_size + 0.5) if rest else whole
