"""Whether the model's shape is one that can be built."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.numbers import beside, divisors, multiples_beside, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig


def head_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Without kv_channels the heads share the hidden size evenly."""
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


def groups(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every key/value head serves the same number of query heads."""
    m = config.model
    if m.num_attention_heads % m.kv_groups:
        yield Problem(
            "E102",
            f"{m.num_attention_heads} query heads cannot share {m.kv_groups} key/value heads evenly",
            offers("--num-query-groups", beside(m.kv_groups, divisors(m.num_attention_heads))),
        )


def mlp_width(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The default width of a gated MLP is rounded down to a multiple of 64, which a very small model does not reach."""
    m = config.model
    if m.ffn < 1:
        sentence = f"hidden size {m.hidden_size} with swiglu has an MLP of width 0: 8/3 of it, rounded down to 64s"
        yield Problem("E103", sentence, (f"--ffn-hidden-size {4 * m.hidden_size}", "--hidden-size 24"))


def vocabulary(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The vocabulary's size is given, or a tokenizer knows it."""
    m, data = config.model, config.data
    if m.vocab_size is not None:
        return
    if data.tokenizer_type == "NullTokenizer":
        yield Problem("E104", "a NullTokenizer does not know the vocabulary's size", ("--vocab-size 50257",))
    elif data.mock_data and data.tokenizer_type is None:
        fixes = ("--vocab-size 50257", "--tokenizer-type ByteTokenizer")
        yield Problem("E104", "the vocabulary's size is not known: generated tokens have no tokenizer", fixes)


def positions(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """No sample is longer than the positions the model knows."""
    limit, length = config.model.max_position_embeddings, config.training.seq_length
    if limit is not None and length > limit:
        fixes = (f"--seq-length {limit}", f"--max-position-embeddings {length}")
        yield Problem("E105", f"samples of {length} tokens exceed the {limit} positions the model knows", fixes)


def rotation(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rotary positions turn pairs of channels."""
    m = config.model
    if m.position_embedding_type not in ("rope", "yarn"):
        return
    if m.rotary_dim < 2 or m.rotary_dim % 2:
        whole = (f"--kv-channels {m.head_dim + 1}",) if m.head_dim % 2 else ()
        # rounded up, because the share of the channels is rounded down
        shares = (
            math.ceil(10_000 * n / m.head_dim) / 10_000 for n in beside(m.rotary_dim, range(2, m.head_dim + 1, 2))
        )
        sentence = f"{m.rotary_dim} of a head's {m.head_dim} channels would rotate; they rotate in pairs"
        yield Problem("E106", sentence, (*whole, *(f"--rotary-percent {share:g}" for share in shares)))


def scaled_rotation(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Frequency scaling interpolates between two bounds, which must be in order."""
    m = config.model
    if m.use_rope_scaling and m.rope_low_freq_factor >= m.rope_high_freq_factor:
        sentence = f"rope_low_freq_factor {m.rope_low_freq_factor:g} is not below rope_high_freq_factor"
        fixes = ("--rope-low-freq-factor 1 --rope-high-freq-factor 4",)
        yield Problem("E107", f"{sentence} {m.rope_high_freq_factor:g}", fixes)
    if m.position_embedding_type != "yarn":
        return
    if m.yarn_original_max_position_embeddings is None:
        fixes = (f"--yarn-original-max-position-embeddings {config.training.seq_length}",)
        yield Problem("E107", "yarn needs the context length the model had before", fixes)
    if m.yarn_beta_slow >= m.yarn_beta_fast:
        sentence = f"yarn_beta_slow {m.yarn_beta_slow:g} is not below yarn_beta_fast {m.yarn_beta_fast:g}"
        yield Problem("E107", sentence, ("--yarn-beta-slow 1 --yarn-beta-fast 32",))


CHECKS = (head_width, groups, mlp_width, vocabulary, positions, rotation, scaled_rotation)
