"""Changes of a run that does not fit into memory: flags with the bytes that they save and the time that they cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from megatron.arguments.hardware import CPU, find_cluster
from megatron.arguments.validate import find_problems
from megatron.config.launch import Launch, ranks_per_node
from megatron.config.machine import memory_bytes
from megatron.config.run import RunConfig
from megatron.config.text import format_bytes
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.layouts import NO_OFFLOAD
from megatron.planner.memory import max_host_bytes
from megatron.planner.search import Neighbour, cheapest_fits

MOST_CHANGES = 3
"""Changes that are shown."""

LIKELY = "h100-80g"
"""Accelerator whose speed ranks changes where that of the machine is not known."""


class Change(NamedTuple):
    """A change with which a run would fit."""

    # To add to its command line.
    flags: str
    # Bytes that it saves on the fullest rank, and what it costs.
    effect: str

    def __str__(self) -> str:
        return f"{self.flags}  ({self.effect})"


def fitting_changes(
    config: RunConfig, world_size: int, capacity: float, beyond: int = 0, environ: Mapping[str, str] = os.environ
) -> list[Change]:
    """Return the cheapest single changes with which a run would fit, the least slow first.

    Args:
        config: validated and resolved, with the vocabulary size.
        world_size: ranks.
        capacity: bytes that the fullest rank may use.
        beyond: bytes that it takes beyond the forecast.
        environ: environment of this rank.
    """
    cluster = find_cluster(config, world_size, environ)
    known = cluster is not None and cluster.accelerator.name != CPU
    cluster = cluster or Cluster.of(accelerators()[LIKELY])
    on_cpu = cluster.accelerator.name == CPU
    kept = frozenset(NO_OFFLOAD) if on_cpu else frozenset[str]()  # the memory of a CPU is that of its host
    found = cheapest_fits(
        config, world_size, cluster, find_problems, kept, capacity=capacity, beyond=beyond, count=10 * MOST_CHANGES
    )
    ranks, host = ranks_per_node(environ) if Launch.read(environ).launcher else world_size, memory_bytes()
    fitting = (
        each
        for each in found
        if on_cpu or host is None or each.plan is None or max_host(each.plan.config, world_size) * ranks <= host
    )
    return [_change(each, known) for each, _ in zip(fitting, range(MOST_CHANGES))]


def max_host(config: RunConfig, world_size: int) -> int:
    """Return the bytes that the rank with the most offloads to the host."""
    return sum(max_host_bytes(config, world_size).values())


def _change(found: Neighbour, timed: bool) -> Change:
    effect = f"saves {format_bytes(found.saved)}"
    if timed and found.plan is not None:
        before = found.plan.time.seconds - found.slower
        effect += f", {found.slower:+.3g} s a step ({found.slower / before:+.1%})"
    return Change(" ".join(found.flags), effect)
