"""Local passes of cross-entropy over a chunk of logits, between the reductions over the vocabulary group.

Shapes: C tokens of a chunk, V this rank's vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.compile import compiled, compiler_missing
from megatron.kernels.operation import Candidate, KernelCheck, Operation


@dataclass(frozen=True)
class CrossEntropyKernel:
    """Three passes over the logits. Each may overwrite its input ``work_CV``, which is passed on to the next."""

    # (logits_CV, held) -> (work_CV, top_C): the largest of the first ``held`` logits, in at least fp32; the rest is
    # padding.
    top: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    # (work_CV, top_C, row_C, mine_C, held) -> sums_2C: the sum of exp(logit - top), and logit[row] - top where this
    # rank holds the label's row (``mine``), else 0.
    sums: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    # (work_CV, top_C, scale_C, mask_C, row_C, mine_C, held, dtype) -> dlogits_CV: scale * exp(logit - top), minus
    # ``mask`` at the label where ``mine``.
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, torch.dtype], Tensor]


def _top(logits_CV: Tensor, held: int) -> tuple[Tensor, Tensor]:
    work_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    work_CV[:, held:] = float("-inf")
    return work_CV, work_CV.amax(-1)


def _sums(work_CV: Tensor, top_C: Tensor, row_C: Tensor, mine_C: Tensor, held: int) -> Tensor:
    work_CV.sub_(top_C.unsqueeze(-1))
    target_C = work_CV.gather(1, row_C.unsqueeze(1)).squeeze(1).where(mine_C, 0.0)
    return torch.stack((work_CV.exp_().sum(-1), target_C))


def _gradient(
    work_CV: Tensor,
    top_C: Tensor,
    scale_C: Tensor,
    mask_C: Tensor,
    row_C: Tensor,
    mine_C: Tensor,
    held: int,
    dtype: torch.dtype,
) -> Tensor:
    work_CV.mul_(scale_C.unsqueeze(-1))
    return work_CV.scatter_add_(1, row_C.unsqueeze(1), (-mask_C).where(mine_C, 0.0).unsqueeze(1)).to(dtype)


EAGER_CROSS_ENTROPY = CrossEntropyKernel(_top, _sums, _gradient)
"""Eager implementation: one fp32 copy of the logits becomes the exponentials and then the gradient in place."""


def _wide_logits(logits_CV: Tensor, held: int) -> Tensor:
    """Return logits in at least fp32, ``-inf`` at the padding; not stored when fused into a compiled pass."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return wide_CV if held == logits_CV.shape[1] else wide_CV.where(_columns(logits_CV) < held, float("-inf"))


def _columns(logits_CV: Tensor) -> Tensor:
    return torch.arange(logits_CV.shape[1], device=logits_CV.device)


def _streamed_top(logits_CV: Tensor, held: int) -> Tensor:
    return _wide_logits(logits_CV, held).amax(-1)


def _streamed_sums(logits_CV: Tensor, top_C: Tensor, row_C: Tensor, mine_C: Tensor, held: int) -> Tensor:
    z_C = (_wide_logits(logits_CV, held) - top_C.unsqueeze(-1)).exp().sum(-1)
    target_C = logits_CV.gather(1, row_C.unsqueeze(1)).squeeze(1).to(top_C.dtype) - top_C
    return torch.stack((z_C, target_C.where(mine_C, 0.0)))


def _streamed_gradient(
    logits_CV: Tensor, top_C: Tensor, scale_C: Tensor, mask_C: Tensor, row_C: Tensor, mine_C: Tensor, held: int
) -> None:
    exp_CV = (_wide_logits(logits_CV, held) - top_C.unsqueeze(-1)).exp()
    at_label_CV = (_columns(logits_CV) == row_C.unsqueeze(1)) & mine_C.unsqueeze(1)
    d_CV = exp_CV * scale_C.unsqueeze(-1) - mask_C.unsqueeze(-1).where(at_label_CV, 0.0)
    logits_CV.copy_(d_CV)


def _streamed() -> CrossEntropyKernel:
    """Compile the passes: logits stay in the dtype of the matrix product, and exponentials are never stored.

    The logits are read three times, and overwritten once by the gradient.
    """
    top, sums, gradient = (compiled(f)() for f in (_streamed_top, _streamed_sums, _streamed_gradient))

    def gradient_in_place(
        work_CV: Tensor,
        top_C: Tensor,
        scale_C: Tensor,
        mask_C: Tensor,
        row_C: Tensor,
        mine_C: Tensor,
        held: int,
        dtype: torch.dtype,
    ) -> Tensor:
        gradient(work_CV, top_C, scale_C, mask_C, row_C, mine_C, held)
        return work_CV

    return CrossEntropyKernel(lambda logits_CV, held: (logits_CV, top(logits_CV, held)), sums, gradient_in_place)


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(7, 24, generator=generator, dtype=torch.float64)
    scale, mask = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    row = torch.randint(0, 21, (7,), generator=generator)

    def run(f: CrossEntropyKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        logits, scale, mask, row, mine = t
        wide = torch.promote_types(logits.dtype, torch.float32)
        work, top = f.top(logits, 21)
        sums = f.sums(work, top, row, mine > 0, 21)
        return top, sums, f.gradient(work, top, scale.to(wide), mask.to(wide), row, mine > 0, 21, logits.dtype)

    return [KernelCheck(run, (logits, scale, mask, row, (torch.arange(7) % 3 > 0).long()), differentiated=False)]


CROSS_ENTROPY = Operation(
    {"compiled": Candidate(_streamed, compiler_missing), "torch": Candidate(lambda: EAGER_CROSS_ENTROPY)}, _checks
)
