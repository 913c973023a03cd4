"""How a checkpoint comes and goes in an object store, where nothing can be renamed or replaced piece by piece.

Every attempt to save puts its files under a name that no other ever has, ``iter_0000100/attempt-5f3a90c1d2e4/``. The
marker ``iter_0000100/COMPLETE`` is put last, as one object: it names the attempt and proves its manifest. Without it
there is no checkpoint; a new one of the same step takes its place in that moment.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.manifest import MANIFEST, MARKER, Manifest, marker
from megatron.checkpoint.remote import RemotePath

ATTEMPT = "attempt-"


def begin(final: RemotePath) -> RemotePath:
    """Where the files of a new attempt to save the checkpoint ``final`` go."""
    return final / f"{ATTEMPT}{secrets.token_hex(6)}"


def publish(attempt: RemotePath, manifest: bytes) -> None:
    """Make an attempt whose files are all there the checkpoint.

    Raises:
        OSError: when the store refuses or does not answer.
    """
    (attempt / MANIFEST).write_bytes(manifest)
    (attempt.parent / MARKER).write_bytes(marker(manifest, attempt.name))


def abandon(attempt: RemotePath) -> None:
    """After a failed save: remove what was uploaded, as far as the store lets us.

    Not once it has a manifest: the marker may have been put nevertheless, by a request whose answer was lost.
    """
    with suppress(OSError):
        if not (attempt / MANIFEST).exists():
            attempt.remove_all()


def leftovers(path: RemotePath) -> list[RemotePath]:
    """What of the place of a checkpoint belongs to none: attempts that were cut off or replaced.

    Raises:
        OSError: when the store does not say.
    """
    if not (path / MARKER).exists():
        return [path]
    try:
        inside = Manifest.described(path).inside
    except CheckpointError:  # damaged: nobody knows which attempt it was
        return []
    return [folder for folder in path.folders() if folder.name.startswith(ATTEMPT) and folder.name != inside]


def remove(path: RemotePath) -> None:
    """Delete a checkpoint or a leftover; the marker first, so that what is left on the way is no checkpoint.

    Raises:
        OSError: when the store refuses or does not answer.
    """
    (path / MARKER).remove()
    path.remove_all()
