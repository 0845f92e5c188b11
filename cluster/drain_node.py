"""Tell Ray that this machine is about to be taken away: a run then saves, and goes on without it.

    python drain_node.py                # now, as the preStop hook of a worker's pod
    python drain_node.py --watch aws    # as soon as the cloud gives notice to a spot machine: aws or gcp

The node is marked as draining, and Ray ends it once it has no work left. This program ends then, or after --seconds.
RAY_ADDRESS names the cluster, else the one that was started here is taken; the token is found as Ray finds it.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
import urllib.request
from urllib.error import HTTPError

import ray
from ray._private import services
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

METADATA = {"aws": "http://169.254.169.254", "gcp": "http://metadata.google.internal"}
POLL_SECONDS, TIMEOUT_SECONDS = 2.0, 10


def ask(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """Ask the metadata service, past any proxy; where it has no such page, the answer is empty."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return str(answer.read(), "utf-8")
    except HTTPError as error:
        if error.code == 404:
            return ""
        raise


def has_notice(cloud: str, url: str) -> bool:
    """Whether the cloud takes this machine back: two minutes from now on AWS, half a minute on Google Cloud."""
    if cloud == "gcp":
        return ask(f"{url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
    token = ask(f"{url}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    return bool(ask(f"{url}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def wait_for_notice(cloud: str, url: str) -> None:
    """Wait until the cloud gives notice; only the first question must be answered."""
    has_answered = False
    while True:
        try:
            if has_notice(cloud, url):
                return
            has_answered = True
        except OSError as error:
            if not has_answered:
                raise ConnectionError(f"no metadata service of {cloud} at {url} ({error})") from None
        time.sleep(POLL_SECONDS)


def list_nodes(client: GcsClient) -> dict[str, GcsNodeInfo]:
    """List the nodes that are alive, but for the head, by their ids."""
    nodes = client.get_all_node_info(timeout=TIMEOUT_SECONDS).values()
    return {each.node_id.hex(): each for each in nodes if each.state == GcsNodeInfo.ALIVE and not each.is_head_node}


def find_node(client: GcsClient, address: str, node_id: str | None) -> str:
    """Return the id of the node that is named, or of this machine's only one."""
    nodes, here = list_nodes(client), services.get_node_ip_address(address)
    found = [
        each for each, node in nodes.items() if each == node_id or not node_id and node.node_manager_address == here
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} workers' nodes at {address} are {node_id or here}: name one with --node-id")
    return found[0]


def drain(client: GcsClient, node_id: str, seconds: float) -> None:
    """Mark the node as draining, and wait until Ray has ended it or the time is over."""
    deadline = time.time() + seconds
    reason = "this machine is taken away"
    is_accepted, why = client.drain_node(node_id, DRAIN_NODE_REASON_PREEMPTION, reason, int(deadline * 1000))
    if not is_accepted:
        raise ValueError(f"Ray does not drain the node {node_id}: {why}")
    print(f"draining the node {node_id} for {seconds:g} s", flush=True)
    while time.time() < deadline and node_id in list_nodes(client):
        time.sleep(1)


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100, help="how long the machine stays from now on (100)")
    parser.add_argument("--watch", choices=METADATA, help="the cloud whose notice is waited for")
    parser.add_argument("--metadata-url", help="where its metadata service is, if elsewhere than usual")
    parser.add_argument("--node-id", help="Ray's id of the node, if not this machine's")
    return parser.parse_args(arguments)


def main() -> None:
    """Find the node, wait for the notice if there is to be one, and drain."""
    options = read_options()
    try:
        address = services.canonicalize_bootstrap_address_or_die("auto")
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_SECONDS).close()
        try:
            client = GcsClient(address=address)
        except ray.exceptions.AuthenticationError:
            raise ValueError(
                f"Ray at {address} refuses the token of RAY_AUTH_TOKEN or ~/.ray/auth_token, or misses it"
            ) from None
        node_id = find_node(client, address, options.node_id)
        if options.watch:
            wait_for_notice(options.watch, options.metadata_url or METADATA[options.watch])
        drain(client, node_id, options.seconds)
    except (OSError, ValueError, ray.exceptions.RayError) as error:
        sys.exit(f"error: {' '.join(str(error).split()).rstrip('.')}.")


if __name__ == "__main__":
    main()
