"""Attention against loops over heads and queries, and who can see whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.attention import AttentionMask
from megatron.kernels.rotary import RotaryEmbedding, rotate
from megatron.layers.attention import SelfAttention
from megatron.layers.context import BuildContext, ForwardContext
from tests.solo import Solo, one_rank_mesh, random_batch, tiny

LENGTH = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 2 + [4] * 9 + [5]])


def visible(q: int, k: int, sample: int, window: int | None, documents: Tensor | None) -> bool:
    """Whether query ``q`` may look at key ``k``, from the words of the definition."""
    if k > q or (window is not None and k <= q - window):
        return False
    return documents is None or bool(documents[sample, q] == documents[sample, k])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one-document", "documents"])
@pytest.mark.parametrize("window", [None, 1, 4, LENGTH, 100])
def test_mask(window: int | None, documents: Tensor | None) -> None:
    plain = window is None and documents is None
    found = AttentionMask.of_sequence(LENGTH, torch.device("cpu"), window, documents)
    assert found.is_causal is plain
    mask = found.dense.expand(2, 1, LENGTH, LENGTH)
    for sample in range(2):
        for q in range(LENGTH):
            seen = [bool(x) for x in mask[sample, 0, q]]
            assert seen == [visible(q, k, sample, window, documents) for k in range(LENGTH)]


def attention(config: ModelConfig) -> SelfAttention:
    return SelfAttention(config, BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64), 0.2, False)


def scene_of(config: ModelConfig, documents: Tensor | None) -> ForwardContext:
    batch = random_batch(config, length=LENGTH, documents=documents)
    mask = AttentionMask.of_sequence(LENGTH, torch.device("cpu"), config.window_size, documents)
    rotary = RotaryEmbedding(config, torch.float64, torch.device("cpu")) if config.rotary_dim else None
    return ForwardContext(batch, mask, rotary(LENGTH, None) if rotary else None, training=True)


def by_loops(layer: SelfAttention, x_SBH: Tensor, scene: ForwardContext, documents: Tensor | None) -> Tensor:
    """One head, one query at a time, from the weights' stored rows."""
    c = layer.config
    d, per_group = c.head_dim, c.heads_per_group
    qkv = x_SBH @ layer.linear_qkv.weight.t()
    if layer.linear_qkv.bias is not None:
        qkv = qkv + layer.linear_qkv.bias
    out = torch.zeros(LENGTH, 2, c.num_attention_heads * d, dtype=torch.float64)
    for head in range(c.num_attention_heads):
        first = (head // per_group) * (per_group + 2) * d  # rows of this head's group: queries, key, value
        rows = [first + (head % per_group) * d, first + per_group * d, first + (per_group + 1) * d]
        q, k, v = (qkv[..., r : r + d] for r in rows)
        if layer.q_layernorm is not None and layer.k_layernorm is not None:
            q, k = layer.q_layernorm(q), layer.k_layernorm(k)
        if scene.rotary is not None:
            rotary = scene.rotary
            q, k = (rotate(t.unsqueeze(2), rotary.cos, rotary.sin, rotary.interleaved).squeeze(2) for t in (q, k))
        for b in range(2):
            for s in range(LENGTH):
                keys = [j for j in range(LENGTH) if visible(s, j, b, c.window_size, documents)]
                weights = (k[keys, b] @ q[s, b] / d**0.5).softmax(0)
                out[s, b, head * d : (head + 1) * d] = weights @ v[keys, b]
    y = out @ layer.linear_proj.weight.t()
    return y if layer.linear_proj.bias is None else y + layer.linear_proj.bias


CONFIGS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa-no-bias": {"num_query_groups": 2, "add_bias_linear": False},
    "mqa-qkv-bias": {"num_query_groups": 1, "add_bias_linear": False, "add_qkv_bias": True, "kv_channels": 6},
    "gqa-rope-qk-norm-window": {
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "qk_layernorm": True,
        "window_size": 4,
    },
}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one-document", "documents"])
@pytest.mark.parametrize("unfused", [False, True], ids=["sdpa", "unfused"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_loops(name: str, unfused: bool, documents: Tensor | None) -> None:
    # A probability that no 32-bit number is below takes the path with dropout and drops nothing.
    config = tiny(**CONFIGS[name], attention_dropout=1e-300 if unfused else 0.0)
    layer, scene = attention(config).train(), scene_of(config, documents)
    for bias in (layer.linear_qkv.bias, layer.linear_proj.bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    x = torch.randn(LENGTH, 2, config.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, scene), by_loops(layer, x, scene, documents), rtol=1e-11, atol=1e-12)


def loss_at(solo: Solo, batch: MicroBatch, where: Tensor) -> Tensor:
    """Loss summed over the labels in ``where`` ``[b, s]``."""
    with torch.no_grad():
        loss, _ = solo.chunk(None, replace(batch, loss_mask=where.double()))
    return loss


def with_token_changed(batch: MicroBatch, position: int) -> MicroBatch:
    tokens = batch.tokens.clone()
    tokens[:, position] = (tokens[:, position] + 1) % 101
    return replace(batch, tokens=tokens)


@pytest.mark.parametrize("position_embedding_type", ["learned_absolute", "rope"])
def test_documents_do_not_see_each_other(position_embedding_type: str) -> None:
    solo = Solo.build(tiny(position_embedding_type=position_embedding_type))
    documents = torch.tensor([[0] * 6 + [1] * 6])
    batch = random_batch(tiny(), samples=1, length=LENGTH, documents=documents)
    second = documents == 1
    other = with_token_changed(batch, position=3)
    assert torch.equal(loss_at(solo, batch, second), loss_at(solo, other, second))
    assert not torch.equal(loss_at(solo, batch, ~second), loss_at(solo, other, ~second))
    batch, other = replace(batch, documents=None), replace(other, documents=None)
    assert not torch.equal(loss_at(solo, batch, second), loss_at(solo, other, second))


@pytest.mark.parametrize(("window", "reach"), [(None, LENGTH), (3, 5), (1, 1)])
def test_how_far_a_token_is_seen(window: int | None, reach: int) -> None:
    """Never by earlier tokens; with a window, by ``window - 1`` later ones per layer (two layers here)."""
    solo = Solo.build(tiny(window_size=window))
    batch = random_batch(tiny(), length=LENGTH)
    changed = 4
    other = with_token_changed(batch, changed)
    for position in range(LENGTH):
        where = torch.zeros(2, LENGTH)
        where[:, position] = 1
        same = torch.equal(loss_at(solo, batch, where), loss_at(solo, other, where))
        assert same is not (changed <= position < changed + reach)
