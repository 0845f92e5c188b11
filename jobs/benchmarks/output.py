"""What a benchmark writes, and what its figures depend on."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from domext_ray.files import write_text
from domext_ray.runtime.ray_cluster import count_cpus


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"torch": torch.__version__, "device": name, "threads": torch.get_num_threads(), "cpus": count_cpus()}
