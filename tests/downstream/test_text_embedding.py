"""Embeddings for recall: the mean of a frozen encoder's states, whatever stands beside a text in its batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from domext_ray.downstream.start_model import load_start_model
from domext_ray.downstream.text_embedding import MeanEmbedding


def test_an_embedding_is_the_mean_of_transformers_states(tiny_base_folder: Path) -> None:
    texts = ["heart disease", "the cold water of the river", "cell"]
    found = MeanEmbedding(load_start_model(str(tiny_base_folder)))(texts)
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_base_folder), AutoModel.from_pretrained(tiny_base_folder)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            states = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state
        np.testing.assert_allclose(vector, states[0].mean(dim=0), atol=1e-5)
