"""Domain adaptation of BERT models: a frozen base, small extensions, Ray Train and DeepSpeed.

Importing the package costs nothing: each of its names is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domext_ray.api import FinetunedRun, Run, compare, embed, finetune, load, predict, prepare, pretrain, sweep
    from domext_ray.errors import DomextError
    from domext_ray.models.bank import AdapterBank

    __version__: str

__all__ = [
    "AdapterBank",
    "DomextError",
    "FinetunedRun",
    "Run",
    "__version__",
    "compare",
    "embed",
    "finetune",
    "load",
    "predict",
    "prepare",
    "pretrain",
    "sweep",
]

_HOMES = {"AdapterBank": "models.bank", "DomextError": "errors"}
"""Modules of the names that are not in `api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module, metadata

    if name == "__version__":
        try:
            value: Any = metadata.version(__name__)
        except metadata.PackageNotFoundError:  # it runs from its source
            value = "unknown"
    else:
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
