"""Triton kernels of what `fused.py` declares; it imports this file on a card, for nothing here runs elsewhere.

Each reads its inputs once, computes in fp32, and writes its outputs once, in their own dtype. They are written for
Triton's interpreter, too (TRITON_INTERPRET=1), which knows no helper that is itself a kernel of Triton's, such as
`tl.cdiv`, unless Triton was imported for it: tests have it interpret `tl.sum` and `tl.max`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SUM_PROGRAMS = 512
"""Programs of a kernel that adds up over all rows: each has a share, and then these are added."""
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
    """Rotate queries and keys, [B, heads, N, size] of any strides, in one launch.

    `cos_sin` is fp32 [1 or B, 2, N, size // 2]. The results are written to `rotated`, of the same shape, which lie
    in memory as [B, N, heads, size].
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


# --- a sum and its LayerNorm ---


@triton.jit
def _standardize(total: tl.tensor, is_inside: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return rows less their mean, divided by their deviation, and what they were multiplied by, [ROWS, 1]."""
    mean = tl.sum(total, axis=1)[:, None] / WIDTH
    centered = tl.where(is_inside, total - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1)[:, None] / WIDTH + eps)
    return centered * scale, scale


@triton.jit(do_not_specialize=["num_rows"])
def _normalize(
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    wide: tl.tensor,
    copy: tl.tensor,
    total: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    NUM_SUMMANDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_COPIED: tl.constexpr,
    KEEPS_TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program i: the i-th block of rows."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_column = (columns < WIDTH)[None, :]
    is_inside = (rows < num_rows)[:, None] & is_column
    places = rows[:, None] * WIDTH + columns[None, :]
    states = tl.load(first + places, mask=is_inside, other=0.0).to(tl.float32)
    if NUM_SUMMANDS > 1:
        states += tl.load(second + places, mask=is_inside, other=0.0).to(tl.float32)
    if NUM_SUMMANDS > 2:
        states += tl.load(third + places, mask=is_inside, other=0.0).to(tl.float32)
    if KEEPS_TOTAL:
        tl.store(total + places, states, mask=is_inside)
    normalized, _ = _standardize(states, is_inside, eps, WIDTH)
    normalized *= tl.load(weight + columns[None, :], mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normalized += tl.load(bias + columns[None, :], mask=is_column, other=0.0).to(tl.float32)
    if IS_WIDE:
        tl.store(wide + places, normalized, mask=is_inside)
    if IS_COPIED:
        tl.store(copy + places, normalized, mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _differentiate_norm(
    grad: tl.tensor,
    copy_grad: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    wide: tl.tensor,
    narrow: tl.tensor,
    weight_sums: tl.tensor,
    bias_sums: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    HAS_GRAD: tl.constexpr,
    HAS_COPY_GRAD: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_NARROW: tl.constexpr,
    TRAINS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program i of n: every n-th block of rows from the i-th on, and its share of the sums for weight and bias."""
    columns = tl.arange(0, COLUMNS)
    is_column = (columns < WIDTH)[None, :]
    scale = tl.load(weight + columns[None, :], mask=is_column, other=0.0).to(tl.float32)
    of_weight = tl.full([ROWS, COLUMNS], 0.0, dtype=tl.float32)
    of_bias = tl.full([ROWS, COLUMNS], 0.0, dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        is_inside = (rows < num_rows)[:, None] & is_column
        places = rows[:, None] * WIDTH + columns[None, :]
        given = tl.full([ROWS, COLUMNS], 0.0, dtype=tl.float32)
        if HAS_GRAD:
            given += tl.load(grad + places, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_COPY_GRAD:
            given += tl.load(copy_grad + places, mask=is_inside, other=0.0).to(tl.float32)
        states = tl.load(total + places, mask=is_inside, other=0.0).to(tl.float32)
        normalized, inverse = _standardize(states, is_inside, eps, WIDTH)
        if TRAINS:
            of_weight += given * normalized
            of_bias += given
        given *= scale
        mean = tl.sum(given, axis=1)[:, None] / WIDTH
        slope = tl.sum(given * normalized, axis=1)[:, None] / WIDTH
        given = (given - mean - normalized * slope) * inverse
        if IS_WIDE:
            tl.store(wide + places, given, mask=is_inside)
        if IS_NARROW:
            tl.store(narrow + places, given, mask=is_inside)
    if TRAINS:
        own = tl.program_id(0) * WIDTH + columns
        tl.store(weight_sums + own, tl.sum(of_weight, axis=0), mask=columns < WIDTH)
        tl.store(bias_sums + own, tl.sum(of_bias, axis=0), mask=columns < WIDTH)


def choose_rows(width: int) -> dict[str, int]:
    """Return what a program takes of rows of a width: two whole ones of 768, for more would not fit its registers."""
    columns = triton.next_power_of_2(width)
    return {"WIDTH": width, "ROWS": max(min(2048 // columns, 4), 1), "COLUMNS": columns}


def normalize_into(
    summands: Sequence[Tensor], weight: Tensor, bias: Tensor | None, eps: float, made: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add states and normalise the sum in one launch; of more than three, those before the last two are added first.

    Summands are [..., d] of any dtypes, weight and bias [d]. The result, the result in another dtype, and the sum are
    written to `made`, [..., d] each; an empty one is not asked for.
    """
    *rest, last = [summand.contiguous() for summand in summands]
    while len(rest) > 2:
        rest = [rest[0] + rest[1], *rest[2:]]
    states, (wide, copy, total) = [*rest, last], made
    if not last.numel():
        return
    tile = choose_rows(weight.numel())
    num_rows = last.numel() // tile["WIDTH"]
    _normalize[(triton.cdiv(num_rows, tile["ROWS"]),)](
        *(states[min(i, len(states) - 1)] for i in range(3)),
        weight,
        weight if bias is None else bias,
        *made,
        eps,
        num_rows,
        NUM_SUMMANDS=len(states),
        HAS_BIAS=bias is not None,
        IS_WIDE=bool(wide.numel()),
        IS_COPIED=bool(copy.numel()),
        KEEPS_TOTAL=bool(total.numel()),
        **tile,
    )


def differentiate_norm_into(
    grad: Tensor | None,
    copy_grad: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    made: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Compute the gradients of `normalize_into` in one launch, and where the weight trains one more that adds up.

    `total` is the sum, [..., d], as are the gradients of the result and of its copy; None: nobody read it. The sum's
    gradient in two dtypes, [..., d], and those of weight and bias, [d], are written to `made`; an empty one is not
    asked for.
    """
    wide, narrow, *sums = made
    trains, tile = bool(sums[0].numel()), choose_rows(weight.numel())
    num_rows = total.numel() // tile["WIDTH"]
    num_programs = triton.cdiv(num_rows, tile["ROWS"])
    if trains:
        num_programs = min(num_programs, SUM_PROGRAMS)
    partial = [weight.new_empty(num_programs if trains else 0, tile["WIDTH"], dtype=torch.float32) for _ in sums]
    if num_rows:
        _differentiate_norm[(num_programs,)](
            *(total if tensor is None else tensor.contiguous() for tensor in (grad, copy_grad)),
            total.contiguous(),
            weight,
            wide,
            narrow,
            *partial,
            eps,
            num_rows,
            HAS_GRAD=grad is not None,
            HAS_COPY_GRAD=copy_grad is not None,
            IS_WIDE=bool(wide.numel()),
            IS_NARROW=bool(narrow.numel()),
            TRAINS=trains,
            **tile,
        )
    if trains:
        for target, own in zip(sums, partial, strict=True):
            torch.sum(own, 0, out=target)


# --- gated units ---


@triton.jit
def _split_gelu(units: tl.tensor) -> tl.tensor:
    """Return what GELU multiplies units by, and its slope."""
    share = 0.5 * (1.0 + tl.erf(units * 0.7071067811865476))
    return share, share + units * tl.exp(-0.5 * units * units) * 0.3989422804014327


@triton.jit(do_not_specialize=["num_rows"])
def _gate(
    outputs: tl.tensor,
    gated: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (i, j): the i-th block of rows and the j-th of units."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    source = outputs + rows[:, None] * (2 * WIDTH) + columns[None, :]
    units = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    gates = tl.load(source + WIDTH, mask=is_inside, other=0.0).to(tl.float32)
    share, _ = _split_gelu(units)
    tl.store(gated + rows[:, None] * WIDTH + columns[None, :], units * share * gates, mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _differentiate_gates(
    grad: tl.tensor,
    outputs: tl.tensor,
    made: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (i, j): the i-th block of rows and the j-th of units."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    places = rows[:, None] * (2 * WIDTH) + columns[None, :]
    units = tl.load(outputs + places, mask=is_inside, other=0.0).to(tl.float32)
    gates = tl.load(outputs + WIDTH + places, mask=is_inside, other=0.0).to(tl.float32)
    given = tl.load(grad + rows[:, None] * WIDTH + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
    share, slope = _split_gelu(units)
    tl.store(made + places, given * gates * slope, mask=is_inside)
    tl.store(made + WIDTH + places, given * units * share, mask=is_inside)


def gate_into(outputs: Tensor, gated: Tensor) -> None:
    """Compute gated units, [..., f], in one launch from units and then their gates, [..., 2f]."""
    _launch_over_units(_gate, gated, outputs.contiguous(), gated)


def differentiate_gates_into(grad: Tensor, outputs: Tensor, made: Tensor) -> None:
    """Compute the gradient of units and gates, [..., 2f], in one launch from that of the gated units, [..., f]."""
    _launch_over_units(_differentiate_gates, grad, grad.contiguous(), outputs.contiguous(), made)


def _launch_over_units(kernel: Any, gated: Tensor, *tensors: Tensor) -> None:
    if not gated.numel():
        return
    width = gated.shape[-1]
    tile, num_rows = {"ROWS": 8, "COLUMNS": min(triton.next_power_of_2(width), 256)}, gated.numel() // width
    grid = triton.cdiv(num_rows, tile["ROWS"]), triton.cdiv(width, tile["COLUMNS"])
    kernel[grid](*tensors, num_rows, WIDTH=width, **tile)


# --- losses over a vocabulary ---


@triton.jit
def _compute_losses(
    scores: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    log_sums: tl.tensor,
    row_stride: tl.tensor,
    num_words: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Program i: the i-th position; each lane keeps the greatest of its scores, and the sum relative to it."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    columns = tl.arange(0, COLUMNS)
    greatest = tl.full([COLUMNS], -1e30, dtype=tl.float32)
    sums = tl.full([COLUMNS], 0.0, dtype=tl.float32)
    for start in range(0, num_words, COLUMNS):
        own = tl.load(scores + start + columns, mask=start + columns < num_words, other=float("-inf")).to(tl.float32)
        greater = tl.maximum(greatest, own)
        sums = sums * tl.exp(greatest - greater) + tl.exp(own - greater)
        greatest = greater
    top = tl.max(greatest, axis=0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(greatest - top), axis=0))
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, log_sum - tl.load(scores + tl.load(labels + row)).to(tl.float32))


@triton.jit
def _differentiate_losses(
    grad: tl.tensor,
    scores: tl.tensor,
    labels: tl.tensor,
    log_sums: tl.tensor,
    made: tl.tensor,
    row_stride: tl.tensor,
    num_words: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (i, j): the i-th position and the j-th block of words."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < num_words
    own = tl.load(scores + row * row_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    share = tl.exp(own - tl.load(log_sums + row)) - tl.where(columns == tl.load(labels + row), 1.0, 0.0)
    tl.store(made + row * num_words + columns, share * tl.load(grad + row), mask=is_inside)


def compute_losses_into(scores: Tensor, labels: Tensor, made: tuple[Tensor, Tensor]) -> None:
    """Compute cross-entropies in one launch, which reads the scores once.

    Scores [P, V] may have any strides between rows, and be -inf but for those of the labels; labels are int64 [P].
    Losses and the logarithms of the sums of exponentials are written to `made`, fp32 [P] each.
    """
    if len(scores):
        rows = scores if scores.stride(1) == 1 else scores.contiguous()
        _compute_losses[(len(rows),)](rows, labels, *made, rows.stride(0), rows.shape[1], COLUMNS=2048)


def differentiate_losses_into(grad: Tensor, scores: Tensor, labels: Tensor, log_sums: Tensor, made: Tensor) -> None:
    """Compute the gradient of the scores, [P, V], in one launch.

    `grad`, of the losses, and `log_sums` are fp32 [P]; scores and labels are as in `compute_losses_into`.
    """
    if len(scores):
        rows, columns = scores if scores.stride(1) == 1 else scores.contiguous(), 2048
        grid = len(rows), triton.cdiv(rows.shape[1], columns)
        _differentiate_losses[grid](
            grad.contiguous(), rows, labels, log_sums, made, rows.stride(0), rows.shape[1], COLUMNS=columns
        )
