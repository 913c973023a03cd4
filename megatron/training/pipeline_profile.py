"""When the actions of the pipeline ran in chosen steps: a timeline for each of them, in the simulator's form.

Of all replicas, and all ranks that share a layer, those of rank 0 record: one pipeline is one timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.config.reporting import ProfilingConfig
from megatron.pipeline.recorder import recording
from megatron.pipeline.simulate import Timeline
from megatron.pipeline.trace import write_trace
from megatron.training.logging import say, warn
from megatron.training.setup import Trainer

FOLDER = "profiles"
"""In the run's folder."""


class PipelineProfiler:
    """Records chosen steps. A file that cannot be written is a warning, never the end of the run."""

    def __init__(
        self,
        config: ProfilingConfig,
        run_dir: str | None,
        trainer: Trainer,
        say: Callable[[str], None] = say,
        warn: Callable[[str], None] = warn,
    ) -> None:
        """Record nothing yet.

        Args:
            config: which steps.
            run_dir: the run's folder; None where there is none, and so no timelines.
            trainer: whose pipeline.
            say: told where a timeline lies.
            warn: told what went wrong.
        """
        self._pipeline, self._group, self._device = trainer.pipeline, trainer.mesh.pipeline, trainer.device
        self._schedule, self._say, self._warn = str(trainer.config.parallel.pipeline_schedule), say, warn
        self._folder = Path(run_dir) / FOLDER if run_dir is not None and 0 in self._group.ranks else None
        self._windows: list[range] = []
        if config.profile_pipeline:
            self._windows.append(range(config.profile_step_start, config.profile_step_end))

    def ask(self, after: int, steps: int) -> None:
        """Record the ``steps`` steps that follow step ``after`` too."""
        self._windows.append(range(after + 1, after + 1 + steps))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step ``number``, from 1. One that raises leaves no timeline: its ranks do not meet again."""
        if self._folder is None or not any(number in window for window in self._windows):
            yield
            return
        with recording(self._pipeline, self._group, self._device) as recorder:
            yield
        timeline = recorder.timeline(self._schedule)
        if self._group.rank == 0:
            self._write(timeline, self._folder / f"step_{number:06d}_pipeline.json", number)

    def _write(self, timeline: Timeline, path: Path, number: int) -> None:
        if not any(timeline.intervals):
            self._warn(f"no timeline of step {number}: it was replayed as a CUDA graph, which is not taken apart")
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(timeline, path)
        except OSError as error:
            with suppress(OSError):  # half of a timeline is none
                path.unlink(missing_ok=True)
            self._warn(f"no timeline of step {number}, training goes on: {error}")
        else:
            self._say(f"timeline of the pipeline in step {number}: {path}")
