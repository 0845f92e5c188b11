"""Texts beside --corpus: general text, and further parts of the domain, with weights that may change on the way.

Weights are numbers as they are written, so that counts of rows are exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from domext_ray.config.options.declare import Options, option_group, require
from domext_ray.config.options.kinds import to_number

DOMAIN, GENERAL = "domain", "general"
"""Names of --corpus and --replay.corpus among the parts of a mixture."""
SELF, NO_TEXT = "self", "none"
"""What --replay.corpus may be beside a place: general text that the base writes itself, and none."""
MAX_PARTS = 100
_OPTION = "parts"
_FIELDS = ("corpus", "weight", "keep")


@dataclass(frozen=True)
class TextPart:
    """A text of a run: --corpus, or one beside it."""

    name: str  # what figures and sentences call it
    corpus: str  # where it is, as `--corpus`
    weights: tuple[tuple[Fraction, Fraction], ...]  # first share of the horizon, weight; empty: a share of all rows
    keep: bool  # it is general text, for `--objective.keep`

    @property
    def option(self) -> str:
        """Where it was given, for sentences."""
        return {DOMAIN: "--corpus", GENERAL: "--replay.corpus"}.get(self.name, f"--mixture.parts {self.name}")

    @property
    def is_written(self) -> bool:
        """Whether the base writes it."""
        return self.name == GENERAL and self.corpus == SELF

    @property
    def title(self) -> str:
        """What lines of text call it."""
        return f"{self.name} text" if self.name in (DOMAIN, GENERAL) else self.name

    def weigh(self, share: Fraction) -> Fraction:
        """Return its weight at a share of the horizon."""
        return [weight for first, weight in self.weights if first <= share][-1]


def _complete_all(given: dict[str, Any]) -> dict[str, Any]:
    """Return parts in one form and order for all ways to write them, which JSON and YAML bring back as it is."""
    require(len(given) <= MAX_PARTS, _OPTION, len(given), f"at most {MAX_PARTS} parts")
    parts = {str(name): _complete(str(name), part) for name, part in given.items()}
    return dict(sorted(parts.items()))


def _complete(name: str, given: Any) -> dict[str, Any]:
    """Return a part with all of its fields, each in its one form."""
    option = f"{_OPTION}.{name}"
    is_name = re.fullmatch(r"[A-Za-z0-9][\w-]*", name) and name not in (DOMAIN, GENERAL)
    require(bool(is_name), _OPTION, name, f"names of letters, digits, _ and -, other than {DOMAIN} and {GENERAL}")
    require(isinstance(given, dict), option, given, "options of a part, such as {corpus: more.txt, weight: 2}")
    unknown = [str(key) for key in given if key not in _FIELDS]
    require(not unknown, option, ", ".join(unknown), f"of {', '.join(_FIELDS)}")
    corpus, weight, keep = given.get("corpus", ""), given.get("weight", 1.0), given.get("keep", False)
    require(isinstance(corpus, str) and bool(corpus.strip()), f"{option}.corpus", corpus, "at least one file or folder")
    require(isinstance(keep, bool), f"{option}.keep", keep, "true or false")
    if not isinstance(weight, dict):
        return {"corpus": corpus, "weight": _read_weight(f"{option}.weight", weight), "keep": keep}
    firsts = [to_number(share) for share in weight]
    is_ascending = bool(firsts) and firsts[0] == 0 and all(isinstance(first, float) and first < 1 for first in firsts)
    is_ascending = is_ascending and all(a < b for a, b in zip(firsts, firsts[1:], strict=False))
    rule = "weights from shares of the horizon on, ascending from 0 to below 1, such as {0: 1, 0.5: 3}"
    require(is_ascending, f"{option}.weight", weight, rule)
    weights = zip(firsts, weight.values(), strict=True)
    read = {str(first): _read_weight(f"{option}.weight", value) for first, value in weights}
    return {"corpus": corpus, "weight": read, "keep": keep}


def _read_weight(option: str, value: Any) -> float:
    number = to_number(value)
    require(isinstance(number, float) and 0.0 <= number <= 1e6, option, value, "from 0 to 1,000,000")
    return float(number)


@option_group
class MixtureConfig:
    """Further parts of the domain's text in addition to --corpus, read in the ratio of their weights.

    parts: name: {corpus: ..., weight: ..., keep: ...}. A weight is a number, or for example {0: 1, 0.5: 3}: 1 at first,
    3 from half of the horizon (--optim.decay_steps). With keep: true the part is general text, like --replay.corpus.
    """

    weight: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0  # weight of --corpus itself
    # name: {corpus, weight, keep}
    parts: Options[Annotated[dict[str, Any], AfterValidator(_complete_all)]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in self.list_parts():
            require(any(weight for _, weight in part.weights), f"{_OPTION}.{part.name}.weight", 0, "above 0 somewhere")

    def list_parts(self) -> tuple[TextPart, ...]:
        """Return the parts, by name."""
        return tuple(
            TextPart(name, part["corpus"], _read_weights(part["weight"]), part["keep"])
            for name, part in self.parts.items()
        )


def list_shares(
    weight: float, parts: Sequence[TextPart], general_share: Fraction
) -> list[tuple[Fraction, tuple[Fraction, ...]]]:
    """Return the shares of rows that --corpus and the parts have, from some shares of the horizon on.

    These ascend from 0, and the shares of rows sum to 1. The part of `--replay.corpus`, which has no weights, has
    `general_share` of all rows.
    """
    shares = []
    for first in sorted({Fraction(0), *(first for part in parts for first, _ in part.weights)}):
        weights = [Fraction(str(weight)), *(part.weigh(first) if part.weights else Fraction(0) for part in parts)]
        weighted = 1 - (general_share if any(not part.weights for part in parts) else 0)
        own = [weighted * value / sum(weights) for value in weights]
        for number, part in enumerate(parts, start=1):
            own[number] = own[number] if part.weights else general_share
        shares.append((first, tuple(own)))
    return shares


def _read_weights(weight: Any) -> tuple[tuple[Fraction, Fraction], ...]:
    pairs = weight if isinstance(weight, dict) else {"0": weight}
    return tuple((Fraction(first), Fraction(str(value))) for first, value in pairs.items())
