"""TensorBoard and Weights & Biases themselves, and a run that is killed with all that it started, twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from megatron.training.loggers.wandb import leveldb_records as records_of
from tests.killed import run_in_process
from tests.runs import records, start, steps, tiny_run

MEGATRON_LM = {
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "iteration-time", "throughput"),
    *("mem-max-allocated-bytes", "world-size", "lm loss validation", "lm loss validation ppl"),
}
"""Names of curves that dashboards made for Megatron-LM look for, as far as this run has them."""

LAST = 12
FLAGS = (
    "--train-iters 12 --save {0}/saved --save-interval 4 --eval-interval 4 --eval-iters 1 --tensorboard-dir {0}/board"
)
WANDB = " --wandb-project tests --wandb-exp-name killed --wandb-save-dir {0}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose first start is killed after step 7, its second after step 10; saved every 4 steps.

    Of the first start W&B has everything on the disk when it is killed, of the second nothing.
    """
    folder = tmp_path_factory.mktemp("killed")
    flags, offline = (FLAGS + WANDB).format(folder), {"WANDB_MODE": "offline"}
    at_once = {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.1"}
    statuses = [
        run_in_process(
            folder / "run", flags, 7, lambda: [step for step, _ in rows(folder)][-1:] == [6], **offline, **at_once
        ),
        run_in_process(folder / "run", flags, 10, **offline),
        run_in_process(folder / "run", flags, **offline),
    ]
    assert statuses == [-9, -9, 0]
    return folder


def reported(folder: Path) -> Iterator[tuple[str, Any]]:
    """The run's name and every record of W&B, of all starts."""
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for content in records_of(path.read_bytes()):
            yield path.stem, wandb_internal_pb2.Record.FromString(content)  # type: ignore[attr-defined]


def rows(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Steps and their values as W&B has them."""
    histories = [record.history for _, record in reported(folder) if record.HasField("history")]
    return [(h.step.num, {"/".join(i.nested_key): json.loads(i.value_json) for i in h.item}) for h in histories]


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve as TensorBoard shows it."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def unbroken(folder: Path) -> dict[int, dict[str, Any]]:
    """The numbers by step of the same run, had nobody killed it."""
    start(tiny_run(folder / "whole", FLAGS.format(folder / "other")))
    return steps(folder / "whole")


def test_wandb_has_every_step_once_with_the_numbers_of_a_run_that_nobody_killed(folder: Path) -> None:
    whole = unbroken(folder)
    assert [step for step, _ in rows(folder)] == list(range(1, LAST + 1))
    for step, row in rows(folder):
        numbers = {name: value for name, value in whole[step].items() if name != "skipped-iterations"}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers)
        assert row["skipped-iterations-count"] == 0
        assert "skipped-iterations" not in row  # which are those steps, and no number
    assert [row["restarts"] for _, row in rows(folder)] == [0] * 6 + [2] * 6  # of the second start nothing was left


def test_wandb_has_one_run_with_its_configuration(folder: Path) -> None:
    (name,) = {name for name, _ in reported(folder)}
    assert name == f"run-{records(folder / 'run', 'run-id')[0]['run-id']}"
    starts = [record.run for _, record in reported(folder) if record.HasField("run")]
    assert {(run.project, run.display_name) for run in starts} == {("tests", "killed")}
    config = {item.key: json.loads(item.value_json) for item in starts[-1].config.update}
    assert config["model"]["hidden_size"] == 16
    assert config["optimizer"]["lr"] == 0.01


def test_tensorboard_shows_one_curve(folder: Path) -> None:
    by_step, by_samples = board(folder / "board"), board(folder / "board/samples")
    assert [step for step, _ in by_step["lm loss"]] == list(range(1, LAST + 1))
    loss = {record["iteration"]: record["lm loss"] for record in records(folder / "run")}
    assert dict(by_step["lm loss"]) == pytest.approx(loss, rel=1e-6)
    assert [step for step, _ in by_step["lm loss validation"]] == [4, 8, 12]
    assert by_samples["lm loss vs samples"] == [(4 * step, value) for step, value in by_step["lm loss"]]


def test_names_of_curves_are_those_of_megatron_lm(folder: Path) -> None:
    by_step, by_samples = board(folder / "board"), board(folder / "board/samples")
    assert by_step.keys() >= MEGATRON_LM
    assert by_samples.keys() == {f"{name} vs samples" for name in by_step}
    reported_names = {name for _, row in rows(folder) for name in row}
    assert reported_names >= MEGATRON_LM | {"samples vs steps"}


def test_the_folder_tells_of_the_starts(folder: Path) -> None:
    lines = (folder / "run/incidents.md").read_text().splitlines()
    message = [line.split(" step ", 1)[1].split(",")[0] for line in lines]
    assert message == [
        "0: started on 1 rank",
        "4: started again on 1 rank",
        "8: started again on 1 rank",
        "12: ended in good order",
    ]
    data = json.loads((folder / "run/data.json").read_text())
    assert (data["train"]["samples"], data["train"]["tokens"]) == (48, 384)
    assert len(data["train"]["fingerprint"]) == 16
