"""Prediction by this library against transformers.pipeline: same model, same texts, for `jobs/benchmark.py predict`.

Texts are stretches of the documentation of installed packages, a word of each masked. Ours is the whole job: a pool of
workers that load the model, read, predict and write. The rival is one process with as many threads as there are
workers, its model loaded before the clock starts, which writes what it finds as JSON Lines; every batch size is tried.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.output import Measured, Record, add_output_options, write_records
from transformers import pipeline
from transformers.utils import logging

from domext_ray.corpus.draws import hash_counters
from domext_ray.data import package_docs
from domext_ray.files import read_json
from domext_ray.model.base import load_base

MIN_WORDS = 6
SCORE_TOLERANCE = 1e-4
CHECKED_ROWS = 64
SAMPLE_SECONDS = 1.0
_CUT, _MASK = 71, 72  # purposes of a hash
JOB = Path(__file__).parents[1] / "predict.py"


def add_predict_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jobs/benchmark.py predict`."""
    parser.add_argument("--model", default="general-mini", help="a BERT without extensions")
    parser.add_argument("--rows", type=int, default=4000, help="texts that the job predicts")
    parser.add_argument("--rival_rows", type=int, default=2000, help="texts that the pipeline predicts, the first ones")
    parser.add_argument("--words", type=int, default=24, help="words of a text at most")
    parser.add_argument("--workers", type=int, default=2, help="workers of the job, threads of the pipeline")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 16, 64], help="of the pipeline")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="tokens of a batch of the job")
    parser.add_argument("--kill", action="store_true", help="kill a second job halfway, resume it, compare the output")
    parser.add_argument("--folder", default="", help="where texts and predictions go; empty: a temporary folder")
    add_output_options(parser)


