from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.run import LoggingConfig
from megatron.training.loggers import wandb
from megatron.training.loggers.base import LoggerOpenError
from megatron.training.loggers.wandb import (
    JournalContent,
    WandbJournal,
    WandbLogger,
    journal_path,
    missing_journal_notes,
)


class Client:
    """A wandb with one run. What is logged is lost in a crash unless it is kept before, as in the real one."""

    def __init__(self, offline: bool) -> None:
        self.offline = offline
        self.kept: list[tuple[int, dict[str, Any]]] = []
        self.waiting: list[tuple[int, dict[str, Any]]] = []
        self.asked: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.url, self.dir, self.id, self.disabled, self.exit_code = "URL", "DIR", "run12345", False, None

    @property
    def starting_step(self) -> int:
        return 0 if self.offline else self.last_step() + 1

    def last_step(self, *arguments: object) -> int:
        return max((step for step, _ in self.kept), default=-1)

    def init(self, **asked: Any) -> Client:
        self.asked = asked
        return self

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        assert commit
        self.waiting.append((step, row))

    def crash(self, kept: int) -> None:
        """Only the first ``kept`` of the rows that wait have arrived."""
        self.kept += self.waiting[:kept]
        self.waiting = []

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.crash(len(self.waiting))


class Both:
    """The journal, and the client, if it could be opened."""

    def __init__(self, journal: WandbJournal, client: WandbLogger | None) -> None:
        self.journal, self.client = journal, client

    def log(self, values: dict[str, Any]) -> None:
        step, metrics = values["iteration"], {name: x for name, x in values.items() if name != "iteration"}
        self.journal.log(step, metrics)
        if self.client is not None:
            self.client.log(step, metrics)

    def close(self) -> None:
        self.journal.close()
        if self.client is not None:
            self.client.close()


def sink(client: Client, folder: Path, iteration: int = 0, down: bool = False, **options: Any) -> Both:
    options = {"wandb_project": "p", "wandb_save_dir": str(folder), **options}
    module = SimpleNamespace(init=client.init, Settings=lambda **settings: settings)
    on_disk = patch.object(wandb, "last_step_on_disk", client.last_step)
    journal = WandbJournal(folder / "journal.jsonl", iteration, pytest.fail)
    if down:
        return Both(journal, None)
    with patch.dict(sys.modules, wandb=module), on_disk:
        return Both(
            journal,
            WandbLogger(LoggingConfig(**options), {"a": 1}, "run12345", iteration, journal.past, lambda text: None),
        )


def step(number: int) -> dict[str, Any]:
    return {
        "iteration": number,
        "consumed-samples": 4 * number,
        "lm loss": number / 2,
        "skipped-iterations": [],
        "skipped-iterations-count": 0,
        "time": 1,
    }


def evaluation(number: int) -> dict[str, Any]:
    return {"iteration": number, "consumed-samples": 4 * number, "lm loss validation": float(number)}


def test_a_step_and_its_evaluation_are_one_row(tmp_path: Path) -> None:
    client = Client(offline=True)
    run = sink(client, tmp_path)
    for values in (step(1), step(2), evaluation(2), step(3)):
        run.log(values)
    run.close()
    assert [number for number, _ in client.kept] == [1, 2, 3]
    assert client.kept[1][1] == {
        "consumed-samples": 8,
        "samples vs steps": 8,
        "lm loss": 1.0,
        "lm loss validation": 2.0,
        "skipped-iterations-count": 0,
        "restarts": 0,
    }
    assert client.exit_code == 0


def test_the_run_is_asked_for_by_its_name(tmp_path: Path) -> None:
    client = Client(offline=True)
    sink(client, tmp_path, run_dir="runs/mine", wandb_entity="us").close()
    asked = {key: client.asked[key] for key in ("project", "entity", "name", "id", "resume", "config")}
    assert asked == {
        "project": "p",
        "entity": "us",
        "name": "mine",
        "id": "run12345",
        "resume": "allow",
        "config": {"a": 1},
    }
    assert client.exit_code == 0


KILLS = st.lists(st.tuples(st.integers(1, 24), st.integers(0, 30), st.booleans()), max_size=5)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(kills=KILLS, offline=st.booleans(), log_every=st.integers(1, 3), save_every=st.integers(1, 7))
def test_a_run_that_is_killed_again_and_again_leaves_every_step_once(
    kills: list[tuple[int, int, bool]], offline: bool, log_every: int, save_every: int
) -> None:
    """Whenever it is killed, whatever has arrived by then, wherever it goes on; also with no server."""
    client, saved, total = Client(offline), 0, 24
    with TemporaryDirectory() as folder:
        for steps, arrived, down in [*kills, (total, total, False)]:
            run, begin = sink(client, Path(folder), saved, down), saved
            for number in range(begin + 1, min(begin + steps, total) + 1):
                if number % log_every == 0 or number == total:
                    run.log(step(number))
                    run.log(evaluation(number))
                saved = number if number % save_every == 0 else saved
            client.crash(arrived)
        run.close()
    expected = sorted({*range(log_every, total + 1, log_every), total})
    assert [number for number, _ in client.kept] == expected
    assert all(row["lm loss"] == number / 2 and row["lm loss validation"] == number for number, row in client.kept)


