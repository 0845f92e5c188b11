"""General text that a base writes itself, where a run has none (--replay.corpus self).

Enters: a base with an MLM head. Leaves: CACHE/written-NAME.jsonl, a document per line, which the corpus reads as it
reads any text; and, for a router, rows of the domain in which the base has written half of the words.

The base is shown a row of masks and says which words there may be at each place. Rows are drawn from that, word by
word, so that one forward pass makes any number of them. Every draw is a hash of row and place. Such rows read like
nonsense, and keep the base's predictions as well as rows that are filled in rounds, each seeing the words before, or as
real text (RESULTS, "Text that the base writes"). For decoders, text that a model writes itself is known to serve nearly
as well as the text that it was trained on (arXiv 2605.26097).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from domext_ray.config.pretrain import EngineConfig, PrepareConfig
from domext_ray.model.base import Base
from domext_ray.model.spec import build_base
from domext_ray.runtime.device import PREDICTION, as_worker, has_bf16_units
from domext_ray.storage import Place, hash_values
from domext_ray.text.corpus.estimate import RowEstimate
from domext_ray.text.data.draws import Purpose, hash_counters, to_uniform
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer

NUM_ROWS, LENGTH = 1_600, 96
"""Rows that are written, and their tokens, [CLS] and [SEP] included; fewer where the base has positions for fewer."""
REFILLED_FRAC = 0.5
"""Share of a domain row's words that the base writes anew."""
BATCH_ROWS = 16
FORMAT = 1


def get_or_write_text(base: Base, cache_dir: Place) -> Place:
    """Return the file of text, beside prepared corpora, that a base writes, written now where it is not there yet."""
    tokenizer = base.tokenizer
    settings = {"rows": NUM_ROWS, "length": LENGTH, "format": FORMAT}
    name = hash_values({"base": base.sha256, "tokenizer": fingerprint_tokenizer(tokenizer), **settings})[:16]
    path = cache_dir / f"written-{name}.jsonl"
    if not path.is_file():
        ids = Writer(base).write_rows(NUM_ROWS)
        texts = [" ".join(text.split()) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
        path.put("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode())
        print(f"general text: {NUM_ROWS:,} rows of {ids.shape[1]} tokens, written by the base", flush=True)
    return path


def prepare_written(prepare: PrepareConfig) -> PrepareConfig:
    """Return the options by which written text becomes rows: a document is a line, whatever the domain's is."""
    return replace(PrepareConfig(), packed=prepare.packed, chinese_words=prepare.chinese_words)


def estimate_written(seq_length: int) -> RowEstimate:
    """Return what written text is expected to make, for a dry run, which writes nothing."""
    num_tokens = round(NUM_ROWS * (LENGTH - 2) * (1.0 - PrepareConfig().held_out_frac))
    return RowEstimate(max(1, num_tokens // seq_length), num_tokens, num_tokens * np.dtype(np.int32).itemsize, 1.0)


class Writer:
    """A base with an MLM head that writes words, on this process's CPU."""

    def __init__(self, base: Base) -> None:
        self.bf16 = has_bf16_units()
        engine = EngineConfig(precision="bf16" if self.bf16 else "fp32")
        self.model = build_base(base, torch.device("cpu"), engine)
        cast(nn.Module, self.model).eval()
        self.tokenizer = base.tokenizer
        self.length = min(LENGTH, base.config.max_row_length)

    def write_rows(self, number: int) -> np.ndarray:
        """Write rows of tokens, int64 [number, N], special ones at both ends; a row depends on its place alone."""
        row = np.full((1, self.length), self.tokenizer.mask_token_id, dtype=np.int64)
        row[:, 0], row[:, -1] = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        reached = self._predict(row, row == self.tokenizer.mask_token_id)
        draws = hash_counters(Purpose.FIRST_WORDS, np.arange(number), np.arange(self.length - 2)[:, None])
        words = _draw(reached, draws).T
        return np.hstack([row[:, :1].repeat(number, 0), words, row[:, -1:].repeat(number, 0)])

    def refill_rows(self, rows: Sequence[np.ndarray], listen: Callable[[], None] = lambda: None) -> list[np.ndarray]:
        """Write half of the words of a domain's rows, the base's ids, anew, as the base has them beside the other half.

        A row's new words depend on the row and its place among them. `listen` is called before each batch.
        """
        refilled = [*rows]
        by_length = np.argsort([*map(len, rows)], kind="stable")  # so that little is padded
        for first in range(0, len(rows), BATCH_ROWS):
            listen()
            own = by_length[first : first + BATCH_ROWS]
            batch = [rows[i] for i in own]
            sizes = np.array([*map(len, batch)])
            ids = np.full((len(batch), sizes.max()), self.tokenizer.pad_token_id, dtype=np.int64)
            is_word = np.arange(ids.shape[1]) < sizes[:, None]
            ids[is_word] = np.concatenate(batch)
            places = own[:, None], np.arange(ids.shape[1])
            is_anew = to_uniform(hash_counters(Purpose.REFILLS, *places)) < REFILLED_FRAC
            is_anew &= is_word & ~np.isin(ids, self.tokenizer.all_special_ids)
            shown = np.where(is_anew, self.tokenizer.mask_token_id, ids)
            reached = self._predict(shown, is_anew, is_word)
            ids[is_anew] = _draw(reached, hash_counters(Purpose.REFILLED_WORDS, *places)[is_anew][:, None]).flatten()
            for i, row, size in zip(own, ids, sizes, strict=True):
                refilled[i] = row[:size]
        return refilled

    @torch.no_grad()
    def _predict(self, ids: np.ndarray, is_asked: np.ndarray, is_word: np.ndarray | None = None) -> Tensor:
        """Weights of words at the places P of rows [B, N] that are asked, summed up to each word; fp32 [P, V]."""
        mask = None if is_word is None else torch.from_numpy(is_word.astype(np.int64))
        positions = torch.from_numpy(np.flatnonzero(is_asked))
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)
        with as_worker(PREDICTION, uses_fp32=not self.bf16), autocast:
            scores = self.model(torch.from_numpy(ids), attention_mask=mask, masked_positions=positions).logits
        scores = scores[:, : len(self.tokenizer)].float()  # further rows of the table are no word's
        scores[:, [token_id for token_id in self.tokenizer.all_special_ids if token_id < scores.shape[1]]] = -torch.inf
        return scores.sub_(scores.amax(1, keepdim=True)).exp_().cumsum_(1)


def _draw(reached: Tensor, draws: np.ndarray) -> np.ndarray:
    """The words that draws, uint64 [P, R], fall on, where weights are summed up [P, V]."""
    wanted = torch.from_numpy(to_uniform(draws).astype(np.float32)) * reached[:, -1:]
    return torch.searchsorted(reached, wanted, right=True).clamp_(max=reached.shape[1] - 1).numpy()
