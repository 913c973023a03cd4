"""Whether the implementations asked for exist."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.kernels import word_problems
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def kernels(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every word of ``--kernels`` names something."""
    yield from word_problems(config.compute.kernels)


CHECKS = (kernels,)
