"""What a job asks of a machine or a cluster before anything is prepared: GPUs, and units for bf16."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from given_options import parse_config
from raylets import make_environment

from domext_ray.config.finetune import FinetuneConfig, TrainingScaleConfig
from domext_ray.config.options.build import dump_yaml, from_dict
from domext_ray.config.pretrain import EngineConfig, PretrainConfig, RunConfig, ScaleConfig
from domext_ray.config.sweep import SweepConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.finetuning.finetune import run_finetuning
from domext_ray.pretraining.pipeline import run_pretraining
from domext_ray.pretraining.plan import resolve
from domext_ray.runs.run_directory import write_config
from domext_ray.runtime import device, ray_private
from domext_ray.runtime import ray_cluster as cluster
from domext_ray.runtime.machine import count_cpus
from domext_ray.runtime.ray_cluster import (
    Node,
    describe_nodes,
    find_shortage,
    resolve_gpu,
    resolve_precision,
    run_on_each_node,
    share_cpus,
    start_ray,
)
from domext_ray.storage import Place
from domext_ray.studies.sweep.plan import resolve_trials
from domext_ray.studies.sweep.sweep import run_sweep

ONE, TWO, EIGHT, HEAD = Node(1.0, 0.0), Node(2.0, 0.0), Node(8.0, 1.0), Node(0.0, 0.0)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_use_gpu_has_three_values() -> None:
    for config_class, value in itertools.product((PretrainConfig, FinetuneConfig), ("auto", True, False)):
        stored = from_dict(config_class, {"scale": {"use_gpu": value}})
        flag: Any = parse_config(config_class, "", ["--scale.use_gpu", str(value).lower()])
        assert stored == flag and flag.scale.use_gpu == value
        assert f"use_gpu: {str(value).lower()}\n" in dump_yaml(flag)


@needs_no_gpu
def test_without_a_gpu_auto_is_the_cpu_and_true_is_refused(monkeypatch: pytest.MonkeyPatch, local_ray: None) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for config in (PretrainConfig(), FinetuneConfig()):
        assert resolve_gpu(config).scale.uses_gpu is False
        asked: Any = replace(config, scale=replace(config.scale, use_gpu=True))
        with pytest.raises(ConfigError, match=r"--scale.use_gpu true needs 2 GPUs and this machine has 0; leave"):
            resolve_gpu(asked, 2, "--scale.num_workers")


@needs_no_gpu
def test_a_missing_gpu_is_told_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    missing, space = str(tmp_path / "missing"), {"method.heads": {"choice": [0, 1]}}
    for dry_run in (True, False):
        common = {"base": missing, "corpus": missing, "scale": ScaleConfig(use_gpu=True), "dry_run": dry_run}
        tuning = FinetuneConfig(data=missing, scale=TrainingScaleConfig(use_gpu=True), dry_run=dry_run)
        sweep = SweepConfig(tasks=("ner",), data=missing, space=space, **common)  # type: ignore[arg-type]
        mistakes: list[tuple[Callable[[Any], object], Any]] = [
            (run_pretraining, PretrainConfig(**common)),  # type: ignore[arg-type]
            (run_finetuning, tuning),
            (run_sweep, sweep),
        ]
        for start, config in mistakes:
            with pytest.raises(ConfigError, match="--scale.use_gpu true needs 1 GPU and this machine has 0; leave"):
                start(config)


@pytest.fixture
def without_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without units for bf16."""
    (tmp_path / "cpuinfo").write_text("flags : avx2 fma", encoding="utf-8")
    monkeypatch.setattr(device, "CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_the_machine_decides_the_precision(without_bf16: None) -> None:
    rooms = {"use_gpu": "scale", "precision": "engine", "base_dtype": "engine"}
    for options, expected in (
        ({"use_gpu": "false"}, "fp32"),
        ({"use_gpu": "true"}, "bf16"),
        ({"use_gpu": "auto"}, "auto"),  # so far
        ({"use_gpu": "false", "base_dtype": "bf16"}, "bf16"),
        ({"use_gpu": "false", "precision": "bf16"}, "bf16"),
        ({"use_gpu": "true", "precision": "fp32"}, "fp32"),
    ):
        flags = [argument for name, value in options.items() for argument in (f"--{rooms[name]}.{name}", value)]
        for config_class in (PretrainConfig, FinetuneConfig):
            assert resolve_precision(parse_config(config_class, "", flags)).engine.precision == expected, options
    for unit in device.BF16_UNITS:
        device.CPU_FACTS.write_text(f"flags : avx2 {unit} fma", encoding="utf-8")
        assert resolve_precision(PretrainConfig(scale=ScaleConfig(use_gpu=False))).engine.precision == "bf16"


def test_a_clusters_precision_waits_for_its_nodes(without_bf16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    config = PretrainConfig(scale=ScaleConfig(use_gpu=False))
    assert resolve_precision(config) == config


def test_a_plan_settles_the_precision_once(without_bf16: None, tmp_path: Path) -> None:
    config = PretrainConfig(run=RunConfig(dir=str(tmp_path), name="run"), scale=ScaleConfig(use_gpu=False))
    assert resolve(config).config.engine.precision == "fp32"
    (tmp_path / "run").mkdir()
    write_config(Place(tmp_path / "run"), replace(config, engine=EngineConfig(precision="bf16")))  # begun elsewhere
    assert resolve(config).config.engine.precision == "bf16"


def test_a_sweep_settles_both_of_its_trainings(without_bf16: None) -> None:
    config = SweepConfig(space={"method.heads": {"choice": [0, 1]}}, scale=ScaleConfig(use_gpu=False))
    settled = resolve_trials(config)
    assert settled.engine.precision == settled.finetune.engine.precision == "fp32"


def test_nodes_are_asked(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, answer),) = run_on_each_node(os.path.basename, "some/file")
    assert answer == "file" and not run_on_each_node(os.path.basename, "some/file", own=False)
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.1)
    with pytest.raises(RunError, match=rf"no answer within 0\.1 s from {re.escape(name)}; .*ray status"):
        run_on_each_node(lambda seconds: time.sleep(seconds), 2.0)


