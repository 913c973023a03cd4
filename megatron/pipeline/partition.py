"""Assign layers to pipeline stages: equally, by cost, by rank, or from an explicit layout.

Stages are numbered in the order in which a micro-batch passes them. The first stage also has the embedding, the last
one the final norm and the output layer; these two may have no layers, every other stage has at least one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

from megatron.config.option import MAX_LAYERS
from megatron.config.text import flag_fixes, nearest
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.balance import balanced_counts

AUTO = "--pipeline-model-parallel-layout auto"

MAX_REPEAT_DIGITS, MAX_LAYOUT_LETTERS = 5, 10 * MAX_LAYERS
"""Maximum digits of a repetition count in a layout, and letters of a layout that is written out."""

MAX_CORRECTED_LAYOUT = 1_000
"""Maximum characters of a layout for which a correction is searched."""


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage."""

    layers: range  # global indices of the transformer blocks
    first: bool  # the stage has the embedding
    last: bool  # the stage has the final norm and the output layer

    @property
    def count(self) -> int:
        """Number of blocks; unlike ``len(layers)`` it does not overflow for absurd numbers."""
        return self.layers.stop - self.layers.start

    def kinds(self, head_layers: Sequence[int]) -> tuple[int, ...]:
        """Return the layers whose kinds of blocks the stage has, those of the heads of the last stage included."""
        return (*self.layers, *head_layers) if self.last else (*self.layers,)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the parts of a model, in whole numbers of any common unit."""

    layers: tuple[int, ...]  # of each block
    embedding: int = 0  # work of the first stage before its blocks
    output: int = 0  # work of the last stage after its blocks

    @property
    def alike(self) -> bool:
        """True if all blocks cost the same."""
        return len({*self.layers}) <= 1

    def of(self, stage: StageLayers) -> int:
        """Return the cost of a stage."""
        own = sum(self.layers[stage.layers.start : stage.layers.stop])
        return own + self.embedding * stage.first + self.output * stage.last

    def of_ranks(self, stages: Sequence[StageLayers], placement: Sequence[int]) -> list[int]:
        """Return the cost of each rank, which has the stages that are placed on it."""
        costs = [0] * (1 + max(placement))
        for stage, rank in zip(stages, placement, strict=True):
            costs[rank] += self.of(stage)
        return costs


def format_layers(layers: int) -> str:
    """Return ``1 layer`` or ``2 layers``."""
    return "1 layer" if layers == 1 else f"{layers} layers"


def do_not_fill(layers: int) -> str:
    """Return ``1 layer does not fill`` or ``2 layers do not fill``."""
    return f"{format_layers(layers)} {'does' if layers == 1 else 'do'} not fill"


def stages_from_counts(counts: Sequence[int]) -> tuple[StageLayers, ...]:
    """Return stages with the given numbers of layers, in order.

    Raises:
        ScheduleError: if one between the first and the last has none.
    """
    for stage, count in enumerate(counts[1:-1], start=1):
        if count < 1:
            raise ScheduleError(f"stage {stage} would have no layers; only the first and the last may", AUTO)
    last = len(counts) - 1
    starts = accumulate(counts, initial=0)
    return tuple(StageLayers(range(at, at + n), s == 0, s == last) for s, (at, n) in enumerate(zip(starts, counts)))


def split_equally(
    layers: int, stages: int, embedding: bool = False, output: bool = False
) -> tuple[StageLayers, ...] | None:
    """Split layers equally over stages; None if they do not divide.

    With ``embedding`` and ``output``, the embedding counts as a layer of the first stage, the output layer of the last.
    """
    size, left = divmod(layers + embedding + output, stages)
    counts = [size] * stages
    counts[0] -= embedding
    counts[-1] -= output
    return None if left or min(counts) < 0 else stages_from_counts(counts)


@lru_cache(maxsize=64)
def split_by_cost(placement: tuple[int, ...], costs: LayerCosts) -> tuple[StageLayers, ...]:
    """Split layers to minimise the maximum cost of a rank, and with several stages per rank that of a stage, too.

    Among equally even splits, later stages have more layers: they keep fewer activations, and the first one has the
    embedding's weight. Layers that differ: :mod:`megatron.pipeline.balance`.

    Args:
        placement: rank of every stage.
        costs: of the model's parts; at least as many layers as the number of stages minus 2.
    """
    divide = _equal_layers if costs.alike else balanced_counts
    return stages_from_counts(divide(costs.layers, placement, costs.embedding, costs.output))


def _equal_layers(layers: Sequence[int], placement: Sequence[int], embedding: int, output: int) -> list[int]:
    """Return the number of layers of each stage, if all cost the same.

    Each layer goes to the rank that is cheapest with it, and there to the stage that is. As all layers cost the same
    and a stage belongs to one rank, this minimises the sum of squares (or of any increasing convex function) over
    ranks, then over stages (greedy allocation over nested sets: Ibaraki and Katoh, 1988).
    """
    stages, ranks, layer = len(placement), range(1 + max(placement)), layers[0]
    counts = [int(0 < stage < stages - 1) for stage in range(stages)]
    spent = [count * layer for count in counts]
    spent[0] += embedding
    spent[-1] += output
    own = [[stage for stage in range(stages) if placement[stage] == rank] for rank in ranks]

    def next_on(rank: int) -> tuple[int, int, int]:
        """Return the costs of the rank and of its cheapest stage with one more layer, and minus that stage."""
        cost, minus = min((spent[stage] + layer, -stage) for stage in own[rank])
        return sum(spent[stage] for stage in own[rank]) + layer, cost, minus

    queue = [next_on(rank) for rank in ranks]
    heapq.heapify(queue)
    for _ in range(len(layers) - sum(counts)):
        stage = -queue[0][2]
        counts[stage] += 1
        spent[stage] += layer
        heapq.heapreplace(queue, next_on(placement[stage]))
    return counts


def split_by_rank(
    layers: int, placement: Sequence[int], first: int | None, last: int | None
) -> tuple[StageLayers, ...]:
    """Split with given numbers of layers on the first and last rank, and equally many on the others.

    The layers of a rank are split equally over its stages.

    Args:
        layers: of the model.
        placement: rank of every stage.
        first: layers of the first rank; None for as many as the other ranks.
        last: layers of the last rank; None likewise.

    Raises:
        ScheduleError: if the numbers do not divide, or a stage would be empty.
    """
    counts = _counts_by_rank(layers, placement, first, last)
    if counts is not None:
        return stages_from_counts(counts)
    ranks = 1 + max(placement)
    options = (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last))
    given = [(flag, count) for flag, count in options if count is not None]
    flag, value = given[0]
    pairs = (((n, last) if first else (None, n)) for n in range(1, layers + 1))
    others = [n for n, pair in enumerate(pairs, start=1) if _counts_by_rank(layers, placement, *pair)]
    words = " and ".join(f"{flag} {value}" for flag, value in given)
    sentence = f"{do_not_fill(layers)} PP{ranks} x VPP{len(placement) // ranks} equally with {words}"
    raise ScheduleError(sentence, *flag_fixes(flag, nearest(value, others)), f"drop {flag}")


def _counts_by_rank(layers: int, placement: Sequence[int], first: int | None, last: int | None) -> list[int] | None:
    """Return the layers of every stage; None if something does not divide."""
    ranks = 1 + max(placement)
    given = {rank: count for rank, count in ((0, first), (ranks - 1, last)) if count is not None}
    if len(given) < ranks:
        size, left = divmod(layers - sum(given.values()), ranks - len(given))
    else:
        size, left = 1, layers - sum(given.values())
    chunks = len(placement) // ranks
    counts = [divmod(given.get(rank, size), chunks) for rank in placement]
    agree = first is None or given[0] == first  # with one rank, first and last are the same
    fits = agree and not left and size > 0 and not any(rest for _, rest in counts)
    return [count for count, _ in counts] if fits else None


def parse_layout(layout: str, layers: int, heads: int = 0) -> tuple[StageLayers, ...]:
    """Parse a layout in Megatron-LM's notation.

    ``E`` is the embedding, ``t`` a layer, ``L`` the output layer and the loss, ``|`` separates stages; ``x*n`` repeats
    a letter or a parenthesised group. Commas and blanks are ignored. ``Et*3|(tt|)*29L`` is a stage with the embedding
    and 3 layers, 29 stages of 2 layers, and a stage with only the output layer. A head of multi-token prediction may
    be written as ``m`` before the output layer, whose stage has all heads.

    Raises:
        ScheduleError: if it is not a layout of ``layers`` layers and ``heads`` heads; suggests the likely correction.
    """
    try:
        return _read(layout, layers, heads)
    except ScheduleError as error:
        meant = _corrected(layout, layers, heads)
        corrected = [f"--pipeline-model-parallel-layout '{meant}'"] if meant else []
        raise ScheduleError(error.sentence, *corrected, *error.fixes) from None


def _read(layout: str, layers: int, heads: int) -> tuple[StageLayers, ...]:
    stages = expand_layout(layout).split("|")
    if any("m" in stage for stage in stages):
        stages[-1] = _without_heads(layout, stages, heads)
    for number, stage in enumerate(stages):
        if not stage:
            raise ScheduleError(f"{layout}: stage {number} is empty", AUTO)
    parts = "".join(stages)
    if not re.fullmatch("Et*L", parts):
        if parts[0] != "E":
            problem = "does not begin with E"
        elif parts[-1] != "L":
            problem = "does not end with L"
        else:
            letter = "E" if parts.count("E") > 1 else "L"
            places = [str(place) for place, seen in enumerate(layout, start=1) if seen == letter]
            problem = f"has more than one {letter}, at character {' and '.join(places[:2])}"
        rule = "a layout is one E, any number of t, and one L, in this order"
        raise ScheduleError(f"{layout} {problem}: {rule}", AUTO)
    count = parts.count("t")
    if count != layers:
        fixes = flag_fixes("--num-layers", [count] if count else [])
        raise ScheduleError(f"{layout} has {format_layers(count)}, and the model {layers}", *fixes)
    return stages_from_counts([stage.count("t") for stage in stages])


def _without_heads(layout: str, stages: Sequence[str], heads: int) -> str:
    """Return the letters of the last stage without those of the heads."""
    written = sum(stage.count("m") for stage in stages)
    given = f"--mtp-num-layers {written}"
    if not heads:
        raise ScheduleError(f"{layout}: 'm' is multi-token prediction, which needs {given}", given)
    if written != heads:
        raise ScheduleError(f"{layout} has {written} x m, and the model --mtp-num-layers {heads}", given)
    if not stages[-1].endswith("m" * heads + "L"):
        raise ScheduleError(f"{layout}: every m is in the last stage, directly before L", AUTO)
    return stages[-1].replace("m", "")


def _corrected(layout: str, layers: int, heads: int) -> str | None:
    """Return the layout with case, E, L or a parenthesis corrected; None unless exactly one such layout exists."""
    text = layout.replace("e", "E").replace("l", "L").replace("T", "t")
    text = ("" if text.lstrip().startswith("E") else "E") + text + ("" if text.rstrip().endswith("L") else "L")
    open_at = _unmatched(text)
    spellings = [text]
    if open_at is not None and text[open_at] == "(":
        ends = [found.start() for found in re.finditer(r"\*|L$", text) if found.start() > open_at]
        spellings = [text[:end] + ")" + text[end:] for end in ends]
    meanings: dict[tuple[StageLayers, ...], str] = {}
    for spelling in spellings if len(layout) <= MAX_CORRECTED_LAYOUT else ():
        with suppress(ScheduleError):
            meanings.setdefault(_read(spelling, layers, heads), spelling)
    return next(iter(meanings.values())) if len(meanings) == 1 else None


def _unmatched(text: str) -> int | None:
    """Return the index of an unmatched parenthesis; None if there is none."""
    opened: list[int] = []
    for at, letter in enumerate(text):
        if letter == "(":
            opened.append(at)
        elif letter == ")":
            if not opened:
                return at
            opened.pop()
    return opened[-1] if opened else None


LAYOUT_ERRORS = (
    (r"\[", "is not part of a layout: lists of names are not supported, only letters such as 'Et*3|t*4L'"),
    (r"[^EtmL|()*0-9]", "is not part of a layout, which consists of E, t, m, L, |, *n and ()"),
    (r"(?<=[0-9])\*", "follows another *n, but must follow a letter or a parenthesis"),
    (r"\*(?![0-9])", "has no number after it"),
    (r"(?<![EtmL)0-9])\*", "has no letter or parenthesis before it to repeat"),
    (r"(?<![*0-9])[0-9]", "has no * before it"),
)
"""Contents that a layout without blanks and commas cannot have, and the reason."""


def expand_layout(layout: str) -> str:
    """Expand repetitions and parentheses, and drop commas and blanks: ``Et*2|L`` -> ``Ett|L``.

    Raises:
        ScheduleError: if it is not a valid layout; names the character and its position from 1.
    """
    places = [place for place, letter in enumerate(layout, start=1) if not re.match(r"[,\s]", letter)]
    text = "".join(layout[place - 1] for place in places)
    size = len(text)
    if size > MAX_LAYOUT_LETTERS:
        raise ScheduleError(f"a layout of {size:,} letters is longer than that of any model", AUTO)
    for fault, why in LAYOUT_ERRORS:
        found = re.search(fault, text)
        if found:
            raise ScheduleError(f"{layout}: '{found[0]}' at character {places[found.start()]} {why}", AUTO)
    lone = _unmatched(text)
    if lone is not None:
        why = "is never closed" if text[lone] == "(" else "has no opening parenthesis"
        raise ScheduleError(f"{layout}: '{text[lone]}' at character {places[lone]} {why}", AUTO)

    opened: list[list[str]] = [[]]  # the parts within each open parenthesis
    for part in re.findall(r"[EtmL|()]|[0-9]+", text):
        if part == "(":
            opened.append([])
        elif part == ")":
            inner = "".join(opened.pop())
            opened[-1].append(inner)
        elif part.isdecimal():
            times = int(part) if len(part) <= MAX_REPEAT_DIGITS else MAX_LAYOUT_LETTERS
            repeated = opened[-1].pop()
            size += len(repeated) * times
            if size > MAX_LAYOUT_LETTERS:
                raise ScheduleError(f"*{part:.20} repeats more than any model has layers", AUTO)
            opened[-1].append(repeated * times)
        else:
            opened[-1].append(part)
    return "".join(opened[0])


def format_layout(stages: Sequence[StageLayers], heads: int = 0) -> str:
    """Return the layout that :func:`parse_layout` parses to these stages, with heads of multi-token prediction."""
    counts, end = [stage.count for stage in stages], f"{'m' * heads}L"
    if len(counts) == 1:
        return f"E{_layers(counts[0])}{end}"
    middle = ""
    for count, same in groupby(counts[1:-1]):
        times = len(list(same))
        middle += f"({_layers(count)}|)*{times}" if times > 1 else f"{_layers(count)}|"
    return f"E{_layers(counts[0])}|{middle}{_layers(counts[-1])}{end}"


def _layers(count: int) -> str:
    return "t" * count if count < 3 else f"t*{count}"
