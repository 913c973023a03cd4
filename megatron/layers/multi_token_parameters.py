"""The heads of multi-token prediction, declared without torch (:mod:`megatron.model.multi_token`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import INDEX_BYTES, MASK_BYTES, ActivationShape, KeptTensor
from megatron.layers.mixers.base import Matmul, hidden_norm, under

BLOCK = "mtp_model_layer"
"""Name of the block of a head, as in Megatron-LM."""


def head_names(config: ModelConfig) -> list[str]:
    """Return the global name of the head of each depth; depths that share a layer have one name."""
    return [f"mtp.layers.{depth % config.prediction_layers}" for depth in range(config.prediction_depths)]


def head_parameters(config: ModelConfig, sharding: Sharding, block: Specs) -> Specs:
    """Declare a head by local name: norms of a later token's embedding and of the hidden state, a block, a norm.

    The projection takes ``[embedding, hidden state]``, as in DeepSeek's and Megatron-LM's checkpoints. Every rank has
    the whole of it, and multiplies the rows of the residual stream that it has. A shared layer has a contribution to
    its gradients from each depth.
    """
    h, norm = config.hidden_size, hidden_norm(config, sharding)
    project = sharding.dense.replicate((h, 2 * h), Init(config.init_method_std), sharding.sequence_parallel)
    specs = under(enorm=norm, hnorm=norm, eh_proj={"weight": project}, **{BLOCK: block}, final_layernorm=norm)
    uses, group = config.prediction_depths // config.prediction_layers, int(config.mtp_detach_heads)
    return {name: replace(spec, contributions=uses, norm_group=group) for name, spec in specs.items()}


def head_matmuls(config: ModelConfig, vocabulary: int) -> dict[str, Matmul]:
    """Return the products of a head beside those of its block; ``vocabulary`` rows of the output layer."""
    h = config.hidden_size
    output = Matmul(2.0 * h * vocabulary, gradients=1 if config.mtp_detach_heads else 2)
    return {"eh_proj": Matmul(4.0 * h * h), "output_layer": output}


def head_kept(shape: ActivationShape, first: bool) -> Iterator[KeptTensor]:
    """Yield what a head keeps beside its block and its loss: what two norms take, and what the projection takes.

    Several heads look up their tokens at once. Without a gradient, embeddings keep neither tokens nor dropout, and
    RMSNorm of PyTorch not its input. ``first`` for the head that takes the hidden state of the model.
    """
    ids, detached = shape.tp > 1 or shape.model.prediction_depths > 1, shape.model.mtp_detach_heads
    if not detached:
        yield KeptTensor("tokens", shape.tokens, INDEX_BYTES * ids + MASK_BYTES * (shape.tp > 1))
    in_operations = "norm" in shape.eager and shape.model.normalization == "RMSNorm"
    for name, constant in (("embedding", detached), ("hidden state", detached and first)):
        if constant and in_operations:
            yield KeptTensor(f"{name} / rms", shape.hidden, shape.wide)
            continue
        if not shape.widens("norm"):
            yield KeptTensor(name, shape.hidden, shape.width)
        yield from shape.statistics("norm", shape.rows, shape.hidden)
    if shape.model.hidden_dropout and "dropout" in shape.eager and not detached:
        yield KeptTensor("mask of embedding dropout", shape.hidden, MASK_BYTES)
    yield KeptTensor("input of the projection", 2 * shape.hidden, shape.width, (), True)
