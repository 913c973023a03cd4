"""Activation functions of the MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import GATED_ACTIVATIONS
from megatron.kernels.compile import compiled, compiler_missing, triton_missing, triton_region
from megatron.kernels.linear import with_bias_gradient
from megatron.kernels.operation import Candidate, KernelCheck, Operation

ActivationKernel = Callable[..., Tensor]
"""``activation(x, bias, name, limit=None, offset=0.0, rows=None) -> y``, ``name`` one of :data:`ACTIVATIONS`; on
``bias`` see ``kernels/linear.py``."""

_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": _gelu_tanh,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}
"""Functions by the choices of ``--activation``, of gated ones that of the gate."""

TRITON_ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu", "relu2")
"""Those that the Triton kernel computes."""


class WeightedRows(NamedTuple):
    """Factors of the rows of a result ``[R, ffn]``."""

    # In at least fp32 [R].
    weights: Tensor
    # Number of rows, int [1]: kernels may leave out those after it, whose results are undefined. None for all.
    end: Tensor | None = None


def activation(
    x: Tensor,
    bias: Tensor | None,
    name: str,
    limit: float | None = None,
    offset: float = 0.0,
    rows: WeightedRows | None = None,
) -> Tensor:
    """Apply an activation by name to ``x``, which contains ``bias``.

    Args:
        x: inputs; of gated activations ``[..., 2 * ffn/tp]``, gate first.
        bias: that ``x`` contains.
        name: of the activation.
        limit: that of ``--activation-func-clamp-value``.
        offset: ``--glu-linear-offset``.
        rows: factors of the results; not together with ``bias``.
    """
    function, x = ACTIVATIONS[name], with_bias_gradient(x, bias)
    if name in GATED_ACTIVATIONS:
        gate, up = x.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y = function(gate) * (up + offset if offset else up)
    else:
        y = function(x)
    return y if rows is None else (y * rows.weights.unsqueeze(-1)).to(y.dtype)


def _triton_covers(
    x: Tensor, bias: Tensor | None, name: str, limit: float | None = None, offset: float = 0.0, *_: WeightedRows | None
) -> bool:
    return name in TRITON_ACTIVATIONS and limit is None and offset == 0.0


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x = 2.0 * torch.randn(300, 2, 32, generator=generator, dtype=torch.float64)
    weights, end = torch.rand(300, generator=generator, dtype=torch.float64), torch.tensor([300], dtype=torch.int32)

    def weighted(f: ActivationKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        x, weights = (torch.cat([each, torch.full_like(each[:5], torch.nan)]) for each in t[:2])
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return (f(x, None, "swiglu", None, 0.0, WeightedRows(weights, t[2]))[:300],)

    # One of each kind, because each takes time to compile.
    return [
        KernelCheck(lambda f, t: (f(t[0], t[1], "gelu_tanh"),), (x, x[0, 0])),
        KernelCheck(lambda f, t: (f(t[0], None, "swiglu", None, 0.0),), (x,)),
        KernelCheck(lambda f, t: (f(t[0], None, "quick_geglu", 1.5, 1.0),), (x,)),
        KernelCheck(weighted, (x[:, 0], weights, end)),
    ]


def _compiled() -> ActivationKernel:
    """Return the compiled function; of weighted rows there may be any number."""
    plain, weighted = compiled(activation)(), compiled(activation, any_rows=True)()

    def run(*inputs: Any) -> Tensor:
        y: Tensor = (weighted if isinstance(inputs[-1], WeightedRows) else plain)(*inputs)
        return y

    return run


ACTIVATION = Operation(
    {
        "triton": Candidate(triton_region("activation"), triton_missing, covers=_triton_covers),
        "compiled": Candidate(_compiled, compiler_missing),
        "torch": Candidate(lambda: activation),
    },
    _checks,
)
