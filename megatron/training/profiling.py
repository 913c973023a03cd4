"""Profile selected steps with PyTorch's profiler: a Chrome trace and a table per recording rank.

In the trace, every step is a range that contains its phases (``forward``, ``backward``, ``optimizer`` ...), the layers
of the model and the communication of every mesh axis: everything marked with ``profiler_range``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron.config.checks.profiling import MOST_STEPS
from megatron.config.reporting import ProfilingConfig
from megatron.parallel.ranges import span
from megatron.training.logging import say, warn
from megatron.training.pipeline_profile import FOLDER, PipelineProfiler
from megatron.training.profile_report import STEP, Account, is_layer
from megatron.training.profile_request import Wish
from megatron.training.trace_file import MemoryCurve, events_of, pack

SUFFIXES = (".json.tmp", ".json", ".json.gz", ".txt", "_memory.pickle")
"""File suffixes of a profile. The first two are temporary; PyTorch creates the first one."""

SNAPSHOT_ENTRIES = 1_000_000
"""Maximum number of allocations in a GPU memory snapshot."""


class Profiler:
    """Profiles selected steps on selected ranks. Errors of the profiler are warnings and never end the run."""

    def __init__(
        self,
        config: ProfilingConfig,
        run_dir: str | None,
        rank: int,
        device: torch.device,
        models: Sequence[nn.Module],
        say: Callable[[str], None] = say,
        warn: Callable[[str], None] = warn,
        pipeline: PipelineProfiler | None = None,
    ) -> None:
        """Set up without recording.

        Args:
            config: which steps and ranks to profile, and what to record.
            run_dir: the run folder; None disables profiles.
            rank: this rank.
            device: device of this rank.
            models: model chunks of this rank; their layers become ranges.
            say: prints a line.
            warn: prints a warning.
            pipeline: profiler of pipeline actions.

        """
        self.config = config
        self.rank = rank
        self.device = device
        self.models = models
        self._pipeline = pipeline
        self._say = say
        self._warn = warn
        self._folder = Path(run_dir) / FOLDER if run_dir is not None and rank in config.profile_ranks else None
        self._windows: list[range] = []
        if self._folder is not None and (config.profile or config.profile_memory):
            self._windows.append(range(config.profile_step_start, config.profile_step_end))
        self._recording: Recording | None = None

    def ask(self, after: int, request: Wish) -> None:
        """Schedule a requested profile of the steps after step ``after``."""
        if request.pipeline and self._pipeline is not None:
            self._pipeline.ask(after, request.pipeline)
        if not request.profile:
            return
        if self.rank == 0:
            ranks = " ".join(map(str, self.config.profile_ranks))
            steps = f"steps {after + 1} to {after + request.profile}"
            self._say(f"profile requested of {steps}, recorded on --profile-ranks {ranks}")
        if self._folder is not None:
            self._windows.append(range(after + 1, after + 1 + request.profile))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap step ``number``, counted from 1. If the step raises, the profile is written up to this step."""
        if self._recording is None and self._is_selected(number):
            self._start(number)
        complete = False
        try:
            pipeline_step = self._pipeline.step(number) if self._pipeline is not None else nullcontext()
            with span(f"{STEP}{number}"), pipeline_step:
                yield
            complete = True
        finally:
            if self._recording is not None:
                next_step = number + 1
                full = next_step - self._recording.first >= MOST_STEPS
                if not complete or full or not self._is_selected(next_step):
                    self._finish(number)

    def close(self, number: int) -> None:
        """Write an unfinished profile when the run ends after step ``number``."""
        if self._recording is not None:
            self._finish(number)

    def _is_selected(self, number: int) -> bool:
        return any(number in window for window in self._windows)

    def _start(self, number: int) -> None:
        try:
            recording = Recording(number, self.config, self.device, self.models)
            recording.start()
        except Exception as error:  # e.g. another active profiler, or missing permissions of the driver
            self._give_up(error)
        else:
            self._recording = recording

    def _finish(self, last: int) -> None:
        recording, self._recording = self._recording, None
        if recording is None or self._folder is None:
            return
        self._windows = [window for window in self._windows if window.stop > last + 1]
        stem = f"step_{recording.first:06d}-{last:06d}_rank_{self.rank}"
        try:
            recording.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            written = recording.write(self._folder / stem, last)
        except Exception as error:
            with suppress(OSError):  # remove an incomplete profile
                for suffix in SUFFIXES:
                    (self._folder / f"{stem}{suffix}").unlink(missing_ok=True)
            self._give_up(error)
        else:
            self._say(f"profile of steps {recording.first} to {last}: {', '.join(map(str, written))}")
        finally:
            recording.release()

    def _give_up(self, error: Exception) -> None:
        self._windows = []
        self._warn(f"no profile on rank {self.rank}, training continues: {type(error).__name__}: {error}")


@dataclass
class Recording:
    """A profile that is being recorded."""

    first: int  # first step
    config: ProfilingConfig
    device: torch.device
    models: Sequence[nn.Module]  # their layers become ranges

    def start(self) -> None:
        """Start recording; on an error, stop everything that was started."""
        config = self.config
        cuda = self.device.type == "cuda"
        self.snapshot = config.profile_memory and cuda
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self.trace = profile(
            activities=activities,
            record_shapes=config.pytorch_profiler_collect_shapes,
            with_stack=config.pytorch_profiler_collect_callstack,
            profile_memory=config.profile_memory,
        )
        self._synchronize()
        with ExitStack() as undo:
            undo.callback(self.release)
            if self.snapshot:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
            self.trace.start()
            undo.callback(self.trace.stop)
            self._hooks = LayerRanges(self.models)
            undo.pop_all()

    def stop(self) -> None:
        """Stop recording."""
        self._hooks.remove()
        self._synchronize()  # wait for the kernels of the last step
        self.trace.stop()

    def write(self, stem: Path, last: int) -> list[Path]:
        """Write the trace, the table and, if requested, a snapshot of GPU memory.

        Args:
            stem: path of the files without suffix.
            last: last step.

        Returns:
            Paths of the files.

        """
        name = str(stem)
        written = []
        if self.snapshot:
            written.append(Path(f"{name}_memory.pickle"))
            torch.cuda.memory._dump_snapshot(str(written[-1]))
        raw, table, packed = (Path(f"{name}.{suffix}") for suffix in ("json", "txt", "json.gz"))
        curve = MemoryCurve()
        try:
            self.trace.export_chrome_trace(str(raw))
            if not raw.exists():  # PyTorch logs the error without raising it
                raise OSError(f"{raw} could not be written; is the disk full?")
            with_curve = self.config.profile_memory and not self.snapshot
            summary = Account(curve.along(events_of(raw)) if with_curve else events_of(raw))
            table.write_text(summary.table(last - self.first + 1, curve.peak if with_curve else None))
            pack(raw, packed, curve)
        finally:
            raw.unlink(missing_ok=True)
        return [packed, table, *written]

    def release(self) -> None:
        """Stop recording GPU allocations."""
        if self.snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class LayerRanges:
    """Forward hooks that mark every numbered layer as a range, also when it is recomputed in backward."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """Register the hooks."""
        self._open: list[record_function] = []
        self._handles = []
        for name, module in (named for model in models for named in model.named_modules()):
            if is_layer(name):
                self._handles.append(module.register_forward_pre_hook(self._enter_hook(name)))
                self._handles.append(module.register_forward_hook(self._exit_hook, always_call=True))

    def _enter_hook(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._open.append(record_function(name))
            self._open[-1].__enter__()

        return enter

    def _exit_hook(self, *_: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
