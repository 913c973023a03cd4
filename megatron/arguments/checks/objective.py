"""Checks of the objectives that read preferences or a frozen model."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.errors import Problem
from megatron.config.run import RunConfig
from megatron.config.text import flag


def check_teacher(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there is one teacher."""
    training = config.training
    if training.objective != "distillation":
        return
    given = [flag(name) for name in ("teacher_model", "teacher_logits") if getattr(training, name) is not None]
    if len(given) != 1:
        sentence = "--objective distillation needs either --teacher-model or --teacher-logits"
        yield Problem("E322", sentence, tuple(f"drop {name}" for name in given) or ("--teacher-model CHECKPOINT",))
