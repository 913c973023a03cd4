"""The proof that training has ended: ``finished.json`` in the run's folder, for scripts that queue a job again.

The exit status of a launcher proves nothing: it is lost with the node that the batch script runs on, and one that a
scheduler makes up may be 0. The file is there exactly if the run's last step is taken and saved: it comes after the
checkpoint, and a start that has steps left, such as that of a run that was made longer, removes it before the first.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.errors import DamagedError, StorageError
from megatron.checkpoint.files import in_words, sync_folder, write_file
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.remote import Location, location
from megatron.training.setup import Trainer
from megatron.training.together import on_first

NAME = "finished.json"

Facts = dict[str, str | int | float | None]


def retract(trainer: Trainer) -> None:
    """Remove the proof, because there are steps left; collective.

    Raises:
        OSError: when it is there and cannot be removed, on every rank.
        SupersededError: when a later start has the ``save`` folder, on every rank: the proof may be that one's.
    """
    if folder := _folder(trainer):
        on_first(lambda: _remove_if_ours(trainer, folder), trainer.mesh.world)


def declare(trainer: Trainer) -> None:
    """Write the proof, after the last step is saved; collective.

    Raises:
        StorageError: when it cannot be written, on every rank. The next start has nothing to do, and tries again.
        SupersededError: when a later start has the ``save`` folder, on every rank.
    """
    if folder := _folder(trainer):
        on_first(lambda: _write_if_ours(trainer, folder), trainer.mesh.world)


def is_saved(trainer: Trainer) -> bool:
    """Whether the ``save`` folder has a whole checkpoint of the step that was taken last; collective."""
    return on_first(lambda: _checkpoint(trainer) is not None, trainer.mesh.world)


def write(folder: Path, facts: Facts) -> None:
    """Write the file, whole or not at all; it is on the disk when the call returns.

    Raises:
        StorageError: when it cannot be written.
    """
    path, part = folder / NAME, folder / f"{NAME}.part"
    try:
        part.unlink(missing_ok=True)
        write_file(part, (json.dumps(facts, indent=2) + "\n").encode())
        os.rename(part, path)
        sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        sentence = f"{path}, the proof that training has ended, cannot be written: {in_words(error)}"
        raise StorageError(
            sentence, "free some space and start once more: no step is left, it is written then"
        ) from error


def _write_if_ours(trainer: Trainer, folder: Path) -> None:
    """Write the file, unless a later start has the run."""
    _check(trainer)
    write(folder, _facts(trainer))


def _remove_if_ours(trainer: Trainer, folder: Path) -> None:
    """Remove the file, unless a later start has the run."""
    _check(trainer)
    (folder / NAME).unlink(missing_ok=True)


def _check(trainer: Trainer) -> None:
    if trainer.claims.save is not None:
        trainer.claims.save.check()


def _folder(trainer: Trainer) -> Path | None:
    run_dir = trainer.config.logging.run_dir
    return Path(run_dir) if run_dir else None


def _facts(trainer: Trainer) -> Facts:
    checkpoint = _checkpoint(trainer)
    return {
        "iteration": trainer.iteration,
        "consumed-samples": trainer.consumed_samples,
        "run-id": trainer.run_id,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "time": time.time(),
    }


def _checkpoint(trainer: Trainer) -> Location | None:
    """The checkpoint of the step that was taken last, if it is whole.

    Raises:
        CheckpointError: when a store does not say.
    """
    save = trainer.config.checkpoint.save
    if save is None:
        return None
    path = Checkpoints(location(save)).path(trainer.iteration)
    try:
        Manifest.open(path)
    except DamagedError:
        return None
    return path
