"""Timers of the phases of a step, by the names of Megatron-LM."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from megatron.parallel.ranges import span
from megatron.parallel.stopwatch import NOTHING, Stopwatch


@dataclass(frozen=True)
class Phase:
    """A stretch of a step: the ``--timing-log-level`` from which on it is timed, and what happens in it."""

    level: int
    meaning: str


PHASES: dict[str, Phase] = {
    "batch-generator": Phase(0, "getting the micro-batches of the step"),
    "forward-backward": Phase(
        1, "all forward and backward passes of the step, and in a pipeline the waiting for neighbours"
    ),
    "all-grads-sync": Phase(1, "waiting for the gradients of all replicas"),
    "layernorm-grads-all-reduce": Phase(
        1,
        "summing gradients of weights that tensor-parallel ranks share, and of the embedding that the first and the "
        "last stage share",
    ),
    "optimizer": Phase(1, "the whole update"),
    "optimizer-clip-main-grad": Phase(1, "the gradient norm and clipping"),
    "optimizer-inner-step": Phase(1, "the update rule"),
    "optimizer-copy-main-to-model-params": Phase(1, "rounding weights into the compute dtype"),
    "forward-compute": Phase(2, "the forward passes of the micro-batches"),
    "backward-compute": Phase(2, "the backward passes of the micro-batches"),
}
"""Every timer there is; a new one begins here. All ranks have the same, so that they can compare them."""

RECORDED: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer-clip-main-grad", "optimizer-inner-step", "optimizer-copy-main-to-model-params"),
    "step": tuple(name for name in PHASES if name != "batch-generator"),
}
"""Phases that nobody times where a CUDA graph is replayed, by ``--cuda-graph``; the few eager steps would mislead."""


class Timers:
    """Times the phases of a step up to a level; those above it cost a look into a table.

    ``with timers("optimizer"): ...``. Times are those of the device (see :class:`Stopwatch`); a phase may run inside
    another one, and several times in a step.
    """

    def __init__(self, level: int, device: torch.device) -> None:
        """Time the phases of ``level`` and below, on ``device``."""
        self.watch = Stopwatch(name for name, phase in PHASES.items() if phase.level <= level)
        self.level, self._cuda = level, device.type == "cuda"

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time what is inside as ``name``; in a profile it is a range, whatever its level.

        Raises:
            KeyError: when there is no such phase.
        """
        return span(name, NOTHING if PHASES[name].level > self.level else self.watch.span(name, self._cuda))

    def read(self, steps: int) -> dict[str, float]:
        """Seconds per step of each phase that is timed, over the ``steps`` since the last call. Waits for the GPU."""
        return {name: seconds / steps for name, seconds in self.watch.take().items()}
