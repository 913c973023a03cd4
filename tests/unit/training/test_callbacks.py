"""Callbacks of plugins: which hooks run when, on a paused clock, and how their errors are reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.checkpoint.location import Location
from megatron.config import plugins
from megatron.config.errors import Problem, UserError
from megatron.config.plugins import register
from megatron.training.callbacks.base import Callback
from megatron.training.component import Kinds
from megatron.training.loggers.base import Metrics
from megatron.training.metrics import StepMetrics
from tests.kit.runs import FLAGS, before_step, checkpoint, column, records, spoil_step, start, tiny_run

SAVING = "--save {}/saved --save-interval 4 --eval-interval 3 --eval-iters 1 --log-interval 2"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register into a table of this test's own."""
    monkeypatch.setitem(plugins._registered, "callback", {})


class Journal(Callback):
    """Writes down every call, as ``hook step``."""

    calls: list[str]

    def on_train_start(self) -> None:
        self._write("start")

    def on_step_start(self) -> None:
        self._write("step_start")

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._write("step_end")
        assert metrics.loss.item() > 0.0

    def on_log(self, metrics: Metrics) -> None:
        self._write("log")
        assert metrics["iteration"] == self.trainer.iteration

    def on_evaluate(self, metrics: Metrics) -> None:
        self._write("evaluate")

    def on_save(self, path: Location) -> None:
        self._write("save")
        assert path.name == f"iter_{self.trainer.iteration:07d}"

    def on_iteration_end(self) -> None:
        self._write("iteration_end")

    def on_stop(self, error: BaseException | None) -> None:
        self._write("stop" if error is None else f"stop {type(error).__name__}")

    def _write(self, hook: str) -> None:
        self.calls.append(f"{self.trainer.iteration} {hook}")


def journal(interval: int = 1) -> list[str]:
    """Register a journal; return the list in which its calls appear."""
    calls: list[str] = []
    attributes: dict[str, Any] = {"calls": calls, "interval": interval}
    register("callback", f"journal {interval}")(type("OneJournal", (Journal,), attributes))
    return calls


def test_hooks_run_in_the_order_of_the_loop(tmp_path: Path) -> None:
    calls, others = journal(), journal(interval=3)
    assert start(tiny_run(tmp_path, SAVING.format(tmp_path) + " --train-iters 4")).status == 0
    expected = "0 start, 0 step_start, 1 step_end, 1 iteration_end"
    expected += ", 1 step_start, 2 step_end, 2 log, 2 iteration_end"
    expected += ", 2 step_start, 3 step_end, 3 evaluate, 3 iteration_end"
    expected += ", 3 step_start, 4 step_end, 4 log, 4 evaluate, 4 evaluate, 4 save, 4 iteration_end, 4 stop"
    assert ", ".join(calls) == expected
    steps = [call for call in others if "step" in call or "iteration" in call]
    assert steps == ["2 step_start", "3 step_end", "3 iteration_end"]


def test_an_evaluation_alone_takes_no_step(tmp_path: Path) -> None:
    start(tiny_run(tmp_path, f"--save {tmp_path}/saved"))
    calls = journal()
    assert start(tiny_run(tmp_path, f"--load {tmp_path}/saved --skip-train --eval-iters 1")).status == 0
    assert calls == ["6 start", "6 evaluate", "6 evaluate", "6 stop"]


def test_every_callback_is_called_after_an_error(tmp_path: Path) -> None:
    calls = journal()

    @register("callback", "fragile")
    class Fragile(Callback):
        def on_stop(self, error: BaseException | None) -> None:
            raise OSError("nothing works any more")

    ran = start(tiny_run(tmp_path), before_step(3, spoil_step))
    assert ran.status == 1
    assert calls[-1] == "2 stop NonFiniteError"
    assert "warning: Fragile.on_stop failed" in ran.err
    assert "step 3 is not finite" in ran.err


@pytest.mark.parametrize("where", ["on_start", "the log", "other callbacks"])
def test_a_start_that_fails_before_the_loop_stops_callbacks_once(tmp_path: Path, where: str) -> None:
    calls, flags = journal(), ""

    @register("callback", "picky")
    class Picky(Callback):
        def on_start(self, stopped: Callable[[], bool]) -> Sequence[str]:
            if where == "on_start":
                raise UserError([Problem("E999", "no such thing")])
            return ()

    if where == "the log":
        (tmp_path / "metrics.jsonl").mkdir()
    elif where == "other callbacks":
        (tmp_path / "prompts.txt").write_text("a prompt, and no tokenizer")
        flags = f"--sample-prompts {tmp_path}/prompts.txt --eval-iters 1"
    ran = start(tiny_run(tmp_path, flags))
    assert (ran.status, calls) == (2, ["0 stop UserError"]), ran.err


