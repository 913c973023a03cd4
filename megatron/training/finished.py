"""Write ``finished.json`` into the run's folder once training has ended, for scripts that requeue a job.

A launcher's exit status is not enough: it is lost with the node of the batch script, and a scheduler may report 0
itself. The file exists exactly if the last step has been taken and saved: it is written after the checkpoint, and a
start with steps left, for example of a run that was extended, removes it before its first step.
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
    """Remove the file because there are steps left; collective.

    Raises:
        OSError: on every rank, if it cannot be removed.
        SupersededError: on every rank, if a later start owns the ``save`` folder: the file may be its own.
    """
    if folder := _folder(trainer):
        on_first(lambda: _remove_if_ours(trainer, folder), trainer.mesh.world)


def declare(trainer: Trainer) -> None:
    """Write the file after the last step has been saved; collective.

    Raises:
        StorageError: on every rank, if it cannot be written. The next start, which has nothing else to do, retries.
        SupersededError: on every rank, if a later start owns the ``save`` folder.
    """
    if folder := _folder(trainer):
        on_first(lambda: _write_if_ours(trainer, folder), trainer.mesh.world)


def is_saved(trainer: Trainer) -> bool:
    """Return True if the ``save`` folder has a complete checkpoint of the last step taken; collective."""
    return on_first(lambda: _checkpoint(trainer) is not None, trainer.mesh.world)


def write(folder: Path, facts: Facts) -> None:
    """Write the file atomically and durably.

    Raises:
        StorageError: if it cannot be written.
    """
    path = folder / NAME
    part = folder / f"{NAME}.part"
    try:
        part.unlink(missing_ok=True)
        write_file(part, (json.dumps(facts, indent=2) + "\n").encode())
        os.rename(part, path)
        sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        sentence = f"{path}, which marks the end of training, cannot be written: {in_words(error)}"
        raise StorageError(sentence, "free some space and start the run again: it only writes this file") from error


def _write_if_ours(trainer: Trainer, folder: Path) -> None:
    if trainer.claims.save is not None:
        trainer.claims.save.check()
    write(folder, _facts(trainer))


def _remove_if_ours(trainer: Trainer, folder: Path) -> None:
    if trainer.claims.save is not None:
        trainer.claims.save.check()
    (folder / NAME).unlink(missing_ok=True)


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
    """Return the checkpoint of the last step taken, or None if it is missing or damaged."""
    save = trainer.config.checkpoint.save
    if save is None:
        return None
    path = Checkpoints(location(save)).path(trainer.iteration)
    try:
        Manifest.open(path)
    except DamagedError:
        return None
    return path
