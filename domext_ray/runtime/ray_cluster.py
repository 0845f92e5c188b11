"""The Ray that a job uses: a cluster that is found, or a local one that is started; and what it has.

A local Ray is its job's own: it listens on localhost, asks for a token that nobody else knows, and keeps its files and
sockets in a folder that nobody else may enter.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import math
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import AuthenticationError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from domext_ray.errors import ConfigError, RunError, name_file
from domext_ray.runtime.machine import count_cpus, find_address, has_gpu_devices, is_cluster
from domext_ray.runtime.ray_private import (
    ask_cluster_id,
    is_growing,
    list_free_resources,
    read_autoscaler_state,
    read_own_job,
    read_resource_state,
    stay_on_localhost,
    take_any_agent_port,
)
from domext_ray.runtime.stopping import keep_signals
from domext_ray.runtime.waiting import WAIT_SECONDS, set_limit
from domext_ray.storage import Place

OBJECT_STORE_BYTES = 512 * 2**20
CONNECT_SECONDS = 5.0
START_ATTEMPTS = 3
ANSWER_SECONDS = 120.0
"""For a node that is asked something; the first process there may have torch to load from a disk that others read."""
OLD_CARDS = frozenset({"K80", "M60", "P4", "P40", "P100", "V100", "T4"})
"""Cards that clusters rent out and that have no units for bf16, as Ray calls them; those of a machine are asked."""
SAY_SECONDS = 30.0
"""Between two sentences of a job that waits for GPUs."""
LOCAL_TRAIN_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # a job ends that much sooner than with Ray's 2 s
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process that would watch this machine for being taken away
}
"""Of Ray Train on this machine alone, in the environment."""
LOCAL_WORKER_SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray's 15 lets any other process of the machine starve a run
    # Ray's own processes have jemalloc, which it ships for Linux. A worker trains in a thread, whose memory the C
    # library's allocator gives back and takes again in every step; jemalloc is told to keep it. The last setting lets
    # it cut small blocks from large ones that it has kept: by default it takes new memory instead, step after step.
    "RAY_LD_PRELOAD_ON_WORKERS": "1",
    "MALLOC_CONF": "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:16",
}
"""Of Ray's workers on this machine alone, in the environment."""
LOOPBACK, LOCALHOST = Path("/sys/class/net/lo"), "127.0.0.1"
SHARED_MEMORY, START_BYTES = "/dev/shm", 2**20
"""Where Ray keeps objects, and what its files take at a start."""

ConfigT = TypeVar("ConfigT", bound=Any)


