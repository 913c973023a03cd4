from __future__ import annotations

import errno
import io
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from megatron.arguments.sources import from_dict
from megatron.checkpoint.errors import SupersededError
from megatron.config import plugins
from megatron.config.model import ModelConfig
from megatron.config.run import LoggingConfig, RunConfig, TrainingConfig
from megatron.training.loggers import console, run_logger
from megatron.training.loggers.base import MEMORY_CAPACITY, Metrics
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import evaluation_metrics
from tests.runs import column, records, start, tiny_run

RECORD: Metrics = {
    "iteration": 10,
    "consumed-samples": 40,
    "consumed-tokens": 4000,
    "lm loss": 2.5,
    "grad-norm": 1.0,
    "learning-rate": 1e-3,
    "weight-decay": 0.1,
    "batch-size": 4,
    "loss-scale": 1.0,
    "iteration-time": 0.5,
    "tokens-per-second": 800.0,
    "skipped-iterations": [7],
    "mem-max-allocated-bytes": 2**30,
    MEMORY_CAPACITY: 2**34,
    "skipped-iterations-count": 1,
    "spikes-skipped": 0,
    "tokens-per-second-per-gpu": 400.0,
}


def run_log(folder: Path | None, **options: Any) -> RunLogger:
    config = RunConfig(
        model=ModelConfig(vocab_size=64),
        training=TrainingConfig(seq_length=100, global_batch_size=4, train_iters=100),
        logging=LoggingConfig(run_dir=str(folder) if folder else None),
    )
    return RunLogger(config, world_size=2, device=torch.device("cpu"), **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def test_a_run_leaves_console_lines_metrics_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with run_log(folder) as log:
        log.train(RECORD)
        log.log(evaluation_metrics("valid", 2.75))
        log.note("stopped")
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(" 10/100 4.00K tok | loss 2.5000 ")
    assert out[1].startswith("validation at 0: loss 2.7500")
    assert out[2] == "stopped"
    assert out[3] == f"loss curve: {folder / 'loss.png'}"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "step 10: skipped the update of step 7\n" in (folder / "incidents.md").read_text()
    start, train, validation, note = lines(folder)
    assert (start["event"], start["iteration"], start["world-size"]) == ("start", 0, 2)
    assert train["lm loss"] == 2.5
    assert (train["mfu"], train["throughput"] > 0) == (None, True)
    assert validation["lm loss validation"] == 2.75
    assert note["text"] == "stopped"
    assert all(line["time"] > 1.7e9 for line in (start, train, validation, note))


def test_metric_names_are_those_of_megatron_lm(tmp_path: Path) -> None:
    """Dashboards depend on these; a change here breaks them."""
    with run_log(tmp_path) as log:
        log.train(RECORD)
        log.log(evaluation_metrics("valid", 2.75))
    _, train, validation = lines(tmp_path)
    megatron = {
        "world-size",
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "grad-norm",
        "iteration-time",
        "throughput",
    }
    speed = {"tokens-per-second", "tokens-per-second-per-gpu"}
    ours = {"iteration", "consumed-samples", "consumed-tokens", "weight-decay", "spikes-skipped", *speed}
    assert set(train) == megatron | ours | {
        "mfu",
        "mfu-causal",
        "hfu",
        "mem-max-allocated-bytes",
        "skipped-iterations",
        "skipped-iterations-count",
        "time",
    }
    places = {"iteration", "consumed-samples", "consumed-tokens", "time"}
    assert set(validation) == places | {"lm loss validation", "lm loss validation ppl"}


def test_evaluations_are_told_apart_by_name(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        for split in ("valid:wiki", "test"):
            log.log(evaluation_metrics(split, 2.75))
    _, wiki, test = lines(tmp_path)
    assert (wiki["validation-set"], wiki["lm loss validation"]) == ("wiki", 2.75)
    assert test["lm loss test"] == 2.75
    assert not {"validation-set", "lm loss validation"} & set(test)


def test_the_resolved_config_can_be_read_back(tmp_path: Path) -> None:
    import yaml

    run_log(tmp_path).close()
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert from_dict(tree).logging.run_dir == str(tmp_path)
    assert from_dict(tree).training.train_iters == 100


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with run_log(folder, enabled=False) as log:
        log.train(RECORD)
        log.log(evaluation_metrics("valid", 2.75))
        log.note("stopped")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not folder.exists()


def test_without_a_folder_there_are_console_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    with run_log(None) as log:
        log.train(RECORD)
    assert len(capsys.readouterr().out.splitlines()) == 1


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_console_on_a_full_disk_costs_the_run_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, FullDisk())
    with run_log(tmp_path / "run") as log:
        log.train(RECORD)
        log.warning("look")
    assert [line.get("lm loss", line.get("text")) for line in lines(tmp_path / "run")[1:]] == [2.5, "look"]
    assert (tmp_path / "run" / "loss.png").exists()


def test_a_second_start_continues_the_file(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        log.train(RECORD)
    with run_log(tmp_path, iteration=10, consumed_samples=40) as log:
        log.note("again")
    events = [line.get("event") for line in lines(tmp_path)]
    assert events == ["start", None, "start", "note", "note"]
    assert lines(tmp_path)[2]["consumed-tokens"] == 4000


def test_a_folder_used_again_says_what_it_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config in ("", "another"):
        run_log(tmp_path).close()
        (tmp_path / "config.yaml").write_text(config)
    assert "earlier start" in capsys.readouterr().out
    run_log(tmp_path).close()
    (message,) = [line for line in capsys.readouterr().out.splitlines() if "earlier start" in line]
    assert message.startswith(f"{tmp_path} holds an earlier start: metrics.jsonl is appended to")
    assert "changed files were renamed to config.2.yaml" in message
    assert (tmp_path / "config.2.yaml").read_text() == "another"


def test_a_folder_that_cannot_be_made_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run folder .*file.* cannot be written: .+\n  fix: --run-dir"):
        run_log(tmp_path / "file" / "run")


def test_a_run_without_log_lines_ends_without_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log(tmp_path).close()
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "loss.png").exists()


def test_closing_does_not_hide_what_ended_the_run(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="cause"), run_log(tmp_path):
        raise KeyError("cause")


def failing_run(folder: Path, act: Callable[[RunLogger], None]) -> None:
    """A run that does ``act`` and ends by an error."""
    with run_log(folder) as log:
        act(log)
        raise KeyError("cause")


def test_an_error_is_told_after_the_steps_that_no_line_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(log: RunLogger) -> None:
        log.train(RECORD)
        log.stepped(13, 52, lambda: {**RECORD, "iteration": 13, "consumed-samples": 52, "consumed-tokens": 5200})

    with pytest.raises(KeyError):
        failing_run(tmp_path, act)
    _, first, second, error = lines(tmp_path)
    assert (first["iteration"], second["iteration"]) == (10, 13)
    assert (error["event"], error["iteration"], error["consumed-tokens"]) == ("error", 13, 5200)
    assert error["text"] == "KeyError: 'cause'"
    assert " 13/100 " in capsys.readouterr().out


def test_a_superseded_start_writes_no_more_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    superseded: list[str] = []

    def check() -> None:
        if superseded:
            raise SupersededError("E817 start 1 is superseded")

    monkeypatch.setattr(run_logger, "SUPERSEDED_CHECK_SECONDS", 0.0)
    log = run_log(tmp_path, check=check)
    log.train(RECORD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    superseded.append("by another")
    log.note("nobody reads this")
    log.warning("nor this")
    log.stepped(13, 52, lambda: RECORD)
    with pytest.raises(SupersededError), log:
        log.train(RECORD)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_asks_rarely_whether_it_is_superseded_and_always_at_its_end(tmp_path: Path) -> None:
    asked = list[int]()
    log = run_log(tmp_path, check=lambda: asked.append(len(lines(tmp_path))))
    for _ in range(10):
        log.train(RECORD)
    assert asked == []
    log.__exit__(KeyError, KeyError("cause"), None)
    assert asked[0] == 11  # before the error is written


def test_a_superseded_start_notices_at_a_log_line_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        raise SupersededError("E817 start 1 is superseded")

    monkeypatch.setattr(run_logger, "SUPERSEDED_CHECK_SECONDS", 0.2)
    log = run_log(tmp_path, check=check)
    log.train(RECORD)
    time.sleep(0.2)
    with pytest.raises(SupersededError), log:
        log.train(RECORD)
    assert len(lines(tmp_path)) == 2


class Mine:
    """A logger of a user's module; fails at the second step."""

    made: ClassVar[list[Mine]] = []

    def __init__(self, config: RunConfig) -> None:
        self.config, self.seen, self.closed = config, list[Any](), False
        self.made.append(self)

    def log(self, step: int, metrics: Metrics) -> None:
        if "bad" in metrics:
            raise RuntimeError("not this one")
        self.seen.append((step, metrics.get("lm loss", metrics.get("mine"))))

    def close(self) -> None:
        self.closed = True


def test_loggers_of_plugins_get_the_metrics_and_cost_at_most_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: RunConfig) -> Mine:
        raise ValueError("no such table")

    monkeypatch.setattr(Mine, "made", [])
    monkeypatch.setitem(plugins._registered, "metric_logger", {"mine": Mine, "broken": broken})
    run_log(None, enabled=False).close()
    assert Mine.made == []  # only the rank that reports makes them
    for bad in ({}, {"bad": 1.0}):
        with run_log(tmp_path / str(len(bad))) as log:
            log.train(RECORD)
            log.log({"mine": 5.0, **bad})
            log.flush()
            log.log({"mine": 6.0})
    good, failing = Mine.made
    assert good.config.training.train_iters == 100
    assert (good.seen, good.closed) == ([(10, 2.5), (0, 5.0), (0, 6.0)], True)
    assert (failing.seen, failing.closed) == ([(10, 2.5)], False)
    warnings = [line["text"] for line in lines(tmp_path / "1") if line.get("event") == "warning"]
    assert warnings == [
        "broken receives no data from this run: no such table; training continues",
        "mine receives no further data from this run: not this one; training continues",
    ]


def test_a_step_is_told_once(tmp_path: Path) -> None:
    def act(log: RunLogger) -> None:
        log.stepped(12, 48, lambda: RECORD)
        log.train(RECORD)

    with pytest.raises(KeyError):
        failing_run(tmp_path, act)
    assert [line.get("event") for line in lines(tmp_path)] == ["start", None, "error"]


def test_steps_that_cannot_be_read_do_not_hide_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read() -> Metrics:
        raise RuntimeError("no device")

    with pytest.raises(KeyError):
        failing_run(tmp_path, lambda log: log.stepped(12, 48, read))
    assert [line["event"] for line in lines(tmp_path)] == ["start", "error"]
    assert "the steps since the last log line are lost: no device" in capsys.readouterr().err


def test_lines_fit_a_terminal_and_are_whole_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    for stream, longest in ((Terminal(), 40), (io.StringIO(), None)):
        monkeypatch.setattr(console.sys, "stdout", stream)
        run_log(None).train(RECORD)
        length = len(stream.getvalue().rstrip("\n"))
        assert length <= longest if longest else length > 80


def test_missing_packages_cost_a_warning_each(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", f"--tensorboard-dir {tmp_path}/board --wandb-project p")
    with patch.dict(sys.modules, {"torch.utils.tensorboard": None, "wandb": None}):
        printed = start(config)
    assert printed.status == 0
    assert column(tmp_path / "run", "iteration") == [1, 2, 3, 4, 5, 6]
    warnings = [record["text"] for record in records(tmp_path / "run", "text") if record["event"] == "warning"]
    client, board = sorted(warnings, key=len, reverse=True)
    assert board == (
        "TensorBoard receives no data from this run: it needs a package that is not installed "
        "(torch.utils.tensorboard): pip install tensorboard; training continues"
    )
    assert client.startswith(
        "Weights & Biases receives no data from this run: it needs a package that is not installed (wandb): "
        f"pip install wandb; {tmp_path}/run/wandb/journal-"
    )
    assert client.endswith(
        ".jsonl keeps the rows and sends them when this run is resumed from a checkpoint; training continues"
    )
    assert printed.err.count("pip install") == 2


def test_places_that_cannot_be_written_cost_a_warning_each(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tiny_run(
        tmp_path / "run", f"--tensorboard-dir {tmp_path}/file --wandb-project p --wandb-save-dir {tmp_path}/file"
    )
    printed = start(config)
    assert printed.status == 0
    journal, board = sorted(printed.err.splitlines(), key=len, reverse=True)
    assert board == (
        f"warning: TensorBoard receives no data from this run: {tmp_path}/file cannot be written (File exists): "
        "--tensorboard-dir ANOTHER_FOLDER; training continues"
    )
    assert re.fullmatch(
        "warning: the journal for Weights & Biases receives no data from this run: "
        rf"{tmp_path}/file/wandb/journal-\w{{8}}.jsonl cannot be written \(Not a directory\), "
        "and logging requires it: --wandb-save-dir ANOTHER_FOLDER; training continues",
        journal,
    )


def test_weights_and_biases_that_is_turned_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with patch.dict(sys.modules, wandb=None):
        printed = start(tiny_run(tmp_path / "run", "--wandb-project p"))
    assert (printed.status, printed.err) == (0, "")
    assert "Weights & Biases is turned off by WANDB_MODE=disabled\n" in printed.out
    assert not (tmp_path / "run/wandb").exists()
