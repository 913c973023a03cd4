"""Whether checkpoints can be written and found, and what is taken over from them makes sense."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from os.path import exists, isdir, isfile  # unlike pathlib's they answer for a name of any length
from pathlib import Path

from megatron.checkpoint.remote import Location, RemotePath, location, missing_library
from megatron.config.problems import Problem, did_you_mean
from megatron.config.run import HUGGING_FACE, RunConfig

MEGATRON_LM = "latest_checkpointed_iteration.txt"
"""The file that Megatron-LM keeps in every folder of checkpoints."""


def load_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """What to start from is there, and is ours. The folder that checkpoints are saved to may still have to be made.

    A run that has checkpoints of its own goes on from those, whatever has become of the place it began with.
    """
    c = config.checkpoint
    if c.load in ("", HUGGING_FACE):
        yield Problem("E801", f"--load '{c.load}' names no folder", ("drop --load",))
        return
    if c.load is None or str(c.load).startswith(HUGGING_FACE) or _one_folder(config) or holds_checkpoints(c.save):
        return
    folder = location(str(c.load))
    if isinstance(folder, RemotePath):
        yield from _store("E801", "--load", folder, world_size)
    elif not isdir(folder):
        beside = folder.parent.iterdir() if isdir(folder.parent) else ()
        guess = did_you_mean(folder.name, sorted(path.name for path in beside if isdir(path)))
        fixes = (f"--load {folder.parent / guess}",) if guess else ("drop --load",)
        yield Problem("E801", f"--load {folder}: there is no such folder", fixes)
    elif isfile(folder / MEGATRON_LM):
        sentence = f"--load {folder} holds checkpoints of Megatron-LM, which are not read"
        yield Problem("E801", sentence, ("convert them to Hugging Face's form and --load hf:DIR",))
    elif isfile(folder / "config.json"):
        fixes = (f"--load {HUGGING_FACE}{folder}",)
        yield Problem("E801", f"--load {folder} is a Hugging Face model, no folder of checkpoints", fixes)


def save_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Checkpoints can be written, each into a folder of its own."""
    if config.checkpoint.save is None:
        return
    if config.checkpoint.save == "":
        yield Problem("E802", "--save '' names no folder", ("--save checkpoints", "drop --save"))
        return
    folder = location(str(config.checkpoint.save))
    if isinstance(folder, RemotePath):
        yield from _store("E802", "--save", folder, world_size)
        return
    there = next(path for path in (folder, *folder.parents) if exists(path))
    if not isdir(there):
        yield Problem("E802", f"--save {folder}: {there} is no folder", (f"--save {there}-checkpoints",))
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Problem("E802", f"--save {folder}: {there} cannot be written to")
    elif _step(folder) is not None:
        sentence = f"--save {folder} names one checkpoint; the folder of all is wanted"
        yield Problem("E802", sentence, (f"--save {folder.parent}",))
    elif isfile(folder / MEGATRON_LM):
        sentence = f"--save {folder} holds checkpoints of Megatron-LM"
        yield Problem("E802", sentence, (f"--save {folder}-new",))


def _store(code: str, option: str, place: RemotePath, world_size: int) -> Iterator[Problem]:
    """What speaks against a place in an object store, as far as it can be said without asking the store."""
    missing = missing_library(place)
    if missing is not None:
        yield Problem(code, f"{option} {missing[0]}", (missing[1],))
    elif not place.bucket:
        yield Problem(code, f"{option} {place.scheme}:// names no bucket", (f"{option} {place.scheme}://BUCKET/RUN",))
    elif place.scheme == "memory" and world_size > 1:
        sentence = f"{option} {place}: {world_size} ranks have no memory in common"
        yield Problem(code, sentence, (f"{option} A_FOLDER_THAT_ALL_RANKS_SHARE",))
    elif code == "E802" and _step(place) is not None:
        sentence = f"{option} {place} names one checkpoint; the folder of all is wanted"
        yield Problem(code, sentence, (f"{option} {place.parent}",))


