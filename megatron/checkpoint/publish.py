"""Publish checkpoints: a private folder for each attempt to save, and one marker that names the valid one.

docs/formats.md has the files, the steps of a save, and what a crash can leave. The marker is all that makes a
checkpoint: it is written last, and replaced atomically when the same step is saved again. An attempt that no marker
names is garbage. In an object store, where an object is written atomically, every file is uploaded to its final name.
On a disk, a save is staged (`Attempt.staged`, see :mod:`megatron.checkpoint.lease`), and two renames publish it: of the
attempt, then of the marker. To delete a checkpoint, it is renamed into the staging folder first.

* **Fencing.** Everything under ``SAVE/iter_*`` changes only by renames out of and into the staging folder of a start.
  A new start renames the staging folders of earlier ones into its own, before it looks for checkpoints. From then on
  every such call of an earlier start fails because a path does not exist, no matter what it checked before.
* **Recovery.** A crash leaves the old checkpoint, the new one, or the new one with some of its renames still to be
  done. `publish_staged` does those that are left, so it is called again after a crash; without a staged marker the
  save was incomplete and is deleted.

A checkpoint of version 1.0, whose files lie beside a marker without a name, is read, replaced and deleted like the
others. ``iter_N`` may be a symbolic link: it is read through, but only the link is replaced or deleted. All functions
raise OSError if the disk fails, the staging folder is gone, or the store does not answer.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from megatron.checkpoint.durable_files import durable_rename, make_folder, publish_file, sync_folder, write_file
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.format import (
    FORMAT,
    MANIFEST,
    MARKER,
    MEGATRON_LM_NEWEST,
    Manifest,
    marker_content,
    marker_folder,
    parse_manifest,
)
from megatron.checkpoint.location import Location, local_path
from megatron.config.files import read_small
from megatron.config.text import shell_word

CHECKPOINT_NAME = re.compile(r"iter_(\d+)")
"""Names of checkpoints, with their iteration."""

STAGED_NAME = re.compile(r"(iter_\d+)(\.tmp|\.replaced)?")
"""Names of staged saves, with the name of the checkpoint."""

LEFTOVER_NAME = re.compile(r"iter_\d+\.(tmp|replaced|(.*\.)?gone)")
"""Names of what interrupted saves and deletions without a lease leave in a folder of checkpoints."""

STAGING_NAME = re.compile(r"\.epoch-(\d+)")
"""The name of a start's staging folder, with its epoch, a number that increases with every start."""

ATTEMPT_PREFIX = "attempt-"


def staging_folder(folder: Path, epoch: int) -> Path:
    """Return the staging folder of a start."""
    return folder / f".epoch-{epoch}"


def staging_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return epoch and path of the staging folders directly in ``folder``, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((int(match[1]), folder / name) for name in names if (match := STAGING_NAME.fullmatch(name)))


def find_checkpoints(folder: Location) -> list[tuple[int, Location]]:
    """Return iteration and path of all folders named like checkpoints, newest first, without opening them.

    In a folder of Megatron-LM the first one is that which it records as the newest.
    """
    paths = _folders(folder)
    found = [(int(match[1]), path) for path in paths if (match := CHECKPOINT_NAME.fullmatch(path.name))]
    found.sort(key=lambda item: item[0], reverse=True)
    newest = _megatron_lm_newest(folder)
    if newest == "release":
        found.insert(0, (0, folder / newest))
    elif newest.isdecimal():  # it is recorded last: later ones may not be complete
        found.sort(key=lambda item: item[0] > int(newest))
    return found


def _megatron_lm_newest(folder: Location) -> str:
    """Return the iteration, or ``release``, that is recorded in a folder of Megatron-LM; empty for other folders."""
    if not isinstance(folder, Path):
        return ""
    try:
        return read_small(folder / MEGATRON_LM_NEWEST, 100).decode(errors="replace").strip()
    except OSError:
        return ""


def _folders(folder: Location) -> list[Location]:
    """Return the folders in a folder; none if it does not exist."""
    if not isinstance(folder, Path):
        return [*folder.folders()]
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def has_attempts(path: Location) -> bool:
    """Return True if there is an attempt to save in a folder, published or not."""
    return any(folder.name.startswith(ATTEMPT_PREFIX) for folder in _folders(path))


def save_elsewhere_flags(folder: Location) -> str:
    """Return the flags that save elsewhere, and resume from the checkpoints in ``folder`` if one is valid."""
    with suppress(OSError):  # called after a disk error
        for _, path in find_checkpoints(folder):
            with suppress(CheckpointError):
                if Manifest.open(path):
                    return f"--load {shell_word(str(folder))} --save A_FOLDER_ELSEWHERE"
    return "--save A_FOLDER_ELSEWHERE"


