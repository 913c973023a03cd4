"""A plugin that makes steps last half a second without computing, so that a run can be disturbed before its end."""

from __future__ import annotations

import time

from megatron.config.plugins import register
from megatron.training.callbacks.base import Callback
from megatron.training.metrics import StepMetrics


@register("callback", "pace")
class Pace(Callback):
    """Sleeps after every step."""

    interval = 1

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Sleep."""
        time.sleep(0.5)
