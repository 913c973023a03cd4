"""Cost of ``--replay-check N`` on one CPU process, in processor seconds, which depend less on other programs than time.

Run with ``python -m benchmarks.replay_check``. Short runs with ``--replay-check 3`` and without it alternate. In those
with it, steps are in turn between checks, before one (which takes digests of state), and checked. A check costs what
the last two take more than the first, in units of the first; with N, that is once in N steps. The first two steps of a
run, and its last one, are left out. No check can cost less than forward and backward, whose share of a step is measured
in the runs without it.
"""

from __future__ import annotations

import argparse
import io
import math
import tempfile
import time
from contextlib import redirect_stdout
from statistics import median
from typing import Any

from megatron.arguments.cli import parse
from megatron.config.plugins import register
from megatron.training import main as training
from megatron.training.callbacks.base import Callback
from megatron.training.trainer import Trainer

MODEL = (
    "--mock-data --device cpu --lr 1e-3 --vocab-size 512 --num-layers 2 --max-position-embeddings 128 --seq-length 128 "
    "--micro-batch-size 8 --log-interval 1000 --eval-iters 0"
)
GOAL = 0.02
"""Cost over that of a step."""

starts: list[float] = []
computing: list[float] = []
"""Processor seconds at the start of each step of the last run, and those of its forward and backward."""


@register("callback", "step_clock")
class StepClock(Callback):
    """Notes when steps start, and how long forward and backward take."""

    interval = 1
    pauses = False

    def __init__(self, trainer: Trainer) -> None:
        """Start anew."""
        super().__init__(trainer)
        starts.clear()
        computing.clear()

    def on_step_start(self) -> None:
        """See :class:`Callback`."""
        starts.append(time.process_time())

    def before_compute(self, *step: Any) -> None:
        """See :class:`Component`."""
        computing.append(-time.process_time())

    def on_gradients(self, *step: Any) -> None:
        """See :class:`Component`."""
        computing[-1] += time.process_time()


def step_seconds(flags: str, hidden: int, options: argparse.Namespace) -> dict[int, float]:
    """Return the processor seconds of each step of a run but the first two and the last, by number."""
    model = f"--hidden-size {hidden} --num-attention-heads {hidden // 64} --ffn-hidden-size {4 * hidden}"
    length = f"--train-iters {options.steps} --global-batch-size {options.batch}"
    with tempfile.TemporaryDirectory() as folder:
        argv = f"{MODEL} {model} {length} {flags} --run-dir".split()
        config = parse([*argv, folder], {"RANK": "0", "WORLD_SIZE": "1"}).config
        with redirect_stdout(io.StringIO()):
            status = training.run(config)
    if status:
        raise RuntimeError(f"a run ended with {status}")
    return {step: starts[step] - starts[step - 1] for step in range(3, options.steps)}


def main() -> None:
    """Print the medians of each round, and those of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="of two runs each")
    parser.add_argument("--steps", type=int, default=19, help="of a run")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens in a step")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 512], help="hidden sizes")
    options = parser.parse_args()
    for hidden in options.hidden:
        computed, between, checks = list[float](), list[float](), list[float]()
        for _ in range(options.rounds):
            plain = step_seconds("", hidden, options)
            computed += [computing[step - 1] / seconds for step, seconds in plain.items()]
            seconds = step_seconds("--replay-check 3", hidden, options)
            found = [(seconds[n - 1] + seconds[n]) / seconds[n - 2] - 2 for n in range(6, options.steps, 3)]
            between.append(median(seconds[n] for n in range(4, options.steps, 3)) / median(plain.values()))
            checks += found
            step = median(plain.values())
            print(f"hidden size {hidden}: a step {step:.3f} s, a check {median(found):.3f} of it", flush=True)
        check = median(checks)
        print(f"forward and backward {median(computed):.3f} of a step of {options.batch * 128} tokens")
        print(f"between checks {median(between):.3f}, a check {check:.3f}; --replay-check 50: {check / 50:+.2%}")
        print(f"at most {GOAL:.0%} from --replay-check {math.ceil(check / GOAL)} on")


if __name__ == "__main__":
    main()
