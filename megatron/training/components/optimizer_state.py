"""State of the update rules, such as Adam's moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron.checkpoint.format import Manifest
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.training.component import Component, Kinds


class OptimizerState(Component):
    """State of the update rules of a run, and the number of updates."""

    name = "optimizer"
    state_types: ClassVar[Mapping[str, Any]] = {"steps": int}
    missing = None
    memory_part = "moments"

    def __init__(self, optimizer: DistributedOptimizer, world: Group, unused: Mapping[str, str]) -> None:
        """Save and load the state of ``optimizer`` on all ranks of ``world``.

        Args:
            optimizer: of the run.
            world: all ranks.
            unused: notes on kinds of tensors that a checkpoint may have and this run has not, by beginnings of kinds.
        """
        self._optimizer, self._world, self._unused = optimizer, world, unused

    def prepare(self, manifest: Manifest) -> Sequence[str]:
        """Return notes on tensors of features that this run does not have; see :class:`Component`."""
        names = [*manifest.tensors]
        return [note for kind, note in self._unused.items() if any(n.startswith(f"optim.{kind}") for n in names)]

    def tensors(self) -> Kinds:
        """See :class:`Component`."""
        return self._optimizer.state()

    def state_dict(self) -> Mapping[str, Any]:
        """See :class:`Component`."""
        # 0 on ranks that train no parameter.
        return {"steps": max(comm.all_gather_objects(self._optimizer.steps_applied(), self._world))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Component`."""
        self._optimizer.set_steps_applied(state["steps"])
