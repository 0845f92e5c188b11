"""General text that a base writes itself, where a run has none (--replay.corpus self).

Enters: a base with an MLM head. Leaves: CACHE/written-NAME.jsonl, a document per line, which the corpus reads as it
reads any text; and, for a router, rows of the domain in which the base has written half of the words.

The base is shown a row of masks and says which words there may be at each place. Rows are drawn from that, word by
word: one forward pass makes any number of them. They read like nonsense and keep the base's predictions as well as rows
that are filled in 4 or 10 rounds, or as real text (RESULTS, "Text that the base writes"). Every draw is a hash of row
and place. For decoders, text that a model writes itself is known to serve nearly as well as the text that it was
trained on (arXiv 2605.26097).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus.draws import hash_counters, to_uniform
from domext_ray.corpus.estimate import RowEstimate
from domext_ray.corpus.vocabulary.vocab import fingerprint_tokenizer, load_tokenizer
from domext_ray.files import hash_values, new_file
from domext_ray.model.base import Base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.graft import build_base
from domext_ray.runtime.cpu_kernels import PREDICTION, as_worker, has_bf16_units

NUM_ROWS, LENGTH = 1_600, 96
"""Rows that are written, and their tokens, [CLS] and [SEP] included; fewer where the base has positions for fewer."""
REFILLED_FRAC = 0.5
"""Share of a domain row's words that the base writes anew."""
BATCH_ROWS = 8
FORMAT = 1

_WORD, _MASK, _ANEW = 71, 72, 73  # purposes of hashes: no two draws share their counters


def provide_written_text(base: Base, cache_dir: Path) -> Path:
    """Return the file of text that a base writes, written now where it is not there yet.

    Args:
        base: a base with an MLM head.
        cache_dir: where prepared corpora are kept; made where it is missing.
    """
    tokenizer = load_tokenizer(base.tokenizer_folder)
    settings = {"rows": NUM_ROWS, "length": LENGTH, "format": FORMAT}
    name = hash_values({"base": base.sha256, "tokenizer": fingerprint_tokenizer(tokenizer), **settings})[:16]
    path = cache_dir / f"written-{name}.jsonl"
    if not path.exists():
        ids = write_rows(build_base(base, torch.device("cpu")), tokenizer, NUM_ROWS)
        texts = [" ".join(each.split()) for each in tokenizer.batch_decode(ids, skip_special_tokens=True)]
        cache_dir.mkdir(parents=True, exist_ok=True)
        with new_file(path) as temporary:
            lines = [json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in texts]
            temporary.write_text("".join(lines), encoding="utf-8")
        print(f"general text: {NUM_ROWS:,} rows of {ids.shape[1]} tokens, written by the base", flush=True)
    return path


def prepare_written(prepare: PrepareConfig) -> PrepareConfig:
    """Return the options by which written text becomes rows: a document is a line, whatever the domain's is."""
    return replace(PrepareConfig(), packed=prepare.packed, chinese_words=prepare.chinese_words)


def estimate_written(seq_length: int) -> RowEstimate:
    """Return what written text is expected to make, for a dry run, which writes nothing.

    Args:
        seq_length: tokens of a row of the run.
    """
    num_tokens = round(NUM_ROWS * (LENGTH - 2) * (1.0 - PrepareConfig().held_out_frac))
    return RowEstimate(max(1, num_tokens // seq_length), num_tokens, num_tokens * np.dtype(np.int32).itemsize, 1.0)


@torch.no_grad()
def write_rows(model: DomextForMaskedLM, tokenizer: PreTrainedTokenizerBase, number: int) -> np.ndarray:
    """Write rows of tokens.

    Args:
        model: the base alone, on the CPU.
        tokenizer: its tokenizer.
        number: of rows R; a row depends on its place among them alone.

    Returns:
        int64 [R, N], special tokens at both ends.
    """
    config: Any = model.config
    length = min(LENGTH, config.max_row_length)
    shown = torch.full((1, length), cast(int, tokenizer.mask_token_id))
    shown[:, 0], shown[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more of them sums come in another order, and here and there another word
    with as_worker(PREDICTION):
        reached = _accumulate(cast(nn.Module, model).eval()(shown).logits[0, 1:-1], tokenizer)
    torch.set_num_threads(num_threads)
    draws = to_uniform(hash_counters(_WORD, np.arange(number)[:, None], np.arange(length - 2))).astype(np.float32)
    ids = shown.expand(number, -1).numpy().copy()
    ids[:, 1:-1] = _draw(reached, torch.from_numpy(draws.T.copy())).T.numpy()
    return ids


@torch.no_grad()
def refill_rows(base: Base, tokenizer: PreTrainedTokenizerBase, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Write half of the words of a domain's rows anew, as the base would have them beside the other half.

    Args:
        base: a base with an MLM head.
        tokenizer: its tokenizer.
        rows: int64 [n] each, ids of the base; a row's new words depend on the row and its place among them.
    """
    bf16 = has_bf16_units()
    model = cast(nn.Module, build_base(base, torch.device("cpu"), bf16=bf16, is_narrow=bf16)).eval()
    specials, refilled = np.array(tokenizer.all_special_ids), list[np.ndarray]()
    with as_worker(PREDICTION, uses_fp32=not bf16), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for first in range(0, len(rows), BATCH_ROWS):
            batch = rows[first : first + BATCH_ROWS]
            sizes = np.array([len(each) for each in batch])
            ids = np.full((len(batch), sizes.max()), tokenizer.pad_token_id, dtype=np.int64)
            is_word = np.arange(ids.shape[1]) < sizes[:, None]
            ids[is_word] = np.concatenate(batch)
            counters = np.arange(first, first + len(batch))[:, None], np.arange(ids.shape[1])
            is_anew = to_uniform(hash_counters(_MASK, *counters)) < REFILLED_FRAC
            is_anew &= is_word & ~np.isin(ids, specials)
            positions = torch.from_numpy(np.flatnonzero(is_anew))
            shown = torch.from_numpy(np.where(is_anew, tokenizer.mask_token_id, ids))
            scores = model(shown, attention_mask=torch.from_numpy(is_word.astype(np.int64)), masked_positions=positions)
            draws = torch.from_numpy(to_uniform(hash_counters(_ANEW, *counters))[is_anew].astype(np.float32))
            ids[is_anew] = _draw(_accumulate(scores.logits, tokenizer), draws[:, None]).flatten().numpy()
            refilled += [row[:size] for row, size in zip(ids, sizes, strict=True)]
    return refilled


def _accumulate(scores: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Weights of words, special ones left out, summed up to each word; fp32 [P, V]."""
    scores = scores[:, : len(tokenizer)].float()  # further rows of the table are no word's
    scores[:, [each for each in tokenizer.all_special_ids if each < scores.shape[1]]] = -torch.inf
    return scores.sub_(scores.amax(1, keepdim=True)).exp_().cumsum_(1)


def _draw(reached: Tensor, draws: Tensor) -> Tensor:
    """Words at draws from 0 to below 1, [P, R]."""
    return torch.searchsorted(reached, draws * reached[:, -1:], right=True).clamp_(max=reached.shape[1] - 1)
