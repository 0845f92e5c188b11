"""The verbs that put trained models to use: export hf, bank, predict, embed and serve; and verify and env."""

from __future__ import annotations

import importlib.util
from typing import Any

from domext_ray.commands.early import check_layers, check_length, check_rows, check_set, check_text
from domext_ray.commands.job import Job
from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.inference import FILL_MASK, PredictConfig
from domext_ray.config.jobs import BankConfig, EnvConfig, ExportConfig, VerifyConfig
from domext_ray.config.options.declare import require
from domext_ray.config.options.submitted import NAMES, require_lasting
from domext_ray.config.serve import ServeConfig
from domext_ray.errors import ConfigError
from domext_ray.storage import Place
from domext_ray.text.data.names import describe_near, find_near


def _export(config: ExportConfig) -> None:
    from domext_ray.export.push import describe_push, push_export

    run = Place(config.run)
    folder = (_find_export(config, run) if config.push else None) or _export_run(config, run)
    print(f"export: {folder}")
    if config.push_now:
        print(f"uploaded: {push_export(folder, config.push, is_private=config.push_private)}")
    elif config.push:
        print(describe_push(folder, config.push, is_private=config.push_private))


def _find_export(config: ExportConfig, run: Place) -> Place | None:
    """Return the export that a fine-tuning run has made, or that --run itself is; None: it is a pre-training run."""
    from domext_ray.export.folder import is_export
    from domext_ray.runs.run_directory import TRAININGS

    if not is_export(run) and not (run / TRAININGS).is_dir():
        return None
    for option, default in (("output", ""), ("format", "huggingface"), ("dtype", "float32"), ("scale", 1.0)):
        value = getattr(config, option)
        require(value == default, option, value, f"left out with --push: {config.run} is exported already")
    return run if is_export(run) else run / "export"


def _export_run(config: ExportConfig, run: Place) -> Place:
    """Export a pre-training run's newest checkpoint, or any model as a graph, and return the folder."""
    if not config.output:
        require_lasting("run", config.run, "given with --output")
    if config.format == "onnx":
        from domext_ray.inference.onnx_export import export_onnx

        return export_onnx(config)

    import torch

    from domext_ray.export.adapter_folders import export_adapterhub, export_peft
    from domext_ray.export.folder import check_target
    from domext_ray.export.model_folder import export_run
    from domext_ray.training.start import rebuild_run

    folder = Place(config.output) if config.output else run / config.folder_name
    if config.format == "huggingface":
        export_run(run, folder, getattr(torch, config.dtype), config.scale)
        return folder
    check_target(folder, config.format)
    rebuilt = rebuild_run(run)
    if config.format == "peft":
        export_peft(rebuilt, folder, config.scale)
    else:
        export_adapterhub(rebuilt, config.adapter or rebuilt.config.method.adapter, folder, config.scale)
    return folder


EXPORT = Job(
    "export hf",
    """Export a run's newest checkpoint for use without this library.

    domext export hf --run runs/af                          # the model, for torch and transformers alone
    domext export hf --run runs/af --output ~/models/clinic-bert
    domext export hf --run runs/af --scale 0.7 --output clinic-70     # less of the domain, more of the base
    domext export hf --run runs/bottleneck --format adapterhub    # the bottlenecks, for AdapterHub's library
    domext export hf --run runs/lora --format peft                # the updates, for peft
    domext export hf --run runs/clinic-ner --format onnx          # a graph for onnxruntime alone
    domext export hf --run runs/af --push ORG/NAME                # prints what the hub would get; sends nothing
    domext export hf --run runs/af-ner --push ORG/NAME --push_now true    # uploads it, private

The token for the hub comes from the environment variable HF_TOKEN. The export of a fine-tuned run, or an export's
folder given as --run, is pushed unchanged.""",
    ExportConfig,
    _export,
)


def _check_bank(config: BankConfig) -> None:
    if config.add or config.remove:
        require_lasting("bank", config.bank)
    if not config.add and not Place(config.bank).exists():
        hint = describe_near(find_near(config.bank)) or "give a folder that domext bank made, or --add a run."
        raise ConfigError(f"--bank names {config.bank!r}, which does not exist; {hint}")


BANK = Job(
    "bank",
    """Keep many trained adapters over one frozen base in one folder: add, remove, verify, list.

    domext bank --bank bank --add runs/clinic --name clinic    # makes the bank if there is none
    domext bank --bank bank                                    # lists it
    domext bank --bank bank --verify true                      # compares every file with its hash
    domext bank --bank bank --remove clinic

A bank holds adapters of runs with a frozen base (--method.heads, ffn_units or bottleneck_size). An adapter that was
fine-tuned brings its head and its task. Adding one only writes new files. In Python, domext_ray.AdapterBank also loads
adapters, attaches them to a model in memory, and serves batches whose rows use different ones.""",
    BankConfig,
    "commands.bank:run_bank",
    check=_check_bank,
)


