"""Which implementation computes each operation of a run: chosen, and proven, once at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.kernels import CANDIDATES, Wish, wishes
from megatron.config.problems import Problem, UserError
from megatron.kernels.activation import ACTIVATION, Activation, activation
from megatron.kernels.adam import ADAM, Adam, adam
from megatron.kernels.attention import ATTENTION, Attention, sdpa
from megatron.kernels.cross_entropy import CROSS_ENTROPY, IN_PLACE, CrossEntropy
from megatron.kernels.dropout import DROPOUT, Dropout, dropout
from megatron.kernels.norm import ADD_NORM, NORM, AddNorm, Norm, add_norm, norm
from megatron.kernels.operation import Candidate, Operation, disproof, first_line
from megatron.kernels.rotary import ROTARY, Rotary, rotary
from megatron.kernels.weight_gradient import WEIGHT_GRADIENT, WeightGradient, add_outer


@dataclass(frozen=True)
class Kernels:
    """One implementation per operation; stock PyTorch where nothing else is said."""

    norm: Norm = norm
    add_norm: AddNorm = add_norm
    rotary: Rotary = rotary
    activation: Activation = activation
    dropout: Dropout = dropout
    cross_entropy: CrossEntropy = IN_PLACE
    attention: Attention = sdpa
    weight_gradient: WeightGradient = add_outer
    adam: Adam = adam


OPERATIONS: dict[str, Operation] = {
    "norm": NORM,
    "add_norm": ADD_NORM,
    "rotary": ROTARY,
    "activation": ACTIVATION,
    "dropout": DROPOUT,
    "cross_entropy": CROSS_ENTROPY,
    "attention": ATTENTION,
    "weight_gradient": WEIGHT_GRADIENT,
    "adam": ADAM,
}
"""By the names of the fields of :class:`Kernels`; their candidates are those of ``config.kernels.CANDIDATES``."""


def choose(
    words: Sequence[str], device: torch.device, dtype: torch.dtype, deterministic: bool = False
) -> tuple[Kernels, list[str]]:
    """The implementations that the words ask for, out of those that work here.

    Args:
        words: of ``--kernels``, valid.
        device: of the run; on ``meta``, where nothing is computed, all is PyTorch's.
        dtype: of parameters and activations.
        deterministic: leave out what gives other bits in equal calls.

    Returns:
        The kernels, and lines to print: what was chosen, and what was asked for and left out.

    Raises:
        UserError: when an implementation that was asked for by its operation's name cannot be used.

    """
    made: dict[str, Any] = {}
    names: dict[str, str] = {}
    notes: list[str] = []
    problems: list[Problem] = []
    for operation, wish in wishes(words).items():
        for name in _order(operation, wish, device):
            implementation, refusal = _try(OPERATIONS[operation], name, device, dtype, deterministic)
            if refusal is None:
                made[operation], names[operation] = implementation, name
                break
            if wish.alone:
                problems.append(_refused(operation, name, refusal))
            elif wish.name == name or not refusal.absent:
                notes.append(f"kernels: {operation}={name} is left out: {refusal.reason}")
    if problems:
        raise UserError(problems)
    return Kernels(**made), [_summary(names), *notes]


@dataclass(frozen=True)
class _Refusal:
    """Why an implementation is not used; ``absent`` when it is simply not there, as most are on most machines."""

    reason: str
    absent: bool = False
    code: str = "E903"


def _order(operation: str, wish: Wish, device: torch.device) -> Sequence[str]:
    """What is tried, best first; on CPUs ``auto`` is torch."""
    if device.type == "meta":
        return ("torch",)
    if wish.name == "auto":
        return CANDIDATES[operation] if device.type == "cuda" else ("torch",)
    return (wish.name,) if wish.alone or wish.name == "torch" else (wish.name, "torch")


def _try(
    operation: Operation, name: str, device: torch.device, dtype: torch.dtype, deterministic: bool
) -> tuple[Any, _Refusal | None]:
    candidate: Candidate = operation.candidates[name]
    if name == "torch":
        return candidate.make(), None
    if deterministic and not candidate.deterministic:
        return None, _Refusal("equal calls of it may differ in their last bits", absent=True, code="E902")
    missing = candidate.missing(device, dtype)
    if missing is not None:
        return None, _Refusal(missing, absent=True)
    try:
        implementation = candidate.make()
    except Exception as error:  # a package that is there may still fail to load, in any way
        return None, _Refusal(f"it cannot be loaded ({first_line(error)})")
    wrong = disproof(operation, implementation, device, dtype)
    return (implementation, None) if wrong is None else (None, _Refusal(f"it {wrong}"))


def _refused(operation: str, name: str, refusal: _Refusal) -> Problem:
    fixes = (f"--kernels {operation}=auto", f"--kernels {operation}=torch")
    if refusal.code == "E902":
        sentence = f"--deterministic does not go with --kernels {operation}={name}: {refusal.reason}"
        return Problem("E902", sentence, fixes)
    return Problem("E903", f"--kernels {operation}={name} cannot be used: {refusal.reason}", fixes)


def _summary(names: dict[str, str]) -> str:
    """One line: what computes what, what is the same said once."""
    by_name: dict[str, list[str]] = {}
    for operation, name in names.items():
        by_name.setdefault(name, []).append(operation)
    if list(by_name) == ["torch"]:
        return "kernels: torch"
    parts = [f"{name} ({', '.join(operations)})" for name, operations in by_name.items()]
    return f"kernels: {'; '.join(parts)}"
