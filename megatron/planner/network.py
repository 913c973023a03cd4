"""Time of collectives and messages over the links of a cluster.

By the alpha-beta model (Hockney 1994; Thakur et al. 2005): a hop of n bytes takes ``latency + n / bandwidth`` seconds.
A ring over nodes with k ranks each uses their k network cards at once, so it runs at the slower of the link within a
node and k cards. With n ranks on m nodes and a tensor of B bytes, h(r) the hops of a message through r ranks of the
ring and b the bandwidth of a rank:

=======================  =========================================================================================
all-gather               h(n) + B (n - 1) / n / b, as a ring (Patarasuk and Yuan 2009); reduce-scatter alike. With
                         one rank on a node ceil(log2 n) hops, as recursive doubling
all-reduce               the faster of two such rings, and of two binary trees of nodes, up and down (Sanders et al.
                         2009): 2 (ceil(log2 m) hops between nodes + k - 1 within + B / b)
broadcast, reduce        h(n) + B / b, as a pipelined ring
all-to-all               a hop + the slower of B (n - k) / n / card and B (k - 1) / n / link, at once
send                     a hop + B / link or card
=======================  =========================================================================================

Each is started once, by a kernel on a GPU. What was measured of the same operation in such a group is taken instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from megatron.planner.hardware import Cluster, Curve, Link, PlacedGroup

START = 8.4e-6
"""Seconds until a collective begins on all ranks: NCCL's own estimate for rings (src/graph/tuning.cc, baseLat)."""


def seconds(cluster: Cluster, operation: str, size: float, group: PlacedGroup) -> float:
    """Return the time of a collective or message.

    Args:
        cluster: its links.
        operation: all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all or send.
        size: bytes of the whole tensor (all-gather: of the result; reduce-scatter and all-to-all: of the input).
        group: the ranks; of a send, sender and receiver.
    """
    ranks, within = group.size, group.per_node
    if ranks == 1 or size == 0:
        return 0.0
    if curve := cluster.measured.get((operation, group)):
        return interpolate(curve, size)
    link, card = reached(cluster)
    slow, nodes = (link, 1) if within == ranks else (card, math.ceil(ranks / within))
    if operation == "send":
        return START + slow.latency + size / slow.bandwidth
    if operation == "all-to-all":
        outside, inside = ((ranks - within) / card.bandwidth, (within - 1) / link.bandwidth)
        return START + slow.latency + size / ranks * max(outside, inside)
    bandwidth = bus_bandwidth(cluster, group)
    between = min(nodes if nodes > 1 else 0, ranks - 1)
    ring = between * card.latency + (ranks - 1 - between) * link.latency
    if operation in ("broadcast", "reduce"):
        return START + ring + size / bandwidth
    doubling = math.ceil(math.log2(ranks)) * slow.latency if within == 1 else ring
    half = min(ring, doubling) + size * (ranks - 1) / ranks / bandwidth
    if operation != "all-reduce":
        return START + half
    tree = math.ceil(math.log2(nodes)) * card.latency + (within - 1) * link.latency + size / bandwidth
    return START + 2 * min(half, tree)


def reached(cluster: Cluster) -> tuple[Link, Link]:
    """Return the link within a node and the card, with the bandwidths that are reached."""
    link, card, efficiency = cluster.link, cluster.network, cluster.efficiency
    inside = link._replace(bandwidth=link.bandwidth * efficiency.link)
    return inside, card._replace(bandwidth=card.bandwidth * efficiency.network)


def bus_bandwidth(cluster: Cluster, group: PlacedGroup) -> float:
    """Return the bytes per second at which a rank of the group sends in a ring."""
    link, card = reached(cluster)
    inside = link.bandwidth if group.per_node > 1 else math.inf
    return link.bandwidth if group.per_node == group.size else min(inside, group.per_node * card.bandwidth)


def interpolate(curve: Curve, size: float) -> float:
    """Return the seconds of a measured curve at ``size`` bytes: linear between points and beyond the last one.

    Less than the first point takes as long as it does.
    """
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    above = min(bisect_left(curve, (size, 0.0)), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[above - 1], curve[above]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
