"""One model on one GPU: our step, eager and at its best, beside that of `transformers` at its best.

`python -m benchmarks.gpu` runs this for every case, each in a process of its own: memory starts unfragmented, and what
one case does to the process ends with it. First comes what a verdict needs: each side as it is and as it is probably
fastest. Then, as long as there is time, one change after another, each kept if it is faster; then the winners take
turns. Everything is written down as soon as it is known, so that a case that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_contestants import CASES, REHEARSAL, Case, Ours, Setting, Step, Theirs
from megatron.layers.parameters import num_parameters
from megatron.planner.flops import FlopsPerToken
from megatron.training.cuda_graphs import WARM_UP_STEPS
from megatron.training.metrics import device_name, peak_flops

ROUNDS = 5
"""Turns that the winners take."""

TURN = 0.3
"""Seconds of a turn, or one step where that is longer."""

MARGIN = 1.2
"""Time is taken to run out by that much earlier."""

PROFILE_SECONDS = 15.0
"""That profiling may take."""

FIRST_TIME = 45.0
"""Seconds that the first setting of its kind is expected to take, most of them for compiling."""


@dataclass
class Result:
    """What became of a setting.

    Attributes:
        name: of the setting.
        seconds: of a step; empty where it failed.
        peak_bytes: most memory that was allocated at once.
        loss: after the warm-up.
        error: why it failed.
        took: seconds from building to the last step.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float | None = None
    error: str | None = None
    took: float = 0.0

    @property
    def median(self) -> float:
        """Of a step; infinite where the setting failed."""
        return statistics.median(self.seconds) if self.seconds else float("inf")


def kind(setting: Setting) -> tuple[bool, bool]:
    """Return the kind of a setting (contestant, compiled or not); settings of a kind take about equally long to try."""
    ours = isinstance(setting, Ours)
    return ours, setting != Ours(setting.micro_batch) if isinstance(setting, Ours) else setting.compiled


class Bench:
    """Measures the settings of one case within its time, and keeps the file of results up to date.

    Attributes:
        results: of the settings that were tried.
        winners: the fastest setting so far, by contestant.
        steps: of the winners, built and warm.
        report: content of the file.
    """

    def __init__(self, name: str, case: Case, device: torch.device, seconds: float, out: Path) -> None:
        self.case, self.device, self.out = case, device, out
        self.deadline = time.monotonic() + seconds
        self.room = 0.85 * torch.cuda.mem_get_info()[0] if device.type == "cuda" else float("inf")
        config = Ours(case.micro_batches[0]).config(case, device)
        self.report: dict[str, object] = {
            "case": name,
            "device": device_name(device),
            "peak_flops": peak_flops(device_name(device), "bf16"),
            "flops_per_token": FlopsPerToken.from_config(config).full,
            "tokens": case.samples * config.training.seq_length,
            "parameters": num_parameters(config.model),
            "goal": case.goal,
            "trials": [],
            "notes": [],
        }
        self.results: dict[Setting, Result] = {}
        self.winners: dict[str, Setting] = {}
        self.steps: dict[Setting, Step] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def note(self, text: str) -> None:
        """Add a note for the readers of the results."""
        self.keep(notes=[*self.report["notes"], text])

    def keep(self, **values: object) -> None:
        """Write down what is known; a reader always finds a complete version of the file."""
        self.report |= values
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(self.out)

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def keep_only(self, kept: Collection[Setting]) -> None:
        """Give back the memory of all other steps."""
        self.steps = {setting: step for setting, step in self.steps.items() if setting in kept}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def timed(self, step: Step, steps: int) -> float:
        """Seconds per step."""
        self.sync()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        self.sync()
        return (time.perf_counter() - start) / steps

    def attempt(self, setting: Setting) -> Result:
        """Try a setting; a failure, such as running out of memory, is recorded and ends nothing."""
        if setting in self.results:
            return self.results[setting]
        start = time.monotonic()
        peaks = [result.peak_bytes for result in self.results.values()]
        if sum(self.results[alive].peak_bytes for alive in self.steps) + max(peaks, default=0) > self.room:
            self.keep_only(())
        result = self._try(setting)
        if result.error and "OutOfMemory" in result.error and self.steps:  # it may fit where nothing else is
            self.keep_only(())
            torch._dynamo.reset()
            result = self._try(setting)
        result.took = time.monotonic() - start
        self.results[setting] = result
        ours = "ours" if isinstance(setting, Ours) else "transformers"
        self.keep(trials=[*self.report["trials"], {"whose": ours} | asdict(result)])
        print(f"  {ours:12} {result.name:70} {result.error or f'{1e3 * result.median:.1f} ms'}", flush=True)
        return result

    def _try(self, setting: Setting) -> Result:
        result = Result(setting.name)
        try:
            self.steps[setting] = self._measure(setting, result)
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            result = Result(setting.name, error=f"{type(error).__name__}: {first[:200]}")
        return result

    def _measure(self, setting: Setting, result: Result) -> Step:
        cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()  # now: a recorded step's activations show only while it is eager
        step = setting.make(self.case, self.device)
        for _ in range(WARM_UP_STEPS + 1):  # compiles, and records where something is recorded
            loss = step()
        result.loss = loss.item()
        once = self.timed(step, 1)
        result.seconds = [once, *(self.timed(step, 1) for _ in range(2 if once > 0.5 else 4))]
        result.peak_bytes = torch.cuda.max_memory_allocated() - before if cuda else 0
        return step

    def challenge(self, name: str, rival: Setting, needed: bool = False) -> None:
        """Let ``rival`` take the place of the winner of that name if it is faster.

        It is passed over where no time is left for it and the turns; what is ``needed``, only where none is left.
        """
        if self.left < (0 if needed else MARGIN * (self.expected(rival) + self.turns())):
            self.note(f"no time for {rival.name}")
            return
        result = self.attempt(rival)
        if name not in self.winners or result.median < self.results[self.winners[name]].median:
            self.winners[name] = rival
            self.keep(winners={name: setting.name for name, setting in self.winners.items()})
        self.keep_only(self.winners.values())

    def expected(self, setting: Setting) -> float:
        """Seconds that a trial will take: as long as the longest of its kind, and nothing where it is known."""
        tried = [result.took for other, result in self.results.items() if kind(other) == kind(setting)]
        return 0.0 if setting in self.results else max(tried, default=FIRST_TIME)

    def turns(self) -> float:
        """Seconds that the turns of the winners will take."""
        results = {setting: self.results[setting] for setting in self.winners.values()}
        finished = {setting: result for setting, result in results.items() if result.seconds}
        building = sum(result.took for setting, result in finished.items() if setting not in self.steps)
        return building + sum(result.median + ROUNDS * max(result.median, TURN) for result in finished.values())


