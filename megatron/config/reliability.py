"""What a run does about faults: checks, records, and what follows."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option


@dataclass(frozen=True)
class ReliabilityConfig:
    """Faults of hardware, data and numbers: how they are found, recorded and survived."""

    rank_logs: bool = option(True, role="start", needs="run_dir")
    """Write warnings, errors and crashes of each rank into RUN_DIR/ranks."""
