"""The backend of most jobs of the pool: each operation matches gloo, and misuse is an error."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.grid import FACTORS, Choice, case_of, label
from tests.distributed.test_layout_matrix import MATRIX, TOLERANCE_FP64, check
from tests.kit.cases import compare_with_twin, run_on
from tests.kit.pool import Pool, RankError
from tests.kit.shared_memory_group import DTYPES, SHARED_MEMORY, SLEEP_SECONDS

BACKENDS = (SHARED_MEMORY, "gloo")
SIZE = 3


def part(rank: int, dtype: torch.dtype, rows: int = SIZE) -> Tensor:
    """Numbers of this rank, small enough for every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, (rows, 4), generator=generator).to(dtype)


def reduced(rank: int, size: int, op: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> list[Tensor]:
    everywhere, at_one = part(rank, dtype), part(rank, dtype)
    dist.all_reduce(everywhere, op)
    dist.reduce(at_one, 1, op)
    rows = torch.empty(1, 4, dtype=dtype)
    dist.reduce_scatter_single(rows, part(rank, dtype), op)
    return [everywhere, rows, *([at_one] if rank == 1 else [])]


def gathered(rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    rows, listed = torch.empty(size * SIZE, 4, dtype=dtype), [torch.empty(SIZE, 4, dtype=dtype) for _ in range(size)]
    dist.all_gather_single(rows, part(rank, dtype))
    dist.all_gather(listed, part(rank, dtype))
    at_one = [torch.empty(SIZE, 4, dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(part(rank, dtype), at_one, 1)
    copied = part(rank, dtype)
    dist.broadcast(copied, 2)
    return [rows, *listed, *(at_one or []), copied]


def exchanged(rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Equal and unequal parts, none in some; then messages in both directions, received in another order."""
    equal, unequal = torch.empty(SIZE, 4, dtype=dtype), torch.empty(sum(range(rank, rank + size)), 4, dtype=dtype)
    dist.all_to_all_single(equal, part(rank, dtype))
    sent, received = [rank + other for other in range(size)], [rank + other for other in range(size)]
    dist.all_to_all_single(unequal, part(rank, dtype, sum(sent)), received, sent)
    came = [torch.empty(SIZE, 4, dtype=dtype) for _ in range(2 * (size - 1))]
    others = [other for other in range(size) if other != rank]
    works = [dist.isend(part(10 * rank + i, dtype), other) for i in range(2) for other in others]
    works += [dist.irecv(out, other) for out, other in zip(came, others * 2)]
    for work in reversed(works):
        assert work is not None
        work.wait()
    return [equal, unequal, *came]


def in_subgroups(rank: int, size: int) -> list[Tensor]:
    """Asynchronous collectives of two groups, which the ranks start and wait for in different orders."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2])]
    mine = [group for group in groups if rank or group is groups[0]]
    mine = mine if rank == 1 else mine[::-1]
    tensors = [part(rank, torch.float64) for _ in mine]
    works = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(tensors, mine)]
    for work in works[:: 1 if rank == 2 else -1]:
        work.wait()
    dist.barrier()
    return tensors if rank == 1 else tensors[::-1]


def every_operation(rank: int, size: int) -> dict[str, list[Tensor]]:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    found = {}
    for dtype in DTYPES:
        jobs: list[Callable[..., list[Tensor]]] = [partial(reduced, op=op) for op in ops if dtype != torch.bool]
        for number, job in enumerate([*jobs, gathered, exchanged]):
            found[f"{dtype} {number}"] = job(rank, size, dtype=dtype)
    return found


def test_every_operation_matches_gloo(pool: Pool) -> None:
    ours, theirs = (pool.run(SIZE, every_operation, backend=backend) for backend in BACKENDS)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        different = [n for n in its if not all(torch.equal(x, y) for x, y in zip(mine[n], its[n], strict=True))]
        assert different == []


def test_groups_do_not_wait_for_each_other(pool: Pool) -> None:
    ours, theirs = (pool.run(SIZE, in_subgroups, backend=backend) for backend in BACKENDS)
    assert all(torch.equal(x, y) for mine, its in zip(ours, theirs) for x, y in zip(mine, its, strict=True))


def sums_of_rounding(rank: int, size: int) -> Tensor:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(x)
    return x


def test_sums_are_the_same_to_the_bit_on_all_ranks(pool: Pool) -> None:
    first, *others = pool.run(4, sums_of_rounding)
    assert all(torch.equal(first, other) for other in others)


def read_before_waiting(rank: int, size: int) -> bool:
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    dist.barrier()
    early = x.clone()
    work.wait()
    return torch.equal(early, torch.ones(4)) and torch.equal(x, torch.full((4,), float(size)))


def test_nothing_arrives_before_it_is_waited_for(pool: Pool) -> None:
    assert pool.run(2, read_before_waiting) == [True, True]


def at_another_rank(rank: int, size: int) -> bool:
    x = torch.ones(4)
    dist.reduce(x, 0)
    return bool(x.isnan().all())


def test_a_reduction_leaves_nan_on_the_other_ranks(pool: Pool) -> None:
    assert pool.run(2, at_another_rank) == [False, True]


def differing(rank: int, size: int, first: Callable[[], object], second: Callable[[], object]) -> None:
    (second if rank else first)()


def sum_of(*shape: int, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (partial(sum_of, 2), partial(sum_of, 3), "all-reduce of 8 bytes .*all-reduce of 12 bytes"),
        (partial(sum_of, 2), partial(sum_of, 1, dtype=torch.float64), "float32.*float64|float64.*float32"),
        (partial(sum_of, 2), partial(dist.broadcast, torch.zeros(2), 0), "all-reduce.*broadcast|broadcast.*all-reduce"),
    ],
)
def test_different_collectives_are_an_error(
    pool: Pool, first: Callable[[], object], second: Callable[[], object], message: str
) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(2, differing, first, second)


def sum_of_columns(rank: int, size: int) -> None:
    dist.all_reduce(torch.zeros(4, 4).T)


def sum_of_wrong_dtype(rank: int, size: int) -> None:
    dist.all_reduce(torch.zeros(4, dtype=torch.uint16))


@pytest.mark.parametrize("function", [sum_of_columns, sum_of_wrong_dtype])
def test_tensors_refused_by_other_backends_are_refused(pool: Pool, function: Callable[[int, int], None]) -> None:
    with pytest.raises(RankError, match="cannot be sent"):
        pool.run(2, function)


def end_on(rank: int, size: int, how: str) -> None:
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise ValueError("too hot")
    dist.barrier()


@pytest.mark.parametrize(("how", "message"), [("killed", "killed by SIGKILL"), ("raised", "too hot")])
def test_ranks_that_wait_for_one_that_has_ended_fail(pool: Pool, how: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        pool.run(2, end_on, how)
    assert "DistBackendError: rank 1 has ended" in str(caught.value)
    assert time.monotonic() - began < 50 * SLEEP_SECONDS  # far from the limit of a run, also on a slow machine


def big(rank: int, size: int) -> bool:
    x = torch.full((1 << 20,), float(rank))
    for _ in range(3):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return bool((x == size - 1).all())


def test_tensors_of_many_megabytes(pool: Pool) -> None:
    assert pool.run(3, big) == [True] * 3


REAL = {"cp_type": ("p2p", "all_gather", "a2a", "a2a+p2p"), "zero": FACTORS["zero"], "schedule": FACTORS["schedule"]}


def on_gloo() -> list[Choice]:
    """A few cases of the layout matrix that have all ways to exchange keys, to cut state and to order a pipeline."""
    found: list[Choice] = []
    missing = {(name, value) for name, values in REAL.items() for value in values}
    while missing:
        more = [{(name, c.get(name)) for name in REAL if name != "cp_type" or c["cp"] > 1} & missing for c in MATRIX]
        best = max(range(len(MATRIX)), key=lambda i: (len(more[i]), -case_of(MATRIX[i]).world_size))
        found.append(MATRIX[best])
        missing -= more[best]
    return found


@pytest.mark.parametrize("choice", on_gloo(), ids=label)
def test_layouts_train_like_one_process_on_gloo_too(pool: Pool, choice: Choice) -> None:
    case = case_of(choice)
    steps = run_on(pool, case, backend="gloo")
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)
