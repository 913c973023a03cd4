from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.checks.profiling import MOST_STEPS, check_window
from megatron.config.reporting import ProfilingConfig
from megatron.config.run import RunConfig

LONG = RunConfig(profiling=ProfilingConfig(profile_step_start=1, profile_step_end=MOST_STEPS + 2))


@pytest.mark.parametrize(
    ("asked", "codes"), [("profile", ["E706"]), ("profile_memory", ["E706"]), ("profile_pipeline", [])]
)
def test_what_is_kept_in_memory_is_short(asked: str, codes: list[str]) -> None:
    """A timeline of the pipeline is written step by step."""
    config = replace(LONG, profiling=replace(LONG.profiling, **{asked: True}))
    assert [problem.code for problem in check_window(config, 1)] == codes
