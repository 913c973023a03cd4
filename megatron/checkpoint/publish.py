"""Publish checkpoints on disk atomically: write to a staging path, rename when complete, then delete the replaced one.

``X.tmp`` is being written. ``X.replaced`` is the previous ``X`` until the new one is published. ``X.gone`` is being
deleted. The first two are checkpoints if and only if they contain the marker; there is a valid one at every moment.

These paths lie in a staging folder: the one of the start that holds the lease (see :mod:`megatron.checkpoint.folder`),
or the checkpoint folder itself for tools that write without a lease. A published name changes only by a rename out of
or into the staging folder. So a start whose staging folder was taken away cannot change anything, at any point.

Each path may be a symbolic link, for example to a checkpoint of another run: it is read through, but only the link is
renamed or deleted.

Object stores cannot rename: see :mod:`megatron.checkpoint.attempts`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.attempts import delete_remote
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.files import make_folder, sync_folder, write_file
from megatron.checkpoint.manifest import FORMAT, MANIFEST, MARKER, marker
from megatron.checkpoint.remote import Location, RemotePath

BUILDING, OLD, GONE = ".tmp", ".replaced", ".gone"

PREFIX = ".epoch-"
WORKSHOP = re.compile(rf"{re.escape(PREFIX)}\d+")
"""The name of a start's staging folder: the prefix and the epoch, a number that increases with every start."""


def building(final: Path, staging: Path | None = None) -> Path:
    """Return the path where the checkpoint ``final`` is written before it is published."""
    return (staging or final.parent) / (final.name + BUILDING)


def set_aside(final: Path, staging: Path | None = None) -> Path:
    """Return the path of the older checkpoint of the same name while it is being replaced."""
    return (staging or final.parent) / (final.name + OLD)


def home(path: Location) -> Location:
    """Return the checkpoint folder that ``path`` belongs to, even if it lies in a staging folder."""
    folder = path.parent
    while WORKSHOP.fullmatch(folder.name):
        folder = folder.parent
    return folder


def is_complete(path: Location) -> bool:
    """Return True if a folder contains the marker."""
    return (path / MARKER).exists()


def begin(final: Path, staging: Path | None = None) -> Path:
    """Create an empty staging path for ``final``.

    Raises:
        OSError: if the disk fails or the staging folder is gone.
        StorageError: if ``final`` exists and is not a checkpoint.
    """
    if staging is None:
        make_folder(final.parent)
    settle(final, staging)
    if _exists(final) and not _is_replaceable(final):
        raise StorageError(
            f"{final} exists and is not a checkpoint of this program; no checkpoint was written",
            f"mv {final} {final}.other",
            "--save A_NEW_FOLDER",
        )
    os.mkdir(building(final, staging))
    return building(final, staging)


def write_marker(folder: Path, manifest: bytes) -> None:
    """Write the marker, which makes a folder a checkpoint.

    Raises:
        OSError: if the disk fails.
    """
    write_file(folder / f"{MARKER}.part", marker(manifest))
    os.rename(folder / f"{MARKER}.part", folder / MARKER)  # a partly written marker must not count
    sync_folder(folder)


def publish(final: Path, staging: Path | None = None) -> None:
    """Rename the complete checkpoint that was staged for ``final``, and delete the one it replaces.

    Raises:
        OSError: if the disk fails; then nothing is published.
    """
    built, old = building(final, staging), set_aside(final, staging)
    if is_complete(final):
        remove(old, staging)
    if _exists(final) and _exists(old):  # the old one is complete, ``final`` is not
        remove(final, staging)
    elif _exists(final):
        os.rename(final, old)
    os.rename(built, final)
    try:
        sync_folder(final.parent)
    except OSError:
        os.rename(final, built)
        raise
    with suppress(OSError):  # published; the next recovery deletes what is left of the old one
        remove(old, staging)


def abandon(final: Path, staging: Path | None = None) -> None:
    """Clean up a failed save as far as possible: delete the staged checkpoint and restore the replaced one."""
    old = set_aside(final, staging)
    with suppress(OSError):
        if is_complete(old) and not _exists(final):
            os.rename(old, final)
    built = building(final, staging)
    with suppress(OSError):  # the marker first, which invalidates the checkpoint; a rename may fail
        (built / MARKER).unlink(missing_ok=True)
        _delete(built)


def settle(final: Path, staging: Path | None = None) -> None:
    """Recover from a crash: publish a complete staged checkpoint, delete incomplete ones.

    Raises:
        OSError: if the disk fails.
    """
    if _exists(final) and not _is_replaceable(final):
        return
    built, old = building(final, staging), set_aside(final, staging)
    for path in (built, final, old):
        _delete(_deletion_path(path, staging))
    if is_complete(built):
        publish(final, staging)
    else:
        remove(built, staging)
    if is_complete(final):
        remove(old, staging)
    elif is_complete(old) and not _exists(final):
        os.rename(old, final)
        sync_folder(final.parent)


def is_cut_off(path: Location) -> bool:
    """Return True if ``path`` is named like a checkpoint but is the remainder of an interrupted save."""
    return (path.suffix == BUILDING or isinstance(path, RemotePath)) and not is_complete(path)


def remove(path: Location, staging: Path | None = None) -> None:
    """Delete a checkpoint or a remainder; renamed first, so that a crash never leaves a partial checkpoint.

    Of a symbolic link only the link is deleted.

    Raises:
        OSError: if the disk fails.
    """
    if isinstance(path, RemotePath):
        delete_remote(path)
        return
    if not _exists(path):
        return
    doomed = _deletion_path(path, staging)
    _delete(doomed)
    os.rename(path, doomed)
    sync_folder(path.parent)
    _delete(doomed)


def _deletion_path(path: Path, staging: Path | None) -> Path:
    """Return the path of a folder or link while it is being deleted."""
    return (staging or path.parent) / (path.name + GONE)


def _delete(path: Path) -> None:
    """Delete a folder or a link if it exists."""
    if path.is_symlink():
        os.unlink(path)
    elif path.exists():
        shutil.rmtree(path)


def _exists(path: Path) -> bool:
    """Return True if the path exists, even as a dangling link."""
    return os.path.lexists(path)


def _is_replaceable(path: Path) -> bool:
    """Return True if ``path`` may be replaced: a checkpoint or its remainder, an empty folder, or a dangling link."""
    if is_complete(path) or not path.exists() or not any(path.iterdir()):
        return True
    with suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((path / MANIFEST).read_bytes()).get("format") == FORMAT)
    return False