@needs_gpu
def test_with_a_gpu_auto_uses_it_where_there_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    num_gpus = torch.cuda.device_count()
    assert resolve_gpu(PretrainConfig(), num_gpus).scale.uses_gpu
    assert not resolve_gpu(PretrainConfig(), num_gpus + 1, "--scale.num_workers").scale.uses_gpu
    assert "lower --scale.num_workers to use it" in capsys.readouterr().out


HELD = """
import asyncio, json, os
from dataclasses import replace
import ray
from ray._raylet import GcsClient
from ray.dashboard.modules.job.common import JobInfo, JobInfoStorageClient, JobStatus
from ray.job_config import JobConfig
from domext_ray.config.finetune import FinetuneConfig, GridConfig, TrainingScaleConfig
from domext_ray.config.inference import PredictConfig
from domext_ray.config.pretrain import PretrainConfig, ScaleConfig
from domext_ray.config.sweep import SweepConfig
from domext_ray.finetuning import finetune
from domext_ray.errors import ConfigError
from domext_ray.inference import parts
from domext_ray.runtime import ray_cluster
from domext_ray.studies.sweep import resources
from domext_ray.training import elastic

job = JobConfig(metadata={"job_submission_id": "raysubmit_1"})
ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, job_config=job, log_to_driver=False)
context = ray.get_runtime_context()
os.environ["RAY_ADDRESS"] = context.gcs_address
known = JobInfoStorageClient(GcsClient(address=context.gcs_address))
tuning = FinetuneConfig(grid=GridConfig(lr=(1e-4, 1e-5), restarts=2))
sweep = SweepConfig(space={"method.heads": {"choice": [0, 1]}})
jobs = {"pretrain": PretrainConfig(), "finetune": tuning, "sweep": sweep}
jobs["predict"] = PredictConfig(input="notes", output="out")

def tell(name, call):
    try:
        said = call()
    except ConfigError as error:
        said = str(error)
    print(json.dumps([held, name, said]), flush=True)

for held in (2, 1):
    info = JobInfo(JobStatus.RUNNING, "domext", entrypoint_num_gpus=held, driver_node_id=context.get_node_id())
    asyncio.run(known.put_info("raysubmit_1", info))
    ray_cluster._read_own_hold.cache_clear()
    for name, config in jobs.items():
        for use_gpu in ("auto", True):
            asked = replace(config, scale=replace(config.scale, use_gpu=use_gpu, wait="1s"))
            tell(name, lambda: ray_cluster.resolve_gpu(asked).scale.use_gpu)
    two = PretrainConfig(scale=ScaleConfig(num_workers=2, wait="1s"))
    tell("two workers", lambda: ray_cluster.resolve_gpu(two, 2, "--scale.num_workers").scale.use_gpu)
    for cpus, gpus in ((0.0, 1.0), (0.5, 1.0), (0.5, 0.5)):
        scale = TrainingScaleConfig(use_gpu=True, cpus=cpus, gpus=gpus)
        tell("trainings", lambda: finetune.plan_resources(replace(tuning, scale=scale)))
    tell("blocks", lambda: parts._plan_workers(replace(jobs["predict"].scale, use_gpu=True), 8))
    tell("workers", lambda: elastic.fit_workers(ScaleConfig(num_workers="1-4", use_gpu=True), elastic.list_nodes())[0])
    tell("trials", lambda: resources.plan_resources(replace(sweep, scale=ScaleConfig(use_gpu=True)))[1])
"""
"""What a job plans that was submitted with `--entrypoint-num-gpus` to a Ray of two GPUs, which it holds both or one."""


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_gpus_that_the_command_holds_are_nobodys(tmp_path: Path) -> None:
    """A job that needs one is refused, without waiting where none is left; what is planned all the same waits."""
    token = tmp_path / "token"
    token.write_text("0" * 32, encoding="utf-8")
    command, environment = [sys.executable, "-c", HELD], make_environment(token)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[tuple[int, str], list[Any]] = {}
    for held, name, said in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")):
        found.setdefault((held, name), []).append(said)
    hold = "while this job's own command holds {} GPU (--entrypoint-num-gpus): submit it without"
    left, ways = f"the cluster has 0 left, {hold.format(2)}", "add nodes, or give --scale.use_gpu false."
    for name in ("pretrain", "finetune", "sweep", "predict"):
        refused = [f"--scale.use_gpu {value} needs 1 GPU and {left}; {ways}" for value in ("auto", "true")]
        assert (found[2, name], found[1, name]) == (refused, [True, True]), name
    two, lower = "--scale.use_gpu auto needs 2 GPUs and", "lower --scale.num_workers, "
    assert found[2, "two workers"] == [f"{two} {left}; {lower}{ways}"]
    waited = f"the cluster has 1 left, {hold.format(1)}; {lower}{ways}"
    assert found[1, "two workers"] == [f"{two} {waited}"]
    assert found[2, "trainings"] == [[4.0, 1.0, 1], [0.5, 1.0, 1], [0.5, 0.5, 1]]
    assert found[1, "trainings"] == [[4.0, 1.0, 1], [0.5, 1.0, 1], [0.5, 0.5, 2]]
    assert found[2, "blocks"] == found[1, "blocks"] == [[1, 1.0]]
    assert (found[2, "workers"], found[1, "workers"], found[1, "trials"]) == ([0], [1], [1])
    (trials,) = found[2, "trials"]
    assert f"there is room for 0, {hold.format(2)}" in trials