def is_complete(path: Location) -> bool:
    """Return True if a folder contains the marker."""
    return (path / MARKER).exists()


def is_interrupted(path: Location) -> bool:
    """Return True if ``path`` is what an interrupted save has left: no marker, and on a disk nothing but attempts."""
    if is_complete(path):
        return False
    if not isinstance(path, Path):
        return True
    return path.is_dir() and not path.is_symlink() and all(n.startswith(ATTEMPT_PREFIX) for n in os.listdir(path))


OLD_LINK, NEW_FOLDER = "link", "new"
"""Names in a staged save: the link that the checkpoint replaces, and the checkpoint's folder before it has its name."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to save a checkpoint: `start`, write the files to `folder`, then `publish` or `discard`."""

    final: Location  # the checkpoint, such as ``save/iter_0000100``
    staging: Path | None = None  # staging folder of the lease, on disk
    # name of the folder that the marker will name; "" for a copy of a checkpoint that has none
    name: str = field(default_factory=lambda: f"{ATTEMPT_PREFIX}{secrets.token_hex(6)}")

    @property
    def staged(self) -> Path:
        """Folder in which the save is staged, on a disk."""
        final = local_path(self.final)
        return final.with_name(f"{final.name}.tmp") if self.staging is None else self.staging / final.name

    @property
    def folder(self) -> Location:
        """Folder to which all ranks write their files."""
        return (self.staged if isinstance(self.final, Path) else self.final) / self.name

    def start(self) -> None:
        """Create the folder; StorageError if the path of the checkpoint is used for something else."""
        if not isinstance(self.final, Path):
            return
        raise_unless_replaceable(self.final)
        if self.staging is None:
            make_folder(self.final.parent, private=True)
        finish_staged(self.final.parent, self.staged)
        _delete(self.staged)
        try:
            os.mkdir(self.staged)
            if self.name:
                os.mkdir(self.staged / self.name)
        except OSError:
            self.discard()
            raise

    def write_manifest(self, manifest: bytes) -> None:
        """Write the manifest; all other files are complete."""
        write_file(self.folder / MANIFEST, manifest)
        sync_folder(self.folder)

    def publish(self, manifest: bytes) -> None:
        """Write the marker, and delete older attempts.

        After an OSError nothing is published, unless the store's answer was lost, or the flush of a marker failed that
        replaces an older one; then the attempt is complete, and both are kept.
        """
        mark = marker_content(manifest, self.name)
        if not isinstance(self.final, Path):
            write_file(self.final / MARKER, mark)
            return
        publish_file(self.staged / MARKER, mark)
        publish_staged(self.final, self.staged)
        with suppress(OSError):  # published; `CheckpointFolder.retain` deletes the rest
            for path in leftovers(self.final):
                delete_checkpoint(path, self.staging)
            _delete(self.staged)

    def discard(self) -> None:
        """Delete the files of a failed attempt, as far as possible, unless it was published."""
        with suppress(OSError):
            if isinstance(self.final, Path):
                withdraw_staged(self.final, self.staged, self.name)
                _delete(self.staged)
            elif not (self.folder / MANIFEST).exists():  # else the marker may be there, and only the answer was lost
                _delete(self.folder)


def publish_staged(final: Path, staged: Path) -> None:
    """Publish the save in ``staged``, whose marker is written; also after a crash during an earlier call."""
    name = marker_folder((staged / MARKER).read_bytes())
    if not name or staged.is_symlink():  # it is itself the checkpoint
        delete_checkpoint(final, staged.parent)
        durable_rename(staged, final)
        return
    if final.is_symlink():
        os.rename(final, staged / OLD_LINK)
    if not final.exists():
        with suppress(FileExistsError):
            os.mkdir(staged / NEW_FOLDER)
        durable_rename(staged / NEW_FOLDER, final)
    if (staged / name).exists():
        delete_checkpoint(final / name, staged.parent)  # a damaged copy of the same attempt, on a node's disk
        durable_rename(staged / name, final / name)
    replaces = is_complete(final)
    try:
        durable_rename(staged / MARKER, final / MARKER)
    except OSError:
        with suppress(OSError):
            if not replaces:  # where only the flush failed: the save is reported as failed, so it must not count
                os.rename(final / MARKER, staged / MARKER)
        raise


