"""Operations with several implementations, and the check of an implementation against PyTorch in fp64."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

Covers = Callable[..., bool]
"""Returns True for the calls that an implementation takes, given their arguments. Cheap."""

HALF_DTYPES = (torch.bfloat16, torch.float16)


def always_available(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None: the implementation has no requirements."""
    return None


def half_on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True for bf16 and fp16 on a GPU, which most fused kernels require."""
    return device.type == "cuda" and dtype in HALF_DTYPES


def missing_modules(*modules: str) -> str | None:
    """Return which modules are not installed, or None; does not import them."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} cannot be imported" if absent else None


@dataclass(frozen=True)
class Candidate:
    """An implementation of an operation."""

    # Imports what it needs and returns the implementation.
    make: Callable[[], Any]
    # Returns why it cannot run on a device with a dtype, or None. Cheap.
    missing: Callable[[torch.device, torch.dtype], str | None] = always_available
    # Forward and backward are bitwise reproducible, at least under ``torch.use_deterministic_algorithms``.
    deterministic: bool = True
    # Whether ``auto`` uses it on a device where it works.
    fast: Callable[[torch.device], bool] = lambda device: device.type == "cuda"
    # Other calls go to the next candidate; None takes all. For operations that are one function.
    covers: Covers | None = None


@dataclass(frozen=True)
class KernelCheck:
    """A small call on which an implementation is compared with PyTorch."""

    # Calls an implementation on copies of the inputs and returns the outputs. May modify the inputs in place if not
    # differentiated.
    run: Callable[[Any, Sequence[Tensor]], Sequence[Tensor]]
    # fp64 and integer tensors on the CPU; converted to the device and dtype of the run.
    inputs: tuple[Tensor, ...]
    # Compare the gradients of all floating-point inputs too.
    differentiated: bool = True

    def outcome(
        self, implementation: Any, device: torch.device, dtype: torch.dtype, rounded: torch.dtype
    ) -> list[Tensor]:
        """Return outputs and gradients, computed in ``dtype`` from inputs rounded to ``rounded``."""
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
    """Implementations by name, ``torch`` last, and the calls on which they are compared with it."""

    candidates: Mapping[str, Candidate]
    checks: Callable[[], Sequence[KernelCheck]]

    def including(self, name: str, candidate: Candidate) -> Operation:
        """Return the operation with one more candidate before ``torch``."""
        fused = {word: other for word, other in self.candidates.items() if word != "torch"}
        return replace(self, candidates=fused | {name: candidate, "torch": self.candidates["torch"]})


def combine(parts: Sequence[tuple[Any, Covers | None]]) -> Any:
    """Return an implementation that passes each call to the first of ``parts`` that covers it; None covers all."""
    partial = list(takewhile(lambda part: part[1] is not None, parts))
    rest = parts[len(partial)][0]
    if not partial:
        return rest

    def call(*inputs: Any) -> Any:
        for implementation, covers in partial:
            if covers is not None and covers(*inputs):
                return implementation(*inputs)
        return rest(*inputs)

    return call


def check_kernel(
    operation: Operation, implementation: Any, device: torch.device, dtype: torch.dtype, covers: Covers | None = None
) -> str | None:
    """Check an implementation on the calls that it covers; return what is wrong with it, or None.

    Outputs and gradients must be as close to those of ``torch`` in fp64 as those of ``torch`` in ``dtype`` are, up to a
    factor of 3 for another order of rounding. Distances are relative, over whole tensors. Outputs wider than ``dtype``
    must be accurate to their own dtype: an fp32 sum of rounded terms fails. In fp64 there is nothing more exact to
    compare with, so the rounding of both sides is allowed for.
    """
    allowance = (64 if dtype == torch.float64 else 2) * torch.finfo(dtype).eps
    reference = operation.candidates["torch"].make()
    implementation = combine([(implementation, covers), (reference, None)])
    for check in operation.checks():
        exact = check.outcome(reference, torch.device("cpu"), torch.float64, dtype)
        try:
            usual = check.outcome(reference, device, dtype, dtype)
        except Exception as failure:  # other operations may still work
            return f"cannot be compared with torch, which failed on {device.type} ({error_summary(failure)})"
        try:
            found = check.outcome(implementation, device, dtype, dtype)
        except Exception as failure:  # of any kind: the run can use another implementation
            return f"failed ({error_summary(failure)})"
        if [t.shape for t in found] != [t.shape for t in usual]:
            return f"gave shapes {[tuple(t.shape) for t in found]}, not {[tuple(t.shape) for t in usual]}"
        for ours, theirs, right in zip(found, usual, exact):
            rounding = min(allowance, 64 * torch.finfo(theirs.dtype).eps)
            error, allowed = _distance(ours, right), max(3 * _distance(theirs, right), rounding)
            if not error <= allowed:
                return f"differs from torch by {error:.1e}, where rounding explains {allowed:.1e}"
    return None


def error_summary(error: Exception) -> str:
    """Return an error's class and first line; compilers write pages."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _placed(t: Tensor, device: torch.device, dtype: torch.dtype, rounded: torch.dtype) -> Tensor:
    """Copy an input to a device; floating-point values are rounded to ``rounded`` and stored in ``dtype``."""
    return t.to(rounded).to(device, dtype, copy=True) if t.is_floating_point() else t.to(device, copy=True)


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    norm = b.norm().item()
    return (a - b).norm().item() / norm if norm else a.norm().item()
