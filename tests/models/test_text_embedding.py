"""Embeddings for recall: the mean of a frozen encoder's states, whatever stands beside a text in its batch."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from domext_ray.models import text_embedding
from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding


def test_an_embedding_is_the_mean_of_transformers_states(tiny_base_folder: Path) -> None:
    texts = ["heart disease", "the cold water of the river", "cell"]
    found = TextEmbedding(open_model(str(tiny_base_folder)).load())(texts)
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_base_folder), AutoModel.from_pretrained(tiny_base_folder)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            states = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state
        np.testing.assert_allclose(vector, states[0].mean(dim=0), atol=1e-5)


def test_the_windows_of_a_text_are_averaged_over_their_tokens(tiny_base_folder: Path) -> None:
    texts = ["the cold water of the river " * 5, "cell", "", "heart disease of the dog and the cat " * 3]
    start = open_model(str(tiny_base_folder)).load()
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_base_folder), AutoModel.from_pretrained(tiny_base_folder)
    many, few = (TextEmbedding(start, max_length=12, long_texts="windows", batch_size=size) for size in (64, 2))
    found, is_cut = many.embed(texts)
    assert not is_cut.any()
    assert TextEmbedding(start, max_length=12).embed(texts)[1].tolist() == [True, False, False, True]
    np.testing.assert_allclose(found, few(texts), atol=1e-5)
    for text, vector in zip(texts, found, strict=True):
        ids, states = tokenizer(text, add_special_tokens=False)["input_ids"], []
        for first in range(0, max(1, len(ids)), 10):
            row = [tokenizer.cls_token_id, *ids[first : first + 10], tokenizer.sep_token_id]
            with torch.no_grad():
                states.append(model.eval()(torch.tensor([row])).last_hidden_state[0])
        np.testing.assert_allclose(vector, torch.cat(states).mean(dim=0), atol=1e-5)
    unit = TextEmbedding(start, "cls", normalize=True, max_length=12, long_texts="windows")(texts)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, atol=1e-5)


def test_the_encoder_is_made_once(tiny_base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = text_embedding.build_encoder
    monkeypatch.setattr(text_embedding, "build_encoder", lambda *args: made.append(args) or build(*args))
    embed = TextEmbedding(open_model(str(tiny_base_folder)).load())
    size = len(pickle.dumps(embed))
    first, again = (embed(["heart disease"]) for _ in range(2))
    assert len(made) == 1 and np.array_equal(first, again)
    assert len(pickle.dumps(embed)) < 1.1 * size, "what Ray carries to the trainings is the tensors alone"
