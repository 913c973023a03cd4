"""Components that account for the time of a run: of its start, and of all its starts together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from megatron.distributed import comm
from megatron.training.component import Component
from megatron.training.metrics import Goodput, StepMetrics
from megatron.training.startup import StartupTimer
from megatron.training.trainer import Trainer


class GoodputState(Component):
    """Goodput of this run; another run that starts from its checkpoint begins with its own."""

    name = "goodput"
    state_types: ClassVar[Mapping[str, Any]] = {"first_start": float, "productive_seconds": float, "starts": int}
    is_of_run = True

    def __init__(self, goodput: Goodput) -> None:
        """Save and load ``goodput``."""
        self._goodput = goodput

    def state_dict(self) -> Mapping[str, Any]:
        """See :class:`Component`."""
        return self._goodput.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`Component`."""
        self._goodput.load_state_dict(state)


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
