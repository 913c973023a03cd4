"""Whether the places that a run reports to have names."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.problems import Problem
from megatron.config.run import RunConfig

PLACES = ("run_dir", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir", "wandb_entity")


def empty_names(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """An empty name is none, but says that there should be one."""
    for name in PLACES:
        if getattr(config.logging, name) == "":
            flag = f"--{name.replace('_', '-')}"
            yield Problem("E702", f"{flag} '' names nothing", (f"drop {flag}", f"{flag} NAME"))


CHECKS = (empty_names,)
