"""What a person is told of an error that ends a run: on the console, and in one line of its records."""

from __future__ import annotations

import re
import traceback

from megatron.checkpoint.errors import CheckpointError
from megatron.config.problems import UserError
from megatron.data.errors import DataError
from megatron.parallel.mesh import is_lost_contact, leave_word, words_left
from megatron.training.nonfinite import NonFiniteError

MOST_OF_A_CAUSE = 60
"""Characters of a library's words that a sentence of ours takes over."""


class StartRefusedError(Exception):
    """What was asked for cannot begin: the text of the error that says why, which is its cause."""


EXPECTED = (StartRefusedError, UserError, DataError, CheckpointError, NonFiniteError)
"""Errors whose text says all there is to say; others come with their traceback."""

LOST_CONTACT = (
    "another rank ended without a word (killed, out of memory), or did not answer within "
    "--distributed-timeout-minutes; the launcher may know which"
)

FIRST = "first failure"
"""The word under which the first rank to fail leaves, for the others, what it fails of."""


def explain(error: BaseException) -> str:
    """All there is to say, for the console: of a bug, its traceback."""
    if isinstance(error, EXPECTED):
        return str(error)
    if is_lost_contact(error):
        return f"{LOST_CONTACT}\n  {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def sentence(error: BaseException) -> str:
    """The same in short, for the records: no traceback, and of a lost rank what it, or torch.distributed, said last."""
    if isinstance(error, EXPECTED):
        return str(error)
    if not is_lost_contact(error):
        return f"{type(error).__name__}: {error}{_where(error)}"
    return words_left([FIRST]).get(FIRST) or f"{LOST_CONTACT} ({_cause(str(error))}){_where(error)}"


def leave_sentence(error: BaseException, whose: str) -> None:
    """Let the other ranks know what a rank fails of, lest their records tell only that contact was lost."""
    leave_word(FIRST, f"{whose}: {sentence(error)}")


def _where(error: BaseException) -> str:
    """The notes on an error, such as the pipeline's action that raised it."""
    return "".join(f", {note}" for note in getattr(error, "__notes__", ()))


def _cause(text: str) -> str:
    """The last clause of the first line: ``[file:line] Read error [address]: Connection reset by peer``."""
    line = next(iter(text.strip().splitlines()), "no reason is given")
    clause = re.sub(r" ?\[[^]]*\](:\d+)?", "", line).split(". ")[0].split(": ")[-1].strip(" .:")
    return clause if len(clause) <= MOST_OF_A_CAUSE else f"{clause[:MOST_OF_A_CAUSE].rstrip()}..."
