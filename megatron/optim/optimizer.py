"""Distributed optimizer (ZeRO-0, 1 and 2): from accumulated gradients to updated weights, in order.

1. ``finish``: complete the gradient reduction over data-parallel ranks, then sum partial gradients over the
   tensor-parallel ranks that share a parameter.
2. ``update``: global gradient norm, clipping, the update rule on this rank's shard of the main parameters.
3. ``publish``: round main parameters to the weights' dtype, and all-gather the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.config.run import OptimizerConfig
from megatron.kernels.adam import Adam, adam
from megatron.optim.buckets import GradBuckets
from megatron.optim.clip import GradNorm
from megatron.optim.groups import ParamGroup, param_groups
from megatron.optim.masters import Masters
from megatron.optim.muon import Muon
from megatron.optim.narrow import make_rule
from megatron.optim.replicas import ReplicaGrads
from megatron.optim.rules import Rule
from megatron.optim.schedule import Rates
from megatron.optim.spikes import SpikeGuard
from megatron.optim.weights import Weights
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import ShardSpec
from megatron.parallel.stopwatch import Clock, unmeasured


@dataclass(frozen=True)
class Outcome:
    """Result of an update, as device scalars."""

    # fp64; without the loss scale, before clipping.
    grad_norm: Tensor
    # fp32; 1 if nothing was updated: a gradient was not finite, or the step was a spike.
    skipped: Tensor
    # fp32; 1 if a gradient was not finite. The gradients are then left as they are.
    nonfinite: Tensor
    # fp64; factor that clipping applied to the gradients, 1 if none.
    clip: Tensor


class Optimizer:
    """Updates this rank's shards of the main parameters, and the weights from them."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        buckets: GradBuckets,
        mesh: Mesh,
        config: OptimizerConfig,
        seed: int = 0,
        kernel: Adam = adam,
        overlap_gather: bool = False,
    ) -> None:
        """Take ownership of the parameters.

        Args:
            params: local parameters by global name.
            specs: by global name.
            buckets: of their gradients.
            mesh: the groups.
            config: rule, clipping.
            seed: of the run; keys the stochastic rounding of bf16 moments.
            kernel: the implementation of Adam.
            overlap_gather: let :meth:`publish` return before the weights are gathered; users call ``weights.wait``.

        """
        self.buckets, self.config = buckets, config
        self.weights = Weights(params, buckets, mesh, overlap_gather)
        self.replicas = ReplicaGrads(specs, buckets, mesh)
        self.norm = GradNorm(specs, buckets, mesh)
        # This rank's shards by name: of the local stored shape if a shard is the whole parameter, else flat. For fp32
        # and fp64 models the weights themselves.
        self.masters = Masters(self.weights.own, config.store_param_remainders)
        # The order of groups, and so of Muon's collectives, is the same on all ranks.
        self.groups: list[tuple[ParamGroup, Rule]] = []
        for group in param_groups(specs, config):
            names = tuple(name for name in group.names if name in buckets.shares)
            if names:
                group = replace(group, names=names)
                self.groups.append((group, self._rule(group, specs, mesh, seed, kernel)))
        # Exponential moving average of the main parameters, by name; empty without ``ema_decay``.
        self.average = {n: m.clone() for n, m in self.masters.items()} if config.ema_decay is not None else {}
        # None without ``skip_spikes``.
        self.spikes = SpikeGuard.from_config(config, buckets.buckets[0].own.device)

    def _rule(self, group: ParamGroup, specs: Mapping[str, ShardSpec], mesh: Mesh, seed: int, kernel: Adam) -> Rule:
        if group.rule == "muon":
            return Muon([self.masters[name] for name in group.names], group.names, specs, mesh, self.config)
        return make_rule(group, self.masters, specs, self.buckets.shares, self.config, seed, kernel)

    @torch.no_grad()
    def finish(self, clock: Clock = unmeasured) -> None:
        """Complete the reduction: every gradient becomes that of the global batch. ``clock`` measures the parts."""
        with clock("all-grads-sync"):
            self.buckets.finish()
        with clock("layernorm-grads-all-reduce"):
            self.replicas.reduce()

    @torch.no_grad()
    def update(
        self, rates: Rates, loss_scale: Tensor, loss: Tensor | None = None, clock: Clock = unmeasured
    ) -> Outcome:
        """Clip the reduced gradients, and update the weights.

        Args:
            rates: learning rate and weight decay.
            loss_scale: scalar by which all gradients are multiplied.
            loss: of the step, 0-d, equal on all ranks; needed for ``skip_spikes``.
            clock: measures the parts.

        Raises:
            ValueError: when ``skip_spikes`` is set without a loss, or the decoupled rate is missing.

        """
        with clock("optimizer-clip-main-grad"):
            outcome = self._compute_outcome(loss_scale, loss)
            # Gradients that are not finite stay as they are, so that a report can still locate them.
            factor = (outcome.clip / loss_scale.double()).where(outcome.nonfinite == 0, 1.0)
            for bucket in self.buckets.buckets:
                bucket.own.mul_(factor)
        with clock("optimizer-inner-step"):
            self.weights.wait()
            self._update(rates, outcome.skipped)
        with clock("optimizer-copy-main-to-model-params"):
            self.publish()
        return outcome

    def _compute_outcome(self, loss_scale: Tensor, loss: Tensor | None) -> Outcome:
        norm = self.norm.compute() / loss_scale
        nonfinite = skipped = (~norm.isfinite()).float()
        if self.spikes is not None:
            if loss is None:
                raise ValueError("skip_spikes needs the loss of the step: pass it to update")
            skipped = torch.maximum(skipped, self.spikes.is_spike(loss, norm).float())
        clip = torch.ones_like(norm)
        if self.config.clip_grad > 0.0:
            clip = (self.config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        return Outcome(norm, skipped, nonfinite, clip.where(nonfinite == 0, 1.0))

    def _update(self, rates: Rates, skip: Tensor) -> None:
        for group, rule in self.groups:
            rate = rates.decoupled_lr if group.decoupled else rates.lr
            if rate is None:
                raise ValueError("decoupled_lr is configured: pass Rates with a decoupled_lr")
            grads = [self.buckets.grads[name] for name in group.names]
            rule.update(grads, rate * group.lr_factor, rates.weight_decay * group.weight_decay_factor, skip)
        if self.config.ema_decay is not None:
            weight = (1.0 - self.config.ema_decay) * (1.0 - skip.double())
            for name, average in self.average.items():
                average.lerp_(self.masters[name], weight.to(average.dtype))

    @torch.no_grad()
    def begin(self) -> None:
        """Update the weights and the average from main parameters that were loaded."""
        self.publish()
        for name, average in self.average.items():
            average.copy_(self.masters[name])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model compute with the average of its weights inside; restore them bit for bit afterwards."""
        self._swap_with_average()
        try:
            yield
        finally:
            self._swap_with_average()

    @torch.no_grad()
    def _swap_with_average(self) -> None:
        """Swap main parameters and average, one tensor at a time to save memory."""
        self.weights.wait()
        for name, average in self.average.items():
            current = self.masters[name].clone()
            self.masters.put({name: average})
            average.copy_(current)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main parameters to the weights, and gather the weights on all ranks."""
        self.masters.publish()
        self.weights.gather()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the update rule's state by kind (``exp_avg``...) and name, shaped like the main parameters."""
        found: dict[str, dict[str, Tensor]] = {}
        for group, rule in self.groups:
            for kind, tensors in rule.state.items():
                found.setdefault(kind, {}).update(zip(group.names, tensors))
        return found

    def extra_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state of checkpoints, without main parameters, by kind and name: moments and ``ema``."""
        return self.moments() | ({"ema": self.average} if self.average else {})

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
