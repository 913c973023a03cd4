"""What a run does about faults: checks, records, and what follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReliabilityConfig:
    """Faults of hardware, data and numbers: how they are found, recorded and survived."""
