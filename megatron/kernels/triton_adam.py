"""AdamW in Triton: one pass over a large tensor, which also rounds it to the model's weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels import adam as torch_adam
from megatron.kernels.adam import LARGE_RUN, AdamSettings, AdamState

BLOCK = 1024
"""Elements of a program."""


@triton.jit
def _adam(
    param, grad, exp_avg, exp_avg_sq, weight, correction1, correction2, lr, skip, grad_scale, elements,
    one_minus_beta1, one_minus_beta2, eps, weight_decay, SCALED: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0.0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    g = tl.load(grad + at, mask, 0.0)
    if SCALED:
        g /= tl.load(grad_scale)
        tl.store(grad + at, g, mask)
    p, m, v = tl.load(param + at, mask, 0.0), tl.load(exp_avg + at, mask, 0.0), tl.load(exp_avg_sq + at, mask, 0.0)
    m += one_minus_beta1 * (g - m)
    v += one_minus_beta2 * (g * g - v)
    rate = tl.load(lr)
    p -= rate * weight_decay * p
    root = tl.sqrt(v) / tl.sqrt(tl.load(correction2)) + eps
    p -= rate / tl.load(correction1) * (m / root)
    tl.store(param + at, p, mask)
    tl.store(exp_avg + at, m, mask)
    tl.store(exp_avg_sq + at, v, mask)
    if ROUNDED:
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask)


def adam(
    state: AdamState,
    grads: Sequence[Tensor],
    settings: AdamSettings,
    lr: float | Tensor,
    weight_decay: float,
    skip: Tensor,
    grad_scale: Tensor | None = None,
) -> None:
    """Run :data:`megatron.kernels.adam.AdamKernel`.

    Tensors of :data:`LARGE_RUN` elements, or a quarter of all, have a launch of their own; torch's kernel for lists
    takes the others.
    """
    least = min(LARGE_RUN, sum(param.numel() for param in state.params) // 4)
    weights = state.weights or state.params
    everything = list(zip(state.params, state.exp_avgs, state.exp_avg_sqs, state.step_counts, weights, grads))
    large = [tensors for tensors in everything if tensors[0].numel() >= least]
    if small := [tensors for tensors in everything if tensors[0].numel() < least]:
        params, exp_avgs, exp_avg_sqs, counts, small_weights, small_grads = map(list, zip(*small))
        rest = AdamState(params, exp_avgs, exp_avg_sqs, counts, small_weights)
        torch_adam.adam(rest, small_grads, settings, lr, weight_decay, skip, grad_scale)
    if not large:
        return
    counts = [count for _, _, _, count, _, _ in large]
    torch._foreach_add_(counts, [1.0 - skip] * len(counts))  # a single tensor would be read by the host
    count = counts[0].double()
    corrections = [(1.0 - beta**count).float() for beta in (settings.beta1, settings.beta2)]
    rate = lr if isinstance(lr, Tensor) else torch.full_like(skip, lr)
    for param, exp_avg, exp_avg_sq, _, weight, grad in large:
        _adam[triton.cdiv(param.numel(), BLOCK),](
            param, grad, exp_avg, exp_avg_sq, weight, *corrections, rate, skip, grad_scale, param.numel(),
            1.0 - settings.beta1, 1.0 - settings.beta2, settings.eps, weight_decay,
            grad_scale is not None, weight is not param, BLOCK,
        )  # fmt: skip
