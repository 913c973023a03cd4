"""Weights in FP8, each quantised once in a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Self

from megatron.kernels.fp8 import WeightCasts
from megatron.training.component import Component
from megatron.training.trainer import Trainer


class KeptCasts(Component):
    """Quantises every weight once in a step or an evaluation, rather than at each use."""

    def __init__(self, casts: WeightCasts) -> None:
        """Keep ``casts``."""
        self._casts = casts

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`; ZeRO-3 that frees weights frees what is kept of them."""
        config = trainer.config
        if config.precision.fp8_format is None or config.parallel.reshards_after_forward:
            return None
        return cls(next(iter(trainer.chunks.values())).context.fp8.casts)

    def while_computing(self) -> AbstractContextManager[None]:
        """See :class:`Component`."""
        return self._casts.kept()
