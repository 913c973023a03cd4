"""The map from consumed samples to a rank's micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.loader import rank_micro_batches


def sequential(total: int, consumed: int, micro: int, rank: int, size: int) -> list[list[int]]:
    """Megatron-LM's sampler in its own terms: fill a batch of micro x DP indices, hand each rank its slice."""
    given_out, batch = [], []
    for index in range(consumed, total):
        batch.append(index)
        if len(batch) == micro * size:
            given_out.append(batch[rank * micro : rank * micro + micro])
            batch = []
    return given_out


SHAPE = st.tuples(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))


@settings(deadline=None)
@given(SHAPE)
def test_order_of_megatron_and_every_sample_once(shape: tuple[int, int, int, int]) -> None:
    consumed, micro, size, groups = shape
    batch = micro * size * groups
    by_rank = [rank_micro_batches(consumed, batch, micro, rank, size) for rank in range(size)]
    for rank, mine in enumerate(by_rank):
        assert [list(m) for m in mine] == sequential(consumed + batch, consumed, micro, rank, size)
    assert sorted(i for mine in by_rank for m in mine for i in m) == list(range(consumed, consumed + batch))


@settings(deadline=None)
@given(SHAPE)
def test_steps_follow_each_other_as_one_stream(shape: tuple[int, int, int, int]) -> None:
    """Two steps are the two halves of one twice as large: a batch ramp moves no sample."""
    consumed, micro, size, groups = shape
    batch = micro * size * groups
    for rank in range(size):
        halves = [rank_micro_batches(at, batch, micro, rank, size) for at in (consumed, consumed + batch)]
        assert halves[0] + halves[1] == rank_micro_batches(consumed, 2 * batch, micro, rank, size)


def test_drawn_example() -> None:
    assert rank_micro_batches(100, 12, 2, 1, 3) == [range(102, 104), range(108, 110)]


@pytest.mark.parametrize("batch", [7, 5, 0, -6])
def test_a_batch_that_groups_do_not_fill_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=f"{batch} is not a multiple of micro-batch 2 x DP 3 = 6"):
        rank_micro_batches(0, batch, 2, 0, 3)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of 3"):
        rank_micro_batches(0, 6, 2, rank, 3)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))
def test_a_padded_batch_is_a_full_one_cut_off(consumed: int, batch: int, micro: int, size: int) -> None:
    """Places stay where a full batch has them; ranks have equally many micro-batches, and all places once."""
    unit = micro * size
    full = -(-batch // unit) * unit
    by_rank = [rank_micro_batches(consumed, batch, micro, rank, size, padded=True) for rank in range(size)]
    for rank, mine in enumerate(by_rank):
        whole = rank_micro_batches(consumed, full, micro, rank, size)
        assert [list(m) for m in mine] == [[i for i in m if i < consumed + batch] for m in whole]
        assert all(m.stop <= consumed + batch and m.step == 1 for m in mine)
    assert sorted(i for mine in by_rank for m in mine for i in m) == list(range(consumed, consumed + batch))
