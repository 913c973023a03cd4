"""The real client of Weights & Biases and a server on this machine: killed runs, and a server that falls silent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.killed import run_in_process
from tests.runs import column, records
from tests.wandb_server import running

pytestmark = pytest.mark.slow

FLAGS = "--train-iters 12 --save {0}/saved --save-interval 4 --wandb-project tests --wandb-save-dir {0}"
AT_ONCE = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.2"}


@pytest.mark.parametrize("arrives", [True, False])
def test_the_server_gets_every_step_once(tmp_path: Path, arrives: bool) -> None:
    """Whether the steps before the kill have reached it or not."""
    flags = FLAGS.format(tmp_path)
    with running() as server:

        def reached() -> list[int]:
            return [row["_step"] for row in server.rows]

        variables = server.environment | {"HOME": str(tmp_path)}
        expected = [1, 2, 3, 4, 5, 6] if arrives else []
        at_once = AT_ONCE if arrives else {}
        killed = run_in_process(tmp_path / "run", flags, 7, lambda: reached() == expected, **variables, **at_once)
        assert (killed, reached()) == (-9, expected)
        assert run_in_process(tmp_path / "run", flags, **variables) == 0
        assert reached() == list(range(1, 13))
        assert server.finished
        losses = dict(zip(column(tmp_path / "run", "iteration"), column(tmp_path / "run", "lm loss")))
        assert {row["_step"]: row["lm loss"] for row in server.rows} == losses


def test_a_server_that_never_answers_costs_a_warning_and_less_than_a_minute(tmp_path: Path) -> None:
    with running() as server:
        server.silent.set()
        began = time.monotonic()
        variables = server.environment | {"HOME": str(tmp_path)}
        assert run_in_process(tmp_path / "run", FLAGS.format(tmp_path), **variables) == 0
    assert time.monotonic() - began < 75
    (warning,) = [record["text"] for record in records(tmp_path / "run", "text") if record["event"] == "warning"]
    assert warning.startswith("Weights & Biases gets no more of this run: ")
    assert column(tmp_path / "run", "iteration") == list(range(1, 13))


def test_a_server_that_falls_silent_costs_a_warning_and_less_than_a_minute(tmp_path: Path) -> None:
    with running() as server:
        variables = server.environment | {"HOME": str(tmp_path)}
        answer = server.answer

        def answer_first(query: str, found: dict[str, object]) -> dict[str, object]:
            if "CreateRunFiles" in query:
                server.silent.set()
            return answer(query, found)

        server.answer = answer_first  # type: ignore[method-assign]
        began = time.monotonic()
        assert run_in_process(tmp_path / "run", FLAGS.format(tmp_path), **variables) == 0
    assert server.silent.is_set()
    assert time.monotonic() - began < 75
    assert column(tmp_path / "run", "iteration") == list(range(1, 13))
    (warning,) = [record["text"] for record in records(tmp_path / "run", "text") if record["event"] == "warning"]
    assert warning.startswith("Weights & Biases gets no more of this run: ")
