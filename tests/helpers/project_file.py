"""pyproject.toml, on every Python that the project allows."""

from __future__ import annotations

import tomllib
from typing import Any

from conftest import REPOSITORY


def read_project_file() -> dict[str, Any]:
    """Return what pyproject.toml says."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
