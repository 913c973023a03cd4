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

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.sharding import padded_vocab_size
from megatron.layers.mixers.base import Matmul
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.multi_token_parameters import head_matmuls
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.plan import stage_layers

NO_PIPELINE = ParallelConfig()
"""A layout with all blocks in one stage."""


@dataclass(frozen=True)
class FlopTable:
    """FLOPs per token of every matrix product."""

    layers: tuple[dict[str, Matmul], ...]  # per block, by module and product, such as mlp.linear_fc1
    head: Matmul  # output layer
    heads: tuple[dict[str, Matmul], ...]  # per head that predicts further tokens: its block, and the output layer
    frozen: bool  # weights have no gradients

    def cost(self, product: Matmul) -> float:
        """Return the FLOPs of forward and backward, which takes as many for the gradient of each operand."""
        return product.flops * (1 + product.gradients - (self.frozen and product.of_weight))

    @property
    def works(self) -> list[Matmul]:
        """All matrix products."""
        return [work for layer in (*self.layers, *self.heads) for work in layer.values()] + [self.head]

    @property
    def model(self) -> float:
        """Total of forward and backward."""
        return sum(map(self.cost, self.works))

    @property
    def recomputed(self) -> float:
        """Total of recomputation."""
        return sum(work.flops * work.again for work in self.works)


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

    def products_of(layer: int, plan: RecomputePlan, place: int) -> dict[str, Matmul]:
        return {
            f"{mixer.module}.{name}": product._replace(again=product.again + (place < plan.blocks))
            for mixer in block_mixers(model, layer)
            for name, product in mixer.matmuls(model, plan, keys[min(layer, model.num_layers - 1)]).items()
        }

    layers = []
    for stage in stage_layers(model, parallel, training.seq_length):
        plan = RecomputePlan.from_config(training, stage.count)
        layers += [products_of(layer, plan, place) for place, layer in enumerate(stage.layers)]
    alone, more = RecomputePlan.from_config(training, 1), head_matmuls(model, vocabulary)
    heads = tuple(products_of(layer, alone, 0) | more for layer in model.head_layers)
    return FlopTable(tuple(layers), Matmul(2.0 * model.hidden_size * vocabulary), heads, model.lora_rank is not None)


def matmul_parameters(model: ModelConfig) -> int:
    """Return N of ``6N + 12Lhs``: the weights of the linear layers and the output layer.

    Left out are experts that a token is not routed to, token and position embeddings (lookups; a tied embedding counts
    as the output layer), biases, norms, and vocabulary padding.
    """
    layers = (*range(model.num_layers), *model.head_layers)
    mixers = (mixer for layer in layers for mixer in block_mixers(model, layer))
    h, heads = model.hidden_size, len(model.head_layers)
    return (
        sum(sum(mixer.matrices(model).values()) for mixer in mixers) + heads * 2 * h * h + (1 + heads) * h * model.vocab
    )


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
    # As Megatron-LM counts: causal, ignoring windows and routers, with vocabulary padding, and more for recurrences.
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
        products = (product for layer in (*megatron.layers, *megatron.heads) for product in layer.items())
        routers = sum(megatron.cost(each) for name, each in products if name.endswith(".router"))
        blocks = (*range(model.num_layers), *model.head_layers)
        more = sum(mixer.megatron_flops(model) for layer in blocks for mixer in block_mixers(model, layer))
        return cls(
            full=full.model,
            causal=flop_table(model, training, causal_attention_keys(model, s), model.vocab).model,
            hardware=full.model + full.recomputed,
            megatron=megatron.model - routers + 3 * more,
        )
