"""How a checkpoint comes and goes: built beside its place, named when whole, the one it replaces removed last.

``X.tmp`` is being built; ``X.replaced`` is what ``X`` replaces, until the new ``X`` has its name. Each of them is a
checkpoint exactly if it has the marker, and there is one at every moment. ``X.gone`` is being removed, and none.

All of them lie in a *workshop*: that of the start which holds the folder (see `lock`), or, of whoever writes a
checkpoint without holding anything, the folder itself. All that is done to a checkpoint with its name is a rename out
of the workshop or into it. So a start whose workshop was taken away changes nothing any more, wherever it was.

Each may be a symbolic link, as when a run was begun with the checkpoints of another: it is read through, but only the
link itself is ever moved or removed.

In an object store nothing of this can be done: see ``attempts``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint import attempts
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.files import make_folder, sync_folder, write_file
from megatron.checkpoint.manifest import FORMAT, MANIFEST, MARKER, marker
from megatron.checkpoint.remote import Location, RemotePath

BUILDING, OLD, GONE = ".tmp", ".replaced", ".gone"

PREFIX = ".epoch-"
WORKSHOP = re.compile(rf"{re.escape(PREFIX)}\d+")
"""The name of a start's workshop: the prefix and the number of the start."""


def building(final: Path, shop: Path | None = None) -> Path:
    """Where the checkpoint ``final`` is built."""
    return (shop or final.parent) / (final.name + BUILDING)


def set_aside(final: Path, shop: Path | None = None) -> Path:
    """Where the older checkpoint of the same name waits meanwhile."""
    return (shop or final.parent) / (final.name + OLD)


def home(path: Location) -> Location:
    """The folder whose checkpoint ``path`` is, be it still, or again, in a workshop."""
    folder = path.parent
    while WORKSHOP.fullmatch(folder.name):
        folder = folder.parent
    return folder


def is_complete(path: Location) -> bool:
    """Whether a folder has the marker."""
    return (path / MARKER).exists()


def begin(final: Path, shop: Path | None = None) -> Path:
    """Make an empty folder to build ``final`` in.

    Raises:
        OSError: when the disk refuses, or the workshop is gone.
        StorageError: when there is a folder of that name that is no checkpoint.
    """
    if shop is None:
        make_folder(final.parent)
    settle(final, shop)
    if _is_taken(final) and not _is_ours(final):
        raise StorageError(
            f"{final} exists and is not a checkpoint of this program; no checkpoint was written",
            f"mv {final} {final}.other",
            "--save A_NEW_FOLDER",
        )
    os.mkdir(building(final, shop))
    return building(final, shop)


def write_marker(folder: Path, manifest: bytes) -> None:
    """Say that a folder holds all that its manifest says.

    Raises:
        OSError: when the disk refuses.
    """
    write_file(folder / f"{MARKER}.part", marker(manifest))
    os.rename(folder / f"{MARKER}.part", folder / MARKER)  # half a marker must not be taken for one
    sync_folder(folder)


def publish(final: Path, shop: Path | None = None) -> None:
    """Give the complete checkpoint that was built for ``final`` its name; the one that had it goes.

    Raises:
        OSError: when the disk refuses; then nothing is published.
    """
    built, old = building(final, shop), set_aside(final, shop)
    if is_complete(final):
        remove(old, shop)
    if _is_taken(final) and _is_taken(old):  # the old one is complete, the one in the place is not
        remove(final, shop)
    elif _is_taken(final):
        os.rename(final, old)
    os.rename(built, final)
    try:
        sync_folder(final.parent)
    except OSError:
        os.rename(final, built)
        raise
    with suppress(OSError):  # the new one is safe; what is left of the old is removed by the next settle
        remove(old, shop)


def abandon(final: Path, shop: Path | None = None) -> None:
    """After a failed save: remove what was built, as far as the disk lets us, and put back what was set aside."""
    old = set_aside(final, shop)
    with suppress(OSError):
        if is_complete(old) and not _is_taken(final):
            os.rename(old, final)
    built = building(final, shop)
    with suppress(OSError):  # the marker first: what lacks it is no checkpoint; a disk may refuse to rename
        (built / MARKER).unlink(missing_ok=True)
        _delete(built)


def settle(final: Path, shop: Path | None = None) -> None:
    """Finish what a crash interrupted: publish what was complete, remove what was not.

    Raises:
        OSError: when the disk refuses.
    """
    if _is_taken(final) and not _is_ours(final):
        return
    built, old = building(final, shop), set_aside(final, shop)
    for path in (built, final, old):
        _delete(_going(path, shop))
    if is_complete(built):
        publish(final, shop)
    else:
        remove(built, shop)
    if is_complete(final):
        remove(old, shop)
    elif is_complete(old) and not _is_taken(final):
        os.rename(old, final)
        sync_folder(final.parent)


def is_cut_off(path: Location) -> bool:
    """Whether what is called like a checkpoint never was one: a save that was cut off has left it."""
    return (path.suffix == BUILDING or isinstance(path, RemotePath)) and not is_complete(path)


def remove(path: Location, shop: Path | None = None) -> None:
    """Delete a checkpoint, or what is left of one: its name first, so that a crash on the way leaves no half of it.

    Of a symbolic link the link itself.

    Raises:
        OSError: when the disk refuses.
    """
    if isinstance(path, RemotePath):
        attempts.remove(path)
        return
    if not _is_taken(path):
        return
    going = _going(path, shop)
    _delete(going)
    os.rename(path, going)
    sync_folder(path.parent)
    _delete(going)


def _going(path: Path, shop: Path | None) -> Path:
    """Where a folder or a link is while it is deleted."""
    return (shop or path.parent) / (path.name + GONE)


def _delete(path: Path) -> None:
    """Delete a folder or a link, if it is there."""
    if path.is_symlink():
        os.unlink(path)
    elif path.exists():
        shutil.rmtree(path)


def _is_taken(path: Path) -> bool:
    """Whether there is anything of this name, be it a link that leads nowhere."""
    return os.path.lexists(path)


def _is_ours(path: Path) -> bool:
    """Whether what is there may be replaced by a checkpoint: it is one, was one, is empty, or leads nowhere."""
    if is_complete(path) or not path.exists() or not any(path.iterdir()):
        return True
    with suppress(OSError, ValueError, AttributeError):
        return bool(json.loads((path / MANIFEST).read_bytes()).get("format") == FORMAT)
    return False
