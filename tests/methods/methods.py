"""The methods of the behaviour matrix (test_methods.py): a new method, or a new combination, joins by one row here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ObjectiveConfig

ALL_MATRICES = ("query", "key", "value", "attention_output", "intermediate", "output")


@dataclass(frozen=True)
class Row:
    """A method and what is expected of it.

    Args:
        name: what the table calls it.
        method: `MethodConfig` on the tiny base (2 layers, 32 wide, 4 heads); heads and FFN units are 0 unless given.
        trained: regular expression of the trained tensors' names; all others must stay bit for bit.
        shipped: what differs on the shipped base, whose numbers the table shows.
        exact_start: step 0 is the base exactly, or with `after` that run's model; else it is near.
        plain_export: the export is transformers' own BERT or RoBERTa, without code.
        roberta: on the tiny RoBERTa.
        new_words: beside the base's words there are new ones.
        pairs: rows are pairs, and a fresh next-sentence head trains.
        causal: every token predicts the next one (`--objective.kind`).
        after: name of the row whose run this one goes on from (`--init_from`).
        keep: some rows are general text, and what they teach (`--objective.keep`); empty: there are none.
    """

    name: str
    method: dict[str, Any]
    trained: str
    shipped: dict[str, Any] = field(default_factory=dict)
    exact_start: bool = True
    plain_export: bool = False
    roberta: bool = False
    new_words: bool = False
    pairs: bool = False
    causal: bool = False
    after: str = ""
    keep: Literal["", "kl", "replay"] = ""

    @property
    def slug(self) -> str:
        """Name of the test and of the run's directory."""
        return re.sub(r"\W+", "-", self.name.lower()).strip("-")

    def make_method(self, *, shipped: bool = False) -> MethodConfig:
        """Return the method on the tiny base, or on the shipped one."""
        values = {"heads": 0, "ffn_units": 0, **self.method, **(self.shipped if shipped else {})}
        return MethodConfig(name=self.slug, **values)

    def make_objective(self) -> ObjectiveConfig:
        """Return what the row's run predicts."""
        kind: Literal["masked", "causal"] = "causal" if self.causal else "masked"
        return ObjectiveConfig(kind=kind, next_sentence=self.pairs, keep=self.keep or "none", keep_weight=2.0)

    def trains(self, name: str) -> bool:
        """Whether a tensor is expected to train."""
        return re.search(self.trained, name) is not None


WORDS = r"^(bert\.embeddings|cls\.predictions)\.extension\."
SHIFTS = r"^(bert\.embeddings|cls\.predictions)\.adapters\.domain\."
MODULES = {"module_hidden_size": 12, "module_ffn_size": 20}
SHIPPED_MODULES = {"module_hidden_size": 84, "module_ffn_size": 340}
BOTTLENECK = {"bottleneck_size": 6}
SHIPPED_BOTTLENECK = {"bottleneck_size": 64}
UNITS = {"ffn_units": 512}

