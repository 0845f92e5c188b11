"""A job waits for the GPUs of a cluster that grows, asks its autoscaler for them, and refuses when they do not come."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_corpus
from labelled_fixtures import write_ner
from pretrain_jobs import write_command
from raylets import Cluster, run_raylets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DECIDE = """
import sys, time
from domext_ray.config.pretrain import PretrainConfig, ScaleConfig
from domext_ray.errors import ConfigError
from domext_ray.runtime import ray_cluster
ray_cluster.SAY_SECONDS = 2.0
ray_cluster.start_ray()
number, wait = int(sys.argv[1]), sys.argv[2]
config, started = PretrainConfig(scale=ScaleConfig(num_workers=number, wait=wait)), time.monotonic()
try:
    print("uses GPUs:", ray_cluster.resolve_gpu(config, number, "--scale.num_workers").scale.use_gpu)
except ConfigError as error:
    print("refused:", error)
print("seconds:", int(time.monotonic() - started))
"""
AUTOSCALER = """
import sys, time
import ray
from ray._raylet import GCS_AUTOSCALER_STATE_NAMESPACE, GCS_AUTOSCALER_V2_ENABLED_KEY, GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated.autoscaler_pb2 import AutoscalingState
ray.init(logging_level="ERROR")
client = GcsClient(address=ray.get_runtime_context().gcs_address)
key, space = GCS_AUTOSCALER_V2_ENABLED_KEY.encode(), GCS_AUTOSCALER_STATE_NAMESPACE.encode()
client.internal_kv_put(key, b"1", True, namespace=space)
print("ready", flush=True)
ends = time.monotonic() + float(sys.argv[2])
while time.monotonic() < ends:
    seen = get_cluster_resource_state(client)
    state = AutoscalingState(last_seen_cluster_resource_state_version=seen.cluster_resource_state_version)
    state.autoscaler_state_version = seen.cluster_resource_state_version
    asked = [each for of in seen.cluster_resource_constraints for each in of.resource_requests]
    if asked and sys.argv[1] == "without":
        state.infeasible_cluster_resource_constraints.extend(seen.cluster_resource_constraints)
    elif asked:
        state.pending_instance_requests.add(ray_node_type_name="gpu", count=sum(each.count for each in asked))
    client.report_autoscaling_state(state.SerializeToString())
    time.sleep(0.5)
client.internal_kv_put(key, b"0", True, namespace=space)
"""
"""What stands for an autoscaler: it says of what it is asked for that it starts it, or that it never can."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with run_raylets([1]) as started:
        started.environment["RAY_ADDRESS"] = started.address
        yield started


def start(cluster: Cluster, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *command], env=cluster.environment, stdout=subprocess.PIPE, text=True
    )


def read(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=300)[0].splitlines()


def test_a_job_waits_for_the_gpus_of_its_cluster(cluster: Cluster) -> None:
    *said, decided, seconds = read(start(cluster, DECIDE, "1", "10m"))
    assert not said and decided == "uses GPUs: False" and int(seconds.split()[-1]) < 5, "none are there, or can come"

    autoscaler = start(cluster, AUTOSCALER, "without", "20")
    assert autoscaler.stdout is not None and autoscaler.stdout.readline() == "ready\n"
    *said, decided, _ = read(start(cluster, DECIDE, "1", "10m"))
    assert not said and decided == "uses GPUs: False", "it has no node type with a GPU"
    autoscaler.wait(timeout=60)

    autoscaler = start(cluster, AUTOSCALER, "with", "40")
    assert autoscaler.stdout is not None and autoscaler.stdout.readline() == "ready\n"
    first, *_, decided, _ = read(start(cluster, DECIDE, "2", "4s"))
    assert first.startswith("waiting for GPUs: the cluster has 0 of 2, on 1 node of 1 CPU, starting ")
    assert first.endswith(" of gpu; 0 of 4 s (--scale.wait)")
    assert decided == (
        "refused: --scale.use_gpu auto needs 2 GPUs and the cluster has 0 after --scale.wait 4s; lower "
        "--scale.num_workers, wait longer, add nodes, or give --scale.use_gpu false."
    )
    autoscaler.wait(timeout=60)

    cluster.add("--num-cpus", "1", "--num-gpus", "1")
    waits = start(cluster, DECIDE, "2", "10m")
    assert waits.stdout is not None
    line = waits.stdout.readline()
    assert line.startswith(
        "waiting for GPUs: the cluster has 1 of 2, on 1 node of 1 CPU and 1 GPU and 1 node of 1 CPU;"
    )
    cluster.add("--num-cpus", "1", "--num-gpus", "1")  # it joins while the job waits
    assert "uses GPUs: True" in read(waits)


