"""Keep the quantised weights of FP8 while the pipeline runs, in which weights do not change."""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron.kernels.fp8 import WeightCasts
from megatron.training.component import Component


class KeptCasts(Component):
    """Quantises every weight once in a step or an evaluation, rather than at each use."""

    def __init__(self, casts: WeightCasts) -> None:
        """Keep ``casts``."""
        self._casts = casts

    def while_computing(self) -> AbstractContextManager[None]:
        """See :class:`Component`."""
        return self._casts.kept()
