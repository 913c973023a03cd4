"""Copies of rows and their sums: what a mixture of experts does with its tokens.

Tokens become rows twice: for the ranks that they are sent to, and for the experts of the rank where they arrive.

Shapes: T tokens, K choices of a token, S rows that are sent, N tokens that arrive, R rows of experts, C rows of an item
at most, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.compile import triton_missing, triton_region
from megatron.kernels.dropout import uniform_noise
from megatron.kernels.operation import Candidate, KernelCheck, Operation


class Ranks(NamedTuple):
    """The ranks that together hold all experts: EP of them with different ones, each ``tp`` times."""

    # Experts of a rank, in the order of ranks.
    local: int
    ep: int
    tp: int


class SentRows(NamedTuple):
    """Rows for each rank, in the order of ranks and tokens: one for every token that chooses some of its experts."""

    # Token of each row, int64 [S]; T for a row of zeros.
    source: Tensor
    # Rows of each token, int64 [T, K x tp]: that of a choice if it is the token's first on a rank, S and above if not.
    places: Tensor
    # Weights of the token's choices, and their experts plus 1 [S, 2K]; zeros in a row of zeros.
    choices: Tensor
    # Rows for each EP rank, and choices of its experts, int32 [2, EP].
    counts: Tensor


class PlacedChoices(NamedTuple):
    """A row for each choice, sorted by expert; those after the last expert's are padding."""

    # Token of each row, int64 [R].
    source: Tensor
    # Row of each choice, int64 [N, K]; R for none.
    places: Tensor
    # Weight of each row [R].
    weights: Tensor
    # Cumulative numbers of the rows of this rank's experts, int32.
    ends: Tensor


class RowKernels(NamedTuple):
    """An implementation of all; none is differentiable."""

    # (x_RH, places_TC, complete) -> y_TH
    sum_rows: Callable[[Tensor, Tensor, bool], Tensor]
    # (experts_TK, weights_TK, ranks, block, overflowed) -> SentRows
    send_rows: Callable[[Tensor, Tensor, Ranks, int | None, Tensor | None], SentRows]
    # (experts_NK, weights_NK, first, local, rows, overflowed) -> PlacedChoices
    place_choices: Callable[[Tensor, Tensor, int, int, int, Tensor | None], PlacedChoices]
    # (dweights_R, places_NK, width) -> dweights [N, width]
    gather_choices: Callable[[Tensor, Tensor, int], Tensor]
    # (key, samples_B, positions_S, experts) -> logits_SBE, fp32
    random_logits: Callable[[int, Tensor, Tensor, int], Tensor]


def sum_rows(x_RH: Tensor, places_TC: Tensor, complete: bool) -> Tensor:
    """Return ``y_t = sum_c x[places[t, c]]``, added in at least fp32 and rounded once; a gather if C is 1.

    Args:
        x_RH: the rows.
        places_TC: their numbers, int64; R and above add nothing.
        complete: no number is above R - 1.
    """
    rows = len(x_RH)
    if not complete:
        x_RH, places_TC = torch.cat([x_RH, x_RH.new_zeros(1, x_RH.shape[1])]), places_TC.clamp(max=rows)
    if places_TC.shape[1] == 1 or not len(places_TC):
        return x_RH.index_select(0, places_TC[:, 0])
    if x_RH.is_cuda or x_RH.dtype in (torch.float32, torch.float64):
        return F.embedding_bag(places_TC, x_RH, mode="sum")
    return x_RH[places_TC].sum(1)  # on CPUs a bag adds in half precision


