"""Overhead of the pipeline runtime per action: a rank's part of a step beside a plain loop of the same calls.

    python -m benchmarks.pipeline            # prints; --write keeps the result

A rank in the middle of a pipeline works on stages that multiply two small matrices; what it sends and receives goes
nowhere and comes from nowhere, at once, so that the time of torch.distributed is left out. The plain loop makes the
same calls of PyTorch in the same order: forward, edges of the graph, backward, buffers of what is received. The two
take turns; the price of an action is the difference over their number, in the processor time of the thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from benchmarks.record import conditions, options, run, spread, table, timed
from megatron.distributed import comm
from megatron.distributed.comm import Channel, Pending
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.pipeline.actions import BACKWARD, COMPUTE_KINDS, FORWARD, INPUT, RECV_B, RECV_F, Action, PipelineSchedule
from megatron.pipeline.communication import add_communication, channels
from megatron.pipeline.runtime import Pipeline
from megatron.pipeline.schedules import SCHEDULES, make_schedule

RANKS, RANK, WIDTH = 4, 1, 16
MOST = 50.0
"""Microseconds that an action may cost."""

TITLE = "# The runtime of pipelines beside a plain loop, CPU, one thread"
RECV = {FORWARD: RECV_F, BACKWARD: RECV_B, INPUT: RECV_B}
"""Action that brings the input of an action from another rank."""


@dataclass
class Case:
    """A schedule, and what a rank needs to run its part."""

    program: PipelineSchedule
    batches: Sequence[MicroBatch]
    weight: Tensor
    seed: Tensor

    @classmethod
    def of(cls, name: str, microbatches: int) -> Case:
        """Return the schedule ``name`` with the stages per rank that it needs; two for ``interleaved``."""
        chunks = SCHEDULES[name].chunks or (2 if name == "interleaved" else 1)
        program = add_communication(make_schedule(name, RANKS, chunks, microbatches))
        batches = [MicroBatch.of_tokens(torch.zeros(1, 1, dtype=torch.int64))] * microbatches
        return cls(program, batches, torch.ones(WIDTH, WIDTH, requires_grad=True), torch.ones(()))

    @property
    def actions(self) -> Sequence[Action]:
        """Of the rank that is measured."""
        return self.program.ranks[RANK]

    def chunk(self, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Build a stage; the gradient of its weight is discarded."""
        return (x if x is not None else torch.ones(1, WIDTH)) @ self.weight, torch.zeros(())

    def buffer(self, batch: MicroBatch) -> Tensor:
        """For what is received."""
        return torch.ones(1, WIDTH)

    def pipeline(self) -> Callable[[], None]:
        """Run the rank's part of a step with the runtime."""
        placement = self.program.placement
        chunks = {stage: self.chunk for stage, rank in enumerate(placement) if rank == RANK}
        roads = {edge: Channel(*edge) for edge in channels(placement)}
        runtime = Pipeline(chunks, placement, RANK, roads, self.buffer, GradAccumulator())
        return lambda: runtime.run(self.actions, self.batches, self.seed)

    def plain(self) -> Callable[[], None]:
        """Run the same PyTorch calls in a plain loop over a prepared list."""
        received = set(self.actions)
        calls = [
            (kind == FORWARD, (stage, microbatch), Action(stage, RECV[kind], microbatch) in received)
            for stage, kind, microbatch in self.actions
            if kind in RECV
        ]
        at_hand, batch = self.buffer(self.batches[0]), self.batches[0]  # handed over on the rank

        def step() -> None:
            kept = {}
            for forward, key, fresh in calls:
                tensor = self.buffer(batch) if fresh else at_hand
                if forward:
                    x = tensor.detach().requires_grad_() if key[0] > 0 else None
                    out, _ = self.chunk(x, batch)
                    kept[key] = get_gradient_edge(out), out.detach(), x
                else:
                    edge, _, x = kept.pop(key)
                    torch.autograd.backward([edge], [tensor])

        return step


def measure_one(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Actions of a step by what they are, and microseconds of a step of every round, by the runtime and plain."""
    case = Case.of(name, args.microbatches)
    micros: dict[str, list[float]] = {"runtime": [], "plain": []}
    steps = {"runtime": case.pipeline(), "plain": case.plain()}
    with patch.multiple(comm, start_send=nothing_moves, start_receive=nothing_moves):
        for number in range(args.repeats + 1):  # the first one warms up
            for what, step in steps.items():
                spent = sum(timed(step, time.thread_time) for _ in range(args.steps))
                if number:
                    micros[what].append(spent / args.steps * 1e6)
    computing = sum(action.kind in COMPUTE_KINDS for action in case.actions)
    return {"actions": len(case.actions), "computing": computing, "micros": micros}


def nothing_moves(x: Tensor, channel: Channel) -> Pending:
    """Return a completed send or receive."""
    return Pending(x)


def price(row: Mapping[str, Any]) -> list[float]:
    """Microseconds that the runtime adds to an action, by round."""
    return [(ours - plain) / row["actions"] for ours, plain in zip(row["micros"]["runtime"], row["micros"]["plain"])]


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    heads = ("schedule", "actions", "of them computing", "added to an action, us", "lowest", "highest")
    rows = []
    for name, row in result["schedules"].items():
        ratio = statistics.median(a / b for a, b in zip(row["micros"]["runtime"], row["micros"]["plain"]))
        rows.append([name, row["actions"], row["computing"], *(f"{x:.1f}" for x in (*spread(price(row)), ratio))])
    above = [name for name, row in result["schedules"].items() if statistics.median(price(row)) > MOST]
    verdict = f"above {MOST:.0f} us: {', '.join(above)}" if above else f"all below {MOST:.0f} us"
    text = [
        TITLE,
        *table((*heads, "step / plain loop"), rows),
        "",
        f"Rank {RANK} of {RANKS}, {result['microbatches']} micro-batches, stages of one product of 1 x {WIDTH} and "
        f"{WIDTH} x {WIDTH}; {verdict} for an action, sends and receives counted, the time of torch.distributed not. "
        "Such a stage computes next to nothing, so the ratio is the worst there is.",
        "",
        f"Median of {result['rounds']} alternating rounds, processor time of the thread; {conditions(result)}",
    ]
    return "\n".join(text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all schedules."""
    torch.set_num_threads(1)
    return {"microbatches": args.microbatches, "schedules": {name: measure_one(name, args) for name in SCHEDULES}}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=7)
    parser.add_argument("--microbatches", type=int, default=32, help="of a step")
    parser.add_argument("--steps", type=int, default=20, help="that are timed together")
    return run("pipeline", parser, argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
