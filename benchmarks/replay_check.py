"""Cost of ``--replay-check N`` on one CPU process: steps with and without it, in processor seconds.

Run with ``python -m benchmarks.replay_check``. Short runs alternate, one with ``--replay-check 2`` and one without, so
that each round gives all three kinds of steps: without the check, between two checks, and checked. Processor seconds
depend less on other programs than time does. With N, every step costs what a step between two checks does, and one of N
what a checked one does. Steps 1 and 2 of a run, and its last one, are left out.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from statistics import median

from megatron.arguments.cli import parse
from megatron.config.plugins import register
from megatron.training import main as training
from megatron.training.callbacks.base import Callback
from megatron.training.trainer import Trainer

MODEL = (
    "--mock-data --device cpu --lr 1e-3 --vocab-size 512 --num-layers 2 --hidden-size 128 --num-attention-heads 4 "
    "--ffn-hidden-size 512 --max-position-embeddings 128 --seq-length 128 --micro-batch-size 8 --log-interval 1000 "
    "--eval-iters 0"
)
GOAL = 0.02
"""Cost over that of a step, at N = 50."""

moments: list[float] = []
"""Processor seconds at the start of each step of the last run."""


@register("callback", "step_clock")
class StepClock(Callback):
    """Notes when steps start."""

    interval = 1
    pauses = False

    def __init__(self, trainer: Trainer) -> None:
        """Start anew."""
        super().__init__(trainer)
        moments.clear()

    def on_step_start(self) -> None:
        """See :class:`Callback`."""
        moments.append(time.process_time())


def step_seconds(flags: str, steps: int, batch: int) -> dict[int, float]:
    """Return the processor seconds of each step of a run but the first two and the last, by number."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [*MODEL.split(), *flags.split(), "--train-iters", str(steps), "--global-batch-size", str(batch)]
        config = parse([*argv, "--run-dir", folder], {"RANK": "0", "WORLD_SIZE": "1"}).config
        with redirect_stdout(io.StringIO()):
            status = training.run(config)
    if status:
        raise RuntimeError(f"a run ended with {status}")
    return {step: moments[step] - moments[step - 1] for step in range(3, steps)}


def main() -> None:
    """Print the costs of each round, and their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of two runs each")
    parser.add_argument("--steps", type=int, default=9, help="of a run")
    parser.add_argument("--batch", type=int, default=32, help="sequences of 128 tokens in a step")
    options = parser.parse_args()
    rounds: list[tuple[float, float, float]] = []
    for number in range(options.rounds):
        pair = ["--replay-check 2", ""]
        order = pair if number % 2 else pair[::-1]
        found = {flags: step_seconds(flags, options.steps, options.batch) for flags in order}
        with_check, plain = found[pair[0]], median(found[""].values())
        between = median(seconds for step, seconds in with_check.items() if step % 2)
        checked = median(seconds for step, seconds in with_check.items() if step % 2 == 0)
        rounds.append((plain, between, checked))
        print(f"a step {plain:.4f} s, between checks {between:.4f} s, checked {checked:.4f} s", flush=True)
    report(rounds, options.batch * 128)


def report(rounds: Sequence[tuple[float, float, float]], tokens: int) -> None:
    """Print the ratios and the cost by interval."""
    every = median(between / plain - 1 for plain, between, _ in rounds)
    check = median((checked - between) / plain for plain, between, checked in rounds)
    print(f"steps of {tokens} tokens: digests of state {every:.2%} of every step, a check {check:.1%} of a step")
    for interval in (10, 20, 50, 100, 200):
        print(f"--replay-check {interval}: {1 + every + check / interval:.4f} of the time without")
    if every < GOAL:
        print(f"at most {GOAL:.0%} from --replay-check {check / (GOAL - every):.0f} on")


if __name__ == "__main__":
    main()
