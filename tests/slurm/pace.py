"""A plugin that makes steps last ``PACE`` seconds without computing, so that a run can be disturbed before its end."""

from __future__ import annotations

import os
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
        time.sleep(float(os.environ.get("PACE", "0.5")))
