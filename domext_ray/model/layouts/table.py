"""The layouts of bases. A new one is a file beside this one and a row in the table; README.md in `model` says how."""

from __future__ import annotations

from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.layouts.bert import Bert, Roberta
from domext_ray.model.layouts.distilbert import DistilBert
from domext_ray.model.layouts.electra import Electra
from domext_ray.model.layouts.layout import Layout
from domext_ray.model.layouts.modernbert import ModernBert

LAYOUTS: dict[str, Layout] = {
    "bert": Bert(),
    "roberta": Roberta(),
    "xlm-roberta": Roberta(),
    "camembert": Roberta(),
    "modernbert": ModernBert(),
    "distilbert": DistilBert(),
    "electra": Electra(),
}
"""By `model_type` of a base's config.json."""


def find_layout(config: DomextConfig) -> Layout:
    """Return the layout of a model: of those that it is of, the one that says most."""
    return max((each for each in LAYOUTS.values() if each.is_of(config)), key=lambda each: len(each.fixed))