def take_turns(bench: Bench) -> None:
    """Run the winners in turns, so that clock changes of the GPU affect all of them; then profile each."""
    steps = {name: warm_step(bench, setting) for name, setting in bench.winners.items()}
    results = {name: bench.results[setting] for name, setting in bench.winners.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            seconds[name].append(bench.timed(step, max(1, min(10, int(TURN / results[name].median)))))
    bench.keep(
        final={
            name: {"setting": results[name].name, "seconds": s, "peak_bytes": results[name].peak_bytes}
            for name, s in seconds.items()
        }
    )
    if bench.left > PROFILE_SECONDS:
        bench.keep(profiles={name: profile(bench, step) for name, step in steps.items()})


def warm_step(bench: Bench, setting: Setting) -> Step:
    """Return the step of a setting, ready to be measured: the one at hand, or a new one."""
    if setting in bench.steps:
        step, steps = bench.steps[setting], 1
    else:
        step, steps = setting.make(bench.case, bench.device), WARM_UP_STEPS + 1
    bench.timed(step, steps)
    return step


def profile(bench: Bench, step: Step) -> str:
    """Return the longest kernels of one step."""
    cuda, activity = bench.device.type == "cuda", torch.profiler.ProfilerActivity
    bench.sync()
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * cuda]) as recorded:
        step()
        bench.sync()
    order = f"self_{'device' if cuda else 'cpu'}_time_total"
    return recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)


REFINEMENTS: tuple[tuple[str, Callable[[Any, int], Setting]], ...] = (
    ("best", lambda ours, size: ours.changed("--cross-entropy-chunk-size 8192")),
    ("best", lambda ours, size: ours.changed("--cuda-graph step")),
    ("transformers", lambda theirs, size: replace(theirs, micro_batch=size)),
    ("best", lambda ours, size: replace(ours, micro_batch=size)),
)
"""Changes of the winner of that name, given the case's other micro-batch size, the most promising first."""


def run(bench: Bench) -> None:
    """Everything about a case, what matters most first, as time may run out."""
    cuda, (size, other) = bench.device.type == "cuda", bench.case.micro_batches
    bench.challenge("best", Ours(size), needed=True)
    bench.challenge("transformers", Theirs(size), needed=True)
    bench.challenge("eager", Ours(size), needed=True)
    bench.challenge("best", Ours(size, "--kernels auto"), needed=True)
    if cuda:
        bench.challenge("transformers", Theirs(size, compiled=True), needed=True)
    bench.challenge("transformers, fp32 weights", Theirs(size, weights="fp32", compiled=cuda))
    for name, change in REFINEMENTS:
        rival = change(bench.winners[name], other) if name in bench.winners else None
        if rival is None or ("--cuda-graph" in rival.name and not cuda):
            continue
        theirs = {setting.micro_batch for setting in bench.results if isinstance(setting, Theirs)}
        if isinstance(rival, Ours) and rival.micro_batch not in theirs:
            bench.note(f"{rival.name} was left out, as transformers was not tried with such micro-batches")
        else:
            bench.challenge(name, rival)
    if bench.winners.get("eager") == bench.winners.get("best"):
        bench.winners.pop("eager", None)
    for name in [name for name, setting in bench.winners.items() if not bench.results[setting].seconds]:
        del bench.winners[name]
    best = bench.winners.get("best")
    leave_out(bench)
    try:
        if len(bench.winners) >= 2:
            take_turns(bench)
        else:
            bench.note("no turns were taken")
            if best is not None and bench.left > MARGIN * bench.results[best].took + PROFILE_SECONDS:
                bench.keep(profiles={"best": profile(bench, warm_step(bench, best))})
    except Exception as error:
        bench.note(f"the turns ended: {type(error).__name__}: {str(error)[:200]}")


def leave_out(bench: Bench) -> None:
    """Let only as many winners take turns as there is time and memory for."""
    while bench.winners:
        if sum(bench.results[setting].peak_bytes for setting in bench.winners.values()) > bench.room:
            why = "not all fit into the memory together"
        elif bench.left < MARGIN * bench.turns():
            why = "there was no time for all"
        else:
            return
        name, _ = bench.winners.popitem()
        bench.note(f"{name} took no part in the turns: {why}")
        bench.keep_only(bench.winners.values())


def main(argv: Sequence[str]) -> int:
    """Measure one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--rehearse", action="store_true", help="in miniature, on whatever there is")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    case = (REHEARSAL if args.rehearse else CASES)[args.case]
    run(Bench(args.case, case, device, args.seconds, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
