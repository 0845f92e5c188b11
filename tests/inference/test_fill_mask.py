"""Fills of masks are those of transformers' own pipeline; long texts are read around each mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import as_rebuilt
from made_banks import make_bank
from transformers import pipeline

from domext_ray.config.inference import PredictConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.export.model_folder import export_model
from domext_ray.inference.fill_mask import FillMask
from domext_ray.inference.predictors import find_model, load_predictor
from domext_ray.model.base import load_base
from domext_ray.models.source import open_model
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

TEXTS = [
    "the doctor read a [MASK] in the house .",
    "[MASK]",
    "no mask here",
    "water [MASK] the [MASK], and a [MASK]book",
    "the patient was given a drug , and the group was well after the study . they [MASK] back .",
]


def load(folder: Path, **options: Any) -> Any:
    config = PredictConfig(model=str(folder), input="a", output="b", **options)
    return load_predictor(find_model(open_model(config.model), config), config, torch.device("cpu"))


def fill(predictor: Any, texts: list[str]) -> list[Any]:
    examples = [predictor.make_example({"text": each}, "text") for each in texts]
    return [each["masks"] for each in predictor.predict(examples).records]


@pytest.mark.parametrize("base", ["tiny_base_folder", "tiny_roberta_folder"])
def test_fills_are_those_of_transformers(base: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(base)
    theirs = pipeline("fill-mask", model=str(folder), device="cpu", top_k=3)
    for batch_tokens in (1, 40, 4096):
        own = fill(load(folder, top_k=3, batch_tokens=batch_tokens), TEXTS)
        for text, masks in zip(TEXTS, own, strict=True):
            if not masks:
                assert text == TEXTS[2]
                continue
            expected: Any = theirs(text.replace("[MASK]", theirs.tokenizer.mask_token))
            expected = expected if isinstance(expected[0], list) else [expected]
            assert [[each["token"] for each in mask["fills"]] for mask in masks] == [
                [each["token_str"] for each in mask] for mask in expected
            ]
            found = torch.tensor([[each["probability"] for each in mask["fills"]] for mask in masks])
            scores = torch.tensor([[each["score"] for each in mask] for mask in expected])
            torch.testing.assert_close(found, scores, atol=2e-6, rtol=1e-4)
            assert [text[mask["start"] : mask["end"]] for mask in masks] == ["[MASK]"] * len(masks)


def test_a_model_is_asked_by_its_own_name_of_a_mask_too(tiny_roberta_folder: Path) -> None:
    predictor = load(tiny_roberta_folder)
    own, usual = fill(predictor, ["the doctor read a <mask> .", "the doctor read a [MASK] ."])
    assert own[0]["fills"] == usual[0]["fills"] and own[0]["end"] == usual[0]["end"]


def test_a_long_text_is_read_around_each_mask(tiny_base_folder: Path) -> None:
    predictor: FillMask = load(tiny_base_folder, max_length=12)
    words = "the doctor gave some water to a patient and then read the book by day".split() * 3
    for places in ([0], [20], [44], [3, 30]):
        text = " ".join("[MASK]" if i in places else word for i, word in enumerate(words))
        found = fill(predictor, [text])[0]
        for place, mask in zip(places, found, strict=True):
            start = min(max(0, place - 5), len(words) - 10)
            window = " ".join("[MASK]" if i == place else word for i, word in enumerate(words))
            alone = fill(predictor, [" ".join(window.split()[start : start + 10])])[0]
            assert mask["fills"] == alone[0]["fills"]


def test_other_special_tokens_in_a_text_are_text(tiny_base_folder: Path) -> None:
    predictor = load(tiny_base_folder)
    example = predictor.make_example({"text": "a [SEP] b [MASK]"}, "text")
    ids = predictor.encode([example])[0].input_ids.tolist()
    assert ids.count(predictor.tokenizer.sep_token_id) == 1 and ids.count(predictor.tokenizer.mask_token_id) == 1


def test_more_fills_than_entries_are_all_entries(tiny_base_folder: Path) -> None:
    predictor = load(tiny_base_folder, top_k=10_000)
    fills = fill(predictor, ["a [MASK]"])[0][0]["fills"]
    assert len(fills) == len(predictor.tokenizer)
    assert sum(each["probability"] for each in fills) == pytest.approx(1, abs=1e-3)


def test_a_router_says_who_reads_a_text_unless_it_is_told_not_to(tiny_base_folder: Path, tmp_path: Path) -> None:
    base = load_base(str(tiny_base_folder))
    model = make_bank(tmp_path / "bank", str(tiny_base_folder)).load("fills1")  # its router knows the word gene
    export_model(as_rebuilt(model, base, load_tokenizer(base.folder), PretrainConfig()), Place(tmp_path / "routed"))
    texts = ["the gene [MASK] a", "water [MASK] the patient"]
    alone = fill(load(tiny_base_folder), texts)
    adapted = fill(load(tmp_path / "routed", router=False), texts)
    assert all(own != base_s for own, base_s in zip(adapted, alone, strict=True))
    for batch_tokens in (1, 4096):
        routed = fill(load(tmp_path / "routed", batch_tokens=batch_tokens), texts)
        for found, expected in zip(routed, (adapted[0], alone[1]), strict=True):
            assert [each["token"] for each in found[0]["fills"]] == [each["token"] for each in expected[0]["fills"]]
    card = (tmp_path / "routed" / "README.md").read_text()
    assert 'adapter_names="auto"' in card
    assert fill(load(f"{tmp_path / 'bank'}:fills1"), texts) == adapted, "who names an adapter means it"
