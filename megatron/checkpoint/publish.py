"""How a checkpoint comes and goes: built beside its place, named when whole, the one it replaces removed last.

``X.tmp`` is being built (or removed); ``X.replaced`` is what ``X`` replaces, until the new ``X`` has its name. Each of
them is a checkpoint exactly if it has the marker, and there is one at every moment.

Each may be a symbolic link, as when a run was begun with the checkpoints of another: it is read through, but only the
link itself is ever moved or removed.

In an object store nothing of this can be done: see ``attempts``.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint import attempts
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.files import make_folder, sync_folder, write_file
from megatron.checkpoint.manifest import FORMAT, MANIFEST, MARKER, marker
from megatron.checkpoint.remote import Location, RemotePath

BUILDING, OLD = ".tmp", ".replaced"


def building(final: Path) -> Path:
    """Where the checkpoint ``final`` is built."""
    return final.with_name(final.name + BUILDING)


def set_aside(final: Path) -> Path:
    """Where the older checkpoint of the same name waits meanwhile."""
    return final.with_name(final.name + OLD)


def is_complete(path: Location) -> bool:
    """Whether a folder has the marker."""
    return (path / MARKER).exists()


def begin(final: Path) -> Path:
    """Make an empty folder to build ``final`` in.

    Raises:
        OSError: when the disk refuses.
        StorageError: when there is a folder of that name that is no checkpoint.
    """
    make_folder(final.parent)
    settle(final)
    if _is_taken(final) and not _is_ours(final):
        raise StorageError(
            f"{final} exists and is not a checkpoint of this program; no checkpoint was written",
            f"mv {final} {final}.other",
            "--save A_NEW_FOLDER",
        )
    os.mkdir(building(final))
    return building(final)


def write_marker(folder: Path, manifest: bytes) -> None:
    """Say that a folder holds all that its manifest says.

    Raises:
        OSError: when the disk refuses.
    """
    write_file(folder / f"{MARKER}.part", marker(manifest))
    os.rename(folder / f"{MARKER}.part", folder / MARKER)  # half a marker must not be taken for one
    sync_folder(folder)


def publish(final: Path) -> None:
    """Give the complete checkpoint that was built for ``final`` its name; the one that had it goes.

    Raises:
        OSError: when the disk refuses; then nothing is published.
    """
    old = set_aside(final)
    if is_complete(final):
        remove(old)
    if _is_taken(final) and _is_taken(old):  # the old one is complete, the one in the place is not
        remove(final)
    elif _is_taken(final):
        os.rename(final, old)
    os.rename(building(final), final)
    try:
        sync_folder(final.parent)
    except OSError:
        os.rename(final, building(final))
        raise
    with suppress(OSError):  # the new one is safe; what is left of the old is removed by the next settle
        remove(old)


def abandon(final: Path) -> None:
    """After a failed save: remove what was built, as far as the disk lets us, and put back what was set aside."""
    with suppress(OSError):
        if is_complete(set_aside(final)) and not _is_taken(final):
            os.rename(set_aside(final), final)
    with suppress(OSError):
        remove(building(final))


def settle(final: Path) -> None:
    """Finish what a crash interrupted: publish what was complete, remove what was not.

    Raises:
        OSError: when the disk refuses.
    """
    if _is_taken(final) and not _is_ours(final):
        return
    old = set_aside(final)
    if is_complete(building(final)):
        publish(final)
    else:
        remove(building(final))
    if is_complete(final):
        remove(old)
    elif is_complete(old) and not _is_taken(final):
        os.rename(old, final)
        sync_folder(final.parent)


def is_cut_off(path: Location) -> bool:
    """Whether what is called like a checkpoint never was one: a save that was cut off has left it."""
    return (path.suffix == BUILDING or isinstance(path, RemotePath)) and not is_complete(path)


def remove(path: Location) -> None:
    """Delete a checkpoint, marker first; a crash on the way leaves it whole or an ``X.tmp`` without a marker.

    Of a symbolic link the link itself.

    Raises:
        OSError: when the disk refuses.
    """
    if isinstance(path, RemotePath):
        attempts.remove(path)
        return
    if path.is_symlink():
        os.unlink(path)
        sync_folder(path.parent)
        return
    if not path.exists():
        return
    if path.suffix not in (BUILDING, OLD) and not _is_taken(building(path)):
        os.rename(path, building(path))
        path = building(path)
    if is_complete(path):
        os.unlink(path / MARKER)
        sync_folder(path)
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
