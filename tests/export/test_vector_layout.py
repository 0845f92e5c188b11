"""An export is a sentence-transformers model: its vectors are this library's, to 1e-5."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_runs import as_rebuilt
from tiny_layouts import TINY_LAYOUTS

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ObjectiveConfig, PrepareConfig, PretrainConfig
from domext_ray.config.shared import Pooling
from domext_ray.export.card import build_card
from domext_ray.export.model_folder import export_model
from domext_ray.model.base import load_base
from domext_ray.model.spec import ModelSpec
from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

TEXTS = ["the old house was very cold", "a river", "blood and heart", "protein " * 300, "the cell"]
METHODS = {
    "heads": MethodConfig(heads=1, ffn_units=8),
    "bottlenecks": MethodConfig(name="bottleneck", heads=0, ffn_units=0, bottleneck_size=8),
    "full": MethodConfig(name="full", trains="all", heads=0, ffn_units=0),
}


def export(base_folder: Path, method: MethodConfig, pooling: Pooling, folder: Path) -> Path:
    """Export a model whose trained tensors have moved."""
    base = load_base(str(base_folder))
    config = PretrainConfig(base=str(base_folder), method=method, objective=ObjectiveConfig(pooling=pooling))
    model: Any = ModelSpec(base, method, dropout=0.1).build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    export_model(as_rebuilt(model, base, load_tokenizer(base_folder), config), Place(folder))
    return folder


def test_an_export_says_how_a_text_becomes_a_vector(tiny_base_folder: Path, tmp_path: Path) -> None:
    """One with a folder inside is replaced like any other."""
    poolings: list[tuple[Pooling, str]] = [("mean", "pooling_mode_mean_tokens"), ("cls", "pooling_mode_cls_token")]
    for pooling, name in poolings:
        folder = export(tiny_base_folder, METHODS["heads"], pooling, tmp_path / "export")
        modules = json.loads((folder / "modules.json").read_text())
        assert [module["path"] for module in modules] == ["", "1_Pooling"]
        values = json.loads((folder / "1_Pooling" / "config.json").read_text())
        assert values["word_embedding_dimension"] == 32
        assert [key for key, value in values.items() if value is True] == [name]


def test_the_card_of_a_model_of_vectors_says_how_to_get_them(tiny_base_folder: Path) -> None:
    base = load_base(str(tiny_base_folder))
    objective = ObjectiveConfig(kind="infonce", views="crop", pooling="cls")
    pairs = {"infonce_loss": (2.0, 1.0), "infonce_accuracy": (0.5, 0.75)}
    domain = {name: {"before": before, "after": after} for name, (before, after) in pairs.items()}
    summary = {"domain": domain, "train": {"tokens": 1000}}
    for method, code in (("heads", ", trust_remote_code=True"), ("full", "")):
        config = PretrainConfig(base=str(tiny_base_folder), method=METHODS[method], objective=objective)
        model = ModelSpec(base, config.method, dropout=0.1).build()
        run = as_rebuilt(model, base, load_tokenizer(tiny_base_folder), config)
        card = build_card(run, summary)
        assert f'SentenceTransformer("PATH_OF_THIS_FOLDER"{code})' in card
        assert "loss (nats per row) | 2.000 | 1.000 |" in card and "75.0%" in card
        assert "telling vectors of the same text from those of others (InfoNCE" in card
        assert "its first token's state" in card and "masked-lm" not in card
    pair = PrepareConfig(pair=("title", "body"))
    of_pairs = replace(config, prepare=pair, objective=replace(objective, views="dropout"))
    assert "telling vectors of two texts that belong together from" in build_card(
        replace(run, config=of_pairs), summary
    )


@pytest.mark.jobs
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["bert", "roberta", *TINY_LAYOUTS])
def test_sentence_transformers_gives_the_same_vectors(
    layout: str,
    method: str,
    pooling: Pooling,
    tiny_base_folder: Path,
    tiny_roberta_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "sentence-transformers, with which exports are compared, is not installed"
    library: Any = pytest.importorskip("sentence_transformers", reason=reason)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))  # transformers copies an export's code below it
    folders = {"bert": tiny_base_folder, "roberta": tiny_roberta_folder}
    source = folders.get(layout) or TINY_LAYOUTS[layout].save(tmp_path / layout)
    folder = export(source, METHODS[method], pooling, tmp_path / "export")
    model = library.SentenceTransformer(str(folder), trust_remote_code=method != "full", device="cpu")
    theirs = model.encode(TEXTS)
    start = open_model(str(folder)).load()
    embed = TextEmbedding(start, pooling=pooling, max_length=start.config.max_row_length)
    np.testing.assert_allclose(embed(TEXTS), theirs, atol=1e-5, rtol=0)
    lengths = np.linalg.norm(replace(embed, normalize=True)(TEXTS), axis=1)
    np.testing.assert_allclose(lengths, 1.0, atol=1e-6)
