"""Names of runs are folder names, places are on a file system, and a file system without locks is said to be one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from given_options import parse_config

from domext_ray.api import Run
from domext_ray.config.finetune import AblateConfig, FinetuneConfig
from domext_ray.config.jobs import BankConfig, CompareConfig, ExportConfig, ForgettingConfig, StudyConfig, VerifyConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.config.serve import ServeConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.runs.run_directory import lock_run
from domext_ray.storage import Place

NAMES = (".", "..", ".corpora", "-x", "a/b", " a", "a ", "two\nlines", "tab\there", "nul\0", "a" * 201, "é" * 101)
PLACES: list[tuple[type[Any], str, list[str]]] = [
    *((PretrainConfig, f"--{name}", []) for name in ("init_from", "base")),
    *((PretrainConfig, f"--{name}", []) for name in ("vocab.words", "vocab.protected", "train.general_probe")),
    *((FinetuneConfig, f"--{name}", []) for name in ("run.dir", "data", "model")),
    (AblateConfig, "--output", ["--study", "size"]),
    (AblateConfig, "--finetuned", ["--study", "spans"]),
    (StudyConfig, "--run.dir", ["--seconds", "9"]),
    (CompareConfig, "--runs", []),
    (CompareConfig, "--output", ["--runs", "runs/af"]),
    (ForgettingConfig, "--output", ["--models", "a", "--corpus", "b"]),
    (ForgettingConfig, "--models", ["--corpus", "b"]),
]
IN_BUCKETS: list[tuple[type[Any], str, list[str]]] = [
    *((PretrainConfig, f"--{name}", []) for name in ("run.dir", "prepare.cache_dir")),
    (ExportConfig, "--run", []),
    (ExportConfig, "--output", ["--run", "runs/af"]),
    (BankConfig, "--bank", []),
    (BankConfig, "--add", ["--bank", "bank", "--name", "x"]),
    (ServeConfig, "--bank", []),
    (VerifyConfig, "--path", []),
]
WRONG_ADDRESSES = {
    **dict.fromkeys(("s3://bucket", "s3://bucket/"), "s3://bucket/FOLDER, for a job takes a folder of a bucket"),
    **dict.fromkeys(("s3:/bucket/runs", "S3://bucket/a", "s3a://bucket/a", "gcs://bucket/a"), "in small letters"),
    "hdfs://name/runs": r"all nodes have \(mount the storage.*\), or s3://BUCKET/FOLDER",
    **dict.fromkeys(("gs:///runs", "s3://BUCKET/runs", "s3://Bucket/a"), "the name of a bucket:"),
    "s3://k:s@bucket/a": "an address without a password",
    **dict.fromkeys(("s3://bucket//a", "s3://bucket/a//b", "s3://bucket/a//"), "one slash between two names"),
    **dict.fromkeys(("s3://bucket/a/../b", "s3://bucket/.", "s3://bucket/./a"), r"has no \. or \.\. between"),
    "s3://bucket/a\tb": "without tabs and other control characters|without control characters",
    f"s3://bucket/{'n' * 801}": "at most 800 bytes behind the bucket",
}
"""Addresses that are none, and what a job says of each."""


def test_a_name_is_a_folders() -> None:
    for name in NAMES:
        for config_class, option in (
            (PretrainConfig, "run.name"),
            (PretrainConfig, "method.name"),
            (FinetuneConfig, "run.name"),
        ):
            with pytest.raises(ConfigError, match=f"--{option} is .*; it must be"):
                parse_config(config_class, "", [f"--{option}={name}"])
    for name in ("clinic-a", "clinic.2", "größe", "临床", "a b", "_a", "a" * 200):
        assert parse_config(PretrainConfig, "", ["--run.name", name]).run.name == name


def test_a_place_is_on_a_file_system() -> None:
    for config_class, option, flags in PLACES:
        for place in ("s3://bucket/x", "gs:/x", "file:///x", "~nobody-of-this-name/x", f"a/{'b' * 256}", "a/" * 3000):
            with pytest.raises(ConfigError, match=f"^{option} is '.*; it must be"):
                parse_config(config_class, "", [*flags, option, place])


def test_a_place_that_is_no_address_is_taken_as_it_is() -> None:
    with pytest.raises(ConfigError, match="as a plain path, such as /data/runs"):
        parse_config(PretrainConfig, "", ["--run.dir", "file:///data/runs"])
    assert parse_config(PretrainConfig, "", ["--run.dir", "C:runs/x:/y z"]).run.dir == "C:runs/x:/y z"


def test_a_place_may_be_in_a_bucket() -> None:
    for config_class, option, flags in IN_BUCKETS:
        parse_config(config_class, "", [*flags, option, "s3://bucket/runs"])
        parse_config(config_class, "", [*flags, option, "s3://bucket/runs/"])
        for wrong, says in WRONG_ADDRESSES.items():
            with pytest.raises(ConfigError, match=rf"{option} is .*; it must be .*{says}"):
                parse_config(config_class, "", [*flags, option, wrong])


def test_a_slash_at_the_end_of_an_address_is_none_of_its_key() -> None:
    assert parse_config(PretrainConfig, "", ["--run.dir", "s3://bucket/a b/"]).run.dir == "s3://bucket/a b"
    assert parse_config(PretrainConfig, "", ["--run.dir", "runs/"]).run.dir == "runs/"
    assert Place("s3://bucket/a b/") == Place("s3://bucket/a b") and str(Place("s3://bucket/")) == "s3://bucket/"


def test_a_place_in_python_keeps_to_the_same_rules() -> None:
    for wrong in WRONG_ADDRESSES:
        if wrong not in ("s3://bucket", "s3://bucket/", "hdfs://name/runs", f"s3://bucket/{'n' * 801}"):
            with pytest.raises(ConfigError, match=r"is no place in a bucket; it must be "):
                Run(wrong)  # type: ignore[arg-type]


def test_a_run_is_held_where_files_have_no_second_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, "as a file system without hard links answers")

    monkeypatch.setattr(os, "link", fail)
    with lock_run(Place(tmp_path)), pytest.raises(RunError, match="another job is working"), lock_run(Place(tmp_path)):
        pass
