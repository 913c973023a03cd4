from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron.config.errors import Problem, UserError
from megatron.training import failure_report
from megatron.training.failure_report import LOST_CONTACT, NonFiniteError, describe_error, explain_error, report_failure

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
def test_lost_contact_takes_one_line_in_the_records_and_the_full_text_on_the_console(text: str) -> None:
    error = RuntimeError(text)
    assert describe_error(error) == f"{LOST_CONTACT} ({LOST[text]})"
    assert explain_error(error) == f"{LOST_CONTACT}\n  {text}"


@pytest.mark.parametrize("text", ["", "NCCL error in: x.cpp:1, unhandled " + 100 * "y" + "\nLast error:\nz"])
def test_a_quoted_cause_is_short(text: str) -> None:
    printed = describe_error(dist.DistBackendError(text))
    assert printed.startswith(f"{LOST_CONTACT} (")
    assert len(printed) < len(LOST_CONTACT) + 70
    assert "\n" not in printed


def test_expected_errors_are_reported_with_their_own_text() -> None:
    for error in (UserError([Problem("E701", "the disk is gone")]), NonFiniteError("layers.3 came first")):
        assert describe_error(error) == explain_error(error) == str(error)


def test_records_name_the_pipeline_action_that_failed() -> None:
    error = ValueError("too hot")
    error.add_note("in the pipeline at 3F2")
    assert describe_error(error) == "ValueError: too hot, in the pipeline at 3F2"
    assert explain_error(error).endswith("ValueError: too hot\nin the pipeline at 3F2")
    lost = RuntimeError(next(iter(LOST)))
    lost.add_note("in the pipeline at 2B2")
    assert describe_error(lost) == f"{LOST_CONTACT} (Connection closed by peer), in the pipeline at 2B2"


def test_records_after_lost_contact_have_the_error_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict[str, str] = {}
    monkeypatch.setattr(failure_report, "publish_text", words.__setitem__)
    monkeypatch.setattr(
        failure_report, "read_texts", lambda names: {name: words[name] for name in names if name in words}
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    report_failure(ValueError("too hot"))
    assert describe_error(RuntimeError(next(iter(LOST)))) == "rank 1: ValueError: too hot"
    assert describe_error(KeyError("cause")) == "KeyError: 'cause'"


def test_records_of_a_bug_have_its_class_and_message() -> None:
    assert describe_error(KeyError("cause")) == "KeyError: 'cause'"
    assert explain_error(KeyError("cause")).startswith("KeyError: 'cause'")
