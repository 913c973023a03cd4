"""Whether the places that a run reports to have names."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import exists, isdir  # unlike pathlib's they answer for a name of any length
from pathlib import Path

from megatron.config.problems import Problem
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS

PLACES = ("run_dir", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir", "wandb_entity")


def empty_names(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """An empty name is none, but says that there should be one."""
    for name in PLACES:
        if getattr(config.logging, name) == "":
            place = SETTINGS[name].flag
            yield Problem("E702", f"{place} '' names nothing", (f"drop {place}", f"{place} NAME"))


def run_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The run's folder is one, or can become one. Whether rank 0 may write there is seen when it does."""
    if not config.logging.run_dir:
        return
    folder = Path(str(config.logging.run_dir))
    there = next(path for path in (folder, *folder.parents) if exists(path))
    if not isdir(there):
        what = "it" if there == folder else str(there)
        yield Problem("E701", f"--run-dir {folder}: {what} is a file, no folder", (f"--run-dir {there}-run",))


CHECKS = (empty_names, run_folder)
