"""What is used of Ray and is not promised by it: all is there, and a Ray without it ends a job in one sentence."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import ray

from domext_ray.errors import RunError
from domext_ray.runtime import ray_private
from domext_ray.runtime.ray_private import REACHES, reach

PRIVATE = ("ray._private", "ray._raylet", "ray._common", "ray.serve._private", "ray.train._internal", "internal_kv")
REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_ray_without_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in REACHES:
        reach(place)
        module, _, name = place.partition(":")
        says = rf"^Ray {ray.__version__} has no {module}\.{name}, .* install Ray 2\.60, .*\.$"
        with monkeypatch.context() as patched:
            patched.delattr(importlib.import_module(module), name.partition(".")[0])
            with pytest.raises(RunError, match=says):
                reach(place)
    monkeypatch.setitem(ray_private.REACHES, "ray.gone:thing", "a test")
    with pytest.raises(RunError, match=r"has no ray\.gone\.thing, which is used for a test"):
        reach("ray.gone:thing")


def test_the_version_is_the_one_that_is_installed_by_default() -> None:
    assert ray.__version__.startswith(f"{ray_private.TESTED}.")
    assert f">={ray_private.TESTED}," in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def test_nothing_else_reaches_into_ray() -> None:
    for path in [*REPOSITORY.glob("domext_ray/**/*.py"), *REPOSITORY.glob("jobs/**/*.py")]:
        if path.name != "ray_private.py":
            source = path.read_text(encoding="utf-8")
            assert not [name for name in PRIVATE if name in source], path
