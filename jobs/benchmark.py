"""Measure what the library costs against the obvious way of doing the same.

`python jobs/benchmark.py step` times a training step (forward, backward, AdamW) of the augmented model against a rival
with the same weights, batch and precision that is written as the paper's equations stand (jobs/rivals.py): attention
without a fused kernel, the vocabulary projection at every position; for AF Adapter, frozen and trainable weights
concatenated into one matrix. Repetitions alternate between the two, because a shared machine drifts; medians and their
ratio are printed and written as JSON.

`python jobs/benchmark.py methods` times a step of every method of this library in turn, as shares of continued
pre-training, in which all weights train.

`python jobs/benchmark.py overhead` times the steps of a real job (Ray Train, Ray Data, DeepSpeed) against a bare
PyTorch loop over the same batches of the same corpus, whose losses must agree.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from rivals import AfRival, Batch, ExbertRival, Rival
from torch import Tensor, nn

from domext_ray.config import MethodConfig, ShapeConfig
from domext_ray.corpus.manifest import read_manifest, take_rows
from domext_ray.corpus.vocab import load_tokenizer
from domext_ray.errors import ConfigError, exit_on_user_error
from domext_ray.model.base import load_base
from domext_ray.model.graft import build_model, choose_attention, is_extension
from domext_ray.model.modeling_domext import DomextForMaskedLM
from domext_ray.training.metrics import read_metrics
from domext_ray.training.objective import Masker
from domext_ray.training.optimizer import compute_learning_rate
from domext_ray.training.phases import make_plan
from domext_ray.training.start import build_run_model, read_run_config

VOCAB_SIZE = 30_522
MASK_PROB = 0.15
LOSS_TOLERANCE = 1e-3
OVERHEAD_TOLERANCE = 0.02  # bf16 losses over tens of steps
METHODS = {
    "full": "continued pre-training",
    "af": "AF Adapter",
    "exbert": "exBERT",
    "frozen": "frozen base, forward only",
}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of training steps at one length.

    Args:
        length: tokens of a row.
        rows: rows of a step.
        model_seconds: every repetition of this library's model.
        rival_seconds: every repetition of the rival.
        model_cpu_seconds: processor time of the same, over all threads; other programs disturb it less.
        rival_cpu_seconds: likewise.
        loss_difference: between the two before the first step, in fp32.
    """

    length: int
    rows: int
    model_seconds: tuple[float, ...]
    rival_seconds: tuple[float, ...]
    model_cpu_seconds: tuple[float, ...]
    rival_cpu_seconds: tuple[float, ...]
    loss_difference: float

    @property
    def ratio(self) -> float:
        """How many times faster the model is, by medians."""
        return statistics.median(self.rival_seconds) / statistics.median(self.model_seconds)

    @property
    def cpu_ratio(self) -> float:
        """How many times less processor time the model takes, by medians."""
        return statistics.median(self.rival_cpu_seconds) / statistics.median(self.model_cpu_seconds)


