"""Update rules over lists of tensors, torch's fused kernels where there are any, with skips decided on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.config.run import OptimizerConfig
from megatron.kernels.adam import Adam, AdamSettings, AdamState, adam
from megatron.optim.blocks import blocks

Rate = float | Tensor
"""A learning rate; a 0-d tensor where the GPU is to read it from its own memory."""


class Rule(Protocol):
    """How parameters move along their gradients."""

    params: list[Tensor]
    """What is moved."""

    state: dict[str, list[Tensor]]
    """Per-parameter state by kind (``exp_avg``...), in the order of the parameters and of their shapes."""

    step_counts: list[Tensor]
    """Updates so far, 0-d fp32, one for each parameter; empty where the rule does not depend on them."""

    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """Move the parameters, unless ``skip`` (fp32 scalar, 0 or 1) is 1: then nothing changes."""


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), bias-corrected."""

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig, kernel: Adam = adam) -> None:
        self.params, self.kernel = list(params), kernel
        self.settings = AdamSettings(config.adam_beta1, config.adam_beta2, config.adam_eps)
        self.state = {kind: [torch.zeros_like(p) for p in self.params] for kind in ("exp_avg", "exp_avg_sq")}
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self.params]

    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """One step of :class:`Rule`."""
        if not self.params:
            return
        state = AdamState(self.params, self.state["exp_avg"], self.state["exp_avg_sq"], self.step_counts)
        self.kernel(state, grads, self.settings, lr, weight_decay, skip)


class SGD:
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.params, self.config = list(params), config
        self.state = {"momentum_buffer": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []

    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """One step of :class:`Rule`."""
        if not self.params:
            return
        buffers: list[Tensor | None] = list(self.state["momentum_buffer"])
        sgd(
            self.params,
            list(grads),
            buffers,
            fused=True,
            found_inf=skip,
            weight_decay=weight_decay,
            momentum=self.config.sgd_momentum,
            lr=lr,  # type: ignore[arg-type]  # a tensor is as good, only torch does not say so
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Lion:
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv 2302.06675).

    ``w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)``, then ``m = beta2 * m + (1 - beta2) * g``.
    """

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.params, self.config = list(params), config
        self.state: dict[str, list[Tensor]] = {"exp_avg": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """One step of :class:`Rule`, in blocks: what it needs besides is two of them."""
        go = 1.0 - skip.double()
        for block in blocks(self.params):
            params, momenta = ([cut.of(held) for cut in block] for held in (self.params, self.state["exp_avg"]))
            # Where a step is skipped the momentum takes the place of the gradient, and stays as it is.
            given = [cut.of(grads).where(go > 0, momentum) for cut, momentum in zip(block, momenta)]
            steps = torch._foreach_lerp(momenta, given, 1.0 - self.config.lion_beta1)
            torch._foreach_sign_(steps)
            torch._foreach_mul_(steps, (lr * go).to(params[0].dtype))
            torch._foreach_mul_(params, (1.0 - lr * weight_decay * go).to(params[0].dtype))
            torch._foreach_sub_(params, steps)
            torch._foreach_lerp_(momenta, given, 1.0 - self.config.lion_beta2)


RULES: dict[str, Callable[[Sequence[Tensor], OptimizerConfig], Rule]] = {"adam": AdamW, "sgd": SGD, "lion": Lion}
