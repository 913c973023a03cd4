"""The pool itself: results, and the message for each way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.kit.pool import Pool, RankError


def total(rank: int, world_size: int, scale: float) -> tuple[int, float]:
    value = torch.tensor(scale * (rank + 1), dtype=torch.float64)
    dist.all_reduce(value)
    return rank, value.item()


def describe(rank: int, world_size: int) -> tuple[bool, int, torch.dtype, str | None]:
    return dist.is_initialized(), torch.get_num_threads(), torch.get_default_dtype(), os.environ.get("OMP_NUM_THREADS")


def leave_a_mess(rank: int, world_size: int) -> int:
    torch.set_default_dtype(torch.float64)
    return os.getpid()


def draw(rank: int, world_size: int) -> float:
    return torch.rand(()).item()


def raise_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise KeyError(f"no such thing on {rank}")
    dist.barrier()


def kill_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        print("last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        os._exit(3)


def hang_on(rank: int, world_size: int, bad: int) -> None:
    while rank == bad:
        time.sleep(0.01)


def skip_collective(rank: int, world_size: int) -> None:
    if rank:
        dist.barrier()
    while not rank:
        time.sleep(0.01)


def different_shapes(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(2 + rank))


def different_collectives(rank: int, world_size: int) -> None:
    if rank:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)


def unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """A pool of this test alone, for tests that look at its processes."""
    with Pool(max_workers=2) as workers:
        yield workers


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_results_come_in_rank_order(pool: Pool, world_size: int) -> None:
    expected = 0.5 * world_size * (world_size + 1) / 2
    assert pool.run(world_size, total, 0.5) == [(rank, expected) for rank in range(world_size)]


def test_a_rank_alone_has_no_process_group(pool: Pool) -> None:
    assert pool.run(1, describe) == [(False, 1, torch.float32, "1")]


def test_several_ranks_have_one(pool: Pool) -> None:
    assert pool.run(2, describe) == [(True, 1, torch.float32, "1")] * 2


def test_workers_are_kept_and_each_job_starts_clean(pool: Pool) -> None:
    pids = pool.run(2, leave_a_mess)
    assert pool.run(2, leave_a_mess) == pids
    assert [dtype for _, _, dtype, _ in pool.run(2, describe)] == [torch.float32] * 2


def test_random_numbers_repeat_but_differ_between_ranks(pool: Pool) -> None:
    first, second = pool.run(2, draw), pool.run(2, draw)
    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_the_first_cause_is_reported_and_the_others_counted(pool: Pool, bad: int) -> None:
    with pytest.raises(RankError) as error:
        pool.run(4, raise_on, bad)
    text = str(error.value)
    assert text.startswith(f"rank {bad} of 4 failed in tests.distributed.test_pool.raise_on: KeyError")
    assert f"no such thing on {bad}" in text
    assert "in raise_on" in text  # the traceback
    assert "and 3 more of the 4 ranks:" in text


def test_a_job_after_a_failure_runs(pool: Pool) -> None:
    with pytest.raises(RankError):
        pool.run(2, raise_on, 1)
    assert pool.run(2, total, 1.0) == [(0, 3.0), (1, 3.0)]


def test_a_killed_rank_is_named_and_replaced(own_pool: Pool) -> None:
    before = own_pool.run(2, leave_a_mess)
    with pytest.raises(RankError, match=r"rank 1.*process died: killed by SIGKILL"):
        own_pool.run(2, kill_on, 1)
    after = own_pool.run(2, leave_a_mess)
    assert not set(before) & set(after)


def test_output_of_a_dead_rank_is_shown(pool: Pool) -> None:
    with pytest.raises(RankError, match="last words"):
        pool.run(1, kill_on, 0)


def test_an_exit_is_reported_with_its_code(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed in .*exit_on: process died: exit code 3"):
        pool.run(2, exit_on, 1)


def test_a_hang_ends_at_the_timeout_and_shows_where(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        pool.run(2, hang_on, 1, timeout=1.0)
    assert time.monotonic() - start < 3
    text = str(error.value)
    assert text.startswith("rank 1 of 2 failed in tests.distributed.test_pool.hang_on: no answer in 1 s")
    assert "in hang_on" in text
    assert "more of" not in text


def test_a_collective_that_misses_a_rank_names_both_sides(pool: Pool) -> None:
    with pytest.raises(RankError) as error:
        pool.run(2, skip_collective, timeout=2.0)
    text = str(error.value)
    assert text.startswith("rank 1 of 2 failed")
    assert "rank 0: still running" in text
    assert text.count("in skip_collective") == 2  # the traceback of rank 1 and the stack of rank 0


@pytest.mark.parametrize("function", [different_shapes, different_collectives])
def test_mismatched_collectives_fail_at_once(pool: Pool, function: object) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank \d calls .*, rank \d "):
        pool.run(2, function)  # type: ignore[arg-type]
    assert time.monotonic() - start < 10


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 failed in .*unpicklable: .*pickle"):
        pool.run(1, unpicklable)


def test_a_worker_that_died_while_idle_is_replaced(own_pool: Pool) -> None:
    (victim,) = own_pool.run(1, leave_a_mess)
    os.kill(victim, signal.SIGKILL)
    while exists(victim):
        time.sleep(0.01)
    assert own_pool.run(1, leave_a_mess) != [victim]


def test_the_pool_grows_only_as_needed_and_leaves_nothing(own_pool: Pool) -> None:
    assert own_pool.pids == []
    own_pool.run(1, draw)
    assert len(own_pool.pids) == 1
    (pid,) = own_pool.pids
    own_pool.close()
    assert own_pool.pids == []
    assert not exists(pid)


def test_an_interrupted_job_leaves_no_worker_behind(own_pool: Pool) -> None:
    main = threading.main_thread().ident or 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without one
    try:
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            own_pool.run(2, hang_on, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert own_pool.pids == []
    assert own_pool.run(2, total, 1.0) == [(0, 3.0), (1, 3.0)]


@pytest.mark.parametrize("world_size", [0, 3])
def test_more_ranks_than_workers_are_refused(own_pool: Pool, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size {world_size} is not in 1\.\.2"):
        own_pool.run(world_size, draw)
