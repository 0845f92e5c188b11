"""`domext serve`: start Ray Serve, say where it answers, and end it when told to, after the last open request."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview, LoggingConfig, ReplicaState

from domext_ray.config.pretrain import SettledConfig
from domext_ray.config.serve import ServeConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.model.base import name_base
from domext_ray.models.bank import AdapterBank
from domext_ray.models.source import Run, open_model
from domext_ray.progress import StatusLine, format_seconds, quiet_libraries
from domext_ray.runs.run_directory import read_config
from domext_ray.runtime.machine import find_address
from domext_ray.runtime.ray_cluster import (
    ask_waiting,
    describe_hold,
    describe_nodes,
    describe_waiting,
    find_shortage,
    list_nodes,
    resolve_gpu,
    run_on_each_node,
    start_ray,
)
from domext_ray.runtime.ray_private import close_replica_port, find_serve_options, wait_for_proxies
from domext_ray.runtime.stopping import Stopped, find_kill_timer, name_stop, signal_name
from domext_ray.runtime.waiting import RoomTimer, StallTimer
from domext_ray.serving.catalogue import Catalogue
from domext_ray.serving.deployment import APP, Encoder, build_application
from domext_ray.serving.guard import find_token, hash_token
from domext_ray.serving.served_model import find_single_model, name_adapter, open_served
from domext_ray.storage import Place

LOOK_SECONDS = 0.2
STATUS_SECONDS = 5.0
TOKEN_FOLDER = Path("~/.domext")
"""Has the token of a server on this machine and a port, where the user gave none."""


def run_serving(config: ServeConfig) -> None:
    """Serve until a signal comes: `Stopped` says what became of the open requests."""
    StatusLine().keep(f"opening {f'the bank {config.bank}' if config.bank else config.model}")
    with place_bank(config) as placed:
        print(describe_served(check_served(placed)), flush=True)
        if config.dry_run:
            return
        with start_serving(placed, config.model if placed.bank else "") as place:
            print(place, flush=True)
            _wait(config)


@contextlib.contextmanager
def place_bank(config: ServeConfig) -> Iterator[ServeConfig]:
    """Make a bank of --model while the block runs, so that one model is served as many are; yields the options with it.

    A fine-tuned model is served as it is, for its base may be nowhere; and so is an export that is no base itself.
    """
    if config.bank:
        yield config
        return
    source = open_model(config.model)
    run_dir = source.folder
    run = read_config(Place(run_dir), SettledConfig) if isinstance(source, Run) else None
    has_adapter = run is not None and run.method.has_adapter
    if not has_adapter and (found := find_single_model(config.model)):
        yield replace(config, model=str(found.folder))
        return
    with tempfile.TemporaryDirectory(prefix="domext-serve-") as temporary, quiet_libraries():
        folder = Place(temporary) / "bank"
        if run is not None and has_adapter:
            with name_base(f"{run_dir}: the base"):
                bank = AdapterBank.create(folder, run.base)
            bank.add_run(name_adapter(run_dir), Place(run_dir))
        else:
            with name_base("--model"):
                AdapterBank.create(folder, config.model)
        yield replace(config, model="", bank=str(folder))


def check_served(config: ServeConfig) -> Catalogue:
    """Read what is to be served, and compare every file of a bank with its hash."""
    with quiet_libraries():
        served = open_served(config)
        for name in config.adapters:
            served.hash_adapter(name)
        catalogue = Catalogue(served, config.adapters, config.max_length)
    for problem in catalogue.problems.values():
        raise problem
    return catalogue


def describe_served(catalogue: Catalogue) -> str:
    """Return what is served, a line each."""
    adapters = catalogue.list()
    lines = [f"adapters: {len(adapters)}, and the base" if catalogue.base else "one model, without a base beside it"]
    for adapter in adapters:
        what = f"{adapter.family}: {', '.join(adapter.describe()['labels'])}" if adapter.family else "fills masks"
        lines.append(f"  {adapter.name:<24} {what[:80]}{', routed' if adapter.router is not None else ''}")
    return "\n".join(lines)


@contextlib.contextmanager
def start_serving(config: ServeConfig, model: str = "") -> Iterator[str]:
    """Serve while the block runs; yields what to tell the user. At its end open requests are answered first.

    `model` is what the user gave, where `place_bank` made the bank of it. The token is in the address that a terminal
    shows, for whoever sits there opens the page with it, and not where that would be a log.
    """
    StatusLine().keep(f"{'connecting to' if find_address() else 'starting'} Ray")
    os.environ.update({name: os.environ.get(name, "0") for name in _THREADS})
    start_ray(config.scale.wait_seconds)
    close_replica_port()  # here, too: a version of Ray in which it cannot be done is refused before anything starts
    _check_serve(config)
    _check_storage(config, model)
    config = resolve_gpu(config, config.replicas, "--replicas")
    on_gpu = config.scale.use_gpu is True
    _check_room(config, on_gpu=on_gpu)
    own = TOKEN_FOLDER.expanduser() / f"serve-token-{socket.gethostname()}-{config.port}"
    token, source = find_token(config.token_file, own)
    with quiet_libraries():
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": config.host, "port": config.port, "keep_alive_timeout_s": 65},
            logging_config=_LOGGING,
        )
    try:
        application = build_application(config, hash_token(token), on_gpu=on_gpu)
        target = serve.RunTarget(application, name=APP, route_prefix="/", logging_config=_LOGGING)
        try:
            with quiet_libraries():
                serve.run_many([target], wait_for_applications_running=False)  # Serve would wait for ever
                _wait_for_replicas(config.replicas)
                wait_for_proxies()
        except RayServeException as error:  # of the controller: another application has the prefix
            reason = " ".join(str(getattr(error, "cause", error)).split())
            raise ConfigError(f"this cluster's Ray Serve does not take the application: {reason}") from error
        address = show_address(config.host, config.port, token if sys.stdout.isatty() else "")
        yield f"serving at {address} (token: {source}); {name_stop()} ends it"
    finally:
        with contextlib.suppress(RayError), quiet_libraries():
            serve.delete(APP)  # Serve itself ends with a Ray of this job's own; on a cluster others may use it


def _wait_for_replicas(number: int) -> None:
    """Wait until all of the application runs, saying how much of it does, and what keeps it from that."""
    line, num_ready = StatusLine(), 0
    stall, room = StallTimer(line, describe_waiting), RoomTimer(ask_waiting)
    try:
        while (found := serve.status().applications[APP]).status != "RUNNING":
            _check_status(found)
            encoder = found.deployments.get(Encoder.__name__)
            before, num_ready = num_ready, encoder.replica_states.get(ReplicaState.RUNNING, 0) if encoder else 0
            if num_ready != before:
                stall.note_move()
            seconds = format_seconds(line.seconds)
            line.show(f"loading the model on {number} replica{'s' * (number > 1)}: {num_ready} ready, {seconds}")
            stall.look("starting the replicas")
            room.check("starting the replicas")
            time.sleep(LOOK_SECONDS)
    finally:
        line.end()


def _check_status(found: ApplicationStatusOverview) -> None:
    if found.status == "DEPLOY_FAILED":
        raise RunError(f"the application does not start: {' '.join(found.message.split())[:500]}")


_THREADS = ("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP")
"""Threads that a request would go through in each process of a Serve that this job starts; here long texts have one."""
_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


def _check_serve(config: ServeConfig) -> None:
    """Refuse what Serve would not, or try again and again: another's application, an address that is not to be had."""
    if (options := find_serve_options()) is not None:
        running = show_address(options.host, options.port)
        if APP in serve.status().applications:
            raise ConfigError(
                f"this cluster's Ray Serve has an application {APP!r} at {running} already, which would be replaced; "
                f"end it first (serve.py, or serve delete {APP}), or give another cluster (RAY_ADDRESS)."
            )
        if (options.host, options.port) != (config.host, config.port):
            raise ConfigError(
                f"--host {config.host} --port {config.port} is not where this cluster's Ray Serve listens; give "
                f"--host {options.host} --port {options.port}, or end it first (serve shutdown)."
            )
        return
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        raise ConfigError(
            f"--host {config.host} --port {config.port} cannot be listened on ({error.strerror}); give another."
        ) from error