def test_workers_leave_a_node_room_for_reading() -> None:
    for nodes, number, share in (
        ([ONE], 1, 0.5),
        ([TWO], 1, 1.0),
        ([TWO], 2, 0.75),
        ([TWO], 8, 0.18),
        ([ONE] * 4, 4, 0.5),  # by sums over the cluster 0.87, which leaves no node room for a reading task
        ([ONE] * 4, 8, 0.25),
        ([HEAD, ONE, ONE], 2, 0.5),
        ([HEAD], 1, 0.0),
    ):
        assert share_cpus(nodes, number, most=1.0, with_gpu=False, read_cpus=0.25) == share, (nodes, number)
        assert bool(find_shortage(nodes, number, share or 0.25, with_gpu=False, read_cpus=0.25)) == (share == 0.0)


def test_a_share_that_would_wait_for_ever_is_found() -> None:
    for nodes, number, share, with_gpu, says in (
        ([ONE] * 4, 4, 0.87, False, "they may leave no node the 0.25 CPUs"),
        ([ONE] * 4, 5, 1.0, False, "there is room for 4"),
        ([TWO], 4, 1.0, False, "there is room for 2"),
        ([EIGHT, EIGHT, HEAD], 3, 1.0, True, "there is room for 2"),
        ([EIGHT, EIGHT, HEAD], 2, 4.0, True, ""),
        ([EIGHT, ONE], 8, 1.0, False, ""),  # whichever way Ray places them, a whole CPU is left
        ([EIGHT, ONE], 9, 1.0, False, "they may leave no node"),
        ([ONE] * 4, 3, 0.87, False, ""),
    ):
        shortage = find_shortage(nodes, number, share, with_gpu=with_gpu, read_cpus=0.25)
        assert shortage.startswith(says) and bool(shortage) == bool(says), (nodes, number, share)


def test_nodes_are_described() -> None:
    assert describe_nodes([ONE] * 4) == "4 nodes of 1 CPU"
    for nodes in ([EIGHT, HEAD, EIGHT], [HEAD, EIGHT, EIGHT]):
        assert describe_nodes(nodes) == "2 nodes of 8 CPUs and 1 GPU and 1 node of 0 CPUs"


def test_cpus_are_those_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert count_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= count_cpus() <= len(allowed)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job that has not connected yet: the session's own Ray is not looked at."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("without_ray")
def test_an_address_without_a_cluster_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections and says nothing
        for address, says in (
            ("127.0.0.1:1", r"nothing answers there \(Connection refused\); start that cluster, correct"),
            ("no-such-host.invalid:6379", "nothing answers there"),
            ("127.0.0.1:99999", "nothing answers there"),
            ("127.0.0.1", "it must be HOST:PORT"),
            ("ray://127.0.0.1:10001", "it must be HOST:PORT of a cluster's head"),
            ("http://127.0.0.1:8265", "it must be HOST:PORT .* ray job submit"),
            (f"127.0.0.1:{server.getsockname()[1]}", "what answers there is no Ray cluster"),
        ):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(ConfigError, match=f"RAY_ADDRESS is '{address}'.*{says}"):
                start_ray()


@pytest.mark.usefixtures("local_ray")
def test_a_wrong_token_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.ray.get_runtime_context().gcs_address)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    for header in ({}, {"authorization": "Bearer wrong"}):
        monkeypatch.setattr(ray_private, "make_token_header", lambda header=header: header)
        with pytest.raises(ConfigError, match="refuses the token, or misses it; .* RAY_AUTH_MODE=token"):
            start_ray()
