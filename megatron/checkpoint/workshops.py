"""The workshops in a folder of checkpoints, one for each start that the folder remembers: ``.epoch-7``.

A start moves those of the starts before it into its own. What was complete in them then gets its name, the rest goes.
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
"""Folder in a workshop that is about to go, for what is removed with it."""

BESIDE = re.compile(rf"iter_\d+({re.escape(BUILDING)}|{re.escape(OLD)})?({re.escape(GONE)})?")
"""Names of checkpoints, and of what lies beside them where nothing was held."""


def workshop(folder: Path, epoch: int) -> Path:
    """That of a start."""
    return folder / f"{PREFIX}{epoch}"


def workshops(folder: Path) -> list[tuple[int, Path]]:
    """Epoch and path of those in a folder, oldest first; not of those further inside.

    Raises:
        OSError: when the disk does not say.
    """
    names = [name for name in os.listdir(folder) if WORKSHOP.fullmatch(name)] if folder.is_dir() else []
    return sorted((int(name.removeprefix(PREFIX)), folder / name) for name in names)


def inside(folder: Path) -> Iterator[Path]:
    """All that lies in the workshops of a folder, and in workshops that those have taken over; each but once.

    Raises:
        OSError: when the disk does not say.
    """
    for _, shop in workshops(folder):
        with suppress(FileNotFoundError):  # a start of this moment has taken it away
            yield from sorted(path for path in shop.iterdir() if not WORKSHOP.fullmatch(path.name))
            yield from inside(shop)


def take_over(folder: Path, epoch: int) -> list[str]:
    """Take from all earlier starts what they could still change the checkpoints by, and finish what they began.

    Returns:
        Notes on what was found.

    Raises:
        OSError: when the disk refuses, or the workshop of ``epoch`` is gone.
        StorageError: likewise.
    """
    mine = workshop(folder, epoch)
    for name in sorted(os.listdir(folder)):
        number = name.removeprefix(PREFIX).partition(".")[0]  # one that was never finished is called .epoch-7.5f3a90
        if name.startswith(PREFIX) and number.isdecimal() and int(number) < epoch:
            with suppress(FileNotFoundError):  # its start has given up
                os.rename(folder / name, mine / name)
    _take_in(folder, mine)
    return [*_finish(folder, mine)]


def _take_in(folder: Path, mine: Path) -> None:
    """What somebody left beside the checkpoints who held nothing; older than all else."""
    left = [name for name in os.listdir(folder) if (match := BESIDE.fullmatch(name)) and any(match.groups())]
    if not left:
        return
    with suppress(FileExistsError):
        os.mkdir(workshop(mine, 0))
    for name in sorted(left):
        os.rename(folder / name, workshop(mine, 0) / name)


def _finish(folder: Path, shop: Path) -> Iterator[str]:
    """Settle all that lies in the workshops inside of one, the older ones first, and remove them; notes on it."""
    for _, older in workshops(shop):
        yield from _finish(folder, older)
        yield from _seen(older)
        _out_of_the_way(older)
        for name in sorted({path.name.partition(".")[0] for path in older.glob("iter_*")}):
            settle(folder / name, older)
        with suppress(OSError):  # files that a process still has open may hold it up; it is out of the way
            shutil.rmtree(older)


def _out_of_the_way(shop: Path) -> None:
    """Put what is no checkpoint where nobody looks for one: removing it may fail.

    A process that hangs may have a file there open. NFS, on the same machine, keeps that, and so its folder.
    """
    rest = [path for path in shop.glob("iter_*") if path.suffix == GONE or is_cut_off(path)]
    if rest:
        (shop / REST).mkdir(exist_ok=True)
    for path in rest:
        os.rename(path, shop / REST / path.name)


def _seen(shop: Path) -> Iterator[str]:
    """What saves that were cut off have left in a workshop, in words."""
    for path in sorted(shop.glob(f"iter_*{BUILDING}")):
        if is_complete(path):
            yield f"{path.name} was whole and lacked only its name, which it has now"
        else:
            yield f"removed {path.name}: its save was cut off"
