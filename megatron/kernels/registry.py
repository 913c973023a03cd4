"""Selection of the implementation of each operation, checked once at the start of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.compute import BATCH_INVARIANT, KERNEL_CANDIDATES, KernelChoice, kernel_choices
from megatron.config.errors import Problem, UserError
from megatron.config.plugins import registered
from megatron.kernels import batch_invariant
from megatron.kernels.activation import ACTIVATION, ActivationKernel, activation
from megatron.kernels.adam import ADAM, AdamKernel, adam
from megatron.kernels.attention import ATTENTION, sdpa
from megatron.kernels.attention_mask import AttentionKernel
from megatron.kernels.causal_conv import CAUSAL_CONV, CausalConvKernel, causal_conv
from megatron.kernels.cross_entropy import CROSS_ENTROPY, EAGER_CROSS_ENTROPY, CrossEntropyKernel
from megatron.kernels.delta_rule import GATED_DELTA_RULE, GatedDeltaRuleKernel, gated_delta_rule
from megatron.kernels.dropout import DROPOUT, DropoutKernel, dropout
from megatron.kernels.fp8 import Float8Kernel, Float8Recipe, fp8_operation
from megatron.kernels.grouped_fp8 import GroupedFloat8Kernel, grouped_fp8_operation
from megatron.kernels.grouped_linear import GROUPED_LINEAR, TORCH_GROUPED_LINEAR, GroupedLinearKernel
from megatron.kernels.latent_qkv import LATENT_QKV, LatentQKVKernel, latent_qkv
from megatron.kernels.linear import LINEAR, TORCH_LINEAR, LinearKernel
from megatron.kernels.norm import ADD_NORM, NORM, AddNormKernel, NormKernel, add_norm, norm
from megatron.kernels.operation import Candidate, Covers, Operation, check_kernel, combine, error_summary
from megatron.kernels.qkv import SPLIT_QKV, SplitQKVKernel, split_qkv
from megatron.kernels.rows import ROWS, TORCH_ROWS, RowKernels
from megatron.kernels.state_space import STATE_SPACE, StateSpaceKernel, state_space


@dataclass(frozen=True)
class Kernels:
    """One implementation per operation; by default PyTorch's."""

    norm: NormKernel = norm
    add_norm: AddNormKernel = add_norm
    split_qkv: SplitQKVKernel = split_qkv
    latent_qkv: LatentQKVKernel = latent_qkv
    causal_conv: CausalConvKernel = causal_conv
    state_space: StateSpaceKernel = state_space
    gated_delta_rule: GatedDeltaRuleKernel = gated_delta_rule
    activation: ActivationKernel = activation
    dropout: DropoutKernel = dropout
    cross_entropy: CrossEntropyKernel = EAGER_CROSS_ENTROPY
    attention: AttentionKernel = sdpa
    linear: LinearKernel = TORCH_LINEAR
    grouped_linear: GroupedLinearKernel = TORCH_GROUPED_LINEAR
    rows: RowKernels = TORCH_ROWS
    adam: AdamKernel = adam
    # Of the linears in blocks; None without FP8.
    fp8: Float8Kernel | None = None
    # Of the experts in these blocks.
    grouped_fp8: GroupedFloat8Kernel | None = None


OPERATIONS: dict[str, Operation] = {
    "norm": NORM,
    "add_norm": ADD_NORM,
    "split_qkv": SPLIT_QKV,
    "latent_qkv": LATENT_QKV,
    "causal_conv": CAUSAL_CONV,
    "state_space": STATE_SPACE,
    "gated_delta_rule": GATED_DELTA_RULE,
    "activation": ACTIVATION,
    "dropout": DROPOUT,
    "cross_entropy": CROSS_ENTROPY,
    "attention": ATTENTION,
    "linear": LINEAR,
    "grouped_linear": GROUPED_LINEAR,
    "rows": ROWS,
    "adam": ADAM,
}
OPERATIONS |= {
    name: OPERATIONS[name].including(BATCH_INVARIANT, candidate)
    for name, candidate in batch_invariant.CANDIDATES.items()
}
"""Operations by the field names of :class:`Kernels`, with the candidates that ``KERNEL_CANDIDATES`` lists."""