@pytest.mark.parametrize("kind", ["exp_avg", "a.b"])
def test_kinds_of_tensors_are_words_that_no_other_component_uses(tmp_path: Path, kind: str) -> None:
    @register("callback", "greedy")
    class Greedy(Callback):
        def tensors(self) -> Kinds:
            return {kind: dict(self.trainer.optimizer.main_params)}

    ran = start(tiny_run(tmp_path, f"--save {tmp_path}/saved"))
    assert ran.status == 1
    assert f"the kind of tensors {kind!r} is not a word, or in use" in ran.err
    assert "callback greedy (--plugin), in tensors" in ran.err


def test_state_that_is_no_json_is_left_out_with_a_warning(tmp_path: Path) -> None:
    @register("callback", "odd")
    class Odd(Callback):
        def state_dict(self) -> dict[str, float]:
            return {"average": float("nan")}

    ran = start(tiny_run(tmp_path, f"--save {tmp_path}/saved"))
    assert ran.status == 0
    assert "warning: the state of the callback odd is not saved: Out of range float values" in ran.err
    assert "callback odd" not in checkpoint(tmp_path / "saved/iter_0000006")[1]


def test_a_callback_with_a_new_kind_of_tensors_starts_anew(tmp_path: Path) -> None:
    reset = []

    class Growing(Callback):
        kinds = ("first",)

        def tensors(self) -> Kinds:
            return {kind: dict(self.trainer.optimizer.main_params) for kind in self.kinds}

        def on_weights_loaded(self) -> None:
            reset.append(self.kinds)

    register("callback", "growing")(Growing)
    start(tiny_run(tmp_path, f"--save {tmp_path}/saved --exit-interval 3"))
    Growing.kinds = ("first", "second")
    ran = start(tiny_run(tmp_path, f"--save {tmp_path}/saved"))
    assert (ran.status, reset) == (0, [("first", "second")])
    assert "the checkpoint lacks tensors of the callback growing, which starts anew" in ran.out


def test_a_callback_changes_no_number_and_no_time(tmp_path: Path) -> None:
    start(tiny_run(tmp_path / "plain", "--eval-interval 3 --eval-iters 1"))

    @register("callback", "slow")
    class Slow(Callback):
        interval = 2

        def on_step_start(self) -> None:
            time.sleep(0.4)

        on_iteration_end = on_step_start

        def on_step_end(self, metrics: StepMetrics) -> None:
            time.sleep(0.4)

        def on_log(self, metrics: Metrics) -> None:
            time.sleep(0.4)

    start(tiny_run(tmp_path / "slow", "--eval-interval 3 --eval-iters 1"))
    assert column(tmp_path / "slow", "lm loss") == column(tmp_path / "plain", "lm loss")
    assert min(column(tmp_path / "slow", "iteration-time")[1::2]) < 0.4


def test_an_error_names_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @register("callback", "faulty")
    class Faulty(Callback):
        def on_step_end(self, metrics: StepMetrics) -> None:
            raise UserError([Problem("E999", "no such thing")])

    ran = start(tiny_run(tmp_path))
    assert ran.status == 1
    assert "E999 no such thing" in ran.err
    assert "callback faulty (--plugin), in on_step_end" in ran.err
    monkeypatch.setitem(plugins._registered, "callback", {"stranger": lambda trainer: object()})
    ran = start(tiny_run(tmp_path))
    assert ran.status == 1
    assert "callback stranger (--plugin), in its creation" in ran.err


PLUGIN = """
from megatron.config.plugins import register
from megatron.training.callbacks.base import Callback

@register("callback", "first")
class First(Callback):
    def __init__(self, trainer):
        super().__init__(trainer)
        self.seen = 0

    def on_step_end(self, metrics):
        self.seen += 1

    def on_stop(self, error):
        self.log.note(f"first has seen {self.seen} steps")

@register("callback", "second")
def second(trainer):
    return Second(trainer)

class Second(Callback):
    def on_stop(self, error):
        self.log.note("second comes second")
"""


def test_callbacks_of_a_plugin_are_called_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_callbacks_for_a_test.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = [*FLAGS.split(), "--run-dir", str(tmp_path / "run"), "--plugin", "my_callbacks_for_a_test"]
    assert pretrain_gpt.main(flags) == 0
    notes = [record["text"] for record in records(tmp_path / "run", "text")]
    assert notes[-2:] == ["first has seen 6 steps", "second comes second"]
