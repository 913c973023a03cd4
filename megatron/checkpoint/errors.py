"""Exceptions of the checkpoint package, by how a caller can recover.

Try an older checkpoint, wait for the store, update the program, or continue training without this save.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron.checkpoint.location import Location
from megatron.config.privacy import redact
from megatron.config.text import LONGEST_SENTENCE, clipped, listed


class CheckpointError(Exception):
    """A checkpoint is invalid or does not fit its use; the message gives the reason and a fix."""

    def __init__(self, summary: str, *fixes: str) -> None:
        text = clipped(summary, LONGEST_SENTENCE)
        super().__init__(redact(text + ("\n  fix: " + " | ".join(fixes) if fixes else "")))


MAX_NAMES = 8
"""Names listed in a message before the rest is counted."""


def describe_findings(findings: Mapping[str, Collection[str]]) -> str:
    """Return ``lacks: a, b; it holds: c`` for the predicates, such as ``lacks``, that apply to any name."""
    found = [f"{predicate}: {listed(sorted(names), MAX_NAMES)}" for predicate, names in findings.items() if names]
    return "; it ".join(found)


def raise_if_any(where: Location, findings: Mapping[str, Collection[str]], *fixes: str) -> None:
    """Raise CheckpointError if any of the findings on ``where``, a file or folder, has names."""
    if found := describe_findings(findings):
        raise CheckpointError(f"{where} {found}", *fixes)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is missing a file, truncated or corrupted; an older checkpoint may be used instead."""


class UnreachableError(CheckpointError):
    """An object store does not answer or denies access.

    Its checkpoints may be intact, so loading does not fall back to an older one.
    """


class NewerVersionError(CheckpointError):
    """A checkpoint was written in a newer format version than this program supports; it is not damaged."""


class StorageError(CheckpointError):
    """Writing a checkpoint failed. Nothing was published, and training can continue."""


class SupersededError(CheckpointError):
    """A later start of the run holds the checkpoint folder; this process must stop writing and exit."""


def read_error(path: Location, error: OSError, what: str = "") -> CheckpointError:
    """Return the error to raise for an unreadable checkpoint file: damage, or an unreachable object store."""
    summary = f"{path} cannot be read: {error.strerror}{what}"
    if isinstance(path, Path) or isinstance(error, FileNotFoundError):
        return DamagedCheckpointError(summary)
    if error.errno != errno.EIO:
        return UnreachableError(summary, "give this process the credentials that the store wants")
    return UnreachableError(summary, "start again when the store answers")


def strip_folder(folder: Location, problem: object) -> str:
    """Return the text of ``problem`` without a leading path, for messages that already name the checkpoint."""
    return re.sub(rf"^{re.escape(str(folder))}(/attempt-\w+)?(/|: | )", "", str(problem))


def is_disk_full(error: OSError) -> bool:
    """Return True if the error means that the disk or quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def describe_os_error(error: OSError) -> str:
    """Return the text of a disk error for messages."""
    return "the disk is full" if is_disk_full(error) else error.strerror or str(error)
