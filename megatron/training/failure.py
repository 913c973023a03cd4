"""Describe the error that ends a run: in full for the console, in one line for the run's records."""

from __future__ import annotations

import re
import traceback

from megatron.checkpoint.errors import CheckpointError
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.parallel.mesh import is_lost_contact, leave_word, words_left
from megatron.training.nonfinite import NonFiniteError

MOST_OF_A_CAUSE = 60
"""Characters quoted from a library's error message."""


class StartRefusedError(Exception):
    """The flags or files do not allow a start; raised from a ``UserError`` or ``DataError``, with its text."""


EXPECTED = (StartRefusedError, UserError, DataError, CheckpointError, NonFiniteError)
"""Errors whose text is complete; others are printed with their traceback."""

LOST_CONTACT = (
    "lost contact with another rank: it was killed, ran out of memory, or did not respond within "
    "--distributed-timeout-minutes; see the launcher's output for the cause"
)

FIRST = "first failure"
"""Key under which the first rank to fail publishes its error."""


def explain(error: BaseException) -> str:
    """Return the text for the console; with a traceback if the error is unexpected."""
    if isinstance(error, EXPECTED):
        return str(error)
    if is_lost_contact(error):
        return f"{LOST_CONTACT}\n  {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def sentence(error: BaseException) -> str:
    """Return one line for the records; after lost contact, the error that the lost rank published if there is one."""
    if isinstance(error, EXPECTED):
        return str(error)
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))  # such as the failing pipeline action
    if not is_lost_contact(error):
        return f"{type(error).__name__}: {error}{notes}"
    return words_left([FIRST]).get(FIRST) or f"{LOST_CONTACT} ({_cause(str(error))}){notes}"


def leave_sentence(error: BaseException, rank: str) -> None:
    """Publish this rank's error so that other ranks can report the root cause."""
    leave_word(FIRST, f"{rank}: {sentence(error)}")


def _cause(text: str) -> str:
    """Return the last clause of the first line: ``[file:line] Read error [address]: Connection reset by peer``."""
    line = next(iter(text.strip().splitlines()), "no reason is given")
    clause = re.sub(r" ?\[[^]]*\](:\d+)?", "", line).split(". ")[0].split(": ")[-1].strip(" .:")
    return clause if len(clause) <= MOST_OF_A_CAUSE else f"{clause[:MOST_OF_A_CAUSE].rstrip()}..."
