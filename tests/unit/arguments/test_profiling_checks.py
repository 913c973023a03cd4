from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.arguments.validate import MAX_PROFILE_STEPS, check_window
from megatron.config.run import ProfilingConfig, RunConfig

LONG = RunConfig(profiling=ProfilingConfig(profile_step_start=1, profile_step_end=MAX_PROFILE_STEPS + 2))


@pytest.mark.parametrize(
    ("asked", "codes"), [("profile", ["E706"]), ("profile_memory", ["E706"]), ("profile_pipeline", [])]
)
def test_what_is_kept_in_memory_is_short(asked: str, codes: list[str]) -> None:
    """A timeline of the pipeline is written step by step."""
    config = replace(LONG, profiling=replace(LONG.profiling, **{asked: True}))
    assert [problem.code for problem in check_window(config, 1)] == codes
