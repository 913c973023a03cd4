"""Which layers each stage of a pipeline has: equally many, of equal cost, by rank, or written out.

Stages are numbered in the order in which a micro-batch passes them. The first one has the embedding too, the last one
the final norm and the output layer; those may be all it has, and every other stage has at least one layer.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby

from megatron.config.numbers import beside, offers
from megatron.pipeline.actions import ScheduleError

AUTO = "--pipeline-model-parallel-layout auto"

MOST_DIGITS = 5
"""Of a number that says how often something is repeated in a layout."""

MOST_LETTERS = 1_000_000
"""Of what one repetition in a layout makes."""


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

    @property
    def count(self) -> int:
        """Its blocks, of which there may be more than a ``len`` can say where the number was mistyped."""
        return self.layers.stop - self.layers.start


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
        return stage.count * self.layer + self.embedding * stage.first + self.output * stage.last


def counted(layers: int) -> str:
    """``1 layer``, ``2 layers``."""
    return "1 layer" if layers == 1 else f"{layers} layers"


def filling(layers: int) -> str:
    """``1 layer does not fill``, ``2 layers do not fill``."""
    return f"{counted(layers)} {'does' if layers == 1 else 'do'} not fill"


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


def balanced(layers: int, placement: Sequence[int], costs: LayerCosts) -> tuple[StageLayers, ...]:
    """The split whose costliest rank is as cheap as can be; of those, the one with the most even stages on the ranks.

    Layer after layer goes to the rank that is cheapest with it, and there to the stage that is. As every layer costs
    the same and a stage belongs to one rank, that minimises the ranks' sum of squares, and of any other increasing
    convex function, before that of the stages (greedy allocation over nested sets: Ibaraki and Katoh, 1988). Of equally
    cheap stages a later one takes the layer: it keeps fewer activations, and the first one has the embedding's weight.

    Args:
        layers: of the model.
        placement: the rank of every stage.
        costs: of the model's parts.

    Raises:
        ScheduleError: when there are more stages than layers to fill them.
    """
    stages, ranks = len(placement), range(1 + max(placement))
    if stages > layers + 2:
        sentence = f"{counted(layers)}, an embedding and an output layer do not fill {stages} stages"
        raise ScheduleError(sentence, f"--num-layers {stages - 2}")
    counts = [int(0 < stage < stages - 1) for stage in range(stages)]
    spent = [count * costs.layer for count in counts]
    spent[0] += costs.embedding
    spent[-1] += costs.output
    own = [[stage for stage in range(stages) if placement[stage] == rank] for rank in ranks]

    def next_on(rank: int) -> tuple[float, float, int]:
        """What the rank and its cheapest stage would cost with one more layer, and that stage with its sign changed."""
        cost, minus = min((spent[stage] + costs.layer, -stage) for stage in own[rank])
        return sum(spent[stage] for stage in own[rank]) + costs.layer, cost, minus

    queue = [next_on(rank) for rank in ranks]
    heapq.heapify(queue)
    for _ in range(layers - sum(counts)):
        stage = -queue[0][2]
        counts[stage] += 1
        spent[stage] += costs.layer
        heapq.heapreplace(queue, next_on(placement[stage]))
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
        ScheduleError: where something does not divide, or a stage would have nothing.
    """
    counts = _on_ranks(layers, placement, first, last)
    if counts is not None:
        return stages_of(counts)
    ranks, flags = 1 + max(placement), _flags(first, last)
    flag, value = flags[0]
    others = [n for n in range(1, layers + 1) if _on_ranks(layers, placement, *((n, last) if first else (None, n)))]
    said = " and ".join(f"{flag} {value}" for flag, value in flags)
    sentence = f"{filling(layers)} PP{ranks} x VPP{len(placement) // ranks} equally with {said}"
    raise ScheduleError(sentence, *offers(flag, beside(value, others)), f"drop {flag}")


def _on_ranks(layers: int, placement: Sequence[int], first: int | None, last: int | None) -> list[int] | None:
    """Layers of every stage; None where something does not divide."""
    ranks = 1 + max(placement)
    said = {rank: count for rank, count in ((0, first), (ranks - 1, last)) if count is not None}
    if len(said) < ranks:
        size, left = divmod(layers - sum(said.values()), ranks - len(said))
    else:
        size, left = 1, layers - sum(said.values())
    chunks = len(placement) // ranks
    counts = [divmod(said.get(rank, size), chunks) for rank in placement]
    agree = first is None or said[0] == first  # of one rank, which is the last one too
    fits = agree and not left and size > 0 and not any(rest for _, rest in counts)
    return [count for count, _ in counts] if fits else None


def _flags(first: int | None, last: int | None) -> list[tuple[str, int]]:
    said = (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last))
    return [(flag, count) for flag, count in said if count is not None]


def written(layout: str, layers: int) -> tuple[StageLayers, ...]:
    """The split that a layout in Megatron-LM's notation describes.

    ``E`` is the embedding, ``t`` a layer, ``L`` the output layer and the loss, ``|`` stands between two stages;
    ``x*n`` repeats a letter or what is in parentheses. Commas and blanks mean nothing. ``Et*3|(tt|)*29L`` is a stage
    with the embedding and 3 layers, 29 stages of 2 layers, and one with the output layer alone.

    Raises:
        ScheduleError: when it is not a layout of ``layers`` layers; with what was most likely meant, if that is plain.
    """
    try:
        return _read(layout, layers)
    except ScheduleError as error:
        meant = _meant(layout, layers)
        mended = [f"--pipeline-model-parallel-layout '{meant}'"] if meant else []
        raise ScheduleError(error.sentence, *mended, *error.fixes) from None


