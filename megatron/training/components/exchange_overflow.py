"""Warn of steps that are skipped because tokens did not fit in the buffers of the exchange between experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.layers.dispatch import BoundedDispatcher
from megatron.layers.moe import MixtureOfExperts
from megatron.training.component import Component
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import print_warning
from megatron.training.trainer import Trainer


class ExchangeOverflow(Component):
    """Reads the flags of the layers with each log line. Without ``--on-nonfinite skip`` the run ends instead."""

    def __init__(self, trainer: Trainer, flags: Sequence[Tensor]) -> None:
        """Start with the flags of this rank's layers."""
        self._trainer, self._flags = trainer, flags

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        config = trainer.config
        if not config.model.num_experts or config.training.on_nonfinite != "skip":
            return None
        if config.parallel.expert_model_parallel_size == 1:
            return None
        modules = [module for chunk in trainer.chunks.values() for module in chunk.modules()]
        dispatchers = [module.training_dispatcher for module in modules if isinstance(module, MixtureOfExperts)]
        return cls(trainer, [each.overflowed for each in dispatchers if isinstance(each, BoundedDispatcher)])

    def on_log(self, metrics: Metrics) -> None:
        """See :class:`Component`; collective."""
        own = torch.stack([torch.zeros((), device=self._trainer.device), *(flag.float() for flag in self._flags)])
        if comm.all_reduce(own.max(), self._trainer.mesh.world, op="max") and self._trainer.mesh.world.rank == 0:
            print_warning(
                "steps were skipped since the last log line: tokens did not fit in the buffers of --moe-exchange "
                "bounded; resume with a larger --moe-exchange-bound, or with --moe-exchange exact"
            )
        for flag in self._flags:
            flag.zero_()
