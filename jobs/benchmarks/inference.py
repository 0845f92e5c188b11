"""Prediction of many texts against transformers.pipeline, and serving of many adapters against Ray Serve's own way."""

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
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
from benchmarks.output import Record, report, show
from benchmarks.timing import Watch, compare
from starlette.requests import Request
from transformers import pipeline
from transformers.utils import logging

from domext_ray.config.serve import BatchConfig, LimitConfig, ServeConfig, ServeScaleConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.files import read_json
from domext_ray.model.base import load_base
from domext_ray.model.domext.configuration_domext import complete_adapter
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import ARCHITECTURES, SEQUENCES
from domext_ray.progress import quiet_libraries
from domext_ray.storage import Place, hash_file
from domext_ray.text.data import package_docs
from domext_ray.text.data.draws import hash_counters
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

CPU = torch.device("cpu")


# --- predict: texts are stretches of the documentation of installed packages, a word of each masked ---

MIN_WORDS, CHECKED_ROWS, SCORE_TOLERANCE = 6, 64, 1e-4
_CUT, _MASK = 71, 72  # purposes of a hash
JOB = Path(__file__).parents[1] / "predict.py"


def run_predict(options: argparse.Namespace) -> None:
    """Time the job and the pipeline, compare what they say, print and write.

    Ours is the whole job: a pool of workers that load the model, read, predict and write. The rival is one process with
    as many threads as there are workers, its model loaded before the clock starts; every batch size is tried.
    """
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="domext-predict-") as temporary:
        folder = Path(options.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        texts, output = folder / "texts.txt", folder / "predictions"
        with texts.open("w", encoding="utf-8") as file:
            file.writelines(islice(_make_texts(options.words), options.rows))
        with Watch(every=2.0) as watch:
            subprocess.run(_make_command(texts, output, options), check=True)
        rate = read_json(Place(output / "summary.json"), "", {"rows_per_second": float})["rows_per_second"]
        results["domext predict"] = [rate]
        with Watch() as rival_watch:
            for size in options.batch_sizes:
                results[f"pipeline, batches of {size}"] = [_time_pipeline(texts, folder, options, size)]
        _check_agreement(output, folder / "rival.jsonl")
        figures: dict[str, Any] = {"memory_mb_by_quarter": watch.find_quarters(), "cores": watch.cores}
        if options.kill:
            figures["resumed_is_equal"] = _resume_killed(texts, folder, options)
    rivals = {name: compare([rate], values)["ratio"] for name, values in results.items() if name != "domext predict"}
    figures |= {"ratio": min(rivals.values()), "ratios": rivals}
    rows = [
        {
            "": name,
            "texts": f"{options.rows:,}",
            "rows/s": show(value),
            "ours / other": f"{rivals[name]:.2f}" if name in rivals else "",
        }
        for name, (value,) in results.items()
    ]
    case = {name: getattr(options, name) for name in ("model", "rows", "words", "workers")}
    others = max(watch.others_frac, rival_watch.others_frac)
    report(options, [Record("predict", case, rows, "rows/s", results, figures, others)], CPU)
    print("most MB of all processes, by quarter of the job:", *map(round, figures["memory_mb_by_quarter"]))
    if options.kill:
        print(f"killed halfway and resumed: the output is {'equal' if figures['resumed_is_equal'] else 'another'}")


def _make_texts(max_words: int) -> Iterator[str]:
    """Yield texts with one mask each, the same ones on every call on a machine."""
    number = 0
    for again in count():  # the same paragraphs, cut and masked elsewhere
        for paragraph in package_docs.read_paragraphs():
            words = paragraph.split()
            if len(words) < MIN_WORDS:
                continue
            number += 1
            cut, mask = (hash_counters(0, purpose, again, number).item() for purpose in (_CUT, _MASK))
            length = MIN_WORDS + cut % (max_words - MIN_WORDS + 1)
            start = cut // max_words % max(1, len(words) - length)
            kept = words[start : start + length]
            kept[mask % len(kept)] = "[MASK]"
            yield " ".join(kept) + "\n"


def _make_command(texts: Path, output: Path, options: argparse.Namespace) -> list[str]:
    given = {"model": options.model, "input": texts, "output": output, "format": "jsonl"}
    given |= {"batch_tokens": options.batch_tokens, "scale.workers": options.workers, "scale.use_gpu": "false"}
    return [sys.executable, str(JOB), *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def _time_pipeline(texts: Path, folder: Path, options: argparse.Namespace, batch_size: int) -> float:
    """Return the rows per second of transformers' pipeline; what it says goes to rival.jsonl."""
    logging.set_verbosity_error()
    torch.set_num_threads(options.workers)
    place = str(load_base(options.model).folder)
    # In fp32, as the job computes: left to itself the pipeline takes the half precision of the stored weights.
    fill: Any = pipeline("fill-mask", model=place, device="cpu", dtype=torch.float32, top_k=5)
    num_rows = min(options.rival_rows, options.rows)
    with texts.open(encoding="utf-8") as lines, (folder / "rival.jsonl").open("w", encoding="utf-8") as output:
        started = time.perf_counter()
        for found in fill((line.rstrip("\n") for line in islice(lines, num_rows)), batch_size=batch_size):
            output.write(json.dumps(found, ensure_ascii=False) + "\n")
        return num_rows / (time.perf_counter() - started)


def _check_agreement(predictions: Path, rival: Path) -> None:
    """Refuse to compare unless both sides fill the first masks alike."""
    own = (predictions / "predictions" / "part-000000.jsonl").read_text(encoding="utf-8").splitlines()
    theirs = rival.read_text(encoding="utf-8").splitlines()
    for line, other in list(zip(own, theirs, strict=False))[:CHECKED_ROWS]:
        scores = [fill["probability"] for fill in json.loads(line)["masks"][0]["fills"]]
        expected = [fill["score"] for fill in json.loads(other)]
        difference = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
        assert difference < SCORE_TOLERANCE, f"probabilities differ by {difference}"


def _resume_killed(texts: Path, folder: Path, options: argparse.Namespace) -> bool:
    """Kill a job when half of its blocks are done, resume it, and compare its output with the undisturbed one."""
    output, half = folder / "killed", len(list((folder / "predictions" / ".blocks").iterdir())) // 2
    process = subprocess.Popen(_make_command(texts, output, options))
    while len(list(output.glob(".blocks/*.json"))) < half:
        assert process.poll() is None, "the job ended before it was killed"
        time.sleep(0.05)
    for victim in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        victim.kill()
    process.wait()
    subprocess.run(_make_command(texts, output, options), check=True)
    found = [sorted((root / "predictions").iterdir()) for root in (output, folder / "predictions")]
    hashes = [[(path.name, hash_file(path)) for path in paths] for paths in found]
    return hashes[0] == hashes[1]


# --- serve: adapters are drawn, not trained, so that every answer tells whose it is ---

TOKEN = "only-for-this-benchmark"
CLASSES = ("first", "second", "third", "fourth")
TOLERANCE = 1e-3
"""Between a probability that was served and the one without a server: padding changes the last bits."""
SPREAD = 0.05
TEXTS, CHECKING_CLIENTS = 16, 4
"""Texts of a request whose answers are compared, and clients that ask: together a batch's rows."""
OURS, RIVAL = "rows of all adapters in one pass", "one adapter per batch"


@dataclass
class Traffic:
    """What clients saw: requests by status of HTTP (0: the connection broke), texts answered, answers of another."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    answers: int = 0
    wrong: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds of each answer with status 200

    def summarize(self) -> dict[str, Any]:
        """Return rate, latencies in milliseconds and counts."""
        p50, p99 = np.percentile(self.latencies, [50, 99]) if self.latencies else (float("nan"),) * 2
        found = {"requests_per_second": self.statuses[200] / self.seconds, "p50_ms": 1000 * float(p50)}
        statuses = {str(status): number for status, number in sorted(self.statuses.items())}
        return {
            **found,
            "p99_ms": 1000 * float(p99),
            "statuses": statuses,
            "answers": self.answers,
            "wrong": self.wrong,
        }


@dataclass(frozen=True)
class Load:
    """Requests, and what their answers must be."""

    texts: list[str]
    names: list[str]  # of the adapters
    expected: np.ndarray  # probabilities float64 [adapters, texts, classes], computed without a server

    def is_right(self, adapter: int, text: int, answer: dict[str, Any]) -> bool:
        """Whether an answer is the adapter's own of this text."""
        found = np.array([answer["probabilities"][label] for label in CLASSES])
        is_close = np.abs(found - self.expected[adapter, text]).max() < TOLERANCE
        return bool(answer["adapter"] == self.names[adapter] and is_close)


def run_serving(options: argparse.Namespace) -> None:
    """Send traffic to both sides in turn, then too much of it, then kill a replica; print and write what was seen.

    The rival is what Ray's documentation shows: `serve.multiplexed` keeps the model of every adapter, base and all, and
    `@serve.batch` collects requests, which it cuts by model. Both sides get the same texts, clients, threads, rows of a
    batch and time to wait; all traffic stays on this machine.
    """
    from domext_ray.serving.serve import start_serving

    if options.checked_answers and options.clients < TEXTS:
        raise ConfigError(f"--clients is {options.clients}; with --checked_answers it must be {TEXTS} or more.")
    os.environ["DOMEXT_SERVE_TOKEN"] = TOKEN
    with tempfile.TemporaryDirectory(prefix="domext-benchmark-") as folder:
        bank = _make_bank(Path(folder) / "bank", options.base, options.adapters)
        load = _make_load(bank, options)
        config = ServeConfig(
            bank=str(bank.folder),
            port=options.port,
            batch=BatchConfig(rows=options.rows, wait_ms=options.wait_ms),
            limit=LimitConfig(queue=2 * options.clients, texts=min(64, options.clients)),
            scale=ServeScaleConfig(use_gpu=False, threads=options.threads),
        )
        seen: dict[str, list[Traffic]] = {OURS: [], RIVAL: []}
        with Watch(every=2.0) as watch:
            for turn in range(options.repeats):
                with start_serving(config):
                    seen[OURS].append(_warm_and_ask(load, options))
                    if options.overload_seconds and turn == 0:
                        many = options.overload * options.clients
                        crowd = _ask(load, options, clients=many, seconds=options.overload_seconds)
                        after = _warm_and_ask(load, options, seconds=2.0)
                        seen |= {
                            f"{options.overload} times the clients": [crowd],
                            "as many as before, after that": [after],
                        }
                    if options.checked_answers and turn == 0:
                        given = {"clients": CHECKING_CLIENTS, "seconds": math.inf, "texts": TEXTS}
                        asked = _ask(load, options, most=-(-options.checked_answers // TEXTS), **given)
                        seen[f"requests of {TEXTS} texts, each of its own adapter"] = [asked]
                seen[RIVAL].append(_ask_rival(load, options, str(bank.folder)))
            if options.kill_seconds:
                with start_serving(replace(config, replicas=2)):
                    timer = threading.Timer(options.kill_seconds / 3, _kill_replica)
                    timer.start()
                    seen["two replicas, one killed"] = [_ask(load, options, seconds=options.kill_seconds)]
    report(options, [_make_record(options, seen, watch.others_frac)], CPU)


def _make_record(options: argparse.Namespace, seen: dict[str, list[Traffic]], others_frac: float) -> Record:
    traffic = {name: [turn.summarize() for turn in turns] for name, turns in seen.items()}
    rates = {name: [turn["requests_per_second"] for turn in turns] for name, turns in traffic.items()}
    figures = {**compare(rates[OURS], rates[RIVAL]), "traffic": traffic}
    rows = []
    for name, turns in traffic.items():
        statuses = sum((Counter(turn["statuses"]) for turn in turns), Counter[str]())
        rows.append(
            {
                "": name,
                "requests/s": ", ".join(map(show, rates[name])),
                "p50, ms": show(statistics.median(turn["p50_ms"] for turn in turns)),
                "p99, ms": show(statistics.median(turn["p99_ms"] for turn in turns)),
                "answers": f"{sum(turn['answers'] for turn in turns):,}",
                "refused": f"{statuses['429'] + statuses['503']:,}",
                "failed": f"{statuses.total() - statuses['200'] - statuses['429'] - statuses['503']:,}",
                "wrong": f"{sum(turn['wrong'] for turn in turns):,}",
                "ours / other": f"{figures['ratio']:.2f}" if name == RIVAL else "",
            }
        )
    case = {name: getattr(options, name) for name in ("base", "adapters", "clients", "words", "threads")}
    return Record("serve", case, rows, "requests/s", rates, figures, others_frac)


def _make_bank(folder: Path, base: str, num_adapters: int) -> AdapterBank:
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
def _make_load(bank: AdapterBank, options: argparse.Namespace) -> Load:
    """Draw texts, and compute each adapter's probabilities of each; too close to be told apart is a `RunError`."""
    tokenizer = load_tokenizer(bank.base.folder)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
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


def _ask(load: Load, options: argparse.Namespace, **given: Any) -> Traffic:
    """Send traffic of the options' clients, seconds and requests, or of those that are given."""
    address = f"http://127.0.0.1:{options.port}{'/rival' if given.get('to_rival') else '/v1/classify'}"
    usual = {"clients": options.clients, "seconds": options.seconds, "most": options.answers}
    return asyncio.run(_send_traffic(load, address, **{**usual, **given}))


def _warm_and_ask(load: Load, options: argparse.Namespace, **given: Any) -> Traffic:
    """Ask until every adapter has answered, then in earnest."""
    _ask(load, options, **{**given, "seconds": 60.0, "most": 8 * options.clients})
    return _ask(load, options, **given)


async def _send_traffic(
    load: Load, address: str, *, clients: int, seconds: float, most: int, to_rival: bool = False, texts: int = 1
) -> Traffic:
    """Ask from many clients, each with one request at a time, of adapters and texts in a drawn order.

    All clients together send `most` requests at most. With `to_rival` Ray Serve's header names the adapter; of several
    `texts` of a request each names its own.
    """
    traffic, started, left = Traffic(), time.perf_counter(), most

    async def ask(number: int, session: aiohttp.ClientSession) -> None:
        nonlocal left
        draw = random.Random(number)
        while left > 0 and time.perf_counter() - started < seconds:
            left -= 1
            pairs = [(draw.randrange(len(load.names)), draw.randrange(len(load.texts))) for _ in range(texts)]
            names, asked = [load.names[adapter] for adapter, _ in pairs], [load.texts[text] for _, text in pairs]
            values = {"inputs": asked, "adapter": names} if texts > 1 else {"inputs": asked[0], "adapter": names[0]}
            headers, begun = {"serve_multiplexed_model_id": names[0]} if to_rival else {}, time.perf_counter()
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
            for pair, prediction in zip(pairs, json.loads(content)["predictions"], strict=True):
                traffic.answers += 1
                traffic.wrong += not load.is_right(*pair, prediction)

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        await asyncio.gather(*(ask(number, session) for number in range(clients)))
    traffic.seconds = time.perf_counter() - started
    return traffic


def _make_rival(folder: str, options: argparse.Namespace) -> Any:
    """Return the rival's application: models of all adapters in memory, batches of one adapter each."""
    from ray import serve

    class Multiplexed:
        def __init__(self) -> None:
            self._bank = AdapterBank.open(folder)
            self._tokenizer = load_tokenizer(self._bank.base.folder)
            self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(options.threads,))

        @serve.multiplexed(max_num_models_per_replica=options.adapters)
        async def get_model(self, name: str) -> Any:
            return self._bank.load(name)

        @serve.batch(max_batch_size=options.rows, batch_wait_timeout_s=options.wait_ms / 1000)
        async def compute(self, texts: list[str]) -> list[dict[str, Any]]:
            name = serve.get_multiplexed_model_id()
            model = await self.get_model(name)
            rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, model, texts)
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


def _ask_rival(load: Load, options: argparse.Namespace, folder: str) -> Traffic:
    from ray import serve

    with quiet_libraries():
        serve.run(_make_rival(folder, options), name="rival", route_prefix="/rival")
    try:
        return _warm_and_ask(load, options, to_rival=True)
    finally:
        with quiet_libraries():
            serve.shutdown()  # with the proxy, whose address the next turn wants


def _kill_replica() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ServeReplica:domext:Encoder" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                return
    raise AssertionError("there is no replica to kill")
