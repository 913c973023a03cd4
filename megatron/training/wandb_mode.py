"""Whether Weights & Biases is asked for, as its environment says, and what a person is told where it cannot be had."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron.training.sinks import said

MODES = ("online", "offline", "disabled")
OLD_NAMES = ("run", "dryrun", "shared")  # and a mode for runs of several writers; the client takes them


def turned_off(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether nothing is to be reported or kept."""
    return variables.get("WANDB_MODE") == "disabled"


def check_mode(variables: Mapping[str, str] = os.environ) -> None:
    """See that there is such a mode.

    Raises:
        ValueError: when there is not.
    """
    mode = variables.get("WANDB_MODE") or MODES[0]
    if mode not in MODES + OLD_NAMES:
        raise ValueError(f"WANDB_MODE={mode} is none of its modes, which are {', '.join(MODES)}")


def refusal(error: Exception, journal: Path) -> str:
    """Why the client could not be opened, what mends that, and what becomes of the numbers meanwhile."""
    why = said(error)
    if isinstance(error, ModuleNotFoundError):
        why, fix = f"it needs a package that is not installed ({error.name})", "pip install wandb"
    elif "wandb login" in why:
        why, fix = "nobody is logged in", "wandb login, or WANDB_MODE=offline"
    elif isinstance(error, ValueError):
        fix = "WANDB_MODE=offline"
    else:
        fix = "WANDB_MODE=offline keeps the report on this disk"
    return f"{why}: {fix}; {journal} keeps what it misses for a start that goes on from this run's checkpoints"
