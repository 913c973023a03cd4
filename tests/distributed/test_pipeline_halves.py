"""What halves of backward communicate: nothing twice but the gathers that are stated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.distributed.drive import RATES, Case, batches_of, pipeline
from tests.distributed.pool import Pool

LAYERS, SAMPLES = 4, 3
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
NAMES = COLLECTIVES + tuple(f"start_{name}" for name in COLLECTIVES)


def counting(name: str, counts: Counter[str]) -> Callable[..., Any]:
    """The collective ``name``, counted where tensor-parallel ranks do it."""
    original = getattr(comm, name)

    def count(x: Tensor, group: Group, *rest: Any, **named: Any) -> Any:
        counts[name] += group.axes == "tp"
        return original(x, group, *rest, **named)

    return count


def communicated(rank: int, world_size: int, case: Case) -> Counter[str]:
    """Tensor-parallel collectives of forward and backward on this rank, by name."""
    trainer, counts = build_trainer(case.config(), rank, world_size), Counter[str]()
    batches = batches_of(trainer, case, 0)
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(patch.object(comm, name, counting(name, counts)))
        stack.enter_context(patch.object(trainer.optimizer, "reduce_gradients", lambda clock: None))
        train_step(trainer, batches, RATES)
    return +counts


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_halves_gather_output_gradients_of_row_linears_once_more(pool: Pool, sequence_parallel: bool) -> None:
    """Two of the four linears of a layer; without sequence parallelism nothing is gathered at all."""
    whole, halves = (
        pool.run(
            2,
            communicated,
            pipeline(
                1,
                schedule,
                samples=SAMPLES,
                layers=LAYERS,
                tensor_model_parallel_size=2,
                sequence_parallel=sequence_parallel,
            ),
            check_collectives=False,
        )
        for schedule in ("1f1b", "zb-h1")
    )
    again = 2 * LAYERS * SAMPLES * sequence_parallel
    for rank in (0, 1):
        assert whole[rank]["start_all_gather"] == 2 * again
        assert halves[rank] - whole[rank] == +Counter(start_all_gather=again)
        assert not whole[rank] - halves[rank]