def local_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Checkpoints on the nodes' own disks come between those in ``save``, and have another place."""
    c = config.checkpoint
    if c.local_save is None:
        return
    if c.local_save == "":
        yield Problem(
            "E804", "--local-save '' names no folder", ("--local-save /dev/shm/checkpoints", "drop --local-save")
        )
        return
    if c.save is None:
        sentence = "--local-save without --save: what is on the nodes' own disks is lost with them"
        yield Problem("E804", sentence, ("--save checkpoints", "drop --local-save"))
    elif Path(c.local_save).resolve() == location(c.save).resolve():
        sentence = f"--local-save {c.local_save} is the --save folder"
        yield Problem("E804", sentence, ("--local-save /dev/shm/checkpoints", "drop --local-save"))
    if c.local_save_interval is None:
        sentence = "--local-save without --local-save-interval: nothing would be written there"
        yield Problem("E804", sentence, ("--local-save-interval 50", "drop --local-save"))
    if isinstance(location(c.local_save), RemotePath):
        sentence = f"--local-save {c.local_save} is in an object store, which is no node's own disk"
        yield Problem("E804", sentence, (f"--save {c.local_save}", "--local-save /dev/shm/checkpoints"))
    for name in sorted({*re.findall(r"{[^{}]*}", c.local_save)} - {"{node}"}):
        sentence = f"--local-save {c.local_save}: {name} stands for nothing; {{node}} is the node's number"
        yield Problem("E804", sentence, (f"--local-save {c.local_save.replace(name, '{node}')}",))


def resume(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """What is taken over goes with where it comes from."""
    c = config.checkpoint
    if c.load is not None and str(c.load).startswith(HUGGING_FACE):
        yield from _hugging_face(config)
    elif c.resume_mode == "weights-only" and c.save is not None and (c.load is None or _one_folder(config)):
        sentence = f"weights-only starts a new run, and --save {c.save} would be the old one's folder"
        yield Problem("E803", sentence, (f"--load {c.load or c.save} --save {c.save}-new", "--resume-mode exact"))
    elif c.load is not None and c.ckpt_step is not None and _step(location(c.load)) not in (None, c.ckpt_step):
        sentence = f"--load {c.load} and --ckpt-step {c.ckpt_step} name two checkpoints"
        yield Problem("E803", sentence, (f"--load {location(c.load).parent}", "--set checkpoint.ckpt_step=null"))


def _hugging_face(config: RunConfig) -> Iterator[Problem]:
    c = config.checkpoint
    if c.resume_mode == "new-schedule":
        sentence = f"--load {c.load}: a Hugging Face model has weights and nothing else to take over"
        yield Problem("E803", sentence, ("--resume-mode weights-only",))
    if c.ckpt_step is not None:
        sentence = f"--load {c.load}: a Hugging Face model has no --ckpt-step {c.ckpt_step}"
        yield Problem("E803", sentence, ("--set checkpoint.ckpt_step=null",))


def holds_checkpoints(folder: str | None) -> bool:
    """Whether a folder holds one called like a checkpoint, or is one.

    A store that does not answer may hold some; whoever looks for them next says what is wrong.
    """
    if folder is None or str(folder).startswith(HUGGING_FACE):
        return False
    path = location(str(folder))
    if isinstance(path, RemotePath):
        try:
            return any(_step(each) is not None for each in (path, *path.folders()))
        except OSError:
            return True
    return isdir(path) and any(_step(each) is not None for each in (path, *path.iterdir()))


def _one_folder(config: RunConfig) -> bool:
    """Whether checkpoints are saved to where they are loaded from."""
    c = config.checkpoint
    if c.load is None or c.save is None:
        return False
    load = location(str(c.load)).resolve()
    return location(str(c.save)).resolve() == (load if _step(load) is None else load.parent)


def _step(folder: Location) -> int | None:
    """The step of a folder that is one checkpoint, by its name."""
    match = re.fullmatch(r"iter_(\d+)", folder.name)
    return int(match[1]) if match else None


def remarks(config: RunConfig) -> Iterator[str]:
    """A line where a run that crashes would have saved nothing, or where nodes save in vain."""
    c = config.checkpoint
    if c.save is not None and c.save_interval is None:
        yield "--save without --save-interval: checkpoints are written only when the run ends or is stopped"
    if c.local_save is not None and c.save_interval is None:
        yield "--local-save without --save-interval: when more than one node is lost at once, so are all steps"
    if c.local_save_interval and c.save_interval and c.local_save_interval % c.save_interval == 0:
        sentence = f"--local-save-interval {c.local_save_interval}: each of these steps is saved to --save as well"
        yield f"{sentence} (--save-interval {c.save_interval}), so a crash loses no fewer steps"


CHECKS = (load_folder, save_folder, local_folder, resume)
