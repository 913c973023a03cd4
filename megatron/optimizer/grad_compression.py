"""Compression of gradient sums over data-parallel ranks, for networks on which sending gradients takes most of a step.

int8: every block of :data:`INT8_BLOCK` elements is sent as integers and one fp32 scale, stochastically rounded, so a
sum is exact in the mean and needs no state. An all-reduce is an all-to-all of quantised addends, a sum in fp32 in rank
order, and an all-gather of the quantised sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.param_layout import ALIGNMENT, round_up
from megatron.distributed.random import stable_hash
from megatron.kernels.dropout import mix, random_bits

INT8_BLOCK = ALIGNMENT
"""Elements with one scale. Parameters start at multiples of it in a bucket, so no block mixes two of them: copies of a
parameter on tensor-parallel ranks are quantised alike."""

ROUNDING = stable_hash("int8 rounding")

Reduction = tuple[Pending, Callable[[Tensor], Tensor]]
"""Communication in flight, and a function that computes the flat sum from its result."""


def quantize(x: Tensor, key: Tensor, source: int) -> Tensor:
    """Round blocks stochastically to int8 multiples of 1/127 of their largest magnitude; exact in the mean.

    The bits are a function of (key, source, position). Where a block is not finite, all of its result is not.

    Args:
        x: ``[rows, n]``, finished by :func:`dequantize`; ``INT8_BLOCK`` divides n.
        key: 0-d int64, a hash of what is sent and when.
        source: number of the sender; equal positions of other senders get other bits.

    Returns:
        uint8 ``[rows, n + 4 n / INT8_BLOCK]``: the integers of a row, then its fp32 scales.

    """
    blocks = x.reshape(-1, INT8_BLOCK).float()
    scale = blocks.abs().amax(1, keepdim=True) / 127.0
    inverse = scale.reciprocal().where(scale >= torch.finfo(torch.float32).tiny, 0.0)
    numbers = torch.arange(len(blocks), device=x.device) + (source << 32)
    bits = random_bits(ROUNDING, mix(mix(key) ^ (key >> 32)), numbers, torch.arange(INT8_BLOCK, device=x.device))
    chance = (bits & 0xFFFFFF).float() * 2.0**-24
    rounded = (blocks * inverse + chance).floor_().clamp_(-127.0, 127.0).to(torch.int8)
    return torch.cat([part.view(torch.uint8).view(len(x), -1) for part in (rounded, scale)], dim=1)


def dequantize(message: Tensor) -> Tensor:
    """Return the fp32 values ``[n]`` of one row of :func:`quantize`."""
    values, scales = message.split([n := message.numel() * INT8_BLOCK // (INT8_BLOCK + 4), message.numel() - n])
    scale = scales.clone().view(torch.float32)  # a row may start at any byte
    return (values.view(torch.int8).view(-1, INT8_BLOCK) * scale.unsqueeze(1)).flatten()


def start_int8_reduce_scatter(x: Tensor, group: Group, key: Tensor) -> Reduction:
    """Start summing ``x`` ``[n]`` over the group; the result is this rank's part, fp32 ``[n / size]``.

    ``INT8_BLOCK * size`` divides n; see :func:`int8_all_reduce`.
    """

    def finish(received: Tensor) -> Tensor:
        total, *others = received.view(group.size, -1)
        total = dequantize(total)
        for other in others:  # one after the other: all at once would be as large as x in fp32
            total += dequantize(other)
        return total

    return comm.start_all_to_all(quantize(x.view(group.size, -1), key, group.rank).flatten(), group), finish


def start_int8_all_reduce(x: Tensor, group: Group, key: Tensor) -> Reduction:
    """Start :func:`int8_all_reduce`; ``INT8_BLOCK * size`` divides the length of ``x``."""
    pending, finish_part = start_int8_reduce_scatter(x, group, key)

    def finish(received: Tensor) -> Tensor:
        own = quantize(finish_part(received).unsqueeze(0), key, group.size + group.rank)
        return torch.cat([dequantize(part) for part in comm.all_gather(own, group)])

    return pending, finish


def int8_all_reduce(x: Tensor, group: Group, key: Tensor) -> Tensor:
    """Return the sum of ``x`` over the group, sent in 1.0625 bytes per element; exact in the mean.

    Every addend and every sum is rounded once, by less than 1/127 of the largest magnitude in its block. All ranks get
    the same bits. In a group of one, ``x`` is returned.

    Args:
        x: flat; any length, the same on all ranks.
        group: ranks to sum over.
        key: 0-d int64 on the device of ``x``, equal on all ranks; keys the rounding, so pass another one each time.

    Returns:
        fp32, as long as ``x``.

    """
    if group.size == 1:
        return x
    padded = torch.nn.functional.pad(x, (0, round_up(len(x), INT8_BLOCK * group.size) - len(x)))
    pending, finish = start_int8_all_reduce(padded, group, key)
    return finish(pending.wait())[: len(x)]
