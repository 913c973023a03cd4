"""From reduced gradients to new weights: the one place that knows the order of finishing a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config.run import OptimizerConfig
from megatron.optim.buckets import GradBuckets
from megatron.optim.clip import GradNorm
from megatron.optim.replicas import ReplicaGrads
from megatron.optim.rules import RULES, Rule
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import ShardSpec


@dataclass(frozen=True)
class Outcome:
    """What became of a step, as device scalars.

    Attributes:
        grad_norm: fp64, before clipping, loss scale removed.
        skipped: fp32, 1 when a gradient was not finite and nothing was updated.
    """

    grad_norm: Tensor
    skipped: Tensor


class Optimizer:
    """Masters in at least fp32, clipping and an update rule.

    Attributes:
        masters: the weights the rule moves, by name; for fp32 and fp64 models the weights themselves.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        buckets: GradBuckets,
        mesh: Mesh,
        config: OptimizerConfig,
    ) -> None:
        """Take ownership of the parameters.

        Args:
            params: local parameters by global name.
            specs: theirs.
            buckets: their gradients.
            mesh: the groups.
            config: rule, clipping.

        """
        self.params, self.buckets, self.config = params, buckets, config
        self.replicas = ReplicaGrads(specs, buckets.grads, mesh)
        self.norm = GradNorm(specs, buckets.grads, mesh)
        self.masters = {name: _master(p) for name, p in params.items()}
        self.rules: dict[bool, tuple[list[str], Rule]] = {}
        for decays in (True, False):
            names = [n for n in params if specs[n].decays is decays]
            self.rules[decays] = names, RULES[config.optimizer]([self.masters[n] for n in names], config)

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, loss_scale: Tensor) -> Outcome:
        """Reduce, clip, update.

        Args:
            lr: learning rate.
            weight_decay: of the parameters that decay.
            loss_scale: scalar by which all gradients are too large.

        Returns:
            The norm and whether the update was skipped.

        """
        self.buckets.finish()
        self.replicas.reduce()
        norm = self.norm.compute() / loss_scale
        skipped = (~norm.isfinite()).float()
        factor = 1.0 / loss_scale.double()
        if self.config.clip_grad > 0.0:
            factor = factor * (self.config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(skipped > 0, 1.0, factor)  # so that a report still finds what was not finite, and where
        for bucket in self.buckets.buckets:
            bucket.buffer.mul_(factor)
        for decays, (names, rule) in self.rules.items():
            rule.update([self.buckets.grads[n] for n in names], lr, weight_decay if decays else 0.0, skipped)
        self.publish()
        return Outcome(norm, skipped)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights the model computes with."""
        copies = [(p.detach(), m) for p, m in zip(self.params.values(), self.masters.values()) if p.dtype != m.dtype]
        if copies:
            weights, masters = zip(*copies)
            torch._foreach_copy_(weights, masters)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """What the rule remembers of every parameter, by kind (``exp_avg``...) and name; of the masters' shapes."""
        found: dict[str, dict[str, Tensor]] = {}
        for names, rule in self.rules.values():
            for kind, tensors in rule.state.items():
                found.setdefault(kind, {}).update(zip(names, tensors))
        return found

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
        return [count for _, rule in self.rules.values() for count in rule.step_counts]


def _master(param: nn.Parameter) -> Tensor:
    wide = torch.promote_types(param.dtype, torch.float32)
    return param.detach() if wide == param.dtype else param.detach().to(wide)