def withdraw_staged(final: Path, staged: Path, name: str = "") -> None:
    """Undo what `publish_staged` has done of a save that is not published; the caller deletes ``staged``.

    Of a checkpoint that counts, only the attempt ``name`` is deleted: another one may count again after a crash, if the
    marker that replaced its marker was not flushed.
    """
    (staged / MARKER).unlink(missing_ok=True)  # first: without it nothing publishes the rest
    if is_interrupted(final):
        _delete(staged / NEW_FOLDER)
        os.rename(final, staged / NEW_FOLDER)
    else:
        for path in leftovers(final):
            if path.name == name:
                delete_checkpoint(path, staged.parent)
    if (staged / OLD_LINK).is_symlink() and not os.path.lexists(final):
        os.rename(staged / OLD_LINK, final)


def finish_staged(folder: Path, staged: Path) -> str | None:
    """Publish an interrupted save in ``folder`` if only its publication was interrupted; otherwise undo that.

    Returns a note, or None for what is not a save. The caller deletes what is left at ``staged``.

    Raises:
        StorageError: if a complete save cannot be published, because its name is used for something else.
    """
    match = STAGED_NAME.fullmatch(staged.name)
    if match is None or not staged.is_dir():
        return None
    final = folder / match[1]
    if is_complete(staged):
        raise_unless_replaceable(final)
        if marker_folder((staged / MARKER).read_bytes()) or not is_complete(final):
            publish_staged(final, staged)
            return f"published {final.name}: its save was complete except for the final rename"
    if not staged.is_symlink():
        withdraw_staged(final, staged)
    return f"removed {staged.name}: its save was interrupted"


def delete_checkpoint(path: Location, staging: Path | None = None) -> None:
    """Delete a checkpoint or a leftover, which stops being a checkpoint before its first file is deleted.

    Of a symbolic link only the link is deleted.
    """
    if not isinstance(path, Path):
        (path / MARKER).remove()
        _delete(path)
    elif os.path.lexists(path):
        inside = CHECKPOINT_NAME.fullmatch(path.parent.name) is not None
        name = f"{path.parent.name}.{path.name}.gone" if inside else f"{path.name}.gone"
        target = (staging or path.parents[inside]) / name
        _delete(target)
        os.rename(path, target)
        sync_folder(path.parent)
        _delete(target)


def _delete(path: Location) -> None:
    """Delete a file, a folder or a link if it exists."""
    if not isinstance(path, Path):
        path.remove_all()
    elif path.is_symlink() or path.is_file():
        os.unlink(path)
    elif path.exists():
        shutil.rmtree(path)


def raise_unless_replaceable(path: Path) -> None:
    """Raise StorageError unless ``path`` is missing, a checkpoint or its remainder, empty, or a dangling link."""
    if is_complete(path) or not path.exists() or is_interrupted(path) or has_attempts(path):
        return
    with suppress(OSError, ValueError, AttributeError):
        if json.loads((path / MANIFEST).read_bytes()).get("format") == FORMAT:
            return
    raise StorageError(
        f"{path} exists and is not a checkpoint of this program; no checkpoint was written",
        f"mv {shell_word(str(path))} {shell_word(f'{path}.other')}",
        "--save A_NEW_FOLDER",
    )


def leftovers(path: Location) -> Iterator[Location]:
    """Yield what earlier saves of the same step have left in a checkpoint; nothing if the checkpoint is damaged."""
    attempts = [found for found in _folders(path) if found.name.startswith(ATTEMPT_PREFIX)]
    flat = isinstance(path, Path) and (path / MANIFEST).exists()
    if len(attempts) + flat < 2 or (isinstance(path, Path) and path.is_symlink()):
        return
    with suppress(CheckpointError):  # damaged: the published attempt is unknown
        inside = Manifest.read(path).inside
        yield from (found for found in attempts if found.name != inside)
        if flat and inside:
            names = parse_manifest(path, local_path(path / MANIFEST).read_bytes()).files
            yield from (path / name for name in sorted({PurePosixPath(name).parts[0] for name in names}))
            yield path / MANIFEST


def staged_leftovers(folder: Path, staging: Path) -> list[Path]:
    """Return what interrupted saves and deletions have left in a staging folder, or in ``folder`` without a lease."""
    if not staging.is_dir():
        return []
    is_leftover = LEFTOVER_NAME.fullmatch if staging == folder else lambda name: name.startswith("iter_")
    return [staging / name for name in sorted(os.listdir(staging), reverse=True) if is_leftover(name)]
