"""The verbs that take trained models further: compare, compare_runs, export and bank."""

from __future__ import annotations

import sys
from pathlib import Path

from domext_ray.commands.early import check_text
from domext_ray.commands.job import Job
from domext_ray.config.jobs import BankConfig, CompareConfig, ExportConfig, StudyConfig
from domext_ray.config.presets import find_preset
from domext_ray.options.declare import require
from domext_ray.storage import Place
from domext_ray.training.tracking import check_trackers


def _compare(config: StudyConfig) -> None:
    from domext_ray.study.arms import read_presets
    from domext_ray.study.study import run_study

    run_study(config, read_presets(find_preset(COMPARE.preset)))


def _check_study(config: StudyConfig) -> None:
    check_trackers(config.run)
    check_text("corpus", config.corpus)


COMPARE = Job(
    "compare",
    """Compare methods with one trainable budget and one training time, several seeds each.

    domext compare --seconds 90                            # the small base and corpus that ship
    domext compare --base BASE --corpus 'texts/*.txt' --methods full,lora,af,bottleneck --budget 0.17 \\
        --seconds 600 --seeds 3 --run.name study
    domext compare --corpus 'texts/*.txt' --replay.corpus general.txt --methods full,full_kept,af_words \\
        --rates 3e-4,1e-3,3e-3 --retention 'other/*.txt' --seconds 600
    domext compare --tokens 1000000 --presets '{exbert: {vocab: {size: 5000}}}' --dry_run true

Makes RUN.DIR/RUN.NAME with a run for each method and seed, comparison.md, comparison.png and results.json: bits per
character gained on held-out text of the domain against points of general accuracy lost. Every run ends at rate 0 when
its --seconds or --tokens are spent. The same command goes on where it stopped; more --methods, --budgets or --seeds may
come later. Each method is options of a training job under a name: in the preset compare, in a file of your own
(--config, `presets:`), or in --presets. Methods whose presets have objective.keep, keep_weight or replay read the
general text of --replay.corpus, and no other method does.""",
    StudyConfig,
    _compare,
    "compare",
    main=(
        *("base", "corpus", "methods", "budget", "budgets", "seconds", "tokens", "seeds", "rates", "retention"),
        *("replay.corpus", "presets", "train.global_batch_size", "train.seq_length", "scale.num_workers"),
        *("scale.use_gpu", "run.name", "run.dir", "dry_run"),
    ),
    unused=("train.max_", "train.long_", "optim.lr", "optim.schedule", "optim.decay_steps"),
    check=_check_study,
)


def _compare_runs(config: CompareConfig) -> None:
    from domext_ray.downstream.finetune import comparison as finetuning
    from domext_ray.report.compare import choose_runs, draw_comparison, read_run, tabulate_runs
    from domext_ray.report.plots import check_picture

    folders = choose_runs(config.runs)
    picture = Path(config.output).expanduser()
    check_picture(picture)
    if any(finetuning.is_finetuned(each) for each in folders):
        finetuned = [finetuning.read_finetuned(each) for each in folders]
        finetuning.check_comparable(finetuned)
        lines = finetuning.compare_finetuned(finetuned)
        finetuning.draw_finetuned(finetuned, lines, picture)
        table = finetuning.tabulate_finetuned(finetuned, lines)
    else:
        runs = [read_run(each) for each in folders]
        draw_comparison(runs, picture)
        table = tabulate_runs(runs)
    print(table.show(config.format))
    print(f"\npicture: {config.output}", file=sys.stderr if config.format == "latex" else sys.stdout)


COMPARE_RUNS = Job(
    "compare_runs",
    """Compare finished runs: pre-training runs on one corpus, or models fine-tuned on one labelled set.

    domext compare_runs --runs runs/af,runs/exbert,runs/bert --output comparison.png
    domext compare_runs --runs runs/base-ner,runs/af-ner,runs/exbert-ner --output ner.png
    domext compare_runs --runs runs/base-ner,runs/af-ner --format latex > table.tex

Pre-training: bits per character and forgetting over training seconds. Fine-tuning: the set's metric with 95 % intervals
over documents and restarts, and paired differences to the first run. The table is Markdown, or with --format latex one
for the package booktabs.""",
    CompareConfig,
    _compare_runs,
    found=("runs",),
)


