"""Checks of the folders that checkpoints are loaded from and saved to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from os.path import exists, isdir, isfile  # unlike pathlib's they do not raise for a very long name
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.format import MEGATRON_LM_NEWEST, is_megatron_lm
from megatron.checkpoint.framework_folders import find_framework_checkpoint
from megatron.checkpoint.location import Location, parse_location
from megatron.config.errors import Problem, UserError
from megatron.config.files import FOLLOW_LINKS, describe_outside_links
from megatron.config.run import RunConfig
from megatron.config.schemes import (
    FRAMEWORK_PREFIXES,
    HUGGING_FACE_PREFIX,
    MEGATRON_PREFIX,
    PEFT_PREFIX,
    WEIGHTS_PREFIXES,
    split_scheme,
)
from megatron.config.text import did_you_mean, flag, shell_word

if TYPE_CHECKING:
    from megatron.checkpoint.object_store import RemotePath


def check_load_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--load`` is not misspelt or of another format, unless ``--save`` holds checkpoints to resume from.

    The folder need not exist yet: a run without a checkpoint starts from scratch.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is not None and not _same_folder(config) and not holds_checkpoints(save):
        yield from _source_problems("--load", load, world_size)


def check_pretrained_checkpoint(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--pretrained-checkpoint`` is a model, and with adapters given."""
    location, load, adapters = config.checkpoint.pretrained_checkpoint, config.checkpoint.load, config.model.lora_rank
    if location is None:
        return
    if load is not None and load != config.checkpoint.save and adapters is None:
        sentence = "--load and --pretrained-checkpoint both name the weights to start from"
        other = load.startswith(WEIGHTS_PREFIXES) or holds_checkpoints(load)  # what Megatron-LM reads
        yield Problem("E806", sentence, ("drop --pretrained-checkpoint" if other else "drop --load",))
    elif load is not None and load.startswith((*WEIGHTS_PREFIXES, MEGATRON_PREFIX)):
        yield Problem("E806", f"--load {load} holds no adapters, which --lora-rank trains", ("drop --load",))
    elif adapters is not None or not holds_checkpoints(config.checkpoint.save):
        yield from _source_problems("--pretrained-checkpoint", location, world_size)


