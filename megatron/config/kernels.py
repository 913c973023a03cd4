"""The words of ``--kernels``: which operations have which implementations, and what a person asks for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config.problems import Problem, did_you_mean

CANDIDATES: dict[str, tuple[str, ...]] = {
    "norm": ("apex", "compiled", "torch"),
    "add_norm": ("compiled", "torch"),
    "rotary": ("compiled", "torch"),
    "activation": ("compiled", "torch"),
    "dropout": ("compiled", "torch"),
    "cross_entropy": ("compiled", "torch"),
    "attention": ("flash_attn", "cudnn", "torch"),
    "weight_gradient": ("apex", "addmm", "torch"),
    "adam": ("apex", "torch"),
}
"""Implementations of every operation, in the order in which ``auto`` takes them on a GPU; ``torch`` is everywhere."""

ALL = ("auto", "torch", "compiled")
"""Words that speak of every operation."""


@dataclass(frozen=True)
class Wish:
    """What is asked for an operation.

    Attributes:
        name: of an implementation, or ``auto``.
        alone: it was asked for by the operation's name: the run is refused where it cannot be had.
    """

    name: str = "auto"
    alone: bool = False


def wishes(words: Sequence[str]) -> Mapping[str, Wish]:
    """What valid words ask for, by operation; later words win."""
    asked = dict.fromkeys(CANDIDATES, Wish())
    for word in words:
        operation, equals, name = word.partition("=")
        if equals:
            asked[operation] = Wish(name, alone=name != "auto")
        else:
            asked = {known: Wish(word if word in (*names, "auto") else "torch") for known, names in CANDIDATES.items()}
    return asked


def word_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Words that name no operation, or an implementation that it does not have."""
    if not words:
        yield Problem("E901", "--kernels names nothing", ("--kernels auto",))
    for word in words:
        operation, equals, name = word.partition("=")
        names = (*CANDIDATES.get(operation, ()), "auto")
        if equals and operation in CANDIDATES and name not in names:
            sentence = f"--kernels {word}: {operation} has {', '.join(names)}"
            yield Problem("E901", sentence, (f"--kernels {operation}={did_you_mean(name, names) or 'auto'}",))
        elif equals and operation not in CANDIDATES:
            guess = did_you_mean(operation, CANDIDATES)
            sentence = f"--kernels {word}: there is no operation {operation}, only {', '.join(CANDIDATES)}"
            yield Problem("E901", sentence, (f"--kernels {guess}={name}" if guess else "--kernels auto",))
        elif not equals and word not in ALL:
            sentence = f"--kernels {word}: neither one of {', '.join(ALL)} nor OPERATION=NAME"
            named = f"{word}=torch" if word in CANDIDATES else did_you_mean(word, ALL) or "auto"
            yield Problem("E901", sentence, (f"--kernels {named}",))
