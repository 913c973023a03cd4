"""Which layers each stage of a pipeline has: equally many, of equal cost, by rank, or written out.

Stages are numbered in the order in which a micro-batch passes them. The first one has the embedding too, the last one
the final norm and the output layer; those may be all it has, and every other stage has at least one layer.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron.pipeline.actions import ScheduleError

AUTO = "--pipeline-model-parallel-layout auto"


@dataclass(frozen=True)
class StageLayers:
    """What a stage is made of.

    Attributes:
        layers: global indices of its transformer blocks.
        first: whether the embedding comes before them.
        last: whether the final norm and the output layer come after them.
    """

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class LayerCosts:
    """What the parts of a model cost, in any one unit.

    Attributes:
        layer: a transformer block.
        embedding: what the first stage does before its blocks.
        output: what the last stage does after them.
    """

    layer: float
    embedding: float = 0.0
    output: float = 0.0

    def of(self, stage: StageLayers) -> float:
        """What a stage costs."""
        return len(stage.layers) * self.layer + self.embedding * stage.first + self.output * stage.last


def stages_of(counts: Sequence[int]) -> tuple[StageLayers, ...]:
    """Stages with so many layers each, in order.

    Raises:
        ScheduleError: when one between the first and the last has none.
    """
    for stage, count in enumerate(counts[1:-1], start=1):
        if count < 1:
            raise ScheduleError(f"stage {stage} would have no layers, which only the first and the last may", AUTO)
    last = len(counts) - 1
    starts = accumulate(counts, initial=0)
    return tuple(StageLayers(range(at, at + n), s == 0, s == last) for s, (at, n) in enumerate(zip(starts, counts)))


def equal(layers: int, stages: int, embedding: bool = False, output: bool = False) -> tuple[StageLayers, ...] | None:
    """Equally many layers in every stage; None where they do not divide.

    Args:
        layers: of the model.
        stages: of the pipeline.
        embedding: whether it counts as a layer of the first stage.
        output: whether the output layer counts as one of the last stage.
    """
    size, left = divmod(layers + embedding + output, stages)
    counts = [size] * stages
    counts[0] -= embedding
    counts[-1] -= output
    return None if left or min(counts) < 0 else stages_of(counts)


def balanced(layers: int, stages: int, costs: LayerCosts) -> tuple[StageLayers, ...]:
    """The split whose costliest stage is as cheap as can be, and whose other stages are as even as can be.

    Layer after layer goes where the stage is cheapest with it. As every layer costs the same, that minimises each
    increasing convex function of the stages' costs (Fox, 1966), so also the largest and the sum of squares. Of equally
    cheap stages a later one takes the layer: it keeps fewer activations, and the first one has the embedding's weight.

    Raises:
        ScheduleError: when there are more stages than layers to begin and end them.
    """
    if stages > layers + 2:
        raise ScheduleError(
            f"{layers} layers, an embedding and an output layer do not fill {stages} stages",
            f"--num-layers {stages - 2}",
        )
    counts = [int(0 < stage < stages - 1) for stage in range(stages)]
    extra = [0.0] * stages
    extra[0] += costs.embedding
    extra[-1] += costs.output
    queue = [(extra[stage] + (counts[stage] + 1) * costs.layer, -stage) for stage in range(stages)]
    heapq.heapify(queue)
    for _ in range(layers - sum(counts)):
        stage = -queue[0][1]
        counts[stage] += 1
        heapq.heapreplace(queue, (extra[stage] + (counts[stage] + 1) * costs.layer, -stage))
    return stages_of(counts)


def by_rank(layers: int, placement: Sequence[int], first: int | None, last: int | None) -> tuple[StageLayers, ...]:
    """As many layers as said on the first and on the last rank, equally many on the others.

    Each rank's layers are shared equally by its stages.

    Args:
        layers: of the model.
        placement: the rank of every stage.
        first: layers of the first rank; None for as many as the others have.
        last: layers of the last rank; None likewise.

    Raises:
        ScheduleError: where something does not divide, or a rank would have nothing.
    """
    ranks = 1 + max(placement)
    said = {0: first} if first is not None else {}
    if last is not None:
        said[ranks - 1] = last
    others, rest = ranks - len(said), layers - sum(said.values())
    if rest < 0 or (rest > 0 if others == 0 else rest % others):
        shared = f"{rest} layers are left for {others} ranks"
        raise ScheduleError(
            f"{_flags(first, last)} and {layers} layers in all: {shared}, which do not share them equally", AUTO
        )
    on_rank = [said.get(rank, rest // max(1, others)) for rank in range(ranks)]
    chunks = len(placement) // ranks
    uneven = [rank for rank, count in enumerate(on_rank) if count % chunks]
    if uneven:
        sentence = (
            f"the {on_rank[uneven[0]]} layers of pipeline rank {uneven[0]} do not divide over its {chunks} stages"
        )
        raise ScheduleError(f"{_flags(first, last)}: {sentence}", AUTO)
    return stages_of([on_rank[rank] // chunks for rank in placement])


def _flags(first: int | None, last: int | None) -> str:
    said = (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last))
    return " ".join(f"{flag} {count}" for flag, count in said if count is not None)


def written(layout: str, layers: int) -> tuple[StageLayers, ...]:
    """The split that a layout in Megatron-LM's notation describes.

    ``E`` is the embedding, ``t`` a layer, ``L`` the output layer and the loss, ``|`` stands between two stages;
    ``x*n`` repeats a letter or what is in parentheses. Commas and blanks mean nothing. ``Et*3|(tt|)*29L`` is a stage
    with the embedding and 3 layers, 29 stages of 2 layers, and one with the output layer alone.

    Raises:
        ScheduleError: when it is not a layout of ``layers`` layers.
    """
    stages = spelled_out(layout).split("|")
    for number, stage in enumerate(stages):
        if not stage:
            raise ScheduleError(f"{layout}: stage {number} has nothing in it", AUTO)
    parts = "".join(stages)
    if not re.fullmatch("Et*L", parts):
        raise ScheduleError(f"{layout}: a layout begins with E, ends with L, and has either once, with t between them")
    if parts.count("t") != layers:
        raise ScheduleError(
            f"{layout} has {parts.count('t')} layers, and the model {layers}", f"--num-layers {parts.count('t')}"
        )
    return stages_of([stage.count("t") for stage in stages])


def spelled_out(layout: str) -> str:
    """A layout without repetitions, parentheses, commas and blanks: ``Et*2|L`` -> ``Ett|L``.

    Raises:
        ScheduleError: when it is not written as one.
    """
    text = re.sub(r"[,\s]", "", layout)
    if "m" in text:
        raise ScheduleError(f"{layout}: m is multi-token prediction, which is not built", AUTO)
    strange = re.search(r"[^EtL|()*\d]", text)
    if strange:
        raise ScheduleError(f"{layout}: '{strange[0]}' is no part of a layout, which has E, t, L, |, *n and ()", AUTO)
    repeated = re.compile(r"(?:\(([EtL|]*)\)|([EtL]))\*(\d+)|\(([EtL|]*)\)")
    while True:
        text, found = repeated.subn(_repeat, text)
        if not found:
            break
    if re.search(r"[()*\d]", text):
        raise ScheduleError(f"{layout}: a parenthesis or a *n has nothing to go with", AUTO)
    return text


def _repeat(found: re.Match[str]) -> str:
    group, letter, times, once = found.groups()
    return once if times is None else (group if letter is None else letter) * int(times)
