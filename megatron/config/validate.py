"""Checks of the whole configuration."""

from __future__ import annotations

from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def problems(config: RunConfig, world_size: int, doubtful: frozenset[str] = frozenset()) -> list[Problem]:
    return []
