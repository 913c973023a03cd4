"""Exponential moving average of the weights (``--ema-decay``), which evaluations and exports can use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self

import torch
from torch import Tensor

from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.training.component import Component, Kinds
from megatron.training.trainer import Trainer


class AverageWeights(Component):
    """Average of this rank's shards of the main parameters, in the memory and dtype of these."""

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
