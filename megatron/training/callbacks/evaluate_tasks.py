"""Run tasks of lm-eval on the model in training (``--evaluate-tasks``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.errors import Problem, UserError
from megatron.convert.tokenizer_files import by_huggingface_names
from megatron.distributed.launch import run_on_rank0
from megatron.inference.harness import HarnessModel, SharedModel, as_language_model
from megatron.inference.text import InferenceError, load_tokenizer, open_codec, stop_ids
from megatron.training.callbacks.base import Callback
from megatron.training.metrics import StepMetrics
from megatron.training.trainer import Trainer


class EvaluateTasks(Callback):
    """Runs tasks of lm-eval on the model in training, every ``--evaluate-tasks-interval`` steps."""

    def __init__(self, trainer: Trainer) -> None:
        """Load the tokenizer and the tasks.

        Raises:
            UserError: if lm-eval is not installed, a task does not exist or cannot be loaded, the run has no tokenizer,
                or a task generates text, which sequence parallelism excludes.
        """
        super().__init__(trainer)
        config = trainer.config
        self.interval = config.evaluation.evaluate_tasks_interval
        self._limit = config.evaluation.evaluate_tasks_limit
        language_model = as_language_model(HarnessModel)
        try:
            files = by_huggingface_names(trainer.files)
            tokenizer = load_tokenizer(files, config.model)
            ends = stop_ids(files, open_codec(files)) | ({tokenizer.eos_token_id} - {None})
            self._shared = SharedModel(trainer, tokenizer, ends, config.training.micro_batch_size)
            self._model = language_model(self._shared)
        except InferenceError as error:
            raise UserError([Problem("E709", f"--evaluate-tasks: {error}")]) from error
        self._tasks: Any = None  # of rank 0
        self._generates = run_on_rank0(self._load_tasks, trainer.mesh.world)
        if self._generates and config.parallel.sequence_parallel:
            sentence = f"--evaluate-tasks {self._generates} generates text, without --sequence-parallel only"
            raise UserError([Problem("E709", sentence, ("--no-sequence-parallel",))])

    def _load_tasks(self) -> str:
        """Load the tasks; return the name of one that generates text, or an empty string."""
        from lm_eval.tasks import TaskManager

        evaluation = self.trainer.config.evaluation
        names = [*evaluation.evaluate_tasks]
        for defaults in (False, True):  # to list lm-eval's own tasks takes seconds
            manager = TaskManager(include_path=evaluation.evaluate_tasks_path, include_defaults=defaults)
            missing = [name for name in names if not manager.match_tasks([name])]
            if not missing:
                break
        if missing:
            sentence = f"--evaluate-tasks {missing[0]}: lm-eval has no such task"
            raise UserError([Problem("E709", sentence, ("lm-eval ls tasks", "--evaluate-tasks-path FOLDER"))])
        try:
            self._tasks = manager.load(names)
        except Exception as error:  # whatever the code of a task and the library of its data raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            sentence = f"--evaluate-tasks {' '.join(names)}: the tasks cannot be loaded: {reason}"
            raise UserError([Problem("E709", sentence)]) from error
        for task in self._tasks["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=self.trainer.config.training.seed)
        generating = (n for n, task in self._tasks["tasks"].items() if task.OUTPUT_TYPE == "generate_until")
        return next(generating, "")

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Evaluate, and log the results as ``TASK/METRIC``."""
        found: dict[str, float] = {}

        def act() -> None:
            from lm_eval import evaluate

            results = evaluate(
                self._model, self._tasks, limit=self._limit, bootstrap_iters=0, log_samples=False, verbosity="ERROR"
            )
            found.update(scalar_results(results["results"]))

        parts = [part for chunk in self.trainer.chunks.values() for part in chunk.parts]
        if self._generates:  # the weights are used once for every token
            with self.trainer.optimizer.weights.gathered(parts):
                self._shared.run(act)
        else:
            self._shared.run(act)
        self.log.log(found)
        self.log.note(f"tasks at {self.trainer.iteration}: " + " ".join(f"{n} {x:.4g}" for n, x in found.items()))


def scalar_results(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of all tasks as ``TASK/METRIC``, or ``TASK/METRIC/FILTER`` if answers are filtered."""
    found = {}
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, chosen = name.partition(",")
            if isinstance(value, int | float) and chosen and not metric.endswith("_stderr"):
                found[f"{task}/{metric}" + (f"/{chosen}" if chosen != "none" else "")] = float(value)
    return found
