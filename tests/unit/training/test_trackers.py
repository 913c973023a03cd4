"""TensorBoard and Weights & Biases: one curve per run, whatever happens to its starts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config.logging import LoggingConfig
from megatron.training.loggers.trackers import TensorBoardLogger, WandbLogger, hyperparameters
from tests.kit.runs import column, records, run_in_process, start, steps, tiny_run
from tests.kit.wandb_server import running
from tests.unit.arguments.command import codes

MEGATRON_LM = {
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "iteration-time", "throughput"),
    *("mem-max-allocated-bytes", "world-size", "lm loss validation", "lm loss validation ppl"),
}
"""Names of curves that dashboards made for Megatron-LM look for, as far as this run has them."""

FLAGS = "--train-iters 12 --save {0}/saved --save-interval 4 --wandb-project tests --wandb-save-dir {0}"
LAST = 12


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve as TensorBoard shows it."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def values(step: int, loss: float) -> dict[str, Any]:
    return {
        "consumed-samples": 4 * step,
        "consumed-tokens": 32 * step,
        "lm loss": loss,
        "skipped-iterations": [],
        "starts": 1,
        "time": 1.0,
    }


def test_tensorboard_has_one_curve_of_two_starts_over_steps_and_over_samples(tmp_path: Path) -> None:
    """The first start is killed at step 6, of which TensorBoard has points; the second goes on after step 4."""
    first = TensorBoardLogger(tmp_path, "a: 1\nb: 2\n", 0, 0)
    for step in range(1, 7):
        first.log(step, values(step, step))
    first.log(6, {"consumed-samples": 24, "validation-set": "wiki", "lm loss validation": math.nan})
    first.flush()
    second = TensorBoardLogger(tmp_path, "lr: 0.1\n", 4, 16, {"lr": 0.1, "bf16": True, "split": None})
    for step in range(5, 9):
        second.log(step, values(step, 10 * step))
    second.log(8, {"consumed-samples": 32, "validation-set": "wiki", "lm loss validation": 3.0})
    second.event(8, "error", {"text": "it broke"})
    second.event(8, "note", {"text": "a summary"})
    second.close()
    first.close()
    expected = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 50), (6, 60), (7, 70), (8, 80)]
    by_step, by_samples = board(tmp_path), board(tmp_path / "samples")
    assert by_step["lm loss"] == expected
    assert by_step["lm loss validation-wiki"][-1] == (8, 3.0)
    assert by_samples["lm loss vs samples"] == [(4 * step, value) for step, value in expected]
    assert by_step.keys() == {"lm loss", "lm loss validation-wiki", "starts"}
    events = EventAccumulator(str(tmp_path)).Reload()
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert events.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name == "hparams"
    assert texts == {"config/text_summary": "    lr: 0.1", "error/text_summary": "it broke"}


class Client:
    """A wandb with one run, whose rows are lost in a crash unless they are kept before."""

    def __init__(self, offline: bool) -> None:
        self.offline, self.url, self.disabled = offline, "URL", False
        self.kept: list[tuple[int, dict[str, Any]]] = []
        self.waiting: list[tuple[int, dict[str, Any]]] = []  # the last of them is not complete
        self.asked: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.axes: dict[str, str | None] = {}
        self.exit_code: int | None = None

    @property
    def starting_step(self) -> int:
        return 0 if self.offline else max((step for step, _ in self.kept), default=-1) + 1

    def init(self, **asked: Any) -> Client:
        self.asked = asked
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any], step: int) -> None:
        if self.waiting and self.waiting[-1][0] == step:
            self.waiting[-1][1].update(row)
        else:
            self.waiting.append((step, row))

    def crash(self, lost: int) -> None:
        """Nothing of the row that is being filled has arrived, nor of the ``lost`` rows before it."""
        self.kept += self.waiting[: max(0, len(self.waiting) - 1 - lost)]
        self.waiting = []

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.kept, self.waiting = self.kept + self.waiting, []


def logger(
    client: Client,
    folder: Path,
    iteration: int = 0,
    notes: list[str] | None = None,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> WandbLogger:
    options = LoggingConfig(**{"wandb_project": "p", "wandb_save_dir": str(folder), **more})
    module = SimpleNamespace(init=client.init, Settings=lambda **settings: settings)
    with patch.dict(sys.modules, wandb=module):
        return WandbLogger(
            options, config or {"a": 1}, "run12345", iteration, [].append if notes is None else notes.append
        )


def test_a_step_and_its_evaluation_are_one_row_of_a_run_asked_for_by_its_id(tmp_path: Path) -> None:
    client = Client(offline=True)
    labels = {"wandb_tags": ("a", "b"), "wandb_group": "g", "wandb_notes": "n"}
    run = logger(client, tmp_path, wandb_entity="us", run_dir="runs/mine", **labels)
    for step in (1, 2, 3):
        run.log(step, values(step, step / 2))
        if step == 2:
            run.log(2, {"consumed-samples": 8, "lm loss validation": 2.0})
    run.close()
    assert [step for step, _ in client.kept] == [1, 2, 3]
    row = {"consumed-samples": 8, "consumed-tokens": 64, "samples vs steps": 8, "lm loss": 1.0, "starts": 1}
    assert client.kept[1][1] == {**row, "lm loss validation": 2.0, "restarts": 0}
    asked = {name: value for name, value in client.asked.items() if name not in ("dir", "settings")}
    assert client.axes == {"consumed-tokens": None, "*": "consumed-tokens"}
    assert asked == {
        "tags": ("a", "b"),
        "group": "g",
        "notes": "n",
        "project": "p",
        "entity": "us",
        "name": "mine",
        "id": "run12345",
        "resume": "allow",
        "config": {"a": 1},
    }
    assert client.exit_code == 0


def test_health_is_grouped_by_quantity_and_a_deep_model_shows_some_layers(tmp_path: Path) -> None:
    client = Client(offline=True)
    run = logger(client, tmp_path, config={"num_layers": 96})
    layers = [f"layers.{i}" for i in range(96)]
    run.log(1, {f"health/{q}/{x}": 1.0 for q in ("grad-norm", "update-ratio") for x in (*layers, "head", "total")})
    run.close()
    names = [name for name in client.kept[0][1] if name.startswith("health")]
    assert {name.partition("/")[0] for name in names} == {"health-grad-norm", "health-update-ratio"}
    shown = [name.partition("/")[2] for name in names if name.startswith("health-grad-norm/")]
    assert (shown[0], shown[7:]) == ("layers.0", ["layers.95", "head", "total"])


def test_runs_are_compared_by_flat_options_and_facts(tmp_path: Path) -> None:
    facts = hyperparameters(tiny_run(tmp_path, "--global-batch-size 4"), "cpu", 1)
    assert (facts["num_layers"], facts["optimizer"], facts["world_size"]) == (2, "adam", 1)
    assert facts["tokens_per_step"] == 4 * facts["seq_length"]
    assert facts["parameters"] > 1000
    assert facts["version_torch"] == version("torch")
    assert {"git_commit", "python", "device"} <= facts.keys()


STARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), max_size=5)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(starts=STARTS, offline=st.booleans())
def test_steps_appear_once_and_in_order_and_a_crash_loses_unsent_ones(
    starts: list[tuple[int, int, bool]], offline: bool
) -> None:
    """Starts that take some steps and end well or are killed; saved every 4 steps."""
    client, taken, lost_steps = Client(offline), 0, set[int]()
    with TemporaryDirectory() as folder:
        for count, lost, killed in [*starts, (24, 0, False)]:
            run = logger(client, Path(folder), taken)
            for step in range(taken + 1, taken + count + 1):
                run.log(step, values(step, 0.5))
            taken += count
            if killed:
                lost_steps |= {step for step, _ in client.waiting}
                client.crash(lost)
                taken -= taken % 4
            else:
                run.close()
    reported = [step for step, _ in client.kept]
    assert reported == sorted(set(reported))
    assert set(range(1, taken + 1)) - set(reported) <= lost_steps
    assert reported[-1] >= taken


def test_an_evaluation_that_the_previous_start_missed_joins_the_first_row(tmp_path: Path) -> None:
    client = Client(offline=False)
    first = logger(client, tmp_path)
    first.log(1, values(1, 0.5))
    first.close()
    second = logger(client, tmp_path, 1)
    second.log(1, {"consumed-samples": 4, "lm loss validation": 1.0})
    second.log(2, values(2, 0.5))
    second.close()
    assert [(step, row.get("lm loss validation")) for step, row in client.kept] == [(1, None), (2, 1.0)]


def test_the_error_of_a_start_is_cleared_by_the_next_and_a_rollback_is_noted(tmp_path: Path) -> None:
    client, notes = Client(offline=False), list[str]()
    first = logger(client, tmp_path)
    for step in (1, 2, 3):
        first.log(step, values(step, 0.5))
    first.event(3, "error", {"text": "no more of this"})
    first.close()
    assert (client.summary, client.exit_code) == ({"error": "no more of this"}, 1)
    logger(client, tmp_path, 1, notes)
    assert client.summary == {"error": ""}
    assert notes == [
        "Weights & Biases: URL",
        "Weights & Biases has this run up to step 3 and continues there from step 4",
    ]
    client.offline = True
    logger(client, tmp_path / "a b", 0, notes)
    assert notes[2].endswith(f"send all starts with: wandb sync '{tmp_path}/a b/wandb'/offline-run-*-run12345")


def test_restarts_are_counted(tmp_path: Path) -> None:
    client = Client(offline=True)
    run = logger(client, tmp_path)
    run.log(1, values(1, 0.5) | {"starts": 3})
    run.close()
    assert client.kept[0][1]["restarts"] == 2


@pytest.mark.parametrize(
    ("error", "notes"),
    [
        (
            RuntimeError("No API key configured. Use `wandb login` to log in."),
            "no user is logged in: wandb login, or WANDB_MODE=offline",
        ),
        (TimeoutError("It took\n  too long."), "It took too long: WANDB_MODE=offline writes to this disk"),
        (TimeoutError(), "it raised TimeoutError: WANDB_MODE=offline writes to this disk"),
    ],
)
def test_a_client_that_cannot_open_its_run_comes_with_a_fix(tmp_path: Path, error: Exception, notes: str) -> None:
    client = Client(offline=False)
    with patch.object(client, "init", side_effect=error), pytest.raises(RuntimeError) as raised:
        logger(client, tmp_path)
    assert str(raised.value) == notes


@pytest.mark.parametrize("mode", ["foo", ""])
def test_an_unknown_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ValueError, match=f"WANDB_MODE={mode} is unknown: the modes are online, offline, disabled$"):
        logger(Client(offline=False), tmp_path)
    assert not (tmp_path / "wandb").exists()


def warned(folder: Path) -> list[str]:
    return sorted(record["text"] for record in records(folder, "text") if record["event"] == "warning")


def test_missing_packages_and_places_that_cannot_be_written_cost_a_warning_each(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = f"--train-iters 1 --wandb-project p --tensorboard-dir {tmp_path}"
    with patch.dict(sys.modules, {"tensorboard": None, "wandb": None}):
        for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
            del sys.modules[name]
        assert start(tiny_run(tmp_path / "run", f"{flags}/board")).status == 0
    assert start(tiny_run(tmp_path / "other", f"{flags}/file --wandb-save-dir {tmp_path}/file")).status == 0
    board, client = warned(tmp_path / "run")
    assert "pip install 'megatron-pretrain[tensorboard]'; training continues" in board
    assert "pip install 'megatron-pretrain[wandb]'; training continues" in client
    board, client = warned(tmp_path / "other")
    for warning in (board, client):
        assert f"{tmp_path}/file" in warning
        assert warning.endswith("; training continues")


def test_weights_and_biases_that_is_turned_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with patch.dict(sys.modules, wandb=None):
        printed = start(tiny_run(tmp_path / "run", "--train-iters 1 --wandb-project p"))
    assert (printed.status, printed.err) == (0, "")
    assert "Weights & Biases is turned off by WANDB_MODE=disabled\n" in printed.out
    assert not (tmp_path / "run/wandb").exists()


def test_prompts_are_continued_after_each_evaluation_without_effect_on_training(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("1 2 3\n4\n")
    flags = "--train-iters 4 --eval-interval 2 --eval-iters 1"
    sampled = f"{flags} --sample-prompts {tmp_path}/prompts --tensorboard-dir {tmp_path}/board"
    printed = start(tiny_run(tmp_path / "run", sampled))
    assert printed.status == 0, printed.err
    assert "sample: 1 2 3 >>> " in printed.out
    events = [record for record in records(tmp_path / "run", "event") if record["event"] == "samples"]
    assert [event["iteration"] for event in events] == [2, 4]
    for event in events:
        assert [prompt for prompt, _ in event["continuations"]] == ["1 2 3", "4"]
        assert all(0 < len(text.split()) <= 64 for _, text in event["continuations"])
    assert events[0]["continuations"] != events[1]["continuations"]
    texts = EventAccumulator(str(tmp_path / "board")).Reload().Tensors("samples/text_summary")
    assert [text.step for text in texts] == [2, 4]
    start(tiny_run(tmp_path / "whole", flags))
    assert column(tmp_path / "run", "lm loss") == column(tmp_path / "whole", "lm loss")

    (tmp_path / "prompts").write_text("not ids\n")
    printed = start(tiny_run(tmp_path / "none", sampled))
    assert "E708 --sample-prompts" in printed.err
    assert "Traceback" not in printed.err
    for unusable in ("none", "prompts --pipeline-model-parallel-size 2"):
        assert codes(f"--eval-iters 1 --sample-prompts {tmp_path}/{unusable}", 2) == ["E708"]


def test_samples_are_a_table_of_their_step(tmp_path: Path) -> None:
    client = Client(offline=True)
    run = logger(client, tmp_path)
    run.log(2, values(2, 0.5))
    with patch.dict(sys.modules, wandb=SimpleNamespace(Table=lambda **table: table)):
        run.event(2, "samples", {"text": "", "continuations": [["a", "b"]], "consumed-tokens": 64})
    run.close()
    assert client.kept[0][1]["samples"] == {"columns": ["prompt", "continuation"], "data": [["a", "b"]]}
    assert client.kept[0][1]["lm loss"] == 0.5


def written(folder: Path, step: int) -> Callable[[], bool]:
    """A condition that comes true a second after W&B got the complete row of ``step``."""
    began = list[float]()

    def ready() -> bool:
        if any(path.read_text() == str(step) for path in folder.glob("wandb/last-step-*")):
            began.append(time.monotonic())
        return bool(began) and began[-1] - began[0] > 1.0

    return ready


def test_a_run_that_is_killed_is_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages themselves, W&B offline: its files are sent as users send them. A kill costs W&B no row here."""
    flags = f"{FLAGS} --wandb-exp-name killed --eval-interval 4 --eval-iters 1 --tensorboard-dir {{0}}/board"
    flags, run = flags.format(tmp_path), tmp_path / "run"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.1")
    assert run_in_process(run, flags, 7, written(tmp_path, 6)) == -9
    assert start(tiny_run(run, flags)).status == 0
    start(tiny_run(tmp_path / "whole", "--train-iters 12 --eval-interval 4 --eval-iters 1"))
    whole = steps(tmp_path / "whole")

    folders = sorted(map(str, tmp_path.glob("wandb/offline-run-*")))
    assert {folder.rpartition("-")[2] for folder in folders} == {records(run, "run-id")[0]["run-id"]}
    with running() as server:
        variables = os.environ | server.environment | {"HOME": str(tmp_path)}
        subprocess.run([str(Path(sys.executable).with_name("wandb")), "sync", *folders], env=variables, timeout=120)
        rows = {row["_step"]: row for row in server.rows}
        assert list(rows) == [row["_step"] for row in server.rows] == list(range(1, LAST + 1))
    for step, row in rows.items():
        numbers = {name: value for name, value in whole[step].items() if name != "skipped-iterations"}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers)
    assert [row["restarts"] for row in rows.values()] == [0] * 6 + [1] * 6
    assert set(rows[LAST]) >= MEGATRON_LM | {"samples vs steps"}

    by_step, by_samples = board(tmp_path / "board"), board(tmp_path / "board/samples")
    loss = {record["iteration"]: record["lm loss"] for record in records(run)}
    assert [step for step, _ in by_step["lm loss"]] == list(range(1, LAST + 1))
    assert dict(by_step["lm loss"]) == pytest.approx(loss, rel=1e-6)
    assert [step for step, _ in by_step["lm loss validation"]] == [4, 8, 12]
    assert by_samples["lm loss vs samples"] == [(4 * step, value) for step, value in by_step["lm loss"]]
    assert by_step.keys() >= MEGATRON_LM
    assert by_samples.keys() == {f"{name} vs samples" for name in by_step}

    incidents = [line.split(" step ", 1)[1].split(",")[0] for line in (run / "incidents.md").read_text().splitlines()]
    assert incidents == ["0: started on 1 rank", "4: started again on 1 rank", "12: ended in good order"]
    data = json.loads((run / "data.json").read_text())
    assert (data["train"]["samples"], data["train"]["tokens"]) == (48, 384)


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, False])
def test_a_server_gets_no_step_twice(tmp_path: Path, arrives: bool) -> None:
    """Rows that had not reached it at the kill are missing up to the checkpoint."""
    flags = FLAGS.format(tmp_path)
    with running() as server:

        def reached() -> list[int]:
            return [row["_step"] for row in server.rows]

        variables = server.environment | {"HOME": str(tmp_path)}
        expected = [1, 2, 3, 4, 5, 6] if arrives else []
        at_once = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.2"} if arrives else {}
        killed = run_in_process(tmp_path / "run", flags, 7, lambda: reached() == expected, **variables, **at_once)
        assert (killed, reached()) == (-9, expected)
        assert run_in_process(tmp_path / "run", flags, **variables) == 0
        assert reached() == (list(range(1, 13)) if arrives else list(range(5, 13)))
        assert server.finished
        losses = dict(zip(column(tmp_path / "run", "iteration"), column(tmp_path / "run", "lm loss")))
        assert all(row["lm loss"] == losses[row["_step"]] for row in server.rows)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["", "CreateRunFiles"])
def test_a_server_that_is_silent_costs_a_warning_and_less_than_a_minute(tmp_path: Path, at: str) -> None:
    """From the beginning, or after the run was opened."""
    with running() as server:
        answer = server.answer

        def answer_first(query: str, found: dict[str, object]) -> dict[str, object]:
            if at in query:
                server.silent.set()
            return answer(query, found)

        server.answer = answer_first  # type: ignore[method-assign]
        if not at:
            server.silent.set()
        began = time.monotonic()
        variables = server.environment | {"HOME": str(tmp_path)}
        assert run_in_process(tmp_path / "run", FLAGS.format(tmp_path), **variables) == 0
    assert time.monotonic() - began < 75
    (warning,) = warned(tmp_path / "run")
    assert warning.startswith("Weights & Biases failed and receives no more data: ")
    assert column(tmp_path / "run", "iteration") == list(range(1, 13))
