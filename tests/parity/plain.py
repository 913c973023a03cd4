"""A GPT-2 in plain PyTorch, whose modules have the names of ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.pipeline.partition import StageLayers


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a residual stream."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        h, self.heads = c.hidden_size, c.num_attention_heads
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.self_attention = nn.ModuleDict({"linear_qkv": nn.Linear(h, 3 * h), "linear_proj": nn.Linear(h, h)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(h, c.ffn), "linear_fc2": nn.Linear(c.ffn, h)})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.self_attention["linear_qkv"](self.input_layernorm(x))
        q, k, v = qkv.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.self_attention["linear_proj"](seen)
        up = F.gelu(self.mlp["linear_fc1"](self.pre_mlp_layernorm(x)), approximate="tanh")
        return x + self.mlp["linear_fc2"](up)


class PlainStage(nn.Module):
    """Some layers: tokens ``[B, S]`` or a hidden state ``[B, S, H]`` to a hidden state or logits ``[B, S, rows]``.

    Ours has the sequence first; here the batch is.
    """

    def __init__(self, c: ModelConfig, stage: StageLayers, rows: int) -> None:
        super().__init__()
        self.stage = stage
        if stage.first:
            tables = {"word_embeddings": rows, "position_embeddings": c.max_position_embeddings or 0}
            self.embedding = nn.ModuleDict({name: nn.Embedding(n, c.hidden_size) for name, n in tables.items()})
        self.layers = nn.ModuleDict({str(i): Block(c) for i in stage.layers})
        if stage.last:
            self.final_layernorm = nn.LayerNorm(c.hidden_size)
            self.output_layer = nn.Linear(c.hidden_size, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.stage.first:
            positions = torch.arange(x.shape[1])
            x = self.embedding["word_embeddings"](x) + self.embedding["position_embeddings"](positions)
        for layer in self.layers.values():
            x = layer(x)
        return self.output_layer(self.final_layernorm(x)) if self.stage.last else x
