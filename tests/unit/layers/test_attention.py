"""Attention, its mask, rotary positions, the cache of keys and values, and its largest logit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels.attention_mask import AttentionMask, AttentionScores
from megatron.kernels.qkv import RotaryEmbedding, rotate
from megatron.layers import attention as attention_module
from megatron.layers.attention import SelfAttention, largest_logit
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.kv_cache import KVCache
from megatron.layers.mixers.registry import MIXERS, rotary_tables
from megatron.layers.norm import Residual
from megatron.layers.recompute_plan import RecomputePlan
from tests.kit.solo import Allocations, Solo, one_rank_mesh, random_batch, tiny

LENGTH = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 2 + [4] * 9 + [5]])


PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "global": lambda q, k: k <= q,
    "local:1": lambda q, k: k == q,
    "local:4": lambda q, k: q - 3 <= k <= q,
    "local:100": lambda q, k: k <= q,
    "chunked:5": lambda q, k: k <= q < k - k % 5 + 5,
    "dilated:3:2": lambda q, k: k in (q - 4, q - 2, q),
    "prefix:4": lambda q, k: k <= q or k < 4,
    "local:2+first:3": lambda q, k: k <= q and (k < 3 or k > q - 2),
}
"""Masks of the tests: functions that return True if a query sees a key of its document."""


def visible(q: int, k: int, sample: int, pattern: str, documents: Tensor | None) -> bool:
    return PATTERNS[pattern](q, k) and (documents is None or bool(documents[sample, q] == documents[sample, k]))


def mask_of(pattern: str, length: int, documents: Tensor | None) -> AttentionMask:
    return AttentionMask.of_sequence(length, torch.device("cpu"), AttentionPattern.parse(pattern), documents)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one-document", "documents"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_mask(pattern: str, documents: Tensor | None) -> None:
    found = mask_of(pattern, LENGTH, documents)
    assert found.is_causal is (pattern == "global" and documents is None)
    mask = found.dense().expand(2, 1, LENGTH, LENGTH)
    for sample in range(2):
        for q in range(LENGTH):
            seen = [bool(x) for x in mask[sample, 0, q]]
            assert seen == [visible(q, k, sample, pattern, documents) for k in range(LENGTH)]


def attention(config: ModelConfig) -> SelfAttention:
    context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
    context = context.declare(MIXERS["attention"].parameters(config, context.sharding))
    layer = MIXERS["attention"].build(config, context, 0, RecomputePlan())
    assert isinstance(layer, SelfAttention)
    return layer


def scene_of(config: ModelConfig, documents: Tensor | None) -> ForwardContext:
    batch = random_batch(config, length=LENGTH, documents=documents)
    masks = {config.pattern(0): mask_of(config.attention_pattern or "global", LENGTH, documents)}
    angles = {table: rotary(config)(LENGTH, None) for table in rotary_tables(config, [0])}
    return ForwardContext(batch, masks, angles, training=True)


def by_loops(
    layer: SelfAttention, c: ModelConfig, x_SBH: Tensor, scene: ForwardContext, documents: Tensor | None
) -> Tensor:
    """One head, one query at a time, from the weights' stored rows."""
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
            (_, q), (_, k) = layer.q_layernorm(Residual(q)), layer.k_layernorm(Residual(k))
        for found in scene.rotary.values():
            q, k = (rotate(t.unsqueeze(2), found.cos, found.sin, found.interleaved).squeeze(2) for t in (q, k))
        for b in range(2):
            for s in range(LENGTH):
                keys = [j for j in range(LENGTH) if visible(s, j, b, c.attention_pattern or "global", documents)]
                scores = k[keys, b] @ q[s, b] * (d**-0.5 if c.softmax_scale is None else c.softmax_scale)
                if c.attn_logit_softcapping is not None:
                    scores = c.attn_logit_softcapping * torch.tanh(scores / c.attn_logit_softcapping)
                weights = scores.exp() / (scores.exp().sum() + SINKS[c.softmax_type](layer, head))
                out[s, b, head * d : (head + 1) * d] = weights @ v[keys, b]
    y = out @ layer.linear_proj.weight.t()
    return y if layer.linear_proj.bias is None else y + layer.linear_proj.bias


