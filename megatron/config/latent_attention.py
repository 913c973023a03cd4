"""Multi-head latent attention (MLA): its options, which are those of the model, and their checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from megatron.config.option import MAX_SIZE, Need, Run, option

LATENT = Need("has_latent_attention", "--multi-latent-attention")
YARN = Need("has_yarn", "--position-embedding-type yarn or --rope-type yarn")
SCALED = Need("has_yarn or has_latent_attention", "--position-embedding-type yarn or --multi-latent-attention")

Model: TypeAlias = Any
"""The model, a :class:`megatron.config.model.ModelConfig`, which inherits the class of options."""

LATENT_ATTENTION = "latent-attention"
"""Name of the mixer."""

LATENT_ORIGINAL_LENGTH = 4096
"""Default of ``yarn_original_max_position_embeddings`` for latent attention, as in Megatron-LM."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's scale of attention for a context that is extended by ``factor`` (arXiv 2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, init=False, eq=False, repr=False)
class LatentAttentionOptions:
    """Options of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    multi_latent_attention: bool = option(False, role="shape")
    """Use multi-head latent attention in the place of attention: keys and values are projected from a latent, which
    generation caches. The mixer latent-attention of --token-mixers."""
    q_lora_rank: int | None = option(None, role="shape", at_least=1, at_most=MAX_SIZE, needs=LATENT)
    """Width of the latent of the queries. Default: none, queries are projected from the hidden state."""
    kv_lora_rank: int = option(32, role="shape", at_least=1, at_most=MAX_SIZE, needs=LATENT)
    """Width of the latent of keys and values."""
    qk_head_dim: int = option(128, role="shape", at_least=1, at_most=MAX_SIZE, needs=LATENT)
    """Channels of a query and of a key, without those that have positions."""
    qk_pos_emb_head_dim: int = option(64, role="shape", at_least=1, at_most=MAX_SIZE, needs=LATENT)
    """Channels of a query and of a key that are rotated by positions; those of the keys are shared by all heads."""
    v_head_dim: int = option(128, role="shape", at_least=1, at_most=MAX_SIZE, needs=LATENT)
    """Channels of a value."""
    rope_type: str | None = option(None, role="function", choices=("rope", "yarn"), needs=LATENT)
    """Rotary positions of latent attention. Default: yarn."""
    mscale: float = option(1.0, role="function", at_least=0, needs=YARN)
    """YaRN: strength of the factor on cosines and sines, 0.1 x mscale x log(rotary_scaling_factor) + 1, divided
    by the same of mscale_all_dim."""
    mscale_all_dim: float = option(0.0, role="function", at_least=0, needs=SCALED)
    """YaRN: strength of the factor on all channels; the scores of latent attention are multiplied by its square,
    with --rope-type rope, too."""

    refused: ClassVar = """
    has_latent_attention and not has_attention and num_attention_heads>kv_groups
    E102 latent attention has no {kv_groups} groups of heads: its keys and values are those of all heads
      fix: drop --num-query-groups

    has_latent_attention and qk_pos_emb_head_dim%2
    E106 {qk_pos_emb_head_dim} channels of a head would be rotated in pairs; the number must be even
      fix: --qk-pos-emb-head-dim {qk_pos_emb_head_dim%2}
    """

    @property
    def has_latent_attention(self: Model) -> bool:
        """True if latent attention is among the mixers."""
        return LATENT_ATTENTION in self.token_mixer_names

    @property
    def has_attention(self: Model) -> bool:
        """True if attention without a latent is among the mixers."""
        return "attention" in self.token_mixer_names

    @property
    def latent_rope_type(self) -> str:
        """Rotary positions of latent attention."""
        return self.rope_type or "yarn"

    @property
    def has_yarn(self: Model) -> bool:
        """True if the positions of attention or of latent attention are extended by YaRN."""
        latent = self.has_latent_attention and self.latent_rope_type == "yarn"
        return latent or self.position_embedding_type == "yarn"

    @property
    def yarn_original_length(self: Model) -> int | None:
        """Context length of the model before its extension."""
        default = LATENT_ORIGINAL_LENGTH if self.has_latent_attention else None
        return self.yarn_original_max_position_embeddings or default

    @property
    def latent_softmax_scale(self: Model) -> float:
        """Factor on the products of queries and keys of latent attention."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        width = self.qk_head_dim + self.qk_pos_emb_head_dim
        scale: float = yarn_mscale(self.rotary_scaling_factor, self.mscale_all_dim) ** 2 / math.sqrt(width)
        return scale

    def note_latent_positions(self: Model, config: Run, world_size: int) -> Iterator[str]:
        """Yield notes if learned positions are added to rotary ones, and about recomputation without effect."""
        training = config.training
        selective = training.recompute_granularity == "selective" and "mla_up_proj" in training.recompute_modules
        if selective and not self.has_latent_attention:
            yield "--recompute-modules mla_up_proj has no effect without --multi-latent-attention"
        if self.has_latent_attention and not self.has_attention and self.position_embedding_type == "learned_absolute":
            yield (
                "--multi-latent-attention rotates queries and keys by their positions, and --position-embedding-type "
                "learned_absolute adds others to the embeddings: --position-embedding-type rope adds none"
            )