SETTLE = """
import sys
import ray
from domext_ray.config.pretrain import PretrainConfig, ScaleConfig
from domext_ray.errors import DomextError
from domext_ray.runtime import ray_cluster
from domext_ray.training import elastic
elastic.SAY_SECONDS = 2.0
ray_cluster.start_ray()
number = int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1]
config = PretrainConfig(scale=ScaleConfig(num_workers=number, use_gpu=False, wait=sys.argv[2], cpus_per_worker=0.5))

@ray.remote(num_cpus=float(sys.argv[3]), scheduling_strategy="SPREAD")
class Other:
    def wait(self): ...

others = [Other.remote() for _ in range(2)]
ray.get([each.wait.remote() for each in others])
try:
    elastic.check_room(config.scale)
    found, resources = elastic.count_workers(config.scale)
    print(found, resources)
except DomextError as error:
    print("refused:", error)
"""


def test_a_job_waits_for_room_that_others_hold_and_no_longer() -> None:
    with run_raylets([0, 1, 1]) as cluster:
        cluster.environment["RAY_ADDRESS"] = cluster.address
        assert read(start(cluster, SETTLE, "1-8", "10m", "0.2")) == ["2 {'CPU': 0.5}"]
        *said, refused = read(start(cluster, SETTLE, "2", "5s", "0.8"))
        assert len(said) == 2 and re.fullmatch(
            r"waiting for room for 2 workers: free are 2 nodes of 0\.2 CPUs.*; \d of 5 s \(--scale\.wait\)", said[0]
        )
        need = "--scale.num_workers 2 needs 0.5 CPUs for each worker (--scale.cpus_per_worker)"
        free = "free are 2 nodes of 0.2 CPUs and 1 node of 0 CPUs after --scale.wait 5s"
        rest = "wait longer, add nodes, or lower one of the two, and the same command goes on."
        assert refused == f"refused: {need}, and {free}; {rest}"
        (refused,) = read(start(cluster, SETTLE, "5-8", "10m", "0.2"))
        room = "on 2 nodes of 1 CPU and 1 node of 0 CPUs there is room for 4"
        assert refused.endswith(f"{room}; lower one of the two, or add nodes.")


def test_a_job_whose_own_command_holds_the_only_gpu_is_refused(tiny_base_folder: Path, tmp_path: Path) -> None:
    ner = ["--task", "ner", "--data", str(write_ner(tmp_path / "ner")), "--model", str(tiny_base_folder)]
    command = ["domext", "finetune", *ner, "--run.dir", str(tmp_path), "--run.name", "ner"]
    left = "the cluster has 0 left, while this job's own command holds 1 GPU (--entrypoint-num-gpus): submit it without"
    with run_raylets([1]) as cluster:
        cluster.add("--num-cpus", "1", "--num-gpus", "1")
        done = cluster.submit("--entrypoint-num-gpus", "1", "--", *command)
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode != 0 and f"--scale.use_gpu auto needs 1 GPU and {left}" in said, said
    assert "Traceback" not in said, said


def test_a_job_whose_own_command_holds_the_last_cpu_ends(tiny_base_folder: Path, tmp_path: Path) -> None:
    """Whatever it is that asks Ray for room."""
    base, corpus = str(tiny_base_folder), write_corpus(tmp_path / "corpus.txt", 300)
    read = ["--model", base, "--input", str(corpus)]
    commands = {
        "pretrain": write_command("af", tiny_base_folder, corpus, tmp_path, "run", "--replay.corpus none"),
        "prepare": ["domext", "prepare", "corpus", "--base", base, "--corpus", str(corpus), "--run.dir", str(tmp_path)],
        "predict": ["domext", "predict", *read, "--task", "fill_mask", "--output", str(tmp_path / "predicted")],
        "embed": ["domext", "embed", *read, "--output", str(tmp_path / "vectors")],
        "finetune": [
            *("domext", "finetune", "--task", "ner", "--data", str(write_ner(tmp_path / "ner")), "--model", base),
            *("--run.dir", str(tmp_path), "--run.name", "ner"),
        ],
    }
    holds = "while this job's own command holds 1 CPU (--entrypoint-num-cpus): submit it without"
    with run_raylets([1]) as cluster:
        for name, command in commands.items():
            waits = ("--scale.use_gpu", "false", "--scale.wait", "5s")
            done = cluster.submit("--entrypoint-num-cpus", "1", "--", *command, *waits)
            said = done.stdout[-3000:] + done.stderr[-3000:]
            assert done.returncode != 0 and holds in said and "Traceback" not in said, f"{name}: {said}"
