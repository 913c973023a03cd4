from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.training.loggers.run_folder import RunHistory, read_history


def train(iteration: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "consumed-samples": 4 * iteration,
        "consumed-tokens": 40 * iteration,
        "lm loss": loss,
        "learning-rate": 1e-3,
        "batch-size": 4,
        "skipped-iterations": [],
        **more,
    }


def start(iteration: int) -> dict[str, Any]:
    return {"event": "start", "iteration": iteration, "consumed-tokens": 40 * iteration}


def validation(iteration: int, loss: float = 3.0) -> dict[str, Any]:
    return {"iteration": iteration, "consumed-tokens": 40 * iteration, "lm loss validation": loss}


def evaluation(iteration: int, kind: str, name: str = "", loss: float = 3.0) -> dict[str, Any]:
    of = {"validation-set": name} if name else {}
    return {"iteration": iteration, "consumed-tokens": 40 * iteration, f"lm loss {kind}": loss, **of}


def read(path: Path, *lines: dict[str, Any] | str) -> RunHistory:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return read_history(path)


def test_reads_what_a_run_wrote(tmp_path: Path) -> None:
    history = read(
        tmp_path / "m.jsonl",
        start(0),
        train(10),
        train(20, loss=None, **{"skipped-iterations": [18]}),
        validation(20),
        {"event": "note", "text": "hello"},
    )
    assert [point.iteration for point in history.train] == [10, 20]
    assert math.isnan(history.train[1].loss)
    assert history.train[1].skipped == (18 * 40,)
    assert (history.train[0].learning_rate, history.train[0].batch_size) == (1e-3, 4)
    assert (history.train[0].tokens, history.train[0].last_step_from) == (400, 360)
    assert [(point.tokens, point.loss) for point in history.evaluations] == [(800, 3.0)]
    assert (history.restarts, history.unreadable) == ([], [])


def test_a_restart_throws_later_steps_away(tmp_path: Path) -> None:
    history = read(
        tmp_path / "m.jsonl",
        *(start(0), train(10), validation(10), train(20), validation(20), train(30)),
        *(start(20), train(25), start(10), train(20, loss=1.5)),
    )
    assert [(point.iteration, point.loss) for point in history.train] == [(10, 2.0), (20, 1.5)]
    assert [point.iteration for point in history.evaluations] == [10]
    assert history.restarts == [400]


def test_evaluations_on_several_sets(tmp_path: Path) -> None:
    """Also where a run was killed between two of them after a step that was saved, and does both again."""
    first = (start(0), train(10), evaluation(10, "validation", "wiki", 3.5))
    again = (start(10), evaluation(10, "validation", "wiki"), evaluation(10, "validation", "code"))
    history = read(tmp_path / "m.jsonl", *first, *again, evaluation(10, "test", loss=4.0), evaluation(20, "validation"))
    assert [(point.name, point.iteration, point.loss) for point in history.evaluations] == [
        ("validation wiki", 10, 3.0),
        ("validation code", 10, 3.0),
        ("test", 10, 4.0),
        ("validation", 20, 3.0),
    ]


def test_a_run_from_the_start_in_the_same_folder_is_no_restart(tmp_path: Path) -> None:
    history = read(tmp_path / "m.jsonl", start(0), train(10), start(0), train(5))
    assert [point.iteration for point in history.train] == [5]
    assert history.restarts == []


def test_errors_after_a_restart_are_thrown_away(tmp_path: Path) -> None:
    def error(iteration: int) -> dict[str, Any]:
        return {"event": "error", "iteration": iteration, "consumed-tokens": 40 * iteration, "text": "E: x"}

    failed = (start(0), train(10), error(10), start(10), train(20), error(20), start(15), train(20), error(25))
    history = read(tmp_path / "m.jsonl", *failed)
    assert (history.errors, history.restarts, history.unreadable) == ([400, 1000], [400, 600], [])


@pytest.mark.parametrize("bad", ['{"iterat', "[1]", "7", "", '{"lm loss": 1}', '{"event": "start"}', "\ufffd"])
def test_lines_that_make_no_sense_are_counted(tmp_path: Path, bad: str) -> None:
    history = read(tmp_path / "m.jsonl", train(10), bad, train(20))
    assert len(history.train) == 2
    assert history.unreadable == [2]


def test_zero_samples_make_no_sense(tmp_path: Path) -> None:
    assert read(tmp_path / "m.jsonl", train(10), train(0)).unreadable == [2]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no log line"),
        (json.dumps(start(0)) + "\n", "holds no log line"),
        ("not\njson\n", "2 lines could not be read"),
    ],
)
def test_nothing_to_draw(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_history(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"m\.jsonl does not exist"):
        read_history(tmp_path / "m.jsonl")
