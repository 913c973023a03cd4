from __future__ import annotations

from megatron.distributed.launch import world_group
from megatron.training.trainer_state import new_run_id
from tests.distributed.pool import Pool


def name_on_rank(rank: int, world_size: int) -> str:
    return new_run_id(world_group(rank, world_size))


def test_all_ranks_get_the_name_of_the_first(pool: Pool) -> None:
    assert len(set(pool.run(2, name_on_rank))) == 1
