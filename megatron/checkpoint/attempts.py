"""Publish checkpoints in an object store, where objects cannot be renamed.

Every save uploads its files under a new unique name, ``iter_0000100/attempt-5f3a90c1d2e4/``. The marker
``iter_0000100/COMPLETE`` is written last, as one object: it names the upload and holds the checksum of its manifest.
Writing it publishes the checkpoint, and replaces an older one of the same step, atomically.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.manifest import MANIFEST, MARKER, Manifest, marker
from megatron.checkpoint.remote import RemotePath

ATTEMPT = "attempt-"


def new_upload(final: RemotePath) -> RemotePath:
    """Return a new unique folder for the files of the checkpoint ``final``."""
    return final / f"{ATTEMPT}{secrets.token_hex(6)}"


def publish_upload(upload: RemotePath, manifest: bytes) -> None:
    """Write the manifest and the marker of a complete upload.

    Raises:
        OSError: if the store fails or does not answer.
    """
    (upload / MANIFEST).write_bytes(manifest)
    (upload.parent / MARKER).write_bytes(marker(manifest, upload.name))


def discard_upload(upload: RemotePath) -> None:
    """Delete the files of a failed upload, as far as possible.

    Kept once it has a manifest: the marker may have been written by a request whose answer was lost.
    """
    with suppress(OSError):
        if not (upload / MANIFEST).exists():
            upload.remove_all()


def stale_uploads(path: RemotePath) -> list[RemotePath]:
    """Return interrupted and replaced uploads in the folder of a checkpoint, or the folder itself if it has no marker.

    Raises:
        OSError: if the store fails or does not answer.
    """
    if not (path / MARKER).exists():
        return [path]
    try:
        inside = Manifest.described(path).inside
    except CheckpointError:  # damaged: the published upload is unknown
        return []
    return [folder for folder in path.folders() if folder.name.startswith(ATTEMPT) and folder.name != inside]


def delete_remote(path: RemotePath) -> None:
    """Delete a checkpoint or a leftover; the marker first, so that an interruption leaves no checkpoint.

    Raises:
        OSError: if the store fails or does not answer.
    """
    (path / MARKER).remove()
    path.remove_all()
