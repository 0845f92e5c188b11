"""Serving many adapters from one queue against Ray Serve's own way, for `jobs/benchmark.py serve`.

The rival is what Ray's documentation shows: `serve.multiplexed` keeps the model of every adapter, base and all, and
`@serve.batch` collects requests, which it cuts by model. Both sides get the same texts, clients, threads, rows of a
batch and time to wait, one after the other; all traffic stays on this machine. Adapters are drawn, not trained, so that
every answer tells whose it is: it is compared with what that adapter's own model says of that text without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import math
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
from benchmarks.output import Measured, Record, add_output_options, write_records
from starlette.requests import Request

from domext_ray.adapters.bank import AdapterBank
from domext_ray.adapters.entry import ARCHITECTURES, SEQUENCES
from domext_ray.config.serve import BatchConfig, LimitConfig, ServeConfig, ServeScaleConfig
from domext_ray.errors import RunError
from domext_ray.model.domext.configuration_domext import complete_adapter
from domext_ray.runtime.quiet import quiet_libraries
from domext_ray.vocabulary.tokenizer import load_tokenizer

TOKEN = "only-for-this-benchmark"
CLASSES = ("first", "second", "third", "fourth")
TOLERANCE = 1e-3
"""Between a probability that was served and the one without a server: padding changes the last bits."""
SPREAD = 0.05
TEXTS, CHECKING_CLIENTS = 16, 4
"""Texts of a request whose answers are compared, and clients that ask: together a batch's rows."""
RIVAL = "rival"
MODEL_HEADER = "serve_multiplexed_model_id"


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jobs/benchmark.py serve`."""
    parser.add_argument("--base", default="general-mini", help="a BERT")
    parser.add_argument("--adapters", type=int, default=8, help="adapters, evenly mixed")
    parser.add_argument("--clients", type=int, default=64, help="clients, each with one request at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each side's traffic")
    parser.add_argument("--answers", type=int, default=100_000, help="requests of a side at most")
    parser.add_argument("--checked_answers", type=int, default=0, help="answers to requests of many texts, each of any")
    parser.add_argument("--repeats", type=int, default=1, help="turns of both sides")
    parser.add_argument("--words", type=int, default=8, help="words of a text, on average")
    parser.add_argument("--texts", type=int, default=200, help="different texts")
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch at most")
    parser.add_argument("--wait_ms", type=float, default=3.0, help="milliseconds that a row waits for others")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a replica")
    parser.add_argument("--overload", type=int, default=10, help="times the clients, for --overload_seconds")
    parser.add_argument("--overload_seconds", type=float, default=10.0, help="0: leave it out")
    parser.add_argument("--kill_seconds", type=float, default=20.0, help="a replica of two is killed; 0: leave it out")
    parser.add_argument("--port", type=int, default=8123, help="on localhost")
    add_output_options(parser)


@dataclass
class Traffic:
    """What clients saw.

    Args:
        seconds: how long they asked.
        statuses: requests by status of HTTP; 0: the connection broke.
        answers: texts that were answered.
        wrong: answers that are not their adapter's own.
        latencies: seconds of each answer with status 200.
    """

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    answers: int = 0
    wrong: int = 0
    latencies: list[float] = field(default_factory=list)

    def summarize(self) -> dict[str, Any]:
        """Return rate, latencies in milliseconds and counts."""
        p50, p99 = np.percentile(self.latencies, [50, 99]) if self.latencies else (float("nan"),) * 2
        return {
            "requests_per_second": self.statuses[200] / self.seconds,
            "p50_ms": 1000 * float(p50),
            "p99_ms": 1000 * float(p99),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "answers": self.answers,
            "wrong": self.wrong,
        }


@dataclass(frozen=True)
class Load:
    """Requests and what their answers must be.

    Args:
        texts: what is asked.
        names: of the adapters.
        expected: probabilities float64 [adapters, texts, classes], computed without a server.
    """

    texts: list[str]
    names: list[str]
    expected: np.ndarray

    def is_right(self, adapter: int, text: int, probabilities: dict[str, float]) -> bool:
        """Whether an answer is the adapter's own of this text."""
        found = np.array([probabilities[label] for label in CLASSES])
        return bool(np.abs(found - self.expected[adapter, text]).max() < TOLERANCE)


def make_bank(folder: Path, base: str, num_adapters: int) -> AdapterBank:
    """Make a bank of classifiers whose adapters and heads are drawn."""
    bank = AdapterBank.create(folder, base)
    for seed in range(num_adapters):
        config: Any = copy.deepcopy(bank.base.config)
        config.adapters = {"own": complete_adapter("own", {"bottleneck_size": 16}, config.num_hidden_layers)}
        config.id2label = dict(enumerate(CLASSES))
        config.label2id = {label: number for number, label in enumerate(CLASSES)}
        model: Any = ARCHITECTURES[SEQUENCES](config)
        model.load_state_dict(bank.base.tensors, strict=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name not in bank.base.tensors:
                    param.add_(SPREAD * torch.randn(param.shape, generator=generator))
        bank.add(f"adapter{seed}", model.eval(), "own")
    return bank


@torch.no_grad()
def make_load(bank: AdapterBank, options: argparse.Namespace) -> Load:
    """Draw texts, and compute each adapter's probabilities of each without a server.

    Raises:
        RunError: the answers of two adapters to a text are too close to be told apart.
    """
    tokenizer = load_tokenizer(bank.base.tokenizer_folder)
    words = sorted(each for each in tokenizer.get_vocab() if each.isascii() and each.isalpha() and len(each) > 2)
    draw = random.Random(0)
    sizes = [draw.randint(max(1, options.words // 2), options.words + options.words // 2) for _ in range(options.texts)]
    texts = [" ".join(draw.choices(words, k=size)) for size in sizes]
    names, expected = bank.names(), []
    for name in names:
        model = bank.load(name)
        rows = [model(**tokenizer(text, return_tensors="pt")).logits[0].double().softmax(-1).numpy() for text in texts]
        expected.append(np.stack(rows))
    probabilities = np.stack(expected)
    apart = np.abs(probabilities[:, None] - probabilities[None]).max(-1) + np.eye(len(names))[:, :, None]
    if apart.min() < 3 * TOLERANCE:
        raise RunError(f"two adapters answer a text within {apart.min():.1e} of each other; take fewer --texts.")
    return Load(texts, names, probabilities)


async def send_traffic(
    load: Load, address: str, clients: int, seconds: float, most: int, *, to_rival: bool = False, texts: int = 1
) -> Traffic:
    """Ask from many clients, each with one request at a time, of adapters and texts in a drawn order.

    Args:
        load: what to ask.
        address: where.
        clients: how many.
        seconds: how long.
        most: requests of all clients together, at most.
        to_rival: name the adapter in Ray Serve's header.
        texts: of a request; each names an adapter of its own.
    """
    traffic, started = Traffic(), time.perf_counter()
    left = most

    async def ask(number: int, session: aiohttp.ClientSession) -> None:
        nonlocal left
        draw = random.Random(number)
        while left > 0 and time.perf_counter() - started < seconds:
            left -= 1
            pairs = [(draw.randrange(len(load.names)), draw.randrange(len(load.texts))) for _ in range(texts)]
            names, asked = [load.names[adapter] for adapter, _ in pairs], [load.texts[text] for _, text in pairs]
            values = {"inputs": asked, "adapter": names} if texts > 1 else {"inputs": asked[0], "adapter": names[0]}
            headers = {MODEL_HEADER: names[0]} if to_rival else {}
            begun = time.perf_counter()
            try:
                async with session.post(address, json=values, headers=headers) as answer:
                    content = await answer.read()
            except aiohttp.ClientError:
                traffic.statuses[0] += 1
                continue
            traffic.statuses[answer.status] += 1
            if answer.status != 200:
                await asyncio.sleep(0.02)  # a client that is refused does not spin
                continue
            traffic.latencies.append(time.perf_counter() - begun)
            for (adapter, text), prediction in zip(pairs, json.loads(content)["predictions"], strict=True):
                is_own = prediction["adapter"] == load.names[adapter]
                traffic.answers += 1
                traffic.wrong += not (is_own and load.is_right(adapter, text, prediction["probabilities"]))

    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        await asyncio.gather(*(ask(number, session) for number in range(clients)))
    traffic.seconds = time.perf_counter() - started
    return traffic


def make_rival(folder: str, options: argparse.Namespace) -> Any:
    """Return the rival's application: models of all adapters in memory, batches of one adapter each.

    Args:
        folder: the bank.
        options: rows and time of a batch, adapters and threads.
    """
    from ray import serve

    class Multiplexed:
        def __init__(self) -> None:
            self._bank = AdapterBank.open(folder)
            self._tokenizer = load_tokenizer(self._bank.base.tokenizer_folder)
            self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(options.threads,))

        @serve.multiplexed(max_num_models_per_replica=options.adapters)
        async def get_model(self, name: str) -> Any:
            return self._bank.load(name)

        @serve.batch(max_batch_size=options.rows, batch_wait_timeout_s=options.wait_ms / 1000)
        async def compute(self, texts: list[str]) -> list[dict[str, Any]]:
            name = serve.get_multiplexed_model_id()
            model = await self.get_model(name)
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._thread, self._run, model, texts)
            return [{"adapter": name, "probabilities": dict(zip(CLASSES, row, strict=True))} for row in rows]

        @torch.inference_mode()
        def _run(self, model: Any, texts: list[str]) -> list[list[float]]:
            batch = self._tokenizer(texts, padding=True, return_tensors="pt")
            values = {name: batch[name] for name in ("input_ids", "attention_mask")}
            return list(model(**values).logits.float().softmax(-1).tolist())

        async def __call__(self, request: Request) -> dict[str, Any]:
            return {"predictions": [await self.compute((await request.json())["inputs"])]}

    deployment: Any = serve.deployment
    actor = {"num_cpus": options.threads}
    return deployment(Multiplexed).options(max_ongoing_requests=100_000, ray_actor_options=actor).bind()


def run_serving_benchmark(options: argparse.Namespace) -> None:
    """Send traffic to both sides in turn, then too much of it, then kill a replica; print and write what was seen."""
    from domext_ray.serving.serve import start_serving

    os.environ["DOMEXT_SERVE_TOKEN"] = TOKEN
    with tempfile.TemporaryDirectory(prefix="domext-benchmark-") as folder:
        bank = make_bank(Path(folder) / "bank", options.base, options.adapters)
        load = make_load(bank, options)
        config = _configure(bank, options)
        sides: dict[str, list[Traffic]] = {"mixed": [], RIVAL: []}
        overload = checked = killed = None
        for turn in range(options.repeats):
            with start_serving(config):
                sides["mixed"].append(_ask(load, options, _show("/v1/classify", options)))
                if options.overload_seconds and turn == 0:
                    overload = _overload(load, options)
                if options.checked_answers and turn == 0:
                    checked = _check_answers(load, options)
            sides[RIVAL].append(_ask_rival(load, options, str(bank.folder)))
        if options.kill_seconds:
            with start_serving(replace(config, replicas=2)):
                killed = _ask_and_kill(load, options)
    _report(options, sides, overload, checked, killed)


def _configure(bank: AdapterBank, options: argparse.Namespace) -> ServeConfig:
    return ServeConfig(
        bank=str(bank.folder),
        port=options.port,
        batch=BatchConfig(rows=options.rows, wait_ms=options.wait_ms),
        limit=LimitConfig(queue=2 * options.clients, texts=min(64, options.clients)),
        scale=ServeScaleConfig(use_gpu=False, threads=options.threads),
    )


def _show(path: str, options: argparse.Namespace) -> str:
    return f"http://127.0.0.1:{options.port}{path}"


def _ask(load: Load, options: argparse.Namespace, address: str, *, to_rival: bool = False) -> Traffic:
    """Warm a side up until every adapter has answered, then ask in earnest."""
    few = 8 * options.clients
    asyncio.run(send_traffic(load, address, options.clients, 60.0, few, to_rival=to_rival))
    return asyncio.run(
        send_traffic(load, address, options.clients, options.seconds, options.answers, to_rival=to_rival)
    )


def _ask_rival(load: Load, options: argparse.Namespace, folder: str) -> Traffic:
    from ray import serve

    with quiet_libraries():
        serve.run(make_rival(folder, options), name=RIVAL, route_prefix="/rival")
    try:
        return _ask(load, options, _show("/rival", options), to_rival=True)
    finally:
        with quiet_libraries():
            serve.shutdown()  # with the proxy, whose address the next turn wants


def _overload(load: Load, options: argparse.Namespace) -> tuple[Traffic, Traffic]:
    """Ask from many times the clients; then from as many as before, who are all answered."""
    address, many = _show("/v1/classify", options), options.overload * options.clients
    crowd = send_traffic(load, address, many, options.overload_seconds, options.answers)
    return asyncio.run(crowd), _ask(load, argparse.Namespace(**{**vars(options), "seconds": 2.0}), address)


def _check_answers(load: Load, options: argparse.Namespace) -> Traffic:
    """Ask with many texts per request, each of its own adapter, until enough answers were compared."""
    address, most = _show("/v1/classify", options), -(-options.checked_answers // TEXTS)
    return asyncio.run(send_traffic(load, address, CHECKING_CLIENTS, math.inf, most, texts=TEXTS))


def _ask_and_kill(load: Load, options: argparse.Namespace) -> Traffic:
    """Kill one of two replicas when a third of the time is over."""
    address = _show("/v1/classify", options)
    timer = threading.Timer(options.kill_seconds / 3, _kill_replica)
    timer.start()
    try:
        return asyncio.run(send_traffic(load, address, options.clients, options.kill_seconds, options.answers))
    finally:
        timer.cancel()


def _kill_replica() -> None:
    for each in _find_replicas():
        os.kill(each.pid, signal.SIGKILL)
        return
    raise AssertionError("there is no replica to kill")


def _find_replicas() -> Iterator[psutil.Process]:
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ServeReplica:domext:Encoder" in " ".join(each.cmdline()):
                yield each


def _report(
    options: argparse.Namespace,
    sides: dict[str, list[Traffic]],
    overload: tuple[Traffic, Traffic] | None,
    checked: Traffic | None,
    killed: Traffic | None,
) -> None:
    rows: dict[str, Sequence[Traffic]] = dict(sides)
    if overload is not None:
        rows |= {f"{options.overload} x clients": overload[:1], "after that": overload[1:]}
    if checked is not None:
        rows[f"{TEXTS} texts each"] = [checked]
    if killed is not None:
        rows["replica killed"] = [killed]
    print(f"{'':<14} {'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'answered':>9} {'wrong':>6}  other statuses")
    content: dict[str, Any] = {}
    for name, turns in rows.items():
        content[name] = [each.summarize() for each in turns]
        for each in content[name]:
            counts = dict(each["statuses"])
            counts.pop("200", None)
            others = ", ".join(f"{count:,} times {status}" for status, count in counts.items()) or "none"
            print(
                f"{name:<14} {each['requests_per_second']:>10.1f} {each['p50_ms']:>8.1f} {each['p99_ms']:>8.1f} "
                f"{each['answers']:>9,} {each['wrong']:>6}  {others}"
            )
    ratios = [
        own["requests_per_second"] / other["requests_per_second"]
        for own, other in zip(content["mixed"], content[RIVAL], strict=True)
    ]
    print(f"mixed batches against one adapter per batch: {np.median(ratios):.2f} times the requests per second")
    results = [
        Measured(name, "requests/s", [each["requests_per_second"] for each in turns]) for name, turns in content.items()
    ]
    figures = {"ratio": float(np.median(ratios)), "ratios": ratios, "traffic": content}
    case = {name: getattr(options, name) for name in ("base", "adapters", "clients", "words", "threads")}
    write_records(options, [Record("serve", case, results, figures)], torch.device("cpu"))
