"""Checks of the steps and ranks to profile."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.batch import total_steps
from megatron.config.problems import Problem
from megatron.config.reporting import ProfilingConfig
from megatron.config.run import RunConfig

MOST_STEPS = 20
"""Largest number of steps in one profile. The profiler keeps all events in memory: 6 MB a step for 2 layers and 4
micro-batches."""


def check_window(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the last step to profile comes after the first, and not too long after it."""
    profiling = config.profiling
    start = profiling.profile_step_start
    end = profiling.profile_step_end
    if (profiling.profile or profiling.profile_memory) and end - start > MOST_STEPS:
        sentence = f"a profile of {end - start:,} steps; at most {MOST_STEPS} fit, because all events stay in memory"
        yield Problem("E706", sentence, (f"--profile-step-end {start + MOST_STEPS}",))
    if _is_requested(profiling) and end <= start:
        sentence = f"--profile-step-end {end} must be above --profile-step-start {start}"
        yield Problem("E705", sentence, (f"--profile-step-end {start + 2}",))


def check_ranks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the chosen ranks exist, even without steps: a running job can be asked for a profile."""
    beyond = [rank for rank in config.profiling.profile_ranks if rank >= world_size]
    if beyond:
        existing = [str(rank) for rank in config.profiling.profile_ranks if rank < world_size]
        available = "only rank 0 exists" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
        sentence = f"--profile-ranks {beyond[0]}: {available}"
        yield Problem("E704", sentence, (f"--profile-ranks {' '.join(existing) or 0}",))


def profiling_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the run ends before the profile starts."""
    profiling = config.profiling
    steps = total_steps(config.training, config.parallel.data_parallel_size(world_size))
    start = profiling.profile_step_start
    if _is_requested(profiling) and start > steps:
        yield f"--profile-step-start {start}: no profile, because the run ends with step {steps:,}"


def _is_requested(profiling: ProfilingConfig) -> bool:
    return profiling.profile or profiling.profile_memory or profiling.profile_pipeline


PROFILING_CHECKS = (check_window, check_ranks)
