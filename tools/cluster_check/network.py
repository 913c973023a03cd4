"""Measure the network of a cluster: pairs of ranks, collectives, and the groups of a layout, all with correct results.

All groups of a kind are at a collective at the same time, as in training. What is found becomes a row of the table of
accelerators (``megatron/planner/hardware.yaml``), which the planner reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from benchmarks import bandwidth
from megatron.config.run import RunConfig
from megatron.distributed import comm
from megatron.distributed.comm import Channel, Group
from megatron.planner.communication import RankGroup, micro_batch_collectives, step_collectives
from megatron.planner.hardware import Accelerator, PlacedGroup
from megatron.planner.network import START

SIZES = {"cuda": (2**-10, 2**-4, 1.0, 16.0, 256.0), "cpu": (2**-10, 2**-4, 1.0, 4.0)}
"""Sizes of buffers in MiB."""

PAIR_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}
"""Bytes of a long message between two ranks; a short one has 8."""

TIMEOUT = timedelta(minutes=5)
"""Of every collective of the check."""

PAIR_TIMES = 10
"""Messages of a pair in each direction."""

MOST_ROUNDS = 32
"""Rounds of pairs: every rank meets every other one in a cluster of so many ranks, else some of them."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class Pair(NamedTuple):
    """Measurements between two ranks, one way."""

    first: int
    second: int
    # Seconds of a short message, and bytes per second of long ones.
    latency: float
    bandwidth: float


class CollectiveFigure(NamedTuple):
    """A collective in a group."""

    operation: str
    group: PlacedGroup
    # Of the whole tensor.
    bytes: float
    seconds: float


@dataclass(frozen=True)
class NetworkFigures:
    """All that was measured, on one rank."""

    node_size: int
    pairs: tuple[Pair, ...]
    collectives: tuple[CollectiveFigure, ...]


