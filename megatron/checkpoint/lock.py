"""One start at a time in a folder of checkpoints, and what an earlier one that still lives cannot do any more.

Two starts in one folder would remove what the other is writing. One of them may be dead for all that the launcher
knows, and yet write: its node was cut off from the others, but not from the shared disk; or a process hangs, in the
middle of a save, and goes on an hour later. So the folder numbers its starts (*epochs*), and start 7 has

    SAVE/.epoch-7/             its workshop: all that it builds, sets aside and removes lies here
    SAVE/.epoch-7/claim.json   who it is: the job, the host, the process; locked (``flock``) as long as that lives

**Taking the folder.** The claim of the newest start is looked at. If nobody has it locked, its process is gone. If it
is locked by an earlier start of the same job (`Start.follows`: Slurm has put the job back into its queue, srun has
begun a later step, torchrun has restarted its processes), that one is *superseded*. Anybody else is refused. Then the
workshop of the next epoch is made under another name, its claim in it and locked, and renamed. As a folder that is not
empty it can replace no other: of two that take the same epoch one fails and looks anew. It is there with its claim, or
not at all.

**Fencing.** Before it looks which checkpoint to begin with, the new start renames the workshops of all earlier ones
into its own (`take_over`). All that a start does to a checkpoint with its name is a rename out of its workshop or into
it: a new one comes out, one that is replaced or removed goes in. All else happens inside. Once the workshop has another
name, each of these calls of the old start fails, whatever it had checked before and wherever it was stopped: the path
is not there. What it did before, the new start sees. So there is no moment at which both can change a checkpoint, and
nothing is needed for that but that a rename is one step for all machines, as POSIX has it. Ranks that write files into
a checkpoint being built lose the folder, and make none. What was complete and lacked only its name is published by the
new start. No number is used again: the newest workshop stays in the folder.

**Being told.** A start whose workshop is gone is superseded. `Claim.check` looks for it before a save, after whatever
failed in one, and before the run folder is written to; it raises `SupersededError`, which ends the run. That look is
for the people who read the log, and for the log: the checkpoints do not depend on it.

**The disks.** The lock is the kernel's and goes with the process. On NFS it reaches over all machines; of a machine
that is lost the server keeps it for a time (its lease, often 90 seconds): the same job does not wait for that, and
another is told. A client of NFS may still know a renamed folder by its handle for some seconds; therefore what was
taken over is removed before anything is looked for. Where there are no locks at all nobody is refused: the newest start
has the folder, and the others are fenced off.

**Object stores** have neither locks nor renames. A claim is put when a run starts, over the one before, and read again
before a marker is put and before anything is removed. Between the two a start that hangs just there can do one thing
more: publish a whole checkpoint of an older epoch, or remove what it had found to be superfluous.

Who writes a checkpoint without holding the folder, as tools do, builds it in the folder itself.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.claims import CLAIM, Claim, Holder, blame, lock, newest, put, stored
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.files import elsewhere, make_folder
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.remote import Location, RemotePath
from megatron.checkpoint.workshops import take_over, workshop
from megatron.config.launch import Start


@contextmanager
def hold(folder: Location, flag: str = "--save", start: Start | None = None) -> Iterator[Claim]:
    """Be the only one who writes checkpoints to ``folder``, which is made if need be; by one process of a run.

    Where the file system has no locks, and in object stores, nobody is refused. Errors are mended by ``flag``.

    Args:
        folder: of the checkpoints.
        flag: by which it was given.
        start: which one of which job this is; None for one of none.

    Raises:
        CheckpointError: when another process holds it, that is none of an earlier start of the job.
        SupersededError: when a later start of the job took it meanwhile.
        StorageError: when nothing can be written to the folder.
    """
    me = Holder(start or Start())
    if isinstance(folder, RemotePath):
        yield _claim_in_store(folder, me, flag)
        return
    try:
        make_folder(folder)
        claim, file, superseded = _take(folder, me, flag)
    except OSError as error:
        raise _refused(error, folder, flag) from error
    try:
        yield replace(claim, notes=(*superseded, *_take_over(claim, folder, flag)))
    finally:
        os.close(file)


def _claim_in_store(folder: RemotePath, me: Holder, flag: str) -> Claim:
    """Say in an object store who writes there, which shows too that it can be written to."""
    try:
        before = stored(folder)
        claim = Claim(folder, before.epoch + 1 if before else 1, me)
        (folder / CLAIM).write_bytes(claim.text)
    except OSError as error:
        raise _refused(error, folder, flag) from error
    return claim


def _take(folder: Path, me: Holder, flag: str) -> tuple[Claim, int, list[str]]:
    """Make the claim of the next epoch, as soon as nobody is in the way.

    Returns:
        The claim; its file, which is locked while it is open; and a note where a start was superseded that is alive.
    """
    while True:
        last, superseded = newest(folder), list[str]()
        if last is not None and _is_held(workshop(folder, last.epoch)):
            if not me.start.follows(last.holder.start):
                raise CheckpointError(*_in_use(last, me, flag))
            superseded = [f"start {last.epoch}, of {last.holder}, is superseded: it may still be alive"]
        claim = Claim(folder, last.epoch + 1 if last else 1, me)
        file = put(claim, folder)
        if file is not None:
            return claim, file, superseded


def _is_held(shop: Path) -> bool:
    """Whether the process that has made a claim lives, as far as the file system knows."""
    try:
        file = os.open(shop / CLAIM, os.O_RDONLY)
    except FileNotFoundError:  # somebody takes it over at this moment, or has removed the file
        return False
    try:
        return not lock(file, fcntl.LOCK_SH)  # which nobody else who looks is kept from
    finally:
        os.close(file)


def _take_over(claim: Claim, folder: Path, flag: str) -> list[str]:
    """Fence off all earlier starts; and make sure that no later one has done so with this one meanwhile."""
    try:
        try:
            return take_over(folder, claim.epoch)
        finally:
            blame(claim)
    except OSError as error:
        raise _refused(error, folder, flag) from error


def _in_use(last: Claim, me: Holder, flag: str) -> tuple[str, ...]:
    """Who has the folder, and what helps."""
    if last.holder.start.follows(me.start):
        return f"{last.folder} is in use by a later start of this job: {last.holder}", f"{flag} ANOTHER"
    sentence = f"{last.folder} is in use by {last.holder}"
    if last.holder.host == socket.gethostname():
        return sentence, f"{flag} ANOTHER"
    return (
        f"{sentence}; if that machine is gone, its lock expires within minutes",
        f"{flag} ANOTHER",
        "start again then",
    )


def _refused(error: OSError, folder: Location, flag: str) -> StorageError:
    where = error.filename or folder
    fix = elsewhere(Checkpoints(folder).to_go_on_from()) if flag == "--save" else f"{flag} ANOTHER"
    return StorageError(f"{where}: {error.strerror}; no checkpoint can be written to {folder}", fix)
