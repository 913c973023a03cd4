"""Checks of the stop file and of evaluation without training."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isdir  # unlike pathlib's it does not raise for a very long name

from megatron.checkpoint.remote import RemotePath, location
from megatron.config.checks.checkpoint import holds_checkpoints
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def check_stop_file(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the stop file can be created and is cheap to poll: rank 0 looks for it after every step."""
    name = config.training.stop_file
    if name is None:
        return
    if name == "":
        yield Problem("E311", "--stop-file '' names no file", ("--stop-file runs/mine/stop", "drop --stop-file"))
        return
    path = location(str(name))
    if isinstance(path, RemotePath):
        sentence = f"--stop-file {path} must be on a disk, because it is polled after every step"
        yield Problem("E311", sentence, ("--stop-file runs/mine/stop",))
    elif isdir(path):
        sentence = f"--stop-file {path} is a folder, so the run would stop at once"
        yield Problem("E311", sentence, (f"--stop-file {path / 'stop'}",))
    elif not isdir(path.parent):
        sentence = f"--stop-file {path}: the folder {path.parent} does not exist"
        yield Problem("E311", sentence, (f"mkdir -p {path.parent}",))


def check_skip_train(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--skip-train`` has weights and batches to evaluate."""
    if not config.training.skip_train:
        return
    checkpoint = config.checkpoint
    if config.training.eval_iters == 0:
        sentence = "--skip-train only evaluates, and --eval-iters 0 turns evaluation off"
        yield Problem("E312", sentence, ("--eval-iters 100", "drop --skip-train"))
    if checkpoint.load is None and not holds_checkpoints(checkpoint.save):
        reason = "" if checkpoint.save is None else f"; --save {checkpoint.save} contains none"
        sentence = f"--skip-train needs a checkpoint to evaluate{reason}"
        yield Problem("E312", sentence, ("--load RUN", "drop --skip-train"))


STOPPING_CHECKS = (check_stop_file, check_skip_train)
