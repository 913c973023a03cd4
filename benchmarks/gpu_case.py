"""Measure one model on one GPU: our step, eager and at its fastest, and that of `transformers` at its fastest.

`python -m benchmarks.gpu` runs every case in its own process, so that memory starts unfragmented. What a verdict needs
is measured first. While time is left, single options are changed, and kept if faster; then the fastest settings
alternate. The file of results is rewritten after every measurement, so that an interrupted case keeps its figures.
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
"""Rounds in which the fastest settings alternate."""

ROUND_SECONDS = 0.3
"""Time of a setting in a round, or one step if longer."""

PROFILE_SECONDS = 15.0
REFINING_SHARE = 0.6
"""Share of the time after which no further options are tried, so that rounds and profiles get the rest."""


@dataclass
class Trial:
    """The measurement of one setting."""

    implementation: str
    name: str
    # Of single steps; empty if it failed.
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    # After the warm-up.
    loss: float | None = None
    error: str | None = None

    @property
    def median(self) -> float:
        """Return the median time of a step, or infinity if the setting failed."""
        return statistics.median(self.seconds) if self.seconds else float("inf")


class Bench:
    """The trials of one case within its time."""

    def __init__(self, name: str, case: Case, device: torch.device, seconds: float, out: Path) -> None:
        self.case, self.device, self.out = case, device, out
        self.cuda = device.type == "cuda"
        self.start, self.seconds = time.monotonic(), seconds
        self.memory = 0.85 * torch.cuda.mem_get_info()[0] if self.cuda else float("inf")
        config = Ours(case.micro_batches[0]).config(case, device)
        flops = FlopsPerToken.from_config(config)
        # Content of the file.
        self.report: dict[str, Any] = {
            "case": name,
            "device": device_name(device),
            "peak_flops": peak_flops(device_name(device), "bf16"),
            "flops_per_token": flops.full,
            "flops_per_token_causal": flops.causal,
            "tokens": case.samples * config.training.seq_length,
            "parameters": num_parameters(config.model),
            "goal": case.goal,
            "trials": [],
            "notes": [],
        }
        self.trials: dict[Setting, Trial] = {}
        # The fastest setting for each line of the table.
        self.fastest: dict[str, Setting] = {}
        # Steps that are built and warm.
        self.steps: dict[Setting, Step] = {}

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.start + self.seconds - time.monotonic()

    def save(self, **values: object) -> None:
        """Update the file of results atomically."""
        self.report |= values
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(self.out)

    def note(self, text: str) -> None:
        """Add a note to the results."""
        self.save(notes=[*self.report["notes"], text])

    def free(self, kept: Collection[Setting] = ()) -> None:
        """Free the memory of all steps but these."""
        self.steps = {setting: step for setting, step in self.steps.items() if setting in kept}
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, step: Step, steps: int) -> float:
        """Return the seconds per step."""
        self.sync()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        self.sync()
        return (time.perf_counter() - start) / steps

    def measure(self, setting: Setting) -> Trial:
        """Measure a setting once; failures, such as running out of memory, are recorded."""
        if setting in self.trials:
            return self.trials[setting]
        trial = self._try(setting)
        if trial.error and "OutOfMemory" in trial.error and self.steps:  # it may fit alone
            self.free()
            torch._dynamo.reset()
            trial = self._try(setting)
        self.trials[setting] = trial
        self.save(trials=[*self.report["trials"], asdict(trial)])
        shown = trial.error or f"{1e3 * trial.median:.1f} ms"
        print(f"  {trial.implementation:12} {trial.name:70} {shown}", flush=True)
        return trial

    def _try(self, setting: Setting) -> Trial:
        implementation = "ours" if isinstance(setting, Ours) else "transformers"
        trial = Trial(implementation, setting.name)
        try:
            before = torch.cuda.memory_allocated() if self.cuda else 0
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()  # replays of a graph do not show its activations, the capture does
            step = setting.make(self.case, self.device)
            for _ in range(WARM_UP_STEPS + 1):  # compiles and captures
                loss = step()
            trial.loss = loss.item()
            once = self.timed(step, 1)
            trial.seconds = [once, *(self.timed(step, 1) for _ in range(2 if once > 0.5 else 4))]
            trial.peak_bytes = torch.cuda.max_memory_allocated() - before if self.cuda else 0
            self.steps[setting] = step
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            trial = Trial(implementation, setting.name, error=f"{type(error).__name__}: {first[:200]}")
        return trial

    def challenge(self, line: str, setting: Setting) -> None:
        """Measure a setting, and make it the one of ``line`` if it is the fastest, while there is time."""
        if self.left < 0:
            self.note(f"no time for {setting.name}")
            return
        trial = self.measure(setting)
        if line not in self.fastest or trial.median < self.trials[self.fastest[line]].median:
            self.fastest[line] = setting
            self.save(fastest={line: setting.name for line, setting in self.fastest.items()})
        self.free(self.fastest.values())

    def warm_step(self, setting: Setting) -> Step:
        """Return the step of a setting, built again if its memory was freed."""
        built = setting in self.steps
        step = self.steps[setting] if built else setting.make(self.case, self.device)
        self.timed(step, 1 if built else WARM_UP_STEPS + 1)
        return step


def alternate(bench: Bench) -> None:
    """Run the fastest settings in turn, so that changes of the clock rate affect all of them."""
    steps = {line: bench.warm_step(setting) for line, setting in bench.fastest.items()}
    trials = {line: bench.trials[setting] for line, setting in bench.fastest.items()}
    seconds: dict[str, list[float]] = {line: [] for line in steps}
    for done in range(ROUNDS):
        if done and bench.left < 0:
            break
        for line, step in steps.items():
            seconds[line].append(bench.timed(step, max(1, min(10, int(ROUND_SECONDS / trials[line].median)))))
    final = {
        line: {"setting": trials[line].name, "seconds": times, "peak_bytes": trials[line].peak_bytes}
        for line, times in seconds.items()
    }
    bench.save(final=final)
    if bench.left > PROFILE_SECONDS:
        bench.save(profiles={line: profile(bench, step) for line, step in steps.items()})


def profile(bench: Bench, step: Step) -> str:
    """Return a table of the longest kernels of one step."""
    activity = torch.profiler.ProfilerActivity
    bench.sync()
    with torch.profiler.profile(activities=[activity.CPU, *[activity.CUDA] * bench.cuda]) as recorded:
        step()
        bench.sync()
    order = f"self_{'device' if bench.cuda else 'cpu'}_time_total"
    return recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)


def run(bench: Bench) -> None:
    """Measure a case, in the order of importance, as time may run out."""
    size, other = bench.case.micro_batches
    bench.challenge("best", Ours(size))
    bench.challenge("transformers", Theirs(size))
    bench.challenge("eager", Ours(size))
    bench.challenge("best", Ours(size, "--kernels auto"))
    if bench.cuda:
        bench.challenge("transformers", Theirs(size, compiled=True))
    changes: list[tuple[str, Callable[[Any], Setting]]] = [
        ("best", lambda ours: ours.changed(f"--cross-entropy-chunk-size {bench.case.chunk}")),
        ("transformers", lambda theirs: replace(theirs, micro_batch=other)),
        ("best", lambda ours: replace(ours, micro_batch=other)),
        ("transformers, fp32 weights", lambda _: Theirs(size, weights="fp32", compiled=bench.cuda)),
    ]
    if bench.cuda:  # FlashAttention 2 instead of cuDNN; a graph where auto uses none
        changes.append(("best", lambda ours: ours.changed("--kernels auto attention=torch")))
        changes.append(("best", lambda ours: ours.changed("--cuda-graph step")))
    for line, change in changes:
        if bench.left < (1 - REFINING_SHARE) * bench.seconds:
            bench.note("no time for further settings")
            break
        bench.challenge(line, change(bench.fastest.get(line)))
    finish(bench)


def finish(bench: Bench) -> None:
    """Let as many of the fastest settings alternate as fit into memory together."""
    best = bench.fastest.get("best")
    if bench.fastest.get("eager") == best:
        bench.fastest.pop("eager", None)
    bench.fastest = {line: setting for line, setting in bench.fastest.items() if bench.trials[setting].seconds}
    while bench.fastest and sum(bench.trials[s].peak_bytes for s in bench.fastest.values()) > bench.memory:
        line, _ = bench.fastest.popitem()
        bench.note(f"{line} was measured alone: not all fit into memory together")
        bench.free(bench.fastest.values())
    try:
        if len(bench.fastest) >= 2:
            alternate(bench)
        elif best is not None and bench.left > PROFILE_SECONDS:
            bench.save(profiles={"best": profile(bench, bench.warm_step(best))})
    except Exception as error:
        bench.note(f"the last rounds failed: {type(error).__name__}: {str(error)[:200]}")


def main(argv: Sequence[str]) -> int:
    """Measure one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on any device")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    case = (REHEARSAL if args.rehearse else CASES)[args.case]
    run(Bench(args.case, case, device, args.seconds, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
