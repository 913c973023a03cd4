"""Outer optimizer of DiLoCo (arXiv 2311.08105, 2501.18512): SGD with Nesterov momentum on averaged progress.

Replicas of a run take H steps of the usual, inner optimizer each. The outer gradient of a weight is its value after the
last synchronisation minus the one now, averaged over replicas. All replicas apply the same update to their copies of
the outer weights, and continue from these.

Everything is sharded like the main parameters: a rank exchanges its own shards with the same rank of other replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config.run import DilocoConfig
from megatron.optimizer.main_params import MainParams

PARAM, MOMENTUM, GRAD = "outer_param", "outer_momentum", "outer_grad"
"""Kinds of state in checkpoints."""


def fragment_of(name: str, fragments: int) -> int:
    """Return the fragment of a parameter, by its global name.

    Blocks are strided, as in Streaming DiLoCo. The embeddings are in the first fragment, and what follows the blocks is
    in the last.
    """
    if name.startswith("layers."):
        return int(name.split(".")[1]) % fragments
    return 0 if name.startswith("embedding") else fragments - 1


class OuterOptimizer:
    """Outer weights and momentum of this rank's shards, and the round that the replica is in.

    A round synchronises one fragment. It is counted once its averaged gradients are known; ``grads`` holds them until
    they are applied.
    """

    def __init__(self, main_params: MainParams, config: DilocoConfig) -> None:
        """Start from the main parameters."""
        self.main_params, self.config = main_params, config
        self.params = {name: value.detach().clone() for name, value in main_params.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.params.items()}
        # Averaged outer gradients that are not applied yet; a rank may have none of a pending round.
        self.grads: dict[str, Tensor] = {}
        self.pending = False
        # Rounds whose gradients are averaged.
        self.rounds = 0
        # Steps and samples when the last of them began.
        self.position = 0, 0

    @torch.no_grad()
    def reset(self) -> None:
        """Start again from the main parameters, which were loaded."""
        self.grads, self.rounds, self.pending = {}, 0, False
        for name, value in self.main_params.items():
            self.params[name].copy_(value)
            self.momentum[name].zero_()

    def fragment(self, number: int) -> list[str]:
        """Return the names that round ``number`` synchronises."""
        count = self.config.diloco_fragments
        return [name for name in self.params if fragment_of(name, count) == number % count]

    @torch.no_grad()
    def gradients(self, names: Sequence[str]) -> Tensor:
        """Return the outer gradients of this replica, flat and one after the other."""
        parts = [(self.params[name] - self.main_params[name]).flatten() for name in names]
        return torch.cat(parts) if parts else torch.zeros(0)

    def receive(self, names: Sequence[str], average: Tensor) -> None:
        """Keep averaged gradients, laid out as by :meth:`gradients`, for :meth:`step`."""
        parts = average.split([self.params[name].numel() for name in names])
        self.grads = {name: part.view_as(self.params[name]) for name, part in zip(names, parts)}
        self.pending = True

    @torch.no_grad()
    def step(self, mix: float) -> None:
        """Apply the averaged gradients to outer weights, and merge these into the main parameters.

        Args:
            mix: weight of the main parameters in the result.
        """
        momentum = self.config.diloco_outer_momentum
        merged = {}
        for name, grad in self.grads.items():
            value = self.params[name]
            grad = grad.to(value.device)
            change = grad + self.momentum[name].mul_(momentum).add_(grad) * momentum
            value.sub_(change, alpha=self.config.diloco_outer_lr)
            merged[name] = value.lerp(self.main_params[name], mix) if mix else value
        self.main_params.set(merged)
        self.grads, self.pending = {}, False

    def kinds(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of checkpoints by kind and name."""
        return {PARAM: self.params, MOMENTUM: self.momentum} | ({GRAD: self.grads} if self.grads else {})

    def expect_grads(self, names: Collection[str]) -> None:
        """Allocate averaged gradients of ``names``, as far as they are here, to be loaded."""
        self.grads = {name: torch.zeros_like(value) for name, value in self.params.items() if name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain numbers."""
        iteration, consumed_samples = self.position
        progress = {"rounds": self.rounds, "pending": self.pending}
        return progress | {"iteration": iteration, "consumed_samples": consumed_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` has returned."""
        self.rounds, self.pending = state["rounds"], state["pending"]
        self.position = state["iteration"], state["consumed_samples"]
