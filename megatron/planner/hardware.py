"""Accelerators and clusters as the planner sees them: peaks, memory, links, and the shares of these that a run reaches.

``hardware.yaml`` is the table of known accelerators, each with its sources; a file of the same form describes another
one. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron.config.files import parse_yaml, read_small

TABLE = Path(__file__).with_name("hardware.yaml")


class Link(NamedTuple):
    """A connection of an accelerator, as data sheets state it."""

    # Seconds of a message, independent of its size.
    latency: float
    # Bytes per second, in one direction.
    bandwidth: float


@dataclass(frozen=True)
class Accelerator:
    """One device that a rank runs on."""

    name: str
    # Dense peak in FLOP/s by format of the operands: bf16 (and fp16), fp32, and where the hardware has them fp8, fp4.
    flops: Mapping[str, float]
    # Bytes of device memory, and bytes per second.
    memory: float
    bandwidth: float
    # Accelerators that ``link`` connects: those of a node, or of a rack.
    node_size: int
    link: Link
    # To other nodes, per accelerator.
    network: Link
    # To the memory of the host, per accelerator.
    host: Link
    # Of the accelerator alone, at its limit.
    watts: float
    source: str

    def peak(self, format: str) -> float:
        """Return the dense peak of a format in FLOP/s; that of bf16 for one that the hardware lacks."""
        return self.flops.get(format, self.flops["bf16"])


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet that a run reaches, 0 to 1: defaults, or fitted to measurements."""

    # Of the peak: large matrix products, and core attention.
    matmul: float = 0.75
    attention: float = 0.5
    # Of the bandwidth: of device memory, of the link within a node, of the network.
    memory: float = 0.83
    link: float = 0.75
    network: float = 0.8
    # Seconds between two kernels.
    launch: float = 2.5e-6


class Group(NamedTuple):
    """Ranks that communicate with each other."""

    # Number of ranks, and of them those on one node.
    size: int
    per_node: int


@dataclass(frozen=True)
class Cluster:
    """Accelerators of one kind, connected."""

    accelerator: Accelerator
    # Ranks of a node.
    node_size: int
    link: Link
    network: Link
    efficiency: Efficiency = field(default_factory=Efficiency)

    @classmethod
    def of(cls, accelerator: Accelerator, node_size: int | None = None, network: float | None = None) -> Cluster:
        """Return a cluster of such accelerators.

        Args:
            accelerator: of every rank.
            node_size: ranks of a node. Default: as is usual for it.
            network: bytes per second of an accelerator to other nodes. Default: as is usual for it.
        """
        to_others = accelerator.network if network is None else accelerator.network._replace(bandwidth=network)
        return cls(accelerator, node_size or accelerator.node_size, accelerator.link, to_others)

    def group(self, size: int, stride: int) -> Group:
        """Return a group of every ``stride``-th rank; ranks are numbered node by node."""
        per_node = max(1, math.gcd(size, max(1, self.node_size // stride)))
        return Group(size, size if size * stride <= self.node_size else per_node)


@cache
def accelerators() -> dict[str, Accelerator]:
    """Return the table of known accelerators by name."""
    return {name: read_accelerator(name, row) for name, row in parse_yaml(read_small(TABLE)).items()}


def read_accelerator(name: str, row: Mapping[str, object]) -> Accelerator:
    """Return the accelerator of a row of the table: ``bandwidth`` and ``memory`` in GB, ``flops`` in TFLOP/s."""
    links = {key: Link(row[key]["latency_us"] * 1e-6, row[key]["GB/s"] * 1e9) for key in ("link", "network", "host")}  # type: ignore[index]
    return Accelerator(
        name=name,
        flops={format: tera * 1e12 for format, tera in row["flops"].items()},  # type: ignore[attr-defined]
        memory=row["memory"] * 1e9,  # type: ignore[operator]
        bandwidth=row["bandwidth"] * 1e9,  # type: ignore[operator]
        node_size=row["node_size"],  # type: ignore[arg-type]
        watts=row["watts"],  # type: ignore[arg-type]
        source=row["source"],  # type: ignore[arg-type]
        **links,
    )