def make_batch(rows: int, length: int, vocab_size: int, device: torch.device) -> Batch:
    """Make random rows in which 15 % of the positions are predicted."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1000, vocab_size, (rows, length), generator=generator)
    num_masked = max(1, round(MASK_PROB * ids.numel()))
    positions = torch.randperm(ids.numel(), generator=generator)[:num_masked].sort().values
    labels = ids.flatten()[positions].clone()
    all_labels = torch.full((ids.numel(),), -100)
    all_labels[positions] = labels
    ids.view(-1)[positions] = 103
    return Batch(*(each.to(device) for each in (ids, positions, labels, all_labels)))


def compute_loss(model: DomextForMaskedLM, batch: Batch) -> Tensor:
    """Return the mean loss of the predicted positions, as training computes it."""
    logits = model(batch.input_ids, masked_positions=batch.masked_positions).logits
    return F.cross_entropy(logits.float(), batch.labels)


def check_equality(model: DomextForMaskedLM, rival: Rival, batch: Batch) -> float:
    """Return how far the losses are apart in fp32 without dropout; losses and gradients must agree."""
    figures = []
    for module, loss_of in ((model, lambda: compute_loss(model, batch)), (rival, lambda: rival(batch))):
        module.eval()
        loss = loss_of()
        loss.backward()
        grads = [each.grad for each in module.parameters() if each.grad is not None]
        norm = torch.stack([each.norm() for each in grads]).norm()
        figures.append((loss.item(), norm.item(), len(grads)))
        module.zero_grad()
        module.train()
    (loss_a, norm_a, count_a), (loss_b, norm_b, count_b) = figures
    assert abs(loss_a - loss_b) < LOSS_TOLERANCE, f"losses {loss_a} and {loss_b}"
    assert abs(norm_a - norm_b) < LOSS_TOLERANCE * norm_b, f"gradient norms {norm_a} and {norm_b}"
    assert count_a == count_b, "both train the same tensors"
    return abs(loss_a - loss_b)


def make_step(
    module: nn.Module, compute: Callable[[Batch], Tensor], batch: Batch, *, bf16: bool
) -> Callable[[], tuple[float, float]]:
    """Return a function that makes one training step and returns its seconds and its processor seconds."""
    params = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01)
    device = batch.input_ids.device

    def step() -> tuple[float, float]:
        synchronize(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            loss = compute(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        return time.perf_counter() - start, time.process_time() - cpu_start

    return step


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_model(options: argparse.Namespace, method: str) -> DomextForMaskedLM:
    """Make a model of BERT-base width.

    Args:
        options: its sizes.
        method: "af" or "exbert", whose extensions train; "full", all of which trains; "frozen", nothing of which does.
    """
    shape = ShapeConfig(
        num_hidden_layers=options.layers,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=max(512, *options.lengths),
    )
    # The paper's initialisation: with a zero start the extensions would not show in the loss that is compared.
    af, exbert = method == "af", method == "exbert"
    config = MethodConfig(
        heads=options.heads if af else 0,
        ffn_units=options.ffn_units if af else 0,
        module_hidden_size=options.module_hidden_size if exbert else 0,
        module_ffn_size=options.module_ffn_size if exbert else 0,
        init="paper",
        trains="all",
    )
    new_words = [[0]] * options.new_words if exbert else []
    model = build_model(
        None, shape, config, vocab_size=VOCAB_SIZE, new_words=new_words, dropout=options.dropout, seed=0
    )
    choose_attention(model, torch.device(options.device), bf16=options.precision == "bf16")
    for name, param in model.named_parameters():
        param.requires_grad_(method == "full" or (method != "frozen" and is_extension(name)))
    return model


def measure_step(options: argparse.Namespace) -> list[StepTimes]:
    """Time both models at every length."""
    device = torch.device(options.device)
    model = make_model(options, options.method)
    model.to(device).train()  # type: ignore[arg-type]
    rival = (ExbertRival if options.method == "exbert" else AfRival)(copy.deepcopy(model)).train()
    results = []
    for length in options.lengths:
        batch = make_batch(max(1, options.tokens // length), length, model.config.vocab_size, device)
        difference = check_equality(model, rival, batch)
        bf16 = options.precision == "bf16"
        steps = (
            make_step(model, partial(compute_loss, model), batch, bf16=bf16),
            make_step(rival, rival, batch, bf16=bf16),
        )
        for _ in range(options.warmup):
            for step in steps:
                step()
        times = [[step() for step in steps] for _ in range(options.repeats)]
        (model_seconds, model_cpu), (rival_seconds, rival_cpu) = (
            zip(*each, strict=True) for each in zip(*times, strict=True)
        )
        results.append(
            StepTimes(length, batch.input_ids.shape[0], model_seconds, rival_seconds, model_cpu, rival_cpu, difference)
        )
        rival.model.load_state_dict(model.state_dict())  # the next length starts from equal weights again
    return results


def format_table(results: Sequence[StepTimes]) -> str:
    """Return the medians and their ratios as a table."""
    lines = [
        f"{'length':>6} {'rows':>5} {'model s':>9} {'rival s':>9} {'ratio':>6} {'CPU ratio':>10} {'model tokens/s':>15}"
    ]
    for each in results:
        model, rival = statistics.median(each.model_seconds), statistics.median(each.rival_seconds)
        tokens = each.length * each.rows / model
        lines.append(
            f"{each.length:>6} {each.rows:>5} {model:>9.4f} {rival:>9.4f} {each.ratio:>6.2f} {each.cpu_ratio:>10.2f} "
            f"{tokens:>15,.0f}"
        )
    return "\n".join(lines)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"torch": torch.__version__, "device": name, "threads": torch.get_num_threads(), "cpus": os.cpu_count()}


def run_step(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    if options.threads:
        torch.set_num_threads(options.threads)
    results = measure_step(options)
    print(format_table(results))
    settings = {name: value for name, value in vars(options).items() if name not in ("run", "output")}
    content = {
        "settings": settings,
        "machine": describe_machine(torch.device(options.device)),
        "results": [{**asdict(each), "ratio": each.ratio, "cpu_ratio": each.cpu_ratio} for each in results],
    }
    path = Path(options.output or f"runs/benchmark/step-{options.method}-{options.device}-{options.precision}.json")
    write_json(path, content)
    print(f"written to {path}")


def run_methods(options: argparse.Namespace) -> None:
    """Time a step of every method in turn; print and write the medians as shares of continued pre-training."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device, bf16, content = torch.device(options.device), options.precision == "bf16", []
    models = {name: make_model(options, name).to(device).train() for name in ("full", "af", "exbert")}  # type: ignore[arg-type]
    frozen = make_model(options, "frozen").to(device).train()  # type: ignore[arg-type]
    print(f"{'length':>6} {'what':<28}{'s a step':>9} {'share':>6}")
    for length in options.lengths:
        batch = make_batch(max(1, options.tokens // length), length, VOCAB_SIZE, device)
        steps = {
            name: make_step(model, partial(compute_loss, model), batch, bf16=bf16) for name, model in models.items()
        }
        steps["frozen"] = make_forward(frozen, batch, bf16=bf16)
        for _ in range(options.warmup):
            for step in steps.values():
                step()
        times = [{name: step()[0] for name, step in steps.items()} for _ in range(options.repeats)]
        medians = {name: statistics.median(each[name] for each in times) for name in steps}
        for name, seconds in medians.items():
            print(f"{length:>6} {METHODS[name]:<28}{seconds:>9.4f} {seconds / medians['full']:>6.2f}")
        content.append({"length": length, "rows": batch.input_ids.shape[0], "seconds": times, "medians": medians})
    path = Path(options.output or f"runs/benchmark/methods-{options.device}-{options.precision}.json")
    write_json(path, {"machine": describe_machine(device), "results": content})
    print(f"written to {path}")


def make_forward(model: DomextForMaskedLM, batch: Batch, *, bf16: bool) -> Callable[[], tuple[float, float]]:
    """Return a function that times the forward pass alone."""
    device = batch.input_ids.device

    @torch.no_grad()
    def forward() -> tuple[float, float]:
        synchronize(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            compute_loss(model, batch)
        synchronize(device)
        return time.perf_counter() - start, time.process_time() - cpu_start

    return forward


def run_job(run_dir: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run jobs/pretrain_af.py at its defaults for some steps; return its training records."""
    command = [sys.executable, str(Path(__file__).parent / "pretrain_af.py"), "--run.dir", str(run_dir.parent)]
    command += ["--run.name", run_dir.name, "--train.max_steps", str(options.steps), "--train.eval_rows", "32"]
    command += ["--train.eval_every", str(options.steps), "--train.checkpoint_every", str(options.steps)]
    command += ["--optim.decay_steps", "1000", "--prepare.cache_dir", options.cache_dir, *options.job_options]
    subprocess.run(command, check=True)
    return [each for each in read_metrics(run_dir / "metrics.jsonl") if "train/mlm_loss" in each]


def time_bare_loop(run_dir: Path, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Train the run's model on the run's batches without Ray or DeepSpeed; return seconds and losses of the steps."""
    config = read_run_config(run_dir)
    fingerprint = json.loads((run_dir / "identity.json").read_text(encoding="utf-8"))["corpus_fingerprint"]
    manifest = read_manifest(Path(options.cache_dir, fingerprint[:16]))
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    masker = Masker(tokenizer, config.objective, config.seed)
    plan, paths = make_plan(config, manifest), [str(manifest.folder / each.path) for each in manifest.train]
    starts = np.concatenate([[0], np.cumsum(plan.shard_rows)])
    model = build_run_model(config, load_base(config.base), run_dir / "tokenizer", config.train.dropout).train()
    choose_attention(model, torch.device("cpu"), bf16=config.engine.precision == "bf16")
    params = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in params if each.ndim >= 2], "weight_decay": config.optim.weight_decay},
        {"params": [each for each in params if each.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.optim.beta1, config.optim.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config.optim.eps, fused=True)
    seconds, losses = [], []
    for step in range(options.steps):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = compute_learning_rate(
                step, config.optim.lr, config.optim.warmup_steps, config.optim.decay_steps
            )
        shards, rows = plan.locate(0, plan.positions(np.array([step]), 0, 1).reshape(-1))
        table = take_rows(paths, shards, rows).append_column("row_id", pa.array(starts[shards] + rows))
        (batch,) = masker.collate(masker.mask(table, 0), config.train.global_batch_size)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.engine.precision == "bf16"):
            logits = model(
                batch.input_ids, attention_mask=batch.attention_mask, masked_positions=batch.masked_positions
            ).logits
        loss = F.cross_entropy(logits.float(), batch.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(params, config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def run_overhead(options: argparse.Namespace) -> None:
    """Time a job and the bare loop in turn, compare losses, print and write."""
    folder = Path(tempfile.mkdtemp(prefix="domext-benchmark-"))
    options.cache_dir = options.cache_dir or str(folder / "corpora")
    job_medians, bare_medians, waits = [], [], []
    try:
        for i in range(options.repeats):
            records = run_job(folder / f"run-{i}", options)
            seconds, losses = time_bare_loop(folder / f"run-{i}", options)
            worst = max(abs(a["train/mlm_loss"] - b) for a, b in zip(records, losses, strict=True))
            assert worst < OVERHEAD_TOLERANCE, f"the job's losses differ from the bare loop's by {worst}"
            timed = records[options.steps // 4 :]  # the first steps warm up
            job_medians.append(statistics.median(each["time/step_seconds"] for each in timed))
            bare_medians.append(statistics.median(seconds[options.steps // 4 :]))
            waits.append(
                sum(each["data/wait_seconds"] for each in records) / sum(each["time/step_seconds"] for each in records)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratios = [a / b for a, b in zip(job_medians, bare_medians, strict=True)]
    print(f"{'job s':>9} {'bare s':>9} {'ratio':>6} {'waiting':>8}")
    for row in zip(job_medians, bare_medians, ratios, waits, strict=True):
        print(f"{row[0]:>9.4f} {row[1]:>9.4f} {row[2]:>6.3f} {row[3]:>8.2%}")
    print(f"median ratio {statistics.median(ratios):.3f}; largest loss difference of the last run {worst:.1e}")
    path = Path(options.output or "runs/benchmark/overhead.json")
    write_json(path, {"job_seconds": job_medians, "bare_seconds": bare_medians, "ratios": ratios, "wait_frac": waits})
    print(f"written to {path}")


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Measure what the library costs.")
    verbs = parser.add_subparsers(required=True)
    step = verbs.add_parser("step", help="a training step against the paper's equations written down literally")
    step.set_defaults(run=run_step)
    step.add_argument("--method", choices=("af", "exbert"), default="af")
    methods = verbs.add_parser("methods", help="a training step of every method, as shares of continued pre-training")
    methods.set_defaults(run=run_methods)
    for each in (step, methods):
        add_sizes(each)
    overhead = verbs.add_parser("overhead", help="Ray, Ray Data and DeepSpeed against a bare PyTorch loop")
    overhead.set_defaults(run=run_overhead, device="cpu")
    overhead.add_argument("--steps", type=int, default=60, help="steps of a job and of the loop")
    overhead.add_argument("--repeats", type=int, default=2, help="jobs and loops, in turn")
    overhead.add_argument("--cache_dir", default="", help="folder of prepared corpora; empty: prepare anew")
    overhead.add_argument("--output", default="", help="JSON file; empty: runs/benchmark/overhead.json")
    overhead.add_argument("job_options", nargs="*", help="options of the job, after --, such as -- --base BASE")
    options = parser.parse_args(args)
    for name in ("layers", "tokens", "heads", "ffn_units", "module_hidden_size", "new_words", "repeats", "steps"):
        if getattr(options, name, 1) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}; it must be 1 or more.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda'; this machine has no CUDA device, so it must be cpu.")
    return options


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of the models and batches that are timed."""
    parser.add_argument("--layers", type=int, default=12, help="layers of BERT-base width")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step, about")
    parser.add_argument("--heads", type=int, default=1, help="AF Adapter: extra heads a layer")
    parser.add_argument("--ffn_units", type=int, default=1024, help="AF Adapter: extra FFN units a layer")
    parser.add_argument("--module_hidden_size", type=int, default=252, help="exBERT: width of the extension modules")
    parser.add_argument("--module_ffn_size", type=int, default=1024, help="exBERT: FFN units of the extension modules")
    parser.add_argument("--new_words", type=int, default=17_748, help="exBERT: words beside the base's 30,522")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout of hidden states and attention weights")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each model")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's own choice")
    parser.add_argument("--output", default="", help="JSON file; empty: a name in runs/benchmark")


def main() -> None:
    """Run one verb."""
    with exit_on_user_error():
        options = parse_options()
        options.run(options)


if __name__ == "__main__":
    main()
