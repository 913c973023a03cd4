"""The heads of multi-token prediction, declared without torch (:mod:`megatron.model.multi_token`)."""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.base import hidden_norm, under

BLOCK = "mtp_model_layer"
"""Name of the block of a head, as in Megatron-LM."""


def head_name(depth: int) -> str:
    """Return the global name of a head, counted from 0."""
    return f"mtp.layers.{depth}"


def head_parameters(config: ModelConfig, sharding: Sharding, block: Specs) -> Specs:
    """Declare a head by local name: norms of a later token's embedding and of the hidden state, a block, a norm.

    The projection takes ``[embedding, hidden state]``, as in DeepSeek's and Megatron-LM's checkpoints. Every rank has
    the whole of it, and multiplies the rows of the residual stream that it has.
    """
    h, norm = config.hidden_size, hidden_norm(config, sharding)
    project = sharding.dense.replicate((h, 2 * h), Init(config.init_method_std), sharding.sequence_parallel)
    return under(enorm=norm, hnorm=norm, eh_proj={"weight": project}, **{BLOCK: block}, final_layernorm=norm)
