"""An operation that has several implementations, and the proof that one of them computes what torch's own does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def runs_anywhere(device: torch.device, dtype: torch.dtype) -> str | None:
    """Nothing is missing."""
    return None


def half_on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether numbers of 16 bits lie on a GPU: all that most fused kernels take."""
    return device.type == "cuda" and dtype in HALF


def not_installed(*modules: str) -> str | None:
    """Which of the modules are not installed; None when all are. Imports none of them."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} cannot be imported" if absent else None


@dataclass(frozen=True)
class Candidate:
    """An implementation of an operation.

    Attributes:
        make: imports what it needs and returns it.
        missing: why it cannot run on a device with a number format; None when it can. Cheap.
        deterministic: equal calls give equal bits, backward too, at least while
            ``torch.use_deterministic_algorithms`` is on.
    """

    make: Callable[[], Any]
    missing: Callable[[torch.device, torch.dtype], str | None] = runs_anywhere
    deterministic: bool = True


@dataclass(frozen=True)
class Trial:
    """A small call.

    Attributes:
        run: calls an implementation on tensors like the inputs; returns the outputs. It may change them in place
            where it is not differentiated.
        inputs: fp64 and integers, on the CPU; the implementation gets them in its own format and place.
        differentiated: gradients of all floating inputs are compared too.
    """

    run: Callable[[Any, Sequence[Tensor]], Sequence[Tensor]]
    inputs: tuple[Tensor, ...]
    differentiated: bool = True

    def outcome(
        self, implementation: Any, device: torch.device, dtype: torch.dtype, rounded: torch.dtype
    ) -> list[Tensor]:
        """Outputs and gradients, computed in ``dtype`` from inputs that were rounded to ``rounded``."""
        inputs = [_placed(t, device, dtype, rounded) for t in self.inputs]
        if not self.differentiated:
            with torch.no_grad():
                return [out.detach() for out in self.run(implementation, inputs)]
        leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
        outputs = list(self.run(implementation, inputs))
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
        placed = [_placed(seed, device, out.dtype, rounded) for seed, out in zip(seeds, outputs)]
        grads = torch.autograd.grad(outputs, leaves, placed, allow_unused=True)
        return [*(out.detach() for out in outputs), *(torch.zeros(()) if g is None else g for g in grads)]


@dataclass(frozen=True)
class Operation:
    """Implementations by name, ``torch`` last, and the calls by which they are compared with it."""

    candidates: Mapping[str, Candidate]
    trials: Callable[[], Sequence[Trial]]


def disproof(operation: Operation, implementation: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """What speaks against an implementation; None when all trials come out right.

    Right is: values and gradients are as near to those of ``torch`` in fp64 as those of ``torch`` in ``dtype`` are,
    up to a factor of 3 for another order of rounding. Distances are those of whole tensors, relative. What is wider
    than ``dtype`` has to be as exact as its own format: a sum in fp32 that was rounded on the way is wrong.
    """
    reference = operation.candidates["torch"].make()
    for trial in operation.trials():
        exact = trial.outcome(reference, torch.device("cpu"), torch.float64, dtype)
        usual = trial.outcome(reference, device, dtype, dtype)
        try:
            found = trial.outcome(implementation, device, dtype, dtype)
        except Exception as failure:  # whatever an implementation does, the run can go on without it
            return f"failed ({first_line(failure)})"
        if [t.shape for t in found] != [t.shape for t in usual]:
            return f"gave shapes {[tuple(t.shape) for t in found]}, not {[tuple(t.shape) for t in usual]}"
        for ours, theirs, right in zip(found, usual, exact):
            rounding = min(2 * torch.finfo(dtype).eps, 64 * torch.finfo(theirs.dtype).eps)
            error, allowed = _distance(ours, right), max(3 * _distance(theirs, right), rounding)
            if not error <= allowed:
                return f"differs from torch by {error:.1e}, where rounding explains {allowed:.1e}"
    return None


def first_line(error: Exception) -> str:
    """An error in a few words; compilers write pages."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _placed(t: Tensor, device: torch.device, dtype: torch.dtype, rounded: torch.dtype) -> Tensor:
    """A copy of an input; numbers with a fraction are rounded and then held in ``dtype``."""
    return t.to(rounded).to(device, dtype, copy=True) if t.is_floating_point() else t.to(device, copy=True)


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    norm = b.norm().item()
    return (a - b).norm().item() / norm if norm else a.norm().item()
