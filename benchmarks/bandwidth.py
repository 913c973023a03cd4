"""Bus bandwidth of the ranks' collectives by buffer size: over all ranks, within a node and between nodes.

    torchrun --nproc-per-node 8 benchmarks/bandwidth.py                  # on several nodes as a run is started there
    torchrun --nproc-per-node 2 benchmarks/bandwidth.py --sizes 1 4      # MB

The operations are those of ``megatron/distributed/comm.py``, with the backend that a run would take. The figure is
the bus bandwidth of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): bytes of the buffer over seconds, times what of it
the slowest link carries, so that it compares with the hardware's at any number of ranks. A wrong result of an operation
is reported, and the exit status is 1.

Between two ranks, what one sends and what it receives go through the same communicator of NCCL, one after the other:
there, send/receive shows half of what nccl-tests' sendrecv does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch, exit_process
from megatron.distributed import comm
from megatron.distributed.comm import Channel, Group
from megatron.distributed.launch import destroy_distributed, init_distributed, world_group
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.training.build_model import choose_device
from megatron.training.failure_report import host_name

MB = 2**20
SIZES = {"cuda": (1, 4, 16, 64, 256), "cpu": (1, 4)}
"""Default sizes of buffers in MB."""

SECONDS = 0.2
"""About how long an operation is repeated; at least ``TIMES`` and at most ``MOST`` times."""
TIMES, MOST = 3, 50

EVERYWHERE, WITHIN, BETWEEN = "all ranks", "within a node", "between nodes"


@dataclass(frozen=True)
class Figure:
    """One measured operation.

    Attributes:
        where: ``EVERYWHERE``, ``WITHIN`` or ``BETWEEN``.
        operation: name.
        ranks: of a group; all groups of a kind are at it at the same time.
        megabytes: of the buffer, as nccl-tests counts it: for a gather or a scatter the longer one.
        seconds: one operation on the slowest rank.
        bus: bus bandwidth, 10^9 bytes a second.
    """

    where: str
    operation: str
    ranks: int
    megabytes: float
    seconds: float
    bus: float


@dataclass(frozen=True)
class Ring:
    """State of a rank to send to the next rank of its group and receive from the previous one."""

    group: Group
    to: Channel
    source: Channel

    @classmethod
    def of(cls, group: Group) -> Ring:
        """Return the ring through a group's ranks, in their order."""
        ranks, here, handle = group.ranks, group.rank, group.handle
        after, before = ranks[(here + 1) % group.size], ranks[here - 1]
        return cls(group, Channel(ranks[here], after, handle), Channel(before, ranks[here], handle))

    def turn(self, x: Tensor) -> Tensor:
        """Return the ``x`` of the previous rank.

        Every other rank receives first: the communicator of a pair is made by its first message, and where all sent
        first, each would wait for the next one around the ring.
        """
        out = torch.empty_like(x)
        if self.group.rank % 2 == 0:
            sent, received = comm.start_send(x, self.to), comm.start_receive(out, self.source)
        else:
            received, sent = comm.start_receive(out, self.source), comm.start_send(x, self.to)
        received.wait()
        sent.wait()
        return out


def _own(group: Group) -> Callable[[Tensor], Tensor]:
    """Return this rank's part of a buffer: ``[n * rows]`` -> ``[rows]``."""
    return lambda x: x.view(group.size, -1)[group.rank]


OPERATIONS: dict[str, Callable[[Group, Ring], Callable[[Tensor], Tensor]]] = {
    "all-reduce": lambda group, ring: lambda x: comm.all_reduce(x, group),
    "all-gather": lambda group, ring: lambda x: comm.all_gather(_own(group)(x), group),
    "reduce-scatter": lambda group, ring: lambda x: comm.reduce_scatter(x, group),
    "all-to-all": lambda group, ring: lambda x: comm.start_all_to_all(x, group).wait(),
    "send/receive": lambda group, ring: ring.turn,
}


