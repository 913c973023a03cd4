"""Count the files, functions and jumps between files that one training run passes through.

    python tools/trace_step.py                               # a tiny Llama on one process, three steps
    python tools/trace_step.py --num-experts 4 --bf16        # further flags go to the run
    python tools/trace_step.py --order                       # list the functions of a step in the order of first entry

Prints one row per phase: checking the flags, setting up, one step with its log line, a save. Only functions of this
repository count; comprehensions and class bodies do not. Backward runs in the same thread on CPUs, so it is included.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    "--preset tiny-llama --mock-data --vocab-size 256 --seq-length 32 --micro-batch-size 1 --global-batch-size 2"
    " --train-iters 3 --log-interval 1 --lr 1e-3 --lr-decay-style constant --device cpu"
    " --kernels linear=torch"  # as on every processor
)
PHASES = ("flags", "set-up", "step", "save")
SETUP, STEP, SAVE = "join_and_train", "CallbackList.start_step", "Checkpointer.save"
"""Functions whose entry begins a phase: the second step is counted, and everything called within the save."""
TRACED_STEP = 2


class Trace:
    """Calls of functions of this repository, by phase."""

    def __init__(self) -> None:
        self.calls: dict[str, list[CodeType]] = {name: [] for name in (*PHASES, "whole run")}
        self.steps = 0
        self.phase = "flags"
        self.saving: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; see ``sys.setprofile``."""
        code = frame.f_code
        if event == "return" and frame is self.saving:
            self.saving = None
        if event != "call" or code.co_name.startswith("<") or not is_ours(code):
            return
        if code.co_qualname == SETUP:
            self.phase = "set-up"
        elif code.co_qualname == STEP:
            self.steps += 1
            self.phase = "step" if self.steps == TRACED_STEP else "other"
        elif code.co_qualname == SAVE and self.saving is None:
            self.saving = frame
        phase = "save" if self.saving is not None else self.phase
        for name in (phase, "whole run"):
            if name in self.calls:
                self.calls[name].append(code)


def is_ours(code: CodeType) -> bool:
    """Return True for code of the library or the entry script, class bodies left out."""
    path = code.co_filename
    ours = path.startswith(str(ROOT / "megatron")) or path == str(ROOT / "pretrain_gpt.py")
    return ours and bool(code.co_flags & 0x02)  # CO_NEWLOCALS: functions have it, class bodies do not


def row(name: str, calls: Sequence[CodeType]) -> str:
    """Format one phase: files, functions, calls, jumps from a call in one file to the next call in another."""
    files = {code.co_filename for code in calls}
    jumps = sum(a.co_filename != b.co_filename for a, b in zip(calls, calls[1:]))
    return f"{name:10} {len(files):6} {len(set(calls)):10} {len(calls):7} {jumps:7}"


def trace_run(flags: Sequence[str]) -> tuple[int, Trace]:
    """Train three steps under the profiler of the interpreter; return the exit status of the run, and its calls."""
    import pretrain_gpt

    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(trace)
        try:
            status = pretrain_gpt.main([*RUN.split(), "--save", folder, *flags])
        finally:
            sys.setprofile(None)
    return status, trace


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit status of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", action="store_true", help="list the functions of the step")
    options, flags = parser.parse_known_args(argv)
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    status, trace = trace_run(flags)
    print(f"\n{'phase':10} {'files':>6} {'functions':>10} {'calls':>7} {'jumps':>7}")
    for name, calls in trace.calls.items():
        print(row(name, calls))
    if options.order:
        for code in dict.fromkeys(trace.calls["step"]):
            print(f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno} {code.co_qualname}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