def planned_groups(config: RunConfig, world_size: int) -> dict[RankGroup, set[str]]:
    """Return the groups of a layout, with their collectives."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    found = [each for stage in micro_batch_collectives(config, world_size) for each in stage]
    found += [each for stage in stages for each in step_collectives(config, world_size, stage)]
    groups: dict[RankGroup, set[str]] = {}
    for each in found:
        if each.operation in COLLECTIVES:
            groups.setdefault(each.ranks, set()).add(each.operation)
    return groups


def usual_groups(world_size: int, node_size: int) -> dict[RankGroup, set[str]]:
    """Return the ranks of a node, one rank of every node, and all ranks, with all collectives."""
    groups = (RankGroup(node_size, 1), RankGroup(world_size // node_size, node_size), RankGroup(world_size, 1))
    return {group: set(COLLECTIVES) for group in groups if group.size > 1}


def measure_network(world: Group, node_size: int, config: RunConfig | None, device: torch.device) -> NetworkFigures:
    """Measure pairs, and collectives in the usual groups and in those of a layout. Collective over all ranks.

    Args:
        world: all ranks, numbered node by node.
        node_size: ranks of a node.
        config: of the run whose groups are measured, too.
        device: of the buffers.

    Raises:
        ArithmeticError: when a collective gives a wrong result.
    """
    groups = usual_groups(world.size, node_size)
    for ranks, operations in (planned_groups(config, world.size) if config is not None else {}).items():
        groups.setdefault(ranks, set()).update(operations)
    pairs = tuple(measure_pairs(world, node_size, device))
    found = []
    for ranks, operations in groups.items():
        group = _create(world, ranks)
        placed = PlacedGroup(ranks.size, _per_node(world.size, node_size, ranks))
        for operation in sorted(operations):
            for size in SIZES[device.type]:
                figure = bandwidth.measure(str(ranks), group, world, operation, size, device)
                elements = max(1, int(size * 2**20) // 4 // ranks.size) * ranks.size
                found.append(CollectiveFigure(operation, placed, 4.0 * elements, figure.seconds))
    return NetworkFigures(node_size, pairs, tuple(found))


def _create(world: Group, ranks: RankGroup) -> Group:
    """Create all groups of a kind; return that of this rank."""
    mine = Group(world.ranks[world.rank : world.rank + 1])
    block = ranks.size * ranks.stride
    for first in (b + i for b in range(0, world.size, block) for i in range(ranks.stride)):
        members = tuple(range(first, first + block, ranks.stride))
        handle = comm.new_group(members, TIMEOUT, "cluster check")
        if world.rank in members:
            mine = Group(members, members.index(world.rank), handle)
    comm.open_communicator(mine.handle)
    return mine


def _per_node(world_size: int, node_size: int, ranks: RankGroup) -> int:
    """Return the fewest ranks on a node of the first group, as :meth:`Cluster.group` counts them."""
    members = range(0, ranks.size * ranks.stride, ranks.stride)
    return min(sum(rank // node_size == node for rank in members) for node in {rank // node_size for rank in members})


def measure_pairs(world: Group, node_size: int, device: torch.device) -> Iterator[Pair]:
    """Yield what pairs measure, each round's pairs at the same time; equal on all ranks."""
    for partners in pair_rounds(world.size, node_size):
        partner, mine = partners[world.rank], None
        if partner is not None:
            times = [_exchange(world, partner, elements, device) for elements in (2, PAIR_BYTES[device.type] // 4)]
            mine = [times[0], PAIR_BYTES[device.type] / times[1]]
        for rank, figures in enumerate(comm.all_gather_objects(mine, world)):
            other = partners[rank]
            if figures is not None and other is not None and rank < other:
                yield Pair(rank, other, *figures)


def _exchange(world: Group, partner: int, elements: int, device: torch.device) -> float:
    """Return the seconds of a message of fp32 elements, as the mean of both directions, one after the other."""
    to, back = Channel(world.rank, partner, world.handle), Channel(partner, world.rank, world.handle)
    x, leads, begun = torch.ones(elements, device=device), world.rank < partner, 0.0
    for number in range(1 + PAIR_TIMES):  # the first opens the connection
        if number == 1:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
        for sends in (leads, not leads):
            (comm.start_send(x, to) if sends else comm.start_receive(x, back)).wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / PAIR_TIMES / 2


def pair_rounds(world_size: int, node_size: int) -> list[list[int | None]]:
    """Return rounds of pairs: the partner of each rank, in a tournament (circle method) in which each meets each.

    In a cluster of more than :data:`MOST_ROUNDS` ranks, the ranks of every node meet each other, and then those of the
    same place on different nodes, in so many rounds.
    """
    if world_size <= MOST_ROUNDS:
        return _tournament([range(world_size)], world_size)
    nodes = [range(first, first + node_size) for first in range(0, world_size, node_size)]
    across = [range(place, world_size, node_size) for place in range(node_size)]
    return [*_tournament(nodes, world_size), *_tournament(across, world_size)[:MOST_ROUNDS]]


def _tournament(groups: Sequence[range], world_size: int) -> list[list[int | None]]:
    """Return the rounds of tournaments of groups of equal size, played at the same time."""
    count = len(groups[0]) + len(groups[0]) % 2
    rounds = []
    for turn in range(count - 1):
        circle = [0, *(1 + (place + turn) % (count - 1) for place in range(count - 1))]
        partners: list[int | None] = [None] * world_size
        for one, other in zip(circle[: count // 2], circle[: count // 2 - 1 : -1]):
            for group in groups:
                if max(one, other) < len(group):
                    partners[group[one]], partners[group[other]] = group[other], group[one]
        rounds.append(partners)
    return rounds


def accelerator_row(figures: NetworkFigures, accelerator: Accelerator, source: str) -> dict[str, Any]:
    """Return the row of the table of accelerators: that of ``accelerator`` with the links as they were measured.

    The bandwidths are such that, with the shares that are assumed of data sheets, rings reach what they have reached.
    """
    curves: dict[tuple[str, PlacedGroup], dict[float, float]] = {}
    for each in figures.collectives:  # groups of different ranks may be placed alike; the slower one counts
        curve = curves.setdefault((each.operation, each.group), {})
        curve[each.bytes] = max(each.seconds, curve.get(each.bytes, 0.0))
    row: dict[str, Any] = {"like": accelerator.name, "node_size": figures.node_size, "source": source}
    shares = {"link": accelerator.efficiency.link, "network": accelerator.efficiency.network}
    for name, share in shares.items():
        within = name == "link"
        found = [
            (group.size, curve)
            for (operation, group), curve in curves.items()
            if operation == "all-gather" and (group.per_node == group.size if within else group.per_node == 1)
        ]
        if found:
            latency, rate = _fit(*max(found, key=lambda each: each[0]), within)
            row[name] = {"GB/s": float(f"{rate / share / 1e9:.4g}"), "latency_us": float(f"{latency * 1e6:.3g}")}
    row["measured"] = [
        {
            "operation": operation,
            "ranks": group.size,
            "per_node": group.per_node,
            "bytes": [int(size) for size in curve],
            "us": [float(f"{seconds * 1e6:.4g}") for seconds in curve.values()],
        }
        for (operation, group), curve in sorted(curves.items())
    ]
    return row


def _fit(ranks: int, curve: Mapping[float, float], within: bool) -> tuple[float, float]:
    """Return latency of a hop and bytes per second of a ring, from its shortest and its longest all-gather."""
    (_, shortest), (size, longest) = min(curve.items()), max(curve.items())
    hops = ranks - 1 if within else (ranks - 1).bit_length()
    latency = max(0.0, shortest - START) / hops
    return latency, size * (ranks - 1) / ranks / max(longest - shortest, longest / 100)


def pair_lines(figures: NetworkFigures) -> Iterator[str]:
    """Yield lines on the pairs within nodes and between them: medians and the slowest pair."""
    kinds: Mapping[str, list[Pair]] = {"within a node": [], "between nodes": []}
    for pair in figures.pairs:
        same = pair.first // figures.node_size == pair.second // figures.node_size
        kinds["within a node" if same else "between nodes"].append(pair)
    for name, pairs in kinds.items():
        if pairs:
            latency = statistics.median(pair.latency for pair in pairs)
            rate = statistics.median(pair.bandwidth for pair in pairs)
            slow = min(pairs, key=lambda pair: pair.bandwidth)
            yield (
                f"{len(pairs)} pairs {name}: {latency * 1e6:.1f} us, {rate / 1e9:.3g} GB/s one way; slowest: ranks "
                f"{slow.first} and {slow.second} with {slow.bandwidth / 1e9:.3g} GB/s"
            )
