"""Check of ``--kernels``."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.kernels import word_problems
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def check_kernels(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every word of ``--kernels`` names an operation or an implementation."""
    yield from word_problems(config.compute.kernels)


KERNEL_CHECKS = (check_kernels,)
