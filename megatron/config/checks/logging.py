"""Checks of the folders and names that a run logs to."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import exists, isdir  # unlike pathlib's they do not raise for a very long name
from pathlib import Path

from megatron.config.problems import Problem
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS

NAMED_PLACES = ("run_dir", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir", "wandb_entity")


def check_empty_names(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject empty names of folders and projects."""
    for name in NAMED_PLACES:
        if getattr(config.logging, name) == "":
            flag = SETTINGS[name].flag
            yield Problem("E702", f"{flag} '' is empty", (f"drop {flag}", f"{flag} NAME"))


def check_run_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that ``--run-dir`` is a folder or can be created. Rank 0 finds out later whether it is writable."""
    if not config.logging.run_dir:
        return
    folder = Path(str(config.logging.run_dir))
    existing = next(path for path in (folder, *folder.parents) if exists(path))
    if not isdir(existing):
        where = "it" if existing == folder else str(existing)
        yield Problem("E701", f"--run-dir {folder}: {where} is a file, not a folder", (f"--run-dir {existing}-run",))


LOGGING_CHECKS = (check_empty_names, check_run_folder)
