from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.loggers.wandb import JournalContent, WandbJournal, read_journal


def test_a_journal_tells_of_the_starts_before(tmp_path: Path) -> None:
    path = tmp_path / "wandb/journal.jsonl"
    first = WandbJournal(path, 0, pytest.fail)
    first.log(1, {"lm loss": 2.5, "text": "x", "time": 1.0})
    first.log(1, {"lm loss validation": 3.0})
    first.close()
    second = WandbJournal(path, 1, pytest.fail)
    assert first.past == JournalContent()
    assert second.past == JournalContent(1, {1: {"lm loss": 2.5, "lm loss validation": 3.0}})
    second.close()
    assert read_journal(path) == JournalContent(2, second.past.rows)


def test_a_journal_that_a_crash_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(
        b'{"start": 0}\n\xc3\x00\n[1]\n{}\n{"iteration": 1, "a": 1}\n{"iteration": 2, "a": 2, "b": 2}\n{"start": 1}\n'
        b'{"iteration": 1, "d": 4}\n{"iteration": 2, "a": 3}\n{"iteration": 2, "c": null, "time": 5}\n{"iterat'
    )
    assert read_journal(path) == JournalContent(2, {1: {"a": 1, "d": 4}, 2: {"a": 3}})
