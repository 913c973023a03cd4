"""Small jobs that detect faults in the communication about records of steps and ranks; like the jobs in ``detect``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megatron.data.errors import DataError
from megatron.training.build import build_trainer
from megatron.training.components.power import PowerMeter
from megatron.training.components.slow_ranks import SlowRanks
from megatron.training.components.state_checksums import StateChecksums
from megatron.training.module_trace import ModuleTrace, scan_samples
from megatron.training.replay import check_modules
from megatron.training.step_record import gather_step_record, summarize_tensors
from tests.distributed.detect import CP2_HEADS, DP2, PP2, TOLERANCE, TP2, Detector
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


def first_finds_like_one_process(function: Any, case: Case, ranks: Sequence[Any]) -> bool:
    return bool(ranks[0] == function(0, 1, case.twin()))


def all_find_like_one_process(function: Any, case: Case, ranks: Sequence[Any]) -> bool:
    alone = function(0, 1, case.twin())
    return all(found == alone for found in ranks)


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
    "known-modules": Detector(2, knows_modules, (), lambda ranks: list(ranks) == [True, True]),
}
