"""A kind of model takes one class: a made-up one is registered, and whatever a user does with it works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from finetuned_models import finetune_here
from labelled_fixtures import dump_lines, write
from safetensors.torch import load_file, save_file

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.finetune import FinetuneConfig, GridConfig, LabelledConfig, PlaceConfig
from domext_ray.config.inference import PredictConfig
from domext_ray.errors import BaseModelError
from domext_ray.files import read_json
from domext_ray.inference.embed import load_embedding, plan_embedding
from domext_ray.inference.fill_mask import FillMask
from domext_ray.inference.predict import plan_prediction
from domext_ray.inference.predictors import load_predictor
from domext_ray.models import source
from domext_ray.models.masked_lm import load_masked_lm
from domext_ray.models.source import KINDS, Source, open_model
from domext_ray.models.start import StartModel
from domext_ray.serving.served_model import find_single_model
from domext_ray.storage import Place


class Mean(Source):
    """The mean of models of one shape: a folder with their names."""

    what, instead = "a mean of models", "one of them"

    def is_one(self) -> bool:
        return (self.folder / "mean.txt").is_file()

    def read(self, step: int, scale: float) -> StartModel:
        names = (self.folder / "mean.txt").read_text().split()
        starts = [open_model(name, self.option).load(scale=scale) for name in names]
        tensors = {name: torch.stack([own.tensors[name] for own in starts]).mean(dim=0) for name in starts[0].tensors}
        return replace(starts[0], id=self.id, kind="mean", tensors=tensors)


def test_a_kind_takes_one_class(tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "KINDS", (Mean, *KINDS))
    other, word_states = tmp_path / "other", "bert.embeddings.word_embeddings.weight"
    other.mkdir()
    for file in tiny_base_folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = load_file(other / "model.safetensors")
    save_file({name: 3 * tensor for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    write(tmp_path / "both/mean.txt", f"{tiny_base_folder}\n{other}\n")
    model = str(tmp_path / "both")

    start = open_model(model).load()
    torch.testing.assert_close(start.tensors[word_states], 2 * tensors[word_states])
    masked_lm, tokenizer = load_masked_lm(model)
    torch.testing.assert_close(masked_lm.state_dict()[word_states], 2 * tensors[word_states])

    write(tmp_path / "texts.txt", f"the {tokenizer.mask_token} and the sun\n")
    asked = PredictConfig(model=model, input=str(tmp_path / "texts.txt"), output=str(tmp_path / "found"))
    predictor = load_predictor(plan_prediction(asked).model, asked, torch.device("cpu"))
    assert isinstance(predictor, FillMask)
    torch.testing.assert_close(predictor.model.state_dict()[word_states], 2 * tensors[word_states])
    embedding = EmbedConfig(model=model, input=asked.input, output=str(tmp_path / "vectors"))
    assert plan_embedding(embedding).config.model == model
    assert load_embedding(embedding, "cpu")(["the sun"]).any()

    for split in ("train", "dev", "test"):
        rows = [{"text": f"the {word} and the sun", "label": word} for word in ("cat", "drug", "water")]
        write(tmp_path / f"set/{split}.jsonl", dump_lines(rows))
    run = finetune_here(
        FinetuneConfig(
            task="classification",
            data=str(tmp_path / "set"),
            model=model,
            run=PlaceConfig(name="tuned", dir=str(tmp_path)),
            grid=GridConfig(lr=(5e-3,), epochs=(1.0,), batch_size=(8,), restarts=1),
            labelled=LabelledConfig(max_length=16, stride=0),
        )
    )
    assert read_json(Place(run) / "summary.json", "")["model"]["kind"] == "mean"
    with pytest.raises(BaseModelError, match="is a mean of models; give one of them"):
        find_single_model(model)
