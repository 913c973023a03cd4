"""The search of layouts against brute force, and its single changes against predictions of their flags."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.validate import find_problems
from megatron.config.run import RunConfig
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.layouts import CONTEXT, GRID, OFFLOAD, PIPELINE, RECOMPUTATION, SHARDING, TENSOR
from megatron.planner.memory import max_peak_bytes
from megatron.planner.search import HEADROOM, LayoutSearch, Plan, cheapest_fits
from megatron.planner.step_time import step_time

CLUSTER = Cluster.of(accelerators()["h100-80g"])
SMALL = (
    "--mock-data --vocab-size 5120 --train-iters 1 --seq-length 1024 --num-layers 8 --hidden-size 2048"
    " --num-attention-heads 16 --bf16 --global-batch-size 16"
)


def config_of(flags: str = "", ranks: int = 4) -> RunConfig:
    return parse(f"{SMALL} --check-config --world-size {ranks} {flags}".split(), {}).config


def test_cheapest_fits_are_flags_that_make_the_run_fit() -> None:
    config = config_of("--micro-batch-size 4")
    takes, seconds = sum(max_peak_bytes(config, 4).values()), step_time(config, 4, CLUSTER).seconds
    found = cheapest_fits(config, 4, CLUSTER, find_problems, capacity=takes - 2**30)
    assert len(found) == 3
    for change in found:
        with_change = config_of(f"--micro-batch-size 4 {' '.join(change.flags)}")
        assert sum(max_peak_bytes(with_change, 4).values()) == takes - change.saved <= takes - 2**30
        assert step_time(with_change, 4, CLUSTER).seconds == seconds + change.slower
    assert [each.slower for each in found] == sorted(each.slower for each in found)
    assert len({each.axis for each in found}) == 3


class AllLayouts:
    """Every layout of a space, predicted one by one."""

    def __init__(self, search: LayoutSearch) -> None:
        plans = (search.plan(chosen) for chosen in search.space.layouts())
        self.found = [(grid_of(plan), plan.time.seconds, plan.bytes) for plan in plans if plan is not None]

    def fastest(self, capacity: float) -> dict[tuple[Any, ...], float]:
        """Return the seconds of the fastest layout of each grid that fits."""
        fastest: dict[tuple[Any, ...], float] = {}
        for grid, seconds, used in self.found:
            if used <= capacity:
                fastest[grid] = min(seconds, fastest.get(grid, math.inf))
        return fastest


def grid_of(plan: Plan) -> tuple[Any, ...]:
    return tuple(plan.chosen[name] for name in GRID)


def with_memory(gigabytes: float, node_size: int = 8) -> Cluster:
    accelerator = replace(accelerators()["h100-80g"], memory=(gigabytes * 1e9 + 1) / HEADROOM)
    return Cluster.of(accelerator, node_size)


FIXED = {
    "sharding": (*CONTEXT, *PIPELINE[1:], *RECOMPUTATION, *OFFLOAD),
    "pipelines": (*TENSOR, *CONTEXT, *SHARDING, *OFFLOAD),
    "memory": (*TENSOR, *CONTEXT, *PIPELINE, SHARDING[2]),
    "all of a micro-batch": (*RECOMPUTATION, *OFFLOAD),
}
"""Options that keep their values in a search; the others are searched."""


@pytest.mark.parametrize("fixed", [*FIXED][:3] + [pytest.param([*FIXED][3], marks=pytest.mark.slow)])
def test_search_finds_the_best_of_all_layouts(fixed: str) -> None:
    config, given = config_of("--use-distributed-optimizer"), frozenset(FIXED[fixed])
    every = AllLayouts(LayoutSearch(config, 4, with_memory(1000, node_size=2), find_problems, given))
    used = sorted(used for _, _, used in every.found)
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):  # of the layouts that fit
        capacity = used[round(share * (len(used) - 1))]
        search = LayoutSearch(config, 4, with_memory(capacity / 1e9, node_size=2), find_problems, given)
        found = {grid_of(plan): plan.time.seconds for plan in search.ranked()}
        assert found
        assert found == pytest.approx(every.fastest(search.capacity), rel=1e-9)
        assert [*found.values()] == sorted(found.values())
