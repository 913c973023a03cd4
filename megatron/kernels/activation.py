"""Activation functions of the MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.bias import with_bias_gradient
from megatron.kernels.compile import compiled, compiler_missing, triton_missing, triton_region
from megatron.kernels.operation import Candidate, KernelCheck, Operation

ActivationKernel = Callable[[Tensor, Tensor | None, str], Tensor]
"""``activation(x, bias, name) -> y``, ``name`` one of :data:`ACTIVATIONS`; on ``bias`` see ``kernels/bias.py``."""


def _gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate) * up


_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "swiglu": partial(_gated, F.silu),
    "geglu": partial(_gated, F.gelu),
    "geglu_tanh": partial(_gated, _gelu_tanh),
    "relu2": lambda x: F.relu(x).square(),
}
"""Functions by the choices of ``--activation``; gated ones take ``[..., 2 * ffn/tp]``, gate first."""

TRITON_ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu", "relu2")
"""Those that the Triton kernel computes."""


def activation(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """Apply an activation by name to ``x``, which contains ``bias``."""
    return ACTIVATIONS[name](with_bias_gradient(x, bias))


def _checks() -> Sequence[KernelCheck]:
    x = 2.0 * torch.randn(300, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    # One of each kind, because each takes time to compile.
    return [
        KernelCheck(lambda f, t: (f(t[0], t[1], "gelu_tanh"),), (x, x[0, 0])),
        KernelCheck(lambda f, t: (f(t[0], None, "swiglu"),), (x,)),
    ]


ACTIVATION = Operation(
    {
        "triton": Candidate(
            triton_region("activation"), triton_missing, covers=lambda x, bias, name: name in TRITON_ACTIVATIONS
        ),
        "compiled": Candidate(compiled(activation), compiler_missing),
        "torch": Candidate(lambda: activation),
    },
    _checks,
)
