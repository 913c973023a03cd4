"""Files that stop a run, and runs that evaluate alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.arguments.validate import check_skip_train, check_stop_file
from megatron.config.run import CheckpointConfig, RunConfig, TrainingConfig


def codes(file: str) -> list[str]:
    config = RunConfig(training=TrainingConfig(stop_file=file))
    return [problem.code for problem in check_stop_file(config, 1)]


def test_a_file_needs_a_folder_and_a_name(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    assert codes(f"{tmp_path}/stop") == []
    assert codes(f"{tmp_path}/there") == []  # the run stops before its first step, and says so
    assert codes("stop") == []  # here
    assert codes("x" * 5000) == []  # which no disk has
    for bad in ("", str(tmp_path), f"{tmp_path}/none/stop", f"{tmp_path}/there/stop", "s3://bucket/stop"):
        assert codes(bad) == ["E311"]
    assert [*check_stop_file(RunConfig(), 1)] == []


def test_the_fix_makes_the_folder(tmp_path: Path) -> None:
    (problem,) = check_stop_file(RunConfig(training=TrainingConfig(stop_file=f"{tmp_path}/a/b/stop")), 1)
    assert problem.fixes == (f"mkdir -p {tmp_path}/a/b",)


@pytest.mark.parametrize(
    ("checkpoint", "eval_iters", "problems"),
    [
        ({"load": "x"}, 1, 0),
        ({"save": "SAVED"}, 1, 0),
        ({"load": "x"}, 0, 1),
        ({}, 1, 1),
        ({"save": "EMPTY"}, 1, 1),
        ({"save": "EMPTY"}, 0, 2),
    ],
)
def test_an_evaluation_needs_weights_and_batches(
    tmp_path: Path, checkpoint: dict[str, str], eval_iters: int, problems: int
) -> None:
    (tmp_path / "SAVED/iter_0000003").mkdir(parents=True)
    where = {name: value if name == "load" else str(tmp_path / value) for name, value in checkpoint.items()}
    training = TrainingConfig(skip_train=True, eval_iters=eval_iters)
    config = RunConfig(training=training, checkpoint=CheckpointConfig(**where))
    assert [problem.code for problem in check_skip_train(config, 1)] == ["E312"] * problems
