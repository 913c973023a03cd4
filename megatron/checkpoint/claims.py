"""Who holds a folder of checkpoints: the claim of a start, and how it is found to have been superseded. See `lock`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import SupersededError
from megatron.checkpoint.files import UNSUPPORTED, make_folder, sync_folder
from megatron.checkpoint.remote import Location, RemotePath
from megatron.checkpoint.workshops import workshop, workshops
from megatron.config.launch import Start
from megatron.config.problems import Problem

CLAIM = "claim.json"
"""The file that holds it: in the workshop of the start; of a place in an object store, in that place."""

NO_LOCKS = (*UNSUPPORTED, errno.ENOSYS, errno.ENOLCK)
"""What a file system answers that has no locks."""

TOO_LATE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
"""What is answered to a claim when there is one of that epoch, or a later start has removed this one."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder.

    Attributes:
        start: which one of which job it belongs to.
        host: name of its machine.
        pid: its number there.
        since: when it took the folder, in seconds since 1970.
        token: tells it from all others.
    """

    start: Start
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: float = field(default_factory=time.time)
    token: str = field(default_factory=lambda: secrets.token_hex(6))

    def __str__(self) -> str:
        said = f" ({self.start})" if str(self.start) else ""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}{said} since {at}"


@dataclass(frozen=True)
class Claim:
    """The right to write checkpoints to a folder, which ends when a later start takes it.

    Attributes:
        folder: of the checkpoints.
        epoch: number of this start among all that the folder has seen, from 1.
        holder: who has it.
        notes: on what the start has found in the folder when it took it.
    """

    folder: Location
    epoch: int
    holder: Holder
    notes: tuple[str, ...] = ()

    @property
    def shop(self) -> Path | None:
        """The workshop, where checkpoints are built; an object store has none."""
        return None if isinstance(self.folder, RemotePath) else workshop(self.folder, self.epoch)

    @property
    def text(self) -> bytes:
        """As it is written down."""
        return json.dumps({"epoch": self.epoch, **asdict(self.holder)}, indent=1).encode() + b"\n"

    def check(self) -> None:
        """Look whether a later start has the folder. What no workshop guards may be done only just after.

        Raises:
            SupersededError: when it has.
            OSError: when the disk or the store does not say.
        """
        if isinstance(self.folder, RemotePath):
            other = stored(self.folder)
        else:
            other = None if self._is_there(self.folder) else newest(self.folder)
        if other is not None and other.holder.token != self.holder.token:
            sentence = f"start {self.epoch} of the run in {self.folder} is superseded by start {other.epoch}"
            end = "this one writes nothing any more, and ends"
            raise SupersededError(str(Problem("E817", f"{sentence}, of {other.holder}; {end}")))

    def ready(self) -> None:
        """As :meth:`check`, before a checkpoint is begun; a workshop that somebody has removed is made again.

        Raises:
            SupersededError: when a later start has the folder.
            OSError: when the disk or the store refuses.
        """
        self.check()
        if not isinstance(self.folder, RemotePath) and not self._is_there(self.folder):
            make_folder(self.folder)
            put(self, self.folder)  # locked until the process ends
            self.check()

    def _is_there(self, folder: Path) -> bool:
        """Whether the workshop is there, and this start's: where somebody removed it, another may have its number."""
        shop = workshop(folder, self.epoch)
        try:
            token = parse((shop / CLAIM).read_bytes())[1].token
        except OSError:  # somebody has removed the claim alone, or all
            return shop.is_dir()
        return token in ("", self.holder.token)


@dataclass(frozen=True)
class Claims:
    """What a start holds: the ``save`` folder, and that of this rank's node."""

    save: Claim | None = None
    node: Claim | None = None

    @property
    def notes(self) -> list[str]:
        """On what was found in both."""
        return [note for claim in (self.save, self.node) if claim is not None for note in claim.notes]

    def look(self) -> None:
        """As :meth:`Claim.check` of the ``save`` folder, where that is one call to a disk.

        Raises:
            SupersededError: when a later start has the folder.
            OSError: when the disk does not say.
        """
        if self.save is not None and self.save.shop is not None:
            self.save.check()


def shop_of(claim: Claim | None) -> Path | None:
    """The workshop that a claim gives; None without one, and in an object store."""
    return claim.shop if claim is not None else None


def blame(claim: Claim | None) -> None:
    """As :meth:`Claim.check`, after something has failed, perhaps because of that; a disk that does not say is none.

    Raises:
        SupersededError: when a later start has the folder.
    """
    if claim is not None:
        with suppress(OSError):
            claim.check()


def put(claim: Claim, folder: Path) -> int | None:
    """Make the workshop of a start, with its claim inside; the open file of that, or None when another was faster.

    Raises:
        OSError: when the disk refuses.
    """
    place = workshop(folder, claim.epoch)
    draft = place.with_name(f"{place.name}.{claim.holder.token}")
    os.mkdir(draft)
    file = os.open(draft / CLAIM, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(file)
        os.write(file, claim.text)
        os.fsync(file)
        os.rename(draft, place)
        sync_folder(folder)
        if max(epoch for epoch, _ in workshops(folder)) == claim.epoch:
            return file
        shutil.rmtree(place)  # it was on its way for so long that a later one is here
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno not in TOO_LATE:
            os.close(file)
            raise
    os.close(file)
    return None


def lock(file: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, unless another process has; true too where there are no locks.

    Raises:
        OSError: when the disk refuses.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def newest(folder: Path) -> Claim | None:
    """The claim of the latest start that a folder on a disk has seen.

    Raises:
        OSError: when the disk does not say.
    """
    found = workshops(folder)
    if not found:
        return None
    epoch, shop = found[-1]
    text = b""
    with suppress(FileNotFoundError):
        text = (shop / CLAIM).read_bytes()
    return Claim(folder, epoch, parse(text)[1])


def stored(folder: RemotePath) -> Claim | None:
    """The claim in a place in an object store.

    Raises:
        OSError: when the store does not say.
    """
    try:
        epoch, holder = parse((folder / CLAIM).read_bytes())
    except FileNotFoundError:
        return None
    return Claim(folder, epoch, holder)


def parse(text: bytes) -> tuple[int, Holder]:
    """Epoch and holder of what is written down; 0 and nobody known, where that is no claim."""
    try:
        said = json.loads(text)
        start = Start(**_known(said["start"], Start))
        return int(said["epoch"]), Holder(**{**_known(said, Holder), "start": start})
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0, Holder(Start(), host="an unknown machine", pid=0, since=0.0, token="")


def _known(said: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Those values that this version knows."""
    return {name: value for name, value in said.items() if name in {f.name for f in fields(kind)}}
