"""A small set of cases in which every valid pair of two factors' values occurs together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Choice = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def covering(factors: Mapping[str, Sequence[Any]], valid: Callable[[Choice], bool]) -> list[Choice]:
    """Greedy and deterministic: each case takes up a pair that is left, of values of which most are, and adds what
    covers most others, the factors first of which most pairs are left.

    Among equals the value of which most pairs are left is taken, then the one named first: name the cheap ones first.

    Args:
        factors: values by name; values are hashable.
        valid: whether a choice, complete or not, breaks no rule. A partial choice that is valid must be completable.

    """
    left = valid_pairs(factors, valid)
    cases: list[Choice] = []
    while left:
        waiting, often = set(left), Counter(value for pair in left for value in pair)
        choice = dict(sorted(max(left, key=lambda pair: sum(often[value] for value in pair))))
        for name in sorted(set(factors) - set(choice), key=lambda n: (-sum(often[n, v] for v in factors[n]), n)):
            fitting = [(name, value) for value in factors[name] if valid(choice | {name: value})]
            pairs = [sum(frozenset((value, known)) in waiting for known in choice.items()) for value in fitting]
            _, (_, choice[name]) = max(zip(pairs, fitting), key=lambda found: (found[0], often[found[1]]))
        done = pairs_of(choice)
        left = [pair for pair in left if pair not in done]
        cases.append({name: choice[name] for name in factors})
    return cases


def valid_pairs(factors: Mapping[str, Sequence[Any]], valid: Callable[[Choice], bool]) -> list[Pair]:
    """All pairs of values of two factors that may occur together, in a fixed order."""
    return [
        frozenset(((a, x), (b, y)))
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
        if valid({a: x, b: y})
    ]


def pairs_of(choice: Choice) -> set[Pair]:
    """The pairs that occur in a complete choice."""
    return {frozenset(pair) for pair in combinations(choice.items(), 2)}


def lightened(cases: Sequence[Choice], costs: Mapping[str, Sequence[Any]], valid: Callable[[Choice], bool]) -> None:
    """Give cases the first valid value of each factor in ``costs``, unless only they have a pair of the one they had.

    Args:
        cases: complete choices, which change.
        costs: values of factors by what they cost, the cheap ones first.
        valid: see :func:`covering`.

    """
    times = Counter(pair for choice in cases for pair in pairs_of(choice))
    for choice in cases:
        for name, values in costs.items():
            rest = [item for item in choice.items() if item[0] != name]
            light = next(value for value in values if valid(choice | {name: value}))
            had = [frozenset((item, (name, choice[name]))) for item in rest]
            if all(times[pair] > 1 for pair in had):
                times.subtract(had)
                times.update(frozenset((item, (name, light))) for item in rest)
                choice[name] = light
