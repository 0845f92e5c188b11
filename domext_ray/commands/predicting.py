"""The verb that puts a model to work on files: predict."""

from __future__ import annotations

from domext_ray.commands.early import check_text
from domext_ray.commands.job import Job
from domext_ray.config.inference import FILL_MASK, PredictConfig


def _predict(config: PredictConfig) -> None:
    from domext_ray.inference.predict import run_prediction

    run_prediction(config)


def _check_input(config: PredictConfig) -> None:
    if config.task in ("", FILL_MASK):  # else it is a labelled set's folder
        check_text("input", config.input)


PREDICT = Job(
    "predict",
    """Predict with a model on any number of texts, on a pool of workers.

    domext predict --model runs/clinic --input 'notes/*.txt' --output filled    # fills every [MASK]
    domext predict --model runs/clinic-ner --input notes.jsonl --field body --output found
    domext predict --model bank:clinic --input s3://bucket/notes --output filled --format jsonl
    domext predict --model runs/clinic-ner --task ner --input labelled --output scored    # its test split
    domext predict --model runs/qnli --input QNLI/test.tsv --submission QNLI.tsv --output sent   # for GLUE

The model is a fine-tuning run or its export, which does its own task, or a pre-training run, an export or a base, which
fills masks; BANK:NAME is an adapter of a bank. The input is text, a text a line, JSONL, CSV, TSV (all may be gzipped)
or Parquet. The output has predictions/, one row per input row in the input's order, malformed.jsonl, which names every
row that could not be read, and summary.json. The same command goes on with the blocks that are missing.""",
    PredictConfig,
    _predict,
    main=(
        *("model", "task", "input", "output", "field", "format", "keep_text", "top_k", "batch_tokens", "strict"),
        *("scale.workers", "scale.use_gpu", "dry_run"),
    ),
    check=_check_input,
)
