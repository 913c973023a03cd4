"""The search of layouts against brute force, and its single changes against predictions of their flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from time import process_time
from typing import Any

import pytest

import megatron.planner.search as search_module
from megatron.arguments.cli import parse
from megatron.arguments.validate import find_problems
from megatron.config.errors import UserError
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, SPELLINGS
from megatron.convert.huggingface.config import read_model_values
from megatron.pipeline.plan import build_program
from megatron.pipeline.schedules import SCHEDULES
from megatron.pipeline.simulate import StageCosts, simulate
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.layouts import (
    CONTEXT,
    DELAYING_SCHEDULES,
    GATHER,
    GRID,
    INSTANCES,
    MICRO,
    OFFLOAD,
    OPTIMIZER,
    OVERLAP,
    PIPELINE,
    RECOMPUTATION,
    SEQUENCE,
    SHARDING,
    TENSOR,
    TP,
)
from megatron.planner.memory import max_peak_bytes
from megatron.planner.search import HEADROOM, LayoutSearch, Plan, cheapest_fits, least_makespan
from megatron.planner.step_time import step_time

CLUSTER = Cluster.of(accelerators()["h100-80g"])
SMALL = (
    "--mock-data --vocab-size 5120 --train-iters 1 --seq-length 1024 --num-layers 8 --hidden-size 2048"
    " --num-attention-heads 16 --bf16 --global-batch-size 16"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 1024 --disable-bias-linear --normalization RMSNorm --swiglu --bf16"
    " --global-batch-size 8"
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
    "sharding": (*CONTEXT, *PIPELINE, *MICRO, *RECOMPUTATION, *OFFLOAD),
    "pipelines": (*TENSOR, *CONTEXT, *SHARDING, *MICRO, *OFFLOAD),
    "memory": (*TENSOR, *CONTEXT, *PIPELINE, *MICRO, INSTANCES),
}
"""Options that keep their values in a search; the others are searched."""

MORE_FIXED = FIXED | {
    "micro-batch": (*SHARDING, *RECOMPUTATION, *OFFLOAD),
    "all but offload": (*CONTEXT, *OFFLOAD, *RECOMPUTATION[1:]),
    "all but context": (*CONTEXT, *MICRO, *PIPELINE[1:]),
}


def compare_with_all_layouts(fixed: Sequence[str], flags: str = "") -> None:
    """Compare a search with every layout, where all fit, where one fits, and in between."""
    config, given = config_of(f"--use-distributed-optimizer {flags}"), frozenset(fixed)
    every = AllLayouts(LayoutSearch(config, 4, with_memory(1000, node_size=2), find_problems, given))
    used = sorted(used for _, _, used in every.found)
    for share in (0.0, 0.2, 0.6, 1.0):  # of the layouts that fit
        capacity = used[round(share * (len(used) - 1))]
        search = LayoutSearch(config, 4, with_memory(capacity / 1e9, node_size=2), find_problems, given)
        found = {grid_of(plan): plan.time.seconds for plan in search.ranked()}
        assert found
        assert found == pytest.approx(every.fastest(search.capacity), rel=1e-9)
        assert [*found.values()] == sorted(found.values())


@pytest.mark.parametrize("fixed", FIXED)
def test_search_finds_the_best_of_all_layouts(fixed: str) -> None:
    compare_with_all_layouts(FIXED[fixed])


def test_a_search_that_is_cut_short_states_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    config, given = config_of("--use-distributed-optimizer"), frozenset(FIXED["pipelines"])
    cluster = with_memory(12.0, node_size=2)
    whole = [*LayoutSearch(config, 4, cluster, find_problems, given).ranked()]
    monkeypatch.setattr(search_module, "EFFORT", 0)
    short = LayoutSearch(config, 4, cluster, find_problems, given)
    plans = short.best()
    assert plans
    assert short.best() == plans
    assert all(short.fits(plan) for plan in plans)
    assert len({grid_of(plan) for plan in plans}) == len(plans)
    for plan in plans:
        assert whole[0].time.seconds <= plan.time.seconds * (1 + 1e-9)
        assert plan.time.seconds * (1 - short.may_be_beaten_by(plan)) <= whole[0].time.seconds * (1 + 1e-9)
    assert LayoutSearch(config, 4, cluster, find_problems, given).may_be_beaten_by(whole[0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("fixed", MORE_FIXED)
@pytest.mark.parametrize("flags", ["--seq-length 4096", EXPERTS, "--kernels attention=torch --optimizer sgd"])
def test_search_finds_the_best_of_all_layouts_of_other_runs(fixed: str, flags: str) -> None:
    compare_with_all_layouts(MORE_FIXED[fixed], flags)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", *DELAYING_SCHEDULES])
def test_no_schedule_is_faster_than_the_bound_of_its_stages(name: str) -> None:
    random = Random(name)
    for _ in range(20):
        ranks, micro_batches = random.choice((2, 3, 4)), random.choice((1, 2, 4, 6, 12))
        stages = SCHEDULES[name].chunks or random.choice((2, 3))
        parallel = ParallelConfig(
            pipeline_model_parallel_size=ranks, num_virtual_stages_per_pipeline_rank=stages, pipeline_schedule=name
        )
        if name == "interleaved":
            micro_batches *= ranks
        costs = [tuple(random.uniform(0.1, 3) for _ in range(3)) for _ in range(ranks * stages)]
        program = build_program(parallel, micro_batches)
        takes = simulate(program, StageCosts(*zip(*costs))).makespan
        bound = least_makespan(costs, program.placement, micro_batches, name not in DELAYING_SCHEDULES)
        assert 0.3 * takes < bound <= takes * (1 + 1e-12)


@pytest.mark.parametrize("flags", ["", EXPERTS])
def test_what_saves_memory_takes_time(flags: str) -> None:
    """Layouts with it are skipped where those without it fit."""
    search, random = LayoutSearch(config_of(flags), 4, CLUSTER, find_problems), Random(7)
    space, compared = search.space, 0
    cores = [core for core in space.cores() if core[OVERLAP] == core[SEQUENCE] and [*space.pipelines(core)]]
    while compared < 40:
        usual = dict(random.choice(cores))
        for axis in (space.pipelines, space.shardings, space.recomputations, space.offloads):
            choices = [*axis(usual)] or [{}]
            usual |= random.choice(choices) if axis in (space.pipelines, space.shardings) else choices[0]
        if usual[GATHER] is False and usual[OPTIMIZER]:
            continue
        saving = usual | random.choice(space.recomputations(usual)) | random.choice(space.offloads(usual))
        saving |= {OVERLAP: usual[OVERLAP] and random.random() < 0.5, GATHER: usual[GATHER] and random.random() < 0.5}
        slow, fast = search.plan(saving), search.plan(usual)
        if slow is not None and fast is not None:
            compared += 1
            assert slow.time.seconds >= fast.time.seconds * (1 - 1e-12)


def test_a_search_keeps_what_is_given_and_is_deterministic() -> None:
    config = config_of("--tensor-model-parallel-size 2 --micro-batch-size 2 --recompute-granularity full")
    given = frozenset((TP, *MICRO, RECOMPUTATION[0]))
    search = LayoutSearch(config, 4, CLUSTER, find_problems, given)
    plans = search.best(3)
    assert plans == LayoutSearch(config, 4, CLUSTER, find_problems, given).best(3)
    for plan in plans:
        again = config_of(" ".join(plan.flags))
        assert all(SETTINGS[name].value_in(again) == SETTINGS[name].value_in(config) for name in given)
        assert step_time(again, 4, CLUSTER).seconds == plan.time.seconds
        assert max_peak_bytes(again, 4) == plan.memory


def test_neighbours_have_reasons() -> None:
    flags = "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 2"
    config = config_of(flags, 16)
    used = sum(max_peak_bytes(config, 16).values())
    search = LayoutSearch(config, 16, with_memory(used / 1e9), find_problems)
    plan = search.plan_of(config)
    found = {each.change: each for each in search.neighbours(plan)}
    assert "too much on pipeline rank 0" in found["micro-batch 2"].reason
    assert found["PP 4"].refused == "16 ranks are not a multiple of TP x PP = 32"
    assert found["offload optimizer"].reason.endswith("more of updates")
    for each in found.values():
        if each.plan is None:
            with pytest.raises(UserError) as error:
                config_of(f"{flags} {' '.join(each.flags)}", 16)
            assert each.refused in [problem.sentence for problem in error.value.problems]
        else:
            other = config_of(f"{flags} {' '.join(each.flags)}", 16)
            assert each.slower == step_time(other, 16, search.cluster).seconds - plan.time.seconds
            assert bool(each.reason) == (each.slower > -1e-9 or not search.fits(each.plan))


def test_tensor_parallelism_across_nodes_is_a_reason() -> None:
    flags = "--tensor-model-parallel-size 8 --sequence-parallel"
    search = LayoutSearch(config_of(flags, 16), 16, CLUSTER, find_problems)
    found = {each.change: each for each in search.neighbours(search.plan_of(search.config))}
    assert found["TP 16"].reason.endswith("TP communication, as TP 16 crosses nodes")


def test_a_run_that_refuses_offload_is_planned() -> None:
    config = config_of("--cuda-graph step --hidden-dropout 0 --attention-dropout 0", 1)
    search = LayoutSearch(config, 1, CLUSTER, find_problems)
    assert [plan.config.optimizer.optimizer_cpu_offload for plan in search.best(1)] == [False]


def test_a_shortfall_says_what_would_fit() -> None:
    given = frozenset((*CONTEXT, *PIPELINE[1:], *MICRO, *RECOMPUTATION, *OFFLOAD))
    search = LayoutSearch(config_of(), 4, with_memory(1.4), find_problems, given)
    assert search.best(1) == []
    short = search.shortfall()
    assert short is not None
    assert short.missing == math.ceil(short.plan.bytes - search.capacity) > 0
    assert short.ranks is not None
    larger = replace(search, world_size=short.ranks)
    assert larger.best(1)
    assert not replace(larger, world_size=short.ranks // 2).best(1)
    assert not replace(search, cluster=with_memory((short.plan.bytes - 1000) / 1e9)).best(1)
    assert replace(search, cluster=with_memory(short.plan.bytes / 1e9)).best(1)
    assert "--no-optimizer-cpu-offload" in short.dropped
    for flag in short.dropped:
        assert replace(search, given=given - {SPELLINGS[flag].name}).best(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "preset", "batch", "most"), [(1024, "gpt3-175b", 1536, 10), (16384, "llama3-405b", 2048, 60)]
)
def test_large_clusters_are_planned_in_seconds(ranks: int, preset: str, batch: int, most: float) -> None:
    flags = f"--check-config --mock-data --train-iters 1 --preset {preset} --bf16 --vocab-size 51200 --world-size 1"
    config = parse([*flags.split(), "--global-batch-size", str(batch)], {}, read_model=read_model_values).config
    start = process_time()
    assert LayoutSearch(config, ranks, CLUSTER, find_problems).best(1)
    assert process_time() - start < most
