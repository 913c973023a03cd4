"""Cost of logging in a step: steps with all of it beside steps with none, and the price of every part.

    python -m benchmarks.logging_overhead            # prints; --write keeps the result

Side by side, one trainer takes turns: some steps bare, as many as the training loop logs them, with every timer, an
idle profiler, and at the last of them a log line that goes to the console, metrics.jsonl, TensorBoard and Weights &
Biases (offline). A ratio is the median over rounds. TensorBoard and Weights & Biases work in threads of their own, so
the processor time of the thread that trains leaves out what they do. Parts are timed alone, in the time of that thread.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.record import conditions, options, price, run, spread, spreads
from megatron.arguments.cli import parse
from megatron.config.run import RunConfig
from megatron.distributed.comm import Group
from megatron.distributed.timing import PHASES, Timers, no_clock
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.callbacks.profiler import Profiler
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import MetricsWindow, StepMetrics
from megatron.training.step import train_step
from megatron.training.trainer import Trainer

TITLE = "# What logging adds to a step, CPU, one thread"
CLOCKS = {
    "wall time": time.perf_counter,
    "processor time of the thread that trains": time.thread_time,
    "processor time of all threads": time.process_time,
}
COLLECTIVES = 10
RATES = Rates(1e-4, 0.1)
CPU = torch.device("cpu")

SINKS = {
    "console": (),
    "console and metrics.jsonl": ("--run-dir", "{}/run"),
    "console and TensorBoard": ("--tensorboard-dir", "{}/tensorboard"),
    "console and Weights & Biases, offline": ("--wandb-project", "overhead", "--wandb-save-dir", "{}/wandb"),
}
"""Destinations of a log line, and their flags; ``{}`` is a folder."""


def configuration(args: argparse.Namespace, folder: str, *flags: str) -> RunConfig:
    """Return the configuration of the requested shape."""
    shape = {name: getattr(args, name) for name in ("num_layers", "hidden_size", "seq_length")}
    argv = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    argv += ["--mock-data", "--vocab-size", "8192", "--num-attention-heads", "4", "--train-iters", "1000000"]
    argv += ["--device", "cpu", *(flag.format(folder) for flag in flags)]
    return parse(argv, {}).config


@contextmanager
def quiet_log(config: RunConfig) -> Iterator[RunLogger]:
    """Return a logger with a silent console; warnings are still printed."""
    console = contextlib.redirect_stdout(io.StringIO())
    with console, RunLogger(config, world_size=1, device=CPU, run_id="overhead") as log:
        yield log


class SideBySide:
    """Blocks of steps of one trainer, bare or logged."""

    def __init__(self, trainer: Trainer, log: RunLogger, steps: int) -> None:
        """Prepare blocks of ``steps``."""
        self.trainer, self.log, self.steps = trainer, log, steps
        self.timers = Timers(2, CPU)
        self.profiler = Profiler(
            trainer.config.profiling, trainer.config.logging.run_dir, 0, CPU, [*trainer.chunks.values()]
        )

    def bare(self) -> None:
        """Take steps without any logging."""
        t = self.trainer
        t.timers = no_clock  # type: ignore[assignment]
        for _ in range(self.steps):
            train_step(t, t.next_batches(), t.schedule.rates(t.consumed_samples))
            self._count(t)

    def logged(self) -> None:
        """Take steps with every timer, and log a line to every sink at the end."""
        t = self.trainer
        t.timers = self.timers
        window = MetricsWindow(CPU, t.config.training.seq_length, world=t.mesh.world, timers=t.timers)
        for _ in range(self.steps):
            rates = t.schedule.rates(t.consumed_samples)
            with self.profiler.step(t.iteration + 1):
                with t.timers("batch-generator"):
                    batches = t.next_batches()
                metrics = train_step(t, batches, rates)
            self._count(t)
            window.add(metrics, 1)
            read = partial(window.read, iteration=t.iteration, consumed_samples=t.consumed_samples, rates=rates)
            self.log.stepped(t.iteration, t.consumed_samples, partial(read, alone=True))
        self.log.train(read(samples_digest=f"{t.reader.samples_digest():016x}"))

    @staticmethod
    def _count(trainer: Trainer) -> None:
        trainer.progress.iteration += 1
        trainer.progress.consumed_samples += 1


def side_by_side(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a bare step, and by clock ``[median, lowest, highest]`` of logged over bare."""
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(args, folder, *(flag for flags in SINKS.values() for flag in flags))
        trainer = build_trainer(config, 0, 1)
        trainer.start_at(0, 0)
        with quiet_log(config) as log:
            blocks = SideBySide(trainer, log, args.steps)
            seconds = take_turns({"bare": blocks.bare, "logged": blocks.logged}, args.repeats)
    bare = statistics.median(seconds["bare"]["wall time"]) / args.steps
    ratios = {
        clock: spread([b / a for a, b in zip(seconds["bare"][clock], seconds["logged"][clock])]) for clock in CLOCKS
    }
    return {"bare_step_ms": round(bare * 1e3, 2), "ratios": ratios}


