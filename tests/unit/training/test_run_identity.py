from __future__ import annotations

import json
import os
import random
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.distributed.comm import Group
from megatron.training.trainer_state import new_run_id, previous_run_id
from tests.runs import before_step, column, kill, start, tiny_run


def test_names_differ_whatever_the_seed() -> None:
    random.seed(1)
    first = new_run_id(Group())
    random.seed(1)
    second = new_run_id(Group())
    assert first != second
    assert len(first) == 8
    assert set(first) <= set("abcdefghijklmnopqrstuvwxyz0123456789")


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


def test_a_name_that_is_given_is_kept() -> None:
    assert new_run_id(Group(), "abcd1234") == "abcd1234"


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"slurm-job": "17", "torchrun-run": "17", "slurm-restart": 2}, "second"),
        ({"slurm-job": "17"}, ""),  # not by torchrun
        ({"slurm-job": "18", "torchrun-run": "17"}, ""),
        ({}, ""),
    ],
)
def test_the_last_start_of_the_same_job_gives_its_name(tmp_path: Path, facts: dict[str, object], name: str) -> None:
    job = {"event": "start", "slurm-job": "17", "torchrun-run": "17"}
    lines = [job | {"run-id": "first"}, {"event": "note", "text": '"start"'}, job | {"run-id": "second"}]
    path = tmp_path / "metrics.jsonl"
    assert previous_run_id(path, facts) == ""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"event": "start", "run')
    assert previous_run_id(path, facts) == name


@pytest.mark.parametrize("job", ["17", "18"])
def test_a_job_that_has_saved_nothing_yet_begins_anew_under_its_name(tmp_path: Path, job: str) -> None:
    config = tiny_run(tmp_path, f"--save {tmp_path}/saved")
    for number, event in (("17", before_step(3, kill)), (job, None)):
        with patch.dict(os.environ, {"SLURM_JOB_ID": number}):
            start(config, event)
    first, again = column(tmp_path, "run-id", "run-id")
    assert (first == again) == (job == "17")
