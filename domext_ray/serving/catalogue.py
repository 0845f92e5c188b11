"""Which adapters are served now, and which of them answers a request's text; the model itself is elsewhere (engine.py).

Adapters come to a bank and leave it while it is served: the bank is looked at again as requests come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from domext_ray.errors import DomextError, RunError
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME
from domext_ray.model.domext.routers_domext import choose_adapters
from domext_ray.serving.served_model import ServedAdapter, ServedModel

MAX_TOKENS = 512
"""Tokens of a row where --max_length is 0 and the model takes more."""
LOOK_SECONDS = 1.0
"""After so long a request has the bank looked at again."""
_LOG = logging.getLogger(__name__)


class Catalogue:
    """The adapters that are served; one is in it whole or not at all.

    `wanted` names those that may be served; none: all. `max_length` is the tokens of a row; 0: as many as the model
    takes, up to 512.
    """

    def __init__(self, served: ServedModel, wanted: Sequence[str] = (), max_length: int = 0) -> None:
        text_side = served.text_side
        if max_length > text_side.max_tokens:
            raise RunError(
                f"--max_length is {max_length}; the base has {text_side.max_tokens} positions, so it must be "
                f"{text_side.max_tokens} at most."
            )
        self.served, self.base = served, served.base
        self.tokenizer, self.has_words = text_side.tokenizer, text_side.has_words
        self.max_length = max_length or min(MAX_TOKENS, text_side.max_tokens)
        self._wanted = frozenset(wanted)
        self._adapters: dict[str, ServedAdapter] = {}
        self._files: dict[str, frozenset[str]] = {}  # of adapters that are served as these have them
        self.problems: dict[str, DomextError] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look at what is there: adapters that are new are read, those that have left are served no longer.

        The bank is listed once, whatever it holds; where an adapter's files are the same ones, none of them is read.
        Where a DomextError says that the bank cannot be listed, what was served stays.
        """
        self._looked = time.monotonic()
        adapters, files, problems = {}, {}, {}
        for name, own in self.served.list_files().items():
            if self._wanted and name not in self._wanted:
                continue
            known = self._adapters.get(name)
            try:
                if known is None or (self._files.get(name) != own and known.sha256 != self.served.hash_adapter(name)):
                    known = None
                    known = self.served.read(name, self.max_length)
                files[name] = own
            except DomextError as error:  # where only its description cannot be read now, a known one stays
                problems[name] = error
                if name not in self.problems:
                    _LOG.error("the adapter %s cannot be read: %s", name, error)
            if known is not None:
                adapters[name] = known
        self._adapters, self._files, self.problems = adapters, files, problems

    def is_old(self) -> bool:
        """Whether the last look was a while ago."""
        return time.monotonic() - self._looked > LOOK_SECONDS

    def names(self) -> list[str]:
        """Return the adapters' names, sorted."""
        return sorted(self._adapters)

    def list(self) -> list[ServedAdapter]:
        """Return the adapters by name, without the base."""
        return [adapter for _, adapter in sorted(self._adapters.items())]

    def find(self, name: str) -> ServedAdapter | None:
        """Return an adapter, or the base by its name; None: it is not served."""
        return self.base if name == BASE_NAME else self._adapters.get(name)

    def list_choices(self) -> str:
        """Return what a request may call its adapter."""
        return ", ".join([*self.names(), *([] if self.base is None else [BASE_NAME, AUTO])])

    def route(self, input_ids: np.ndarray, allowed: Sequence[ServedAdapter]) -> ServedAdapter | None:
        """Choose the adapter of a text, int64 [N], by the routers of those that can answer it.

        It is the base where no router knows the text, and None where none has a router.
        """
        routed = {adapter.name: adapter for adapter in allowed if adapter.router is not None}
        if not routed:
            return None
        limits = {name: adapter.threshold for name, adapter in routed.items()}
        routers = {name: adapter.router for name, adapter in routed.items()}
        (chosen,) = choose_adapters(routers, limits, torch.from_numpy(input_ids)[None])
        return self.base if chosen is None else routed[chosen]
