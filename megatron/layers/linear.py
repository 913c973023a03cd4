"""Column- and row-parallel linear layers.

Shapes: S sequence, B batch, I in, O out; a suffix ``/tp`` means sharded over the tensor-parallel ranks.

===========  ==========================  =======================  =========================
layer        weight                      sequence parallel off    sequence parallel on
===========  ==========================  =======================  =========================
column       ``[O/tp, I]``               copy, matmul             gather rows, matmul
row          ``[O, I/tp]``               matmul, reduce           matmul, scatter rows
===========  ==========================  =======================  =========================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.parallel import comm
from megatron.parallel.build import BuildContext
from megatron.parallel.comm import Group
from megatron.parallel.grads import GradSink, Rows
from megatron.parallel.shard import Init, ShardSpec


@dataclass(frozen=True)
class _Wiring:
    """What the autograd function must know of its layer."""

    sink: GradSink
    weight: str
    bias: str
    tp: Group
    sequence_parallel: bool

    @property
    def rows_over(self) -> Group | None:
        """The group that shards the sequence outside the TP region, if any does."""
        return self.tp if self.sequence_parallel else None


class _Column(torch.autograd.Function):
    """``y = X W^T + b`` with ``X = gather(x)`` (or the copy ``x``).

    Backward: ``dx = scatter(sum_i dy_i W_i)`` (or all-reduce) runs while ``dW = dy^T X`` is computed; X is
    gathered anew rather than kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, wiring: _Wiring) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wiring, ctx.has_bias = wiring, bias is not None
        return F.linear(comm.all_gather(x, wiring.tp) if wiring.sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wiring: _Wiring = ctx.wiring
        rows = wiring.sink.recall(x, wiring.rows_over)
        dx = dy.matmul(weight)
        if wiring.sequence_parallel:
            pending = comm.start_reduce_scatter(dx, wiring.tp)
        else:
            pending = comm.start_all_reduce(dx, wiring.tp)
        dw = wiring.sink.add(wiring.weight, rows, Rows(dy))
        db = wiring.sink.accumulate(wiring.bias, _sum_rows(dy)) if ctx.has_bias else None
        return pending.wait(), dw, db, None


class _Row(torch.autograd.Function):
    """``y = scatter(sum_i x_i W_i^T) + b`` (or all-reduce).

    Backward: ``dY = gather(dy)`` (or the copy ``dy``), ``dx_i = dY W_i``, ``dW_i = dY^T x_i``.

    The bias is added once, to the sum; with sequence parallelism each rank sees its rows of ``db`` only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, wiring: _Wiring) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wiring, ctx.has_bias = wiring, bias is not None
        y = F.linear(x, weight)
        if wiring.sequence_parallel:
            y = comm.reduce_scatter(y, wiring.tp)
        else:
            y = comm.all_reduce(y, wiring.tp)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wiring: _Wiring = ctx.wiring
        rows = Rows(dy, wiring.rows_over).start()
        db = wiring.sink.accumulate(wiring.bias, _sum_rows(dy)) if ctx.has_bias else None
        dw = wiring.sink.add(wiring.weight, wiring.sink.recall(x, None), rows)
        return rows.wait().matmul(weight), dw, db, None


class ColumnLinear(nn.Module):
    """``[S(/tp), B, I] -> [S, B, O/tp]``: each rank computes some of the outputs."""

    def __init__(self, context: BuildContext, weight: ShardSpec, bias: ShardSpec | None) -> None:
        super().__init__()
        self.weight = context.parameter("weight", weight)
        self.bias = None if bias is None else context.parameter("bias", bias)
        self._wiring = _wire(context)

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor = _Column.apply(x_SBI, self.weight, self.bias, self._wiring)
        return y


class RowLinear(nn.Module):
    """``[S, B, I/tp] -> [S(/tp), B, O]``: each rank has some of the inputs; the sum is what leaves."""

    def __init__(self, context: BuildContext, inputs: int, outputs: int, std: float, bias: bool) -> None:
        super().__init__()
        shard = context.shard
        self.weight = context.parameter("weight", shard.split((outputs, inputs), 1, Init(std)))
        bias_spec = shard.replicate((outputs,), Init(), partial=context.sequence_parallel)
        self.bias = context.parameter("bias", bias_spec) if bias else None
        self._wiring = _wire(context)

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor = _Row.apply(x_SBI, self.weight, self.bias, self._wiring)
        return y


def _wire(context: BuildContext) -> _Wiring:
    return _Wiring(context.sink, context.name("weight"), context.name("bias"), context.tp, context.sequence_parallel)


def _sum_rows(dy: Tensor) -> Tensor:
    """Bias gradient ``[O]`` of ``dy`` ``[..., O]``, summed in at least fp32."""
    return dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
