from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.config.problems import Problem, UserError
from megatron.training import failure
from megatron.training.failure import LOST_CONTACT, explain, leave_sentence, sentence
from megatron.training.nonfinite import NonFiniteError

LOST = {
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:20417": (
        "Connection closed by peer"
    ),
    "[x/gloo/transport/tcp/pair.cc:537] Read error [fe80::1]:51376: Connection reset by peer": (
        "Connection reset by peer"
    ),
    "[x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31130: Connection reset by peer. This is typically "
    "caused by a remote worker hanging. Check the logs.": "Connection reset by peer",
    "[x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete": (
        "Timed out waiting 1800000ms for recv operation to complete"
    ),
    "Application timeout caused pair closure": "Application timeout caused pair closure",
}


@pytest.mark.parametrize("text", LOST)
def test_records_tell_of_a_lost_rank_in_a_sentence_and_the_console_with_everything(text: str) -> None:
    error = RuntimeError(text)
    assert sentence(error) == f"{LOST_CONTACT} ({LOST[text]})"
    assert explain(error) == f"{LOST_CONTACT}\n  {text}"


@pytest.mark.parametrize("text", ["", "NCCL error in: x.cpp:1, unhandled " + 100 * "y" + "\nLast error:\nz"])
def test_a_clause_is_short_whatever_the_library_says(text: str) -> None:
    told = sentence(dist.DistBackendError(text))
    assert told.startswith(f"{LOST_CONTACT} (")
    assert len(told) < len(LOST_CONTACT) + 70
    assert "\n" not in told


def test_errors_that_speak_to_people_are_told_as_they_are() -> None:
    for error in (UserError([Problem("E701", "the disk is gone")]), NonFiniteError("layers.3 came first")):
        assert sentence(error) == explain(error) == str(error)


def test_records_tell_where_in_the_pipeline_it_happened() -> None:
    error = ValueError("too hot")
    error.add_note("in the pipeline at 3F2")
    assert sentence(error) == "ValueError: too hot, in the pipeline at 3F2"
    assert explain(error).endswith("ValueError: too hot\nin the pipeline at 3F2")
    lost = RuntimeError(next(iter(LOST)))
    lost.add_note("in the pipeline at 2B2")
    assert sentence(lost) == f"{LOST_CONTACT} (Connection closed by peer), in the pipeline at 2B2"


def test_records_of_who_lost_contact_tell_what_the_first_rank_failed_of(monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, str] = {}
    monkeypatch.setattr(failure, "leave_word", words.__setitem__)
    monkeypatch.setattr(failure, "words_left", lambda names: {name: words[name] for name in names if name in words})
    leave_sentence(ValueError("too hot"), "rank 1")
    assert sentence(RuntimeError(next(iter(LOST)))) == "rank 1: ValueError: too hot"
    assert sentence(KeyError("cause")) == "KeyError: 'cause'"


def test_of_a_bug_the_records_have_kind_and_words() -> None:
    assert sentence(KeyError("cause")) == "KeyError: 'cause'"
    assert explain(KeyError("cause")).startswith("KeyError: 'cause'")
