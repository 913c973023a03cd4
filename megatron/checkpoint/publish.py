"""Publish checkpoints atomically, on disk by renames, in an object store by the marker.

On disk, ``X.tmp`` is being written. ``X.replaced`` is the previous ``X`` until the new one is published. ``X.gone``
is being deleted. The first two are checkpoints if and only if they contain the marker; there is a valid one at every
moment. These paths lie in a staging folder: the one of the start that holds the lease (see
:mod:`megatron.checkpoint.lease`), or the checkpoint folder itself for tools that write without a lease. A published
name changes only by a rename out of or into the staging folder. So a start whose staging folder was taken away cannot
change anything, at any point. Each path may be a symbolic link, for example to a checkpoint of another run: it is
read through, but only the link is renamed or deleted.

In an object store nothing can be renamed. Every save uploads its files under a new unique name,
``iter_0000100/attempt-5f3a90c1d2e4/``. The marker ``iter_0000100/COMPLETE`` is written last, as one object: it names
the upload and holds the checksum of its manifest. Writing it publishes the checkpoint, and replaces an older one of
the same step, atomically.

All functions raise OSError if the disk fails, the staging folder is gone, or the store does not answer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.durable_files import durable_rename, make_folder, publish_file, sync_folder
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.format import FORMAT, MANIFEST, MARKER, Manifest, marker_content
from megatron.checkpoint.object_store import Location, RemotePath

STAGED_SUFFIX, REPLACED_SUFFIX, DELETED_SUFFIX = ".tmp", ".replaced", ".gone"

CHECKPOINT_NAME = re.compile(r"iter_(\d+)(\.tmp|\.replaced)?")
"""Names of checkpoints, published or not, with their iteration."""

LEFTOVER_NAME = re.compile(r"iter_\d+(?=\.)(\.tmp|\.replaced)?(\.gone)?")
"""Names of everything that an interrupted save or deletion leaves."""

AGE_ORDER = (REPLACED_SUFFIX, "", STAGED_SUFFIX)
"""Age order within an iteration: a staged complete checkpoint is newer than the published one, a replaced one older."""

STAGING_NAME = re.compile(r"\.epoch-(\d+)")
"""The name of a start's staging folder, with its epoch, a number that increases with every start."""


def staging_folder(folder: Path, epoch: int) -> Path:
    """Return the staging folder of a start."""
    return folder / f".epoch-{epoch}"


def staging_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return epoch and path of the staging folders directly in ``folder``, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((int(match[1]), folder / name) for name in names if (match := STAGING_NAME.fullmatch(name)))


def staged_entries(folder: Path) -> Iterator[Path]:
    """Yield all entries of the staging folders in ``folder``, including nested ones that were taken over."""
    for _, staging in staging_folders(folder):
        with suppress(FileNotFoundError):  # taken over by a concurrent start
            yield from sorted(path for path in staging.iterdir() if not STAGING_NAME.fullmatch(path.name))
            yield from staged_entries(staging)


def list_folders(folder: Location) -> list[Location]:
    """Return all folders in a folder of checkpoints, including those in staging folders."""
    if isinstance(folder, RemotePath):
        return [path for path in folder.folders() if path.suffix not in (STAGED_SUFFIX, REPLACED_SUFFIX)]
    if not folder.is_dir():
        return []
    return [path for path in (*folder.iterdir(), *staged_entries(folder)) if path.is_dir()]


def find_checkpoints(folder: Location) -> list[tuple[int, Location]]:
    """Return iteration and path of all folders named like checkpoints, newest first, without opening them."""
    found = [(int(match[1]), path) for path in list_folders(folder) if (match := CHECKPOINT_NAME.fullmatch(path.name))]
    return sorted(found, key=lambda item: (item[0], AGE_ORDER.index(item[1].suffix)), reverse=True)


def save_elsewhere_flags(folder: Location) -> str:
    """Return the flags that save elsewhere, and resume from the checkpoints in ``folder`` if one is valid."""
    with suppress(OSError):  # called after a disk error
        for _, path in find_checkpoints(folder):
            with suppress(CheckpointError):
                if path.suffix != STAGED_SUFFIX and Manifest.open(path):
                    return f"--load {folder} --save A_FOLDER_ELSEWHERE"
    return "--save A_FOLDER_ELSEWHERE"


def staged_path(final: Path, staging: Path | None = None) -> Path:
    """Return the path where the checkpoint ``final`` is written before it is published."""
    return (staging or final.parent) / (final.name + STAGED_SUFFIX)


def _replaced_path(final: Path, staging: Path | None) -> Path:
    """Return the path of the older checkpoint of the same name while it is being replaced."""
    return (staging or final.parent) / (final.name + REPLACED_SUFFIX)


def checkpoint_folder_of(path: Location) -> Location:
    """Return the checkpoint folder that ``path`` belongs to, even if it lies in a staging folder."""
    folder = path.parent
    while STAGING_NAME.fullmatch(folder.name):
        folder = folder.parent
    return folder


def is_complete(path: Location) -> bool:
    """Return True if a folder contains the marker."""
    return (path / MARKER).exists()


