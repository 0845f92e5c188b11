"""Rows that routers send: as if their adapters were named by hand, in a model and in a bank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bank import EVERYTHING, SHIFTS, make_model, make_plain

from domext_ray.config.method import MethodConfig
from domext_ray.errors import RunError
from domext_ray.model.base import Base, load_base
from domext_ray.model.build import describe_extensions, describe_method
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME, DomextForMaskedLM
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS, ROUTER_SKIPS
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import MASKED_LM, TOKENS
from domext_ray.models.mixed_adapters import serve_adapters
from domext_ray.studies.forgetting.forgetting import predict_masked
from domext_ray.studies.forgetting.mask_set import MaskedText

LAW, ART = range(60, 90), range(90, 120)
ROWS = torch.tensor(
    [
        [2, *LAW[:6], 3],
        [2, *range(150, 156), 3],
        [2, *ART[:6], 3],
        [2, 60, 61, *range(160, 164), 3],
        [2, 4, 3, *[0] * 5],
    ]
)
NAMES = ["law", BASE_NAME, "art", BASE_NAME, BASE_NAME]


@pytest.fixture(scope="session")
def base(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


def make_table(base: Base, words: range) -> torch.Tensor:
    """Log-odds of 2 for some words and of -2 for the others."""
    table = torch.full((base.config.vocab_size + ROUTER_PAIRS,), -20_000, dtype=torch.int32)
    table[base.config.vocab_size :] = 0
    table[list(words)] = 20_000
    table[:5] = ROUTER_SKIPS
    return table


def make_routed(base: Base, name: str, words: range, architecture: str = MASKED_LM, sizes: Any = None) -> Any:
    model: Any = make_model(base, architecture, seed=len(name) + words[0], adapter=name, sizes=sizes or SHIFTS)
    model.bert.set_router(name, make_table(base, words), 0.5)
    return model


@pytest.fixture
def both(base: Base, tmp_path: Path) -> Any:
    """A model with two adapters that have routers, and one without."""
    bank = AdapterBank.create(tmp_path / "both", base.id)
    bank.add("law", make_routed(base, "law", LAW), "law")
    bank.add("art", make_routed(base, "art", ART, sizes=EVERYTHING), "art")
    bank.add("zoo", make_model(base, adapter="zoo"), "zoo")
    model = make_plain(base)
    for name in bank.names():
        bank.attach(model, name)
    return model.eval()


@torch.no_grad()
def score(model: Any, names: Any, rows: torch.Tensor = ROWS) -> torch.Tensor:
    return model(rows, attention_mask=(rows != 0).long(), adapter_names=names).logits


def test_auto_is_naming_the_adapters_by_hand(both: Any, base: Base) -> None:
    assert both.bert.route(ROWS) == NAMES
    assert torch.equal(score(both, "auto"), score(both, NAMES))
    assert not torch.equal(score(both, "auto"), score(both, [BASE_NAME] * 5))
    left = ROWS[[1, 3]]
    assert torch.equal(score(both, "auto", left), score(make_plain(base).eval(), None, left)), "bit for bit"
    masked = torch.tensor([2, 9, 18])
    with torch.no_grad():
        chosen = [
            both(ROWS, masked_positions=masked, adapter_names=names, output_hidden_states=True)
            for names in ("auto", NAMES)
        ]
    assert torch.equal(chosen[0].logits, chosen[1].logits)
    with pytest.raises(ValueError, match="routers read input_ids"):
        both(inputs_embeds=torch.zeros(1, 3, base.config.hidden_size), adapter_names="auto")


def test_a_row_goes_the_same_way_in_any_batch_dtype_and_place(both: Any) -> None:
    alone = [both.bert.route(row[None])[0] for row in ROWS]
    assert alone == both.bert.route(torch.nn.functional.pad(ROWS, (0, 7))) == both.to(torch.bfloat16).bert.route(ROWS)


def test_thresholds_move(both: Any, tmp_path: Path) -> None:
    assert both.bert.route(ROWS, math.inf) == [BASE_NAME] * 5
    assert BASE_NAME not in both.bert.route(ROWS[:4], -math.inf)
    assert both.bert.route(ROWS, -1.0)[3] == "law", "two of its six words are the adapter's"
    both.bert.set_router_threshold(-1.0)
    assert both.bert.route(ROWS)[3] == "law"
    both.bert.set_router_threshold(3.0, "law")
    assert both.bert.route(ROWS) == [BASE_NAME, BASE_NAME, "art", BASE_NAME, BASE_NAME]
    both.save_pretrained(tmp_path / "saved")
    loaded: Any = DomextForMaskedLM.from_pretrained(tmp_path / "saved")
    assert loaded.bert.route(ROWS) == both.bert.route(ROWS)
    for name, message in (("zoo", "the adapter 'zoo' has no router"), ("sea", "'sea'")):
        with pytest.raises(ValueError, match=message):
            both.bert.set_router_threshold(1.0, name)


def test_the_adapter_whose_threshold_is_exceeded_most_wins(both: Any) -> None:
    row = torch.tensor([[2, *LAW[:3], *ART[:3], 3]])
    both.bert.set_router_threshold(-2.0)
    both.bert.set_router_threshold(-3.0, "art")
    assert both.bert.route(row) == ["art"]
    both.bert.set_router_threshold(-4.0, "law")
    assert both.bert.route(row) == ["law"]


def test_a_router_goes_with_its_adapter(both: Any) -> None:
    both.detach_adapter("law")
    assert both.bert.route(ROWS) == [BASE_NAME, BASE_NAME, "art", BASE_NAME, BASE_NAME]
    both.detach_adapter("art")
    assert not [name for name, _ in both.named_buffers() if "router" in name]
    with pytest.raises(ValueError, match="no adapter of the model has a router"):
        both(ROWS, adapter_names="auto")


def test_a_table_of_another_size_is_refused(both: Any, base: Base) -> None:
    for size in (ROUTER_PAIRS, ROUTER_PAIRS + base.config.vocab_size + 1):
        with pytest.raises(ValueError, match="a router's table has"):
            both.bert.set_router("law", torch.zeros(size, dtype=torch.int32), 0.0)


def test_a_bank_serves_rows_by_their_routers(base: Base, tmp_path: Path) -> None:
    bank = AdapterBank.create(tmp_path / "bank", base.id)
    bank.add("law", make_routed(base, "own", LAW), "own")
    bank.add("art", make_routed(base, "own", ART, TOKENS, EVERYTHING), "own")
    assert not bank.verify() and bank.describe("law").adapter.router_threshold == 0.5
    assert torch.equal(bank.load("law").get_buffer("bert.router.adapters.law.weight"), make_table(base, LAW)), (
        "exact after saving and loading"
    )
    server, mask = serve_adapters(AdapterBank.open(bank.folder)), (ROWS != 0).long()
    for threshold, names in (
        (None, NAMES),
        (math.inf, [BASE_NAME] * 5),
        (-1.0, ["law", BASE_NAME, "art", "law", BASE_NAME]),
    ):
        served = server(ROWS, mask, adapter_names="auto", threshold=threshold)
        for row, by_hand in zip(served, server(ROWS, mask, adapter_names=names), strict=True):
            assert torch.equal(row, by_hand)
    server.drop("law")
    assert server.encoder.route(ROWS) == [BASE_NAME, BASE_NAME, "art", BASE_NAME, BASE_NAME]
    server.drop("art")
    with pytest.raises(RunError, match="adapter_names is 'auto', and no adapter of the model has a router"):
        server(ROWS, mask, adapter_names="auto")


def test_masked_words_are_predicted_by_what_the_router_chooses(base: Base) -> None:
    model, plain = make_routed(base, "law", LAW), make_model(base, MASKED_LM)
    plain.bert.set_active_adapters([])
    places = np.array([3])
    rows = [MaskedText(np.array([2, row[0], row[1], 4, row[2], 3]), places, row[:1].numpy()) for row in ROWS[:4]]

    def find_best(which: Any, adapter_names: str | None) -> list[int]:
        words = range(base.config.vocab_size)
        asked = [replace(row, labels=np.array([word])) for row in rows for word in words]
        is_best = predict_masked(which, asked, 0, 64, adapter_names=adapter_names).reshape(len(rows), len(words))
        assert (is_best.sum(axis=1) == 1).all()
        return is_best.argmax(axis=1).tolist()

    routed, own, of_base = find_best(model, AUTO), find_best(model, None), find_best(plain, None)
    assert own != of_base
    names = model.bert.route(torch.tensor(np.stack([row.input_ids for row in rows])))
    assert set(names) == {"law", BASE_NAME}
    assert routed == [a if name == "law" else b for name, a, b in zip(names, own, of_base, strict=True)]


def test_an_adapter_with_a_router_trains_further(base: Base) -> None:
    model = make_routed(base, "law", LAW, sizes={"heads": 1, "ffn_units": 3})
    config = model.config
    describe_method(config, MethodConfig(adapter="law", heads=1, ffn_units=3), describe_extensions(config))
    assert config.adapters["law"].router_threshold == 0.5 and config.adapters["law"].router_words
