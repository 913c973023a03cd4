"""Cost of ``--replay-check N`` on one CPU process, in processor seconds, which depend less on other programs than time.

Run with ``python -m benchmarks.replay_check``. Short runs with ``--replay-check 3`` and without it alternate. In the
first kind, steps are in turn between checks, before one (which takes digests of state), and checked. A check costs what
the last two take more than the first; with N, that is once in N steps. Steps 1 and 2 of a run, and its last one, are
left out.
"""

from __future__ import annotations

import argparse
import io
import math
import tempfile
import time
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
    parser.add_argument("--rounds", type=int, default=3, help="of two runs each")
    parser.add_argument("--steps", type=int, default=11, help="of a run")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens in a step")
    options = parser.parse_args()
    rounds: list[tuple[float, float]] = []
    for number in range(options.rounds):
        pair = ["--replay-check 3", ""]
        order = pair if number % 2 else pair[::-1]
        found = {flags: step_seconds(flags, options.steps, options.batch) for flags in order}
        plain = median(found[""].values())
        between, checked, before = (
            median(seconds for step, seconds in found[pair[0]].items() if step % 3 == rest) for rest in (1, 0, 2)
        )
        rounds.append((between / plain, (checked + before) / between - 2))
        print(
            f"a step {plain:.3f} s without the option, {between:.3f} s between checks, {before:.3f} s before one, "
            f"{checked:.3f} s checked",
            flush=True,
        )
    check = median(each for _, each in rounds)
    print(f"between checks {median(ratio for ratio, _ in rounds):.3f} of a step without the option")
    print(f"a check {check:.3f} of a step of {options.batch * 128} tokens")
    for interval in (20, 50, 100):
        print(f"--replay-check {interval}: {1 + check / interval:.4f}")
    print(f"at most {GOAL:.0%} from --replay-check {math.ceil(check / GOAL)} on")


if __name__ == "__main__":
    main()
