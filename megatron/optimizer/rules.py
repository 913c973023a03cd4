"""Update rules (AdamW, SGD, Lion) over lists of tensors; skipped steps are decided on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron.config.optimizer import RULE_STATE, OptimizerConfig
from megatron.config.plugins import registered
from megatron.kernels.adam import AdamKernel, AdamSettings, AdamState, adam, round_to

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


UpdateObserver = Callable[[int, int, Tensor, Tensor], None]
"""Called with elements before and after an update: ``(index, start, before, after)``. They are those of parameter
``index`` from its flat element ``start``, in at least fp32 and of any shape; they must not be changed or kept."""


@dataclass(frozen=True)
class UpdateArgs:
    """One update of a group of parameters. Scalars are 0-d tensors on the device of the parameters."""

    # Gradients in the order of the parameters; may be NaN in a skipped step.
    grads: Sequence[Tensor]
    # Learning rate of the group.
    lr: Rate
    # Of the group.
    weight_decay: float
    # fp32, 0 or 1; nothing may change if it is 1.
    skip: Tensor
    # fp64; the gradients are first multiplied by it, in place: loss scale and clipping. None for 1.
    factor: Tensor | None = None
    # Weights of the model to which the updated parameters are rounded; a parameter that is its own weight is in both.
    weights: Sequence[Tensor] = ()
    # Called for every element; None for nothing.
    observe: UpdateObserver | None = None

    def scaled(self) -> UpdateArgs:
        """Multiply the gradients by :attr:`factor`; return the arguments of an update with the result."""
        if self.factor is None:
            return self
        if self.grads:
            torch._foreach_mul_(list(self.grads), self.factor.to(self.grads[0].dtype))
        return replace(self, factor=None)

    def write_weights(self, params: Sequence[Tensor]) -> None:
        """Round the updated parameters to :attr:`weights`."""
        round_to((weight, param) for weight, param in zip(self.weights, params) if weight is not param)


class UpdateRule(ABC):
    """Updates the parameters of one group: this rank's shards of them, in at least fp32.

    Reduction, the clip factor, rates per group and checkpoints are not the rule's business. An update changes
    parameters and state in place, so that a CUDA graph can capture it.
    """

    # The parameters to update.
    params: list[Tensor]
    # By kind, tensors in the order and the shapes of the parameters, initially zero.
    state: dict[str, list[Tensor]]
    # Updates so far, fp32 scalars; empty if the rule does not depend on them.
    step_counts: list[Tensor]

    @abstractmethod
    def update(self, args: UpdateArgs) -> None:
        """Update the parameters, and round them to ``args.weights``."""

    def of_copies(self, indices: Sequence[int]) -> UpdateRule | None:
        """Return a rule that makes the same update of copies of some parameters and their state; None if it cannot."""
        return None


class ElementwiseRule(UpdateRule):
    """Base of rules that update every element by itself, built in or registered by a plugin.

    ZeRO divides parameters, so :attr:`params` may be flat shards. A subclass declares :attr:`state_kinds` and computes
    :meth:`step`. A plugin registers the class, and ``--optimizer NAME`` selects it::

        @register("optimizer", "signum")
        class Signum(ElementwiseRule): ...

    :meth:`step` reads :attr:`params`, :attr:`state` and :attr:`step_counts` on every call, because they are replaced
    when parameters are updated block by block.
    """

    # What the rule keeps of every element. Memory is planned, and checkpoints are named, by these kinds; those called
    # ``exp_avg`` and ``exp_avg_sq`` follow ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype``.
    state_kinds: tuple[str, ...] = ()
    # The rule needs :attr:`step_counts`, one per parameter, and adds 1 to each in :meth:`step`.
    counts_steps = False
    # :meth:`step` itself changes nothing in a skipped step. Otherwise what it has changed is restored.
    handles_skip = False
    # :meth:`step` itself multiplies gradients by ``args.factor`` and rounds to ``args.weights``, in one pass.
    fused = False

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        """Allocate the state of ``params``."""
        self.params, self.config = list(params), config
        self.state = {kind: [torch.zeros_like(p) for p in self.params] for kind in self.state_kinds}
        counted = self.params if self.counts_steps else []
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=p.device) for p in counted]

    @abstractmethod
    def step(self, args: UpdateArgs) -> None:
        """Update :attr:`params` and :attr:`state` in place by ``args.grads``, which must not be changed."""

    def of_copies(self, indices: Sequence[int]) -> UpdateRule | None:
        """See :class:`UpdateRule`."""
        found = copy(self)
        found.params, found.state = copies_of(self.params, indices), copies_of_state(self.state, indices)
        found.step_counts = copies_of(self.step_counts, indices if self.step_counts else ())
        return found

    @torch.no_grad()
    def update(self, args: UpdateArgs) -> None:
        """Update the parameters, and round them to ``args.weights``."""
        if not self.fused:
            args = args.scaled()
        if self.handles_skip and args.observe is None:
            self.step(args)
            if self.fused:
                return
        else:
            self._step_in_blocks(args)
        args.write_weights(self.params)

    def _step_in_blocks(self, args: UpdateArgs) -> None:
        """Call :meth:`step` for one block of a parameter at a time, so that only a block is kept from before it."""
        params, state, counts = self.params, self.state, self.step_counts
        try:
            for index, param in enumerate(params):
                for (part,) in iterate_blocks([param]):
                    cut = replace(part, index=index)
                    self.params = [cut.view_in(params)]
                    self.state = {kind: [cut.view_in(tensors)] for kind, tensors in state.items()}
                    self.step_counts = [counts[index].clone()] if counts else []
                    kept = [*self.params, *(x for tensors in self.state.values() for x in tensors)]
                    before = [x.clone() for x in (kept[:1] if self.handles_skip else kept)]
                    self.step(replace(args, grads=[cut.view_in(args.grads)], weights=(), observe=None))
                    if not self.handles_skip:
                        for old, new in zip(before, kept):
                            torch.where(args.skip > 0, old, new, out=new)
                    if args.observe is not None:
                        args.observe(index, cut.start, before[0], kept[0])
        finally:
            self.params, self.state, self.step_counts = params, state, counts
        for count in counts:
            count.add_(1.0 - args.skip)


def copies_of(tensors: Sequence[Tensor], indices: Sequence[int]) -> list[Tensor]:
    """Return copies of some tensors of a list."""
    return [tensors[index].detach().clone() for index in indices]


def copies_of_state(state: Mapping[str, Sequence[Tensor]], indices: Sequence[int]) -> dict[str, list[Tensor]]:
    """Return copies of the state of some parameters."""
    return {kind: copies_of(tensors, indices) for kind, tensors in state.items()}


class AdamW(ElementwiseRule):
    """Adam with bias correction and decoupled weight decay (Loshchilov & Hutter 2019)."""

    state_kinds = RULE_STATE["adam"]
    counts_steps = handles_skip = fused = True

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig, kernel: AdamKernel = adam) -> None:
        """Allocate the state of ``params``, which ``kernel`` will update."""
        super().__init__(params, config)
        self.kernel, self.settings = kernel, AdamSettings(config.adam_beta1, config.adam_beta2, config.adam_eps)

    def step(self, args: UpdateArgs) -> None:
        """Apply one step. The kernel divides by a scale in fp32, which is not exact enough for gradients in fp64."""
        grad_scale = None
        if args.factor is not None and args.grads[0].dtype == torch.float32:
            grad_scale = (1.0 / args.factor).float()
        else:
            args = args.scaled()
        state = AdamState(self.params, self.state["exp_avg"], self.state["exp_avg_sq"], self.step_counts, args.weights)
        self.kernel(state, args.grads, self.settings, args.lr, args.weight_decay, args.skip, grad_scale)


class SGD(ElementwiseRule):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    state_kinds = RULE_STATE["sgd"]
    handles_skip = True

    def step(self, args: UpdateArgs) -> None:
        """Apply one step."""
        buffers: list[Tensor | None] = list(self.state["momentum_buffer"])
        sgd(
            self.params,
            list(args.grads),
            buffers,
            fused=True,
            found_inf=args.skip,
            weight_decay=args.weight_decay,
            momentum=self.config.sgd_momentum,
            lr=args.lr,  # type: ignore[arg-type]  # tensors work too, but the annotation lacks them
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Lion(ElementwiseRule):
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv 2302.06675).

    ``w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)``, then ``m = beta2 * m + (1 - beta2) * g``.
    """

    state_kinds = RULE_STATE["lion"]
    handles_skip = True

    def step(self, args: UpdateArgs) -> None:
        """Apply one step, in blocks: temporary memory is two of them."""
        lr, keep = args.lr, 1.0 - args.skip.double()
        for block in iterate_blocks(self.params):
            params = [cut.view_in(self.params) for cut in block]
            momenta = [cut.view_in(self.state["exp_avg"]) for cut in block]
            # In a skipped step the momentum replaces the gradient, and so does not change.
            grads = [cut.view_in(args.grads).where(keep > 0, momentum) for cut, momentum in zip(block, momenta)]
            steps = torch._foreach_lerp(momenta, grads, 1.0 - self.config.lion_beta1)
            torch._foreach_sign_(steps)
            torch._foreach_mul_(steps, (lr * keep).to(params[0].dtype))
            torch._foreach_mul_(params, (1.0 - lr * args.weight_decay * keep).to(params[0].dtype))
            torch._foreach_sub_(params, steps)
            torch._foreach_lerp_(momenta, grads, 1.0 - self.config.lion_beta2)


RuleFactory = Callable[[Sequence[Tensor], OptimizerConfig], ElementwiseRule]

RULES: dict[str, RuleFactory] = {"adam": AdamW, "sgd": SGD, "lion": Lion}
"""Built-in rules that work element by element; :mod:`megatron.optimizer.muon` needs whole matrices."""


def update_rule(name: str) -> RuleFactory:
    """Return the rule ``name``, built in or registered by a plugin.

    Raises:
        KeyError: if there is none.
    """
    return RULES[name] if name in RULES else registered("optimizer")[name]
