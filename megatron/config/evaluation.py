"""Evaluation by other programs during training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import isdir  # unlike pathlib's it does not raise for a very long name

from megatron.config.errors import Problem
from megatron.config.option import Need, Run, option
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

    def check_evaluated_tasks(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that lm-eval is installed and the folder of tasks exists; the start loads the tasks themselves."""
        folder = self.evaluate_tasks_path
        if not self.evaluate_tasks:
            return
        if find_spec("lm_eval") is None:
            sentence = "--evaluate-tasks needs lm-eval, which is not installed"
            yield Problem("E709", sentence, ("pip install 'megatron-pretrain[evaluate]'", "drop --evaluate-tasks"))
        if folder is not None and not isdir(folder):
            yield Problem("E709", f"--evaluate-tasks-path {folder} is not a folder", ("drop --evaluate-tasks-path",))
