"""Accelerators and clusters as the planner sees them: peaks, memory, links, and the shares of these that a run reaches.

``hardware.yaml`` is the table of known accelerators, each with its sources; a file of the same form describes another
one. A cluster's links are those of its accelerators, or as ``tools/cluster_check`` has measured them. Does not import
torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_yaml, read_small

TABLE = Path(__file__).with_name("hardware.yaml")

LINK = "{GB/s: ..., latency_us: ...}"
EXPECTED = (
    "expected is one row NAME: {like: h100-80g, ...} with what differs, or NAME: {flops: {bf16: ...}, memory: ..., "
    f"bandwidth: ..., node_size: ..., link: {LINK}, network: {LINK}, host: {LINK}, watts: ..., source: ...}}"
)
"""The form of a file that describes an accelerator."""

FILE_SUFFIXES = (".yaml", ".yml")
"""Of files that describe an accelerator."""


class Link(NamedTuple):
    """A connection of an accelerator, as data sheets state it."""

    # Seconds of a hop, independent of the size of the message.
    latency: float
    # Bytes per second, in one direction.
    bandwidth: float


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


class PlacedGroup(NamedTuple):
    """Ranks that communicate with each other."""

    # Number of ranks, and of them those on one node.
    size: int
    per_node: int


Curve = tuple[tuple[float, float], ...]
"""Measured seconds of an operation by bytes, ascending."""

Measured = Mapping[tuple[str, PlacedGroup], Curve]
"""Curves by operation and group."""


@dataclass(frozen=True)
class Accelerator:
    """One device that a rank runs on."""

    name: str
    # Dense peak in FLOP/s by format of the operands: bf16 (and fp16), fp32, and where the hardware has them fp8, fp4.
    flops: Mapping[str, float]
    # Bytes of device memory that programs get, and bytes per second.
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
    # Regular expressions of the names that drivers give it.
    names: tuple[str, ...] = ()
    # Shares that runs reach.
    efficiency: Efficiency = Efficiency()
    # What ``tools/cluster_check`` has measured on nodes of ``node_size``.
    measured: Measured = field(default_factory=dict, hash=False)

    def peak(self, format: str) -> float:
        """Return the dense peak of a format in FLOP/s; that of bf16 for one that the hardware lacks."""
        return self.flops.get(format, self.flops["bf16"])


@dataclass(frozen=True)
class Cluster:
    """Accelerators of one kind, connected."""

    accelerator: Accelerator
    # Ranks of a node.
    node_size: int
    link: Link
    network: Link
    efficiency: Efficiency = field(default_factory=Efficiency)
    # What was measured, by operation and group.
    measured: Measured = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        node_size: int | None = None,
        network: float | None = None,
        world_size: int | None = None,
    ) -> Cluster:
        """Return a cluster of such accelerators.

        Args:
            accelerator: of every rank.
            node_size: ranks of a node. Default: as is usual for it.
            network: bytes per second of an accelerator to other nodes. Default: as is usual for it.
            world_size: ranks of the cluster, if these may be fewer than those of a node.

        What was measured counts for nodes as they were measured, and between nodes unless ``network`` is given.
        """
        to_others = accelerator.network if network is None else accelerator.network._replace(bandwidth=network)
        size = int(min(node_size or accelerator.node_size, world_size or math.inf))
        measured = {
            (operation, group): curve
            for (operation, group), curve in accelerator.measured.items()
            if size == accelerator.node_size and (network is None or group.size == group.per_node)
        }
        return cls(accelerator, size, accelerator.link, to_others, accelerator.efficiency, measured)

    def group(self, size: int, stride: int) -> PlacedGroup:
        """Return a group of every ``stride``-th rank; ranks are numbered node by node.

        All such groups count as the one with the fewest ranks on a node: it waits for its cards.
        """
        if self.node_size % (size * stride) == 0:
            return PlacedGroup(size, size)
        return PlacedGroup(size, math.gcd(size, max(1, self.node_size // stride)))


@cache
def accelerators() -> dict[str, Accelerator]:
    """Return the table of known accelerators by name."""
    return {name: read_accelerator(name, row) for name, row in _rows().items()}


@cache
def _rows() -> dict[str, dict[str, Any]]:
    """Return the rows of the table, complete."""
    rows: dict[str, dict[str, Any]] = {}
    for name, row in parse_yaml(read_small(TABLE)).items():
        rows[name] = _complete(row, rows)
    return rows


def _complete(row: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a row with the values of the one that it is like, and its own."""
    like = rows[row["like"]] if "like" in row else {}
    return {**like, **{key: value for key, value in row.items() if key != "like"}}


