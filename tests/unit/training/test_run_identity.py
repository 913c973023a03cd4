from __future__ import annotations

import random
from pathlib import Path

from megatron.parallel.comm import Group
from megatron.training.run_identity import kept_run_id, new_run_id
from tests.runs import column, start, tiny_run


def test_names_differ_whatever_the_seed() -> None:
    random.seed(1)
    first = new_run_id(Group())
    random.seed(1)
    second = new_run_id(Group())
    assert first != second
    assert len(first) == 8
    assert set(first) <= set("abcdefghijklmnopqrstuvwxyz0123456789")


def test_only_a_run_that_goes_on_keeps_its_name() -> None:
    assert kept_run_id({"run_id": "abcd1234"}, own=True) == "abcd1234"
    assert kept_run_id({"run_id": "abcd1234"}, own=False) == ""
    assert kept_run_id({}, own=True) == ""


def test_a_run_goes_by_one_name_and_one_that_begins_with_its_checkpoint_by_another(tmp_path: Path) -> None:
    own = f"--save {tmp_path}/own --exit-interval 2"
    for _ in range(2):
        assert start(tiny_run(tmp_path / "run", own)).status == 0
    other = f"--load {tmp_path}/own --save {tmp_path}/other"
    assert start(tiny_run(tmp_path / "another", other)).status == 0
    first, again = column(tmp_path / "run", "run-id", "run-id")
    (another,) = column(tmp_path / "another", "run-id", "run-id")
    assert first == again != another
    assert column(tmp_path / "another", "iteration") == [5, 6]
