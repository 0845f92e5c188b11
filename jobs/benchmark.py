"""Measure the cost of the library against other ways to do the same work: `python jobs/benchmark.py VERB`.

- `step`: a training step of a method against a rival's, with the same weights, batch and precision. `--against` chooses
  the rival: the method's own (the paper's equations as written; AdapterHub's library for bottlenecks, in the
  environment of `--rival_python`; transformers' Trainer with peft for LoRA), transformers' own model, or this library's
  full training. It needs no Ray.
- `card`: the performance of a card in five minutes: products, attention, the work per element, steps of all methods,
  the kernels of a step, and torch.compile. It writes a JSON line for each, and needs no Ray.
- `memory`: the peak memory of a method's training against full training's, and against the figure of a dry run.
- `finetune`: fine-tuning against transformers' Trainer on the same rows.
- `parity`: the scores of both after training to the end, with several seeds.
- `predict`: prediction of many texts against transformers.pipeline.
- `serve`: traffic to a served bank, and to Ray Serve's own way of serving many models.
- `overhead`: steps of a real job (Ray Train, Ray Data, DeepSpeed) against a bare PyTorch loop over the same batches.
- `read`: rows per second and core of the tasks that read for training, against `datasets` and transformers' collator.
- `e2e`: minutes that a job takes until held-out text costs a number of bits per character, start and tokenisation
  included, against transformers' Trainer training all weights on the same text.
- `starts`: seconds that a user waits for the first step, for a resumed or a finished run, for a dry run, a
  fine-tuning, a prediction, a server, a mistake; `--against` adds those of another checkout.

Sides take turns, because a shared machine drifts. Ratios are medians of the turns' ratios, with minimum and maximum.
Every verb prints a table and writes a JSON file per case. `--publish` also writes it into .github/benchmarks. From them
`python jobs/benchmark.py tables` makes the tables of the documents; `--check` names the stale ones.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.output import describe_command
from benchmarks.timing import configure_allocator

from domext_ray.errors import ConfigError
from domext_ray.runtime.stopping import exit_on_user_error

NATURAL = "warmup threads card_seconds checked_answers base_layers seconds".split()
"""Whole numbers that may be 0; the others must be 1 or more."""
EXTENSIONS: dict[str, Any] = {
    "heads": 1,
    "ffn_units": 1024,
    "module_hidden_size": 252,
    "module_ffn_size": 1024,
    "new_words": 17_748,
    "bottleneck_size": 64,
    "lora_rank": 8,
    "lora_targets": "query,value",
    "dropout": 0.0,
}
"""Sizes of the methods' extensions where nothing is said."""


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options; a number that is too small is a ConfigError."""
    parser = argparse.ArgumentParser(description="Measure what the library costs.")
    verbs = parser.add_subparsers(required=True)
    for name, (run, about, add) in VERBS.items():
        verb = verbs.add_parser(name, help=about)
        verb.set_defaults(run=run, device="cpu")
        add(verb)
        if name != "tables":
            verb.add_argument("--output", default="runs/benchmark", help="folder of the JSON files")
        if name not in ("tables", "card"):
            verb.add_argument("--publish", action="store_true", help="write them into .github/benchmarks, too")
    options = parser.parse_args(args)
    options.command = describe_command(sys.argv[1:] if args is None else args)
    for name, value in vars(options).items():
        least = 0 if name in NATURAL else 1
        numbers = [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]
        if name != "stages" and min(numbers, default=least) < least:
            raise ConfigError(f"--{name} is {value}; it must be {least} or more.")
    return options


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of the models and batches of `step` and `memory`."""
    from benchmarks.steps import BASES

    parser.add_argument("--bases", nargs="+", choices=BASES, default=["bert-base"], help="shapes, of random weights")
    parser.add_argument("--layers", type=int, help="layers, instead of the base's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of a row")
    parser.add_argument("--tokens", type=int, help="tokens of a step, about; default: 1,024, on a card 32,768")
    parser.add_argument("--heads", type=int, help="AF Adapter: extra heads per layer")
    parser.add_argument("--ffn_units", type=int, help="AF Adapter: extra FFN units per layer")
    parser.add_argument("--module_hidden_size", type=int, help="exBERT: width of the extension modules")
    parser.add_argument("--module_ffn_size", type=int, help="exBERT: FFN units of the extension modules")
    parser.add_argument("--new_words", type=int, help="exBERT: words in addition to the base's 30,522")
    parser.add_argument("--bottleneck_size", type=int, help="bottleneck: width of the two in each layer")
    parser.add_argument("--lora_rank", type=int, help="LoRA: rank")
    parser.add_argument("--lora_targets", help="LoRA: matrices, as in --method.lora_targets")
    parser.add_argument("--dropout", type=float, help="dropout of hidden states and attention weights")
    parser.set_defaults(**EXTENSIONS)
    add_machine(parser, precision=None)


