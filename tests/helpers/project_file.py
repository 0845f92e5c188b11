"""pyproject.toml, on every Python that the project allows."""

from __future__ import annotations

import sys
from typing import Any

from conftest import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_project_file() -> dict[str, Any]:
    """Return what pyproject.toml says."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
