"""Time of collectives by the alpha-beta model: a message of n bytes takes ``latency + n / bandwidth`` seconds.

A ring over k ranks of a node and several nodes uses the network cards of these k ranks at once, so it runs at the
slower of the link within the node and k times the card.
"""

from __future__ import annotations

import math

from megatron.planner.hardware import Cluster, PlacedGroup

STEPS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "broadcast": 1}


def bus_bandwidth(cluster: Cluster, group: PlacedGroup) -> float:
    """Return the bytes per second at which a rank of the group sends in a ring."""
    inside = cluster.link.bandwidth * cluster.efficiency.link
    if group.per_node == group.size:
        return inside
    return min(inside, group.per_node * cluster.network.bandwidth * cluster.efficiency.network)


def seconds(cluster: Cluster, operation: str, size: float, group: PlacedGroup) -> float:
    """Return the time of a collective.

    Args:
        cluster: its links.
        operation: all-reduce, all-gather, reduce-scatter, all-to-all or send.
        size: bytes of the whole tensor (all-gather: of the result; reduce-scatter and all-to-all: of the input).
        group: the ranks.
    """
    ranks, within = group.size, group.per_node == group.size
    if operation == "send":
        link, share = (
            (cluster.link, cluster.efficiency.link) if within else (cluster.network, cluster.efficiency.network)
        )
        return link.latency + size / (link.bandwidth * share)
    if ranks == 1:
        return 0.0
    latency = (cluster.link if within else cluster.network).latency * math.ceil(math.log2(ranks))
    if operation == "all-to-all" and not within:
        outside = size * (ranks - group.per_node) / ranks / (cluster.network.bandwidth * cluster.efficiency.network)
        inside = size * (group.per_node - 1) / ranks / (cluster.link.bandwidth * cluster.efficiency.link)
        return latency + max(outside, inside)
    return STEPS[operation] * (latency + size * (ranks - 1) / ranks / bus_bandwidth(cluster, group))
