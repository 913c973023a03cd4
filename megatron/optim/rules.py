"""Update rules: torch's fused kernels over lists of tensors, with skips decided on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.run import OptimizerConfig


class Rule(Protocol):
    """How parameters move along their gradients."""

    state: dict[str, list[Tensor]]
    """Per-parameter state by kind (``exp_avg``...), in the order of the parameters and of their shapes."""

    step_counts: list[Tensor]
    """Updates so far, 0-d fp32, one for each parameter; empty where the rule does not depend on them."""

    def update(self, grads: Sequence[Tensor], lr: float, weight_decay: float, skip: Tensor) -> None:
        """Move the parameters, unless ``skip`` (fp32 scalar, 0 or 1) is 1: then nothing changes."""


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), bias-corrected."""

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.params, self.config = list(params), config
        self.state = {kind: [torch.zeros_like(p) for p in self.params] for kind in ("exp_avg", "exp_avg_sq")}
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self.params]

    def update(self, grads: Sequence[Tensor], lr: float, weight_decay: float, skip: Tensor) -> None:
        """One step of :class:`Rule`."""
        if not self.params:
            return
        adamw(
            self.params,
            list(grads),
            self.state["exp_avg"],
            self.state["exp_avg_sq"],
            [],
            self.step_counts,
            fused=True,
            found_inf=skip,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.adam_eps,
            maximize=False,
        )


class SGD:
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.params, self.config = list(params), config
        self.state = {"momentum_buffer": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []

    def update(self, grads: Sequence[Tensor], lr: float, weight_decay: float, skip: Tensor) -> None:
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
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


RULES: dict[str, Callable[[Sequence[Tensor], OptimizerConfig], Rule]] = {"adam": AdamW, "sgd": SGD}
