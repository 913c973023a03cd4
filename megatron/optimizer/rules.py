"""Update rules (AdamW, SGD, Lion) over lists of tensors; skipped steps are decided on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.config.optimizer import RULE_STATE, OptimizerConfig
from megatron.config.plugins import registered
from megatron.kernels.adam import AdamKernel, AdamSettings, AdamState, adam

BLOCK_ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 17}
"""Elements per block: on a GPU enough to keep it busy, on a CPU what fits into the caches."""


@dataclass(frozen=True)
class TensorSlice:
    """Elements ``start <= i < stop`` of the flattened tensor ``index`` of a list."""

    index: int
    start: int
    stop: int

    def view_in(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a flat view of the elements in a list of contiguous tensors."""
        return tensors[self.index].view(-1)[self.start : self.stop]


def iterate_blocks(tensors: Sequence[Tensor], elements: int | None = None) -> Iterator[list[TensorSlice]]:
    """Yield blocks of at most ``elements`` elements that together cover all tensors, in order."""
    if elements is None:
        elements = BLOCK_ELEMENTS["cuda" if any(t.is_cuda for t in tensors) else "cpu"]
    block: list[TensorSlice] = []
    left = elements  # capacity left in the block
    for index, tensor in enumerate(tensors):
        start = 0
        while start < tensor.numel():
            stop = min(tensor.numel(), start + left)
            block.append(TensorSlice(index, start, stop))
            left -= stop - start
            start = stop
            if left == 0:
                yield block
                block, left = [], elements
    if block:
        yield block


Rate = float | Tensor
"""A learning rate; a 0-d device tensor if a CUDA graph must read it from memory."""


class UpdateRule(Protocol):
    """Interface of an update rule, built in or registered by a plugin.

    A rule is created for the parameters of one group, as ``Rule(params, config)``. It is given this rank's shards of
    the main parameters (at least fp32), which are flat where ZeRO divides a parameter, so it must work element by
    element. Gradients are complete, unscaled and clipped; reduction, clipping, rates per group, mixed precision and
    checkpoints are not its business. A plugin registers the class, and ``--optimizer NAME`` selects it::

        @register("optimizer", "signum")
        class Signum: ...

    ``update`` reads :attr:`params`, :attr:`state` and :attr:`step_counts` on every call, because
    :class:`megatron.optimizer.low_precision_state.LowPrecisionRule` replaces them block by block. It changes them in
    place, so that a CUDA graph can capture it.
    """

    # What the rule keeps of every element. Memory is planned, and checkpoints are named, by these kinds; those called
    # ``exp_avg`` and ``exp_avg_sq`` follow ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype``.
    state_kinds: tuple[str, ...]
    # The parameters to update, in place.
    params: list[Tensor]
    # Tensors of each of ``state_kinds``, in the order and the shapes of the parameters, initially zero.
    state: dict[str, list[Tensor]]
    # Updates so far, 0-d fp32, one per parameter; empty if the rule does not depend on them.
    step_counts: list[Tensor]

    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """Update the parameters.

        Args:
            grads: in the order of the parameters; may be NaN in a skipped step, and must not be changed.
            lr: learning rate of the group.
            weight_decay: of the group.
            skip: fp32 scalar on the device, 0 or 1; nothing may change if it is 1.
        """


UpdateObserver = Callable[[int, int, Tensor, Tensor], None]
"""Called with elements before and after an update: ``(index, start, before, after)``. They are those of parameter
``index`` from its flat element ``start``, in at least fp32 and of any shape; they must not be changed or kept."""


