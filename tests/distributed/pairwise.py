"""A small set of cases in which every valid pair of two factors' values occurs together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def shortened(cases: Sequence[Choice], times: int = 2) -> list[Choice]:
    """Return cases, chosen greedily, in which each value of a factor occurs so often, if it does in all of them."""
    found = Counter(value for choice in cases for value in choice.items())
    left, rest, chosen = Counter({value: min(times, n) for value, n in found.items()}), [*cases], list[Choice]()
    while +left:
        chosen.append(max(rest, key=lambda choice: sum(left[value] > 0 for value in choice.items())))
        rest.remove(chosen[-1])
        left.subtract(chosen[-1].items())
    return chosen


Change = tuple[Choice, str, Any]


class Lightening:
    """Gives cases cheaper values, as long as they cover the same pairs.

    Args:
        cases: complete choices, which change.
        costs: values of factors by what they cost, the cheap ones first.
        valid: see :func:`covering`.

    """

    def __init__(
        self, cases: Sequence[Choice], costs: Mapping[str, Sequence[Any]], valid: Callable[[Choice], bool]
    ) -> None:
        self.cases, self.costs, self.valid = cases, costs, valid
        self.times = Counter(pair for choice in cases for pair in pairs_of(choice))

    def run(self) -> None:
        """Give each case the first valid value of each factor, if others have all pairs of the one it had."""
        for choice in self.cases:
            for name, values in self.costs.items():
                taken = [change for pair in self._alone(choice, name) for change in self._take_over(pair, name, choice)]
                if not self._alone(choice, name):
                    self._change(choice, name, next(v for v in values if self.valid(choice | {name: v})))
                else:
                    for change in reversed(taken):
                        self._change(*change)

    def _take_over(self, pair: Pair, name: str, choice: Choice) -> Iterator[Change]:
        """Let another case with the value of ``name`` have the pair, if it is alone with none that it gives up."""
        ((other, value),) = (item for item in pair if item[0] != name)
        for case in () if other in self.costs else self.cases:
            fits = case is not choice and case[name] == choice[name] and self.valid(case | {other: value})
            if fits and not self._alone(case, other):
                yield case, other, case[other]
                self._change(case, other, value)
                return

    def _alone(self, choice: Choice, name: str) -> list[Pair]:
        """Return the pairs of a value that no other case has."""
        return [pair for pair in self._pairs(choice, name) if self.times[pair] == 1]

    def _change(self, choice: Choice, name: str, value: Any) -> None:
        self.times.subtract(self._pairs(choice, name))
        choice[name] = value
        self.times.update(self._pairs(choice, name))

    def _pairs(self, choice: Choice, name: str) -> list[Pair]:
        return [frozenset((item, (name, choice[name]))) for item in choice.items() if item[0] != name]