def check_frozen_models(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the reference and the teacher of the objective are models."""
    for name in ("reference_model", "teacher_model"):
        location, option = getattr(config.training, name), flag(name)
        if location is None:
            continue
        yield from _source_problems(option, location, world_size)
        folder = location.removeprefix(HUGGING_FACE_PREFIX)
        if folder != location and folder.startswith((".", "/")) and not isdir(Path(folder)):
            yield Problem("E801", f"{option} {location}: the folder does not exist", (f"drop {option}",))


def _source_problems(option: str, load: str, world_size: int) -> Iterator[Problem]:
    """Yield a problem of the value of an option that names a model or checkpoints, if it has one."""
    scheme, place = split_scheme(load)
    converted = (f"python tools/convert_checkpoint.py --load {shell_word(load)} --save NEW",)
    if not place:
        yield Problem("E801", f"{option} '{load}' has no folder name", (f"drop {option}",))
    elif scheme in FRAMEWORK_PREFIXES and option == "--pretrained-checkpoint":
        sentence = f"{option} {load} is a checkpoint of another program, which adapters read from a checkpoint of this"
        yield Problem("E801", sentence, converted)
    elif scheme in FRAMEWORK_PREFIXES:
        try:
            find_framework_checkpoint(scheme, place, option)
        except UserError as error:
            yield from error.problems
    elif scheme == PEFT_PREFIX and option in ("--load", "--pretrained-checkpoint"):
        sentence = f"{option} {load} is an adapter of PEFT, which a run reads from a checkpoint"
        yield Problem("E801", sentence, converted)
    elif scheme in ("", MEGATRON_PREFIX):
        yield from _checkpoint_problems(option, load, world_size)


def _checkpoint_problems(option: str, load: str, world_size: int) -> Iterator[Problem]:
    """Yield a problem of a location of checkpoints, of this program or of Megatron-LM."""
    scheme, _ = split_scheme(load)
    folder = parse_location(load)
    if not isinstance(folder, Path):
        yield from _store_problems("E801", option, folder, world_size)
    elif not isdir(folder) and (close := did_you_mean(folder.name, _folders_beside(folder))):
        sentence = f"{option} {folder}: the folder does not exist; did you mean {folder.parent / close}?"
        yield Problem("E801", sentence, (f"{option} {folder.parent / close}", f"drop {option}"))
    elif scheme == MEGATRON_PREFIX:
        if not isfile(folder / MEGATRON_LM_NEWEST) and not is_megatron_lm(folder):
            sentence = f"{option} {load} is neither a folder of Megatron-LM's checkpoints nor one of them"
            below = [each for each in _folders_beside(folder / "any") if isfile(folder / each / MEGATRON_LM_NEWEST)]
            found = tuple(f"{option} {MEGATRON_PREFIX}{folder / each}" for each in below[:2])
            yield Problem("E801", sentence, found or (f"{option} {MEGATRON_PREFIX}FOLDER_WITH_{MEGATRON_LM_NEWEST}",))
    elif isfile(folder / MEGATRON_LM_NEWEST) or is_megatron_lm(folder):
        sentence = f"{option} {folder} holds checkpoints of Megatron-LM"
        yield Problem("E801", sentence, (f"{option} {MEGATRON_PREFIX}{folder}",))
    elif isfile(folder / "config.json"):
        fixes = (f"{option} {HUGGING_FACE_PREFIX}{folder}",)
        yield Problem("E801", f"{option} {folder} is a Hugging Face model, not a folder of checkpoints", fixes)


def _folders_beside(path: Path) -> list[str]:
    try:
        return sorted(each.name for each in path.parent.iterdir() if isdir(each))
    except OSError:  # there is no such folder, or it is closed to this user
        return []


def check_required_checkpoint(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there is a checkpoint for flags that need one."""
    checkpoint = config.checkpoint
    load = checkpoint.first_start.load
    folders = {"--load": load, "--save": checkpoint.save}
    if (load or "").startswith(WEIGHTS_PREFIXES) or any(map(holds_checkpoints, folders.values())):
        return
    reason = "".join(f"; {flag} {folder} contains none" for flag, folder in folders.items() if folder is not None)
    if config.training.skip_train:
        sentence = f"--skip-train needs a checkpoint to evaluate{reason}"
        yield Problem("E312", sentence, ("--load RUN", "drop --skip-train"))
    elif checkpoint.exit_on_missing_checkpoint:
        sentence = f"--exit-on-missing-checkpoint needs a checkpoint to start from{reason}"
        yield Problem("E801", sentence, ("--load RUN", "drop --exit-on-missing-checkpoint"))


def check_stop_file(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the stop file can be created and is cheap to poll: rank 0 looks for it after every step."""
    name = config.training.stop_file
    if name is None:
        return
    path = parse_location(name)
    if name == "":
        yield Problem("E311", "--stop-file '' names no file", ("--stop-file runs/mine/stop", "drop --stop-file"))
    elif not isinstance(path, Path):
        sentence = f"--stop-file {path} must be on a disk, because it is polled after every step"
        yield Problem("E311", sentence, ("--stop-file runs/mine/stop",))
    elif isdir(path):
        sentence = f"--stop-file {path} is a folder, so the run would stop at once"
        yield Problem("E311", sentence, (f"--stop-file {path / 'stop'}",))
    elif not isdir(path.parent):
        sentence = f"--stop-file {path}: the folder {path.parent} does not exist"
        yield Problem("E311", sentence, (f"mkdir -p {path.parent}",))


def check_links(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that no links lead out of the Hugging Face folders that the run loads."""
    start, training = config.checkpoint, config.training
    for load in (start.load, start.pretrained_checkpoint, training.reference_model, training.teacher_model):
        if load is not None and load.startswith(WEIGHTS_PREFIXES) and not config.data.follow_links:
            yield from link_problems(Path(split_scheme(load)[1]))


MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model", ".pt", ".distcp")
"""Of the files that are read from a folder of Hugging Face, or of another program's checkpoint."""


def link_problems(folder: Path, files: Iterable[Path] | None = None) -> Iterator[Problem]:
    """Yield a problem if ``files``, by default those of a Hugging Face model in the folder, lie outside of it."""
    if isdir(folder) and (links := describe_outside_links(folder, files, MODEL_SUFFIXES)):
        yield Problem("E853", links, (FOLLOW_LINKS,))


def check_save_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that checkpoints can be written, and that the folder is not itself a checkpoint."""
    save = config.checkpoint.save
    if save is None:
        return
    folder = parse_location(save)
    if not isinstance(folder, Path):
        yield from _store_problems("E802", "--save", folder, world_size)
        return
    existing = next(path for path in (folder, *folder.parents) if exists(path))
    if save == "":
        yield Problem("E802", "--save '' is empty", ("--save checkpoints", "drop --save"))
    elif not isdir(existing):
        yield Problem("E802", f"--save {folder}: {existing} is not a folder", (f"--save {existing}-checkpoints",))
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem("E802", f"--save {folder}: {existing} is not writable")
    elif _step(folder) is not None:
        sentence = f"--save {folder} is one checkpoint; give the folder that contains it"
        yield Problem("E802", sentence, (f"--save {folder.parent}",))
    elif isfile(folder / MEGATRON_LM_NEWEST):
        yield Problem("E802", f"--save {folder} holds checkpoints of Megatron-LM", (f"--save {folder}-new",))


def _store_problems(code: str, option: str, place: RemotePath, world_size: int) -> Iterator[Problem]:
    """Yield problems of a place in an object store that can be found without a request to the store."""
    missing = place.missing_library()
    if missing is not None:
        yield Problem(code, f"{option} {missing[0]}", (missing[1],))
    elif not place.bucket:
        yield Problem(code, f"{option} {place.scheme}:// has no bucket", (f"{option} {place.scheme}://BUCKET/RUN",))
    elif place.scheme == "memory" and world_size > 1:
        sentence = f"{option} {place}: {world_size} ranks do not share memory"
        yield Problem(code, sentence, (f"{option} A_FOLDER_THAT_ALL_RANKS_SHARE",))
    elif code == "E802" and _step(place) is not None:
        sentence = f"{option} {place} is one checkpoint; give the folder that contains it"
        yield Problem(code, sentence, (f"{option} {place.parent}",))


def check_local_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that local checkpoints complement those in ``--save``, on disks of the nodes."""
    checkpoint = config.checkpoint
    local, save = checkpoint.local_save, checkpoint.save
    on_node, drop = "--local-save /dev/shm/$USER/checkpoints", "drop --local-save"
    if local is None:
        return
    if local == "":
        yield Problem("E804", "--local-save '' is empty", (on_node, drop))
        return
    if save is None:
        sentence = "--local-save needs --save, because checkpoints on a node's disk are lost with the node"
        yield Problem("E804", sentence, ("--save checkpoints", drop))
    elif Path(local).resolve() == parse_location(save).resolve():
        yield Problem("E804", f"--local-save {local} is the --save folder", (on_node, drop))
    if checkpoint.local_save_interval is None:
        yield Problem("E804", "--local-save needs --local-save-interval", ("--local-save-interval 50", drop))
    if not isinstance(parse_location(local), Path):
        sentence = f"--local-save {local} is in an object store; give a folder on the nodes' disks"
        yield Problem("E804", sentence, (f"--save {local}", on_node))
    for name in sorted({*re.findall(r"{[^{}]*}", local)} - {"{node}"}):
        sentence = f"--local-save {local}: {name} is not a placeholder; only {{node}}, the node's number, is"
        yield Problem("E804", sentence, (f"--local-save {local.replace(name, '{node}')}",))


def check_export(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--save-hf-interval`` exports from a folder on a disk."""
    checkpoint = config.checkpoint
    if checkpoint.save_hf_interval is None or checkpoint.save is None:
        return
    if not isinstance(parse_location(checkpoint.save), Path):
        sentence = (
            f"--save-hf-interval writes to a folder on a disk, and --save {checkpoint.save} is in an object store"
        )
        later = f"drop --save-hf-interval, and later tools/convert_checkpoint.py --load {checkpoint.save} --save-hf DIR"
        yield Problem("E805", sentence, (later,))


def check_resume(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--resume-mode`` and ``--ckpt-step`` fit ``--load``."""
    checkpoint = config.checkpoint
    load, save, step = checkpoint.load, checkpoint.save, checkpoint.ckpt_step
    if load is not None and load.startswith(WEIGHTS_PREFIXES):
        kind = "a Hugging Face model" if load.startswith(HUGGING_FACE_PREFIX) else "what is read of this checkpoint"
        if checkpoint.resume_mode in ("new-schedule", "new-phase"):
            sentence = f"--load {load}: {kind} has only weights, no schedule to continue"
            yield Problem("E803", sentence, ("--resume-mode weights-only",))
        if step is not None:
            sentence = f"--load {load}: {kind} has no --ckpt-step {step}"
            yield Problem("E803", sentence, ("--set checkpoint.ckpt_step=null",))
    elif (
        checkpoint.resume_mode == "weights-only" and holds_checkpoints(save) and (load is None or _same_folder(config))
    ):
        sentence = f"weights-only starts a new run, which cannot save to the folder of the old one, --save {save}"
        yield Problem("E803", sentence, (f"--load {load or save} --save {save}-new", "--resume-mode exact"))
    elif load is not None and step is not None and _step(parse_location(load)) not in (None, step):
        fixes = (f"--load {parse_location(load).parent}", "--set checkpoint.ckpt_step=null")
        yield Problem("E803", f"--load {load} and --ckpt-step {step} name different checkpoints", fixes)


def holds_checkpoints(folder: str | None) -> bool:
    """Return True if a folder contains a checkpoint, by its name, or is one.

    True for a folder that cannot be listed: the error is reported when the checkpoint is read.
    """
    if folder is None or folder.startswith(WEIGHTS_PREFIXES):
        return False
    path = parse_location(folder)
    try:
        if isinstance(path, Path):
            if isfile(path / MEGATRON_LM_NEWEST) or is_megatron_lm(path):
                return True
            return isdir(path) and any(_step(each) is not None for each in (path, *path.iterdir()))
        return any(_step(each) is not None for each in (path, *path.folders()))
    except OSError:
        return True


def _same_folder(config: RunConfig) -> bool:
    """Return True if checkpoints are saved to the folder they are loaded from."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None or save is None:
        return False
    source = parse_location(load).resolve()
    return parse_location(save).resolve() == (source if _step(source) is None else source.parent)


def _step(folder: Location) -> int | None:
    """Return the step of a checkpoint folder, by its name; None for other folders."""
    match = re.fullmatch(r"iter_(\d+)", folder.name)
    return int(match[1]) if match else None


def checkpoint_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about save intervals that lose more steps in a crash than expected."""
    checkpoint = config.checkpoint
    if checkpoint.save is not None and checkpoint.save_interval is None:
        yield "--save without --save-interval: checkpoints are written only when the run ends or is stopped"
    if checkpoint.local_save is not None and checkpoint.save_interval is None:
        yield "--local-save without --save-interval: if two nodes fail at once, all steps since the start are lost"
    local, durable = checkpoint.local_save_interval, checkpoint.save_interval
    if local and durable and local % durable == 0:
        sentence = f"--local-save-interval {local} is a multiple of --save-interval {durable}"
        yield f"{sentence}: local checkpoints do not reduce the steps lost in a crash"
