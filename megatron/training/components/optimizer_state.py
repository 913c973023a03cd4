"""State of the optimizer: Adam's moments and the like, and the average of the weights (``--ema-decay``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron.checkpoint.format import Manifest
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.training.component import Component, Kinds
from megatron.training.trainer import Trainer


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


class AverageWeights(Component):
    """Exponential moving average of this rank's shards of the main parameters, in the memory and dtype of these."""

    missing = "the checkpoint has no average of the weights: it starts from the weights"
    memory_part = "average"

    def __init__(self, optimizer: DistributedOptimizer, decay: float) -> None:
        """Start from the main parameters."""
        self._optimizer, self._decay = optimizer, decay
        # By name of the parameter.
        self.average = {name: value.clone() for name, value in optimizer.main_params.items()}

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        decay = trainer.config.optimizer.ema_decay
        return None if decay is None else cls(trainer.optimizer, decay)

    def tensors(self) -> Kinds:
        """See :class:`Component`."""
        return {"ema": self.average}

    @torch.no_grad()
    def on_weights_loaded(self) -> None:
        """See :class:`Component`."""
        for name, average in self.average.items():
            average.copy_(self._optimizer.main_params[name])

    def after_update(self, names: Sequence[str], skipped: Tensor) -> None:
        """See :class:`UpdateHook`."""
        weight = (1.0 - self._decay) * (1.0 - skipped.double())
        for name in names:
            average = self.average[name]
            average.lerp_(self._optimizer.main_params[name], weight.to(average.dtype))

    def other_weights(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """See :class:`Component`."""
        return {"ema": self.in_model}

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Let the model compute with the average inside; restore its weights bit for bit afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap main parameters and average, one tensor at a time to save memory."""
        self._optimizer.wait()
        main_params = self._optimizer.main_params
        for name, average in self.average.items():
            current = main_params[name].clone()
            main_params.set({name: average})
            average.copy_(current)
        self._optimizer.write_weights()