def find_accelerator(text: str, flag: str = "--gpu") -> Accelerator:
    """Return the accelerator that the value of a flag names: one of the table, or that of a file with such a row.

    Raises:
        UserError: if there is none.
    """
    known = accelerators()
    if text in known:
        return known[text]
    if not text.endswith(FILE_SUFFIXES):
        typed = text.lower()
        meant = [name for name in known if typed and name.startswith(typed)]
        meant = meant or get_close_matches(typed, known, n=1, cutoff=0.0)
        fixes = (*(f"{flag} {name}" for name in meant), f"{flag} FILE.yaml")
        raise UserError([Problem("E961", f"{flag} {text}: the planner's table has no such accelerator", fixes)])
    try:
        return _read_row(parse_yaml(read_small(Path(text))))
    except OSError as error:
        sentence = f"{flag} {text}: {error.strerror}"
    except KeyError as error:
        sentence = f"{flag} {text} has no {error.args[0]}; {EXPECTED}"
    except (AttributeError, TypeError):
        sentence = f"{flag} {text}: a value has another form than in {TABLE.name}; {EXPECTED}"
    except ValueError as error:
        mark = getattr(error.__context__, "problem_mark", None)  # of the YAML parser, whose own words are long
        reason = f"it is no YAML at line {mark.line + 1}" if mark else " ".join(str(error).split())
        sentence = f"{flag} {text}: {reason}; {EXPECTED}"
    raise UserError([Problem("E961", sentence, (f"{flag} h100-80g",))])


def _read_row(rows: Any) -> Accelerator:
    """Return the accelerator of the one row of a file; the errors are those of :func:`read_accelerator`."""
    if not isinstance(rows, Mapping) or len(rows) != 1:
        raise ValueError(f"it has {len(rows)} rows" if isinstance(rows, Mapping) else "it has no row")
    ((name, row),) = rows.items()
    if not isinstance(row, Mapping):
        raise ValueError(f"{name} has no values with names")
    if row.get("like") not in (None, *_rows()):
        raise ValueError(f"{TABLE.name} has no {row['like']}")
    return read_accelerator(str(name), _complete(row, _rows()))


def driver_accelerator(device_name: str) -> Accelerator | None:
    """Return the accelerator that a driver calls ``device_name``; None if it is unknown or a slice of one.

    A name with a slash is ambiguous: AMD's driver reports ``MI250X / MI250`` for both products.
    """
    if re.search(r"\bMIG\b|/", device_name):
        return None
    rows = accelerators().values()
    return next((row for row in rows if any(re.search(rf"\b(?:{n})\b", device_name) for n in row.names)), None)


def read_accelerator(name: str, row: Mapping[str, Any]) -> Accelerator:
    """Return the accelerator of a row, in the units that the table states.

    Raises:
        KeyError: when a value is missing.
        ValueError: when one is no number above 0, or there is one that no accelerator has.
        AttributeError, TypeError: when one has another form.
    """
    row = dict(row)
    flops = {format: _positive(f"flops of {format}", tera) * 1e12 for format, tera in row.pop("flops").items()}
    if "bf16" not in flops:  # which counts for formats that the hardware lacks, too
        raise KeyError("flops of bf16")
    efficiency = {share: _positive(share, value) for share, value in row.pop("efficiency", {}).items()}
    unknown = row.keys() - {each.name for each in fields(Accelerator)} | efficiency.keys() - {
        each.name for each in fields(Efficiency)
    }
    if unknown:
        raise ValueError(f"there is no {', '.join(sorted(map(str, unknown)))}")
    return Accelerator(
        name=name,
        flops=flops,
        memory=_positive("memory", row.pop("memory")) * 2**30,
        bandwidth=_positive("bandwidth", row.pop("bandwidth")) * 1e9,
        link=_link(row.pop("link")),
        network=_link(row.pop("network")),
        host=_link(row.pop("host")),
        node_size=_whole("node_size", row.pop("node_size")),
        watts=_positive("watts", row.pop("watts")),
        source=row.pop("source"),
        names=tuple(row.pop("names", ())),
        efficiency=replace(Efficiency(), **efficiency),
        measured=dict(map(_curve, row.pop("measured", ()))),
    )


def _positive(name: str, value: Any) -> float:
    """Return a number above 0; raise ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, which is no number above 0")
    return value


def _whole(name: str, value: Any) -> int:
    """Return a whole number above 0; raise ValueError for any other value."""
    if (number := _positive(name, value)) % 1:
        raise ValueError(f"{name} is {value!r}, which is no whole number")
    return int(number)


def _link(row: Mapping[str, Any]) -> Link:
    return Link(_positive("latency_us", row["latency_us"]) * 1e-6, _positive("GB/s", row["GB/s"]) * 1e9)


def _curve(row: Mapping[str, Any]) -> tuple[tuple[str, PlacedGroup], Curve]:
    """Return a measured curve; what a larger message has taken bounds the times of smaller ones, which may be noise."""
    sizes, times = ([_positive(name, value) for value in row[name]] for name in ("bytes", "us"))
    points = sorted(dict(zip(sizes, times, strict=True)).items(), reverse=True)
    if not points:
        raise ValueError(f"{row['operation']} was measured with no number of bytes")
    least = accumulate((us for _, us in points), min)
    curve = tuple((float(size), us * 1e-6) for (size, _), us in zip(points, least))[::-1]
    return (row["operation"], PlacedGroup(_whole("ranks", row["ranks"]), _whole("per_node", row["per_node"]))), curve
