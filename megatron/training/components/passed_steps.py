"""Pass over given steps (``--iterations-to-skip``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from megatron.training.component import Component
from megatron.training.trainer import Trainer


class PassedSteps(Component):
    """Passes over steps, whose samples are consumed. Weights and all other state stay as they were."""

    def __init__(self, steps: Iterable[int]) -> None:
        """Pass over ``steps``, counted from 1."""
        self._steps = frozenset(steps)

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        steps = trainer.config.data.iterations_to_skip
        return cls(steps) if steps else None

    def passes_over(self, step: int) -> bool:
        """See :class:`Component`."""
        return step in self._steps
