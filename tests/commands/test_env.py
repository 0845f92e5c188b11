"""What `domext env` says of this machine, a cluster and a storage."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY
from job_calls import call_job
from model_hub import ModelHub
from object_store import BUCKET

from domext_ray.commands.env import _list_choices, _try_hub

ONLY_HERE = "only what is here can be used: general-mini"


def test_it_says_what_a_job_finds_here(tmp_path: Path) -> None:
    ended = call_job("env", "--run.dir", str(tmp_path / "runs"), "--json")
    found = json.loads(ended.out)
    assert ended.code == 0 and [*found] == ["versions", "devices", "choices", "room", "hub", "cluster", "storage"]
    assert found["versions"]["torch"] == version("torch") and found["devices"]["cpus"] > 0
    assert {*found["room"]} == {"memory", "disk of runs", f"disk of {tempfile.gettempdir()}"}
    assert all(re.fullmatch(r"[\d,]+\.\d GB free", room) for room in found["room"].values())
    assert found["hub"]["state"].startswith(f"HF_HUB_OFFLINE keeps jobs off it; {ONLY_HERE}")
    assert found["choices"].keys() >= {"attention", "precision"}
    assert found["storage"] == {"place": str(tmp_path), "state": "can be written"} and list(tmp_path.iterdir()) == []
    lines = call_job("env", "--run.dir", str(tmp_path)).out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(found)


def test_of_a_card_it_says_whether_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    says = "they need compute capability 8.0; this GPU has 7.5"
    assert _list_choices(torch.device("cuda"))["fused kernels"] == says


def test_the_hub_is_asked_once_and_told_nothing(model_hub: ModelHub) -> None:
    assert _try_hub() == {"address": model_hub.address, "state": "is reached"}
    assert model_hub.asked == ["HEAD /"]
    model_hub.close()
    assert _try_hub()["state"].startswith(f"cannot be reached (ConnectError); {ONLY_HERE}")


def test_a_bucket_is_written_to(objects: str) -> None:
    ended = call_job("env", "--run.dir", f"{BUCKET}/env")
    assert ended.code == 0 and f"storage: place {BUCKET}/env, state can be written" in ended.out


def test_what_cannot_be_used_is_told_with_all_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, REPOSITORY / "jobs" / "env.py", "--run.dir", tmp_path / "file" / "runs", "--json"]
    far = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}  # in a process of its own, which has no Ray yet
    ended = subprocess.run(command, capture_output=True, text=True, env=far)
    found = json.loads(ended.stdout)
    assert ended.returncode == 2 and "nothing answers there" in ended.stderr
    assert ended.stderr.endswith("is no folder; give a folder.\n") and ended.stderr.count("\n") == 1
    assert "nothing answers there" in found["cluster"]["fault"] and "versions" in found
