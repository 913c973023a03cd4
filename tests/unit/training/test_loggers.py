"""Reports of a run to its loggers, and the cost of a logger that fails, hangs or is superseded."""

from __future__ import annotations

import errno
import io
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.arguments.sources import from_dict
from megatron.checkpoint.errors import SupersededError
from megatron.config import plugins
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.training.loggers import console, run_logger
from megatron.training.loggers.base import Metrics, error_summary, scalar_metrics
from megatron.training.loggers.console import MEMORY_CAPACITY, METRICS
from megatron.training.loggers.run_logger import BackgroundLogger, RunLogger
from megatron.training.metrics import evaluation_metrics

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


def run_log(folder: Path | None = None, **options: Any) -> RunLogger:
    config = RunConfig(
        model=ModelConfig(vocab_size=64),
        training=TrainingConfig(seq_length=100, global_batch_size=4, train_iters=100),
        logging=LoggingConfig(run_dir=str(folder) if folder else None),
    )
    return RunLogger(config, world_size=2, device=torch.device("cpu"), **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "picture" not in request.node.name:
        monkeypatch.setattr(run_logger, "draw_plots", lambda folder: None)


def test_a_run_leaves_console_lines_metrics_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with run_log(folder) as log:
        log.train(RECORD)
        log.log(evaluation_metrics("valid", 2.75))
        log.log(evaluation_metrics("valid:wiki", 2.75))
        log.log(evaluation_metrics("test", 2.75))
        log.log({"health/grad-norm/layers.0": 0.5})
        log.note("stopped")
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(" 10/100 4.00K tok | loss 2.5000 ")
    assert out[1].startswith("validation at 0: loss 2.7500")
    assert out[4:] == ["stopped", f"loss curve: {folder}/loss.png", f"health of every layer: {folder}/health.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "health.png"))
    assert "step 10: skipped the update of step 7\n" in (folder / "incidents.md").read_text()
    start, train, validation, wiki, test, _, note = lines(folder)
    assert (start["event"], start["iteration"], start["world-size"]) == ("start", 0, 2)
    assert set(train) == (set(RECORD) - {MEMORY_CAPACITY}) | {
        *("time", "world-size", "throughput", "mfu", "mfu-causal", "hfu"),
    }
    assert (train["lm loss"], train["mfu"], train["throughput"] > 0) == (2.5, None, True)
    progress = {"iteration", "consumed-samples", "consumed-tokens", "time"}
    assert set(validation) == progress | {"lm loss validation", "lm loss validation ppl"}
    assert (wiki["validation-set"], wiki["lm loss validation"], test["lm loss test"]) == ("wiki", 2.75, 2.75)
    assert note["text"] == "stopped"
    assert all(line["time"] > 1.7e9 for line in (start, train, validation, note))
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    assert from_dict(tree).training.train_iters == 100


def test_metric_names_match_megatron_lm() -> None:
    """Dashboards depend on these; a change here breaks them."""
    assert METRICS.keys() >= {
        *("world-size", "learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "iteration-time"),
        *("throughput", "load_balancing_loss", "seq_load_balancing_loss", "z_loss", "mem-max-allocated-bytes"),
    }


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    with run_log(folder, enabled=False) as log:
        log.train(RECORD)
        log.log(evaluation_metrics("valid", 2.75))
        log.note("stopped")
    captured = capsys.readouterr()
    assert (captured.out, captured.err, folder.exists()) == ("", "", False)


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_console_on_a_full_disk_costs_the_run_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, FullDisk())
    with run_log(tmp_path) as log:
        log.train(RECORD)
        log.warning("look")
    assert [line.get("lm loss", line.get("text")) for line in lines(tmp_path)[1:]] == [2.5, "look"]


def test_a_reused_folder_is_continued_and_keeps_different_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_log(tmp_path) as log:
        log.train(RECORD)
    (tmp_path / "config.yaml").write_text("another")
    with run_log(tmp_path, iteration=10, consumed_samples=40) as log:
        log.note("again")
    assert [line.get("event") for line in lines(tmp_path)] == ["start", None, "start", "note", "note"]
    assert lines(tmp_path)[2]["consumed-tokens"] == 4000
    (message,) = [line for line in capsys.readouterr().out.splitlines() if "earlier start" in line]
    assert message.startswith(f"{tmp_path} holds an earlier start: metrics.jsonl is appended to")
    assert message.endswith("renamed to config.1.yaml")
    assert (tmp_path / "config.1.yaml").read_text() == "another"


def test_a_folder_that_cannot_be_made_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="E701"):
        run_log(tmp_path / "file" / "run")


def test_a_picture_that_cannot_be_drawn_is_a_warning_and_no_steps_need_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log(tmp_path / "a").close()
    assert (capsys.readouterr().err, (tmp_path / "a/loss.png").exists()) == ("", False)
    with run_log(tmp_path / "b") as log:
        log.train(RECORD)
        (tmp_path / "b/loss.png").mkdir()
    assert capsys.readouterr().err.startswith("warning: no plot was drawn: ")


def failing_run(folder: Path, act: Callable[[RunLogger], None]) -> None:
    """A run that does ``act`` and ends by an error, which is not hidden."""

    def fail() -> None:
        with run_log(folder) as log:
            act(log)
            raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"):
        fail()


def test_an_error_is_reported_after_the_steps_that_had_no_line_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(log: RunLogger) -> None:
        log.train(RECORD)
        log.stepped(13, 52, lambda: {**RECORD, "iteration": 13, "consumed-samples": 52, "consumed-tokens": 5200})

    failing_run(tmp_path, act)
    _, first, second, error = lines(tmp_path)
    assert (first["iteration"], second["iteration"]) == (10, 13)
    assert (error["event"], error["iteration"], error["consumed-tokens"]) == ("error", 13, 5200)
    assert error["text"] == "KeyError: 'cause'"
    assert " 13/100 " in capsys.readouterr().out


def test_a_step_is_reported_once_and_one_that_cannot_be_read_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def once(log: RunLogger) -> None:
        log.stepped(12, 48, lambda: RECORD)
        log.train(RECORD)

    def read() -> Metrics:
        raise RuntimeError("no device")

    failing_run(tmp_path / "once", once)
    assert [line.get("event") for line in lines(tmp_path / "once")] == ["start", None, "error"]
    failing_run(tmp_path / "lost", lambda log: log.stepped(12, 48, read))
    assert [line["event"] for line in lines(tmp_path / "lost")] == ["start", "error"]
    assert "the steps since the last log line are lost: no device" in capsys.readouterr().err


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
    log.note("not written")
    log.warning("not written either")
    log.stepped(13, 52, lambda: RECORD)
    with pytest.raises(SupersededError), log:
        log.train(RECORD)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_asks_rarely_whether_it_is_superseded_and_always_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [100.0], list[int]()
    monkeypatch.setattr(run_logger.time, "monotonic", lambda: now[0])
    log = run_log(tmp_path, check=lambda: asked.append(len(lines(tmp_path))))
    for _ in range(10):
        log.train(RECORD)
    assert asked == []
    now[0] += run_logger.SUPERSEDED_CHECK_SECONDS
    for _ in range(2):
        log.train(RECORD)
    assert asked == [11]
    log.__exit__(KeyError, KeyError("cause"), None)
    assert asked[1] == 13  # before the error is written


class Kept:
    """Keeps what it gets; raises, or waits for ``gate``, in the method called ``at``."""

    def __init__(self, at: str = "", gate: threading.Event | None = None) -> None:
        self.at, self.gate = at, gate
        self.calls: list[Any] = []

    def _called(self, name: str, value: object) -> None:
        if name == self.at:
            if self.gate is None:
                raise OSError(f"{name} does not work")
            self.gate.wait(10)
        self.calls.append((name, value))

    def log(self, step: int, metrics: Metrics) -> None:
        self._called("log", step)

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        self._called("event", kind)

    def flush(self) -> None:
        self._called("flush", None)

    def close(self) -> None:
        self._called("close", None)


EVERYTHING = [("log", 0), ("event", "note"), ("flush", None), ("log", 2), ("close", None)]


def use(log: RunLogger) -> None:
    log.log({})
    log.note("")
    log.flush()
    log.stepped(2, 2)
    log.log({})
    log.close()


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("warning: ") for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", ["make", "log", "event", "flush", "close"])
def test_a_logger_that_fails_costs_one_warning_and_the_others_get_everything(
    at: str, background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Kept()

    def bad() -> Kept:
        if at == "make":
            raise OSError("make does not work")
        return Kept(at)

    log = run_log()
    log.add("good", lambda: good, background=False)
    log.add("bad", bad, background)
    use(log)
    assert warnings(capsys) == [f"bad failed and receives no more data: {at} does not work; training continues"]
    assert [call for call in good.calls if call != ("event", "warning")] == EVERYTHING
    assert len(good.calls) == len(EVERYTHING) + 1  # the warning goes to the loggers that are left


def test_a_logger_that_fails_at_the_warning_of_another_costs_one_warning_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = run_log()
    for number, at in enumerate(("event", "log", "event", "close", "event")):
        log.add(f"{number}:{at}", lambda at=at: Kept(at), background=False)  # type: ignore[misc]
    log.log({})
    log.close()
    printed = [text.split()[0] for text in warnings(capsys)]
    assert sorted(printed) == ["0:event", "1:log", "2:event", "3:close", "4:event"]


class Mine:
    """A logger of a user's module, with the two methods that every logger has."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.seen, self.closed = config, list[Any](), False

    def log(self, step: int, metrics: Metrics) -> None:
        self.seen.append((step, metrics.get("lm loss", metrics.get("mine"))))

    def close(self) -> None:
        self.closed = True


def test_loggers_of_plugins_get_the_metrics_and_cost_at_most_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[Mine]()

    def mine(config: RunConfig) -> Mine:
        made.append(Mine(config))
        return made[-1]

    def broken(config: RunConfig) -> Mine:
        raise SystemExit  # of a library, which must not end the run

    monkeypatch.setitem(plugins._registered, "metric_logger", {"mine": mine, "broken": broken})
    run_log(enabled=False).close()
    assert made == []  # only the rank that reports makes them
    with run_log(tmp_path) as log:
        log.train(RECORD)
        log.log({"mine": 5.0})
        log.flush()
        log.note("nothing to it")
    assert (made[0].config.training.train_iters, made[0].seen) == (100, [(10, 2.5), (0, 5.0)])
    assert made[0].closed
    assert warnings(capsys) == ["broken failed and receives no more data: it raised SystemExit; training continues"]


def test_a_logger_that_hangs_delays_the_end_only_and_its_records_do_not_pile_up() -> None:
    gate = threading.Event()
    background = BackgroundLogger(lambda: Kept("log", gate), timeout=0.2, capacity=6)
    began = time.monotonic()
    for _ in range(2):
        background.call("log", 1, {})
        background.call("flush")
    assert time.monotonic() - began < 0.2
    with pytest.raises(TimeoutError, match=r"did not finish within 0 s"):
        background.call("close")
    background.call("log", 1, {})
    background.call("log", 1, {})
    with pytest.raises(TimeoutError, match="is 6 records behind"):
        background.call("log", 1, {})
    gate.set()


def test_only_numbers_are_tracked_and_validation_sets_are_named() -> None:
    values = {"lm loss": 2.5, "mfu": None, "text": "x", "skipped-iterations": [1, 2], "starts": 2, "flag": True}
    assert scalar_metrics(values) == {"lm loss": 2.5, "starts": 2}
    of_one = {"validation-set": "wiki", "lm loss validation": 2.0, "lm loss validation ppl": 7.4, "iteration": 3}
    assert scalar_metrics(of_one) == {
        "lm loss validation-wiki": 2.0,
        "lm loss validation-wiki ppl": 7.4,
        "iteration": 3,
    }


def test_an_error_fits_into_a_sentence() -> None:
    assert error_summary(ValueError("two\n  lines.\n")) == "two lines"
    assert error_summary(KeyboardInterrupt()) == "it raised KeyboardInterrupt"
    missing = ModuleNotFoundError("No module named 'wandb'", name="wandb")
    assert error_summary(missing) == "wandb is not installed: pip install 'megatron-pretrain[wandb]'"
    part = ModuleNotFoundError("No module named 'a.b'", name="a.b")
    assert error_summary(part) == "a.b is not installed: pip install a"
    assert error_summary(ModuleNotFoundError("no such codec")) == "no such codec"


def test_lines_fit_a_terminal_and_are_whole_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    for stream, longest in ((Terminal(), 40), (io.StringIO(), None)):
        monkeypatch.setattr(console.sys, "stdout", stream)
        run_log().train(RECORD)
        length = len(stream.getvalue().rstrip("\n"))
        assert length <= longest if longest else length > 80