def _check_storage(config: ServeConfig, model: str) -> None:
    """Refuse a folder that a node of the cluster does not see; `model` as of `start_serving`."""
    option, folder = ("--bank", config.bank) if config.bank else ("--model", config.model)
    place = Place(folder).resolve()
    if place.is_local:
        for name, sees in run_on_each_node(os.path.exists, str(place), own=False):
            if not sees and model:
                raise ConfigError(
                    f"--model is {model!r}, which becomes a bank on this machine alone, and node {name} does not see "
                    "it; make a bank on storage that all nodes share (domext bank), and give it as --bank."
                )
            if not sees:
                raise ConfigError(
                    f"{folder} is not visible on node {name}; give {option} a folder on storage that all nodes share, "
                    "such as a bank (domext bank)."
                )


def _check_room(config: ServeConfig, *, on_gpu: bool) -> None:
    nodes = list_nodes()
    shortage = find_shortage(nodes, config.replicas, config.scale.threads, with_gpu=on_gpu, read_cpus=0.0)
    if shortage:
        raise ConfigError(
            f"--replicas {config.replicas} with --scale.threads {config.scale.threads} need more than there is on "
            f"{describe_nodes(nodes)}: {shortage}{describe_hold()}; lower one of them."
        )


def show_address(host: str, port: int, token: str = "") -> str:
    """Return an address that this machine can open; a token is in its fragment, which a browser sends nowhere."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # every network of this machine: this machine
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"#token={quote(token, safe='')}" if token else "")


def _wait(config: ServeConfig) -> None:
    """Say what Serve's state is when it changes, until a signal comes, which raises `Stopped`."""
    before = "RUNNING"
    try:
        while True:
            time.sleep(STATUS_SECONDS)
            found = serve.status().applications[APP]
            if found.status != before:
                print(f"state: {found.status.lower()} {' '.join(found.message.split())[:200]}".rstrip(), flush=True)
            before = found.status
            _check_status(found)
    except KeyboardInterrupt:
        raise Stopped(drain(config)) from None


def drain(config: ServeConfig) -> str:
    """Let open requests be answered while new ones are refused; return the job's last sentence."""
    begun, timer = f"stopped by {signal_name()}", find_kill_timer()
    seconds, limit = config.drain_seconds, "--drain_seconds"
    if timer and timer.left < seconds:
        seconds, limit = timer.left, timer.describe()
    deadline = time.monotonic() + seconds
    handle: DeploymentHandle = serve.get_app_handle(APP)
    shown = -1
    while True:
        try:
            num_open = handle.drain.remote().result(timeout_s=max(1.0, deadline - time.monotonic()))
        except (RayError, TimeoutError):
            return f"{begun}; the application had ended before its requests were answered."
        if num_open == 0:
            return f"{begun}; all requests were answered."
        if time.monotonic() >= deadline:
            return f"{begun}; {num_open} requests had no answer within {seconds:.3g} s ({limit})."
        if num_open != shown:
            print(f"waiting for {num_open} requests, {deadline - time.monotonic():.0f} s at most", flush=True)
            shown = num_open
        time.sleep(LOOK_SECONDS)
