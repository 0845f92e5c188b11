"""The application on Ray Serve: an ingress that answers HTTP, and replicas that have the model.

All rows go through the ingress's queue, so that a pass holds rows of whoever asks, whatever adapter they name; a pass
goes to a replica that is free. A pass whose replica has died goes to another one: computing it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from domext_ray.config.options.build import from_dict
from domext_ray.config.serve import ServeConfig
from domext_ray.progress import quiet_libraries
from domext_ray.runtime.device import PREDICTION, prepare_device
from domext_ray.runtime.ray_private import close_replica_port
from domext_ray.serving.app import make_app
from domext_ray.serving.catalogue import Catalogue
from domext_ray.serving.engine import Engine, Outcome, ServedRow
from domext_ray.serving.guard import RequestGuard, find_environment_token, hash_token
from domext_ray.serving.served_model import open_served
from domext_ray.serving.service import LostReplicaError, Service

APP = "domext"
WATCH_SECONDS = 1.0
"""How often the ingress asks Serve's controller whether there are replicas."""
ATTEMPTS = 2


class Encoder:
    """A replica: the model, and one thread in which all of its work is done in turn."""

    def __init__(self, config: ServeConfig, on_gpu: bool) -> None:
        close_replica_port()
        device = prepare_device(on_gpu, config.scale.threads, PREDICTION)
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(config.scale.threads,))
        with quiet_libraries():
            self._engine = Engine(open_served(config), device)

    async def run(self, rows: list[ServedRow]) -> list[Outcome]:
        """Compute a pass."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.run, rows)


class _Replicas:
    """The replicas as the service calls them; a `service.Backend`."""

    def __init__(self, handle: DeploymentHandle, num_replicas: int) -> None:
        self._handle, self.num_replicas = handle, num_replicas
        self.is_ready = False

    async def run(self, rows: list[ServedRow]) -> Sequence[Outcome]:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(RayActorError, DeploymentUnavailableError):
                return await self._handle.run.remote(rows)
        raise LostReplicaError

    @contextlib.asynccontextmanager
    async def watch(self, app: object) -> AsyncIterator[None]:
        """Know whether there are replicas while the block runs."""
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()

    async def _watch(self) -> None:
        own = serve.get_replica_context().app_name
        try:
            while True:
                with contextlib.suppress(RayError, RayServeException):  # without a controller replicas go on
                    found = (await asyncio.to_thread(serve.status)).applications.get(own)
                    replicas = found.deployments.get(self._handle.deployment_name) if found else None
                    self.is_ready = replicas is not None and any(
                        state == "RUNNING" for state in replicas.replica_states
                    )
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            self.is_ready = False  # nobody knows


@serve.ingress()
class Ingress:
    """Answers HTTP; see `service.Service`."""

    def __init__(self, config: ServeConfig, token_sha256: str, encoder: DeploymentHandle, on_gpu: bool) -> None:
        close_replica_port()
        torch.set_num_threads(1)  # routers are all that it computes
        with quiet_libraries():
            catalogue = Catalogue(open_served(config), config.adapters, config.max_length)
        self._token_sha256, self._replicas = token_sha256, _Replicas(encoder, config.replicas)
        self._service = Service(config, catalogue, self._replicas, on_gpu=on_gpu)
        self._guard: RequestGuard | None = None

    def __serve_build_asgi_app__(self) -> RequestGuard:
        self._guard = make_app(self._service, self._token_sha256, self._replicas.watch)
        return self._guard

    async def drain(self) -> int:
        """Take no further requests; return how many are open."""
        assert self._guard is not None
        self._guard.is_draining = True
        return self._guard.num_open


def build_application(config: ServeConfig, token_sha256: str, *, on_gpu: bool) -> serve.Application:
    """Return the application for `serve.run`; with `on_gpu` each replica has a GPU."""
    deployment: Any = serve.deployment
    actor = {"num_cpus": config.scale.threads, "num_gpus": 1 if on_gpu else 0}
    encoder = (
        deployment(Encoder)
        .options(
            num_replicas=config.replicas,
            ray_actor_options=actor,
            max_ongoing_requests=1,  # the ingress's queue is the only one
            health_check_period_s=2.0,
            graceful_shutdown_timeout_s=max(config.drain_seconds, 1.0),
        )
        .bind(config, on_gpu)
    )
    return (
        deployment(Ingress)
        .options(
            num_replicas=1,
            ray_actor_options={"num_cpus": 0},
            max_ongoing_requests=100_000,  # the queue refuses requests, not Serve
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
    return build_application(config, hash_token(find_environment_token()), on_gpu=config.scale.use_gpu is True)
