"""What a name of a model or a set means: a place on this machine, a slip of the finger, or something of the hub.

Enters: what a user wrote. Leaves: nothing, the folder of a base, or one sentence, before torch is imported. A name that
is meant as a path or that is one letter off from what is here stays on this machine; about any other the hub is asked
once.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from domext_ray.errors import BaseModelError, ConfigError
from domext_ray.files import ASSETS

SHIPPED_BASE = "general-mini"
Kind: TypeAlias = Literal["model", "dataset"]
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_SECONDS = 10.0
"""How long the hub may take to answer."""
RUNS = "runs"
"""The folder of all runs, unless --run.dir says another one."""
_SUFFIXES = (
    *(".bin", ".ckpt", ".csv", ".gz", ".h5", ".json", ".jsonl", ".model", ".onnx", ".parquet", ".pt", ".pth"),
    *(".safetensors", ".tar", ".tsv", ".txt", ".yaml", ".yml", ".zip"),
)
"""Of files: a name of the hub has dots, too, but none of these ends."""


def find_near(path: str) -> list[str]:
    """Return the paths beside one that is not there that it was probably meant to be, at most three."""
    folder, name = os.path.split(path.rstrip("/"))
    return [os.path.join(folder, near) for near in pick_near(name, _list_names(folder))]


def pick_near(name: str, known: Iterable[str]) -> list[str]:
    """Return the names that an unknown one was probably meant to be, at most three, the likeliest first."""
    known = list(known)
    slips = [other for other in known if is_slip(name, other)]
    return list(dict.fromkeys([*slips, *difflib.get_close_matches(name, known, n=3, cutoff=0.75)]))[:3]


def is_slip(name: str, known: str) -> bool:
    """Whether two names are the same but for one letter, two that changed places, or how they are written."""
    name, known = (word.casefold().replace("_", "-") for word in (name, known))
    start = len(os.path.commonprefix([name, known]))
    name, known = name[start:], known[start:]
    end = len(os.path.commonprefix([name[::-1], known[::-1]]))
    name, known = name[: len(name) - end], known[: len(known) - end]
    return max(len(name), len(known)) <= 1 or (len(name) == 2 and name == known[::-1])


def _list_names(folder: str) -> list[str]:
    try:
        return sorted(entry for entry in os.listdir(os.path.expanduser(folder) or ".") if not entry.startswith("."))
    except OSError:
        return []


def is_path(name: str) -> bool:
    """Whether a name that is not there is written as no name of the hub is, or below the folder of all runs."""
    return not HUB_ID.fullmatch(name) or name.lower().endswith(_SUFFIXES) or name.startswith(f"{RUNS}/")


def describe_near(near: Sequence[str]) -> str:
    """Return the question that ends a sentence about a name; empty if nothing is near."""
    return f"did you mean {' or '.join(near)}?" if near else ""


def check_name(option: str, name: str, kind: Kind, give: str, shipped: Sequence[str] = ()) -> None:
    """Refuse a name that is nothing on this machine and nothing of the hub's.

    `give` is what the option takes, as it follows "give" in a sentence.
    """
    error = BaseModelError if kind == "model" else ConfigError
    folder, _, leaf = name.rpartition("/")
    if is_path(name):
        hint = describe_near(find_near(name)) or f"give {give}."
        raise error(f"{option} names {name!r}, which does not exist; {hint}")
    if _is_kept(name, kind):
        return
    runs = [os.path.join(RUNS, run) for run in _list_names(RUNS)]
    known = find_near(name) if folder else [*shipped, *filter(os.path.isdir, _list_names("")), *runs]
    near = known if folder else [other for other in known if is_slip(leaf, os.path.basename(other))]
    if near or os.path.isdir(folder):
        hint = describe_near(near[:3]) or f"give {give}."
        fetch = f"hf download {name}{' --repo-type dataset' if kind == 'dataset' else ''}"
        raise error(
            f"{option} names {name!r}, which is not here; {hint} To use the hub's {name}, fetch it first: {fetch}."
        )
    if fault := _ask_hub(name, kind):
        ships = f", or {' or '.join(shipped)}, which ships with the package" if shipped else ""
        hint = describe_near(pick_near(name, known)) or f"give a folder of this machine{ships}."
        raise error(f"{option} names {name!r}, which is not on this machine, and {fault}; {hint}")


def _is_kept(name: str, kind: Kind) -> bool:
    """Whether the cache of the hub's client, or that of `datasets`, has it."""
    from huggingface_hub import constants, try_to_load_from_cache

    file = "config.json" if kind == "model" else "README.md"
    if isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
        return True
    kept = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    return kind == "dataset" and os.path.isdir(os.path.join(kept, name.replace("/", "___")))


