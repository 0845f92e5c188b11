"""The verb that makes vectors of texts: embed."""

from __future__ import annotations

from domext_ray.commands.early import check_text
from domext_ray.commands.job import Job
from domext_ray.config.embedding import EmbedConfig


def _embed(config: EmbedConfig) -> None:
    from domext_ray.inference.embed import run_embedding

    run_embedding(config)


EMBED = Job(
    "embed",
    """Make a vector of each of any number of texts, on a pool of workers.

    domext embed --model runs/notes-vectors --input 'notes/*.txt' --output vectors
    domext embed --model general-mini --input notes.jsonl --layers 2-4 --normalize true --output vectors
    domext embed --model runs/notes-vectors --input s3://bucket/notes --format npy --output vectors
    domext embed --model banks/clinic:notes --input 'notes/*.txt' --output vectors

The model is a run, an export, an adapter of a bank (BANK:NAME), a base or a hub id, the input as for domext predict.
The output has predictions/, Parquet files with id and vector, or vectors.npy and ids.jsonl, in the input's order;
malformed.jsonl, which names every row that could not be read; and summary.json. The same command goes on with the
blocks that are missing.""",
    EmbedConfig,
    _embed,
    main=(
        *("model", "input", "output", "field", "pooling", "layers", "normalize", "max_length", "format", "batch_size"),
        *("scale.workers", "scale.use_gpu", "dry_run"),
    ),
    check=lambda config: check_text("input", config.input),
)