def send_rows(
    experts_TK: Tensor, weights_TK: Tensor, ranks: Ranks, block: int | None, overflowed: Tensor | None
) -> SentRows:
    """Arrange the rows that a rank sends.

    Args:
        experts_TK: choices, all experts of a token different; an expert above all is none.
        weights_TK: their weights.
        ranks: that hold the experts.
        block: rows for each rank, padded with rows of zeros; None to put as many rows as there are one after another,
            followed by others of any content.
        overflowed: 0-d, set to True if a block is too small. Then all weights become NaN. None if that cannot be.
    """
    (tokens, topk), (local, ep, tp) = experts_TK.shape, ranks
    ranks_TK = (experts_TK // local).clamp(max=ep)
    numbers, copies = (torch.arange(n, device=experts_TK.device) for n in (ep, tp))
    chosen_TE = torch.zeros(tokens, ep + 1, dtype=torch.int32, device=experts_TK.device).scatter_(1, ranks_TK, 1)
    rows_E = chosen_TE[:, :ep].sum(0, dtype=torch.int32)
    choices_E = (ranks_TK.flatten() == numbers.unsqueeze(1)).sum(1, dtype=torch.int32)
    repeated_TK = (ranks_TK.unsqueeze(2) == ranks_TK.unsqueeze(1)).tril(-1).any(2)
    within_TK = (chosen_TE.cumsum(0) - 1).gather(1, ranks_TK)
    none_TK = repeated_TK | (ranks_TK == ep)
    if block is None:
        slots = tokens * min(topk, ep) * tp
        firsts = tp * (rows_E.cumsum(0) - rows_E).unsqueeze(1) + copies * rows_E.unsqueeze(1)
    else:
        slots = ep * tp * block
        firsts = block * torch.arange(ep * tp, device=experts_TK.device).view(ep, tp)
        none_TK |= within_TK >= block
        if overflowed is not None:
            full = (rows_E > block).any()
            overflowed.logical_or_(full)
            weights_TK = weights_TK.masked_fill(full, torch.nan)
    places = F.pad(firsts, (0, 0, 0, 1))[ranks_TK] + within_TK.unsqueeze(2)
    places = places.masked_fill(none_TK.unsqueeze(2), slots).view(tokens, topk * tp)
    source = torch.full((slots + 1,), tokens, device=experts_TK.device)
    source = source.scatter_(0, places.flatten(), torch.arange(places.numel(), device=source.device) // (topk * tp))[
        :-1
    ]
    choices = torch.cat([weights_TK, (experts_TK + 1).to(weights_TK.dtype)], 1)
    choices = sum_rows(choices, source.unsqueeze(1), False)
    return SentRows(source, places, choices, torch.stack([rows_E, choices_E]))


def place_choices(
    experts_NK: Tensor, weights_NK: Tensor, first: int, local: int, rows: int, overflowed: Tensor | None
) -> PlacedChoices:
    """Sort the choices by expert, stably.

    Args:
        experts_NK: experts of each token, of any dtype.
        weights_NK: their weights, in the first K columns.
        first: this rank's first expert; those before, and from ``first + local`` on, are of other ranks or none.
        local: experts of this rank.
        rows: number of rows, at most N K. Choices beyond have none.
        overflowed: 0-d, set to True if there are choices beyond. Then all weights become NaN. None if that cannot be.
    """
    topk = experts_NK.shape[1]
    keys = experts_NK.flatten().to(torch.int64) - first
    keys = keys.masked_fill((keys < 0) | (keys > local), local)
    # A radix sort takes a pass per byte.
    dtype = torch.uint8 if local < 256 else torch.int16 if local < 32768 else torch.int32
    found, order = torch.sort(keys.to(dtype), stable=True)
    numbers, below = torch.arange(len(order), device=keys.device), torch.arange(local, device=keys.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    ends = torch.searchsorted(found, below.to(dtype), right=True, out_int32=True)
    weights = weights_NK[:, :topk].flatten().index_select(0, order[:rows])
    if overflowed is not None:
        full = ends[-1] > rows
        overflowed.logical_or_(full)
        weights = weights.masked_fill(full, torch.nan)
    ends = ends.clamp(max=rows)
    places = places.where(places < ends[-1:], rows)
    return PlacedChoices(order[:rows] // topk, places.view(-1, topk), weights, ends)


def gather_choices(dweights_R: Tensor, places_NK: Tensor, width: int) -> Tensor:
    """Return the adjoint of the weights of :func:`place_choices`, with columns of zeros up to ``width``."""
    dweights_NK = sum_rows(dweights_R.unsqueeze(1), places_NK.reshape(-1, 1), False).view(places_NK.shape)
    return F.pad(dweights_NK, (0, width - places_NK.shape[1]))


def random_logits(key: int, samples_B: Tensor, positions_S: Tensor, experts: int) -> Tensor:
    """Return :func:`megatron.kernels.dropout.uniform_noise` for the experts of each token."""
    numbers = torch.arange(experts, device=samples_B.device)
    return uniform_noise(key, samples_B.view(1, -1, 1), positions_S.view(-1, 1, 1), numbers)


TORCH_ROWS = RowKernels(sum_rows, send_rows, place_choices, gather_choices, random_logits)


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 96, generator=generator, dtype=torch.float64)
    every, some = (torch.randint(end, (30, 4), generator=generator) for end in (40, 60))
    experts = torch.rand(700, 24, generator=generator).argsort(1)[:, :5]
    weights, dropped = torch.rand(700, 5, generator=generator).double(), experts.clone()
    dropped[::3] = 24

    def add(f: RowKernels, t: Sequence[Tensor]) -> Sequence[Tensor]:
        one = f.sum_rows(t[0], t[2][:, :1].contiguous(), False)
        return f.sum_rows(t[0], t[1], True), f.sum_rows(t[0][:, 1:], t[2], False), one

    def send(f: RowKernels, t: Sequence[Tensor]) -> Sequence[Tensor]:
        weights, experts, dropped = t[0].float(), t[1], t[2]
        overflowed = torch.zeros(2, dtype=torch.bool, device=weights.device)
        held = f.send_rows(experts, weights, Ranks(8, 3, 2), 650, overflowed[0])
        full = f.send_rows(dropped, weights, Ranks(4, 6, 1), 300, overflowed[1])
        exact = f.send_rows(dropped, weights, Ranks(4, 6, 2), None, None)
        total = 2 * int(exact.counts[0].sum())
        exact = SentRows(exact.source[:total], exact.places.clamp(max=total), exact.choices[:total], exact.counts)
        outputs = [each.nan_to_num(-1.0) for sent in (held, full, exact) for each in sent]
        return [each.double() for each in (*outputs, overflowed)]

    def place(f: RowKernels, t: Sequence[Tensor]) -> Sequence[Tensor]:
        choices = torch.cat([t[0].float(), t[1] + 1], 1)
        overflowed = torch.zeros(2, dtype=torch.bool, device=choices.device)
        every = f.place_choices(t[1], t[0].float(), 0, 24, t[1].numel(), None)
        held = f.place_choices(choices[:, 5:], choices, 9, 8, 1400, overflowed[0])
        full = f.place_choices(choices[:, 5:], choices, 17, 7, 900, overflowed[1])
        outputs = [each.nan_to_num(-1.0) for placed in (every, held, full) for each in placed]
        grads = f.gather_choices(held.weights, held.places, 10), f.gather_choices(every.weights, every.places, 5)
        return [each.double() for each in (*outputs, *grads, overflowed)]

    def draw(f: RowKernels, t: Sequence[Tensor]) -> Sequence[Tensor]:
        return (f.random_logits(0x1234_5678_9ABC_DEF0, t[0], t[1], 5).double(),)

    numbers = torch.tensor([7, 3_000_000_000]), torch.arange(4, 500)
    return [
        KernelCheck(run, inputs, differentiated=False)
        for run, inputs in (
            (add, (x, every, some)),
            (send, (weights, experts, dropped)),
            (place, (weights, dropped)),
            (draw, numbers),
        )
    ]


ROWS = Operation(
    {
        "triton": Candidate(triton_region("TRITON_ROWS", "triton_rows"), triton_missing),
        "torch": Candidate(lambda: TORCH_ROWS),
    },
    _checks,
)
