"""Banks of adapters that were never trained: adapters and heads are drawn, so that each answers otherwise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from domext_ray.model.domext.configuration_domext import complete_adapter
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS, ROUTER_SKIPS
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import ARCHITECTURES

SIZES = {"bottleneck_size": 4}
TAGS = ("O", "B-Drug", "I-Drug", "B-Gene", "I-Gene")
CLASSES = ("good", "bad", "neither")


def add_drawn(
    bank: AdapterBank,
    name: str,
    architecture: str,
    seed: int,
    labels: Sequence[str] = (),
    routed_id: int = -1,
    problem_type: str | None = None,
    sizes: dict[str, int] = SIZES,
) -> None:
    """Add an adapter to a bank; with `routed_id`, the router knows texts that have this token."""
    config: Any = copy.deepcopy(bank.base.config)
    config.adapters = {"own": complete_adapter("own", sizes, config.num_hidden_layers)}
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
        config.problem_type = problem_type
    generator = torch.Generator().manual_seed(seed)
    model: Any = ARCHITECTURES[architecture](config)
    model.load_state_dict(bank.base.tensors, strict=False)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key not in bank.base.tensors:
                param.copy_(0.5 * torch.randn(param.shape, generator=generator))
    if routed_id >= 0:
        num_words = config.base_vocab_size
        table = torch.full((num_words + ROUTER_PAIRS,), -10_000, dtype=torch.int32)
        table[num_words:] = 0
        table[:5] = ROUTER_SKIPS
        table[routed_id] = 1_000_000
        model.bert.set_router("own", table, 0.0)
    bank.add(name, model.eval(), "own")


def make_bank(folder: Path, base: str) -> AdapterBank:
    """A bank of two fillers, two taggers and two classifiers; those with a 1 know texts with the word "gene"."""
    bank = AdapterBank.create(folder, base)
    from transformers import AutoTokenizer

    gene = AutoTokenizer.from_pretrained(bank.base.folder).convert_tokens_to_ids("gene")
    for number in (1, 2):
        routed = gene if number == 1 else -1
        add_drawn(bank, f"fills{number}", "masked_lm", number, routed_id=routed)
        add_drawn(bank, f"tags{number}", "token_classification", 10 + number, TAGS, routed)
        add_drawn(bank, f"sorts{number}", "sequence_classification", 20 + number, CLASSES, routed)
    return bank
