"""The files that let sentence-transformers load an export as a model that turns texts into vectors.

Enters: an export's folder, and how it pools. Leaves, in the folder: modules.json, sentence_bert_config.json and
1_Pooling/config.json, with the names that versions 2 to 6 of the library read. An export with code of its own needs
`SentenceTransformer(folder, trust_remote_code=True)`.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from domext_ray.config.shared import Pooling
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.storage import Place, parse_json

_POOLING_FILE = Path("1_Pooling", "config.json")


def write_vector_layout(folder: Path, config: DomextConfig, pooling: Pooling) -> None:
    """Describe the encoder of an export that is being written, and its pooling, to sentence-transformers."""
    modules = {"Transformer": "", "Pooling": str(_POOLING_FILE.parent)}
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(modules.items())
    ]
    ways = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "", "mean_sqrt_len_tokens": ""}
    pools = {f"pooling_mode_{name}": pooling == way for name, way in ways.items()}
    (folder / _POOLING_FILE).parent.mkdir(exist_ok=True)
    for name, values in (
        ("modules.json", listed),
        ("sentence_bert_config.json", {"max_seq_length": config.max_row_length, "do_lower_case": False}),  # tokenizer
        (_POOLING_FILE, {"word_embedding_dimension": config.hidden_size, **pools}),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_pooling(folder: Path) -> Pooling:
    """Return how an export, or a base that has such files, makes vectors; the mean where nothing says."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        values = parse_json(Place(folder / _POOLING_FILE).read_bytes())
        if isinstance(values, dict) and (values.get("pooling_mode_cls_token") or values.get("pooling_mode") == "cls"):
            return "cls"
    return "mean"
