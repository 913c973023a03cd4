"""Cost of keeping a rank's place: what a step of a small model stores, beside the time of that step.

    python -m benchmarks.places            # prints; --write keeps the result

The rank is one of 8 (TP 2, ZeRO over 4) in a process group without peers, whose collectives take no time, so the share
is an upper bound. The calls of one step are counted, and the price of each kind is measured in a loop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.record import conditions, options, price, run, spreads
from megatron.arguments.cli import parse
from megatron.distributed.comm import ALL_REDUCE, NO_CALL, Group, _Wait
from megatron.distributed.launch import fake_process_group
from megatron.distributed.places import ACTION, PLACE, PeerPlace, ProcessPlace
from megatron.distributed.timing import NO_SPAN, Timers
from megatron.pipeline.actions import Action
from megatron.training.build import build_trainer
from megatron.training.stall_watch import StallWatch
from megatron.training.step import train_step

TITLE = "# What keeping the place of a rank costs, CPU, one thread"
RANKS = 8
FLAGS = (
    "--mock-data --vocab-size 8192 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256"
    " --device cpu --micro-batch-size 1 --global-batch-size 8 --train-iters 1000000 --tensor-model-parallel-size 2"
    " --use-distributed-optimizer"
)


def parts() -> dict[str, Callable[[], object]]:
    """Return what is done for a call, a wait, a phase, an action of the pipeline, and by the watchdog."""
    x, row, group = torch.zeros(1), PLACE.new_row("dp", range(RANKS)), Group()
    timers, number = Timers(0, torch.device("cpu")), Action(0, "F", 1).to_number()
    PLACE.timeout = 600.0
    neighbour = PeerPlace(os.getpid(), *map(os.dup, PLACE.share()))
    watch = StallWatch(group)

    def wait() -> None:
        with _Wait(group, NO_SPAN, NO_CALL):
            pass

    def act() -> None:
        PLACE.slots[ACTION] = number

    return {
        "call of a collective": lambda: PLACE.call(row, ALL_REDUCE, "dp", x.dtype, x.numel()),
        "wait": wait,
        "phase": lambda: timers.enter("optimizer"),
        "action of the pipeline": act,
        "poll of the watchdog, once a second": watch.poll,
        "comparing with a neighbour, once a second": neighbour.differs,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the calls of a step, their prices, and their share of its time."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    call, enter, begin = ProcessPlace.call, Timers.enter, _Wait.__enter__

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            counts[name] += 1
            return original(*arguments)

        return act

    with fake_process_group(0, RANKS):
        config = parse(FLAGS.split(), {"RANK": "0", "WORLD_SIZE": str(RANKS)}).config
        trainer = build_trainer(config, 0, RANKS)
        trainer.start_at(0, 0)

        def step() -> None:
            train_step(trainer, trainer.next_batches(), trainer.schedule.rates(trainer.consumed_samples))
            trainer.progress.iteration += 1
            trainer.progress.consumed_samples += 8

        step()
        with (
            patch.object(ProcessPlace, "call", counted("call of a collective", call)),
            patch.object(Timers, "enter", counted("phase", enter)),
            patch.object(_Wait, "__enter__", counted("wait", begin)),
        ):
            step()
        seconds = []
        for _ in range(args.repeats):
            start = time.thread_time()
            step()
            seconds.append(time.thread_time() - start)
    counts["action of the pipeline"] = 4
    prices = {name: price(act, args.calls, args.repeats) for name, act in parts().items()}
    PLACE.reset()
    added = sum(counts[name] * median for name, (median, *_) in prices.items())
    milliseconds = statistics.median(seconds) * 1e3
    return {
        "step_ms": round(milliseconds, 2),
        "counts": dict(counts),
        "prices": prices,
        "added_us": round(added, 1),
        "share": float(f"{added / milliseconds / 1e3:.3g}"),
    }


def page(result: dict[str, Any]) -> str:
    """Return the page of the figures."""
    counted = ", ".join(f"{count} x {name}" for name, count in result["counts"].items())
    share = f"{result['added_us']} us, {100 * result['share']:.2f} % of it"
    return "\n".join(
        [
            TITLE,
            "",
            f"A step of {result['step_ms']} ms has {counted}: {share}.",
            *spreads("microseconds", result["prices"]),
            "",
            conditions(result),
            "",
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--calls", type=int, default=5000, help="calls per round")
    return run("places", parser, argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
