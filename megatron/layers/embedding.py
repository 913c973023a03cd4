"""Vocabulary-parallel token embedding and learned positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.distributed import mappings
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.layers.context import BuildContext


class _ShardedLookup(torch.autograd.Function):
    """``y[t] = W[ids[t]]`` where this rank holds the row, 0 elsewhere; backward adds ``dy`` to those rows."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, first: int | None, grad_accumulator: GradAccumulator, name: str
    ) -> Tensor:
        ctx.grad_accumulator, ctx.name = grad_accumulator, name
        if first is None:
            ctx.save_for_backward(ids, None)
            return F.embedding(ids, weight)
        local = ids - first
        held = ((local >= 0) & (local < weight.shape[0])).unsqueeze(-1)
        local = local.where(held.squeeze(-1), 0)
        ctx.save_for_backward(local, held)
        return F.embedding(local, weight) * held

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        local, held = ctx.saved_tensors
        rows = (dy if held is None else dy * held).flatten(0, -2)
        return ctx.grad_accumulator.accumulate_rows(ctx.name, local.flatten(), rows), None, None, None, None


class _AddPositions(torch.autograd.Function):
    """``y[s, b] = x[s, b] + W[first + s]``; backward sums ``dy`` over the samples."""

    @staticmethod
    def forward(
        ctx: Any, x_SBH: Tensor, weight: Tensor, first: int, grad_accumulator: GradAccumulator, name: str
    ) -> Tensor:
        ctx.rows, ctx.grad_accumulator, ctx.name = slice(first, first + len(x_SBH)), grad_accumulator, name
        return x_SBH + weight[ctx.rows].unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SBH: Tensor) -> tuple[Tensor | None, ...]:
        rows_SH = dy_SBH.sum(1, dtype=torch.promote_types(dy_SBH.dtype, torch.float32))
        return dy_SBH, ctx.grad_accumulator.accumulate_rows(ctx.name, ctx.rows, rows_SH), None, None, None


class EmbeddingShard(nn.Module):
    """Rows of an embedding: ids of any shape -> ``[*shape, H]``, 0 where another rank holds the row."""

    def __init__(self, context: BuildContext, first: int | None = None) -> None:
        """Build the rows that start with ``first``, or the whole embedding."""
        super().__init__()
        self.weight = context.parameter("weight")
        self.name, self.first, self.grad_accumulator = context.name("weight"), first, context.grad_accumulator

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows that this rank holds."""
        found: Tensor = _ShardedLookup.apply(self.weight, ids, self.first, self.grad_accumulator, self.name)
        return found


class Embedding(nn.Module):
    """Tokens ``[B, S]`` -> ``[S(/tp), B, H]``: word embedding summed over TP, plus learned positions if configured."""

    reads_weights_in_backward = False  # a sharded parameter store does not gather them for it

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = context.tp, context.sequence_parallel
        self.multiplier = torch.tensor(config.embedding_multiplier, dtype=context.dtype).item()
        rows = context.spec("word_embeddings.weight").local_view[0]
        first = self.tp.rank * rows if self.tp.size > 1 else None
        self.word_embeddings = EmbeddingShard(context.submodule("word_embeddings"), first)
        self.position_embeddings: EmbeddingShard | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = EmbeddingShard(context.submodule("position_embeddings"))

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Embed tokens; positions default to 0..s-1."""
        sum_over_tp = mappings.reduce_scatter_rows if self.sequence_parallel else mappings.reduce_from_region
        x_SBH = sum_over_tp(self.word_embeddings(tokens_BS.t()), self.tp)
        if self.multiplier != 1.0:
            x_SBH = x_SBH * self.multiplier
        if self.position_embeddings is None:
            return x_SBH
        rows = x_SBH.shape[0]
        first = self.tp.rank * rows if self.sequence_parallel else 0
        if positions_BS is not None:
            return x_SBH + self.position_embeddings(positions_BS.t()[first : first + rows])
        table = self.position_embeddings
        found: Tensor = _AddPositions.apply(x_SBH, table.weight, first, table.grad_accumulator, table.name)
        return found