def run_predict(options: argparse.Namespace) -> None:
    """Time the job and the pipeline, compare what they say, print and write."""
    with tempfile.TemporaryDirectory(prefix="domext-predict-") as temporary:
        folder = Path(options.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        texts = folder / "texts.txt"
        write_texts(texts, options.rows, options.words)
        job = time_job(texts, folder / "predictions", options)
        rivals = {size: time_pipeline(texts, folder, options, size) for size in options.batch_sizes}
        check_agreement(folder / "predictions", folder / "rival.jsonl")
        if options.kill:
            job["resumed_is_equal"] = resume_killed(texts, folder, options)
    print_result(job, rivals, options)


def write_texts(path: Path, num_rows: int, max_words: int) -> None:
    """Write texts, one a line, each with one mask; the same ones on every call on a machine."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(islice(_make_texts(max_words), num_rows))


def _make_texts(max_words: int) -> Iterator[str]:
    number = 0
    for again in count():  # the same paragraphs, cut and masked elsewhere
        for paragraph in package_docs.read_paragraphs():
            words = paragraph.split()
            if len(words) < MIN_WORDS:
                continue
            number += 1
            cut, mask = (hash_counters(0, each, again, number).item() for each in (_CUT, _MASK))
            length = MIN_WORDS + cut % (max_words - MIN_WORDS + 1)
            start = cut // max_words % max(1, len(words) - length)
            kept = words[start : start + length]
            kept[mask % len(kept)] = "[MASK]"
            yield " ".join(kept) + "\n"


def make_command(texts: Path, output: Path, options: argparse.Namespace) -> list[str]:
    """Return the job's command."""
    given = {"model": options.model, "input": texts, "output": output, "format": "jsonl"}
    given |= {"batch_tokens": options.batch_tokens, "scale.workers": options.workers, "scale.use_gpu": "false"}
    return [sys.executable, str(JOB), *(word for name, each in given.items() for word in (f"--{name}", str(each)))]


def time_job(texts: Path, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job; return its rows per second, and the memory of its processes over time."""
    started = time.perf_counter()
    process = subprocess.Popen(make_command(texts, output, options))
    watch = _MemoryWatch(process.pid)
    assert process.wait() == 0, "the job failed"
    seconds = time.perf_counter() - started
    watch.end()
    summary = read_json(output / "summary.json", "", {"rows_per_second": float})
    found = {name: summary[name] for name in ("rows", "seconds", "rows_per_second")}
    return {**found, "command_seconds": seconds, "memory_mb": watch.summarize()}


class _MemoryWatch:
    """Samples the memory of a job and its workers.

    Args:
        pid: the job.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.samples: list[tuple[float, float]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            try:
                job = psutil.Process(self.pid)
                workers = [each for each in job.children(recursive=True) if "MapWorker" in " ".join(each.cmdline())]
                largest = max((each.memory_info().rss for each in workers), default=0)
                if largest:
                    self.samples.append((job.memory_info().rss / 2**20, largest / 2**20))
            except psutil.Error:  # a process has ended
                continue

    def end(self) -> None:
        """Stop."""
        self.ended.set()
        self.thread.join()

    def summarize(self) -> dict[str, list[float]]:
        """Return the peak of each quarter of the time, of the job and of its largest worker."""
        size = -(-len(self.samples) // 4)
        quarters = [self.samples[start : start + size] for start in range(0, len(self.samples), max(size, 1))]
        names = ("job", "worker")
        return {name: [round(max(each[i] for each in part)) for part in quarters] for i, name in enumerate(names)}


def time_pipeline(texts: Path, folder: Path, options: argparse.Namespace, batch_size: int) -> float:
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


def check_agreement(predictions: Path, rival: Path) -> None:
    """Refuse to compare unless both sides fill the first masks alike."""
    own = (predictions / "predictions" / "part-000000.jsonl").read_text(encoding="utf-8").splitlines()
    theirs = rival.read_text(encoding="utf-8").splitlines()
    for line, other in list(zip(own, theirs, strict=False))[:CHECKED_ROWS]:
        scores = [each["probability"] for each in json.loads(line)["masks"][0]["fills"]]
        expected = [each["score"] for each in json.loads(other)]
        difference = max(abs(a - b) for a, b in zip(scores, expected, strict=True))
        assert difference < SCORE_TOLERANCE, f"probabilities differ by {difference}"


def resume_killed(texts: Path, folder: Path, options: argparse.Namespace) -> bool:
    """Kill a job when half of its blocks are done, resume it, and compare its output with the undisturbed one."""
    output, half = folder / "killed", len(list((folder / "predictions" / ".blocks").iterdir())) // 2
    process = subprocess.Popen(make_command(texts, output, options))
    while len(list(output.glob(".blocks/*.json"))) < half:
        assert process.poll() is None, "the job ended before it was killed"
        time.sleep(0.05)
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    process.wait()
    subprocess.run(make_command(texts, output, options), check=True)
    return _hash_parts(output) == _hash_parts(folder / "predictions")


def _hash_parts(output: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((output / "predictions").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def print_result(job: dict[str, Any], rivals: dict[int, float], options: argparse.Namespace) -> None:
    """Print rows per second and ratios, and write them as JSON."""
    print(f"{'':<36}{'rows/s':>9}{'ours / rival':>14}")
    print(f"{'domext predict':<36}{job['rows_per_second']:>9.1f}")
    for size, rate in rivals.items():
        print(f"{f'transformers.pipeline, batches of {size}':<36}{rate:>9.1f}{job['rows_per_second'] / rate:>14.2f}")
    print(f"peak MB by quarter: job {job['memory_mb']['job']}, largest worker {job['memory_mb']['worker']}")
    if options.kill:
        print(f"killed halfway and resumed: the output is {'equal' if job['resumed_is_equal'] else 'another'}")
    results = [Measured("domext predict", "rows/s", [job["rows_per_second"]])]
    results += [Measured(f"pipeline, batches of {size}", "rows/s", [rate]) for size, rate in rivals.items()]
    figures = {"ratio": job["rows_per_second"] / max(rivals.values()), "job": job}
    case = {name: getattr(options, name) for name in ("model", "rows", "words", "workers")}
    write_records(options, [Record("predict", case, results, figures)], torch.device("cpu"))
