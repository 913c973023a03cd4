"""Digests of tensors: sums of their bits modulo 2^64, so one flipped bit always changes them. On the tensor's device.

:func:`word_sum` and :func:`digest` read a tensor in one kernel or two, and depend on its layout in memory. In
:func:`bit_hash` and :func:`box_digest` every element counts by its place; the parts of a global tensor add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.distributed.sharding import Box

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes of an element."""

STRIDE = 0x1E3779B97F4A7C15

ROW_WORDS = 1024
"""Words whose sum gets one factor: :func:`digest` depends on the order of rows, not on that inside a row."""

HASH_BLOCK = 1 << 22
"""Elements that are hashed at a time, to limit memory."""


@torch.no_grad()
def words_of(x: Tensor) -> Tensor:
    """Return the bits of a tensor as a flat tensor of integers, of 64 bits if its size and place allow it."""
    flat = x.detach().contiguous().view(-1)
    size = flat.element_size()
    aligned = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(torch.int64 if aligned else WORDS[size])


def word_sum(x: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, int64, 0-d; in one kernel."""
    return words_of(x).sum(dtype=torch.int64)


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """Return the digest of a tensor, int64, 0-d. The sum of each row of words has an odd factor of its own."""
    words = words_of(x)
    whole = words.numel() // ROW_WORDS * ROW_WORDS
    if whole == 0:
        return words.sum(dtype=torch.int64)
    rows = words[:whole].view(-1, ROW_WORDS).sum(1, dtype=torch.int64)
    factors = torch.arange(1, len(rows) + 1, device=x.device) * STRIDE | 1
    return (rows * factors).sum() + words[whole:].sum(dtype=torch.int64)


@torch.no_grad()
def bit_hash(x: Tensor) -> Tensor:
    """Return a 64-bit hash of the bits of ``x``, an int64 scalar on its device.

    The hash is the sum, modulo 2^64, of the elements times odd numbers that depend on their positions. A change of one
    element always changes it, and the order of summation does not matter.
    """
    flat = x.contiguous().flatten()
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), HASH_BLOCK):
        block = flat[start : start + HASH_BLOCK]
        total += position_hash(block, torch.arange(start, start + block.numel(), device=x.device))
    return total


def position_hash(x: Tensor, places: Tensor) -> Tensor:
    """Return the sum, modulo 2^64, of the bits of ``x [n]`` times odd numbers that depend on ``places [n]``, int64."""
    position = (places + 1) * STRIDE
    return (x.view(WORDS[x.element_size()]).long() * ((position ^ (position >> 29)) * STRIDE | 1)).sum()


@torch.no_grad()
def box_digest(values: Tensor, box: Box) -> Tensor:
    """Return the part of a global tensor's digest that a box of it contributes, an int64 scalar.

    The factor of an element is the sum of numbers that depend on its place in each dimension; it is odd. So the sums
    over all other dimensions are multiplied, and not every element.

    Args:
        values: of the box, of shape ``box.size``, with one dimension at least.
        box: in the global view.
    """
    words = values.contiguous().view(WORDS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, (start, size) in enumerate(zip(box.start, box.size)):
        others = [other for other in range(words.dim()) if other != dim]
        sums = words.sum(others, dtype=torch.int64) if others else words.long()
        first = (dim << 40) + start + 1
        position = torch.arange(first, first + size, device=values.device) * STRIDE
        total += (sums * (((position ^ (position >> 29)) * STRIDE << 1) + (dim == 0))).sum()
    return total
