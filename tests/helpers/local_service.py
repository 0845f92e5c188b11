"""The service over a real model in this process, without Ray, and a client of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from starlette.testclient import TestClient

from domext_ray.config.serve import LimitConfig, ServeConfig
from domext_ray.models.bank import AdapterBank
from domext_ray.serving.app import make_app
from domext_ray.serving.catalogue import Catalogue
from domext_ray.serving.engine import Engine, Outcome, ServedRow
from domext_ray.serving.guard import RequestGuard, hash_token
from domext_ray.serving.served_model import ServedBank, ServedModel
from domext_ray.serving.service import LostReplicaError, Service

TOKEN = "a-token-of-some-length"
LIMITS = LimitConfig(bytes=4000, texts=8, characters=1000, queue=16)


class LocalReplica:
    """One engine in a thread; `gate` holds it back, and a replica that `is_lost` answers nothing."""

    num_replicas = 1

    def __init__(self, engine: Engine) -> None:
        self.engine, self.thread = engine, ThreadPoolExecutor(1)
        self.gate = threading.Event()
        self.gate.set()
        self.is_lost = False
        self.passes: list[list[str]] = []

    def compute(self, rows: list[ServedRow]) -> list[Outcome]:
        self.gate.wait()
        self.passes.append([row.adapter for row in rows])
        return self.engine.run(rows)

    async def run(self, rows: list[ServedRow]) -> Sequence[Outcome]:
        if self.is_lost:
            raise LostReplicaError
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.compute, rows)

    @property
    def is_ready(self) -> bool:
        return not self.is_lost


class Served:
    """A client of an application, and what is behind it."""

    def __init__(
        self, bank: AdapterBank | ServedModel, limits: LimitConfig = LIMITS, names: Sequence[str] = ()
    ) -> None:
        self.bank: Any = bank
        model = ServedBank(bank) if isinstance(bank, AdapterBank) else bank
        self.replica = LocalReplica(Engine(model, torch.device("cpu")))
        config = ServeConfig(bank="any", limit=limits)
        self.service = Service(config, Catalogue(model, names), self.replica)
        self.app: RequestGuard = make_app(self.service, hash_token(TOKEN))
        self.client = TestClient(self.app, headers={"Authorization": f"Bearer {TOKEN}"})

    def post(self, kind: str, inputs: Any, adapter: Any = None, **more: Any) -> Any:
        values = {"inputs": inputs, **({} if adapter is None else {"adapter": adapter}), **more}
        return self.client.post(f"/v1/{kind}", json=values)

    def ask(self, kind: str, inputs: Any, adapter: Any = None, **more: Any) -> list[dict[str, Any]]:
        answer = self.post(kind, inputs, adapter, **more)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["predictions"])
