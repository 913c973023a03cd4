"""Staging folders of the starts of a run, ``.epoch-7``, inside its checkpoint folder.

A start moves the staging folders of earlier starts into its own, publishes the complete checkpoints in them and
deletes the rest.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.publish import BUILDING, GONE, OLD, PREFIX, WORKSHOP, is_complete, is_cut_off, settle

REST = "rest"
"""Subfolder of a staging folder that is about to be deleted, for entries that are not checkpoints."""

BESIDE = re.compile(rf"iter_\d+({re.escape(BUILDING)}|{re.escape(OLD)})?({re.escape(GONE)})?")
"""Names of checkpoints, and of staged ones that were written without a lease."""


def workshop(folder: Path, epoch: int) -> Path:
    """Return the staging folder of a start."""
    return folder / f"{PREFIX}{epoch}"


def workshops(folder: Path) -> list[tuple[int, Path]]:
    """Return epoch and path of the staging folders directly in ``folder``, oldest first.

    Raises:
        OSError: if the disk fails.
    """
    names = [name for name in os.listdir(folder) if WORKSHOP.fullmatch(name)] if folder.is_dir() else []
    return sorted((int(name.removeprefix(PREFIX)), folder / name) for name in names)


def inside(folder: Path) -> Iterator[Path]:
    """Yield all entries of the staging folders in ``folder``, including nested ones that were taken over.

    Raises:
        OSError: if the disk fails.
    """
    for _, staging in workshops(folder):
        with suppress(FileNotFoundError):  # taken over by a concurrent start
            yield from sorted(path for path in staging.iterdir() if not WORKSHOP.fullmatch(path.name))
            yield from inside(staging)


def take_over(folder: Path, epoch: int) -> list[str]:
    """Take over the staging folders of all earlier starts, and finish or delete what is in them.

    Returns:
        Notes on what was found.

    Raises:
        OSError: if the disk fails, or the staging folder of ``epoch`` is gone.
        StorageError: likewise.
    """
    mine = workshop(folder, epoch)
    for name in sorted(os.listdir(folder)):
        number = name.removeprefix(PREFIX).partition(".")[0]  # an unfinished one is called .epoch-7.5f3a90
        if name.startswith(PREFIX) and number.isdecimal() and int(number) < epoch:
            with suppress(FileNotFoundError):  # removed by its own start
                os.rename(folder / name, mine / name)
    _take_over_unleased(folder, mine)
    return [*_recover(folder, mine)]


def _take_over_unleased(folder: Path, mine: Path) -> None:
    """Move entries that were staged without a lease into a nested staging folder of epoch 0, the oldest."""
    left = [name for name in os.listdir(folder) if (match := BESIDE.fullmatch(name)) and any(match.groups())]
    if not left:
        return
    with suppress(FileExistsError):
        os.mkdir(workshop(mine, 0))
    for name in sorted(left):
        os.rename(folder / name, workshop(mine, 0) / name)


def _recover(folder: Path, staging: Path) -> Iterator[str]:
    """Recover and delete the staging folders nested in ``staging``, oldest first; yield notes."""
    for _, older in workshops(staging):
        yield from _recover(folder, older)
        yield from _interrupted_saves(older)
        _set_rest_aside(older)
        for name in sorted({path.name.partition(".")[0] for path in older.glob("iter_*")}):
            settle(folder / name, older)
        with suppress(OSError):  # files still open on NFS may block it; its entries no longer count
            shutil.rmtree(older)


def _set_rest_aside(staging: Path) -> None:
    """Move entries that are not checkpoints to a subfolder that is not searched, because deleting them may fail.

    If a stalled process has a file open there, NFS on the same machine keeps the file and its folder.
    """
    rest = [path for path in staging.glob("iter_*") if path.suffix == GONE or is_cut_off(path)]
    if rest:
        (staging / REST).mkdir(exist_ok=True)
    for path in rest:
        os.rename(path, staging / REST / path.name)


def _interrupted_saves(staging: Path) -> Iterator[str]:
    """Yield notes on interrupted saves in a staging folder."""
    for path in sorted(staging.glob(f"iter_*{BUILDING}")):
        if is_complete(path):
            yield f"published {path.name}: its save was complete except for the final rename"
        else:
            yield f"removed {path.name}: its save was interrupted"
