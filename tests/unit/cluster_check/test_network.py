"""The measured network: tournaments of pairs, groups of layouts, and the planner's use of what was measured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

from benchmarks import bandwidth
from megatron.arguments.cli import parse
from megatron.config.run import RunConfig
from megatron.distributed.launch import world_group
from megatron.planner.communication import RankGroup
from megatron.planner.hardware import Cluster, Link, PlacedGroup, accelerators, find_accelerator
from megatron.planner.network import seconds
from megatron.planner.step_time import step_time
from tests.kit.pool import Pool
from tools.cluster_check import network
from tools.cluster_check.__main__ import shares
from tools.cluster_check.network import (
    COLLECTIVES,
    CollectiveFigure,
    NetworkFigures,
    Pair,
    accelerator_row,
    measure_network,
    pair_lines,
    pair_rounds,
    planned_groups,
    usual_groups,
)

ROOT = Path(__file__).parents[3]
FLAGS = (
    "--mock-data --vocab-size 256 --train-iters 1 --device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 16 --global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel"
)


def config_of(ranks: int, more: str = "") -> RunConfig:
    return parse([*FLAGS.split(), *more.split()], {"RANK": "0", "WORLD_SIZE": str(ranks)}).config


@pytest.mark.parametrize("ranks", [2, 3, 8, 32])
def test_each_rank_meets_each_other_once(ranks: int) -> None:
    met = [(a, b) for partners in pair_rounds(ranks, 1) for a, b in enumerate(partners) if b is not None]
    assert sorted(met) == sorted([*combinations(range(ranks), 2), *((b, a) for a, b in combinations(range(ranks), 2))])


def test_large_clusters_pair_the_ranks_of_nodes_and_the_nodes() -> None:
    rounds = pair_rounds(1024, 8)
    assert len(rounds) == 7 + network.MOST_ROUNDS
    for partners in rounds:
        assert all(b is None or partners[b] == a for a, b in enumerate(partners))
    within = {(a, b) for partners in rounds[:7] for a, b in enumerate(partners) if b is not None}
    assert within == {(a, b) for a in range(1024) for b in range(a // 8 * 8, a // 8 * 8 + 8) if a != b}


def test_groups_of_a_layout_are_measured() -> None:
    layout = "--context-parallel-size 2 --num-experts 4 --expert-model-parallel-size 4 --use-distributed-optimizer"
    groups = planned_groups(config_of(16, layout), 16)
    assert groups[RankGroup(2, 1)] == {"all-gather", "reduce-scatter", "all-reduce"}  # tensor
    assert groups[RankGroup(8, 1)] == {"all-to-all"}  # experts over EP x TP
    assert groups[RankGroup(8, 2)] == {"all-gather", "reduce-scatter"}  # replicas
    assert usual_groups(16, 8).keys() == {RankGroup(8, 1), RankGroup(2, 8), RankGroup(16, 1)}


def measured(rank: int, ranks: int) -> NetworkFigures:
    with (
        patch.object(bandwidth, "SECONDS", 0.0),
        patch.dict(network.SIZES, cpu=(2**-10, 2**-6)),
        patch.dict(network.PAIR_BYTES, cpu=2**12),
    ):
        return measure_network(world_group(rank, ranks), 2, config_of(ranks), torch.device("cpu"))


def test_all_ranks_measure_and_the_planner_reads_what_they_found(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(4, measured)
    assert [each.pairs for each in others] == [first.pairs] * 3
    assert {(pair.first, pair.second) for pair in first.pairs} == {*combinations(range(4), 2)}
    assert all(pair.latency > 0 and pair.bandwidth > 0 for pair in first.pairs)
    within, across, every = PlacedGroup(2, 2), PlacedGroup(2, 1), PlacedGroup(4, 2)
    assert {(each.operation, each.group) for each in first.collectives} == {
        (operation, group) for operation in COLLECTIVES for group in (within, across, every)
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"mine": accelerator_row(first, accelerators()["cpu"], "a test")}))
    cluster = Cluster.of(find_accelerator(str(file)))
    assert cluster.node_size == 2
    for each in first.collectives:
        ranks = {within: (2, 1), across: (2, 2), every: (4, 1)}[each.group]
        assert cluster.group(*ranks) == each.group
        larger = [o.seconds for o in first.collectives if o[:2] == each[:2] and o.bytes >= each.bytes]
        assert seconds(cluster, each.operation, each.bytes, each.group) == pytest.approx(min(larger), rel=1e-3)
    assert len([*pair_lines(first)]) == 2


def test_measured_links_are_those_of_the_cluster_that_was_measured(tmp_path: Path) -> None:
    """Times of an invented cluster, which the fit has to find again, so that groups of other sizes are right, too."""
    sheet = accelerators()["h100-80g"]
    real = replace(Cluster.of(sheet), link=Link(7e-6, 300e9), network=Link(20e-6, 10e9))
    groups = [real.group(8, 1), real.group(16, 8), real.group(128, 1)]
    sizes = (2.0**10, 2.0**20, 2.0**30)
    figures = NetworkFigures(
        8,
        (Pair(0, 1, 1e-5, 2e11), Pair(0, 8, 2e-5, 8e9), Pair(1, 9, 2e-5, 4e9)),
        tuple(
            CollectiveFigure(operation, group, size, seconds(real, operation, size, group))
            for operation in COLLECTIVES
            for group in groups
            for size in sizes
        ),
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"mine": accelerator_row(figures, sheet, "a test")}))
    found = Cluster.of(find_accelerator(str(file)))
    assert found.link == pytest.approx(real.link, rel=0.02)
    assert found.network == pytest.approx(real.network, rel=0.02)
    other = real.group(32, 4)
    for operation in COLLECTIVES:
        assert seconds(found, operation, 2**26, other) == pytest.approx(
            seconds(real, operation, 2**26, other), rel=0.02
        )
    assert "slowest: ranks 1 and 9 with 4 GB/s" in [*pair_lines(figures)][1]
    # Groups of different ranks on the same numbers of nodes: the slower ones count.
    slower = replace(
        figures, collectives=(*figures.collectives, *(e._replace(seconds=1.0) for e in figures.collectives))
    )
    file.write_text(yaml.safe_dump({"mine": accelerator_row(slower, sheet, "a test")}))
    assert seconds(Cluster.of(find_accelerator(str(file))), "all-gather", 2.0**25, groups[0]) == 1.0
    file.write_text(yaml.safe_dump({"mine": accelerator_row(figures, sheet, "a test")}))
    # Another network is not the one that was measured.
    faster = Cluster.of(find_accelerator(str(file)), network=100e9)
    assert seconds(faster, "all-gather", 2.0**30, groups[1]) < 0.3 * seconds(found, "all-gather", 2.0**30, groups[1])
    assert seconds(faster, "all-gather", 2.0**30, groups[0]) == seconds(found, "all-gather", 2.0**30, groups[0])


def test_shares_of_a_step_are_printed_beside_those_of_a_run() -> None:
    config = config_of(4)
    step = step_time(config, 4, Cluster.of(accelerators()["h100-80g"]))
    header, *rows, total = shares({"data sheet": step}, {"tensor": 0.25, "data": 0.125, "context": 0.0})
    assert header.split() == ["data", "sheet", "measured", "in", "training"]
    assert [row.split()[0] for row in rows] == ["tensor", "data"]
    share = (step.parts["tensor"] + step.parts["data"]) / step.seconds
    assert total.split() == ["all", f"{share:.1%}", "37.5%"]


@pytest.mark.slow
def test_the_program_measures_writes_and_compares(tmp_path: Path) -> None:
    """Two ranks measure, then train, and the folder of their run is compared."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    program, train = (str(ROOT / name) for name in ("tools/cluster_check", "pretrain_gpt.py"))
    done = run([*start, program, *FLAGS.split()])
    assert done.returncode == 0, done.stderr
    assert "1 pairs within a node" in done.stdout
    assert "data sheet              measured" in done.stdout
    assert set(yaml.safe_load((tmp_path / "cluster.yaml").read_text())) == {"cpu-measured"}
    trained = run(
        [*start, train, *FLAGS.replace("iters 1", "iters 4").split(), "--log-interval", "1", "--run-dir", "r"]
    )
    assert trained.returncode == 0, trained.stderr
    compared = run([sys.executable, program, "--run", "r", "--gpu", "cluster.yaml"])
    assert "predicted  measured in training" in compared.stdout, compared.stderr
