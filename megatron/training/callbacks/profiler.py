"""Profile selected or requested steps: Chrome traces, tables, GPU memory snapshots and pipeline timelines.

Steps are selected with `--profile-step-start` and `--profile-step-end`, or requested from a running job with SIGUSR2
or the file PROFILE in the run folder (`megatron.training.stop`). In a trace, every step is a range that contains its
phases, the layers and the communication of every mesh axis. Errors of the profiler are warnings and never end the
run.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron.config.profiling import MAX_PROFILE_STEPS, ProfilingConfig
from megatron.distributed.timing import profiler_range
from megatron.pipeline.recorder import record_timeline
from megatron.planner.timeline import write_trace
from megatron.training.callbacks.base import Callback
from megatron.training.control import Requests
from megatron.training.loggers.console import print_line, print_warning
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import StepMetrics
from megatron.training.trainer import Trainer

PROFILE_FOLDER = "profiles"
"""Subfolder of the run folder."""

SNAPSHOT_ENTRIES = 1_000_000
"""Maximum number of allocations in a GPU memory snapshot."""

TABLE_ROWS = 100
"""Maximum number of rows of each table."""

MEMORY_TRACK = b"allocated since the recording began"


class Profiler:
    """Profiles selected steps on selected ranks. Errors of the profiler are warnings and never end the run.

    It starts and stops torch's profiler itself: with a ``schedule``, ``torch.profiler.profile.step`` costs 90 us in
    every step of a run that records none, and a recording would end in the next step, after evaluations and saves.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        run_dir: str | None,
        rank: int,
        device: torch.device,
        models: Sequence[nn.Module],
        say: Callable[[str], None] = print_line,
    ) -> None:
        """Set up without recording. Without ``run_dir`` nothing is recorded; layers of ``models`` become ranges."""
        self.config = config
        self.rank = rank
        self.models = models
        self._say = say
        self._folder = Path(run_dir) / PROFILE_FOLDER if run_dir is not None and rank in config.profile_ranks else None
        self._steps: set[int] = set()  # to profile
        if self._folder is not None and (config.profile or config.profile_memory):
            self._steps.update(range(config.profile_step_start, config.profile_step_end))
        self._device, self._cuda = device, device.type == "cuda"
        self._snapshot = config.profile_memory and self._cuda
        self._trace: profile | None = None  # that is being recorded
        self._first = 0  # its first step
        self._cleanup = ExitStack()  # stops the recording

    def ask(self, after: int, steps: int) -> None:
        """Schedule a requested profile of the ``steps`` steps after step ``after``."""
        if steps and self.rank == 0:
            ranks = " ".join(map(str, self.config.profile_ranks))
            self._say(f"profile requested of steps {after + 1} to {after + steps}, recorded on --profile-ranks {ranks}")
        if self._folder is not None:
            self._steps.update(range(after + 1, after + 1 + steps))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap step ``number``, counted from 1. If the step raises, the profile is written up to this step."""
        if self._trace is None and number in self._steps:
            try:
                self._start(number)
            except Exception as error:  # e.g. another active profiler, or missing permissions of the driver
                self._give_up(error)
        ends = True
        try:
            with profiler_range(f"step {number}"):
                yield
            ends = number + 1 not in self._steps or number + 1 - self._first >= MAX_PROFILE_STEPS
        finally:
            if ends:
                self.close(number)

    def _start(self, first: int) -> None:
        """Start recording with step ``first``."""
        trace = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda,
            record_shapes=self.config.pytorch_profiler_collect_shapes,
            with_stack=self.config.pytorch_profiler_collect_callstack,
            profile_memory=self.config.profile_memory,
        )
        if self._cuda:
            torch.cuda.synchronize(self._device)
        if self._snapshot:
            self._cleanup.callback(torch.cuda.memory._record_memory_history, enabled=None)
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        trace.start()
        self._cleanup.callback(trace.stop)
        for model in self.models:
            for name, module in model.named_modules():
                if is_layer(name):
                    self._cleanup.enter_context(layer_range(name, module))
        self._trace, self._first = trace, first

    def close(self, last: int) -> None:
        """Write the profile that is being recorded, if any; ``last`` is its last step."""
        trace, self._trace = self._trace, None
        if trace is None or self._folder is None:
            return
        stem = f"step_{self._first:06d}-{last:06d}_rank_{self.rank}"
        try:
            if self._cuda:
                torch.cuda.synchronize(self._device)  # wait for the kernels of the last step
            self._folder.mkdir(parents=True, exist_ok=True)
            written = self._write(trace, self._folder / stem)
        except Exception as error:
            with suppress(OSError):  # remove an incomplete profile
                for path in self._folder.glob(f"{stem}[._]*"):
                    path.unlink()
            self._give_up(error)
        else:
            self._say(f"profile of steps {self._first} to {last}: {', '.join(map(str, written))}")

    def _write(self, trace: profile, stem: Path) -> list[Path]:
        """Write the trace, the table and, if requested, a snapshot of GPU memory; return the paths of the files."""
        snapshot, raw, packed, table = (Path(f"{stem}{end}") for end in ("_memory.pickle", ".json", ".json.gz", ".txt"))
        if self._snapshot:
            torch.cuda.memory._dump_snapshot(str(snapshot))
        self._cleanup.close()
        try:
            trace.export_chrome_trace(str(raw))
            if not raw.exists():  # PyTorch logs the error without raising it
                raise OSError(f"{raw} could not be written; is the disk full?")
            compress_trace(raw, packed)
        finally:
            raw.unlink(missing_ok=True)
        averages = trace.key_averages()
        tables = {
            "Ranges and operations, by time including nested ones:": "cpu_time_total",
            "Ranges and operations, by own time:": f"self_{'device' if self._cuda else 'cpu'}_time_total",
        }
        table.write_text(
            "\n".join(
                f"{title}\n{averages.table(sort_by=key, row_limit=TABLE_ROWS, max_name_column_width=70)}"
                for title, key in tables.items()
            )
        )
        return [packed, table, *([snapshot] if self._snapshot else [])]

    def _give_up(self, error: Exception) -> None:
        self._steps.clear()
        with suppress(Exception):  # of a profiler that did not start or stop
            self._cleanup.close()
        print_warning(f"no profile on rank {self.rank}, training continues: {type(error).__name__}: {error}")


def compress_trace(raw: Path, packed: Path) -> None:
    """Compress a trace with gzip. Allocations become a counter, which viewers draw as a curve over time."""
    with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
        event = b""
        for line in source:
            event += line
            if line.startswith(b"  }"):  # the end of an event
                if b'"name": "[memory]"' in event:
                    event = event.replace(b'"ph": "i"', b'"ph": "C"').replace(b"[memory]", MEMORY_TRACK)
                    event = re.sub(rb'("args": \{)[^}]*"Total Allocated": (\d+)[^}]*', rb'\1"bytes": \2', event)
                target.write(event)
                event = b""
        target.write(event)


@contextmanager
def layer_range(name: str, module: nn.Module) -> Iterator[None]:
    """Mark each forward pass of a layer as a range, also when it is recomputed in backward."""
    running: list[record_function] = []

    def enter(*_: object) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def leave(*_: object) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    with module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True):
        yield


def is_layer(name: str) -> bool:
    """Return True for the name of a numbered module, such as ``layers.3``."""
    return name.rpartition(".")[2].isdecimal()


class StepProfiler(Callback):
    """Profile steps and record pipeline timelines, as selected by flags or requested from outside."""

    pauses = False  # a barrier would change what is profiled

    def __init__(self, trainer: Trainer, log: RunLogger, request: Callable[[], Requests]) -> None:
        """Set up without recording; ``request`` returns what the ranks have agreed on since the last step."""
        super().__init__(trainer)
        config, run_dir = trainer.config.profiling, trainer.config.logging.run_dir
        self._say = log.note if log.enabled else print_line  # each rank reports the files that it writes
        models = [*trainer.chunks.values()]
        self._profiler = Profiler(config, run_dir, trainer.mesh.rank, trainer.device, models, self._say)
        self._folder = Path(run_dir) / PROFILE_FOLDER if run_dir is not None else None
        self._timeline_windows: list[range] = []  # of any length, unlike a profile
        if config.profile_pipeline:
            self._timeline_windows.append(range(config.profile_step_start, config.profile_step_end))
        self._request = request
        self._step = ExitStack()

    def on_step_start(self) -> None:
        """Begin a recording if the step is selected."""
        taken = self.trainer.iteration
        request = self._request()
        self._profiler.ask(taken, request.profile)
        if request.pipeline:
            self._timeline_windows.append(range(taken + 1, taken + 1 + request.pipeline))
        self._step.enter_context(self._profiler.step(taken + 1))
        selected = any(taken + 1 in window for window in self._timeline_windows)
        if selected and self._folder is not None and 0 in self.trainer.mesh.pipeline.ranks:
            self._step.enter_context(self._timeline(self._folder / f"step_{taken + 1:06d}_pipeline.json", taken + 1))

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Write a recording that is complete; collective over the pipeline if its actions were recorded."""
        self._step.close()

    def on_stop(self, error: BaseException | None) -> None:
        """Write an unfinished recording."""
        if error is not None:  # in the middle of a step
            self._step.__exit__(type(error), error, error.__traceback__)
        self._profiler.close(self.trainer.iteration)

    @contextmanager
    def _timeline(self, path: Path, number: int) -> Iterator[None]:
        """Record the pipeline's actions in a step. A step that raises has no timeline: gathering is collective."""
        trainer, group = self.trainer, self.trainer.mesh.pipeline
        with record_timeline(trainer.pipeline, group, trainer.device) as recorder:
            yield
        timeline = recorder.timeline(str(trainer.config.parallel.pipeline_schedule))
        if group.rank != 0:
            return
        if not any(timeline.intervals):
            replayed = "it was replayed as a CUDA graph, which has no separate actions"
            print_warning(f"no timeline of step {number}: {replayed}")
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(timeline, path)
        except OSError as error:
            with suppress(OSError):  # remove an incomplete file
                path.unlink(missing_ok=True)
            print_warning(f"no timeline of step {number}, training continues: {error}")
        else:
            self._say(f"timeline of the pipeline in step {number}: {path}")
