"""Measure what the library costs against the obvious way of doing the same.

`python jobs/benchmark.py step` times a training step (forward, backward, AdamW) of one method's model against a rival
with the same weights, batch and precision. Repetitions alternate between the two, because a shared machine drifts;
medians and their ratio are printed and written as JSON. `--method` says which:

- af, exbert: the paper's equations as written (benchmarks/rivals.py), attention without a fused kernel, the vocabulary
  projection at every position; for AF Adapter, frozen and trainable weights concatenated into one matrix;
- bottleneck: AdapterHub's library (benchmarks/rivals_adapters.py), in a process of another environment
  (--rival_python);
- lora: transformers' Trainer with peft (benchmarks/rivals_trainer.py), which makes whole runs, as this library's engine
  then does.

`python jobs/benchmark.py methods` times a step of every method of this library in turn, as shares of continued
pre-training, in which all weights train.

`python jobs/benchmark.py gpu` does so on a card, on BERT-base, BERT-large and ModernBERT-base, beside transformers' own
model: tokens per second, MFU, peak memory and host gaps. It needs no Ray.

`python jobs/benchmark.py keep` times a step in which a quarter of the rows ask the base what it predicts
(--objective.keep kl) against the same step without.

`python jobs/benchmark.py memory` measures the peak memory of training a method against that of full training, at the
same batch.

`python jobs/benchmark.py plan` compares what a dry run says of a rank's memory with what training takes, for four
methods at ZeRO 0, 2 and 3.

`python jobs/benchmark.py finetune` times fine-tuning against transformers' Trainer on the same rows.

`python jobs/benchmark.py predict` times prediction of many texts against transformers.pipeline.

`python jobs/benchmark.py serve` sends traffic to a bank that is served, and to Ray Serve's own way of
serving many models.

`python jobs/benchmark.py overhead` times the steps of a real job (Ray Train, Ray Data, DeepSpeed) against a bare
PyTorch loop over the same batches of the same corpus, whose losses must agree.

`python jobs/benchmark.py read` counts the masked, padded rows a second and core of the tasks that read for training,
against `datasets` and transformers' collator.

`python jobs/benchmark.py e2e` measures the minutes that a job takes until held-out text costs a number of bits per
character, start and tokenisation included, against transformers' Trainer training all weights on the same text.

Every verb writes a JSON file per case, with every repetition. `--publish` writes it into .github/benchmarks, too, from
which `python jobs/benchmark.py tables` makes the tables of the documents; `--check` says whether one is stale.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from benchmarks.as_worker import configure_allocator
from benchmarks.end_to_end import add_end_to_end_options, run_end_to_end
from benchmarks.finetune import add_finetune_options, run_finetune
from benchmarks.gpu import add_gpu_options, run_gpu
from benchmarks.keeping import run_keeping
from benchmarks.memory import add_memory_options, add_plan_options, run_memory, run_plan
from benchmarks.methods import run_methods
from benchmarks.output import add_output_options
from benchmarks.overhead import run_overhead
from benchmarks.predicting import add_predict_options, run_predict
from benchmarks.profiling import run_profile
from benchmarks.reading import run_reading
from benchmarks.serving import add_serving_options, run_serving_benchmark
from benchmarks.steps import PAIRINGS, run_step
from benchmarks.tables import run_tables

from domext_ray.errors import ConfigError
from domext_ray.runtime.stopping import exit_on_user_error

POSITIVE = (
    "layers tokens heads ffn_units module_hidden_size bottleneck_size lora_rank new_words repeats processes steps "
    "lengths batch_size rows rival_rows workers batch_sizes batch_tokens "
    "adapters clients answers words texts overload port ranks accumulation_steps card_rows card_seconds"
).split()


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Measure what the library costs.")
    verbs = parser.add_subparsers(required=True)
    step = verbs.add_parser("step", help="a training step against a rival's")
    step.set_defaults(run=run_step)
    step.add_argument("--method", choices=tuple(dict.fromkeys(method for _, method in PAIRINGS)), default="af")
    step.add_argument("--rival_python", default="", help="bottleneck: interpreter that has AdapterHub's library")
    step.add_argument("--steps", type=int, default=5, help="lora: timed steps of a run")
    step.add_argument("--processes", type=int, default=1, help="time in so many new processes, of which medians count")
    step.add_argument(
        "--compile",
        choices=("none", "ours", "both"),
        default="none",
        help="af, exbert: torch.compile the layers, ours alone or the rival's, too",
    )
    profile = verbs.add_parser("profile", help="what the time of a training step goes to, by kind of operation")
    profile.set_defaults(run=run_profile)
    profile.add_argument("--method", choices=("af", "exbert", "bottleneck", "lora", "full"), default="af")
    methods = verbs.add_parser("methods", help="a training step of every method, as shares of continued pre-training")
    methods.set_defaults(run=run_methods)
    keep = verbs.add_parser("keep", help="a training step that keeps to the base's predictions against one without")
    keep.set_defaults(run=run_keeping)
    memory = verbs.add_parser("memory", help="peak memory of training a method, against full training")
    memory.set_defaults(run=run_memory, as_worker=False)
    add_memory_options(memory)
    plan = verbs.add_parser("plan", help="what a dry run says of memory, against what training takes")
    plan.set_defaults(run=run_plan, as_worker=False)
    add_plan_options(plan)
    gpu = verbs.add_parser("gpu", help="every method on a card, beside transformers' own model")
    gpu.set_defaults(run=run_gpu)
    for each in (step, profile, methods, keep, memory, plan):
        add_base(each)
    for each in (step, profile, methods, keep, memory, plan, gpu):
        add_sizes(each)
    add_gpu_options(gpu)
    for each in (step, profile, methods, keep):
        each.add_argument("--as_worker", action="store_true", help="all compute as a job's workers: allocator, kernels")
    finetune = verbs.add_parser("finetune", help="fine-tuning against transformers' Trainer")
    finetune.set_defaults(run=run_finetune)
    add_finetune_options(finetune)
    predict = verbs.add_parser("predict", help="prediction of many texts against transformers.pipeline")
    predict.set_defaults(run=run_predict, device="cpu")
    add_predict_options(predict)
    serve = verbs.add_parser("serve", help="mixed batches of many adapters against Ray Serve's one adapter per batch")
    serve.set_defaults(run=run_serving_benchmark, device="cpu")
    add_serving_options(serve)
    overhead = verbs.add_parser("overhead", help="Ray, Ray Data and DeepSpeed against a bare PyTorch loop")
    overhead.set_defaults(run=run_overhead, device="cpu")
    overhead.add_argument("--steps", type=int, default=480, help="steps of the job and of the loop")
    overhead.add_argument("--window", type=int, default=20, help="steps of the job, then of the loop, in turn")
    overhead.add_argument(
        "--base_layers", type=int, default=0, help="layers of a base of BERT-base width; 0: the job's own base"
    )
    overhead.add_argument("--as_worker", action="store_true", help="the loop computes as a job's workers do")
    overhead.add_argument("--cache_dir", default="", help="folder of prepared corpora; empty: prepare anew")
    add_output_options(overhead)
    overhead.add_argument("job_options", nargs="*", help="options of the job, after --, such as -- --base BASE")
    read = verbs.add_parser("read", help="rows a second and core of reading tasks against transformers' collator")
    read.set_defaults(run=run_reading, device="cpu")
    read.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of a row, at most")
    read.add_argument("--rows", type=int, default=16_384, help="rows of the text")
    read.add_argument("--repeats", type=int, default=5, help="timed tasks of 1,024 rows")
    read.add_argument(
        "--card_rows", type=int, default=2_000, help="rows a second that a card takes: an H200 of 512 tokens"
    )
    read.add_argument("--card_seconds", type=int, default=30, help="for how long")
    add_output_options(read)
    end_to_end = verbs.add_parser("e2e", help="minutes to a number of bits per character against transformers' Trainer")
    end_to_end.set_defaults(run=run_end_to_end, device="cpu")
    add_end_to_end_options(end_to_end)
    tables = verbs.add_parser("tables", help="make the documents' tables from .github/benchmarks")
    tables.set_defaults(run=run_tables, device="cpu")
    tables.add_argument("--check", action="store_true", help="write nothing; exit with 2 where a table is stale")
    options = parser.parse_args(args)
    check_options(options)
    return options


def check_options(options: argparse.Namespace) -> None:
    """Refuse values outside their rules.

    Raises:
        ConfigError: a number is too small.
    """
    for name in POSITIVE:
        value = getattr(options, name, 1)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ConfigError(f"--{name} is {value}; it must be 1 or more.")
    if getattr(options, "warmup", 0) < 0:
        raise ConfigError(f"--warmup is {options.warmup}; it must be 0 or more.")


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ConfigError: there is no CUDA.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda'; this machine has no CUDA device, so it must be cpu.")


def add_base(parser: argparse.ArgumentParser) -> None:
    """Add the options of a base of BERT-base width."""
    parser.add_argument("--layout", choices=("bert", "modernbert"), default="bert", help="layout of the base")
    parser.add_argument("--layers", type=int, default=12, help="layers of BERT-base width")
    parser.set_defaults(hidden_size=768)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of the models and batches that are timed."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step, about")
    parser.add_argument("--heads", type=int, default=1, help="AF Adapter: extra heads per layer")
    parser.add_argument("--ffn_units", type=int, default=1024, help="AF Adapter: extra FFN units per layer")
    parser.add_argument("--module_hidden_size", type=int, default=252, help="exBERT: width of the extension modules")
    parser.add_argument("--module_ffn_size", type=int, default=1024, help="exBERT: FFN units of the extension modules")
    parser.add_argument("--new_words", type=int, default=17_748, help="exBERT: words beside the base's 30,522")
    parser.add_argument("--bottleneck_size", type=int, default=64, help="bottleneck: width of the two in each layer")
    parser.add_argument("--lora_rank", type=int, default=8, help="LoRA: rank")
    parser.add_argument("--lora_targets", default="query,value", help="LoRA: matrices, as in --method.lora_targets")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout of hidden states and attention weights")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each model (lora: runs)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those (lora: of each run)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's own choice")
    add_output_options(parser)


def main() -> None:
    """Run one verb."""
    with exit_on_user_error():
        options = parse_options()
        check_device(options.device)
        if getattr(options, "as_worker", False):
            configure_allocator()
        options.run(options)


if __name__ == "__main__":
    main()
