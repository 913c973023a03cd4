"""Counter-based dropout: the mask is a hash of global coordinates, equal in every layout and implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.kernels.compiling import compiled, no_compiler
from megatron.kernels.hashing import MASK, mix
from megatron.kernels.operation import Candidate, Operation, Trial

Dropout = Callable[[Tensor, float, Tensor, Tensor, int], Tensor]
"""``dropout(x_SBH, probability, key, samples_B, first_row) -> y_SBH``."""


def dropout(x_SBH: Tensor, probability: float, key: Tensor, samples_B: Tensor, first_row: int) -> Tensor:
    """Drop elements of the residual stream; the others are scaled by ``1 / (1 - probability)``.

    Args:
        x_SBH: rows of the sequence.
        probability: of dropping an element.
        key: 0-d int64, a hash of the step and the place in the model. A tensor, so that a new step does not recompile.
        samples_B: int64 sample ids.
        first_row: position in the sequence of row 0.

    """
    s, _, h = x_SBH.shape
    positions = torch.arange(first_row, first_row + s, device=x_SBH.device).view(-1, 1, 1)
    keep = keep_mask(probability, key, samples_B.view(1, -1, 1), positions, torch.arange(h, device=x_SBH.device))
    return x_SBH * keep * (1.0 / (1.0 - probability))


def keep_mask(probability: float, key: int | Tensor, samples: Tensor, positions: Tensor, channels: Tensor) -> Tensor:
    """Return which elements survive dropout, as a boolean tensor of the broadcast shape.

    A pure function of global coordinates: equal under recomputation and in every layout.

    Args:
        probability: of dropping an element.
        key: 63 bits, a hash of (seed, step, layer, site).
        samples: int64 sample ids, broadcastable with the other two.
        positions: int64 positions in the sequence.
        channels: int64 channels.

    """
    rows = mix(mix(samples ^ (key & MASK)) ^ positions ^ (key >> 32))
    return mix(rows ^ mix(channels + 1)) >= int(probability * (MASK + 1))


def _trials() -> Sequence[Trial]:
    x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    key, samples = torch.tensor(0x1234_5678_9ABC_DEF0), torch.tensor([7, 3_000_000_000])
    return [Trial(lambda f, t: (f(t[0], 0.3, t[1], t[2], 4),), (x, key, samples))]


DROPOUT = Operation(
    {"compiled": Candidate(compiled(dropout), no_compiler), "torch": Candidate(lambda: dropout)}, _trials
)
