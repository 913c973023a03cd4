"""Running on rank 0, and one run per folder; for several ranks see tests/distributed/test_resume.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.lease import acquire_lease
from megatron.config.errors import Problem, UserError
from megatron.distributed.comm import Group
from megatron.training.checkpointer import hold_save_folder, run_on_rank0
from tests.runs import start, tiny_run

PROBLEMS = UserError([Problem("E802", "no such disk", ("--save ANOTHER", "--save B")), Problem("E813", "newer")])


def test_alone_it_is_a_call() -> None:
    assert run_on_rank0(lambda: 3, Group()) == 3
    assert run_on_rank0(lambda: None, Group()) is None


@pytest.mark.parametrize(
    "error", [PROBLEMS, DamagedCheckpointError("cut short", "--save ANOTHER"), ValueError("a bug")]
)
def test_an_error_alone_is_an_error(error: Exception) -> None:
    def act() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_on_rank0(act, Group())
    assert raised.value is error


@pytest.mark.parametrize("error", [PROBLEMS, DamagedCheckpointError("cut short", "--save ANOTHER", "--load B")])
def test_errors_are_the_same_after_their_way_to_another_rank(error: UserError | DamagedCheckpointError) -> None:
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent)) == (type(error), str(error))
    assert getattr(sent, "problems", ()) == getattr(error, "problems", ())


def test_a_folder_is_claimed_for_as_long_as_the_run_takes(tmp_path: Path) -> None:
    in_use = pytest.raises(CheckpointError, match="is in use by process ")
    with hold_save_folder(str(tmp_path / "new/deep"), Group()), in_use, acquire_lease(tmp_path / "new/deep"):
        pass
    with acquire_lease(tmp_path / "new/deep"):
        pass
    with hold_save_folder(None, Group()):
        pass


def test_a_second_run_in_one_folder_ends_before_it_touches_anything(tmp_path: Path) -> None:
    with acquire_lease(tmp_path / "saved"):
        printed = start(tiny_run(tmp_path, f"--save {tmp_path}/saved"))
    assert (printed.status, printed.samples) == (1, {})
    assert printed.err.startswith(f"error: {tmp_path}/saved is in use by process ")
    assert printed.err.endswith("\n  fix: --save ANOTHER\n")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [".epoch-1"]
    assert start(tiny_run(tmp_path, f"--save {tmp_path}/saved")).status == 0


def test_a_folder_that_cannot_be_made_is_found_before_the_first_step(tmp_path: Path) -> None:
    printed = start(tiny_run(tmp_path, "--save /proc/nope"))
    assert (printed.status, printed.samples) == (1, {})
    assert "no checkpoint can be written to /proc/nope" in printed.err
