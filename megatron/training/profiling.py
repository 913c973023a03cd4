"""Profiles of chosen steps: PyTorch's profiler, a Chrome trace and a table for each rank that records.

In the trace every step is a range, and in it are its phases (``forward``, ``backward``, ``optimizer`` ...), the layers
of the model and the communication of every mesh axis: whatever is marked by :func:`megatron.parallel.ranges.span`.
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
"""Of the files of a profile; the first two, of which PyTorch makes the first, are there for a moment only."""

SNAPSHOT_ENTRIES = 1_000_000
"""Allocations that a snapshot of GPU memory can hold."""


class Profiler:
    """Records chosen steps on chosen ranks. What goes wrong with a profile is a warning, never the end of the run."""

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
        """Record nothing yet.

        Args:
            config: which steps and ranks, and what of them.
            run_dir: the run's folder; None where there is none, and so no profiles.
            rank: this one.
            device: where it computes.
            models: parts of the model on this rank; their layers become ranges, named as they name them.
            say: told where a profile lies.
            warn: told what went wrong.
            pipeline: records when its actions ran.
        """
        self.config, self.rank, self.device, self.models = config, rank, device, models
        self._pipeline = pipeline
        self._say, self._warn = say, warn
        self._folder = Path(run_dir) / FOLDER if run_dir is not None and rank in config.profile_ranks else None
        self._windows: list[range] = []
        if self._folder is not None and (config.profile or config.profile_memory):
            self._windows.append(range(config.profile_step_start, config.profile_step_end))
        self._recording: Recording | None = None

    def ask(self, after: int, wish: Wish) -> None:
        """Record what a running job was asked for, of the steps that follow step ``after``."""
        if wish.pipeline and self._pipeline is not None:
            self._pipeline.ask(after, wish.pipeline)
        if not wish.profile:
            return
        if self.rank == 0:
            ranks = " ".join(map(str, self.config.profile_ranks))
            steps_told = f"steps {after + 1} to {after + wish.profile}"
            self._say(f"asked for a profile of {steps_told}, recorded on --profile-ranks {ranks}")
        if self._folder is not None:
            self._windows.append(range(after + 1, after + 1 + wish.profile))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step ``number``, from 1. A step that raises is the last one of its profile, which is kept."""
        if self._recording is None and self._wants(number):
            self._start(number)
        complete = False
        try:
            of_pipeline = self._pipeline.step(number) if self._pipeline is not None else nullcontext()
            with span(f"{STEP}{number}"), of_pipeline:
                yield
            complete = True
        finally:
            if self._recording is not None and not (complete and self._goes_on(self._recording, number + 1)):
                self._finish(number)

    def close(self, number: int) -> None:
        """Keep what was recorded although the run ends after step ``number``, before the profile would."""
        if self._recording is not None:
            self._finish(number)

    def _wants(self, number: int) -> bool:
        return any(number in window for window in self._windows)

    def _goes_on(self, recording: Recording, number: int) -> bool:
        """Whether step ``number`` belongs to it too; else a wish that is left begins another one."""
        return self._wants(number) and number - recording.first < MOST_STEPS

    def _start(self, number: int) -> None:
        try:
            recording = Recording(number, self.config, self.device, self.models)
            recording.start()
        except Exception as error:  # another profiler, a driver without the rights to count...
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
            with suppress(OSError):  # half of a profile is none
                for suffix in SUFFIXES:
                    (self._folder / f"{stem}{suffix}").unlink(missing_ok=True)
            self._give_up(error)
        else:
            self._say(f"profile of steps {recording.first} to {last}: {', '.join(map(str, written))}")
        finally:
            recording.release()

    def _give_up(self, error: Exception) -> None:
        self._windows = []
        self._warn(f"no profile on rank {self.rank}, training goes on: {type(error).__name__}: {error}")


@dataclass
class Recording:
    """A profile in the making.

    Attributes:
        first: its first step.
        config: what is recorded.
        device: of this rank.
        models: whose layers become ranges.
    """

    first: int
    config: ProfilingConfig
    device: torch.device
    models: Sequence[nn.Module]

    def start(self) -> None:
        """Begin to record, or leave nothing running that records."""
        config, cuda = self.config, self.device.type == "cuda"
        self.snapshot = config.profile_memory and cuda
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self.trace = profile(
            activities=activities,
            record_shapes=config.pytorch_profiler_collect_shapes,
            with_stack=config.pytorch_profiler_collect_callstack,
            profile_memory=config.profile_memory,
        )
        self._wait()
        with ExitStack() as undo:
            undo.callback(self.release)
            if self.snapshot:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
            self.trace.start()
            undo.callback(self.trace.stop)
            self._hooks = LayerRanges(self.models)
            undo.pop_all()

    def stop(self) -> None:
        """Record no more."""
        self._hooks.remove()
        self._wait()  # for the kernels of the last step
        self.trace.stop()

    def write(self, stem: Path, last: int) -> list[Path]:
        """Write the trace and the table, on a GPU also a snapshot of its memory if that is asked for.

        Raises:
            OSError: when the disk refuses.
            ValueError: when it cut the trace off.
        """
        name, written = str(stem), []
        if self.snapshot:
            written.append(Path(f"{name}_memory.pickle"))
            torch.cuda.memory._dump_snapshot(str(written[-1]))
        raw, table, packed = (Path(f"{name}.{suffix}") for suffix in ("json", "txt", "json.gz"))
        curve = MemoryCurve()
        try:
            self.trace.export_chrome_trace(str(raw))
            if not raw.exists():  # it only logs what went wrong
                raise OSError(f"{raw} could not be written; is the disk full?")
            curved = self.config.profile_memory and not self.snapshot
            account = Account(curve.along(events_of(raw)) if curved else events_of(raw))
            table.write_text(account.table(last - self.first + 1, curve.peak if curved else None))
            pack(raw, packed, curve)
        finally:
            raw.unlink(missing_ok=True)
        return [packed, table, *written]

    def release(self) -> None:
        """Let a GPU's allocations go unrecorded again."""
        if self.snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class LayerRanges:
    """Hooks that mark the forward pass of every numbered layer (also where it is computed anew for backward)."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """Mark from now on."""
        self._open: list[record_function] = []
        self._handles = []
        for name, module in (named for model in models for named in model.named_modules()):
            if is_layer(name):
                self._handles.append(module.register_forward_pre_hook(self._entering(name)))
                self._handles.append(module.register_forward_hook(self._left, always_call=True))

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._open.append(record_function(name))
            self._open[-1].__enter__()

        return enter

    def _left(self, *_: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Mark no more."""
        for handle in self._handles:
            handle.remove()