def test_an_evaluation_put_off_by_a_signal_goes_into_the_next_row(tmp_path: Path) -> None:
    client = Client(offline=True)
    first = sink(client, tmp_path)
    first.log(step(1))
    first.close()
    second = sink(client, tmp_path, 1)
    for values in (evaluation(1), step(2)):
        second.log(values)
    second.close()
    assert [(number, row.get("lm loss validation")) for number, row in client.kept] == [(1, None), (2, 1.0)]
    assert client.kept[1][1]["restarts"] == 1


def test_a_run_taken_back_says_from_where_on_it_reports(tmp_path: Path) -> None:
    client, message = Client(offline=False), list[str]()
    first = sink(client, tmp_path)
    for number in (1, 2, 3):
        first.log(step(number))
    first.close()
    with patch.object(
        WandbLogger, "_print_location", lambda run, say: message.append((run._last_reported, run._first_step))
    ):
        sink(client, tmp_path, 1)
    assert message == [(3, 1)]


def test_steps_that_are_taken_again_are_reported_as_they_are_taken_now(tmp_path: Path) -> None:
    """A start hands over what came before it, and nothing of what it is about to do anew."""
    client = Client(offline=False)
    first = sink(client, tmp_path)
    for number in (1, 2, 3):
        first.log(step(number))
    client.crash(0)
    second = sink(client, tmp_path, 2)
    for number in (3, 4):
        second.log(step(number) | {"lm loss": 9.0})
    second.close()
    assert [(number, row["lm loss"]) for number, row in client.kept] == [(1, 0.5), (2, 1.0), (3, 9.0), (4, 9.0)]


def test_the_error_of_a_start_is_not_that_of_the_next(tmp_path: Path) -> None:
    client = Client(offline=False)
    first = sink(client, tmp_path).client
    assert first is not None
    assert client.summary == {}
    first.event(3, "error", {"text": "no more of this"})
    assert client.summary == {"error": "no more of this"}
    first.close()
    assert client.exit_code == 1
    sink(client, tmp_path)
    assert client.summary == {"error": ""}


def test_a_journal_that_is_elsewhere_is_missed(tmp_path: Path) -> None:
    here, elsewhere = (LoggingConfig(wandb_project="p", run_dir=str(tmp_path / name)) for name in "ab")
    WandbJournal(journal_path(here, "run12345"), 0, pytest.fail).close()
    assert missing_journal_notes(here, "run12345") == []
    assert missing_journal_notes(elsewhere, "") == []  # it begins
    assert missing_journal_notes(LoggingConfig(run_dir="b"), "run12345") == []  # nobody asks for it
    (note,) = missing_journal_notes(elsewhere, "run12345")
    assert note.startswith(f"Weights & Biases: {tmp_path}/b/wandb has no journal of this run, run12345. ")


def test_files_that_cannot_be_read_count_as_whole(tmp_path: Path) -> None:
    client = Client(offline=True)
    first = sink(client, tmp_path)
    first.log(step(1))
    first.log(step(2))
    client.crash(0)
    with patch.object(client, "last_step", side_effect=ValueError):
        second = sink(client, tmp_path, 1)
    second.log(step(2))
    second.log(step(3))
    second.close()
    assert [number for number, _ in client.kept] == [3]


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    options = LoggingConfig(wandb_project="p", wandb_save_dir=str(tmp_path))
    with (
        patch.dict(sys.modules, wandb=None),
        pytest.raises(LoggerOpenError, match=r"pip install wandb; .*/journal-run12345"),
    ):
        WandbLogger(options, {}, "run12345", 0, JournalContent(), lambda text: None)


def test_a_run_taken_back_is_told_from_where_on_it_reports_and_how_its_files_are_sent() -> None:
    run, printed = object.__new__(WandbLogger), list[str]()
    run._run = SimpleNamespace(
        disabled=False, offline=True, dir="/a b/wandb/offline-run-1-run12345/files", id="run12345"
    )
    run._first_step, run._last_reported = 20, 60
    run._print_location(printed.append)
    assert printed == [
        "Weights & Biases: offline; send all starts with: wandb sync '/a b/wandb'/offline-run-*-run12345",
        "Weights & Biases has this run up to step 60 and continues there from step 61",
    ]
