"""Triton kernels of :mod:`megatron.kernels.rows`.

A sum of rows is one launch: each program adds a tile of a token's rows in fp32. Rows for ranks and for experts take
three, as these are few: count the choices of each in a block, add up the counts of the blocks before, and place each
choice after those before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels import rows
from megatron.kernels.rows import PlacedChoices, Ranks, RowKernels, SentRows

TILE = 1024
"""Columns of a program that adds rows."""

ELEMENTS = 16_384
"""Elements of a program that counts or places: choices by numbers, and blocks by numbers."""

MAX_NUMBERS, MAX_BLOCKS = 1024, 4096
"""Above, PyTorch does it."""


@triton.jit
def _sum_rows(x, places, y, rows, width, stride, C: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(C):
        row = tl.load(places + token * C + c).to(tl.int64)
        total += tl.load(x + row * stride + columns, inside & (row < rows), 0.0).to(tl.float32)
    tl.store(y + token * width + columns, total, inside)


def sum_rows(x_RH: Tensor, places_TC: Tensor, complete: bool) -> Tensor:
    """See :func:`megatron.kernels.rows.sum_rows`."""
    (rows, width), (tokens, count) = x_RH.shape, places_TC.shape
    y = torch.empty((tokens, width), dtype=x_RH.dtype, device=x_RH.device)
    block: Any = min(TILE, triton.next_power_of_2(width))
    if y.numel():
        grid, x_RH = (tokens, triton.cdiv(width, block)), x_RH if x_RH.stride(1) == 1 else x_RH.contiguous()
        arguments = x_RH, places_TC.contiguous(), y, rows, width, x_RH.stride(0)
        _sum_rows[grid](*arguments, count, block, num_warps=4)
    return y


@triton.jit
def _add_blocks(counts, totals, blocks, NUMBERS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    numbers = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * NUMBERS + numbers[None, :]
    inside = (block < blocks)[:, None] & (numbers < NUMBERS)[None, :]
    count = tl.load(counts + at, inside, 0)
    tl.store(counts + at, tl.cumsum(count, 0) - count, inside)
    tl.store(totals + numbers, tl.sum(count, 0), numbers < NUMBERS)


def _blocks(items: int, numbers: int) -> tuple[int, int]:
    """Return the items of a block, and the number of blocks."""
    block = max(16, min(128, ELEMENTS // numbers))
    return block, triton.cdiv(items, block)


def _sum_before(counts: Tensor) -> Tensor:
    """Replace the counts of blocks ``[B + 1, numbers]`` by those of the blocks before; return those of all."""
    (blocks, numbers), totals = (len(counts) - 1, counts.shape[1]), counts[-1]
    size: Any = max(16, triton.next_power_of_2(blocks))
    tile: Any = min(numbers, max(1, ELEMENTS // size))
    _add_blocks[(triton.cdiv(numbers, tile),)](counts, totals, blocks, numbers, size, tile, num_warps=8)
    return totals


# ---- Rows for ranks


@triton.jit
def _is_on(experts, k, token, tokens, local, ep, TOPK: tl.constexpr, RANKS: tl.constexpr):
    """Return which rank holds the k-th choice of each token, as bool ``[tokens, RANKS]``."""
    numbers = tl.arange(0, RANKS)
    rank = tl.load(experts + token * TOPK + k, token < tokens, 0) // local
    return (rank[:, None] == numbers[None, :]) & (token < tokens)[:, None] & (numbers < ep)[None, :]


@triton.jit
def _count_ranks(experts, counts, tokens, local, ep, TOPK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.zeros((BLOCK, RANKS), tl.int32)
    choices = tl.zeros((BLOCK, RANKS), tl.int32)
    for k in tl.static_range(TOPK):
        on = _is_on(experts, k, token, tokens, local, ep, TOPK, RANKS).to(tl.int32)
        rows |= on
        choices += on
    at = counts + tl.program_id(0) * 2 * RANKS + tl.arange(0, RANKS)
    tl.store(at, tl.sum(rows, 0))
    tl.store(at + RANKS, tl.sum(choices, 0))


@triton.jit
def _place_rows(
    experts, weights, before, totals, source, places, choices, overflowed, tokens, local, ep, block, slots,
    BOUNDED: tl.constexpr, TP: tl.constexpr, TOPK: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program, numbers, columns = tl.program_id(0), tl.arange(0, RANKS), tl.arange(0, COLUMNS)
    token = program * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (columns < TOPK)[None, :]
    at = token[:, None] * TOPK + columns[None, :]
    number = (tl.load(experts + at, inside, 0) + 1).to(tl.float32)
    weight = tl.load(weights + at, inside, 0.0)
    total = tl.load(totals + numbers)
    chosen = tl.zeros((BLOCK, RANKS), tl.int32)
    for k in tl.static_range(TOPK):
        chosen |= _is_on(experts, k, token, tokens, local, ep, TOPK, RANKS).to(tl.int32)
    within = tl.load(before + program * 2 * RANKS + numbers)[None, :] + tl.cumsum(chosen, 0) - chosen
    first, size = (tl.cumsum(total, 0) - total) * TP, total
    room = within >= 0
    if BOUNDED:
        first, size, room = numbers * TP * block, tl.zeros((RANKS,), tl.int32) + block, within < block
    if overflowed is not None:
        full = tl.max(total, 0) > block
        weight = tl.where(full, float("nan"), weight)
        if program == 0:
            tl.store(overflowed, 1, full)
    seen = tl.zeros((BLOCK, RANKS), tl.int32)
    for k in tl.static_range(TOPK):
        on = _is_on(experts, k, token, tokens, local, ep, TOPK, RANKS).to(tl.int32)
        new = (on - (on & seen)) * room.to(tl.int32)
        seen |= on
        has = tl.sum(new, 1) > 0
        row, step = tl.sum(new * (first[None, :] + within), 1), tl.sum(new * size[None, :], 1)
        for copy in tl.static_range(TP):
            place = (row + copy * step).to(tl.int64)
            tl.store(places + (token * TOPK + k) * TP + copy, tl.where(has, place, slots), token < tokens)
            tl.store(source + place, token.to(tl.int64), has)
            to = choices + place[:, None] * (2 * TOPK) + columns[None, :]
            tl.store(to, weight, has[:, None] & inside)
            tl.store(to + TOPK, number, has[:, None] & inside)
    if BOUNDED:
        zeros = tl.zeros((BLOCK, COLUMNS), tl.float32)
        programs = tl.num_programs(0)
        for i in tl.range(tl.cdiv(slots - program * BLOCK, programs * BLOCK)):
            slot = (program + i * programs) * BLOCK + tl.arange(0, BLOCK)
            rank = slot // block
            held = tl.load(totals + rank // TP, slot < slots, 0)
            empty = (slot < slots) & (slot - rank * block >= held)
            tl.store(source + slot, tokens, empty)
            to = choices + slot[:, None].to(tl.int64) * (2 * TOPK) + columns[None, :]
            tl.store(to, zeros, empty[:, None] & (columns < TOPK)[None, :])
            tl.store(to + TOPK, zeros, empty[:, None] & (columns < TOPK)[None, :])


def send_rows(
    experts_TK: Tensor, weights_TK: Tensor, ranks: Ranks, block: int | None, overflowed: Tensor | None
) -> SentRows:
    """See :func:`megatron.kernels.rows.send_rows`."""
    (tokens, topk), (local, ep, tp) = experts_TK.shape, ranks
    size: Any = triton.next_power_of_2(ep)
    columns: Any = triton.next_power_of_2(topk)
    items, blocks = _blocks(tokens, max(2 * size, columns))
    count: Any = items
    if max(size, columns) > MAX_NUMBERS or not 0 < blocks <= MAX_BLOCKS or weights_TK.dtype != torch.float32:
        return rows.send_rows(experts_TK, weights_TK, ranks, block, overflowed)
    slots = tokens * min(topk, ep) * tp if block is None else ep * tp * block
    source, places = (torch.empty(n, dtype=torch.int64, device=experts_TK.device) for n in (slots, tokens * topk * tp))
    choices = torch.empty((slots, 2 * topk), dtype=torch.float32, device=experts_TK.device)
    counts = torch.empty((blocks + 1, 2 * size), dtype=torch.int32, device=experts_TK.device)
    experts_TK, sizes, numbers = experts_TK.contiguous(), (tokens, local, ep), (topk, size)
    _count_ranks[(blocks,)](experts_TK, counts, *sizes, *numbers, count, num_warps=4)
    totals = _sum_before(counts)
    tensors = experts_TK, weights_TK.contiguous(), counts, totals, source, places, choices, overflowed
    options = block is not None, tp, *numbers, columns, count
    _place_rows[(blocks,)](*tensors, *sizes, block or 0, slots, *options, num_warps=4)
    return SentRows(source, places.view(tokens, -1), choices, totals.view(2, size)[:, :ep])


# ---- Rows for experts


@triton.jit
def _local_expert(experts, at, total, topk, stride, first, local):
    """Return the local expert of choices; ``local`` for none, -1 beyond the end."""
    number = tl.load(experts + (at // topk).to(tl.int64) * stride + at % topk, at < total, 0).to(tl.int32) - first
    number = tl.where((number >= 0) & (number < local), number, local)
    return tl.where(at < total, number, -1)


@triton.jit
def _count_experts(experts, counts, total, topk, stride, first, local, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.arange(0, NUMBERS)
    found = _local_expert(experts, at, total, topk, stride, first, local)[:, None] == numbers[None, :]
    tl.store(counts + tl.program_id(0) * NUMBERS + numbers, tl.sum(found.to(tl.int32), 0))


@triton.jit
def _place_choices(
    experts, weights, before, totals, source, places, placed, ends, overflowed,
    total, topk, stride, first, local, weight_stride, rows, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, numbers = tl.program_id(0), tl.arange(0, NUMBERS)
    at = program * BLOCK + tl.arange(0, BLOCK)
    token = (at // topk).to(tl.int64)
    inside = at < total
    count = tl.load(totals + numbers)
    end = tl.cumsum(count, 0)
    needed = tl.sum(tl.where(numbers < local, count, 0), 0)
    before_block = end - count + tl.load(before + program * NUMBERS + numbers)
    number = _local_expert(experts, at, total, topk, stride, first, local)
    found = (number[:, None] == numbers[None, :]).to(tl.int32)
    place = tl.sum(found * (before_block[None, :] + tl.cumsum(found, 0) - 1), 1).to(tl.int64)
    weight = tl.load(weights + token * weight_stride + at % topk, inside, 0.0)
    if overflowed is not None:
        weight = tl.where(needed > rows, float("nan"), weight)
        if program == 0:
            tl.store(overflowed, 1, needed > rows)
    tl.store(places + at, tl.where(place < tl.minimum(needed, rows), place, rows), inside)
    tl.store(source + place, token, inside & (place < rows))
    tl.store(placed + place, weight, inside & (place < rows))
    if program == 0:
        tl.store(ends + numbers, tl.minimum(end, rows), numbers < local)


def place_choices(
    experts_NK: Tensor, weights_NK: Tensor, first: int, local: int, count: int, overflowed: Tensor | None
) -> PlacedChoices:
    """See :func:`megatron.kernels.rows.place_choices`."""
    if experts_NK.stride(1) != 1 or weights_NK.stride(1) != 1:
        experts_NK, weights_NK = experts_NK.contiguous(), weights_NK.contiguous()
    numbers: Any = max(16, triton.next_power_of_2(local + 1))
    total, topk = experts_NK.numel(), experts_NK.shape[1]
    items, blocks = _blocks(total, numbers)
    block: Any = items
    if numbers > MAX_NUMBERS or not 0 < blocks <= MAX_BLOCKS:
        return rows.place_choices(experts_NK, weights_NK, first, local, count, overflowed)
    source = torch.empty(count, dtype=torch.int64, device=experts_NK.device)
    places = torch.empty((len(experts_NK), topk), dtype=torch.int64, device=experts_NK.device)
    weights = torch.empty(count, dtype=weights_NK.dtype, device=experts_NK.device)
    counts = torch.empty((blocks + 1, numbers), dtype=torch.int32, device=experts_NK.device)
    ends = torch.empty(local, dtype=torch.int32, device=experts_NK.device)
    sizes = total, topk, experts_NK.stride(0), first, local
    _count_experts[(blocks,)](experts_NK, counts, *sizes, numbers, block, num_warps=8)
    tensors = experts_NK, weights_NK, counts, _sum_before(counts), source, places, weights, ends, overflowed
    _place_choices[(blocks,)](*tensors, *sizes, weights_NK.stride(0), count, numbers, block, num_warps=8)
    return PlacedChoices(source, places, weights, ends)


@triton.jit
def _gather_choices(dweights, places, out, rows, total, width, topk, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, column = at < total, at % width
    place = tl.load(places + (at // width).to(tl.int64) * topk + column, inside & (column < topk), rows)
    tl.store(out + at, tl.load(dweights + place, place < rows, 0.0), inside)


def gather_choices(dweights_R: Tensor, places_NK: Tensor, width: int) -> Tensor:
    """See :func:`megatron.kernels.rows.gather_choices`."""
    (tokens, topk), block = places_NK.shape, 1024
    out = torch.empty((tokens, width), dtype=dweights_R.dtype, device=dweights_R.device)
    if out.numel():
        grid, size = (triton.cdiv(out.numel(), block),), len(dweights_R)
        arguments = dweights_R.contiguous(), places_NK, out, size, out.numel(), width, topk
        _gather_choices[grid](*arguments, block, num_warps=4)
    return out


# ---- Random logits


@triton.jit
def _mix(x):
    """See :func:`megatron.kernels.dropout.mix`."""
    x = x & 0xFFFFFFFF
    for _ in tl.static_range(2):
        x = (((x >> 16) ^ x) * 0x45D9F3B) & 0xFFFFFFFF
    return (x >> 16) ^ x


@triton.jit(do_not_specialize=["key"])
def _random_logits(samples, positions, out, key, total, batch, experts, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, inside = at // experts, at < total
    heads = _mix(tl.load(samples + row % batch, inside, 0) ^ (key & 0xFFFFFFFF))
    rows = _mix(heads ^ tl.load(positions + row // batch, inside, 0) ^ (key >> 32))
    bits = _mix(rows ^ _mix(at % experts + 1))
    tl.store(out + at, (bits >> 8).to(tl.float32) / 8388608.0 - 1.0, inside)


def random_logits(key: int, samples_B: Tensor, positions_S: Tensor, experts: int) -> Tensor:
    """See :func:`megatron.kernels.rows.random_logits`."""
    sizes, block = (len(positions_S), len(samples_B), experts), 1024
    out = torch.empty(sizes, dtype=torch.float32, device=samples_B.device)
    grid = (triton.cdiv(out.numel(), block),)
    arguments = samples_B.contiguous(), positions_S.contiguous(), out, key, out.numel(), *sizes[1:]
    _random_logits[grid](*arguments, block, num_warps=4)
    return out


TRITON_ROWS = RowKernels(sum_rows, send_rows, place_choices, gather_choices, random_logits)
