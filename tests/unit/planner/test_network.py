"""Times of collectives against messages that are simulated one by one, and against formulas of papers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.planner.hardware import Cluster, Link, PlacedGroup, accelerators
from megatron.planner.network import START, interpolate, seconds

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send")


def cluster(link: Link, card: Link, node: int) -> Cluster:
    """Return a cluster whose links reach these bandwidths."""
    bare = Cluster.of(accelerators()["h100-80g"], node)
    return replace(bare, link=link, network=card, efficiency=replace(bare.efficiency, link=1.0, network=1.0))


def ring(link: Link, card: Link, nodes: int, per_node: int, size: float) -> float:
    """Return the time of an all-gather whose chunks are simulated hop by hop.

    There are as many rings as ranks on a node, each with a card of every node, and each has a part of every chunk.
    """
    ranks = nodes * per_node
    share = size / ranks / per_node if nodes > 1 else size / ranks
    slowest = 0.0
    for start in range(ranks):  # of the chunk that is followed; all edges carry a chunk at every time
        at = 0.0
        for hop in range(ranks - 1):
            crosses = nodes > 1 and (start + hop + 1) % per_node == 0
            at += (card if crosses else link).latency
        slowest = max(slowest, at)
    # A rank sends n - 1 chunks through one edge; those of all rings share the link within a node.
    edge = max(share / card.bandwidth, share * per_node / link.bandwidth if per_node > 1 else 0.0)
    return slowest + (ranks - 1) * (edge if nodes > 1 else share / link.bandwidth)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 8), (2, 8), (4, 2), (16, 4)])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_a_ring_takes_as_long_as_its_messages(nodes: int, per_node: int, size: float) -> None:
    link, card = Link(2e-6, 400e9), Link(4e-6, 50e9)
    group = PlacedGroup(nodes * per_node, per_node)
    model = seconds(cluster(link, card, per_node), "all-gather", size, group) - START
    assert model == pytest.approx(ring(link, card, nodes, per_node, size), rel=1e-9)


def doubling(ranks: int, latency: float, bandwidth: float, size: float) -> float:
    """Return the time of an all-gather by recursive doubling: in each round a rank sends all that it has."""
    held, total = 1, 0.0
    while held < ranks:
        total += latency + size * min(held, ranks - held) / ranks / bandwidth
        held *= 2
    return total


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_one_rank_on_a_node_gathers_by_recursive_doubling(ranks: int) -> None:
    link, card = Link(2e-6, 400e9), Link(4e-6, 50e9)
    for size in (1e3, 1e7):
        model = seconds(cluster(link, card, 1), "all-gather", size, PlacedGroup(ranks, 1)) - START
        assert model == pytest.approx(doubling(ranks, card.latency, card.bandwidth, size), rel=1e-9)


def test_all_to_all_sends_each_rank_its_rows() -> None:
    """Messages of 16 ranks on 2 nodes, each through the port of its sender, one after the other."""
    link, card, size, ranks = Link(2e-6, 400e9), Link(4e-6, 50e9), 1e8, 16
    for sender in range(ranks):
        ports = {"link": 0.0, "card": 0.0}
        for target in range(ranks):
            port = "link" if target // 8 == sender // 8 else "card"
            ports[port] += size / ranks / (link if port == "link" else card).bandwidth * (target != sender)
        model = seconds(cluster(link, card, 8), "all-to-all", size, PlacedGroup(16, 8)) - START - card.latency
        assert model == pytest.approx(max(ports.values()), rel=1e-9)


def test_large_sums_reach_the_lower_bound_and_small_ones_grow_with_the_logarithm() -> None:
    """Patarasuk and Yuan: 2 (n - 1) / n of the bytes; Sanders et al.: 2 log2 of the nodes."""
    link, card = Link(2e-6, 400e9), Link(4e-6, 50e9)
    big, here = 1e11, cluster(link, card, 8)
    inside = seconds(here, "all-reduce", big, PlacedGroup(8, 8))
    assert inside == pytest.approx(2 * 7 / 8 * big / link.bandwidth, rel=1e-3)
    across = seconds(here, "all-reduce", big, PlacedGroup(512, 8))
    assert across == pytest.approx(2 * 511 / 512 * big / (8 * card.bandwidth), rel=5e-3)
    small = [seconds(here, "all-reduce", 8, PlacedGroup(8 * nodes, 8)) for nodes in (2, 4, 8, 16, 32)]
    steps = [b - a for a, b in zip(small, small[1:])]
    assert steps == pytest.approx([2 * card.latency] * 4, rel=1e-6)


numbers = st.floats(1e-7, 1e-4), st.floats(1e9, 1e12)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(OPERATIONS),
    st.integers(0, 6),
    st.integers(0, 3),
    st.floats(1.0, 1e10),
    *numbers,
    *numbers,
    st.floats(1.0, 10.0),
)
def test_times_fall_with_faster_links_and_grow_with_bytes(
    operation: str, nodes: int, within: int, size: float, a: float, b: float, c: float, d: float, more: float
) -> None:
    group, link, card = PlacedGroup(2 ** (nodes + within), 2**within), Link(a, b), Link(c, d)
    slow = seconds(cluster(link, card, 8), operation, size, group)
    faster = (
        cluster(Link(a / more, b), card, 8),
        cluster(Link(a, b * more), card, 8),
        cluster(link, Link(c / more, d), 8),
        cluster(link, Link(c, d * more), 8),
    )
    assert 0 <= slow < math.inf
    assert all(seconds(each, operation, size, group) <= slow * (1 + 1e-12) for each in faster)
    assert seconds(cluster(link, card, 8), operation, size * more, group) >= slow * (1 - 1e-12)


def test_what_was_measured_counts() -> None:
    group, curve = PlacedGroup(8, 8), ((1024.0, 20e-6), (2**20, 30e-6), (2**30, 3e-3))
    here = replace(Cluster.of(accelerators()["h100-80g"]), measured={("all-gather", group): curve})
    assert [seconds(here, "all-gather", size, group) for size, _ in curve] == pytest.approx([s for _, s in curve])
    assert interpolate(curve, 1) == 20e-6
    assert interpolate(curve, 2**31) == pytest.approx(3e-3 + (3e-3 - 30e-6) * 2**30 / (2**30 - 2**20))
    assert seconds(here, "all-gather", 2**20, PlacedGroup(16, 8)) != 30e-6
