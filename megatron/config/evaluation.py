"""Evaluation by other programs during training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import Need, option
from megatron.config.training import TRAINING_STEPS

TASKS = Need("evaluate_tasks", "--evaluate-tasks")


@dataclass(frozen=True)
class EvaluationConfig:
    """Tasks of lm-eval that are evaluated during training."""

    evaluate_tasks: tuple[str, ...] = option((), role="start", formerly="training", needs=TRAINING_STEPS)
    """Tasks of lm-eval to evaluate during training, such as hellaswag arc_easy."""
    evaluate_tasks_interval: int = option(1000, role="start", formerly="training", at_least=1, needs=TASKS)
    """Steps between evaluations of tasks."""
    evaluate_tasks_limit: int | None = option(None, role="start", formerly="training", at_least=1, needs=TASKS)
    """Examples of each task to evaluate. Default: all."""
    evaluate_tasks_path: str | None = option(None, role="start", formerly="training", needs=TASKS)
    """Folder with definitions of further tasks (YAML). It can contain code, which is run: ``!function`` names it."""