def _export(config: ExportConfig) -> None:
    from domext_ray.export.push import describe_push, push_export

    folder = _find_finetuned(config) if config.push else None
    if folder is None:
        folder = _export_run(config)
    print(f"export: {folder}")
    if not config.push:
        return
    if config.push_now:
        print(f"uploaded: {push_export(folder, config.push, is_private=config.push_private)}")
    else:
        print(describe_push(folder, config.push, is_private=config.push_private))


def _locate(text: str) -> Path | Place:
    place = Place(text)
    return Path(text).expanduser() if place.is_local else place


def _export_run(config: ExportConfig) -> Path | Place:
    """Export a pre-training run's newest checkpoint, and return the folder."""
    import torch

    from domext_ray.export.adapter_folders import export_adapterhub, export_peft
    from domext_ray.export.folder import check_target
    from domext_ray.export.model_folder import export_run
    from domext_ray.training.rebuild import rebuild_run

    run_dir = _locate(config.run)
    folder = _locate(config.output) if config.output else run_dir / config.folder_name
    if config.format == "huggingface":
        export_run(run_dir, folder, getattr(torch, config.dtype))
        return folder
    check_target(folder, config.format)
    run = rebuild_run(run_dir)
    if config.format == "peft":
        export_peft(run, folder)
    else:
        export_adapterhub(run, config.adapter or run.config.method.adapter, folder)
    return folder


def _find_finetuned(config: ExportConfig) -> Path | Place | None:
    """Return the export that a fine-tuning run has made, or that --run itself is; None for a pre-training run."""
    from domext_ray.downstream.finetune.comparison import is_finetuned
    from domext_ray.export.folder import is_export

    place = _locate(config.run)
    if not is_export(place) and not (isinstance(place, Path) and is_finetuned(place)):
        return None
    for option, default in (("output", ""), ("format", "huggingface"), ("dtype", "float32")):
        value = getattr(config, option)
        require(value == default, option, value, f"left out with --push: {place} is exported already")
    return place if is_export(place) else place / "export"


EXPORT = Job(
    "export_hf",
    """Export a run's newest checkpoint for use without this library.

    domext export_hf --run runs/af                          # the model, for torch and transformers alone
    domext export_hf --run runs/af --output ~/models/clinic-bert
    domext export_hf --run runs/bottleneck --format adapterhub    # the bottlenecks, for AdapterHub's library
    domext export_hf --run runs/lora --format peft                # the updates, for peft
    domext export_hf --run runs/af --push ORG/NAME                # says what the hub would get; nothing leaves
    domext export_hf --run runs/af-ner --push ORG/NAME --push_now true    # uploads it, private

The token for the hub comes from the environment variable HF_TOKEN. A fine-tuned run has its export already: that is
pushed as it is, and so is an export whose folder is given as --run.""",
    ExportConfig,
    _export,
    found=("run",),
)


def _keep_adapters(config: BankConfig) -> None:
    from domext_ray.adapters.bank_job import run_bank

    run_bank(config)


BANK = Job(
    "bank",
    """Keep many trained adapters over one frozen base in one folder: add, remove, verify, list.

    domext bank --bank bank --add runs/clinic --name clinic    # makes the bank if there is none
    domext bank --bank bank                                    # lists it
    domext bank --bank bank --verify true                      # compares every file with its hash
    domext bank --bank bank --remove clinic

A run's adapter (--method.heads, ffn_units or bottleneck_size beside a frozen base) is what a bank holds, of a run that
was fine-tuned beside a frozen base with its head and its task. Adding one writes new files only. In Python,
domext_ray.AdapterBank also loads adapters, attaches them to a model in memory, and serves batches whose rows use
different ones.""",
    BankConfig,
    _keep_adapters,
    found=("add",),
)