def add_machine(parser: argparse.ArgumentParser, precision: str | None = "fp32") -> None:
    """Add how a side computes."""
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=precision, help="bf16: autocast")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's own choice")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options of `step`."""
    from benchmarks.steps import METHODS, RIVALS

    add_sizes(parser)
    parser.add_argument("--methods", nargs="+", choices=("all", *METHODS), default=["af"])
    parser.add_argument("--against", choices=RIVALS, default="own", help="the rival; own: each method's own")
    parser.add_argument("--rival_python", default="", help="bottleneck: interpreter with AdapterHub's library")
    parser.add_argument("--repeats", type=int, default=5, help="turns of both sides")
    parser.add_argument("--warmup", type=int, default=5, help="turns before those; of each run of Trainer, steps")
    parser.add_argument(
        "--steps", type=int, help="steps of a turn, without waits between them; default: 1, on a card 10"
    )
    parser.add_argument("--processes", type=int, default=1, help="time in this many new processes, and report medians")
    parser.add_argument("--as_worker", action="store_true", help="all compute like a job's workers: allocator, kernels")


def add_card(parser: argparse.ArgumentParser) -> None:
    """Add the options of `card`."""
    from benchmarks.card import BLOCKS

    seconds = sum(share for share, _ in BLOCKS.values())
    parser.add_argument("--only", nargs="+", choices=BLOCKS, default=[*BLOCKS], help="blocks; all others are left out")
    parser.add_argument(
        "--seconds", type=int, default=seconds, help="limit of all blocks; those without time are named"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: with --quick alone")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which show whether it runs")
    parser.set_defaults(**{**EXTENSIONS, "new_words": 10_000}, precision="bf16")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the options of `memory`."""
    from benchmarks.steps import METHODS

    add_sizes(parser)
    trained = [method for method in METHODS if method not in ("frozen", "af_kept")]
    parser.add_argument("--methods", nargs="+", choices=trained, default=["af"])
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0], help="of ZeRO")
    parser.add_argument("--ranks", type=int, default=1, help="processes of one group")
    parser.add_argument("--accumulation_steps", type=int, default=1, help="micro batches of a step")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument(
        "--keep_freed", action="store_true", help="do not change glibc's allocator, which keeps freed blocks"
    )


def add_finetune(parser: argparse.ArgumentParser) -> None:
    """Add the options of `finetune`."""
    add_entities(parser)
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn")
    add_machine(parser)


def add_parity(parser: argparse.ArgumentParser) -> None:
    """Add the options of `parity`."""
    add_entities(parser)
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each side")
    parser.add_argument("--lr", type=float, default=5e-4, help="peak learning rate of both")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--max_length", type=int, default=64, help="tokens of a row at most")
    add_machine(parser)


def add_entities(parser: argparse.ArgumentParser) -> None:
    """Add what `finetune` and `parity` train."""
    parser.add_argument("--task", default="code_entities", help="ner, or a described set of that family")
    parser.add_argument("--data", default="", help="folder of the set; empty: code_entities, which ships")
    parser.add_argument("--model", default="general-mini", help="a BERT without extensions")
    parser.add_argument("--batch_size", type=int, default=32, help="rows of a step")


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the options of `predict`."""
    parser.add_argument("--model", default="general-mini", help="a BERT without extensions")
    parser.add_argument("--rows", type=int, default=4000, help="texts that the job predicts")
    parser.add_argument("--rival_rows", type=int, default=2000, help="texts that the pipeline predicts, the first ones")
    parser.add_argument("--words", type=int, default=24, help="words of a text at most")
    parser.add_argument("--workers", type=int, default=2, help="workers of the job, threads of the pipeline")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 16, 64], help="of the pipeline")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="tokens of a batch of the job")
    parser.add_argument("--kill", action="store_true", help="kill a second job halfway, resume it, compare the output")
    parser.add_argument("--folder", default="", help="where texts and predictions go; empty: a temporary folder")


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
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