def _check_input(config: PredictConfig) -> None:
    from domext_ray.inference.submission import check_submission

    check_submission(config.submission, config.task)
    has_text = config.task == FILL_MASK or config.field != "text" or config.model in NAMES
    if config.submission or (config.task == "" and not has_text):  # the model says which fields it reads
        check_text("input", config.input)
    elif config.task in ("", FILL_MASK):
        check_rows(config.input, config.field, config.block_rows)
    else:
        check_set(config.task, config.input, "input")
    check_length(config)


def _check_embedding(config: EmbedConfig) -> None:
    check_rows(config.input, config.field, config.block_rows)
    check_layers(config)


PREDICT = Job(
    "predict",
    """Predict with a model on any number of texts, on a pool of workers.

    domext predict --model runs/clinic --input 'notes/*.txt' --output filled    # fills every [MASK]
    domext predict --model runs/clinic-ner --input notes.jsonl --field body --output found
    domext predict --model bank:clinic --input s3://bucket/notes --output filled --format jsonl
    domext predict --model runs/clinic-ner --task ner --input labelled --output scored    # its test split
    domext predict --model runs/qnli --input QNLI/test.tsv --submission QNLI.tsv --output sent   # for GLUE

A fine-tuned run or its export does its own task. A pre-training run, another export or a base fills masks. BANK:NAME is
an adapter of a bank. The input is text with a text per line, JSONL, CSV, TSV (all may be gzipped) or Parquet. The
output has predictions/, one row per input row in the input's order, malformed.jsonl, which names every unreadable row,
and summary.json. The same command resumes with the missing blocks.""",
    PredictConfig,
    "inference.predict:run_prediction",
    check=_check_input,
)

EMBED = Job(
    "embed",
    """Make a vector of each text, for any number of texts, on a pool of workers.

    domext embed --model runs/notes-vectors --input 'notes/*.txt' --output vectors
    domext embed --model general-mini --input notes.jsonl --layers 2-4 --normalize true --output vectors
    domext embed --model runs/notes-vectors --input s3://bucket/notes --format npy --output vectors
    domext embed --model banks/clinic:notes --input 'notes/*.txt' --output vectors

The model is a run, an export, an adapter of a bank (BANK:NAME), a base or a hub id. The input is that of domext
predict. The output has predictions/, Parquet files with id and vector, or vectors.npy and ids.jsonl, in the input's
order; malformed.jsonl, which names every unreadable row; and summary.json. The same command resumes with the missing
blocks.""",
    EmbedConfig,
    "inference.embed:run_embedding",
    check=_check_embedding,
)


def _check_extra(config: ServeConfig) -> None:
    """Refuse to begin without Ray Serve's own requirements."""
    for name in ("fastapi", "uvicorn", "starlette"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'domext serve needs {name}, which is not installed: pip install "domext_ray[serve]".')


SERVE = Job(
    "serve",
    """Answer over HTTP with a bank's adapters: fill masks, classify, find entities, embed; a page at / shows them.

    domext serve --bank bank                                    # http://127.0.0.1:8000/, all adapters
    domext serve --bank bank --adapters clinic,law --replicas 2 --token_file token
    domext serve --bank bank --dry_run true                     # checks everything, starts nothing
    domext serve --model runs/clinic-ner                        # one model

Requests of different clients for different adapters share a pass through one encoder. Each text of a request may name
its own adapter, "__base__", or "auto" (the adapters' routers choose), and each answer names it. The server follows
changes of the bank (domext bank) without a restart. Requests carry a token (Authorization: Bearer). /openapi.json
describes all endpoints, and /metrics serves Prometheus. At Ctrl-C or SIGTERM it answers open requests, then ends.""",
    ServeConfig,
    "serving.serve:run_serving",
    main=(
        *("bank", "adapters", "model", "host", "port", "token_file", "replicas", "max_length"),
        *("limit.queue", "scale.threads", "drain_seconds", "dry_run"),
    ),
    check=_check_extra,
)

VERIFY = Job(
    "verify",
    """Identify a run, a corpus, a vocabulary, a bank or an export, and check all of its files for damage.

    domext verify runs/af
    domext verify s3://bucket/runs/af/export
    domext verify banks/clinic

It reads sizes, hashes, the headers of tensors and JSON, and changes nothing. Exit code 0: undamaged; 2: damaged, with a
sentence per damage, or not one of these folders.""",
    VerifyConfig,
    "commands.verify:run_verify",
    word="path",
)

ENV = Job(
    "env",
    """Report what a job would find here: versions, devices, kernels, room, hub, the cluster of RAY_ADDRESS, storage.

    domext env
    domext env --run.dir s3://bucket/runs --json > env.json

It sends the hub one HEAD request without a name, and waits three seconds for the answer.""",
    EnvConfig,
    "commands.env:run_env",
    reads=("json", "run.dir"),
)

JOBS: tuple[Job[Any], ...] = (EXPORT, BANK, PREDICT, EMBED, SERVE, VERIFY, ENV)
