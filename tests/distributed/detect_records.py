"""Small jobs that detect faults in the communication about records of steps and ranks; like the jobs in ``detect``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.data.errors import DataError
from megatron.distributed.launch import connect_places, world_group
from megatron.distributed.places import PLACE
from megatron.training.build import build_trainer
from megatron.training.components.nonfinite import find_nonfinite_weight
from megatron.training.components.power import PowerMeter
from megatron.training.components.slow_ranks import SlowRanks
from megatron.training.components.state_checksums import StateChecksums
from megatron.training.module_trace import ModuleTrace, scan_samples
from megatron.training.replay import check_modules
from megatron.training.replay_check.component import ReplayCheck
from megatron.training.replay_check.recorder import GIVEN, GOT, REDUCED, Event, StepRecord
from megatron.training.replay_check.state import GatherCheck
from megatron.training.replay_check.verdict import TRANSIENT, Verdict
from megatron.training.step_record import gather_step_record, summarize_tensors
from tests.distributed.detect import CP2_HEADS, DP2, PP2, TOLERANCE, TP2, ZERO1, Detector
from tests.kit.cases import Case, batches_of

STEP_NUMBERS = {"loss": 1.0, "grad_norm": 1.0}


def digests_of_weights(rank: int, world_size: int, case: Case) -> dict[str, str]:
    """Return the digests of the main parameters as rank 0 has them."""
    trainer = build_trainer(case.config(), rank, world_size)
    return {name: found.text for name, found in summarize_tensors(trainer, trainer.optimizer.main_params).items()}


def samples_of_a_record(rank: int, world_size: int, case: Case) -> list[int]:
    """Return the samples that the record of a step names, as rank 0 has it."""
    trainer = build_trainer(case.config(), rank, world_size)
    record = gather_step_record(trainer, batches_of(trainer, case, 0), STEP_NUMBERS, intact=False)
    return sorted(entry["sample"] for entry in record.get("samples", []))


def digests_to_save(rank: int, world_size: int, case: Case) -> dict[str, str]:
    """Return the digests of the state in a checkpoint, as this rank knows them."""
    return dict(StateChecksums(build_trainer(case.config(), rank, world_size)).state_dict())


def joules_of_all(rank: int, world_size: int) -> float:
    """Return the energy of ranks that have used 1 and 2 joules."""
    meter = PowerMeter(build_trainer(DP2.config(), rank, world_size))
    read = iter((0.0, rank + 1.0))
    with patch.object(meter, "_counters", [lambda: next(read)]):
        meter.on_train_start()
        return float(meter.metrics()["energy-joules"])


def slow_rank(rank: int, world_size: int) -> list[str]:
    """Return what is reported of a rank that takes half of the time longer, on a machine of its own."""
    trainer, said = build_trainer(DP2.config(), rank, world_size), list[str]()
    reports = SlowRanks(trainer, SimpleNamespace(take=lambda: [1.0 + 2.0 * rank] * 4), 1)  # type: ignore[arg-type]
    reports.log = SimpleNamespace(note=said.append, warning=said.append)  # type: ignore[assignment]
    with patch.dict("os.environ", SLURMD_NODENAME=f"node{rank}"):
        reports.on_train_start()
        trainer.progress.iteration = 1
        reports.metrics()
    return said


def names_slow_rank(ranks: Sequence[list[str]]) -> bool:
    return all(len(said) == 1 and "rank 1 on node1" in said[0] for said in ranks)


def module_sizes(rank: int, world_size: int, case: Case) -> list[str]:
    """Return the modules of a step whose outputs were measured, as rank 0 has them."""
    trainer = build_trainer(case.config(), rank, world_size)
    trace, batches = ModuleTrace(trainer), batches_of(trainer, case, 0)
    with trace.observing():
        scan_samples(trainer, batches, "layers.0")
    return sorted({size.name for size in trace.gather()})


def sample_sizes(rank: int, world_size: int, case: Case) -> list[list[float]]:
    """Return sample, loss and largest output of a block, of every sample alone, as rank 0 has them."""
    trainer = build_trainer(case.config(), rank, world_size)
    return [[found[0], *found[3:]] for found in scan_samples(trainer, batches_of(trainer, case, 0), "layers.0")]


def knows_modules(rank: int, world_size: int) -> bool:
    """Return True if a module of the other stage is known to this rank."""
    try:
        check_modules(build_trainer(PP2.config(), rank, world_size), ["layers.0", "layers.1"])
    except DataError:
        return False
    return True


def places_of_hosts(rank: int, world_size: int) -> list[list[Any]]:
    """Return machines and local ranks of all ranks, as this one knows them."""
    try:
        connect_places(world_group(rank, world_size), 60.0, f"node{rank}", 2 * rank)
        return [[*host] for host in PLACE.hosts]
    finally:
        PLACE.reset()


OF_MESSAGE, OF_ANSWER = "0>1 1", "1>0 1"
FINDINGS: dict[str, tuple[list[tuple[int, Event]], str, list[int]]] = {
    "reduction": ([(1, Event(REDUCED, "weight"))], "reduction", [1]),
    # what rank 1 has got is wrong, so what it then gives to rank 0 is, too
    "message": (
        [(1, Event(GOT, "message", "F0", OF_MESSAGE)), (1, Event(GIVEN, "message", "B0", OF_ANSWER))]
        + [(0, Event(GOT, "message", "B0", OF_ANSWER))],
        "message",
        [1],
    ),
}
"""Ranks and events that differ between a step and its replays, the place, and the ranks at fault."""


def conclude(rank: int, world_size: int, events: list[tuple[int, Event]]) -> list[Any]:
    """Return cause, place and ranks of the verdict on a step whose replays have other digests."""
    found: list[Verdict] = []
    check = ReplayCheck(build_trainer(DP2.config(), rank, world_size), 1)
    records = [StepRecord() for _ in range(4)]
    for number, record in enumerate(records):
        for _, event in (each for each in events if each[0] == rank):
            record.add(event, torch.ones(1) if number else torch.zeros(1))
    with patch.object(check, "_report", lambda verdict, *_: found.append(verdict)):
        check._conclude(records, [])
    return [found[0].cause, found[0].place, [*found[0].ranks]]


def is_set_somewhere(rank: int, world_size: int) -> bool:
    """Return what all ranks are to know of a flag that only the last has set."""
    check = ReplayCheck(build_trainer(DP2.config(), rank, world_size), 1)
    return check._is_any_set([torch.zeros(3, dtype=torch.bool), torch.tensor([rank == world_size - 1])])


def spoiled_weight(rank: int, world_size: int) -> str:
    """Return what all ranks are to know of a weight that is not finite on the last one."""
    trainer = build_trainer(DP2.config(), rank, world_size)
    if rank == world_size - 1:
        trainer.optimizer.main_params["layers.0.input_layernorm.weight"].fill_(torch.nan)
    return find_nonfinite_weight(trainer)


def stale_weights(rank: int, world_size: int) -> list[str]:
    """Return what is found of a bit that rank 0 has flipped in weights of rank 1."""
    trainer = build_trainer(ZERO1.config(), rank, world_size)
    buffer = trainer.optimizer.weights.buffers[0]
    if rank == 0:
        buffer.whole.view(2, -1)[1, 3] += 1.0
    return [text.partition(" in ")[0] for _, text in GatherCheck(trainer).compare().findings()]


def first_finds_like_one_process(function: Any, case: Case, ranks: Sequence[Any]) -> bool:
    return bool(ranks[0] == function(0, 1, case.twin()))


def all_find_like_one_process(function: Any, case: Case, ranks: Sequence[Any]) -> bool:
    alone = function(0, 1, case.twin())
    return all(found == alone for found in ranks)


def all_equal(expected: Any, ranks: Sequence[Any]) -> bool:
    return all(found == expected for found in ranks)


def losses_like_one_process(case: Case, ranks: Sequence[Any]) -> bool:
    """Compare samples and losses; the largest output is of a shard."""
    alone = sample_sizes(0, 1, case.twin())
    return [row[:2] for row in ranks[0]] == [pytest.approx(row[:2], rel=TOLERANCE) for row in alone]


RECORDS: dict[str, Detector] = {
    "record-digests": Detector(
        2, digests_of_weights, (TP2,), partial(first_finds_like_one_process, digests_of_weights, TP2)
    ),
    "record-samples": Detector(
        2, samples_of_a_record, (DP2,), partial(first_finds_like_one_process, samples_of_a_record, DP2)
    ),
    "digests": Detector(2, digests_to_save, (TP2,), partial(all_find_like_one_process, digests_to_save, TP2)),
    "joules": Detector(2, joules_of_all, (), lambda ranks: list(ranks) == [3.0, 3.0]),
    "slow-rank": Detector(2, slow_rank, (), names_slow_rank),
    "modules-pp2": Detector(2, module_sizes, (PP2,), lambda ranks: {"layers.0", "layers.1"} <= {*ranks[0]}),
    "samples-pp2": Detector(2, sample_sizes, (PP2,), partial(losses_like_one_process, PP2)),
    "samples-cp2": Detector(2, sample_sizes, (CP2_HEADS,), partial(losses_like_one_process, CP2_HEADS)),
    "samples-dp2": Detector(2, sample_sizes, (DP2,), partial(losses_like_one_process, DP2)),
    "places": Detector(2, places_of_hosts, (), lambda ranks: list(ranks) == [[["node0", 0], ["node1", 2]]] * 2),
    **{
        f"replay-{name}": Detector(2, conclude, (events,), partial(all_equal, [TRANSIENT, place, culprits]))
        for name, (events, place, culprits) in FINDINGS.items()
    },
    "replay-flags": Detector(2, is_set_somewhere, (), partial(all_equal, True)),
    "spoiled-weight": Detector(2, spoiled_weight, (), partial(all_equal, "layers.0.input_layernorm.weight (rank 1)")),
    "replay-gathered": Detector(
        2, stale_weights, (), lambda ranks: [len(found) for found in ranks] == [1, 0] and "rank 1" in ranks[0][0]
    ),
    "known-modules": Detector(2, knows_modules, (), lambda ranks: list(ranks) == [True, True]),
}
