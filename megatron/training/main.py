"""A run from end to end on one rank: join the others, build, train, and say once what went wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from megatron.checkpoint.errors import CheckpointError
from megatron.config.launch import Launch
from megatron.config.problems import UserError
from megatron.config.run import RunConfig
from megatron.config.summary import summary
from megatron.data.errors import DataError
from megatron.parallel.mesh import everyone, first_to_fail, is_lost_contact, leave_distributed
from megatron.training.health import NonFiniteError
from megatron.training.logging import RunLog
from megatron.training.loop import train
from megatron.training.resume import begin, choose
from megatron.training.setup import build, choose_device, join
from megatron.training.stop import StopRequest

EXPECTED = (UserError, DataError, CheckpointError, NonFiniteError)
"""Errors whose text says all there is to say; others come with their traceback."""


def run(config: RunConfig, notes: Sequence[str] = ()) -> int:
    """Train as configured.

    Args:
        config: validated and resolved.
        notes: on the flags; rank 0 prints them, and a summary, before the first step.

    Returns:
        The exit status: that of :func:`megatron.training.loop.train`, or 1 after an error. After an error the
        process should end at once: torch.distributed is left open, and so are the peers' connections to it.

    """
    try:
        status = join_and_train(config, notes)
    except Exception as error:
        report(error)
        return 1
    leave_distributed()
    return status


def join_and_train(config: RunConfig, notes: Sequence[str]) -> int:
    """The run itself; returns its exit status."""
    rank, world_size = join(config)
    world = everyone(rank, world_size)
    stop = StopRequest(world, choose_device(config.training.device), config.training.exit_duration_in_mins)
    try:
        origin = choose(config.checkpoint, world)
        trainer = build(config, rank, world_size, fresh=origin.fresh)
        notes = [*notes, *begin(trainer, origin)]
        place = {"iteration": trainer.iteration, "consumed_samples": trainer.consumed_samples}
        with RunLog(config, world_size=world_size, device=trainer.device, enabled=rank == 0, **place) as log:
            for text in (*notes, "\n".join([summary(config, world_size, **place), *trainer.data.summary()])):
                log.note(text)
            return train(trainer, log, stop)
    finally:
        stop.restore()


def report(error: Exception) -> None:
    """Print an error, unless another rank has printed its own: what follows a first failure is mostly its echo."""
    if not first_to_fail():
        return
    launch = Launch.read(os.environ)
    where = f"error on rank {launch.rank}" if launch.world_size > 1 else "error"
    print(f"{where}: {explain(error)}", file=sys.stderr, flush=True)


def explain(error: Exception) -> str:
    """What a person is told of an error."""
    if isinstance(error, EXPECTED):
        return str(error)
    if is_lost_contact(error):
        return (
            "another rank ended without a word (killed, out of memory), or did not answer within "
            f"--distributed-timeout-minutes; the launcher may know which\n  {error}"
        )
    return "".join(traceback.format_exception(error)).rstrip()
