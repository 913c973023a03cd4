"""Digests of tensors: sums of their bits modulo 2^64, so one flipped bit always changes them. On the tensor's device.

:func:`digest` reads a tensor once. In :func:`box_digest` every element counts by its place; the parts of a global
tensor add up.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron.distributed.sharding import Box

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes of an element."""

STRIDE = 0x1E3779B97F4A7C15

ROW_WORDS = 1024
"""Words whose sum gets one factor: :func:`digest` depends on the order of rows, not on that inside a row."""


def words_of(x: Tensor) -> Tensor:
    """Return the bits of a tensor as a flat tensor of integers, of 64 bits if its size allows it."""
    size = x.element_size()
    x = x.detach().view(WORDS[size])  # a copy of bool has no other bits than 0 and 1
    if not x.is_contiguous():  # a transposed tensor is read as it lies in memory
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    flat = x.contiguous().view(-1)
    if flat.numel() * size % 8:
        return flat
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)


def digest(x: Tensor) -> Tensor:
    """Return the digest of a tensor, int64, 0-d. The sum of each row of words has an odd factor of its own."""
    words = words_of(x)
    whole = words.numel() // ROW_WORDS * ROW_WORDS
    if whole == 0:
        return words.sum()
    total = (words[:whole].view(-1, ROW_WORDS).sum(1) * row_factors(whole // ROW_WORDS, x.device)).sum()
    return total if whole == words.numel() else total + words[whole:].sum()


@cache
def row_factors(rows: int, device: torch.device) -> Tensor:
    """Return the odd factors of the rows of a digest, int64 ``[rows]``."""
    return torch.arange(1, rows + 1, device=device) * STRIDE | 1


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
