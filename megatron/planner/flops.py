"""FLOPs per token of every matrix product: forward, backward and recomputation, averaged over a sequence.

As is usual, only matrix products count: ``[m, k] x [k, n]`` is 2mnk FLOPs. Norms, activations, softmax, embeddings and
the optimizer are left out.

A weight takes part in three products per token (forward, and in backward for the gradients of its input and of
itself), so it costs 6 FLOPs; the weight of an expert costs them for the tokens routed to it. A frozen weight takes part
in two, and the narrow products of adapters are left out. Queries of total width
``q`` (heads x channels, often the hidden size) that attend to ``k`` keys cost 2qk for the scores and 2qk for the
values, three times: 12qk per layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.sharding import padded_vocab_size
from megatron.layers.parameters import block_sizes
from megatron.pipeline.plan import stage_layers

BLOCK_MATMULS = ("qkv", "scores", "values", "proj", "router", "fc1", "fc2")
"""The matrix products of a block, in order. fc1 and fc2 include all experts that a token is routed to."""

NO_PIPELINE = ParallelConfig()
"""A layout with all blocks in one stage."""


@dataclass(frozen=True)
class MatmulFlops:
    """FLOPs per token of one matrix product; backward takes as many for the gradient of each operand."""

    forward: float
    products: int = 3  # in forward and backward: 2 if the weight is frozen
    recomputed: float = 0.0  # the forward pass a second time


@dataclass(frozen=True)
class FlopTable:
    """FLOPs per token of every matrix product."""

    layers: tuple[dict[str, MatmulFlops], ...]  # per block, by the names in BLOCK_MATMULS
    head: MatmulFlops  # output layer

    @property
    def works(self) -> list[MatmulFlops]:
        """All matrix products."""
        return [work for layer in self.layers for work in layer.values()] + [self.head]

    @property
    def model(self) -> float:
        """Total of forward and backward."""
        return sum(work.products * work.forward for work in self.works)

    @property
    def recomputed(self) -> float:
        """Total of recomputation."""
        return sum(work.recomputed for work in self.works)


def flop_table(
    model: ModelConfig,
    training: TrainingConfig,
    keys: Sequence[float],
    vocabulary: int,
    parallel: ParallelConfig = NO_PIPELINE,
) -> FlopTable:
    """Return the FLOPs of every matrix product.

    Args:
        model: architecture.
        training: recomputation options.
        keys: average keys per token of each layer: :func:`full_attention_keys` or :func:`causal_attention_keys`.
        vocabulary: rows of the output layer, with or without padding.
        parallel: distribution of blocks over stages; recomputation may apply to the first blocks of *each* stage.

    Raises:
        ScheduleError: when the pipeline cannot distribute the blocks.
    """
    forward = {name: 2.0 * model.hidden_size * width for name, width in _widths(model).items()}
    queries = 2.0 * model.num_attention_heads * model.head_dim
    layers, of_weights = [], 3 if model.lora_rank is None else 2
    products = dict.fromkeys(BLOCK_MATMULS, of_weights) | {"scores": 3, "values": 3}
    for stage in stage_layers(model, parallel):
        for index in range(stage.count):
            forward["scores"] = forward["values"] = queries * keys[stage.layers.start + index]
            recomputed = recomputed_matmuls(model, training, index)
            layers.append({n: MatmulFlops(forward[n], products[n], forward[n] * recomputed[n]) for n in BLOCK_MATMULS})
    return FlopTable(tuple(layers), MatmulFlops(2.0 * model.hidden_size * vocabulary, of_weights))


def recomputed_matmuls(model: ModelConfig, training: TrainingConfig, place: int) -> Counter[str]:
    """Return how often block ``place`` of a stage computes each product again in backward.

    Attention with dropout, which is not fused, keeps no scores. Of an MLP in chunks every chunk is computed again; of
    experts only the shared one is in chunks, which is not counted.
    """
    in_chunks = training.mlp_chunk_size is not None and model.num_experts is None
    again = Counter((*(("fc1", "fc2") if in_chunks else ()), *(("scores",) if model.attention_dropout > 0 else ())))
    if training.recompute_granularity is None:
        return again
    if training.recompute_granularity == "full":
        first = training.recompute_num_layers if training.recompute_method == "block" else None
        return again + Counter(BLOCK_MATMULS if first is None or place < first else ())
    products = {"core_attn": ("scores", "values"), "mlp": () if in_chunks else ("router", "fc1", "fc2")}
    return again + Counter(name for module in training.recompute_modules for name in products.get(module, ()))


def matmul_parameters(model: ModelConfig) -> int:
    """Return N of ``6N + 12Lhs``: the weights of the linear layers and the output layer.

    Left out are experts that a token is not routed to, token and position embeddings (lookups; a tied embedding counts
    as the output layer), biases, norms, and vocabulary padding.
    """
    return model.hidden_size * (model.num_layers * sum(_widths(model).values()) + model.vocab)


def full_attention_keys(model: ModelConfig, seq_length: int) -> tuple[float, ...]:
    """Return the keys per token of each layer when masked scores count too: ``s``, or the window if shorter."""
    return tuple(float(model.pattern(layer).full_keys(seq_length)) for layer in range(model.num_layers))


def causal_attention_keys(model: ModelConfig, seq_length: int) -> tuple[float, ...]:
    """Return the average keys per token of each layer under its mask: ``s/2`` without a pattern.

    The token itself counts as half a key.
    """
    return tuple(model.pattern(layer).mean_keys(seq_length) for layer in range(model.num_layers))


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs per token, forward and backward, in the usual conventions."""

    # 6N + 12Lhs (PaLM, arXiv:2204.02311, appendix B): masked scores count. N is matmul_parameters, L the layers,
    # h the width of the queries, s the mean of full_attention_keys.
    full: float
    # 6N + 12Lh x the mean of causal_attention_keys: masked scores do not count.
    causal: float
    # full plus recomputation, except that inside fused attention kernels
    hardware: float
    # As Megatron-LM counts: causal, ignoring windows and routers, with vocabulary padding.
    megatron: float

    @classmethod
    def from_config(cls, config: RunConfig) -> FlopsPerToken:
        """Compute the FLOPs per token of a run.

        Raises:
            ValueError: when the vocabulary size is not set, or the pipeline cannot distribute the blocks.
        """
        model, training, s = config.model, config.training, config.training.seq_length
        padded = padded_vocab_size(
            model.vocab, model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
        )
        full = flop_table(model, training, full_attention_keys(model, s), model.vocab, config.parallel)
        megatron = flop_table(model, training, [s / 2] * model.num_layers, padded)
        routers = sum(layer["router"].products * layer["router"].forward for layer in megatron.layers)
        return cls(
            full=full.model,
            causal=flop_table(model, training, causal_attention_keys(model, s), model.vocab).model,
            hardware=full.model + full.recomputed,
            megatron=megatron.model - routers,
        )


def _widths(model: ModelConfig) -> dict[str, int]:
    """Return the size of each linear layer of a block besides the hidden size; a token's experts count as one."""
    weights = {name: size for name, size in block_sizes(model, active=True).items() if name.endswith("weight")}
    products = ("qkv", "proj", "router", "fc1", "fc2")  # named as their layers: linear_qkv, ..., router
    return {p: sum(n for name, n in weights.items() if f"{p}.weight" in name) // model.hidden_size for p in products}