def _read(layout: str, layers: int) -> tuple[StageLayers, ...]:
    stages = spelled_out(layout).split("|")
    for number, stage in enumerate(stages):
        if not stage:
            raise ScheduleError(f"{layout}: stage {number} has nothing in it", AUTO)
    parts = "".join(stages)
    if not re.fullmatch("Et*L", parts):
        rule = "a layout begins with E, ends with L, and has either once, with t between them"
        raise ScheduleError(f"{layout} {_of_its_ends(layout, parts)}: {rule}", AUTO)
    count = parts.count("t")
    if count != layers:
        fixes = offers("--num-layers", [count] if count else [])
        raise ScheduleError(f"{layout} has {counted(count)}, and the model {layers}", *fixes)
    return stages_of([stage.count("t") for stage in stages])


def _of_its_ends(layout: str, parts: str) -> str:
    """What is wrong with the embedding or the output layer among ``parts``, which is the layout spelled out."""
    if parts[0] != "E":
        return "does not begin with E"
    if parts[-1] != "L":
        return "does not end with L"
    letter = "E" if parts.count("E") > 1 else "L"
    places = [str(place) for place, seen in enumerate(layout, start=1) if seen == letter]
    return f"has more than one {letter}, at character {' and '.join(places[:2])}"


LONGEST_MENDED = 1_000
"""Characters of a layout for which another spelling is looked for."""


def _meant(layout: str, layers: int) -> str | None:
    """The layout with capitals, ends or the parenthesis it lacks; None unless that is one of so many layers."""
    text = layout.replace("e", "E").replace("l", "L").replace("T", "t")
    text = ("" if text.lstrip().startswith("E") else "E") + text + ("" if text.rstrip().endswith("L") else "L")
    open_at = _unclosed(text)
    ways = [text]
    if open_at is not None and text[open_at] == "(":
        ways = [text[: f.start()] + ")" + text[f.start() :] for f in re.finditer(r"\*|L$", text) if f.start() > open_at]
    meanings: dict[tuple[StageLayers, ...], str] = {}
    for way in ways if len(layout) <= LONGEST_MENDED else ():
        with suppress(ScheduleError):
            meanings.setdefault(_read(way, layers), way)
    return next(iter(meanings.values())) if len(meanings) == 1 else None


def _unclosed(text: str) -> int | None:
    """The index of a parenthesis without the other one; None if each has its own."""
    opened: list[int] = []
    for at, letter in enumerate(text):
        if letter == "(":
            opened.append(at)
        elif letter == ")" and not opened:
            return at
        elif letter == ")":
            opened.pop()
    return opened[-1] if opened else None


FAULTS = (
    (r"\[", "is no part of a layout: lists of names are not read, only letters such as 'Et*3|t*4L'"),
    (r"m", "is multi-token prediction, which is not built"),
    (r"[^EtL|()*0-9]", "is no part of a layout, which has E, t, L, |, *n and ()"),
    (r"(?<=[0-9])\*", "comes right after another *n, and stands behind a letter or a parenthesis"),
    (r"\*(?![0-9])", "has no number behind it"),
    (r"(?<![EtL)0-9])\*", "has no letter or parenthesis before it to repeat"),
    (r"(?<![*0-9])[0-9]", "has no * before it"),
)
"""What no layout has, blanks and commas left out, and why."""


def spelled_out(layout: str) -> str:
    """A layout without repetitions, parentheses, commas and blanks: ``Et*2|L`` -> ``Ett|L``.

    Raises:
        ScheduleError: when it is not written as one, naming the character and its place, from 1 on.
    """
    places = [place for place, letter in enumerate(layout, start=1) if not re.match(r"[,\s]", letter)]
    text = "".join(layout[place - 1] for place in places)
    for fault, why in FAULTS:
        found = re.search(fault, text)
        if found:
            raise ScheduleError(f"{layout}: '{found[0]}' at character {places[found.start()]} {why}", AUTO)
    lone = _unclosed(text)
    if lone is not None:
        why = "is never closed" if text[lone] == "(" else "closes nothing"
        raise ScheduleError(f"{layout}: '{text[lone]}' at character {places[lone]} {why}", AUTO)
    repeated = re.compile(r"(?:\(([EtL|]*)\)|([EtL]))\*([0-9]+)|\(([EtL|]*)\)")
    while "(" in text or "*" in text:
        text = repeated.sub(_repeat, text)
    return text


def _repeat(found: re.Match[str]) -> str:
    group, letter, times, once = found.groups()
    if times is None:
        return str(once)
    letters = str(group if letter is None else letter)
    if len(times) > MOST_DIGITS or len(letters) * int(times) > MOST_LETTERS:
        raise ScheduleError(f"*{times} repeats more than any model has layers", AUTO)
    return letters * int(times)


def notation(stages: Sequence[StageLayers]) -> str:
    """The layout that :func:`written` reads as these stages."""
    counts = [stage.count for stage in stages]
    if len(counts) == 1:
        return f"E{_layers(counts[0])}L"
    middle = ""
    for count, same in groupby(counts[1:-1]):
        times = len(list(same))
        middle += f"({_layers(count)}|)*{times}" if times > 1 else f"{_layers(count)}|"
    return f"E{_layers(counts[0])}|{middle}{_layers(counts[-1])}L"


def _layers(count: int) -> str:
    return "t" * count if count < 3 else f"t*{count}"