def _ask_hub(name: str, kind: Kind) -> str:
    """Ask the hub once whether it has something; return why it cannot be had, empty: it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    hub = HfApi()
    try:
        hub.repo_info(name, repo_type=kind, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        return f"{hub.endpoint} has no such {kind} that may be read (HF_TOKEN says who asks)"
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE keeps this job off the network"
    except Exception as error:  # the client's and its transport's: no network, no answer in time, a broken server …
        return f"{hub.endpoint} cannot be reached ({type(error).__name__})"
    return ""


def find_local_base(base: str) -> Path | None:
    """Return the folder of a base that is on this machine, with a config.json; None for the hub's.

    `base` is "general-mini" (ships with the package), a folder, the directory of a run that trained all weights, or a
    hub id.
    """
    folder = ASSETS / SHIPPED_BASE if base == SHIPPED_BASE else Path(base).expanduser()
    if base == SHIPPED_BASE and not folder.is_dir():
        raise BaseModelError(
            f"--base {base!r} is missing from this installation ({folder}); install the package again."
        )
    if folder.is_dir():
        for place in (folder, folder / "export"):  # the second: of a run that trained all weights
            if (place / "config.json").is_file():
                return place
        raise BaseModelError(f"--base {base!r} has no config.json; {_describe_folder(folder, base)}.")
    if folder.exists():
        raise BaseModelError(f"--base {base!r} is a file; give the folder that holds it and its config.json.")
    if not HUB_ID.fullmatch(base):
        raise BaseModelError(f"--base {base!r} does not exist; give a checkpoint folder or a hub id.")
    return None


def _describe_folder(folder: Path, base: str) -> str:
    """Say what a folder without a config.json is, and what to give."""
    said = next((said for pattern, said in _NO_MODELS if any(folder.glob(pattern))), "")
    if said:
        return said.format(base.rstrip("/"))
    found = sorted((path for pattern in _INSIDE for path in folder.glob(pattern)), key=os.path.getmtime)
    if found:
        return f"there is one in {' and in '.join(str(path.parent) for path in found[-2:])}: give that folder"
    return "give a folder that save_pretrained wrote"


_ADAPTER = "it holds an adapter, not a model: merge it into its base, save that, and give its folder"
_NO_MODELS = (
    ("bank.json", "it is an adapter bank, whose adapters predict, embed and serve take as {}:NAME"),
    *((pattern, _ADAPTER) for pattern in ("adapter_config.json", "*/adapter_config.json")),
    ("model.onnx", "it holds an ONNX graph, which predict alone takes: give what that was made from"),
    ("config.yaml", "it is a run without an export: domext export hf makes one of a run of pre-training"),
    (
        "modules.json",
        "it is a model of sentence-transformers: give the folder of its encoder, such as {}/0_Transformer",
    ),
)
"""Files and folders that tell a place that users take for a base, and what is said of it."""
_INSIDE = ("*/config.json", "snapshots/*/config.json")
"""Where a base may be inside of a folder: one of checkpoints, or of the hub's cache."""
