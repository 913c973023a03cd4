"""Vocabulary-parallel token embedding and learned positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.parallel import collectives
from megatron.parallel.build import BuildContext
from megatron.parallel.grads import GradSink
from megatron.parallel.shard import Init, tied

WORD_EMBEDDINGS = "word_embeddings.weight"


class _Lookup(torch.autograd.Function):
    """``y[t] = W[ids[t]]`` for the rows this rank holds, 0 elsewhere; backward adds ``dy`` to those rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, first: int, sink: GradSink, name: str) -> Tensor:
        local = ids - first
        held = (local >= 0) & (local < weight.shape[0])
        local = local.where(held, 0)
        ctx.save_for_backward(local, held)
        ctx.sink, ctx.name = sink, name
        return F.embedding(local, weight) * held.unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        local, held = ctx.saved_tensors
        rows = (dy * held.unsqueeze(-1)).flatten(0, -2)
        ctx.sink.add_rows(ctx.name, local.flatten(), rows)
        return None, None, None, None, None


class Embedding(nn.Module):
    """Tokens ``[B, S]`` -> ``[S(/tp), B, H]``: word embedding, summed over TP, plus learned positions if any."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.context = context
        spec = context.shard.vocabulary(
            config.vocab, config.hidden_size, config.make_vocab_size_divisible_by, Init(config.init_method_std)
        )
        self.name = context.name(WORD_EMBEDDINGS)
        words = spec if config.untie_embeddings_and_output_weights else tied(spec)
        self.word_embeddings = nn.Module()
        self.word_embeddings.weight = context.parameter(WORD_EMBEDDINGS, words)
        self.first = context.tp.rank * spec.local_view[0]
        self.position_embeddings: nn.Module | None = None
        if config.position_embedding_type == "learned_absolute":
            shape = (config.max_position_embeddings or 0, config.hidden_size)
            positions = context.shard.replicate(shape, Init(config.init_method_std), partial=context.sequence_parallel)
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = context.parameter("position_embeddings.weight", positions)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Look up tokens, and positions 0..s-1 unless others are given."""
        weight = self.word_embeddings.weight
        x_SBH = _Lookup.apply(weight, tokens_BS.t(), self.first, self.context.sink, self.name)
        enter = collectives.scatter_rows if self.context.sequence_parallel else collectives.reduce
        x_SBH = enter(x_SBH, self.context.tp)
        if self.position_embeddings is None:
            return x_SBH
        return x_SBH + self._look_up_positions(tokens_BS, positions_BS, x_SBH.shape[0])

    def _look_up_positions(self, tokens_BS: Tensor, positions_BS: Tensor | None, rows: int) -> Tensor:
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).unsqueeze(0)
        first = self.context.tp.rank * rows if self.context.sequence_parallel else 0
        ids = positions_BS.t()[first : first + rows].expand(-1, tokens_BS.shape[0])
        name = self.context.name("position_embeddings.weight")
        found: Tensor = _Lookup.apply(self.position_embeddings.weight, ids, 0, self.context.sink, name)
        return found
