"""Record timelines of the pipeline's actions in selected steps, in the simulator's format.

Only the pipeline of rank 0 is recorded, not those of other data-parallel and tensor-parallel ranks.
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
"""Subfolder of the run folder."""


class PipelineProfiler:
    """Records selected steps. Errors of writing are warnings and never end the run."""

    def __init__(
        self,
        config: ProfilingConfig,
        run_dir: str | None,
        trainer: Trainer,
        say: Callable[[str], None] = say,
        warn: Callable[[str], None] = warn,
    ) -> None:
        """Set up without recording.

        Args:
            config: which steps to record.
            run_dir: the run folder; None disables timelines.
            trainer: owner of the pipeline.
            say: prints a line.
            warn: prints a warning.

        """
        self._pipeline = trainer.pipeline
        self._group = trainer.mesh.pipeline
        self._device = trainer.device
        self._schedule = str(trainer.config.parallel.pipeline_schedule)
        self._say = say
        self._warn = warn
        self._folder = Path(run_dir) / FOLDER if run_dir is not None and 0 in self._group.ranks else None
        self._windows: list[range] = []
        if config.profile_pipeline:
            self._windows.append(range(config.profile_step_start, config.profile_step_end))

    def ask(self, after: int, steps: int) -> None:
        """Also record the ``steps`` steps after step ``after``."""
        self._windows.append(range(after + 1, after + 1 + steps))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap step ``number``, counted from 1. A step that raises has no timeline: gathering is collective."""
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
            self._warn(f"no timeline of step {number}: it was replayed as a CUDA graph, which has no separate actions")
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(timeline, path)
        except OSError as error:
            with suppress(OSError):  # remove an incomplete file
                path.unlink(missing_ok=True)
            self._warn(f"no timeline of step {number}, training continues: {error}")
        else:
            self._say(f"timeline of the pipeline in step {number}: {path}")
