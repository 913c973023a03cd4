"""Distributed optimizer (ZeRO-0 to 3): from accumulated gradients to updated weights, in order.

1. ``reduce_gradients``: complete the reduction over data-parallel ranks (:mod:`megatron.optimizer.grad_buffer`), then
   sum partial gradients over the tensor-parallel ranks that share a parameter, and of tied weights over their stages.
2. ``update``: global gradient norm, in which every element counts once whatever the layout; clipping; the update rule
   on this rank's shards of the main parameters.
3. ``write_weights``: round main parameters to the weights' dtype, and all-gather the weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import shard_boxes
from megatron.distributed.sharding import ShardSpec
from megatron.distributed.timing import Clock, no_clock
from megatron.kernels.adam import LARGE_RUN
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.main_params import MainParams, flat_runs
from megatron.optimizer.param_groups import ParamGroup
from megatron.optimizer.parameter_store import ParameterStore
from megatron.optimizer.rules import UpdateArgs, UpdateRule

NORM_BLOCK = 1 << 14
"""Elements per norm on the CPU: torch's CPU kernel adds sequentially and loses precision over more."""


class GradNorm:
    """2-norm over all parameters of a norm group, with one sum over all ranks.

    Every element is counted by one rank, whichever rank updates it. The result is bitwise equal on all ranks.
    """

    def __init__(self, specs: Mapping[str, ShardSpec], buckets: GradBuffer, mesh: Mesh, group: int = 0) -> None:
        """Collect the gradient views that this rank counts."""
        boxes: list[Tensor] = []
        counted = buckets.counted_shards()
        for name in (name for name in buckets.grads if name in counted and specs[name].norm_group == group):
            spec, share, start = specs[name], counted[name], buckets.shards[name].start
            gradient = buckets.grads[name].view(-1)[share.start - start : share.stop - start]
            for slot in shard_boxes(spec, share, spec.owned):
                box = slot.view_in(gradient)
                boxes += [box] if box.is_cuda else box.view(-1).split(NORM_BLOCK)
        self._counted = [flat for _, flat in flat_runs(boxes)] if boxes and boxes[0].is_cuda else boxes
        self._world = mesh.world
        self._zero = torch.zeros((), dtype=torch.float64, device=buckets.device)

    def compute(self) -> Tensor:
        """Return the norm, an fp64 scalar; not finite if any gradient is not."""
        total = self._zero.clone()
        norms = [torch.linalg.vector_norm(x) for x in self._counted if x.numel() >= LARGE_RUN]
        if small := [x for x in self._counted if x.numel() < LARGE_RUN]:
            norms += torch._foreach_norm(small)
        if norms:
            total += torch.stack(norms).double().square().sum()
        return comm.all_reduce(total, self._world).sqrt()


class PartialGradReducer:
    """All-reduces partial gradients: norms under sequence parallelism, q/k norms, key/value heads shared over TP.

    Also the gradients of a tied weight, over the ranks of the first and the last pipeline stage. Ranks that hold the
    same piece of a parameter also update the same range of it, because they pack their buckets alike.
    """

    def __init__(self, specs: Mapping[str, ShardSpec], buckets: GradBuffer, mesh: Mesh) -> None:
        views: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        self.names: list[str] = []
        """Parameters whose gradients are partial."""
        self.before_reduce: Callable[[], None] = lambda: None
        """Called when the gradients are those of all data-parallel ranks, and still partial."""
        for name, gradient in buckets.grads.items():
            shared = [piece for piece in specs[name].pieces if piece.partial and len(piece.tp_ranks) > 1]
            if shared or specs[name].tied:
                self.names.append(name)
            for slot in shard_boxes(specs[name], buckets.shards[name], shared):
                views[slot.piece.tp_ranks].append(slot.view_in(gradient))
        self._partial: list[tuple[Group, list[Tensor]]] = [
            (mesh.tp_subgroup(tp_ranks), grads) for tp_ranks, grads in sorted(views.items())
        ]
        self._tied_group = mesh.embedding_group
        self._tied = [gradient for name, gradient in buckets.grads.items() if specs[name].tied]

    def reduce(self) -> None:
        """Sum the gradients in place: one all-reduce per set of ranks, and one per tied weight."""
        self.before_reduce()
        for group, grads in self._partial:
            flat = comm.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
            sums = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [total.view_as(grad) for total, grad in zip(sums, grads)])
        for gradient in self._tied:
            comm.all_reduce(gradient, self._tied_group)


