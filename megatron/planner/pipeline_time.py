"""Time of a pipeline, as the simulator gives it, in a fraction of a millisecond.

The simulator (:mod:`megatron.pipeline.simulate`) starts every action and transfer as early as possible, so the time of
each is the largest of its predecessors' ends and its own seconds. Predecessors depend on the schedule alone: they are
found once (:class:`Precedence`), and a layout of other costs is one pass over them. After its start a schedule repeats
itself, and each further group of micro-batches takes as long as the last one: steps of many micro-batches are those of
few, extended by what the groups in between differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

from megatron.config.parallel import ParallelConfig
from megatron.pipeline.actions import (
    BACKWARD,
    COMMUNICATION_KINDS,
    FORWARD,
    INPUT,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
)
from megatron.pipeline.communication import (
    add_communication,
    channel_of,
    execution_order,
    peer_action,
    required_receive,
)
from megatron.pipeline.plan import build_schedule
from megatron.pipeline.schedules import SCHEDULES
from megatron.pipeline.simulate import StageCosts

KINDS = {FORWARD: 0, INPUT: 1, WEIGHT: 2, BACKWARD: 3}

STARTING_GROUPS = {"1f1b": 1, "interleaved": 1, "gpipe": 1}
"""Groups of as many micro-batches as there are ranks until a schedule repeats itself; of the others :data:`MOST`. Exact
if all stages but the first and the last cost the same; in zb-v and dualpipe-v, or if they differ by up to 10%, within
3% of the simulator."""

MOST = 2


@dataclass(frozen=True)
class PipelineEnd:
    """When the ranks of a pipeline are done."""

    # Seconds from the start of the step to the last end of each rank.
    ends: tuple[float, ...]
    # Seconds in which each rank computes.
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.ends)


@dataclass(frozen=True)
class Precedence:
    """The actions and transfers of a program in an order in which each follows those that it waits for."""

    # By node: up to three nodes that it waits for (-1: none; the end of what is not there is 0), and its cost, by
    # stage and kind; the last cost is that of a transfer.
    nodes: tuple[tuple[int, int, int, int], ...]
    # By rank, its last node, and the costs of its actions with their numbers.
    last: tuple[int, ...]
    actions: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, parallel: ParallelConfig, microbatches: int) -> Precedence:
        """Return that of a schedule, as :func:`megatron.pipeline.simulate.simulate` follows it."""
        program = add_communication(build_schedule(parallel, microbatches))
        placement, nodes = program.placement, list[tuple[int, int, int, int]]()
        transfer_cost = len(KINDS) * len(placement)
        clock, counts = [-1] * len(program.ranks), [dict[int, int]() for _ in program.ranks]
        arrivals, needed = dict[Action, int](), dict[tuple[int, str], str | None]()
        posted = dict[tuple[int, int], tuple[list[tuple[Action, int]], list[int], list[int]]]()
        for rank, action in execution_order(program):
            stage, kind, microbatch = action
            if kind in COMMUNICATION_KINDS:
                sends, receives, transfers = posted.setdefault(channel_of(action, placement), ([], [], []))
                if kind in (SEND_F, SEND_B):
                    sends.append((action, clock[rank]))
                else:
                    receives.append(clock[rank])
                number = len(transfers)
                if number < min(len(sends), len(receives)):
                    send, sent = sends[number]
                    before = transfers[-1] if transfers else -1
                    arrivals[peer_action(send)] = len(nodes)
                    transfers.append(len(nodes))
                    nodes.append((sent, receives[number], before, transfer_cost))
                continue
            if (stage, kind) not in needed:
                needed[stage, kind] = required_receive(stage, kind, placement)
            receive = needed[stage, kind]
            arrival = -1 if receive is None else arrivals[Action(stage, receive, microbatch)]
            cost = len(KINDS) * stage + KINDS[kind]
            counts[rank][cost] = counts[rank].get(cost, 0) + 1
            nodes.append((clock[rank], arrival, -1, cost))
            clock[rank] = len(nodes) - 1
        return cls(tuple(nodes), tuple(clock), tuple(tuple(each.items()) for each in counts))

    def end(self, costs: StageCosts) -> PipelineEnd:
        """Return the ends of the ranks."""
        seconds = [each for f, i, w in zip(costs.forward, costs.input, costs.weight) for each in (f, i, w, i + w)]
        seconds.append(costs.latency + costs.transfer)
        ends = [0.0] * (len(self.nodes) + 1)  # the last one is that of no node
        for number, (first, second, third, cost) in enumerate(self.nodes):
            start, other = ends[first], ends[second]
            if other > start:
                start = other
            other = ends[third]
            ends[number] = (other if other > start else start) + seconds[cost]
        busy = (sum(seconds[cost] * count for cost, count in each) for each in self.actions)
        return PipelineEnd(tuple(ends[node] for node in self.last), tuple(busy))


OPTIONS = (
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
    "microbatch_group_size_per_virtual_pipeline_stage",
)
"""Options that a schedule depends on."""


def pipeline_end(parallel: ParallelConfig, microbatches: int, costs: StageCosts) -> PipelineEnd:
    """Return when the ranks of a pipeline are done, extended from few micro-batches where a schedule repeats itself.

    Args:
        parallel: of a resolved configuration.
        microbatches: of a step, on each data-parallel rank.
        costs: of the stages.
    """
    return _pipeline_end(tuple(getattr(parallel, name) for name in OPTIONS), microbatches, costs)


@lru_cache(maxsize=4096)
def _pipeline_end(options: tuple[Any, ...], microbatches: int, costs: StageCosts) -> PipelineEnd:
    ranks, _, schedule, group = options
    if len(costs.forward) == 1:
        busy = microbatches * (costs.forward[0] + costs.input[0] + costs.weight[0])
        return PipelineEnd((busy,), (busy,))
    period = lcm(ranks, group or ranks)
    few = STARTING_GROUPS.get(schedule, MOST) * period + microbatches % period
    times = (microbatches - few) // period
    if schedule not in SCHEDULES or times < 2:
        return _precedence(options, microbatches).end(costs)
    one, two = (_precedence(options, count).end(costs) for count in (few, few + period))
    ends, computing = _extended(one.ends, two.ends, times), _extended(one.busy, two.busy, times)
    return PipelineEnd(tuple(map(max, ends, computing)), computing)  # no rank is done before it has computed


def _extended(one: Sequence[float], two: Sequence[float], times: int) -> tuple[float, ...]:
    """Return the values of so many steps after the first ones, from one to two."""
    return tuple(first + times * (second - first) for first, second in zip(one, two))


@lru_cache(maxsize=256)
def _precedence(options: tuple[Any, ...], microbatches: int) -> Precedence:
    return Precedence.of(ParallelConfig(**dict(zip(OPTIONS, options))), microbatches)
