"""From reduced gradients to new weights: the one place that knows the order of finishing a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    """What became of a step, as device scalars.

    Attributes:
        grad_norm: fp64, before clipping, loss scale removed.
        skipped: fp32, 1 when nothing was updated: a gradient was not finite, or the step was a spike.
        nonfinite: fp32, 1 when a gradient was not finite; then the gradients are as backward left them.
        clip: fp64, what gradients were multiplied by besides ``1 / loss_scale``; 1 where nothing was clipped.
    """

    grad_norm: Tensor
    skipped: Tensor
    nonfinite: Tensor
    clip: Tensor


class Optimizer:
    """Masters in at least fp32, clipping and an update rule.

    Attributes:
        masters: what this rank moves of the weights, by name: of the local stored shape where its share is the whole
            parameter, else flat; for fp32 and fp64 models the weights themselves.
        groups: parameters that are treated alike, and their rule.
        average: exponential moving average of the masters, by name; empty without ``ema_decay``.
        spikes: what finds steps that leap out of those before; None without ``skip_spikes``.
    """

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
            specs: theirs.
            buckets: their gradients.
            mesh: the groups.
            config: rule, clipping.
            seed: of the run; moments in bf16 are rounded at random.
            kernel: computes Adam.
            overlap_gather: whether :meth:`publish` leaves it to whoever uses weights to wait for them.

        """
        self.buckets, self.config = buckets, config
        self.weights = Weights(params, buckets, mesh, overlap_gather)
        self.replicas = ReplicaGrads(specs, buckets, mesh)
        self.norm = GradNorm(specs, buckets, mesh)
        self.masters = Masters(self.weights.own, config.store_param_remainders)
        self.groups: list[tuple[ParamGroup, Rule]] = [
            (group, self._rule(group, specs, mesh, seed, kernel)) for group in self._held(param_groups(specs, config))
        ]
        self.average = {n: m.clone() for n, m in self.masters.items()} if config.ema_decay is not None else {}
        self.spikes = SpikeGuard.from_config(config, buckets.buckets[0].own.device)

    def _held(self, groups: Iterable[ParamGroup]) -> Iterator[ParamGroup]:
        """What this rank moves of groups; their order, that of Muon's collectives, is the same on all ranks."""
        for group in groups:
            names = tuple(name for name in group.names if name in self.buckets.shares)
            if names:
                yield replace(group, names=names)

    def _rule(self, group: ParamGroup, specs: Mapping[str, ShardSpec], mesh: Mesh, seed: int, kernel: Adam) -> Rule:
        if group.rule == "muon":
            return Muon([self.masters[name] for name in group.names], group.names, specs, mesh, self.config)
        return make_rule(group, self.masters, specs, self.buckets.shares, self.config, seed, kernel)

    @torch.no_grad()
    def finish(self, clock: Clock = unmeasured) -> None:
        """Make every gradient that of the global batch; ``clock`` measures the parts."""
        with clock("all-grads-sync"):
            self.buckets.finish()
        with clock("layernorm-grads-all-reduce"):
            self.replicas.reduce()

    @torch.no_grad()
    def update(
        self, rates: Rates, loss_scale: Tensor, loss: Tensor | None = None, clock: Clock = unmeasured
    ) -> Outcome:
        """Clip the finished gradients, and move the weights along them.

        Args:
            rates: learning rate and weight decay.
            loss_scale: scalar by which all gradients are too large.
            loss: of the step, 0-d, equal on all ranks; whoever skips spikes looks at it.
            clock: measures the parts.

        Returns:
            The norm and whether the update was skipped.

        Raises:
            ValueError: when spikes are to be skipped and there is no loss, or a decoupled rate is missing.

        """
        with clock("optimizer-clip-main-grad"):
            outcome = self._judge(loss_scale, loss)
            self._scale(outcome, loss_scale)
        with clock("optimizer-inner-step"):
            self.weights.wait()
            self._update(rates, outcome.skipped)
        with clock("optimizer-copy-main-to-model-params"):
            self.publish()
        return outcome

    def _judge(self, loss_scale: Tensor, loss: Tensor | None) -> Outcome:
        norm = self.norm.compute() / loss_scale
        nonfinite = skipped = (~norm.isfinite()).float()
        if self.spikes is not None:
            if loss is None:
                raise ValueError("skip_spikes looks at the loss: pass it to update")
            skipped = torch.maximum(skipped, self.spikes.is_spike(loss, norm).float())
        clip = torch.ones_like(norm)
        if self.config.clip_grad > 0.0:
            clip = (self.config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        return Outcome(norm, skipped, nonfinite, clip.where(nonfinite == 0, 1.0))

    def _scale(self, outcome: Outcome, loss_scale: Tensor) -> None:
        """Unscale and clip; gradients that are not finite stay, so that a report still finds where they are."""
        factor = (outcome.clip / loss_scale.double()).where(outcome.nonfinite == 0, 1.0)
        for bucket in self.buckets.buckets:
            bucket.own.mul_(factor)

    def _update(self, rates: Rates, skip: Tensor) -> None:
        for group, rule in self.groups:
            rate = rates.decoupled_lr if group.decoupled else rates.lr
            if rate is None:
                raise ValueError("decoupled_lr is configured: give rates with one")
            grads = [self.buckets.grads[name] for name in group.names]
            rule.update(grads, rate * group.lr_factor, rates.weight_decay * group.weight_decay_factor, skip)
        if self.config.ema_decay is not None:
            weight = (1.0 - self.config.ema_decay) * (1.0 - skip.double())
            for name, average in self.average.items():
                average.lerp_(self.masters[name], weight.to(average.dtype))

    @torch.no_grad()
    def begin(self) -> None:
        """Take up weights that were put into the masters: the model's and their average follow from them."""
        self.publish()
        for name, average in self.average.items():
            average.copy_(self.masters[name])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model computes with the average of its weights; afterwards all is as it was, to the bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Put the average in the masters' place, and them in its: one tensor at a time, to need little memory."""
        self.weights.wait()
        for name, average in self.average.items():
            held = self.masters[name].clone()
            self.masters.put({name: average})
            average.copy_(held)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights the model computes with, and give them to all ranks."""
        self.masters.publish()
        self.weights.gather()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """What the rule remembers of every parameter, by kind (``exp_avg``...) and name; of the masters' shapes."""
        found: dict[str, dict[str, Tensor]] = {}
        for group, rule in self.groups:
            for kind, tensors in rule.state.items():
                found.setdefault(kind, {}).update(zip(group.names, tensors))
        return found

    def extra_state(self) -> dict[str, dict[str, Tensor]]:
        """All that a checkpoint holds besides the masters, by kind and name: the moments, and ``ema``."""
        return self.moments() | ({"ema": self.average} if self.average else {})

    def steps_applied(self) -> int:
        """Updates that were not skipped; waits for the device.

        Raises:
            RuntimeError: when parameters do not agree on it.

        """
        counts = {int(count.item()) for count in self._step_counts()}
        if len(counts) > 1:
            raise RuntimeError(f"parameters have had different numbers of updates: {sorted(counts)}")
        return counts.pop() if counts else 0

    def set_steps_applied(self, steps: int) -> None:
        """Go on as after ``steps`` updates."""
        for count in self._step_counts():
            count.fill_(steps)

    def _step_counts(self) -> list[Tensor]:
        return [count for _, rule in self.groups for count in rule.step_counts]