@dataclass(frozen=True)
class UpdateResult:
    """Result of an update, as device scalars."""

    # fp64; of norm group 0, without the loss scale, before clipping.
    grad_norm: Tensor
    # fp32; 1 if nothing was updated: a gradient was not finite, or the step was a spike.
    skipped: Tensor
    # fp32; 1 if a gradient was not finite. The gradients are then left as they are.
    nonfinite: Tensor
    # fp64; factor that clipping applied to the gradients of norm group 0, 1 if none.
    clip: Tensor
    # By which the gradients were multiplied.
    loss_scale: Tensor


class UpdateHook:
    """Base class of what acts inside an update, which a CUDA graph may replay: in place, without waiting."""

    def before_update(self, loss: Tensor | None, grad_norm: Tensor) -> Tensor | None:
        """Return a 0-d tensor, nonzero if the update is to be skipped; None never skips.

        Args:
            loss: of the step, 0-d, equal on all ranks; None if the caller has none.
            grad_norm: before clipping, 0-d, equal on all ranks.
        """

    def before_rule(self, group: ParamGroup, rule: UpdateRule, args: UpdateArgs) -> None:
        """Act before ``rule`` updates the parameters of a group.

        Args:
            group: names of the parameters.
            rule: with the parameters and their state.
            args: gradients and rates; nothing of them may be changed.
        """

    def update_buffers(self, skipped: Tensor) -> Sequence[str]:
        """Update main parameters that are no optimizer's (:attr:`ShardSpec.buffer`); return their names.

        Args:
            skipped: nonzero if they are not to change; 0-d, on the device.
        """
        return ()

    def after_update(self, names: Sequence[str], skipped: Tensor) -> None:
        """Act after main parameters were updated.

        Args:
            names: of the parameters.
            skipped: nonzero if they were not updated; 0-d, in the memory of the parameters.
        """