def update_observed(
    rule: UpdateRule,
    grads: Sequence[Tensor],
    lr: Rate,
    weight_decay: float,
    skip: Tensor,
    observe: UpdateObserver,
    **options: Tensor,
) -> None:
    """Call ``rule.update`` for one block of a parameter at a time, so that only a block is kept from before it."""
    params, state, counts = rule.params, rule.state, rule.step_counts
    try:
        for index, param in enumerate(params):
            for (part,) in iterate_blocks([param]):
                cut = replace(part, index=index)
                after = cut.view_in(params)
                before = after.clone()
                rule.params = [after]
                rule.state = {kind: [cut.view_in(tensors)] for kind, tensors in state.items()}
                rule.step_counts = [counts[index].clone()] if counts else []
                rule.update([cut.view_in(grads)], lr, weight_decay, skip, **options)
                observe(index, cut.start, before, after)
    finally:
        rule.params, rule.state, rule.step_counts = params, state, counts
    for count in counts:
        count.add_(1.0 - skip)


class AdamW:
    """Adam with bias correction and decoupled weight decay (Loshchilov & Hutter 2019)."""

    state_kinds = RULE_STATE["adam"]

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig, kernel: AdamKernel = adam) -> None:
        self.params, self.kernel = list(params), kernel
        self.settings = AdamSettings(config.adam_beta1, config.adam_beta2, config.adam_eps)
        self.state = {kind: [torch.zeros_like(p) for p in self.params] for kind in self.state_kinds}
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self.params]

    def update(
        self,
        grads: Sequence[Tensor],
        lr: Rate,
        weight_decay: float,
        skip: Tensor,
        grad_scale: Tensor | None = None,
        weights: Sequence[Tensor] = (),
    ) -> None:
        """Apply one step.

        In the same pass, fp32 gradients are first divided by ``grad_scale``, fp32 and 0-d, and the parameters are
        rounded to ``weights``.
        """
        if not self.params:
            return
        state = AdamState(self.params, self.state["exp_avg"], self.state["exp_avg_sq"], self.step_counts, weights)
        self.kernel(state, grads, self.settings, lr, weight_decay, skip, grad_scale)


class SGD:
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    state_kinds = RULE_STATE["sgd"]

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.params, self.config = list(params), config
        self.state = {"momentum_buffer": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []

    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """Apply one step."""
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
            lr=lr,  # type: ignore[arg-type]  # tensors work too, but the annotation lacks them
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Lion:
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv 2302.06675).

    ``w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)``, then ``m = beta2 * m + (1 - beta2) * g``.
    """

    state_kinds = RULE_STATE["lion"]

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.params, self.config = list(params), config
        self.state: dict[str, list[Tensor]] = {"exp_avg": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], lr: Rate, weight_decay: float, skip: Tensor) -> None:
        """Apply one step, in blocks: temporary memory is two of them."""
        keep = 1.0 - skip.double()
        for block in iterate_blocks(self.params):
            params = [cut.view_in(self.params) for cut in block]
            momenta = [cut.view_in(self.state["exp_avg"]) for cut in block]
            # In a skipped step the momentum replaces the gradient, and so does not change.
            block_grads = [cut.view_in(grads).where(keep > 0, momentum) for cut, momentum in zip(block, momenta)]
            steps = torch._foreach_lerp(momenta, block_grads, 1.0 - self.config.lion_beta1)
            torch._foreach_sign_(steps)
            torch._foreach_mul_(steps, (lr * keep).to(params[0].dtype))
            torch._foreach_mul_(params, (1.0 - lr * weight_decay * keep).to(params[0].dtype))
            torch._foreach_sub_(params, steps)
            torch._foreach_lerp_(momenta, block_grads, 1.0 - self.config.lion_beta2)


RuleFactory = Callable[[Sequence[Tensor], OptimizerConfig], UpdateRule]

RULES: dict[str, RuleFactory] = {"adam": AdamW, "sgd": SGD, "lion": Lion}
"""Built-in rules that work element by element; :mod:`megatron.optimizer.muon` needs whole matrices."""


def update_rule(name: str) -> RuleFactory:
    """Return the rule ``name``, built in or registered by a plugin.

    Raises:
        KeyError: if there is none.
    """
    return RULES[name] if name in RULES else registered("optimizer")[name]
