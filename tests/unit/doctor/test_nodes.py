"""Nodes of a job beside each other: what differs, and which node, rank or link is slow."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.config.launch import exit_process
from tests.kit.processes import ForkedProgram, free_port
from tools import doctor
from tools.cluster_check import nodes
from tools.cluster_check.network import Pair
from tools.cluster_check.nodes import (
    RankRecord,
    Speed,
    differences,
    merged,
    outliers,
    slow_links,
    slow_pairs,
    slow_ranks,
)
from tools.lib import disk_health


def rates_of(count: int, noise: float, seed: int) -> dict[int, float]:
    draw = random.Random(seed)
    return {key: 100.0 * (1 + draw.uniform(-noise, noise)) for key in range(count)}


@pytest.mark.parametrize("count", [2, 3, 4, 8, 1000])
def test_one_slow_member_is_found_among_any_number(count: int) -> None:
    for seed in range(50):
        rates = rates_of(count, 0.02, seed)
        assert outliers(rates, 0.1) == {}
        rates[seed % count] *= 0.7
        assert [*outliers(rates, 0.1)] == [seed % count]
    assert outliers({0: 1.0}, 0.1) == outliers(dict[int, float](), 0.1) == {}


def test_several_slow_members_and_noise() -> None:
    rates = rates_of(64, 0.02, 1) | {3: 50.0, 9: 60.0}
    found = outliers(rates, 0.1)
    median = statistics.median(rates.values())
    assert found == {3: pytest.approx(1 - 50 / median), 9: pytest.approx(1 - 60 / median)}
    noisy = rates_of(64, 0.5, 2)
    assert outliers(noisy, 0.1) == {}, "where all differ, nobody is an outlier"


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_a_slow_end_is_told_from_a_slow_link(nodes: int) -> None:
    rates = {(a, b): 10.0 + 0.1 * a for a in range(nodes) for b in range(a + 1, nodes)}
    assert slow_links(rates, 0.4) == ({}, {})
    slow_end = {pair: rate * (0.1 if 1 in pair else 1.0) for pair, rate in rates.items()}
    ends, links = slow_links(slow_end, 0.4)
    assert ([*ends], links) == ([1], {})
    assert [*slow_links(rates | {(0, 2): 1.0}, 0.4)] == [{}, {(0, 2): pytest.approx(0.9, abs=0.02)}]


HOSTS = ["n1"] * 4 + ["n2"] * 4 + ["n3"] * 4 + ["n4"] * 4


def test_a_slow_node_is_named_once_and_a_slow_rank_by_its_place() -> None:
    speeds = [Speed(1e12, 1e11)] * 16
    slow_node = [s if host != "n3" else Speed(0.5e12, 1e11) for s, host in zip(speeds, HOSTS)]
    (node,) = slow_ranks(HOSTS, slow_node, 0.08)
    assert node.sentence == "node n3 (ranks 8, 9, 10, 11) computes 50% slower than the others"
    assert node.todo.startswith("--exclude=n3,")
    (rank,) = slow_ranks(HOSTS, [*speeds[:6], Speed(1e12, 2e10), *speeds[7:]], 0.08)
    assert rank.sentence == "rank 6, 2 on n2, copies memory 80% slower than the others there"


def test_slow_networks_and_links() -> None:
    def pairs(*slow: tuple[int, int], node: int = -1) -> list[Pair]:
        return [
            Pair(a, b, 1e-5, 1e9 if (a, b) in slow or (node in (a // 4, b // 4) and a // 4 != b // 4) else 1e10)
            for a in range(16)
            for b in range(a + 1, 16)
        ]

    assert [*slow_pairs(HOSTS, pairs())] == []
    (network,) = slow_pairs(HOSTS, pairs(node=1))
    assert (network.name, network.facts["node"]) == ("slow network", "n2")
    across = [(a, b) for a in range(4) for b in range(12, 16)]
    (link,) = slow_pairs(HOSTS, pairs(*across))
    assert link.sentence == "n1 and n4 exchange 90% less than other pairs: 1 GB/s"
    (end,) = slow_pairs(HOSTS, pairs((8, 9), (8, 10), (8, 11)))
    assert (end.facts["rank"], end.verdict) == (8, "bad")
    (pair,) = slow_pairs(HOSTS, pairs((13, 15)))
    assert (pair.facts["ranks"], pair.verdict) == ((13, 15), "note")
    inside = [(a, b) for a in range(8, 12) for b in range(a + 1, 12)]
    (node,) = slow_pairs(HOSTS, pairs(*inside))
    assert node.sentence.startswith("ranks of n3 exchange 90% less")


def record(host: str, **facts: Any) -> RankRecord:
    names = (
        "python",
        "torch",
        "cuda",
        "nccl",
        "driver",
        "kernel",
        "packages",
        "gpus",
        "infiniband",
        "kernels",
        "commit",
    )
    note = {"group": "machine", "name": "clock", "verdict": "note", "sentence": "off", "todo": "", "facts": {}}
    whole = dict.fromkeys((*names, "environment"), "same") | facts
    return RankRecord(host, 0, [note, note | {"name": "x", "sentence": host, "verdict": "ok"}], whole)


def test_versions_that_differ_are_bad_and_other_differences_noted() -> None:
    records = [record("n1"), record("n2", torch="2.0"), record("n3", packages="others")]
    torch, packages = differences(records)
    assert (torch.name, torch.verdict) == ("torch differs", "bad")
    assert torch.sentence == 'n1, n3: "same"; n2: "2.0"'
    assert torch.todo.endswith("--exclude=n2")
    assert (packages.name, packages.verdict) == ("packages differs", "note")
    (clock,) = merged(records)
    assert clock.sentence == "all nodes: off"


def rank_of_job(arguments: list[str]) -> int:
    """Run the doctor as one rank, with short measurements of the disk."""
    disk_health.SECONDS, nodes.ROUNDS, nodes.SECONDS = 0.01, 3, 0.1
    exit_process(doctor.main(arguments))


def test_the_node_that_is_slowed_down_is_named(tmp_path: Path) -> None:
    """Three nodes of one rank each; the second is stopped for most of the time while ranks compute."""
    port = str(free_port())
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    environ |= {"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                ForkedProgram(
                    rank_of_job,
                    ["--json", "--device", "cpu", "--run-dir", str(tmp_path)],
                    output=tmp_path / f"{rank}.log",
                    environment=environ
                    | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank}", "NCCL_DEBUG": ["WARN", "INFO"][rank == 2]},
                )
            )
            for rank in range(3)
        ]
        deadline = time.monotonic() + 120
        while ranks[1].poll() is None and time.monotonic() < deadline:
            with suppress(ProcessLookupError):
                os.kill(ranks[1].pid, signal.SIGSTOP)
                time.sleep(0.02)
                os.kill(ranks[1].pid, signal.SIGCONT)
            time.sleep(0.003)
        statuses = [rank.wait(60.0) for rank in ranks]
    assert statuses == [1, 1, 1]
    whole = json.loads(ranks[0].output)
    assert ranks[1].output == ""
    slow = [each for each in whole["findings"] if each["name"] == "slow node"]
    worst = max(slow, key=lambda each: each["facts"]["lacks"])
    assert worst["facts"]["node"] == "n1"
    assert worst["facts"]["lacks"] > 0.2  # others may be slow, too, on a busy machine
    (differing,) = (each for each in whole["findings"] if each["name"] == "environment differs")
    assert [*differing["facts"]["values"].values()] == [["n0", "n1"], ["n2"]]
    assert len(whole["pairs"]) == 3
