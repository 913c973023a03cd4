"""Profiles of selected steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.errors import Problem
from megatron.config.option import MegatronOption, Need, Run, option

PROFILE = Need("profile or profile_memory or profile_pipeline", "--profile, --profile-memory or --profile-pipeline")
RUN_DIR = Need("run_dir")

MAX_PROFILE_STEPS = 20
"""Largest number of steps in one profile. The profiler keeps all events in memory: 6 MB a step for 2 layers and 4
micro-batches."""


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of selected steps, written to run_dir. docs/logs.md explains how to profile a running job."""

    profile: bool = option(False, role="start", needs=RUN_DIR)
    """Record a PyTorch profile (Chrome trace) of the selected steps."""
    profile_memory: bool = option(False, role="start", needs=RUN_DIR)
    """Record memory allocations in those steps: a snapshot on GPU, a curve on CPU."""
    profile_pipeline: bool = option(False, role="start", needs=RUN_DIR)
    """Record the time of every pipeline action in those steps, on all ranks."""
    profile_step_start: int = option(10, role="start", at_least=1, needs=PROFILE)
    """First recorded step."""
    profile_step_end: int = option(12, role="start", at_least=2, needs=PROFILE)
    """Step before which recording ends."""
    profile_ranks: tuple[int, ...] = option(
        (0,),
        role="start",
        at_least=0,
        needs="run_dir",
        megatron=MegatronOption("none", "a requested profile is always recorded"),
    )
    """Ranks that record."""
    pytorch_profiler_collect_shapes: bool = option(False, role="start", needs="run_dir")
    """Record the shapes of operator inputs."""
    pytorch_profiler_collect_callstack: bool = option(False, role="start", needs="run_dir")
    """Record Python call stacks."""

    refused: ClassVar = """
    requested and profile_step_start>=profile_step_end
    E705 --profile-step-end {profile_step_end} must be above --profile-step-start {profile_step_start}
      fix: --profile-step-end {profile_step_start+2}
    """

    @property
    def requested(self) -> bool:
        """True if selected steps are recorded."""
        return self.profile or self.profile_memory or self.profile_pipeline

    def check_window(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the last step to profile is not too long after the first."""
        start, end = self.profile_step_start, self.profile_step_end
        if (self.profile or self.profile_memory) and end - start > MAX_PROFILE_STEPS:
            limit = f"at most {MAX_PROFILE_STEPS} fit, because all events stay in memory"
            fixes = (f"--profile-step-end {start + MAX_PROFILE_STEPS}",)
            yield Problem("E706", f"a profile of {end - start:,} steps; {limit}", fixes)

    def check_ranks(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the chosen ranks exist, even without steps: a running job can be asked for a profile."""
        ranks = self.profile_ranks
        beyond = [rank for rank in ranks if rank >= world_size]
        if beyond:
            existing = " ".join(str(rank) for rank in ranks if rank < world_size)
            available = "only rank 0 exists" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
            yield Problem("E704", f"--profile-ranks {beyond[0]}: {available}", (f"--profile-ranks {existing or 0}",))
