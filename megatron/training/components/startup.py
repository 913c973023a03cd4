"""Report the phases of a start in the log, after the first step."""

from __future__ import annotations

import torch

from megatron.distributed import comm
from megatron.training.component import Component
from megatron.training.metrics import StepMetrics
from megatron.training.startup import StartupTimer
from megatron.training.trainer import Trainer


class StartupReport(Component):
    """Times the first step, logs the time of each phase on this and the slowest rank, and leaves the run."""

    pauses = False

    def __init__(self, trainer: Trainer, startup: StartupTimer) -> None:
        """Report ``startup``."""
        self._trainer, self._startup = trainer, startup

    def on_step_start(self) -> None:
        """See :class:`Component`."""
        self._startup.enter("first step")

    def on_step_end(self, metrics: StepMetrics) -> None:
        """See :class:`Component`."""
        self._trainer.components.remove(self)
        device, world = self._trainer.device, self._trainer.mesh.world
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the first step counts until the GPU has finished it
        self._startup.stop()
        mine = self._startup.seconds
        with world.meter.paused():
            seconds = torch.tensor([*mine.values()], dtype=torch.float64, device=device)
            longest = comm.all_reduce(seconds, world, op="max").tolist()
        self.log.start_up(mine, dict(zip(mine, longest)))