class DistributedOptimizer:
    """Updates this rank's shards of the main parameters, and the weights from them."""

    def __init__(
        self,
        weights: ParameterStore,
        specs: Mapping[str, ShardSpec],
        buckets: GradBuffer,
        mesh: Mesh,
        config: OptimizerConfig,
        main_params: MainParams,
        groups: Sequence[tuple[ParamGroup, UpdateRule]],
        norm_groups: int = 1,
    ) -> None:
        """Create the optimizer from its parts; see :func:`megatron.optimizer.build.build_optimizer`."""
        self.buckets, self.config, self.weights = buckets, config, weights
        self.partial_grads = PartialGradReducer(specs, buckets, mesh)
        # Of each norm group.
        self.norms = [GradNorm(specs, buckets, mesh, group) for group in range(norm_groups)]
        # Gradients of this rank's shards by name, where these are updated.
        self.grads = buckets.grads
        # This rank's shards by name: of the local stored shape if a shard is the whole parameter, else flat. For fp32
        # and fp64 models the weights themselves.
        self.main_params, self.groups = main_params, groups
        # Called as ``(name, start, before, after)`` for every block of elements that an update changes, from the flat
        # element ``start`` of this rank's shard; see :data:`UpdateObserver`.
        self.observe_update: Callable[[str, int, Tensor, Tensor], None] | None = None

    @torch.no_grad()
    def reduce_gradients(self, clock: Clock = no_clock) -> None:
        """Complete the reduction: every gradient becomes that of the global batch. ``clock`` measures the parts."""
        with clock("all-grads-sync"):
            self.buckets.finish()
        with clock("layernorm-grads-all-reduce"):
            self.partial_grads.reduce()

    @torch.no_grad()
    def update(
        self,
        rates: Rates,
        loss_scale: Tensor,
        loss: Tensor | None = None,
        clock: Clock = no_clock,
        hooks: Sequence[UpdateHook] = (),
    ) -> UpdateResult:
        """Clip the reduced gradients, and update the weights.

        Args:
            rates: learning rate and weight decay.
            loss_scale: scalar by which all gradients are multiplied.
            loss: of the step, 0-d, equal on all ranks, for the hooks.
            clock: measures the parts.
            hooks: may skip the update, and follow it.

        Raises:
            ValueError: when the decoupled rate is missing.
        """
        with clock("optimizer-clip-main-grad"):
            outcome, clips = self._compute_outcome(loss_scale, loss, hooks)
            # Gradients of a skipped step stay as they are, so that a report can still locate what is not finite.
            factors = [(clip / loss_scale.double()).where(outcome.skipped == 0, 1.0) for clip in clips]
        with clock("optimizer-inner-step"):
            self.weights.wait()
            self._update(rates, outcome.skipped, factors, hooks)
            for names in [names for hook in hooks if (names := hook.update_buffers(outcome.skipped))]:
                for hook in hooks:
                    hook.after_update(names, outcome.skipped)
        with clock("optimizer-copy-main-to-model-params"):
            self._publish_weights()
        return outcome

    def _compute_outcome(
        self, loss_scale: Tensor, loss: Tensor | None, hooks: Sequence[UpdateHook]
    ) -> tuple[UpdateResult, list[Tensor]]:
        """Return the outcome, and the factor by which clipping multiplies the gradients of each norm group."""
        norms = [norm.compute() / loss_scale for norm in self.norms]
        nonfinite = skipped = reduce(torch.maximum, [(~norm.isfinite()).float() for norm in norms])
        for hook in hooks:
            if (skips := hook.before_update(loss, norms[0])) is not None:
                skipped = torch.maximum(skipped, skips.float())
        clips = [torch.ones_like(norm) for norm in norms]
        if self.config.clip_grad > 0.0:
            clips = [(self.config.clip_grad / (norm + 1e-6)).clamp(max=1.0) for norm in norms]
        clips = [clip.where(nonfinite == 0, 1.0) for clip in clips]
        return UpdateResult(norms[0], skipped, nonfinite, clips[0], loss_scale), clips

    def _update(self, rates: Rates, skip: Tensor, factors: Sequence[Tensor], hooks: Sequence[UpdateHook]) -> None:
        """Multiply the gradients by the factor of their norm group, and update; see :class:`UpdateArgs`."""
        for group, rule in self.groups:
            self._update_group(group, rule, self._update_args(group, rates, skip, factors[group.norm_group]), hooks)

    def _update_group(self, group: ParamGroup, rule: UpdateRule, args: UpdateArgs, hooks: Sequence[UpdateHook]) -> None:
        for hook in hooks:
            hook.before_rule(group, rule, args)
        rule.update(args)
        for hook in hooks:
            hook.after_update(group.names, args.skip)

    def _update_args(self, group: ParamGroup, rates: Rates, skip: Tensor, factor: Tensor) -> UpdateArgs:
        rate, observe = rates.decoupled_lr if group.decoupled else rates.lr, self.observe_update
        if rate is None:
            raise ValueError("decoupled_lr is configured: pass Rates with a decoupled_lr")
        return UpdateArgs(
            [self.buckets.grads[name] for name in group.names],
            rate * group.lr_factor,
            rates.weight_decay * group.weight_decay_factor,
            skip,
            factor,
            [self.main_params.weights[name] for name in group.names],
            None if observe is None else lambda index, *elements: observe(group.names[index], *elements),
        )

    def wait(self) -> None:
        """Wait until the weights are complete, so that main parameters may be changed."""
        self.weights.wait()

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the main parameters to the weights, and gather these on all ranks."""
        self.main_params.write_weights()
        self._publish_weights()

    def _publish_weights(self) -> None:
        """Gather the weights of this rank's shards on all ranks."""
        self.weights.start_gather()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the update rule's state by kind (``exp_avg``...) and name, shaped like the main parameters."""
        found: dict[str, dict[str, Tensor]] = {}
        for group, rule in self.groups:
            for kind, tensors in rule.state.items():
                found.setdefault(kind, {}).update(zip(group.names, tensors))
        return found

    def steps_applied(self) -> int:
        """Return the number of updates that were not skipped. Synchronises host and device.

        Raises:
            RuntimeError: when it differs between parameters.
        """
        counts = {int(count.item()) for count in self._step_counts()}
        if len(counts) > 1:
            raise RuntimeError(f"parameters have had different numbers of updates: {sorted(counts)}")
        return counts.pop() if counts else 0

    def set_steps_applied(self, steps: int) -> None:
        """Set the number of updates, after loading a checkpoint."""
        for count in self._step_counts():
            count.fill_(steps)

    def _step_counts(self) -> list[Tensor]:
        return [count for _, rule in self.groups for count in rule.step_counts]
