"""Parsing of ``--kernels``: the available implementations, and the choice for each operation."""

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
"""Implementations of every operation, in the order that ``auto`` tries on a GPU; ``torch`` is always available."""

ALL = ("auto", "torch", "compiled")
"""Choices that apply to every operation."""


@dataclass(frozen=True)
class Wish:
    """Implementation chosen for an operation."""

    # name of an implementation, or auto
    name: str = "auto"
    # chosen as OPERATION=NAME: the run is refused if the implementation is unavailable
    alone: bool = False


def wishes(words: Sequence[str]) -> Mapping[str, Wish]:
    """Return the choice for each operation from valid ``--kernels`` arguments. Later ones win."""
    choices = dict.fromkeys(CANDIDATES, Wish())
    for word in words:
        operation, equals, name = word.partition("=")
        if equals:
            choices[operation] = Wish(name, alone=name != "auto")
        else:
            choices = {op: Wish(word if word in (*names, "auto") else "torch") for op, names in CANDIDATES.items()}
    return choices


def word_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for every argument with an unknown operation or implementation."""
    if not words:
        yield Problem("E901", "--kernels has no value", ("--kernels auto",))
    for word in words:
        operation, equals, name = word.partition("=")
        names = (*CANDIDATES.get(operation, ()), "auto")
        if equals and operation in CANDIDATES and name not in names:
            sentence = f"--kernels {word}: implementations of {operation} are {', '.join(names)}"
            yield Problem("E901", sentence, (f"--kernels {operation}={did_you_mean(name, names) or 'auto'}",))
        elif equals and operation not in CANDIDATES:
            guess = did_you_mean(operation, CANDIDATES)
            sentence = f"--kernels {word}: no operation {operation}; operations are {', '.join(CANDIDATES)}"
            yield Problem("E901", sentence, (f"--kernels {guess}={name}" if guess else "--kernels auto",))
        elif not equals and word not in ALL:
            sentence = f"--kernels {word}: not one of {', '.join(ALL)}, nor OPERATION=NAME"
            fix = f"{word}=torch" if word in CANDIDATES else did_you_mean(word, ALL) or "auto"
            yield Problem("E901", sentence, (f"--kernels {fix}",))
