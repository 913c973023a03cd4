"""Checks of the model's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.numbers import beside, divisors, multiples_beside, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def check_head_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Without ``kv_channels``, check that the heads divide the hidden size."""
    m = config.model
    if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        heads = offers("--num-attention-heads", beside(m.num_attention_heads, divisors(m.hidden_size)))
        sizes = offers("--hidden-size", multiples_beside(m.hidden_size, m.num_attention_heads))
        width = f"--kv-channels {max(1, m.hidden_size // m.num_attention_heads)}"
        yield Problem(
            "E101",
            f"hidden size {m.hidden_size} does not divide into {m.num_attention_heads} heads",
            (*heads, *sizes, width),
        )


def check_query_groups(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every key/value head serves the same number of query heads."""
    m = config.model
    if m.num_attention_heads % m.kv_groups:
        yield Problem(
            "E102",
            f"{m.num_attention_heads} query heads cannot share {m.kv_groups} key/value heads evenly",
            offers("--num-query-groups", beside(m.kv_groups, divisors(m.num_attention_heads))),
        )


def check_mlp_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the MLP has a width: the default of a gated MLP is rounded down to a multiple of 64."""
    m = config.model
    if m.ffn < 1:
        sentence = f"hidden size {m.hidden_size} with swiglu: the MLP's width, 8/3 of it rounded down to 64s, is 0"
        yield Problem("E103", sentence, (f"--ffn-hidden-size {4 * m.hidden_size}", "--hidden-size 24"))


def check_vocab_size(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the size of the vocabulary is given or known from a tokenizer."""
    m, data = config.model, config.data
    if m.vocab_size is not None:
        return
    if data.tokenizer_type == "NullTokenizer":
        yield Problem("E104", "NullTokenizer does not know the size of the vocabulary", ("--vocab-size 50257",))
    elif data.mock_data and data.tokenizer_type is None:
        fixes = ("--vocab-size 50257", "--tokenizer-type ByteTokenizer")
        yield Problem("E104", "the size of the vocabulary is unknown: generated tokens have no tokenizer", fixes)


def check_positions(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the sequence length is at most the number of positions."""
    limit, length = config.model.max_position_embeddings, config.training.seq_length
    if limit is not None and length > limit:
        fixes = (f"--seq-length {limit}", f"--max-position-embeddings {length}")
        yield Problem("E105", f"samples of {length} tokens exceed the model's {limit} positions", fixes)


def check_rotary_channels(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that an even number of channels is rotated."""
    m = config.model
    if m.position_embedding_type not in ("rope", "yarn"):
        return
    if m.rotary_dim < 2 or m.rotary_dim % 2:
        whole = (f"--kv-channels {m.head_dim + 1}",) if m.head_dim % 2 else ()
        # rounded up, because the number of channels is rounded down
        shares = (
            math.ceil(10_000 * n / m.head_dim) / 10_000 for n in beside(m.rotary_dim, range(2, m.head_dim + 1, 2))
        )
        sentence = f"{m.rotary_dim} of {m.head_dim} channels per head would be rotated; the number must be even"
        yield Problem("E106", sentence, (*whole, *(f"--rotary-percent {share:g}" for share in shares)))


def check_rope_scaling(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the bounds of RoPE frequency scaling and the options of YaRN."""
    m = config.model
    if m.use_rope_scaling and m.rope_low_freq_factor >= m.rope_high_freq_factor:
        sentence = f"rope_low_freq_factor {m.rope_low_freq_factor:g} is not below rope_high_freq_factor"
        fixes = ("--rope-low-freq-factor 1 --rope-high-freq-factor 4",)
        yield Problem("E107", f"{sentence} {m.rope_high_freq_factor:g}", fixes)
    if m.position_embedding_type != "yarn":
        return
    if m.yarn_original_max_position_embeddings is None:
        fixes = (f"--yarn-original-max-position-embeddings {config.training.seq_length}",)
        yield Problem("E107", "yarn needs the context length of the model before its extension", fixes)
    if m.yarn_beta_slow >= m.yarn_beta_fast:
        sentence = f"yarn_beta_slow {m.yarn_beta_slow:g} is not below yarn_beta_fast {m.yarn_beta_fast:g}"
        yield Problem("E107", sentence, ("--yarn-beta-slow 1 --yarn-beta-fast 32",))


MODEL_CHECKS = (
    check_head_width,
    check_query_groups,
    check_mlp_width,
    check_vocab_size,
    check_positions,
    check_rotary_channels,
    check_rope_scaling,
)
