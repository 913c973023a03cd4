"""WANDB_MODE, and the error message if Weights & Biases cannot be opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron.training.sinks import said

MODES = ("online", "offline", "disabled")
OLD_NAMES = ("run", "dryrun", "shared")  # also accepted by the client


def turned_off(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``WANDB_MODE`` disables Weights & Biases."""
    return variables.get("WANDB_MODE") == "disabled"


def check_mode(variables: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if ``WANDB_MODE`` is unknown."""
    mode = variables.get("WANDB_MODE") or MODES[0]
    if mode not in MODES + OLD_NAMES:
        raise ValueError(f"WANDB_MODE={mode} is unknown: the modes are {', '.join(MODES)}")


def refusal(error: Exception, journal: Path) -> str:
    """Return why the client could not be opened, a fix, and where the rows are kept."""
    why = said(error)
    if isinstance(error, ModuleNotFoundError):
        why, fix = f"it needs a package that is not installed ({error.name})", "pip install wandb"
    elif "wandb login" in why:
        why, fix = "no user is logged in", "wandb login, or WANDB_MODE=offline"
    elif isinstance(error, ValueError):
        fix = "WANDB_MODE=offline"
    else:
        fix = "WANDB_MODE=offline writes to this disk"
    return f"{why}: {fix}; {journal} keeps the rows and sends them when this run is resumed from a checkpoint"