def add_overhead(parser: argparse.ArgumentParser) -> None:
    """Add the options of `overhead`."""
    parser.add_argument("--steps", type=int, default=480, help="steps of the job and of the loop")
    parser.add_argument("--window", type=int, default=20, help="steps of the job, then of the loop, in turn")
    about = "layers of a base of BERT-base width; 0: the job's own base"
    parser.add_argument("--base_layers", type=int, default=0, help=about)
    parser.add_argument("--as_worker", action="store_true", help="the loop computes as a job's workers do")
    parser.add_argument("--cache_dir", default="", help="folder of prepared corpora; empty: prepare anew")
    parser.add_argument("job_options", nargs="*", help="options of the job, after --, such as -- --base BASE")


def add_read(parser: argparse.ArgumentParser) -> None:
    """Add the options of `read`."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of a row, at most")
    parser.add_argument("--rows", type=int, default=16_384, help="rows of the text")
    parser.add_argument("--repeats", type=int, default=5, help="timed tasks of 1,024 rows")
    about = "rows per second that a card takes: an H200 of 512 tokens"
    parser.add_argument("--card_rows", type=int, default=2_000, help=about)
    parser.add_argument("--card_seconds", type=int, default=30, help="for how long")


def add_end_to_end(parser: argparse.ArgumentParser) -> None:
    """Add the options of `e2e`."""
    parser.add_argument("--text", default="package-docs", help="the text, as --corpus of a job names it")
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-3, 2e-3], help="peak learning rates of our runs")
    parser.add_argument("--rival_rates", type=float, nargs="*", default=[1e-4, 3e-4, 1e-3], help="and of the rival's")
    parser.add_argument("--rival_dropout", type=float, help="the rival's dropout; default: that of our runs")
    parser.add_argument("--target", type=float, help="bits per character; default: the rival's best at its end")
    parser.add_argument("--runs", default="runs/benchmark/e2e-runs.json", help="file of the runs that were made")
    parser.add_argument("job_options", nargs="*", help="options of our runs, after --, such as -- --base BASE")


def add_starts(parser: argparse.ArgumentParser) -> None:
    """Add the options of `starts`."""
    from benchmarks.starts import STARTS

    about = "folder of another checkout, such as of the code before a change; empty: none"
    parser.add_argument("--against", default="", help=about)
    parser.add_argument("--only", nargs="+", choices=STARTS, default=[*STARTS], help="starts; all others are left out")
    parser.add_argument("--repeats", type=int, default=3, help="turns of both sides, each in fresh folders")


def add_tables(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tables`."""
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 2 where a table is stale")


VERBS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "step": ("steps.run_step", "a training step against a rival's", add_step),
    "card": ("card.run_card", "what a card does, in five minutes", add_card),
    "memory": ("memory.run_memory", "peak memory against full training, and against a dry run", add_memory),
    "finetune": ("training.run_finetune", "fine-tuning against transformers' Trainer", add_finetune),
    "parity": ("training.run_parity", "F1 of fine-tuning against transformers' Trainer", add_parity),
    "predict": ("inference.run_predict", "many texts against transformers.pipeline", add_predict),
    "serve": ("inference.run_serving", "many adapters against Ray Serve's one per batch", add_serve),
    "overhead": ("training.run_overhead", "Ray and DeepSpeed against a bare PyTorch loop", add_overhead),
    "read": ("training.run_reading", "rows per second and core against transformers' collator", add_read),
    "e2e": ("training.run_end_to_end", "minutes to a loss against transformers' Trainer", add_end_to_end),
    "starts": ("starts.run_starts", "seconds until each kind of job does something", add_starts),
    "tables": ("output.run_tables", "make the documents' tables from .github/benchmarks", add_tables),
}
"""What runs, what it is and its options, by verb."""


def run(options: argparse.Namespace) -> None:
    """Run a verb, whose module is imported now: a card needs no Ray."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda'; this machine has no CUDA device, so it must be cpu.")
    if getattr(options, "as_worker", False):
        configure_allocator()
    module, function = options.run.split(".")
    getattr(importlib.import_module(f"benchmarks.{module}"), function)(options)


def main() -> None:
    """Run one verb."""
    with exit_on_user_error():
        run(parse_options())


if __name__ == "__main__":
    main()
