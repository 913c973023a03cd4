"""The heads of multi-token prediction, declared without torch (:mod:`megatron.model.multi_token`)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import INDEX_BYTES, MASK_BYTES, ActivationShape, KeptTensor
from megatron.layers.mixers.base import Matmul, hidden_norm, under

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


def head_matmuls(config: ModelConfig, vocabulary: int) -> dict[str, Matmul]:
    """Return the products of a head beside those of its block; ``vocabulary`` rows of the output layer."""
    h = config.hidden_size
    return {"eh_proj": Matmul(4.0 * h * h), "output_layer": Matmul(2.0 * h * vocabulary)}


def head_kept(shape: ActivationShape) -> Iterator[KeptTensor]:
    """Yield what a head keeps beside its block and its loss: what two norms take, and what the projection takes.

    Several heads look up their tokens at once.
    """
    ids = shape.tp > 1 or shape.model.prediction_depths > 1
    yield KeptTensor("tokens", shape.tokens, INDEX_BYTES * ids + MASK_BYTES * (shape.tp > 1))
    for name in ("embedding", "hidden state"):
        if not shape.widens("norm"):
            yield KeptTensor(name, shape.hidden, shape.width)
        yield from shape.statistics("norm", shape.rows, shape.hidden)
    if shape.model.hidden_dropout and "dropout" in shape.eager:
        yield KeptTensor("mask of embedding dropout", shape.hidden, MASK_BYTES)
    yield KeptTensor("input of the projection", 2 * shape.hidden, shape.width, (), True)