def select_kernels(
    words: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    attention_dropout: bool = False,
    fp8: Float8Recipe | None = None,
    patterns: Collection[AttentionPattern] = (),
    softcap: bool = False,
    unused: Collection[str] = (),
) -> tuple[Kernels, list[str]]:
    """Select the implementations that ``--kernels`` requests, among those that work here.

    Args:
        words: valid values of ``--kernels``.
        device: of the run; on ``meta``, where nothing is computed, every implementation is PyTorch's.
        dtype: of parameters and activations.
        deterministic: exclude implementations that are not bitwise reproducible.
        attention_dropout: the run drops attention weights, which only PyTorch's attention does.
        fp8: the recipe of linears in FP8, if there are any.
        patterns: of the attention of whole sequences. ``auto`` takes FlexAttention, which has to be compiled, only for
            patterns that other kernels do not cover, or if scores are capped.
        softcap: scores of the attention of whole sequences are capped.
        unused: operations that the model does not call, which are left out: to compile and check them takes time.

    Returns:
        The kernels, and lines to print: what was selected, and which requested implementations are not used. Calls that
        the best implementation does not cover go to the next one: plain causal attention to cuDNN, windows elsewhere.

    Raises:
        UserError: when an implementation that was requested for one operation by name cannot be used.
    """
    selected: dict[str, Any] = {}
    names: dict[str, str] = {}
    notes: list[str] = []
    problems: list[Problem] = []
    operations = _operations(fp8, unused)
    choices = kernel_choices(words)
    needs_flex = softcap or not all(pattern.only_window for pattern in patterns)
    for operation in operations:
        choice = choices[operation]
        if operation == "attention" and attention_dropout:
            choice = KernelChoice("torch")  # other choices by name are refused with the configuration (E903)
        parts: dict[str, tuple[Any, Covers | None]] = {}
        for name in _candidates(operations[operation], operation, choice, device, needs_flex):
            found = _try(operations[operation], operation, name, device, dtype, deterministic)
            if not isinstance(found, _Refusal):
                parts[name] = found
                if found[1] is None:
                    break
            elif choice.alone:
                problems.append(_refused(operation, name, found))
            elif choice.name == name or not found.absent:
                notes.append(f"kernels: {operation}={name} is left out: {found.reason}")
        selected[operation], names[operation] = combine(list(parts.values())), "+".join(parts)
    emulated = [o for o in ("fp8", "grouped_fp8") if names.get(o) == "torch" and choices[o].name == "auto"]
    if fp8 is not None and device.type == "cuda" and emulated:
        *_, last, _ = operations[emulated[0]].candidates.values()
        reason = last.missing(device, dtype) or notes[-1]
        fixes = ("--fp8-recipe tensorwise" if dtype == torch.bfloat16 else "--bf16", f"--kernels {emulated[0]}=torch")
        problems.append(Problem("E921", f"--fp8-recipe {fp8.name} cannot run on this GPU: {reason}", fixes))
    if problems:
        raise UserError(problems)
    return Kernels(**selected), [_summary(names), *notes]


def _operations(fp8: Float8Recipe | None, unused: Collection[str]) -> dict[str, Operation]:
    """Return the operations of a model."""
    in_fp8 = {} if fp8 is None else {"fp8": fp8_operation(fp8), "grouped_fp8": grouped_fp8_operation(fp8)}
    return {name: operation for name, operation in (OPERATIONS | in_fp8).items() if name not in unused}


@dataclass(frozen=True)
class _Refusal:
    """Why an implementation is not used."""

    reason: str
    # It is not available on this machine, which is normal and not reported unless it was requested.
    absent: bool = False
    code: str = "E903"


def _candidates(
    operation: Operation, of: str, choice: KernelChoice, device: torch.device, needs_flex: bool
) -> Sequence[str]:
    """Return the candidates to try, best first and torch last."""
    if device.type == "meta":
        return ("torch",)
    if choice.name == "auto":
        names, idle = KERNEL_CANDIDATES[of][:-1], set() if needs_flex else {"flex"}
        fast = [name for name in names if name not in idle and operation.candidates[name].fast(device)]
        return (*fast, "torch")
    return ("torch",) if choice.name == "torch" else (choice.name, "torch")


def _try(
    operation: Operation, of: str, name: str, device: torch.device, dtype: torch.dtype, deterministic: bool
) -> tuple[Any, Covers | None] | _Refusal:
    """Return an implementation and the calls that it covers, or why it is not used."""
    candidates = operation.candidates
    candidate: Candidate = candidates[name] if name in candidates else registered("kernel")[f"{of}={name}"]
    if name == "torch":
        return candidate.make(), None
    if deterministic and not candidate.deterministic:
        return _Refusal("its results are not bitwise reproducible", absent=True, code="E902")
    missing = candidate.missing(device, dtype)
    if missing is not None:
        return _Refusal(missing, absent=True)
    try:
        implementation = candidate.make()
    except Exception as error:  # an installed package may still fail to load, in any way
        return _Refusal(f"it cannot be loaded ({error_summary(error)})")
    wrong = check_kernel(operation, implementation, device, dtype, candidate.covers)
    return (implementation, candidate.covers) if wrong is None else _Refusal(f"it {wrong}")


def _refused(operation: str, name: str, refusal: _Refusal) -> Problem:
    if name == BATCH_INVARIANT:
        sentence = f"--batch-invariant cannot be used ({operation}): {refusal.reason}"
        return Problem("E926", sentence, ("--device cpu", "drop --batch-invariant"))
    fixes = (f"--kernels {operation}=auto", f"--kernels {operation}=torch")
    if refusal.code == "E902":
        sentence = f"--deterministic does not go with --kernels {operation}={name}: {refusal.reason}"
        return Problem("E902", sentence, fixes)
    return Problem("E903", f"--kernels {operation}={name} cannot be used: {refusal.reason}", fixes)


def _summary(names: dict[str, str]) -> str:
    """Return one line with the operations of each implementation."""
    by_name: dict[str, list[str]] = {}
    for operation, name in names.items():
        by_name.setdefault(name, []).append(operation)
    if list(by_name) == ["torch"]:
        return "kernels: torch"
    parts = [f"{name} ({', '.join(operations)})" for name, operations in by_name.items()]
    return f"kernels: {'; '.join(parts)}"