def start_ray(wait_seconds: float = WAIT_SECONDS) -> None:
    """Connect to the cluster that RAY_ADDRESS or the job server names, or start a local one on localhost.

    The local one has token authentication, no dashboard and a bounded object store. `wait_seconds` is how long work may
    wait for room on it from now on, before it ends with an error.
    """
    set_limit(wait_seconds)
    if ray.is_initialized():
        return
    # Here, because reading tasks import this file and do not compute.
    from domext_ray.runtime.device import check_choice

    check_choice()
    _set_environment(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # of workers that there is room for
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the default of later versions, without a warning
        }
    )
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address := find_address():
        _check_cluster(address)
        try:
            with keep_signals():
                ray.init(**quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:  # for example another version of Ray
            reason = " ".join(str(error).split())
            raise ConfigError(f"the Ray cluster at RAY_ADDRESS {address!r} cannot be used: {reason}") from error
        return
    _check_localhost()
    _keep_to_this_machine()
    private = _make_private_folder()
    objects, folder = _find_object_folder(private), private / "ray"
    for _ in range(START_ATTEMPTS):
        try:
            with keep_signals():
                ray.init(
                    address="local",
                    num_cpus=count_cpus(),
                    num_gpus=_count_own_gpus(),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(folder),
                    _plasma_directory=objects,
                    **quiet,
                )
            return
        except Exception as error:  # Ray raises half a dozen kinds
            ray.shutdown()
            if "timed out during startup" not in str(error):
                raise RunError(
                    f"Ray does not start on this machine ({' '.join(str(error).split())}); mend that, or give its "
                    f"files another folder in RAY_TMPDIR (its logs: {folder}/session_latest/logs)."
                ) from error
    raise RunError(
        f"Ray's processes have not started within {START_ATTEMPTS} times 30 s, as on a machine that is very busy; try "
        f"again later (their logs: {folder}/session_latest/logs)."
    )


def _check_cluster(address: str) -> None:
    """Ask a cluster for its id, with the token: `ray.init` would try for minutes, and say so in raw lines."""
    if address == "auto":  # which `ray.init` looks up on this machine
        return
    named, own = f"RAY_ADDRESS is {address!r}", "unset RAY_ADDRESS for a Ray of the job's own"
    token = (
        "this machine needs the cluster's token: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
        "~/.ray/auth_token"
    )
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(
            f"{named}; it must be HOST:PORT of a cluster's head, such as 10.0.0.1:6379, or unset for a Ray of the "
            "job's own (from outside a cluster: ray job submit)."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        status = ask_cluster_id(address, CONNECT_SECONDS)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{named}, and nothing answers there ({reason}); start that cluster, correct the address, or {own}."
        ) from error
    except AuthenticationError as error:
        raise ConfigError(f"{named} and RAY_AUTH_MODE is token, but there is none; {token}.") from error
    if status == "UNAUTHENTICATED":
        raise ConfigError(f"{named}, and the cluster there refuses the token, or misses it; {token}.")
    if status:
        raise ConfigError(
            f"{named}, and what answers there is no Ray cluster ({status}); give the head's HOST:PORT, usually with "
            f"port 6379, or {own}."
        )


def _set_environment(defaults: Mapping[str, str]) -> None:
    """Set variables that are not set."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _keep_to_this_machine() -> None:
    """Prepare a local Ray: localhost, a token of its own, and workers that are not the last in line for a CPU."""
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        # In the environment, which nobody else may read: Ray would write it to ~/.ray/auth_token, for everybody.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    _set_environment(LOCAL_TRAIN_SETTINGS | LOCAL_WORKER_SETTINGS)
    stay_on_localhost()
    take_any_agent_port()
    if LOOPBACK.exists():
        _set_environment({"GLOO_SOCKET_IFNAME": LOOPBACK.name})  # workers talk to each other there, too


def _check_localhost() -> None:
    """Refuse a machine on which nothing can talk with itself: Ray's processes would try for minutes."""
    try:
        with socket.create_server((LOCALHOST, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise RunError(
            f"this machine cannot connect to itself at {LOCALHOST} ({error.strerror or error}), where a job's own "
            f"Ray listens, also beside IPv6; bring it up (ip link set lo up; ip address add {LOCALHOST} dev lo)."
        ) from error


def _find_object_folder(private: Path) -> str | None:
    """Return where Ray keeps objects if /dev/shm has no room for them, as in a small container; None: there."""
    room = shutil.disk_usage(SHARED_MEMORY).free if os.access(SHARED_MEMORY, os.W_OK) else 0
    if room >= OBJECT_STORE_BYTES:
        return None
    print(
        f"note: {SHARED_MEMORY} has room for {room / 2**20:,.0f} MB, and what Ray's processes share takes up to "
        f"{OBJECT_STORE_BYTES / 2**20:,.0f}, so it is in {private}, which is slower (Docker: --shm-size 1g).",
        flush=True,
    )
    return str(private)


def _make_private_folder() -> Path:
    """Make the folder of this user's local Rays, whose own folders are open to everybody."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"ray-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunError(f"{folder} belongs to another user; delete it, or give another folder in RAY_TMPDIR.")
    folder.chmod(0o700)
    with name_file(folder), tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(START_BYTES))  # where that cannot be, Ray's processes are waited for in vain
        probe.flush()
    return folder


def _count_own_gpus() -> int:
    if not has_gpu_devices():
        return 0  # without torch, which takes seconds to load
    import torch  # here, because reading tasks import this file and do not compute

    return torch.cuda.device_count()


def resolve_gpu(config: ConfigT, number: int = 1, option: str = "") -> ConfigT:
    """Decide `--scale.use_gpu auto`, and refuse `true` where there are too few GPUs; a process needs one.

    While a cluster's GPUs are not known yet, the configuration stays as it is. A cluster that has some GPUs, or can
    bring some, is waited for before it is refused; one whose GPUs the job's own command holds is refused, too.
    `option` is what to lower to need fewer.
    """
    use_gpu, in_cluster = config.scale.use_gpu, is_cluster()
    if use_gpu is False or (in_cluster and not ray.is_initialized()):
        return config
    waits = in_cluster and _wait_for_gpus(number, config.scale.wait_seconds)
    hold = describe_hold("GPU") if in_cluster else ""
    num_gpus = _count_gpus() if ray.is_initialized() else _count_own_gpus()
    place, more = ("the cluster", ", or add nodes") if in_cluster else ("this machine", "")
    lower = f"lower {option}" if option and num_gpus else "leave --scale.use_gpu at auto"
    needed = f"needs {number} GPU{'s' if number > 1 else ''} and {place} has {num_gpus}{' left' if hold else ''}"
    if num_gpus < number and (waits or hold):  # CPUs would take what GPUs were rented for
        needed += f" after --scale.wait {config.scale.wait}" if waits else ""
        ways = [f"lower {option}"] * bool(option) + ["wait longer"] * waits
        raise ConfigError(
            f"--scale.use_gpu {str(use_gpu).lower()} {needed}{hold}; {', '.join([*ways, 'add nodes'])}, or give "
            "--scale.use_gpu false."
        )
    if use_gpu is True and num_gpus < number:
        raise ConfigError(f"--scale.use_gpu true {needed}; {lower}{more}.")
    if 0 < num_gpus < number:
        print(f"note: {place} has {num_gpus} of {number} GPUs, so CPUs train; {lower} to use it.", flush=True)
    return replace(config, scale=replace(config.scale, use_gpu=num_gpus >= number))


def _count_gpus() -> int:
    """The whole GPUs that the nodes have for a job's processes."""
    return sum(int(node.gpus) for node in list_nodes())


def _wait_for_gpus(number: int, seconds: float) -> bool:
    """Wait until a cluster has so many GPUs; whether it has any, or its autoscaler can bring any."""
    if _count_gpus() >= number or not (_count_gpus() or _can_bring_gpus()):
        return _count_gpus() > 0
    if _count_gpus() + _find_own_hold().node.gpus >= number and not _can_bring_gpus():
        return False  # what the job's own command holds comes back when the job has ended
    started, said = time.monotonic(), 0
    request_room(number, {"GPU": 1.0})
    try:
        while (found := _count_gpus()) < number and (waited := time.monotonic() - started) < seconds:
            if waited >= said * SAY_SECONDS:
                said += 1
                print(
                    f"waiting for GPUs: the cluster has {found} of {number}, on {describe_nodes(list_nodes())}"
                    f"{_describe_launches()}{describe_hold('GPU')}; {waited:.0f} of {seconds:g} s (--scale.wait)",
                    flush=True,
                )
            time.sleep(1.0)
    finally:
        request_room(0, {})  # Ray would keep the nodes when the job has ended
    return True


def request_room(number: int, resources: Mapping[str, float]) -> None:
    """Ask an autoscaler for room for so many processes beside this job's own command; 0: for none any more.

    It counts what nodes have, whoever holds it.
    """
    own = _find_own_hold().node if number else Node(0.0, 0.0)
    held = {name: amount for name, amount in (("CPU", own.cpus), ("GPU", own.gpus)) if amount}
    request_resources(bundles=[dict(resources)] * number + [held] * bool(held))


def _can_bring_gpus() -> bool:
    """Whether an autoscaler has a node type with a GPU: it says of a request whether it never can meet it."""
    if not is_growing():
        return False
    request_room(1, {"GPU": 1.0})
    asked, ends = read_resource_state().cluster_resource_state_version, time.monotonic() + ANSWER_SECONDS
    while (state := read_autoscaler_state()).last_seen_cluster_resource_state_version <= asked:
        if time.monotonic() > ends:
            raise RunError(f"the cluster's autoscaler has not answered within {ANSWER_SECONDS:g} s; see ray status.")
        time.sleep(0.2)
    return not state.infeasible_cluster_resource_constraints


def _describe_launches() -> str:
    """What an autoscaler is starting and could not start; empty where there is none."""
    if not is_growing():
        return ""
    state = read_autoscaler_state()
    coming = Counter[str]({request.ray_node_type_name: request.count for request in state.pending_instance_requests})
    coming.update(instance.ray_node_type_name for instance in state.pending_instances)
    parts = [f"starting {number} of {name}" for name, number in coming.items()]
    parts += [f"{fault.ray_node_type_name} failed: {fault.reason}" for fault in state.failed_instance_requests[-1:]]
    return "".join(f", {part}" for part in parts)


def resolve_precision(config: ConfigT) -> ConfigT:
    """Put bf16 or fp32 in the place of `--engine.precision auto`.

    It is bf16 where all GPUs or CPUs have units for it. While the machines are not known yet, it stays auto.
    """
    engine, scale = config.engine, config.scale
    if engine.precision != "auto" or scale.use_gpu == "auto":
        return config
    has_units = engine.base_dtype == "bf16"
    if not has_units:
        if is_cluster() and not ray.is_initialized():
            return config
        has_units = _have_cards_bf16() if scale.uses_gpu else _have_cpus_bf16()
    return replace(config, engine=replace(engine, precision="bf16" if has_units else "fp32"))


def _have_cards_bf16() -> bool:
    if is_cluster():  # whose cards may all be taken: what nodes say of themselves, and no task, tells
        return OLD_CARDS.isdisjoint(list_accelerators())
    import torch  # here, because reading tasks import this file and do not compute

    from domext_ray.runtime.device import has_bf16

    return all(has_bf16(torch.device("cuda", number)) for number in range(torch.cuda.device_count()))


def _have_cpus_bf16() -> bool:
    from domext_ray.runtime.device import has_bf16_units

    return all(has for _, has in run_on_each_node(has_bf16_units)) if is_cluster() else has_bf16_units()


def run_on_each_node(function: Callable[..., Any], *args: Any, own: bool = True) -> list[tuple[str, Any]]:
    """Call a function on every node that has CPUs; return their host names and what it returned. Ray is initialised.

    Without `own` this process's node is left out. A node that has not answered in time is a RunError.
    """
    remote, here = ray.remote(num_cpus=0)(function), None if own else ray.get_runtime_context().get_node_id()
    asked = dict[Any, str]()
    for node in _list_alive():
        if node["Resources"].get("CPU") and node["NodeID"] != here:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[remote.options(scheduling_strategy=there).remote(*args)] = node["NodeManagerHostname"]
    late = ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_SECONDS)[1] if asked else []
    if late:
        names = ", ".join(sorted(asked[answer] for answer in late))
        raise RunError(f"no answer within {ANSWER_SECONDS:g} s from {names}; see to what ray status says of them.")
    return [(name, ray.get(answer)) for answer, name in asked.items()]


def check_shared_storage(run_dir: Place, corpora: Place | None = None) -> None:
    """Refuse a run's directory, or folder of prepared corpora, that a node of the cluster does not see."""
    options = {run_dir: ("the run directory", "--run.dir")}
    if corpora is not None:
        options.setdefault(corpora, ("the folder of prepared corpora", "--prepare.cache_dir"))
    for place, (what, option) in options.items():
        if not place.is_local:
            continue
        with place.scratch() as marker:
            for name, sees in run_on_each_node(os.path.exists, str(marker), own=False):
                if not sees:
                    raise RunError(
                        f"{what} {place} is not visible on node {name}; give {option} a folder on storage that all "
                        "nodes share."
                    )


def _list_alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True, order=True)
class Node:
    """CPUs, as Ray counts them, and GPUs that a node has for a job's processes."""

    cpus: float
    gpus: float

    def hold(self, share: float, *, with_gpu: bool, spare: float = 0.0) -> int:
        """Return how many processes of a CPU share fit, `spare` CPUs left over."""
        number = math.floor((self.cpus - spare) / share + 1e-9)
        return min(number, int(self.gpus)) if with_gpu else number


def list_nodes(*, free: bool = False) -> list[Node]:
    """Return the cluster's nodes, without what this job's own command holds; Ray is initialised.

    `free`: with what nobody holds, of those that stay.
    """
    if free:
        return [_to_node(resources) for resources in list_free_resources()]
    own, nodes = _find_own_hold(), {node["NodeID"]: _to_node(node["Resources"]) for node in _list_alive()}
    if own.node_id in nodes:
        whole = nodes[own.node_id]
        nodes[own.node_id] = Node(max(0.0, whole.cpus - own.node.cpus), max(0.0, whole.gpus - own.node.gpus))
    return [*nodes.values()]


def _to_node(resources: Mapping[str, float]) -> Node:
    return Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


@dataclass(frozen=True)
class _Hold:
    """What the command of a submitted job holds, on which node: its processes never get it."""

    node_id: str = ""
    node: Node = Node(0.0, 0.0)


def _find_own_hold() -> _Hold:
    context = ray.get_runtime_context()
    return _read_own_hold(context.gcs_address, context.get_job_id())


@functools.lru_cache(maxsize=1)
def _read_own_hold(address: str, job_id: str) -> _Hold:
    """It stays what it was while the job runs; what was not submitted holds nothing."""
    own = read_own_job(address, job_id)
    return _Hold(own.driver_node_id, Node(own.entrypoint_num_cpus, own.entrypoint_num_gpus))


def describe_hold(*kinds: str) -> str:
    """Say what this job's own command holds, and how to have it back, as the end of a clause; empty: nothing.

    `kinds` are "CPU", "GPU" or, left out, both.
    """
    own = _find_own_hold().node
    held = {"CPU": own.cpus, "GPU": own.gpus}
    parts = [f"{held[name]:g} {name} (--entrypoint-num-{name.lower()}s)" for name in kinds or held if held[name]]
    return f", while this job's own command holds {' and '.join(parts)}: submit it without" if parts else ""


def list_accelerators() -> list[str]:
    """Return the types of the cluster's GPUs, such as H100, each once; Ray is initialised."""
    prefix = "accelerator_type:"
    names = {name for node in _list_alive() for name in node["Resources"] if name.startswith(prefix)}
    return sorted(name.removeprefix(prefix) for name in names)


def share_cpus(nodes: Sequence[Node], number: int, *, most: float, with_gpu: bool, read_cpus: float) -> float:
    """Return the largest CPU share of so many processes that leaves every node CPUs for reading tasks.

    It is in hundredths of a CPU, at most `most`; 0.0 where there is no room at all. `read_cpus` is what a reading task
    asks of one node; twice as many are left where that is possible.
    """
    for spare in (2 * read_cpus, read_cpus):

        def is_too_large(hundredths: int, spare: float = spare) -> bool:
            return sum(max(0, node.hold(hundredths / 100, with_gpu=with_gpu, spare=spare)) for node in nodes) < number

        found = bisect.bisect_left(range(1, round(100 * most) + 1), True, key=is_too_large)
        if found:
            return found / 100
    return 0.0


def find_shortage(nodes: Sequence[Node], number: int, share: float, *, with_gpu: bool, read_cpus: float) -> str:
    """Say what keeps so many processes from running on a cluster's nodes; empty: nothing.

    A process and a reading task each need one node that has all they ask for: sums over the cluster say nothing. Ray
    may place processes in any way that fits, so the worst one counts: no node left with room for a reading task.
    """
    room = [node.hold(share, with_gpu=with_gpu) for node in nodes]
    if sum(room) < number:
        return f"there is room for {sum(room)}"
    crowded = [max(0, node.hold(share, with_gpu=False, spare=read_cpus) + 1) for node in nodes]
    if all(least <= most for least, most in zip(crowded, room, strict=True)) and sum(crowded) <= number:
        return f"they may leave no node the {read_cpus:g} CPUs that a reading task asks for"
    return ""


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Return what a cluster has, as "4 nodes of 1 CPU"; Ray lists nodes in any order, so the largest come first."""
    return " and ".join(
        f"{number} node{'s' if number > 1 else ''} of {node.cpus:g} CPU{'' if node.cpus == 1 else 's'}"
        + (f" and {node.gpus:g} GPU{'' if node.gpus == 1 else 's'}" if node.gpus else "")
        for node, number in sorted(Counter(nodes).items(), reverse=True)
    )


def describe_waiting() -> str:
    """Say what Ray cannot place now and what has the room, in one clause; empty: nothing waits. Ray is initialised."""
    return ask_waiting()[1]


def ask_waiting() -> tuple[int, str]:
    """Return how many tasks and processes of anybody's Ray cannot place now, and what `describe_waiting` says."""
    try:
        state = read_resource_state()
    except RayError:  # Ray is ending, or too busy to say
        return 0, ""
    asked: Counter[str] = Counter()
    for demand in state.pending_resource_requests:  # tasks and actors
        asked[_describe_bundle(demand.request.resources_bundle)] += demand.count
    for gang in state.pending_gang_resource_requests:  # workers that start together
        asked.update(_describe_bundle(member.resources_bundle) for member in gang.requests)
    if not asked:
        return 0, ""
    free, total = ray.available_resources(), ray.cluster_resources()
    wanted = ", ".join(f"{number} times {bundle}" for bundle, number in asked.most_common(3))
    names = [name for name in ("CPU", "GPU") if name == "CPU" or name in total]
    has = " and ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in names)
    nodes = [_to_node(node["Resources"]) for node in _list_alive()]
    said = f"Ray has no room yet for {wanted}; free are {has} on {describe_nodes(nodes)}{describe_hold()}"
    return asked.total(), said


def _describe_bundle(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items())) or "a task"
