"""Every reach into what Ray keeps to itself, in one place, with what each is for.

None of it is promised by Ray, so each is looked for when it is used: a version of Ray in which it is gone, or is called
otherwise, ends a job in one sentence, and changes nothing in silence.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray

from domext_ray.errors import RunError

TESTED = "2.60"
"""The version of Ray that all of this was tested with."""

REACHES = {
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER": "a Ray that listens on localhost alone",
    "ray._private.ray_constants:ENABLE_RAY_CLUSTERS_ENV_VAR": "the variable that says so to its processes",
    "ray._private.authentication.authentication_token_setup:logger": "a token without a warning in every run",
    "ray._raylet:AuthenticationTokenLoader.instance": "the token of this machine",
    "ray.autoscaler.v2.sdk:get_cluster_resource_state": "what a cluster cannot place",
    "ray.autoscaler.v2.utils:is_autoscaler_v2": "whether a cluster grows",
    "ray.core.generated.autoscaler_pb2:GetClusterStatusReply": "what its autoscaler can bring",
    "ray._raylet:GcsClient": "the client that asks for it, and for what a job's own command holds",
    "ray._private.parameter:RayParams": "a Ray that leaves the agent's port to a cluster beside it",
    "ray.core.generated.autoscaler_pb2:NodeStatus": "nodes that are taken back",
    "ray.train.v2._internal.execution.callback:WorkerCallback": "workers that heed SIGTERM",
    "ray.train.v2._internal.execution.scaling_policy:FixedScalingPolicy": "workers that wait for no autoscaler",
    "ray._private.services:JEMALLOC_SO": "the allocator that Ray ships",
    "ray.serve._private.replica:add_port_to_grpc_server": "a replica that opens no port",
    "ray.serve.context:_get_global_client": "the address of a Serve that runs already",
}
"""A module and a name in it -> what it is used for."""

_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def reach(place: str) -> Any:
    """Return what is at one of `REACHES`; a RunError if this Ray has no such thing."""
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise RunError(
            f"Ray {ray.__version__} has no {module}.{name}, which is used for {REACHES[place]}; install Ray {TESTED}, "
            "which this was tested with."
        ) from None
    return found


def _replace(place: str, value: object) -> None:
    """Put something else in the place of what is at one of `REACHES`."""
    reach(place)
    module, _, name = place.partition(":")
    setattr(importlib.import_module(module), name, value)


def stay_on_localhost() -> None:
    """Let the local Ray that is going to start listen on localhost, and say nothing of its token.

    Ray has a switch between a node's own address and localhost, which it throws where it makes no clusters. A node
    address of 127.0.0.1 alone would be replaced, and every port would be open to the network.
    """
    os.environ[reach("ray._private.ray_constants:ENABLE_RAY_CLUSTERS_ENV_VAR")] = "0"
    _replace("ray._private.ray_constants:ENABLE_RAY_CLUSTER", False)
    reach("ray._private.authentication.authentication_token_setup:logger").setLevel(logging.ERROR)


def take_any_agent_port() -> None:
    """Let the agent of the local Ray that is going to start listen on a port that is free.

    By default it takes 52365, which `ray start` takes, too: the agent of a cluster that starts later on this machine
    then ends, and the cluster answers every `ray job submit` with "No available agent to submit job".
    """
    params = reach("ray._private.parameter:RayParams")
    _replace("ray._private.parameter:RayParams", functools.partial(params, dashboard_agent_listen_port=0))


def make_token_header() -> dict[str, str]:
    """Return the header that shows this machine's token to a cluster; empty where tokens are off.

    Ray's AuthenticationError says that RAY_AUTH_MODE is token and there is none.
    """
    header = reach("ray._raylet:AuthenticationTokenLoader.instance")().get_token_for_http_header()
    return {name.lower(): value for name, value in header.items()}


def ask_cluster_id(address: str, seconds: float) -> str:
    """Ask what answers at HOST:PORT for its cluster's id: `ray.init` would try for two minutes, in raw lines.

    Return the status that the call ended with; empty: a cluster that takes this machine's token.
    """
    header = list(make_token_header().items())
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_CLUSTER_ID)(b"", timeout=seconds, metadata=header)
        except grpc.RpcError as error:
            return str(error.code().name)
    return ""


def read_resource_state() -> Any:
    """Return what the autoscaler is told of tasks, actors and gangs that wait; Ray is initialised."""
    client = reach("ray._raylet:GcsClient")(address=ray.get_runtime_context().gcs_address)
    return reach("ray.autoscaler.v2.sdk:get_cluster_resource_state")(client)


def list_free_resources() -> list[dict[str, float]]:
    """Return what nobody holds of each node that stays: none that is dead, or is being taken back."""
    statuses = reach("ray.core.generated.autoscaler_pb2:NodeStatus")
    gone = {statuses.Value("DEAD"), statuses.Value("DRAINING")}
    return [dict(node.available_resources) for node in read_resource_state().node_states if node.status not in gone]


def read_own_job(address: str, job_id: str) -> Any:
    """Return what the job server of the cluster at HOST:PORT knows of the command that a job was submitted with."""
    client = reach("ray._raylet:GcsClient")(address=address)
    found = client.get_all_job_info(job_or_submission_id=job_id, skip_is_running_tasks_field=True)
    return next(job.job_info for number, job in found.items() if number.hex() == job_id)


def wait_for_proxies() -> None:
    """Wait until what answers Serve's HTTP knows all applications; Serve runs, and its own limit counts."""
    reach("ray.serve.context:_get_global_client")().wait_for_proxies_serving(wait_for_applications_running=True)


def is_growing() -> bool:
    """Return whether the cluster has an autoscaler that says what it can bring; Ray is initialised."""
    found: bool = reach("ray.autoscaler.v2.utils:is_autoscaler_v2")(fetch_from_server=True)
    return found


def read_autoscaler_state() -> Any:
    """Return what that autoscaler last said: what it starts, and what it never can; Ray is initialised."""
    client = reach("ray._raylet:GcsClient")(address=ray.get_runtime_context().gcs_address)
    reply = reach("ray.core.generated.autoscaler_pb2:GetClusterStatusReply")()
    reply.ParseFromString(client.get_cluster_status(timeout_s=10))
    return reply.autoscaling_state


def find_allocator() -> str | None:
    """Return the path of the jemalloc that Ray ships; None: it ships none for this system."""
    path: str | None = reach("ray._private.services:JEMALLOC_SO")
    return path


def close_replica_port() -> None:
    """Let a replica of Serve open no port of Serve's own.

    Serve 2.60 has every replica listen on all addresses of its machine for calls by gRPC, which the application does
    not use: whoever connects may send pickles, and needs no token.
    """
    nothing: Callable[[Any, str], int] = lambda server, address: 0  # noqa: E731
    _replace("ray.serve._private.replica:add_port_to_grpc_server", nothing)


def find_serve_options() -> Any:
    """Return the HTTP options, with host and port, of the Serve that runs on this cluster; None: none does."""
    client = reach("ray.serve.context:_get_global_client")(raise_if_no_controller_running=False)
    return None if client is None else client.http_config
