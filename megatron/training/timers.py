"""Timers of the phases of a training step, with Megatron-LM's names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from megatron.parallel.ranges import span
from megatron.parallel.stopwatch import NOTHING, Stopwatch


@dataclass(frozen=True)
class Phase:
    """A timed part of a step."""

    level: int  # lowest --timing-log-level at which it is timed
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
"""All timers; add new ones here. They are the same on every rank, so that ranks can be compared."""

RECORDED: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer-clip-main-grad", "optimizer-inner-step", "optimizer-copy-main-to-model-params"),
    "step": tuple(name for name in PHASES if name != "batch-generator"),
}
"""Phases inside the replayed graph, by ``--cuda-graph``. They are not logged: times of the few eager steps mislead."""


class Timers:
    """Times the phases of a step up to a level; phases above it cost one dictionary lookup.

    Use ``with timers("optimizer"): ...``. Times are device times (see :class:`Stopwatch`). Phases may nest, and may run
    several times per step.
    """

    def __init__(self, level: int, device: torch.device) -> None:
        """Time the phases up to ``level`` on ``device``."""
        self.watch = Stopwatch(name for name, phase in PHASES.items() if phase.level <= level)
        self.level, self._cuda = level, device.type == "cuda"

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time the context as the phase ``name`` of `PHASES`; in a profile it is a range at every level."""
        return span(name, NOTHING if PHASES[name].level > self.level else self.watch.span(name, self._cuda))

    def read(self, steps: int) -> dict[str, float]:
        """Return seconds per step of each timed phase over the ``steps`` since the last call. Waits for the GPU."""
        return {name: seconds / steps for name, seconds in self.watch.take().items()}
