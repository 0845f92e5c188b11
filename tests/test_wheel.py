"""The wheel: it holds the package as it is tracked and nothing else, and works where there is no checkout."""

from __future__ import annotations

import configparser
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import REPOSITORY
from project_file import read_project_file
from released import EXPECTED, FIXTURES, unpack

VERSION = read_project_file()["project"]["version"]
BUILT_FROM = ("domext_ray", "pyproject.toml", "README.md", "LICENSE")
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
MOST_BYTES = 12_000_000
"""Of which the base that ships has eleven million."""
RUN = """
import sys
from pathlib import Path

import domext_ray
from domext_ray.commands.main import main

assert Path(domext_ray.__file__).is_relative_to(sys.argv[1]), domext_ray.__file__
for words in sys.argv[2:]:
    print("$", words, flush=True)
    main(words.split())
"""


def list_tracked() -> list[str]:
    """Return what git tracks of all that a wheel is built from."""
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("git says which files are the project's, and this is no checkout")
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", *BUILT_FROM]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip("\0").split("\0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from a copy of what is tracked."""
    copy, wheels = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheels")
    for name in list_tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, copy / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(wheels)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    ended = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = wheels.iterdir()
    return wheel


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("unpacked")
    with ZipFile(wheel) as packed:
        packed.extractall(folder)
    return folder


def run(unpacked: Path, place: Path, *commands: str) -> str:
    """Carry out commands of the unpacked package in a process that has nothing else of this project."""
    (place / "home").mkdir(parents=True)
    (place / "work").mkdir()
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")}
    environment = {**kept, "PYTHONPATH": str(unpacked), "HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUN, str(unpacked), *commands]
    ended = subprocess.run(
        command,
        cwd=place / "work",
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_it_holds_what_is_tracked_and_nothing_else(unpacked: Path) -> None:
    """But for the pages about rooms, which are for who works on them."""
    tracked = {name for name in list_tracked() if name.startswith("domext_ray/")}
    pages = {name for name in tracked if name.endswith(".md") and not name.startswith("domext_ray/assets/")}
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    (about,) = {name.partition("/")[0] for name in found if ".dist-info/" in name}
    assert about == f"domext_ray-{VERSION}.dist-info"
    assert len(pages) == 3 and found == tracked - pages | {f"{about}/{name}" for name in METADATA}


def test_its_files_are_those_of_the_package(unpacked: Path, wheel: Path) -> None:
    for path in (unpacked / "domext_ray").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (REPOSITORY / path.relative_to(unpacked)).read_bytes(), path
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < MOST_BYTES


def test_its_program_is_there(unpacked: Path) -> None:
    (path,) = unpacked.glob("*.dist-info/entry_points.txt")
    scripts = configparser.ConfigParser()
    scripts.read(path)
    assert dict(scripts["console_scripts"]) == {"domext": "domext_ray.commands.main:main"}
    module, _, name = scripts["console_scripts"]["domext"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_it_says_what_it_can_do(unpacked: Path, tmp_path: Path) -> None:
    said = run(unpacked, tmp_path, "--help", "--version", "presets", "presets show af", "finetune --help_all")
    assert "pretrain exbert" in said and "af_base" in said and "--grid.lr" in said
    assert f"$ --version\n{VERSION}\n" in said
    assert not list((tmp_path / "work").iterdir()), "help writes nothing"


@pytest.mark.slow
def test_it_plans_a_run_and_exports_one(unpacked: Path, tmp_path: Path) -> None:
    """With the base that ships, its sentences and its presets; an export gets the code that it needs."""
    version = max(path.parent.name for path in FIXTURES.glob(f"*/{EXPECTED}"))
    unpack(version, tmp_path / "old")
    export = tmp_path / "export"
    commands = ["pretrain af --dry_run true", f"export hf --run {tmp_path / 'old/runs/af'} --output {export}"]
    said = run(unpacked, tmp_path, *commands)
    assert "general-mini" in said and str(export) in said
    assert not list((tmp_path / "work").iterdir()), "a dry run writes nothing"
    ours = {path.name: path.read_bytes() for path in (REPOSITORY / "domext_ray/model/domext").glob("*_domext.py")}
    assert len(ours) == 6 and all((export / name).read_bytes() == code for name, code in ours.items())
