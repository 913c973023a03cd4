"""Profiles of selected steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import Need, option

PROFILE = Need("profile or profile_memory or profile_pipeline", "--profile, --profile-memory or --profile-pipeline")

RUN_DIR = Need("run_dir")


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of selected steps, written to run_dir. docs/operations.md explains how to profile a running job."""

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
    profile_ranks: tuple[int, ...] = option((0,), role="start", at_least=0, needs="run_dir")
    """Ranks that record."""
    pytorch_profiler_collect_shapes: bool = option(False, role="start", needs="run_dir")
    """Record the shapes of operator inputs."""
    pytorch_profiler_collect_callstack: bool = option(False, role="start", needs="run_dir")
    """Record Python call stacks."""

    @property
    def requested(self) -> bool:
        """True if selected steps are recorded."""
        return self.profile or self.profile_memory or self.profile_pipeline