def create_staged(final: Path, staging: Path | None = None) -> Path:
    """Create an empty staging path for ``final``; StorageError if ``final`` exists and is not a checkpoint."""
    if staging is None:
        make_folder(final.parent)
    recover(final, staging)
    if not _is_replaceable(final):
        raise StorageError(
            f"{final} exists and is not a checkpoint of this program; no checkpoint was written",
            f"mv {final} {final}.other",
            "--save A_NEW_FOLDER",
        )
    os.mkdir(staged_path(final, staging))
    return staged_path(final, staging)


def write_marker(folder: Path, manifest: bytes) -> None:
    """Write the marker, which makes a folder a checkpoint."""
    publish_file(folder / MARKER, marker_content(manifest))  # a partly written marker must not count


def publish_staged(final: Path, staging: Path | None = None) -> None:
    """Rename the complete checkpoint that was staged for ``final``, and delete the one it replaces.

    After an OSError nothing is published.
    """
    built, old = staged_path(final, staging), _replaced_path(final, staging)
    if is_complete(final):
        delete_checkpoint(old, staging)
    if os.path.lexists(final) and os.path.lexists(old):  # the old one is complete, ``final`` is not
        delete_checkpoint(final, staging)
    elif os.path.lexists(final):
        os.rename(final, old)
    os.rename(built, final)
    try:
        sync_folder(final.parent)
    except OSError:
        os.rename(final, built)
        raise
    with suppress(OSError):  # published; the next recovery deletes what is left of the old one
        delete_checkpoint(old, staging)


def discard_staged(final: Path, staging: Path | None = None) -> None:
    """Clean up a failed save as far as possible: delete the staged checkpoint and restore the replaced one."""
    old = _replaced_path(final, staging)
    with suppress(OSError):
        if is_complete(old) and not os.path.lexists(final):
            os.rename(old, final)
    built = staged_path(final, staging)
    with suppress(OSError):  # the marker first, which invalidates the checkpoint; a rename may fail
        (built / MARKER).unlink(missing_ok=True)
        _delete(built)


def recover(final: Path, staging: Path | None = None) -> None:
    """Recover from a crash: publish a complete staged checkpoint, delete incomplete ones."""
    if not _is_replaceable(final):
        return
    built, old = staged_path(final, staging), _replaced_path(final, staging)
    for path in (built, final, old):
        _delete(_deletion_path(path, staging))
    if is_complete(built):
        publish_staged(final, staging)
    else:
        delete_checkpoint(built, staging)
    if is_complete(final):
        delete_checkpoint(old, staging)
    elif is_complete(old) and not os.path.lexists(final):
        durable_rename(old, final)


def is_interrupted(path: Location) -> bool:
    """Return True if ``path`` is named like a checkpoint but is the remainder of an interrupted save."""
    return (path.suffix == STAGED_SUFFIX or isinstance(path, RemotePath)) and not is_complete(path)


def delete_checkpoint(path: Location, staging: Path | None = None) -> None:
    """Delete a checkpoint or a remainder; renamed first, so that a crash never leaves a partial checkpoint.

    Of a symbolic link only the link is deleted. In a store the marker is deleted first.
    """
    if isinstance(path, RemotePath):
        (path / MARKER).remove()
        path.remove_all()
        return
    if not os.path.lexists(path):
        return
    doomed = _deletion_path(path, staging)
    _delete(doomed)
    os.rename(path, doomed)
    sync_folder(path.parent)
    _delete(doomed)


def _deletion_path(path: Path, staging: Path | None) -> Path:
    """Return the path of a folder or link while it is being deleted."""
    return (staging or path.parent) / (path.name + DELETED_SUFFIX)


def _delete(path: Path) -> None:
    """Delete a folder or a link if it exists."""
    if path.is_symlink():
        os.unlink(path)
    elif path.exists():
        shutil.rmtree(path)


def _is_replaceable(path: Path) -> bool:
    """Return True if ``path`` may be replaced: missing, a checkpoint or its remainder, empty, or a dangling link."""
    if is_complete(path) or not path.exists() or not any(path.iterdir()):
        return True
    with suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((path / MANIFEST).read_bytes()).get("format") == FORMAT)
    return False


UPLOAD_PREFIX = "attempt-"


def publish_upload(upload: RemotePath, manifest: bytes) -> None:
    """Write the manifest and the marker of a complete upload."""
    (upload / MANIFEST).write_bytes(manifest)
    (upload.parent / MARKER).write_bytes(marker_content(manifest, upload.name))


def discard_upload(upload: RemotePath) -> None:
    """Delete the files of a failed upload, as far as possible.

    Kept once it has a manifest: the marker may have been written by a request whose answer was lost.
    """
    with suppress(OSError):
        if not (upload / MANIFEST).exists():
            upload.remove_all()


def stale_uploads(path: RemotePath) -> list[RemotePath]:
    """Return interrupted and replaced uploads of a checkpoint, or its whole folder if it has no marker."""
    if not (path / MARKER).exists():
        return [path]
    try:
        inside = Manifest.read(path).inside
    except CheckpointError:  # damaged: the published upload is unknown
        return []
    return [folder for folder in path.folders() if folder.name.startswith(UPLOAD_PREFIX) and folder.name != inside]
