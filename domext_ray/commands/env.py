"""What `domext env` does: say what a job would find here, in lines or as JSON.

The hub is sent one HEAD request, which names nothing.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from dataclasses import replace
from typing import Any

import torch

from domext_ray.config.jobs import EnvConfig
from domext_ray.config.pretrain import SettledConfig, resolve_micro_batch_sizes
from domext_ray.errors import DomextError, RunError
from domext_ray.model.fused import find_fault
from domext_ray.runs.run_directory import list_versions, resolve_root
from domext_ray.runtime.device import has_bf16, has_bf16_units, prefers_onednn
from domext_ray.runtime.machine import count_cpus, find_address, find_free_disk, find_free_memory
from domext_ray.runtime.ray_cluster import describe_nodes, list_accelerators, list_nodes, start_ray
from domext_ray.storage import Place
from domext_ray.text.data.names import SHIPPED_BASE
from domext_ray.training.engine import describe_choices

HUB_SECONDS = 3.0
"""How long the hub may take to answer."""


def run_env(config: EnvConfig) -> None:
    """Print versions, devices, choices, room, the hub, the cluster's nodes, and whether storage takes files.

    Faults come last; a hub that is not reached is none, for a job may need nothing of it.
    """
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found: dict[str, Any] = {"versions": list_versions(), "devices": {"cpus": count_cpus(), "gpus": gpus}}
    found["choices"] = _list_choices(torch.device("cuda" if gpus else "cpu"))
    found["room"] = _list_room(config.run.dir)
    found["hub"] = _try_hub()
    faults = []
    for name, ask in (("cluster", _ask_cluster), ("storage", lambda: _try_storage(config.run.dir))):
        try:
            found[name] = ask()
        except (DomextError, OSError) as error:
            faults.append(str(error))
            found[name] = {"fault": str(error)}
    if config.json:
        print(json.dumps(found, indent=2))
    else:
        for name, values in found.items():
            shown = {
                key: ", ".join(value) or "none" if isinstance(value, list) else value for key, value in values.items()
            }
            print(f"{name}: {', '.join(f'{key} {text}' for key, text in shown.items())}")
    if faults:
        raise RunError(" ".join(faults))


def _list_choices(device: torch.device) -> dict[str, str]:
    """What a run says at its start of the device that it trains on."""
    on_gpu, plain = device.type == "cuda", SettledConfig()
    has_units = has_bf16(device) if on_gpu else has_bf16_units()
    engine = replace(plain.engine, precision="bf16" if has_units else "fp32")
    scale = replace(plain.scale, use_gpu=on_gpu)
    plain = replace(plain, engine=engine, scale=scale)
    lines = describe_choices(plain, device, "off (not asked)", resolve_micro_batch_sizes(plain))
    kernels = {"products of fp32": "oneDNN" if prefers_onednn() else "torch"}
    if on_gpu:
        kernels = {"fused kernels": find_fault(device) or "they can run, with --engine.fused true"}
    return dict(line.split(": ", 1) for line in lines[:2]) | kernels


def _list_room(runs: str) -> dict[str, str]:
    """Free memory, and free disk where runs and temporary files go."""
    temporary = tempfile.gettempdir()
    free = {"memory": find_free_memory(), f"disk of {temporary}": find_free_disk(temporary)}
    if Place(runs).is_local:
        free["disk of runs"] = find_free_disk(runs)
    return {name: f"{number / 1e9:,.1f} GB free" for name, number in free.items()}


def _try_hub() -> dict[str, str]:
    """Whether the hub answers, whatever it says."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    without = f"only what is here can be used: {SHIPPED_BASE}, folders, and what was fetched before"
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
        state = "is reached"
    except OfflineModeIsEnabled:
        state = f"HF_HUB_OFFLINE keeps jobs off it; {without}"
    except Exception as error:  # the transport's: no network, no answer in time, a proxy …
        state = f"cannot be reached ({type(error).__name__}); {without}"
    return {"address": constants.ENDPOINT, "state": state}


def _ask_cluster() -> dict[str, Any]:
    if not (address := find_address()):
        return {"address": "none: a job starts a Ray of its own"}
    start_ray()
    return {"address": address, "nodes": describe_nodes(list_nodes()), "accelerators": list_accelerators()}


def _try_storage(folder: str) -> dict[str, str]:
    """Put a file into the folder of all runs, or on a disk into the folder that will have it, and delete it."""
    place = resolve_root(folder)
    while place.is_local and not place.exists():
        place = place.parent
    probe = place / f".domext-env-{uuid.uuid4().hex}"
    probe.put(b"")
    probe.delete()
    return {"place": str(place), "state": "can be written"}
