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
        ctx: Any, weight: Tensor, ids: Tensor, first: int, grad_accumulator: GradAccumulator, name: str
    ) -> Tensor:
        local = ids - first
        held = (local >= 0) & (local < weight.shape[0])
        local = local.where(held, 0)
        ctx.save_for_backward(local, held)
        ctx.grad_accumulator, ctx.name = grad_accumulator, name
        return F.embedding(local, weight) * held.unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        local, held = ctx.saved_tensors
        rows = (dy * held.unsqueeze(-1)).flatten(0, -2)
        return ctx.grad_accumulator.accumulate_rows(ctx.name, local.flatten(), rows), None, None, None, None


class EmbeddingShard(nn.Module):
    """Rows ``first..`` of an embedding: ids of any shape -> ``[*shape, H]``, 0 where another rank holds the row."""

    def __init__(self, context: BuildContext, first: int = 0) -> None:
        super().__init__()
        self.weight = context.parameter("weight")
        self.name, self.first, self.grad_accumulator = context.name("weight"), first, context.grad_accumulator

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows that this rank holds."""
        found: Tensor = _ShardedLookup.apply(self.weight, ids, self.first, self.grad_accumulator, self.name)
        return found


class Embedding(nn.Module):
    """Tokens ``[B, S]`` -> ``[S(/tp), B, H]``: word embedding summed over TP, plus learned positions if configured."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = context.tp, context.sequence_parallel
        first = self.tp.rank * context.spec("word_embeddings.weight").local_view[0]
        self.word_embeddings = EmbeddingShard(context.submodule("word_embeddings"), first)
        self.position_embeddings: EmbeddingShard | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = EmbeddingShard(context.submodule("position_embeddings"))

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Embed tokens; positions default to 0..s-1."""
        sum_over_tp = mappings.reduce_scatter_rows if self.sequence_parallel else mappings.reduce_from_region
        x_SBH = sum_over_tp(self.word_embeddings(tokens_BS.t()), self.tp)
        if self.position_embeddings is None:
            return x_SBH
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        rows = x_SBH.shape[0]
        first = self.tp.rank * rows if self.sequence_parallel else 0
        return x_SBH + self.position_embeddings(positions_BS.t()[first : first + rows])
