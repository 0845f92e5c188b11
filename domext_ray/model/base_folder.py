"""Where a base is on this machine, found without loading torch."""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.options.declare import check_place
from domext_ray.errors import BaseModelError
from domext_ray.files import ASSETS
from domext_ray.text.data.names import HUB_ID

SHIPPED_BASE = "general-mini"


def find_local_base(base: str) -> Path | None:
    """Return the folder of a base that is on this machine, with a config.json; None for the hub's.

    `base` is "general-mini" (ships with the package), a folder, the directory of a run that trained all weights, or a
    hub id.
    """
    try:
        check_place(base)
    except ValueError as error:
        raise BaseModelError(f"--base is {base!r}; it must be {error}, or a hub id.") from None
    folder = ASSETS / SHIPPED_BASE if base == SHIPPED_BASE else Path(base).expanduser()
    if base == SHIPPED_BASE and not folder.is_dir():
        raise BaseModelError(
            f"--base {base!r} is missing from this installation ({folder}); install the package again."
        )
    if folder.is_dir():
        for place in (folder, folder / "export"):  # the second: of a run that trained all weights
            if (place / "config.json").is_file():
                return place
        raise BaseModelError(f"--base {base!r} has no config.json; give a folder that save_pretrained wrote.")
    if folder.exists():
        raise BaseModelError(f"--base {base!r} is a file; give the folder that holds it and its config.json.")
    if not HUB_ID.fullmatch(base):
        raise BaseModelError(f"--base {base!r} does not exist; give a checkpoint folder or a hub id.")
    return None
