"""A run from end to end on one rank: join the others, build, train, and say once what went wrong."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from megatron.config.run import RunConfig
from megatron.config.summary import summary
from megatron.parallel.mesh import first_to_fail, leave_distributed, world_from_environment
from megatron.training.health import NonFiniteError
from megatron.training.logging import RunLog
from megatron.training.loop import train
from megatron.training.setup import build, join
from megatron.training.stop import StopRequest

EXPECTED = (ValueError, OSError, NonFiniteError)
"""Errors whose text says all there is to say; others come with their traceback."""


def run(config: RunConfig, notes: Sequence[str] = ()) -> int:
    """Train as configured.

    Args:
        config: validated and resolved.
        notes: on the flags; rank 0 prints them, and a summary, before the first step.

    Returns:
        The exit status: that of :func:`megatron.training.loop.train`, or 1 after an error.

    """
    try:
        rank, world_size = join(config)
        trainer = build(config, rank, world_size)
        stop = StopRequest(trainer.mesh.world, trainer.device)
        try:
            with RunLog(config, world_size=world_size, device=trainer.device, enabled=rank == 0) as log:
                for note in (*notes, summary(config, world_size)):
                    log.note(note)
                return train(trainer, log, stop)
        finally:
            stop.restore()
    except Exception as error:
        report(error)
        return 1
    finally:
        leave_distributed()


def report(error: Exception) -> None:
    """Print an error, unless another rank has printed its own: what follows a first failure is mostly its echo."""
    rank, world_size, _ = world_from_environment()
    if not first_to_fail():
        return
    text = str(error) if isinstance(error, EXPECTED) else "".join(traceback.format_exception(error)).rstrip()
    print(f"error on rank {rank}: {text}" if world_size > 1 else f"error: {text}", file=sys.stderr, flush=True)