def learnt(layer: SelfAttention, head: int) -> Tensor:
    assert layer.core_attention.softmax_offset is not None
    return layer.core_attention.softmax_offset[head].exp()


SINKS: dict[str, Callable[[SelfAttention, int], Tensor | float]] = {
    "vanilla": lambda layer, head: 0.0,
    "off-by-one": lambda layer, head: 1.0,
    "learnable": learnt,
}
"""Additional summand of the softmax denominator, by layer and head."""

CONFIGS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa-scaled": {"num_query_groups": 2, "softmax_scale": 0.7},
    "capped": {"softmax_scale": 0.7, "attn_logit_softcapping": 0.4, "attention_pattern": "local:4"},
    "off-by-one": {"softmax_type": "off-by-one"},
    "gqa-sinks-capped": {"num_query_groups": 2, "softmax_type": "learnable", "attn_logit_softcapping": 0.4},
    "gqa-no-bias": {"num_query_groups": 2, "add_bias_linear": False},
    "mqa-qkv-bias": {"num_query_groups": 1, "add_bias_linear": False, "add_qkv_bias": True, "kv_channels": 6},
    "gqa-rope-qk-norm-window": {
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "qk_layernorm": True,
        "attention_pattern": "local:4",
    },
    **{
        pattern: {"attention_pattern": pattern}
        for pattern in ("chunked:5", "dilated:3:2", "prefix:4", "local:2+first:3")
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
        torch.testing.assert_close(
            layer(x, scene).sum(), by_loops(layer, config, x, scene, documents), rtol=1e-11, atol=1e-12
        )


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
def test_a_token_affects_only_positions_within_reach(window: int | None, reach: int) -> None:
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


S, B, G, X, D = 11, 2, 2, 3, 4


def test_the_largest_logit_is_scaled_and_capped() -> None:
    q, k = operands(0)
    plain, mask = largest_logit(q, k, mask_of("global", S, None)), mask_of("global", S, None)
    for scale, softcap in ((0.5, None), (None, 1.5), (0.5, 1.5)):
        expected = plain * D**0.5 * (D**-0.5 if scale is None else scale)
        if softcap is not None:
            expected = softcap * (expected / softcap).tanh()
        torch.testing.assert_close(largest_logit(q, k, mask, AttentionScores(scale, softcap)), expected)


def by_loops_of_logit(q: Tensor, k: Tensor, pattern: str, documents: Tensor | None) -> float:
    return max(
        (q[i, b, n] @ k[j, b, n // X]).item() / D**0.5
        for b, i, j in product(range(B), range(S), range(S))
        if visible(i, j, b, pattern, documents)
        for n in range(G * X)
    )


def operands(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(S, B, heads, D, generator=generator, dtype=torch.float64) for heads in (G * X, G))
    return q - 1, k + 1  # most logits are negative: a mask that hides too little, or a zero, would win


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), tile=st.sampled_from([1, 4, 200, 1 << 20]))
def test_it_matches_the_visible_pairs(pattern: str, documents: bool, seed: int, tile: int) -> None:
    q, k = operands(seed)
    ids = torch.tensor([[0] * 4 + [1] * 7, [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4]]) if documents else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "LOGITS_PER_TILE", tile * B * G * X)
        got = largest_logit(q, k, mask_of(pattern, S, ids))
    assert got.item() == pytest.approx(by_loops_of_logit(q, k, pattern, ids), rel=1e-12)


def test_logits_of_one_tile_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "LOGITS_PER_TILE", 64 * 64)
    q, k = torch.randn(2, 512, 1, 1, 1, dtype=torch.float64)
    for pattern in ("global", "local:100"):
        with Allocations() as made:
            largest_logit(q, k, mask_of(pattern, 512, None))
        assert made.largest == 64 * 64 * 8


def test_half_precision_is_multiplied_in_fp32() -> None:
    q, k = (x.to(torch.bfloat16) for x in operands(0))
    largest = largest_logit(q, k, mask_of("global", S, None))
    assert largest.dtype == torch.float32
    assert largest.item() == pytest.approx(by_loops_of_logit(q.double(), k.double(), "global", None), rel=1e-6)


def test_a_nan_is_reported() -> None:
    q, k = operands(0)
    q[3, 1, 2, 0] = torch.nan
    assert largest_logit(q, k, mask_of("global", S, None)).isnan()