def take_turns(blocks: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every block, by name and clock, after a round that warms up."""
    seconds: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in CLOCKS} for name in blocks}
    for number in range(rounds + 1):
        for name, block in blocks.items():
            starts = {clock: now() for clock, now in CLOCKS.items()}
            block()
            for clock, now in CLOCKS.items():
                if number:
                    seconds[name][clock].append(now() - starts[clock])
    return seconds


def per_step(args: argparse.Namespace, trainer: Trainer) -> dict[str, list[float]]:
    """Microseconds of what every step does."""
    window, metrics, group = MetricsWindow(CPU, 1), made_up(), Group()
    profiler = Profiler(trainer.config.profiling, None, 0, CPU, [*trainer.chunks.values()])
    x = torch.zeros(1)

    def spans(timers: Callable[[str], Any]) -> None:
        for name in PHASES:
            with timers(name):
                pass

    def waits() -> None:
        for _ in range(COLLECTIVES):
            with group.blocked(x):
                pass

    def idle() -> None:
        with profiler.step(1):
            pass

    parts: dict[str, Callable[[], None]] = {"noting the step's loss, norm and scale": lambda: window.add(metrics, 1)}
    for level in (0, 1, 2):
        parts[f"timers of all {len(PHASES)} phases, level {level}"] = partial(spans, Timers(level, CPU))
    parts |= {f"counting the wait of {COLLECTIVES} collectives": waits, "the profiler, idle": idle}
    return {name: price(part, args.calls, args.repeats) for name, part in parts.items()}


def per_line(args: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of what every log line does."""
    found = {"reading the steps since the last line": reading(args)}
    for name, flags in SINKS.items():
        with tempfile.TemporaryDirectory() as folder, quiet_log(configuration(args, folder, *flags)) as log:
            found[f"a line to {name}"] = telling(log, args)
    return found


def made_up() -> StepMetrics:
    """Made-up metrics of a step."""
    loss, norm, skipped, scale, nonfinite = torch.tensor([2.0, 1.0, 0.0, 1.0, 0.0])
    return StepMetrics(loss, norm, skipped, scale, nonfinite)


def window_of(steps: int) -> MetricsWindow:
    """Return a metrics window with all timers after some steps."""
    window, metrics = MetricsWindow(CPU, 1024, timers=Timers(2, CPU)), made_up()
    for _ in range(steps):
        window.add(metrics, 1)
    return window


def reading(args: argparse.Namespace) -> list[float]:
    """Microseconds of reading a window of as many steps as a block has."""
    costs = []
    for _ in range(args.repeats * 20):
        window = window_of(args.steps)
        start = time.thread_time()
        window.read(iteration=args.steps, consumed_samples=args.steps, rates=RATES)
        costs.append((time.thread_time() - start) * 1e6)
    return spread([statistics.median(costs[at :: args.repeats]) for at in range(args.repeats)])


def telling(log: RunLogger, args: argparse.Namespace) -> list[float]:
    """Microseconds of handing a record to the log, each of another step."""
    steps = itertools.count(1)

    def log_line() -> None:
        log.train(records[next(steps)])

    calls = min(args.calls, 20)  # more than sinks can write until they are closed would be another measurement
    records = {
        step: window_of(1).read(iteration=step, consumed_samples=step, rates=RATES)
        for step in range(1, calls * (args.repeats + 1) + 1)
    }
    return price(log_line, calls, args.repeats)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    torch.set_num_threads(1)
    os.environ["WANDB_MODE"] = "offline"
    result = side_by_side(args)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(configuration(args, folder), 0, 1)
    return result | {
        "every step": per_step(args, trainer),
        "every log line": per_line(args),
        "shape": {"layers": args.num_layers, "hidden": args.hidden_size, "sequence": args.seq_length},
        "steps_per_line": args.steps,
    }


def together(result: Mapping[str, Any]) -> float:
    """Microseconds that all parts add to a step, their medians summed: the timers of level 2, and a share of a line."""
    step = {name: median for name, (median, *_) in result["every step"].items()}
    line = {name: median for name, (median, *_) in result["every log line"].items()}
    console, *others = [line.pop(f"a line to {name}") for name in SINKS]
    shared = sum(line.values()) + console + sum(other - console for other in others)
    timers = [median for name, median in step.items() if name.startswith("timers")]
    return sum(step.values()) - sum(timers) + max(timers) + shared / result["steps_per_line"]


def page(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    shape = ", ".join(f"{name} {size}" for name, size in result["shape"].items())
    text = [
        TITLE,
        "",
        f"A bare step takes {result['bare_step_ms']} ms ({shape}). A line every {result['steps_per_line']} steps",
        "goes to the console, metrics.jsonl, TensorBoard and Weights & Biases.",
        *spreads("step with all of it / bare step", result["ratios"], ".4f"),
    ]
    for part in ("every step", "every log line"):
        text += spreads(f"microseconds of {part}", result[part], ".3g")
    text += [
        "",
        "Microseconds are processor time of the thread that trains.",
        f"All parts together: {together(result):.0f} a step.",
        "",
        f"{result['rounds']} rounds; {conditions(result)}",
    ]
    return "\n".join(text)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=41)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="of a block, and so from line to line")
    parser.add_argument("--calls", type=int, default=2000, help="of every part in a round")
    return run("logging_overhead", parser, argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