def share_of_bus(operation: str, ranks: int) -> float:
    """Return the share of a buffer that crosses the slowest link (nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "send/receive":
        return 1.0
    return (2 if operation == "all-reduce" else 1) * (ranks - 1) / ranks


def filled(x: Tensor, ranks: int, rank: int) -> Tensor:
    """Return a buffer like ``x`` that identifies its rank: its part for rank ``i`` holds ``rank + i / ranks``."""
    parts = rank + torch.arange(ranks, dtype=x.dtype, device=x.device) / ranks
    return parts.repeat_interleave(x.numel() // ranks)


def expected(operation: str, x: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the expected result on ``rank`` of an operation on buffers made by :func:`filled`."""
    each = torch.arange(ranks, dtype=x.dtype, device=x.device)
    total = ranks * (ranks - 1) / 2
    parts = {
        "all-reduce": each + total,
        "reduce-scatter": each[rank : rank + 1] + total,
        "all-to-all": each + rank / ranks,
        "all-gather": each + each / ranks,
        "send/receive": (rank - 1) % ranks + each / ranks,
    }
    return parts[operation].repeat_interleave(x.numel() // ranks)


def groups_of(launch: Launch, world: Group) -> dict[str, Group]:
    """Return the groups to measure: all ranks and, if nodes have equally many ranks, those within and across nodes."""
    hosts = comm.all_gather_objects(host_name(os.environ), world)
    counts = set(Counter(hosts).values())
    local = counts.pop() if len(counts) == 1 else 1
    neighbours = all(len(set(hosts[i : i + local])) == 1 for i in range(0, world.size, local))
    local = local if neighbours else 1
    axes = {"pp": 1, "dp": world.size // local, "cp": 1, "tp": local}
    mesh = Mesh(Layout(axes | {"edp": world.size, "ep": 1, "etp": 1}), launch.rank)
    found = {EVERYWHERE: mesh.world}
    if 1 < local < world.size:
        found |= {WITHIN: mesh.tp, BETWEEN: mesh.dp_cp}
    return found


def measure(where: str, group: Group, world: Group, operation: str, size: float, device: torch.device) -> Figure:
    """Repeat one operation on a buffer of ``size`` MB.

    Raises:
        ArithmeticError: when its result is wrong on this rank.
    """
    rows = max(1, int(size * MB) // 4 // group.size) * group.size
    x = filled(torch.empty(rows, device=device), group.size, group.rank)
    act = OPERATIONS[operation](group, Ring.of(group))
    right = expected(operation, x, group.size, group.rank)
    if not torch.allclose(act(x.clone()), right, rtol=1e-5, atol=0.0):
        raise ArithmeticError(f"{operation} of {size:g} MB over {where} gives a wrong result on rank {world.rank}")
    x.zero_()  # sums stay finite however often they are made
    once = timed(act, x, 1, world)
    times = max(TIMES, min(MOST, int(SECONDS / max(once, 1e-6))))
    seconds = timed(act, x, times, world) / times
    bus = x.nbytes / seconds * share_of_bus(operation, group.size) / 1e9
    return Figure(where, operation, group.size, size, seconds, bus)


def timed(act: Callable[[Tensor], Tensor], x: Tensor, times: int, world: Group) -> float:
    """Seconds that the slowest rank takes for it, once all have come."""
    meet(world, x.device)
    begun = time.perf_counter()
    for _ in range(times):
        act(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    spent = torch.tensor(time.perf_counter() - begun, dtype=torch.float64, device=x.device)
    return comm.all_reduce(spent, world, "max").item()


def meet(world: Group, device: torch.device) -> float:
    """Wait for all ranks; this machine's clock when they have come."""
    comm.all_reduce(torch.zeros((), device=device), world).item()
    return time.time()


def clocks_apart(world: Group, device: torch.device, times: int = 10) -> float:
    """Seconds between the earliest and the latest clock, as seen when a collective ends; the best of some tries."""
    gathered = comm.all_gather_objects([meet(world, device) for _ in range(times)], world)
    return min(max(together) - min(together) for together in zip(*gathered))


def page(figures: Sequence[Figure]) -> str:
    """Tables of the bus bandwidths, one for each group."""
    text = []
    for where in dict.fromkeys(figure.where for figure in figures):
        here = [figure for figure in figures if figure.where == where]
        sizes = sorted({figure.megabytes for figure in here})
        by = {(figure.operation, figure.megabytes): figure.bus for figure in here}
        text += ["", f"bus bandwidth, GB/s: {where}, groups of {here[0].ranks}"]
        text.append(" " * 16 + "".join(f"{f'{size:g} MB':>10}" for size in sizes))
        text += [f"{name:<16}" + "".join(f"{by[name, size]:>10.3g}" for size in sizes) for name in OPERATIONS]
    return "\n".join(text)


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="MB", help="buffers (1 to 256 on GPUs, 1 and 4 on CPUs)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the buffers are (auto)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    launch = Launch.read(os.environ)
    try:
        if launch.world_size == 1:
            fixes = ("torchrun --nproc-per-node 2 benchmarks/bandwidth.py",)
            raise UserError([Problem("E202", "bandwidth needs at least two ranks", fixes)])
        device = choose_device(args.device)
        init_distributed(None, timedelta(minutes=5), device)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    world = world_group(launch.rank, launch.world_size)
    result = figures_of(groups_of(launch, world), world, args.sizes or SIZES[device.type], device)
    if launch.rank == 0:
        print(page([Figure(**figure) for figure in result["figures"]]))
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    destroy_distributed()
    return 0


def figures_of(groups: dict[str, Group], world: Group, sizes: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Everything, as numbers; collective over ``world``.

    Raises:
        ArithmeticError: when an operation gives a wrong result.
    """
    apart = clocks_apart(world, device)
    figures = [
        measure(where, group, world, operation, size, device)
        for where, group in groups.items()
        for operation in OPERATIONS
        for size in sizes
    ]
    return {"device": device.type, "ranks": world.size, "clocks_apart": apart, "figures": [asdict(f) for f in figures]}


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