BATCH, HEADS, CHANNELS, CAPACITY = 3, 2, 4, 11


def keys_and_values(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, BATCH, HEADS, CHANNELS, generator=generator).double() for _ in "kv")
    return k, v


def test_gives_back_everything_in_order() -> None:
    cache, read = KVCache(CAPACITY), {"a": keys_and_values(0, 0), "b": keys_and_values(0, 0)}
    for seed, tokens in enumerate((4, 1, 5, 1)):
        for layer in read:
            new = keys_and_values(tokens, 10 * seed + ord(layer))
            k, v = read[layer]
            read[layer] = torch.cat((k, new[0])), torch.cat((v, new[1]))
            for kept, expected in zip(cache.extend(layer, *new), read[layer]):
                assert torch.equal(kept, expected)
        cache.advance(tokens)
    assert cache.length == CAPACITY
    with pytest.raises(ValueError, match="room for 11 tokens, not for 12"):
        cache.extend("a", *keys_and_values(1, 99))


@pytest.mark.parametrize("read", [0, 5])
def test_positions_and_padding(read: int) -> None:
    padding = [0, 2, 6]
    cache = KVCache(CAPACITY, torch.tensor(padding))
    cache.advance(read)
    tokens = torch.zeros(BATCH, 4, dtype=torch.long)
    documents = cache.documents(tokens)
    assert documents is not None
    for row, pad in enumerate(padding):
        assert cache.positions(tokens)[row].tolist() == [max(0, slot - pad) for slot in range(read, read + 4)]
        assert documents[row].tolist() == [int(slot >= pad) for slot in range(read + 4)]


HEAD_DIM, ROTARY_LENGTH = 16, 40
ROPE = {"position_embedding_type": "rope", "kv_channels": HEAD_DIM, "rotary_base": 100.0}


def table(config: ModelConfig, kind: str = "global") -> RotaryTable:
    return RotaryTable(kind, config.rotary_dim, config.position_embedding_type, config.rotary_interleaved)


def rotary(config: ModelConfig, dtype: torch.dtype = torch.float64) -> RotaryEmbedding:
    return RotaryEmbedding(config, table(config), dtype, torch.device("cpu"))


