"""AdamW step over lists of tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.kernels.compile import triton_missing, triton_region
from megatron.kernels.operation import Candidate, KernelCheck, Operation, missing_modules

LARGE_RUN = 1 << 24
"""Elements from which a tensor has a kernel of its own. A kernel for lists of tensors processes about as many."""

APEX_CHUNK = 1 << 16
"""Elements per block of apex's kernel; the size that apex itself uses."""


@dataclass(frozen=True)
class AdamState:
    """Parameters and their state, as lists in the same order."""

    # Of one dtype, at least fp32.
    params: list[Tensor]
    # First and second moments, of the same dtype and shapes.
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    # Updates so far: fp32, 0-d, one per parameter, all equal.
    step_counts: list[Tensor]
    # Weights of the model to round the updated parameters to, or empty. A parameter that is its own weight is in both.
    weights: Sequence[Tensor] = ()

    @property
    def rounded(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of weights and the parameters that are rounded to them."""
        return [(weight, param) for weight, param in zip(self.weights, self.params) if weight is not param]


@dataclass(frozen=True)
class AdamSettings:
    """Hyperparameters of Adam that are constant over a run."""

    beta1: float
    beta2: float
    eps: float


AdamKernel = Callable[[AdamState, Sequence[Tensor], AdamSettings, float | Tensor, float, Tensor, Tensor | None], None]
"""``adam(state, grads, settings, lr, weight_decay, skip, grad_scale)``: AdamW, bias-corrected.

By Loshchilov & Hutter 2019. ``lr`` is a number or a 0-d fp32 tensor on the device. ``skip`` is such a tensor; if it is
1 nothing changes, including the step counts. ``grad_scale`` is None or such a tensor: fp32 gradients are first divided
by it, in place. The weights, if any, are the parameters rounded to nearest, ties to even, as ``copy_`` rounds.
"""


def round_to(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first, of another dtype, in few kernels."""
    small = []
    for weight, param in pairs:
        if weight.numel() >= LARGE_RUN:
            weight.copy_(param)
        else:
            small.append((weight, param))
    if small:
        weights, params = zip(*small)
        torch._foreach_copy_(weights, params)


def adam(
    state: AdamState,
    grads: Sequence[Tensor],
    settings: AdamSettings,
    lr: float | Tensor,
    weight_decay: float,
    skip: Tensor,
    grad_scale: Tensor | None = None,
) -> None:
    """Run :data:`AdamKernel` with torch's fused kernel."""
    adamw(
        state.params,
        list(grads),
        state.exp_avgs,
        state.exp_avg_sqs,
        [],
        state.step_counts,
        fused=True,
        grad_scale=grad_scale,
        found_inf=skip,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=settings.eps,
        maximize=False,
    )
    round_to(state.rounded)


def _apex_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype == torch.float64:
        return "apex needs fp32 weights on a GPU"
    return missing_modules("amp_C")


def _apex() -> AdamKernel:
    """Load apex's ``multi_tensor_adam_capturable``, which reads learning rate, count and skip from the device."""
    kernels: Any = importlib.import_module("amp_C")

    def apex_adam(
        state: AdamState,
        grads: Sequence[Tensor],
        settings: AdamSettings,
        lr: float | Tensor,
        weight_decay: float,
        skip: Tensor,
        grad_scale: Tensor | None = None,
    ) -> None:
        one = torch.ones(1, dtype=torch.float32, device=skip.device)
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=skip.device)
        # a single tensor would be read by the host
        torch._foreach_add_(state.step_counts, [1.0 - skip] * len(state.step_counts))
        kernels.multi_tensor_adam_capturable(
            APEX_CHUNK,
            skip.to(torch.int32).view(1),
            [list(grads), state.params, state.exp_avgs, state.exp_avg_sqs],
            rate.view(1),
            settings.beta1,
            settings.beta2,
            settings.eps,
            state.step_counts[0].to(torch.int32).view(1),
            1,  # decoupled weight decay
            1,  # bias correction
            weight_decay,
            one if grad_scale is None else one / grad_scale,
        )
        round_to(state.rounded)

    return apex_adam


def _checks() -> Sequence[KernelCheck]:
    """Compare moments, counts, gradients and the change of the parameters (more sensitive than these) of three steps.

    The first parameter has a bf16 weight, which must equal its cast; the second is its own weight.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 5), (3,))
    params, *grads = ([torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(4))

    def run(f: AdamKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        tensors = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in t]
        before, grads = tensors[:2], tensors[2:]
        after = [p.clone() for p in before]
        moments = [[torch.zeros_like(p) for p in after] for _ in range(2)]
        counts = [torch.zeros((), dtype=torch.float32, device=p.device) for p in after]
        weights = [after[0].bfloat16(), after[1]]
        state, settings = AdamState(after, moments[0], moments[1], counts, weights), AdamSettings(0.9, 0.95, 1e-3)
        for at, skip in ((0, 0.0), (2, 1.0), (4, 0.0)):
            flag = torch.full((), skip, dtype=torch.float32, device=after[0].device)
            scale = torch.full_like(flag, 4.0) if at else None
            f(state, grads[at : at + 2], settings, torch.full_like(flag, 0.125), 0.25, flag, scale)
        changes = [a - b for a, b in zip(after, before)]
        return [*changes, *moments[0], *moments[1], *counts, *grads, weights[0] - after[0].bfloat16()]

    return [KernelCheck(run, (*params, *(g for some in grads for g in some)), differentiated=False)]


ADAM = Operation(
    {
        "triton": Candidate(triton_region("adam", "triton_adam"), triton_missing),
        "apex": Candidate(_apex, _apex_missing),
        "torch": Candidate(lambda: adam),
    },
    _checks,
)
