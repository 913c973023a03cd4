"""Values and errors that ranks exchange: they arrive unchanged, and no rank executes another's data."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.config.errors import Problem, UserError
from megatron.data.errors import DataError
from megatron.distributed import comm
from megatron.distributed.launch import gather_results, run_on_rank0, world_group
from megatron.training.resume_source import NoCheckpointError, ResumeSource
from tests.kit.pool import Pool

VALUES: list[Any] = [None, True, -(2**70), 0.1, "é\ud800", [], [1, [2.5]], {"a": {"b": None}}, "x" * 100_000]
ERRORS = [
    UserError([Problem("E802", "no such disk", ("--save ANOTHER", "--save B")), Problem("E813", "newer")], ["a note"]),
    NoCheckpointError([Problem("E811", "none")]),
    DamagedCheckpointError("cut short", "--save ANOTHER", "--load B"),
    DataError("bad", "fix it"),
    OSError(errno.ENOSPC, "No space left on device", "/disk/a"),
    TimeoutError("late"),
    ValueError("no", 3),
    KeyError("a"),
    dist.DistBackendError("from a library"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
]


def exchange(rank: int, world_size: int) -> list[list[Any]]:
    """Every rank sends another value; what it gets by each of the three collectives, round by round."""
    world, seen = world_group(rank, world_size), []
    for number in range(len(VALUES)):
        mine = VALUES[(number + rank) % len(VALUES)]
        gathered = comm.gather_objects(mine, world)
        seen.append([comm.all_gather_objects(mine, world), gathered, comm.broadcast_object(mine, world)])
    return seen


def test_values_arrive_as_they_were(pool: Pool) -> None:
    expected = [[VALUES[(number + rank) % len(VALUES)] for rank in range(3)] for number in range(len(VALUES))]
    for rank, seen in enumerate(pool.run(3, exchange)):
        assert seen == [[values, values if rank == 0 else [], values[0]] for values in expected]


def errors_of(rank: int, world_size: int) -> list[list[tuple[str, str, Any]]]:
    """Class, text and problems of the errors that this rank gets when rank 0 fails, and when the last one does."""
    world, seen = world_group(rank, world_size), []

    def fail(error: Exception | None) -> None:
        if error is not None:
            raise error

    for error in ERRORS:
        reported = []
        for call in (
            lambda error=error: run_on_rank0(lambda: fail(error), world),
            lambda error=error: gather_results(lambda: fail(error if rank == world_size - 1 else None), world),
        ):
            try:
                call()
            except Exception as raised:
                got = raised
            text = (got.strerror, got.filename) if isinstance(got, OSError) and got.errno else str(got)
            reported.append((type(got).__name__, text, getattr(got, "problems", ())))
        seen.append(reported)
    return seen


def test_an_error_of_one_rank_is_the_same_on_every_rank(pool: Pool) -> None:
    ranks = pool.run(2, errors_of)
    for error, (own, copied), (copied_too, own_too) in zip(ERRORS, *ranks):
        name, text, _ = own
        foreign = isinstance(error, dist.DistBackendError | UnicodeDecodeError)
        assert own == own_too
        assert copied == copied_too == (("RuntimeError", f"{name}: {text}", ()) if foreign else own)


@pytest.mark.parametrize(
    "value", [(1, 2), {1: 2}, {1, 2}, b"x", float("nan"), Path("x"), ResumeSource(), [{"deep": (1,)}]]
)
def test_objects_that_are_not_json_are_refused_by_the_sender(value: Any) -> None:
    for exchange in (comm.all_gather_objects, comm.gather_objects, comm.broadcast_object):
        with pytest.raises(TypeError, match="ranks exchange only JSON, which ") as raised:
            exchange(value, comm.Group())
        assert repr(value) in str(raised.value)


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def meet_a_rogue(rank: int, world_size: int, path: Path) -> list[str]:
    """Rank 0 sends pickles by torch's own collectives for objects, in the place of values; what rank 1 reports."""
    if rank == 0:
        dist.broadcast_object_list([Hostile(path)], 0)
        with patch.object(dist.distributed_c10d, "_tensor_to_object"):  # the rogue does not read what it sends
            dist.all_gather_object([None] * 2, Hostile(path))
        return []
    world, reported = world_group(rank, world_size), []
    for exchange in (comm.broadcast_object, comm.all_gather_objects):
        try:
            exchange("mine", world)
        except ValueError as error:
            reported.append(str(error))
    return reported


def test_a_pickle_from_another_rank_runs_nothing(pool: Pool, tmp_path: Path) -> None:
    _, reported = pool.run(2, meet_a_rogue, tmp_path / "pwned")
    assert not (tmp_path / "pwned").exists()
    assert [text.partition(":")[0] for text in reported] == ["rank 0 has sent something that is not JSON"] * 2
