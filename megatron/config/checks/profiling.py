"""Whether there is something to record in the steps and on the ranks that were chosen."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.batch import total_steps
from megatron.config.problems import Problem
from megatron.config.reporting import ProfilingConfig
from megatron.config.run import RunConfig

MOST_STEPS = 20
"""Of one profile. The profiler keeps every event of them in memory: 6 MB a step for 2 layers and 4 micro-batches."""


def window(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The last step is not before the first, and not too far from it."""
    p = config.profiling
    if (p.profile or p.profile_memory) and p.profile_step_end - p.profile_step_start > MOST_STEPS:
        steps = p.profile_step_end - p.profile_step_start
        sentence = f"a profile of {steps:,} steps; its events are kept in memory, so {MOST_STEPS} are the most"
        yield Problem("E706", sentence, (f"--profile-step-end {p.profile_step_start + MOST_STEPS}",))
    if _asked(p) and p.profile_step_end <= p.profile_step_start:
        sentence = f"a profile from step {p.profile_step_start} on that ends before step {p.profile_step_end} has none"
        yield Problem("E705", sentence, (f"--profile-step-end {p.profile_step_start + 2}",))


def ranks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The chosen ranks exist. Also where no steps were chosen: a running job may be asked for a profile."""
    beyond = [rank for rank in config.profiling.profile_ranks if rank >= world_size]
    if beyond:
        there = [str(rank) for rank in config.profiling.profile_ranks if rank < world_size]
        only = "rank 0 alone" if world_size == 1 else f"ranks 0 to {world_size - 1}"
        sentence = f"rank {beyond[0]} shall record a profile, and there {'is' if world_size == 1 else 'are'} {only}"
        yield Problem("E704", sentence, (f"--profile-ranks {' '.join(there) or 0}",))


def remarks(config: RunConfig, world_size: int) -> Iterator[str]:
    """A line on steps that the run does not have."""
    p, steps = config.profiling, total_steps(config.training, config.parallel.data_parallel_size(world_size))
    if _asked(p) and p.profile_step_start > steps:
        yield f"--profile-step-start {p.profile_step_start}: nothing is recorded, the run ends with step {steps:,}"


def _asked(profiling: ProfilingConfig) -> bool:
    return profiling.profile or profiling.profile_memory or profiling.profile_pipeline


CHECKS = (window, ranks)