def as_complex(x: Tensor, interleaved: bool) -> Tensor:
    """Pairs of channels as complex numbers."""
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.complex(real, imaginary)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_is_multiplication_by_a_complex_phase(interleaved: bool, percent: float) -> None:
    config = tiny(**ROPE, rotary_interleaved=interleaved, rotary_percent=percent)
    x = torch.randn(ROTARY_LENGTH, 2, 3, HEAD_DIM, dtype=torch.float64)
    width = int(HEAD_DIM * percent)
    turn = rotary(config)(ROTARY_LENGTH, None)
    y = rotate(x, turn.cos, turn.sin, interleaved)
    theta = torch.tensor([100.0 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    phase = torch.exp(1j * torch.arange(ROTARY_LENGTH).view(-1, 1, 1, 1) * theta)
    expected = as_complex(x[..., :width], interleaved) * phase
    torch.testing.assert_close(as_complex(y[..., :width], interleaved), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(y[..., width:], x[..., width:]), "channels beyond rotary_percent must not turn"


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("3", [2, 5]),
        ("1", [0, 1, 2, 3, 4, 5]),
        ("9", []),
        ("[0, 1]", [1, 3, 5]),
        ("([0]*2+[1]*1)*2", [2, 5]),
        ("[1]+[0]*5", [0]),
        ("[0]", []),
    ],
)
def test_layers_without_rotary_embedding(text: str, without: list[int]) -> None:
    config = tiny(**ROPE, num_layers=6, no_rope_freq=text)
    assert [layer for layer in range(6) if config.rotary_kind(layer) is None] == without
    assert rotary_tables(config, range(6)) == [table(config)] * (len(without) < 6)


@pytest.mark.parametrize(
    ("text", "windowed"),
    [
        ("3", [0, 1, 3, 4]),
        ("1", []),
        ("9", [0, 1, 2, 3, 4, 5]),
        ("[0, 1]", [1, 3, 5]),
        ("([1]*2+[0]*1)*2", [0, 1, 3, 4]),
        (None, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_with_a_window(text: str | None, windowed: list[int]) -> None:
    """Megatron-LM: ``layer_number % N != 0``, counted from 1, or entry ``layer_number - 1`` of a list."""
    config = tiny(num_layers=6, window_size=4, window_attn_skip_freq=text)
    assert [layer for layer in range(6) if config.pattern(layer).window == 4] == windowed
    assert {config.pattern(layer).window for layer in set(range(6)) - set(windowed)} <= {None}


def test_layers_with_a_window_may_have_a_base_of_their_own_without_scaling() -> None:
    """The others are interpolated linearly."""
    config = tiny(
        **ROPE,
        num_layers=4,
        attention_pattern="local:4,global,chunked:4,local:4",
        rotary_base_local=30.0,
        rotary_seq_len_interpolation_factor=4.0,
    )
    assert [config.rotary_kind(layer) for layer in range(4)] == ["local", "global", "global", "local"]
    assert {replace(config, rotary_base_local=None).rotary_kind(layer) for layer in range(4)} == {"global"}
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM
    for kind, expected in (("local", 30.0**-exponents), ("global", 100.0**-exponents / 4)):
        found = RotaryEmbedding(config, table(config, kind), torch.float64, torch.device("cpu"))
        torch.testing.assert_close(found.frequencies, expected, rtol=1e-14, atol=0.0)
        assert found.scale == 1.0


def test_explicit_positions_pick_rows() -> None:
    config = tiny(**ROPE)
    every = rotary(config)(ROTARY_LENGTH, None)
    positions = torch.tensor([[5, 0, 39], [1, 1, 7]])
    some = rotary(config)(3, positions)
    assert some.cos.shape == (3, 2, 1, HEAD_DIM)
    for sample in range(2):
        assert torch.equal(some.cos[:, sample], every.cos[positions[sample], 0])
        assert torch.equal(some.sin[:, sample], every.sin[positions[sample], 0])


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "rope_original_max_position": 256},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    ),
    "llama3-narrow": (
        {
            "use_rope_scaling": True,
            "rope_scaling_factor": 32.0,
            "rope_low_freq_factor": 2.0,
            "rope_high_freq_factor": 3.0,
            "rope_original_max_position": 64,
        },
        {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 64},
    ),
    "yarn": (
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 256},
        {"factor": 4.0, "original_max_position_embeddings": 256},
    ),
    "yarn-betas": (
        {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": 16.0,
            "yarn_original_max_position_embeddings": 512,
            "yarn_beta_fast": 8.0,
            "yarn_beta_slow": 2.0,
        },
        {"factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_match_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = SCALINGS[name]
    kind = name.split("-")[0]
    parameters = theirs | {"rope_type": kind, "rope_theta": 100.0}
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    plain = 100.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert not torch.allclose(frequencies, plain), "this scaling changes nothing: the case tests nothing"
    turn = rotary(tiny(**(ROPE | ours)))(ROTARY_LENGTH, None)
    angles = (torch.arange(ROTARY_LENGTH).view(-1, 1) * frequencies.double()).repeat(1, 2)
    torch.testing.assert_close(turn.cos[:, 0, 0], angles.cos() * magnitude, rtol=0, atol=1e-5)
    torch.testing.assert_close(turn.sin[:, 0, 0], angles.sin() * magnitude, rtol=0, atol=1e-5)


def test_angles_are_not_computed_in_bf16() -> None:
    """At position 4000 a bf16 angle would be off by whole turns."""
    config = tiny(**ROPE)
    positions = torch.tensor([[4000, 4001]])
    exact, rounded = (rotary(config, dtype)(2, positions).cos for dtype in (torch.float64, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert (exact - rounded.double()).abs().max() < 2**-8 + 1e-3


def test_yarn_needs_the_original_length() -> None:
    config = tiny(**(ROPE | {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}))
    with pytest.raises(ValueError, match="yarn_original_max_position_embeddings"):
        rotary(config)


def test_without_padding_prompts_begin_at_0() -> None:
    cache = KVCache(CAPACITY)
    cache.advance(3)
    tokens = torch.zeros(BATCH, 2, dtype=torch.long)
    assert cache.positions(tokens).tolist() == [[3, 4]] * BATCH
    assert cache.documents(tokens) is None
