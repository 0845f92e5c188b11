"""The application on Ray Serve: a door that answers HTTP, and replicas that have the model.

All rows go through the door's queue, so that a pass holds rows of whoever asks, whatever adapter they name; a pass goes
to a replica that is free. A pass whose replica has died goes to another one: computing it twice changes nothing. Which
adapters are served is kept in the cluster's key-value store, where processes that are started again find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from domext_ray.config.serve import ServeConfig
from domext_ray.errors import DomextError, find_user_error
from domext_ray.options.build import from_dict
from domext_ray.runtime.cpu_kernels import PREDICTION
from domext_ray.runtime.device import prepare_device
from domext_ray.runtime.quiet import quiet_libraries
from domext_ray.runtime.ray_private import close_replica_port, recall, remember
from domext_ray.serving.app import make_app
from domext_ray.serving.engine import Engine, Outcome, ServedRow
from domext_ray.serving.gate import Gate
from domext_ray.serving.limits import find_environment_token
from domext_ray.serving.service import LostReplicaError, Service
from domext_ray.serving.whole_model import open_bank, read_catalogue
from domext_ray.storage import hash_text

APP = "domext"
READY_SECONDS = 5.0
ATTEMPTS = 2
_LOG = logging.getLogger(__name__)


def _name_key(config: ServeConfig) -> bytes:
    return f"domext-serve:{hash_text(f'{config.bank or config.model}|{config.adapters}')}".encode()


def read_served(config: ServeConfig) -> list[str]:
    """Return the adapters that are served: those to begin with, or what requests have made of them since."""
    kept = recall(_name_key(config))
    if kept is not None:
        return list(json.loads(kept))
    return list(config.adapters) or open_bank(config).names()


def write_served(config: ServeConfig, names: Sequence[str]) -> None:
    """Keep which adapters are served."""
    remember(_name_key(config), json.dumps(list(names)).encode())


def forget_served(config: ServeConfig) -> None:
    """Begin with the options' adapters again."""
    remember(_name_key(config), None)


class Encoder:
    """A replica: the model, and one thread in which all of its work is done in turn.

    Args:
        config: the application's.
        on_gpu: whether it has a GPU.
    """

    def __init__(self, config: ServeConfig, on_gpu: bool) -> None:
        close_replica_port()
        device = prepare_device(on_gpu, config.scale.threads, PREDICTION)
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(config.scale.threads,))
        with quiet_libraries():
            bank = open_bank(config)
            self._engine = Engine(bank, device)
            for name in read_served(config):
                try:  # one that has been damaged since takes no other with it: its own rows are refused
                    self._engine.attach(name, bank.describe(name).sha256)
                except DomextError:
                    _LOG.exception("the adapter %s cannot be served", name)

    async def run(self, rows: list[ServedRow]) -> list[Outcome]:
        """Compute a pass."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.run, rows)

    async def attach(self, name: str, sha256: str) -> None:
        """Have an adapter in the encoder."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.attach, name, sha256)

    async def drop(self, name: str) -> None:
        """Take an adapter out of the encoder."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.drop, name)

    async def is_ready(self) -> bool:
        """Answer, as a replica that is alive does."""
        return True


class _Replicas:
    """The replicas as the service calls them; a `service.Backend`."""

    def __init__(self, handle: DeploymentHandle, num_replicas: int) -> None:
        self._handle, self.num_replicas = handle, num_replicas

    async def run(self, rows: list[ServedRow]) -> Sequence[Outcome]:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(RayActorError, DeploymentUnavailableError):
                return await self._handle.run.remote(rows)
        raise LostReplicaError

    async def attach(self, name: str, sha256: str) -> None:
        try:
            await self._handle.broadcast("attach", name, sha256).results_async()
        except (RayActorError, DeploymentUnavailableError) as error:
            raise LostReplicaError from error
        except RayTaskError as error:
            raise find_user_error(error) or error from error

    async def drop(self, name: str) -> None:
        with contextlib.suppress(RayActorError, DeploymentUnavailableError):  # who is started again reads who is served
            await self._handle.broadcast("drop", name).results_async()

    async def is_ready(self) -> bool:
        try:
            found = await asyncio.wait_for(self._handle.broadcast("is_ready").results_async(), READY_SECONDS)
        except (asyncio.TimeoutError, RayActorError, DeploymentUnavailableError):
            return False
        return bool(found)


@serve.ingress()
class Door:
    """Answers HTTP; see `service.Service`.

    Args:
        config: the application's.
        token_sha256: of the token that requests show.
        encoder: the replicas.
        on_gpu: whether they have GPUs.
    """

    def __init__(self, config: ServeConfig, token_sha256: str, encoder: DeploymentHandle, on_gpu: bool) -> None:
        close_replica_port()
        torch.set_num_threads(1)  # routers are all that it computes
        with quiet_libraries():
            catalogue = read_catalogue(open_bank(config), config.max_length)
            for name in read_served(config):
                try:
                    catalogue.put(catalogue.read(name))
                except DomextError:
                    _LOG.exception("the adapter %s cannot be served", name)
        self._token_sha256 = token_sha256
        self._service = Service(
            config,
            catalogue,
            _Replicas(encoder, config.replicas),
            on_gpu=on_gpu,
            on_change=lambda: write_served(config, catalogue.names()),
        )
        self._gate: Gate | None = None

    def __serve_build_asgi_app__(self) -> Gate:
        self._gate = make_app(self._service, self._token_sha256)
        return self._gate

    async def drain(self) -> int:
        """Take no further requests; return how many are open."""
        assert self._gate is not None
        self._gate.is_draining = True
        return self._gate.num_open


def build_application(config: ServeConfig, token_sha256: str, *, on_gpu: bool) -> serve.Application:
    """Return the application for `serve.run`.

    Args:
        config: the application's.
        token_sha256: of the token that requests show.
        on_gpu: a GPU for each replica.
    """
    deployment: Any = serve.deployment
    actor = {"num_cpus": config.scale.threads, "num_gpus": 1 if on_gpu else 0}
    encoder = (
        deployment(Encoder)
        .options(
            num_replicas=config.replicas,
            ray_actor_options=actor,
            max_ongoing_requests=1,  # the door's queue is the only one
            health_check_period_s=2.0,
            graceful_shutdown_timeout_s=max(config.drain_seconds, 1.0),
        )
        .bind(config, on_gpu)
    )
    return (
        deployment(Door)
        .options(
            num_replicas=1,
            ray_actor_options={"num_cpus": 0},
            max_ongoing_requests=100_000,  # the queue and the rate refuse requests, not Serve
            graceful_shutdown_timeout_s=max(config.drain_seconds, 1.0),
        )
        .bind(config, token_sha256, encoder, on_gpu)
    )


def build_service(args: dict[str, Any]) -> serve.Application:
    """Return the application for a Serve configuration file: `args` are options, `{bank: …, replicas: 2}`.

    The token comes from DOMEXT_SERVE_TOKEN, for a configuration file is no place for it.

    Raises:
        ConfigError: an option is wrong, or there is no token.
    """
    config = from_dict(ServeConfig, args)
    return build_application(config, find_environment_token(), on_gpu=config.scale.use_gpu is True)
