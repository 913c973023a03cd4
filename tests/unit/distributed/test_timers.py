from __future__ import annotations

import time

import pytest
import torch

from megatron.distributed.timing import NO_SPAN, PHASES, Timers

CPU = torch.device("cpu")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_level_times_its_phases_and_those_below(level: int) -> None:
    timers = Timers(level, CPU)
    for name in PHASES:
        with timers(name):
            pass
    assert {name for name, seconds in timers.read(1).items() if seconds > 0} == {
        name for name, phase in PHASES.items() if phase.level <= level
    }


def test_levels_are_those_of_megatron_lm() -> None:
    """Its batch generator is on level 2; here it is always timed, as the wait for data."""
    assert {name for name, phase in PHASES.items() if phase.level == 2} == {"forward-compute", "backward-compute"}
    assert [name for name, phase in PHASES.items() if phase.level == 0] == ["batch-generator"]


def test_what_is_not_timed_shares_one_context() -> None:
    assert Timers(0, CPU)("optimizer") is NO_SPAN


def test_phases_nest_and_are_told_per_step() -> None:
    timers = Timers(1, CPU)
    for _ in range(4):
        with timers("optimizer"):
            with timers("optimizer-inner-step"):
                time.sleep(0.002)
            time.sleep(0.001)
    read = timers.read(steps=2)
    assert 0.004 <= read["optimizer-inner-step"] < 0.05
    assert read["optimizer"] - read["optimizer-inner-step"] >= 0.002
    assert set(timers.read(steps=1).values()) == {0.0}


def test_there_are_no_other_phases() -> None:
    with pytest.raises(KeyError):
        Timers(2, CPU)("optimiser")
