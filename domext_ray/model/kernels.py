"""Triton kernels of what `fused.py` declares; it imports this file on a card, for nothing here runs elsewhere.

Each reads its inputs once, computes in fp32, and writes its outputs once, in their own dtype. They are written for
Triton's interpreter, too (TRITON_INTERPRET=1), which knows no helper that is itself a kernel of Triton's, such as
`tl.cdiv`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 1024
"""Of a half of one head that a program holds at a time: 8 a thread, which it loads at once in bf16."""


@triton.jit
def _rotate_heads(
    states: tl.tensor,
    rotated: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    is_token: tl.tensor,
    first_head: tl.tensor,
    num_heads: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    column_stride: tl.tensor,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate some heads of a block of tokens; `states` and `rotated` point to head 0 of its first token."""
    half: tl.constexpr = SIZE // 2
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    places = tokens[:, None] * token_stride + columns[None, :] * column_stride
    new_places = tokens[:, None] * (num_heads * SIZE) + columns[None, :]
    for number in tl.static_range(HEADS):
        head = first_head + number
        is_here = is_token & (head < num_heads)
        is_inside = is_here[:, None] & (columns < half)[None, :]
        source, target = states + head * head_stride, rotated + head * SIZE
        first = tl.load(source + places, mask=is_inside).to(tl.float32)
        second = tl.load(source + half * column_stride + places, mask=is_inside).to(tl.float32)
        tl.store(target + new_places, first * cos - second * sin, mask=is_inside)
        tl.store(target + half + new_places, second * cos + first * sin, mask=is_inside)
        if SIZE % 2:
            last = tl.load(source + (SIZE - 1) * column_stride + tokens * token_stride, mask=is_here)
            tl.store(target + SIZE - 1 + tokens * (num_heads * SIZE), last, mask=is_here)


# Packed rows differ in their number of tokens, and each multiple of 16 would be compiled once more.
@triton.jit(do_not_specialize=["num_tokens"])
def _rotate(
    query: tl.tensor,
    key: tl.tensor,
    new_query: tl.tensor,
    new_key: tl.tensor,
    cos_sin: tl.tensor,
    direction: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    query_token: tl.tensor,
    query_column: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    key_column: tl.tensor,
    HAS_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Program (i, j): the i-th block of tokens, row after row, and the j-th `HEADS` heads."""
    half: tl.constexpr = SIZE // 2
    num_blocks = (num_tokens + TOKENS - 1) // TOKENS
    row = (tl.program_id(0) // num_blocks).to(tl.int64)  # offsets of all that is below may exceed 32 bits
    start = (tl.program_id(0) % num_blocks).to(tl.int64) * TOKENS
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    is_token = start + tokens < num_tokens

    is_inside = is_token[:, None] & (columns < half)[None, :]
    angles = cos_sin + start * half + tokens[:, None] * half + columns[None, :]
    if HAS_ROWS:
        angles += row * num_tokens * (2 * half)
    cos = tl.load(angles, mask=is_inside)
    sin = tl.load(angles + num_tokens * half, mask=is_inside) * direction

    first_head, new = tl.program_id(1).to(tl.int64) * HEADS, (row * num_tokens + start) * num_heads * SIZE
    query += row * query_row + start * query_token
    key += row * key_row + start * key_token
    # fmt: off
    _rotate_heads(query, new_query + new, cos, sin, is_token, first_head, num_heads,
                  query_head, query_token, query_column, SIZE, TOKENS, COLUMNS, HEADS)
    _rotate_heads(key, new_key + new, cos, sin, is_token, first_head, num_heads,
                  key_head, key_token, key_column, SIZE, TOKENS, COLUMNS, HEADS)
    # fmt: on


def choose_tile(size: int) -> dict[str, int]:
    """Return what a program of `_rotate` takes of heads of a size; four share the cosines and sines that it reads."""
    columns = triton.next_power_of_2(max(size // 2, 1))
    return {"SIZE": size, "TOKENS": max(TILE_ELEMENTS // columns, 1), "COLUMNS": columns, "HEADS": 4}


def rotate_into(
    query: Tensor, key: Tensor, cos_sin: Tensor, rotated: tuple[Tensor, Tensor], *, is_inverse: bool
) -> None:
    """Rotate queries and keys in one launch.

    Args:
        query: [B, heads, N, size], of any strides.
        key: likewise.
        cos_sin: fp32 [1 or B, 2, N, size // 2].
        rotated: where they are written to: [B, heads, N, size] each, in memory [B, N, heads, size].
        is_inverse: rotate back.
    """
    num_rows, num_heads, num_tokens, size = query.shape
    if not query.numel():
        return
    tile = choose_tile(size)
    grid = num_rows * triton.cdiv(num_tokens, tile["TOKENS"]), triton.cdiv(num_heads, tile["HEADS"])
    _rotate[grid](
        query,
        key,
        *rotated,
        cos_sin.contiguous(),
        -1.0 if is_inverse else 1.0,
        num_tokens,
        num_heads,
        *query.stride(),
        *key.stride(),
        HAS_ROWS=len(cos_sin) > 1,
        **tile,
    )
