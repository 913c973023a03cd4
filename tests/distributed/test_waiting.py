"""Waits between real ranks, as reported by the groups of the mesh, the comparison of ranks and a metrics window."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.timing import Timers
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.loggers.base import Metrics
from megatron.training.metrics import MetricsWindow, RankStats, StepMetrics, gather_rank_stats
from tests.kit.pool import Pool

CPU = torch.device("cpu")
NAP = 0.1
SOON = 0.05
"""The most seconds that a rank without anything to wait for takes on a busy machine."""


def is_nap(seconds: float) -> bool:
    return NAP * 0.9 <= seconds < NAP + SOON


def mesh_of(rank: int, world_size: int, tp: int = 1) -> Mesh:
    return Mesh(Layout.from_config(ParallelConfig(tensor_model_parallel_size=tp), world_size), rank)


def meet(mesh: Mesh) -> None:
    """Be at the same place at the same time, unmetered."""
    with mesh.meter.paused():
        comm.all_reduce(torch.zeros(1), mesh.world)


BLOCKING = {
    "all_reduce": partial(comm.all_reduce, torch.zeros(8)),
    "all_gather": partial(comm.all_gather, torch.zeros(8)),
    "reduce_scatter": partial(comm.reduce_scatter, torch.zeros(8)),
}


def late_to(rank: int, world_size: int, op: str, axes: tuple[str, ...], tp: int) -> list[dict[str, float]]:
    """Rank 0 comes late to a collective; how long each axis kept this rank waiting in a few tries."""
    mesh, tries = mesh_of(rank, world_size, tp), []
    for _ in range(3):
        meet(mesh)
        if rank == 0:
            time.sleep(NAP)
        BLOCKING[op](mesh.group(*axes))
        tries.append(mesh.meter.pop())
    return tries


@pytest.mark.parametrize(
    ("op", "axes", "tp", "name"),
    [
        ("all_reduce", ("tp",), 2, "tp"),
        ("all_gather", ("tp",), 2, "tp"),
        ("reduce_scatter", ("dp", "cp"), 1, "dp"),
        ("all_reduce", ("pp", "dp", "cp", "tp"), 1, "world"),
    ],
)
def test_the_others_wait_for_a_late_rank(pool: Pool, op: str, axes: tuple[str, ...], tp: int, name: str) -> None:
    late, other = pool.run(2, late_to, op, axes, tp)
    assert min(each[name] for each in late) < SOON
    assert any(is_nap(each[name]) for each in other), other  # on a busy machine the other rank may be late, too
    assert {axis for each in other for axis, seconds in each.items() if seconds > 0} == {name}


def overlapped(rank: int, world_size: int) -> list[list[float]]:
    """Waits for two all-reduces that rank 0 comes late to, in a few tries: rank 1 has other work during the second."""
    mesh, waits = mesh_of(rank, world_size), []
    for busy in (0.0, 2 * NAP):
        tries = []
        for _ in range(3):
            meet(mesh)
            if rank == 0:
                time.sleep(NAP)
            pending = comm.start_all_reduce(torch.zeros(8), mesh.dp_cp)
            if rank == 1:
                time.sleep(busy)
            pending.wait()
            tries.append(mesh.meter.pop()["dp"])
        waits.append(tries)
    return waits


def test_overlapped_communication_counts_as_hidden(pool: Pool) -> None:
    exposed, hidden = pool.run(2, overlapped)[1]
    assert any(map(is_nap, exposed)), exposed
    assert min(hidden) < SOON


def axes_of(rank: int, world_size: int, tp: int) -> tuple[tuple[str, ...], list[str]]:
    mesh = mesh_of(rank, world_size, tp)
    return mesh.meter.names, [group.axes for group in (mesh.tp, mesh.dp_cp, mesh.group("pp", "tp"), mesh.world)]


def test_groups_are_named_by_the_axes_that_have_ranks(pool: Pool) -> None:
    """Also where they are the same ranks: what is summed over replicas is not what all ranks agree on."""
    assert pool.run(2, axes_of, 1) == 2 * [(("dp", "world"), ["", "dp", "", "world"])]
    assert pool.run(2, axes_of, 2) == 2 * [(("tp", "world"), ["tp", "", "tp", "world"])]
    assert pool.run(4, axes_of, 2)[3] == (("tp", "dp", "world"), ["tp", "dp", "tp", "world"])


def measured(rank: int) -> RankStats:
    return {"iteration-time": 1.0 + rank, "communication-tp": 0.1 * rank, "mem-max-allocated-bytes": 2**40 + rank}


def gathered(rank: int, world_size: int) -> list[RankStats]:
    return gather_rank_stats(measured(rank), mesh_of(rank, world_size).world, CPU)


def test_every_rank_receives_the_stats_of_all_ranks(pool: Pool) -> None:
    assert pool.run(3, gathered) == 3 * [[measured(rank) for rank in range(3)]]


def a_late_start(rank: int, world_size: int, paused: bool) -> tuple[Metrics, float]:
    """A step that rank 0 begins late, at the start or out of a pause; and the longest time of a phase of it."""
    mesh, timers = mesh_of(rank, world_size), Timers(1, CPU)

    def be_late() -> None:
        time.sleep(0.0 if rank else 4 * NAP)

    meet(mesh)
    if not paused:
        be_late()
    window = MetricsWindow(CPU, seq_length=1, world=mesh.world, timers=timers)
    if paused:
        with window.paused():
            be_late()
    with timers("forward-backward"):
        time.sleep(NAP)
        comm.all_reduce(torch.zeros(1), mesh.dp_cp)
    window.add(StepMetrics(*(torch.zeros(()) for _ in range(5))), samples=1)
    record = window.read(iteration=1, consumed_samples=1, rates=Rates(0.0, 0.0))
    return record, record["forward-backward-time"]


@pytest.mark.parametrize("paused", [False, True])
def test_no_one_waits_in_a_step_for_a_rank_that_has_yet_to_begin(pool: Pool, paused: bool) -> None:
    """The clocks of all ranks start together, so that a late start counts neither in the step nor in a phase of it."""
    for record, longest in pool.run(3, a_late_start, paused):
        assert NAP <= record["iteration-time"] < 2 * NAP
        assert longest < 2 * NAP
        assert record["communication-dp"] < SOON
        assert record["communication-world"] == 0.0


def a_window(rank: int, world_size: int, alone: bool) -> Metrics | None:
    """Three steps of which the last rank spends ``NAP`` more on its own, 3 ``NAP`` of it waiting for data."""
    mesh, timers = mesh_of(rank, world_size), Timers(1, CPU)
    meet(mesh)
    window = MetricsWindow(CPU, seq_length=1, world=mesh.world, timers=timers)
    for _ in range(3):
        with timers("batch-generator"):
            time.sleep(NAP * (3 if rank == world_size - 1 else 2))
        comm.all_reduce(torch.zeros(1), mesh.dp_cp)
        scalars = [torch.zeros(()) for _ in range(5)]
        window.add(StepMetrics(*scalars), samples=1)
    if alone and rank > 0:
        return None  # it ended, so a collective would fail
    return window.read(iteration=3, consumed_samples=3, rates=Rates(0.0, 0.0), alone=alone)


def test_a_window_names_the_slowest_rank(pool: Pool) -> None:
    records = pool.run(3, a_window, False)
    record = records[0]
    assert record is not None
    assert record["slowest-rank"] == 2
    assert 0.2 < record["slowest-rank-excess"] < 0.8  # about a half
    assert 3 * NAP <= record["data-wait"] < 4 * NAP
    assert 0.3 * NAP < record["communication-dp"] < 1.1 * NAP  # of three ranks, two wait one NAP
    assert record["communication-world"] == 0.0
    assert 0.1 < record["communication-share"] < 0.35  # about two ninths
    assert 2 * NAP <= record["batch-generator-time-min"] < 3 * NAP
    assert all(r is not None and r["communication-dp"] == record["communication-dp"] for r in records)


def test_a_rank_without_peers_reports_itself(pool: Pool) -> None:
    record, _ = pool.run(2, a_window, True)
    assert record is not None
    assert not {"slowest-rank", "mem-max-rank"} & record.keys()
    assert not [name for name in record if name.startswith("communication")]  # those of the step that failed, too