ROWS = [
    Row("full", {"trains": "all"}, r"", plain_export=True),
    Row(
        "top layers",
        {"trains": "top_layers", "top_layers": 1},
        r"^bert\.encoder\.layer\.1\.",
        {"top_layers": 2},
        plain_export=True,
    ),
    Row("LayerNorms", {"trains": "layer_norms"}, r"^bert\..*LayerNorm\.", plain_export=True),
    Row("biases", {"trains": "biases"}, r"^bert\..*\.bias$", plain_export=True),
    Row("FL-Tuning", {"ffn_units": 10}, r"\.layer\.\d\.adapters\.domain\.", UNITS),
    Row(
        "LoRA",
        {"lora_rank": 3},
        r"\.attention\.self\.(query|value)\.lora_[AB]\.",
        {"lora_rank": 16},
        plain_export=True,
    ),
    Row(
        "LoRA, all matrices",
        {"lora_rank": 2, "lora_alpha": 3, "lora_targets": ALL_MATRICES},
        r"\.(query|key|value|dense|gate)\.lora_[AB]\.",
        {"lora_rank": 16, "lora_alpha": 0},
        plain_export=True,
        roberta=True,
    ),
    Row("AF", {"heads": 1, "ffn_units": 10}, r"\.layer\.\d\.(attention\.)?adapters\.domain\.", UNITS),
    Row("exBERT", MODULES, r"\.extension\.", SHIPPED_MODULES, exact_start=False, new_words=True),
    Row(
        "exBERT, modules only",
        MODULES,
        r"\.layer\.\d\.extension\.",
        SHIPPED_MODULES,
        exact_start=False,
        roberta=True,
    ),
    Row("new words", {}, WORDS, new_words=True),
    Row(
        "bottleneck",
        BOTTLENECK,
        r"\.(attention\.)?output\.adapters\.domain\.(down|up|norm)\.",
        SHIPPED_BOTTLENECK,
    ),
    Row(
        "bottleneck, paper's start, upper layers",
        {**BOTTLENECK, "init": "paper", "layers": "1"},
        r"\.layer\.1\.(attention\.)?output\.adapters\.domain\.(down|up|norm)\.",
        {**SHIPPED_BOTTLENECK, "layers": "2-3"},
        exact_start=False,
        roberta=True,
    ),
    Row(
        "bottleneck, parallel, LayerNorm inside, ReLU",
        {**BOTTLENECK, "bottleneck_parallel": True, "bottleneck_layer_norm": True, "bottleneck_activation": "relu"},
        r"\.(attention\.)?output\.adapters\.domain\.(input_norm|down|up|norm)\.",
        SHIPPED_BOTTLENECK,
    ),
    Row(
        "bottleneck after attention, tanh, left to right",
        {**BOTTLENECK, "bottleneck_place": "attention", "bottleneck_activation": "tanh"},
        r"\.attention\.output\.adapters\.domain\.(down|up|norm)\.",
        SHIPPED_BOTTLENECK,
        roberta=True,
        causal=True,
    ),
    Row("word shifts", {"word_rows": 10**6}, SHIFTS, {}),
    Row(
        "word shifts of frequent words, MLM head",
        {"word_rows": 9, "word_head": True},
        SHIFTS,
        {"word_rows": 2000},
        roberta=True,
    ),
    # combinations
    Row(
        "AF heads + new words",
        {"heads": 1},
        rf"\.attention\.adapters\.domain\.|{WORDS}",
        new_words=True,
    ),
    Row(
        "AF + word shifts + new words",
        {"heads": 1, "ffn_units": 10, "word_rows": 12, "word_head": True},
        rf"\.adapters\.domain\.|{WORDS}",
        {**UNITS, "word_rows": 4000},
        new_words=True,
    ),
    Row(
        "exBERT + bottleneck without norms",
        {**MODULES, **BOTTLENECK, "bottleneck_norms": False},
        r"\.extension\.|\.output\.adapters\.domain\.(down|up)\.",
        {**SHIPPED_MODULES, **SHIPPED_BOTTLENECK},
        exact_start=False,
        new_words=True,
    ),
    Row(
        "AF + bottleneck, one adapter",
        {"heads": 1, "ffn_units": 10, **BOTTLENECK},
        r"\.adapters\.domain\.",
        {**UNITS, **SHIPPED_BOTTLENECK},
        roberta=True,
    ),
    Row(
        "LoRA + AF heads",
        {"lora_rank": 3, "lora_targets": ("query", "output"), "heads": 1},
        r"\.lora_[AB]\.|\.attention\.adapters\.domain\.",
        {"lora_rank": 16},
    ),
    Row(
        "AF + sentence pairs",
        {"heads": 1, "ffn_units": 10},
        r"\.adapters\.domain\.|^bert\.pooler\.|^cls\.seq_relationship\.",
        UNITS,
        pairs=True,
    ),
    # beside general text
    Row(
        "AF + word shifts, keeping the base's predictions",
        {"heads": 1, "ffn_units": 10, "word_rows": 10**6, "word_head": True},
        r"\.adapters\.domain\.",
        UNITS,
        keep="kl",
    ),
    Row(
        "AF in the upper layer, keeping the base's predictions",
        {"heads": 1, "ffn_units": 10, "layers": "1"},
        r"\.adapters\.domain\.",
        {**UNITS, "layers": "2-3"},
        keep="kl",
    ),
    Row("full, keeping the base's predictions", {"trains": "all"}, r"", plain_export=True, keep="kl"),
    Row(
        "exBERT + sentence pairs, keeping the base's predictions",
        MODULES,
        r"\.extension\.|^bert\.pooler\.|^cls\.seq_relationship\.",
        SHIPPED_MODULES,
        exact_start=False,
        new_words=True,
        pairs=True,
        keep="kl",
    ),
    Row(
        "LoRA, keeping the base's predictions",
        {"lora_rank": 3},
        r"\.attention\.self\.(query|value)\.lora_[AB]\.",
        {"lora_rank": 16},
        plain_export=True,
        roberta=True,
        keep="kl",
    ),
    Row("bottleneck, general text learned", BOTTLENECK, r"\.adapters\.domain\.", SHIPPED_BOTTLENECK, keep="replay"),
    # beside or after an earlier run's
    Row(
        "second bottleneck beside a frozen one",
        {**BOTTLENECK, "adapter": "second", "bottleneck_size": 5},
        r"\.adapters\.second\.",
        SHIPPED_BOTTLENECK,
        after="bottleneck",
    ),
    Row(
        "task bottleneck over AF",
        {**BOTTLENECK, "adapter": "task", "trains": "adapter"},
        r"\.output\.adapters\.task\.",
        SHIPPED_BOTTLENECK,
        after="AF",
    ),
    Row(
        "AF over frozen new words",
        {"heads": 1, "ffn_units": 10, "trains": "adapter"},
        r"\.adapters\.domain\.",
        UNITS,
        new_words=True,
        after="new words",
    ),
    Row(
        "LoRA beside a frozen bottleneck",
        {"lora_rank": 3},
        r"\.lora_[AB]\.",
        {"lora_rank": 16},
        after="bottleneck",
    ),
    Row(
        "exBERT, second stage",
        {**MODULES, "trains": "all"},
        r"",
        SHIPPED_MODULES,
        new_words=True,
        after="exBERT",
    ),
]
"""Every method, then combinations; a row that goes on from another one stands below it."""
QUICK = (
    *("full", "top layers", "biases", "LoRA, all matrices", "AF", "exBERT", "bottleneck"),
    "bottleneck, parallel, LayerNorm inside, ReLU",
    "bottleneck after attention, tanh, left to right",
    "AF + word shifts + new words",
    "AF + sentence pairs",
    "AF + word shifts, keeping the base's predictions",
    "full, keeping the base's predictions",
    "bottleneck, general text learned",
    "second bottleneck beside a frozen one",
    "exBERT, second stage",
)
"""Rows of the default tier: each mechanism at least once. The others combine them, and are `slow`."""


def find_row(name: str) -> Row:
    """Return the row of a name."""
    return next(row for row in ROWS if row.name == name)
