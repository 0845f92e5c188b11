"""A masked language model and texts with [MASK] -> the most likely tokens in each place, with their probabilities.

The figures are those of transformers' FillMaskPipeline. Logits are computed in the masked places alone. A text that is
longer than a row is read around each of its masks.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from domext_ray.families.rows import Row, run_by_length
from domext_ray.families.windows import RowTemplate, read_template
from domext_ray.inference.input_rows import check_text
from domext_ray.model.build import prepare_for_device
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import AUTO, DomextForMaskedLM
from domext_ray.models.exported import Predicted
from domext_ray.models.masked_lm import score_places
from domext_ray.runtime.device import has_bf16
from domext_ray.text.vocabulary.tokenizer import make_backend

MASK = "[MASK]"
"""What a mask is called in every text, beside the model's own name for it."""

FILLS = pa.list_(
    pa.struct(
        {
            "start": pa.int64(),
            "end": pa.int64(),
            "fills": pa.list_(pa.struct({"token": pa.string(), "probability": pa.float64()})),
        }
    )
)
PROBABILITY_DIGITS = 6


@dataclass(frozen=True)
class MaskedExample:
    """A text with masks."""

    text: str  # as the user wrote it
    masks: tuple[tuple[int, int], ...]  # characters [start, end) of each


class MaskCodec:
    """Finds the masks of texts, encodes them, and names what fills them: for files and for requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._tokens = tokenizer, dict[int, str]()
        self._mask, self.mask_id = str(tokenizer.mask_token), cast(int, tokenizer.mask_token_id)
        self._is_mask = re.compile("|".join(map(re.escape, dict.fromkeys([MASK, self._mask]))))
        self._backend = _make_backend(tokenizer)

    def find(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return the characters [start, end) of each mask."""
        return tuple(match.span() for match in self._is_mask.finditer(text))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int64, without special tokens but for its masks."""
        masked = [self._is_mask.sub(lambda _: self._mask, text) for text in texts]
        encoded = self._backend.encode_batch_fast(masked, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encoded]

    def name(self, scores: Sequence[float], ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the fills of a mask."""
        for token_id in {*ids} - self._tokens.keys():
            self._tokens[token_id] = str(self._tokenizer.decode([token_id]))
        return [
            {"token": self._tokens[token_id], "probability": round(score, PROBABILITY_DIGITS)}
            for score, token_id in zip(scores, ids, strict=True)
        ]


class FillMask:
    """Fills the masks of texts.

    The model is in evaluation mode, on its device. A batch has up to `batch_tokens`, padding counted, and a row up to
    `max_length`; 0: as many as the model takes, but 512 at most. With `routes` each row is read by its adapter or by
    the base alone, as the model's routers say.
    """

    def __init__(
        self,
        model: DomextForMaskedLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        top_k: int,
        batch_tokens: int,
        max_length: int = 0,
        routes: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.top_k, self.batch_tokens = model, tokenizer, top_k, batch_tokens
        self.adapter_names = AUTO if routes else None
        prepare_for_device(model, model.device, bf16=has_bf16(model.device))
        self.max_length = max_length or min(512, cast(DomextConfig, model.config).max_row_length)
        self.codec = MaskCodec(tokenizer)
        self.template: RowTemplate = read_template(tokenizer, pair=False)
        self.room = self.template.measure_room(self.max_length, least=1)

    schema: Mapping[str, pa.DataType] = {"masks": FILLS}

    def make_example(self, values: Mapping[str, Any], shown: str) -> MaskedExample:
        """Find the masks of a row's text; see `input_rows.check_text`."""
        text = check_text(values, shown=shown)
        return MaskedExample(text, self.codec.find(text))

    def predict(self, examples: Sequence[MaskedExample]) -> Predicted:
        """Return for each text its masks in order, each with its fills, the likeliest first; nothing is scored."""
        rows = self.encode(examples)
        found: list[list[dict[str, Any]]] = [[{"start": s, "end": e} for s, e in example.masks] for example in examples]
        for row, fills in zip(rows, self.run(rows), strict=True):
            for number, fill in zip(row.place[1], fills, strict=True):
                found[row.example][number]["fills"] = fill
        return Predicted([], [{"masks": masks} for masks in found])

    def take_cases(self) -> dict[str, int]:
        """Return nothing: a long text is read in windows around its masks."""
        return {}

    def count_labels(self, record: Mapping[str, Any]) -> list[str]:
        """Return what a record counts as: a mask each."""
        return ["[MASK]"] * len(record["masks"])

    def encode(self, examples: Sequence[MaskedExample]) -> list[Row]:
        """Make rows: one of a text that fits, one around each mask of a longer one.

        A row's `place` is where its masks stand in it, and which of the text's masks they are.
        """
        masked = [i for i, example in enumerate(examples) if example.masks]
        rows: list[Row] = []
        for i, ids in zip(masked, self.codec.encode([examples[i].text for i in masked]), strict=True):
            places = np.flatnonzero(ids == self.codec.mask_id)
            assert len(places) == len(examples[i].masks), "every mask of a text is a token"
            rows += self._cut(i, ids, places)
        return rows

    def _cut(self, example: int, ids: np.ndarray, places: np.ndarray) -> Iterator[Row]:
        shift = len(self.template.specials[0])
        if len(ids) <= self.room:
            yield Row(example, self.template.join(ids)[0], place=(places + shift, range(len(places))))
            return
        for number, place in enumerate(places):
            start = min(max(0, int(place) - self.room // 2), len(ids) - self.room)
            row, _ = self.template.join(ids[start : start + self.room])
            yield Row(example, row, place=(np.array([place - start + shift]), [number]))

    def run(self, rows: Sequence[Row]) -> list[list[list[dict[str, Any]]]]:
        """Return the fills of each row's masks."""
        return run_by_length(rows, self._fill, max_tokens=self.batch_tokens)

    def _fill(self, rows: list[Row]) -> Iterator[list[list[dict[str, Any]]]]:
        places = [row.place[0] for row in rows]
        logits = score_places(self.model, rows, places, self.tokenizer.pad_token_id, self.adapter_names)
        top = logits.float().softmax(dim=-1).topk(min(self.top_k, logits.shape[-1]))
        fills = map(self.codec.name, top.values.cpu().tolist(), top.indices.cpu().tolist())
        for own in places:
            yield list(itertools.islice(fills, len(own)))


def _make_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a tokenizer's engine to which of all special tokens in a text the mask alone is no text."""
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in record["added_tokens"]:
        token["special"] = token["special"] and token["content"] != tokenizer.mask_token
    return make_backend(json.dumps(record))
