"""Whether a run can be told to stop as was asked for, and whether there is something to evaluate without training."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isdir  # unlike pathlib's it answers for a name of any length

from megatron.checkpoint.remote import RemotePath, location
from megatron.config.checks.checkpoint import holds_checkpoints
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def stop_file(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Somebody can put a file there, and it is quick to look for: rank 0 does after every step."""
    name = config.training.stop_file
    if name is None:
        return
    if name == "":
        yield Problem("E311", "--stop-file '' names no file", ("--stop-file runs/mine/stop", "drop --stop-file"))
        return
    path = location(str(name))
    if isinstance(path, RemotePath):
        sentence = f"--stop-file {path} is in an object store, which is not asked after every step"
        yield Problem("E311", sentence, ("--stop-file runs/mine/stop",))
    elif isdir(path):
        sentence = f"--stop-file {path} is a folder, so the run would stop at once"
        yield Problem("E311", sentence, (f"--stop-file {path / 'stop'}",))
    elif not isdir(path.parent):
        sentence = f"--stop-file {path}: there is no folder {path.parent}, so nobody could put the file there"
        yield Problem("E311", sentence, (f"mkdir -p {path.parent}",))


def skip_train(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """An evaluation alone has weights and batches to evaluate."""
    if not config.training.skip_train:
        return
    c = config.checkpoint
    if config.training.eval_iters == 0:
        sentence = "--skip-train evaluates and nothing else, and --eval-iters 0 turns evaluation off"
        yield Problem("E312", sentence, ("--eval-iters 100", "drop --skip-train"))
    if c.load is None and not holds_checkpoints(c.save):
        there = "nothing is said to load" if c.save is None else f"--save {c.save} holds no checkpoint"
        sentence = f"--skip-train: {there}, so there is nothing to evaluate"
        yield Problem("E312", sentence, ("--load RUN", "drop --skip-train"))


CHECKS = (stop_file, skip_train)
