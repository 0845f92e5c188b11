"""A job's own Ray: who may talk to it, who may read its files, and what is used of it that Ray does not promise."""

from __future__ import annotations

import http.client
import importlib
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import ray
from conftest import REPOSITORY
from file_limits import limit_files
from ray._private import services

from domext_ray.errors import RunError, StorageError
from domext_ray.runtime import ray_cluster, ray_private
from domext_ray.runtime.ray_cluster import LOCAL_WORKER_SETTINGS
from domext_ray.runtime.ray_private import REACHES, make_token_header, reach

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
CALLS = (  # one of each kind of process
    "NodeInfoGcsService/GetClusterId",
    "NodeManagerService/GetSystemConfig",
    "ObjectManagerService/Push",
    "CoreWorkerService/PushTask",
    "ReporterService/GetTraceback",
)
SILENCE = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
METRICS = b"# HELP "
"""What pages of counters (of the agent and the autoscaler, say) begin with: all that answers without a token."""


def call(port: int, name: str, header: dict[str, str]) -> str:
    """The status of a gRPC call."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{name}")(b"", timeout=20, metadata=list(header.items()))
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def get(port: int) -> tuple[int, bytes]:
    """The status and the beginning of a page; 0 where no HTTP is spoken."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, answer.read(len(METRICS))
    except (http.client.HTTPException, OSError):
        return 0, b""
    finally:
        connection.close()


@pytest.mark.usefixtures("local_ray")
def test_every_listener_is_on_localhost_and_asks_for_the_token() -> None:
    class Worker:
        """A process that is not about to end."""

        def find_pid(self) -> int:
            return os.getpid()

    worker = ray.remote(num_cpus=0)(Worker).remote()
    busy = ray.get(worker.find_pid.remote())
    places = {
        (*connection.laddr, process.name()): process.pid
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert not [place for place in places if place[0] not in LOOPBACK], "nothing is open to the network"
    assert 52365 not in {port for _, port, _ in places}, "a cluster beside it needs this one for `ray job submit`"
    kinds = {name for _, _, name in places}
    assert {"gcs_server", "raylet"} <= kinds and len(places) >= 6, places
    assert busy in places.values()
    for (_, port, name), pid in places.items():
        status, page = get(port)
        if name == "ray::IDLE" and status == 0 and call(port, CALLS[3], {}) in SILENCE:
            continue  # a worker of an earlier test that is ending, and tells nobody anything
        codes = {rpc: call(port, rpc, {}) for rpc in CALLS}
        assert "OK" not in codes.values(), (name, codes)
        assert pid != busy or codes[CALLS[3]] == "UNAUTHENTICATED", codes
        refuses = "UNAUTHENTICATED" in codes.values() or status in (401, 403)
        assert refuses or (status, page) == (200, METRICS), (name, codes, status)
        for method, code in codes.items():
            if code == "UNAUTHENTICATED":
                assert call(port, method, {"authorization": "Bearer wrong"}) == code, name
    (gcs,) = {port for _, port, name in places if name == "gcs_server"}
    assert call(gcs, CALLS[0], make_token_header()) == "OK", "the same call, with the token"


@pytest.mark.usefixtures("local_ray")
def test_files_and_sockets_are_their_owner_s() -> None:
    sockets = Path(ray._private.worker._global_node.get_sockets_dir_path())
    private = next(folder for folder in sockets.parents if folder.name == f"ray-{os.getuid()}")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700 and private.stat().st_uid == os.getuid()


def test_a_machine_that_cannot_talk_with_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "LOCALHOST", "192.0.2.1")  # which no machine has
    with pytest.raises(RunError, match=r"^this machine cannot connect to itself at 192\.0\.2\.1 \(.*\), where a job's"):
        ray_cluster._check_localhost()


def test_a_full_folder_for_ray_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with limit_files(1000), pytest.raises(StorageError, match=rf"^{tmp_path}/ray-\d+ cannot be .*File too large"):
        ray_cluster._make_private_folder()
    assert ray_cluster._make_private_folder().parent == tmp_path
    assert [path.name for path in tmp_path.rglob("*")] == [f"ray-{os.getuid()}"]


@pytest.mark.slow
def test_a_folder_that_is_too_long_for_ray_s_sockets_is_told(tmp_path: Path) -> None:
    code = """
from domext_ray.runtime.ray_cluster import start_ray
from domext_ray.runtime.stopping import exit_on_user_error
with exit_on_user_error():
    start_ray()
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path / ("long" * 25))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"error: Ray does not start on this machine \(.*another folder in RAY_TMPDIR", done.stderr)


@pytest.mark.slow
def test_a_small_container_keeps_objects_in_files(tmp_path: Path) -> None:
    """Docker gives /dev/shm 64 MB; elsewhere it may not be written at all."""
    code = """
import sys, psutil, ray
from pathlib import Path
from domext_ray.runtime import ray_cluster
ray_cluster.SHARED_MEMORY = sys.argv[1]
ray_cluster.start_ray()
assert len(ray.get(ray.put(bytes(2**20)))) == 2**20
(raylet,) = (each for each in psutil.Process().children() if each.name() == "raylet")
print(Path("/proc", str(raylet.pid), "maps").read_text())
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets are short
        command = [sys.executable, "-c", code, str(tmp_path / "none")]
        environment = {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"note: {tmp_path / 'none'} has room for 0 MB, and what Ray's processes share")
        assert f" {folder}/ray-{os.getuid()}/plasma" in done.stdout


@pytest.mark.usefixtures("local_ray")
def test_workers_are_not_the_last_in_line_for_a_cpu() -> None:
    assert ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()) == os.nice(0)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.skipif(services.JEMALLOC_SO is None, reason="this Ray ships no jemalloc")
def test_workers_keep_their_memory() -> None:
    def look() -> tuple[str, str]:
        return Path("/proc/self/maps").read_text(encoding="utf-8"), os.environ["MALLOC_CONF"]

    maps, settings = ray.get(ray.remote(num_cpus=0)(look).remote())
    assert str(services.JEMALLOC_SO) in maps
    assert settings == LOCAL_WORKER_SETTINGS["MALLOC_CONF"]


@pytest.mark.usefixtures("local_ray")
@pytest.mark.skipif(services.JEMALLOC_SO is None, reason="this Ray ships no jemalloc")
def test_workers_use_again_what_they_have_kept() -> None:
    def grow() -> int:
        np.ones(600 * 2**20, dtype=np.uint8)  # freed at once
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        blocks = [np.ones(3 * 2**20, dtype=np.uint8) for _ in range(100)]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        del blocks  # only now
        return grown // 1024

    assert ray.get(ray.remote(num_cpus=0)(grow).remote()) < 50, "MB beside the 600 that were there"


PRIVATE = ("ray._private", "ray._raylet", "ray._common", "ray.serve._private", "ray.train._internal", "internal_kv")


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
