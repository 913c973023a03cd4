from __future__ import annotations

import random

from megatron.parallel.comm import Group
from megatron.training.run_identity import kept_run_id, new_run_id


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
