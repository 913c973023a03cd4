"""How much arithmetic a token costs: every matrix product of the model, forward, backward and done again.

Only matrix products count, as everywhere in the field: ``[m, k] x [k, n]`` is 2mnk FLOPs. Norms, activations, softmax,
embeddings and the optimizer are left out. All numbers are FLOPs per token, averaged over a sequence.

A weight is multiplied three times per token (forward, and in backward for the gradients of its input and of itself), so
it costs 6 FLOPs; one of an expert costs them for the tokens that chose it. Queries of width ``q`` (heads x channels,
often the hidden size) that meet ``k`` keys cost 2qk for the scores and 2qk for the values, three times over: 12qk per
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig, TrainingConfig
from megatron.parallel.shard import padded_vocabulary
from megatron.pipeline.plan import stage_layers

BLOCK = ("qkv", "scores", "values", "proj", "router", "fc1", "fc2")
"""The matrix products of a block, in order; the last two are those of all experts that a token has."""

ONE_STAGE = ParallelConfig()
"""All blocks on one rank, in one chunk."""


@dataclass(frozen=True)
class Work:
    """FLOPs per token of one operation.

    Attributes:
        forward: once.
        backward: the gradients of both operands.
        recomputed: forward again, because its result was not kept.
    """

    forward: float
    backward: float
    recomputed: float = 0.0


@dataclass(frozen=True)
class FlopTable:
    """FLOPs per token of every matrix product.

    Attributes:
        layers: of each block, by the names in ``BLOCK``.
        head: of the output layer.
    """

    layers: tuple[dict[str, Work], ...]
    head: Work

    @property
    def works(self) -> list[Work]:
        """Every operation."""
        return [work for layer in self.layers for work in layer.values()] + [self.head]

    @property
    def model(self) -> float:
        """Forward and backward."""
        return sum(work.forward + work.backward for work in self.works)

    def of(self, name: str) -> float:
        """Forward and backward of one of ``BLOCK`` in all blocks."""
        return sum(layer[name].forward + layer[name].backward for layer in self.layers)

    @property
    def recomputed(self) -> float:
        """What is done a second time."""
        return sum(work.recomputed for work in self.works)


def flop_table(
    model: ModelConfig,
    training: TrainingConfig,
    keys: float,
    vocabulary: int,
    parallel: ParallelConfig = ONE_STAGE,
) -> FlopTable:
    """What every matrix product costs.

    Args:
        model: its shape.
        training: what it recomputes.
        keys: that a token meets on average, counted as ``full_keys`` or ``causal_keys`` do.
        vocabulary: rows of the output layer, with or without padding.
        parallel: how a pipeline shares the blocks: some of *each* stage's may be recomputed.

    Raises:
        ScheduleError: when it cannot share them.
    """
    once = {name: 2.0 * model.hidden_size * width for name, width in _widths(model).items()}
    attention = 2.0 * model.num_attention_heads * model.head_dim * keys
    once |= {"scores": attention, "values": attention}
    places = [place for stage in stage_layers(model, parallel) for place in range(stage.count)]
    layers = []
    for place in places:
        again = recomputed_products(model, training, place)
        layers.append({name: Work(once[name], 2 * once[name], once[name] * (name in again)) for name in BLOCK})
    head = 2.0 * model.hidden_size * vocabulary
    return FlopTable(tuple(layers), Work(head, 2 * head))


def recomputed_products(model: ModelConfig, training: TrainingConfig, place: int) -> frozenset[str]:
    """Which products of block ``place`` of a stage are done again in backward, under the recompute flags.

    Norms and activations are no products. Recomputation ends as soon as backward has what it needs: unfused attention
    (with dropout) needs its weights and not what they are multiplied into, so only the scores are made again.
    """
    if training.recompute_granularity is None:
        return frozenset()
    if training.recompute_granularity == "full":
        first = training.recompute_num_layers if training.recompute_method == "block" else None
        return frozenset(BLOCK if first is None or place < first else ())
    core = ("scores",) if model.attention_dropout > 0 else ("scores", "values")
    products = {"core_attn": core, "mlp": ("router", "fc1", "fc2")}
    return frozenset(name for module in training.recompute_modules for name in products.get(module, ()))


def matmul_parameters(model: ModelConfig) -> int:
    """N of ``6N + 12Lhs``: the weights of matrix products, which are the linear layers and the output layer.

    Not in it: experts that a token did not choose, the embeddings of tokens and positions (rows are looked up; a tied
    one counts once, as the output layer), biases, norms, and the padding of the vocabulary.
    """
    return model.hidden_size * (model.num_layers * sum(_widths(model).values()) + model.vocab)


def full_keys(model: ModelConfig, seq_length: int) -> float:
    """Keys of a token where every score counts, masked or not: ``s``, or the window where that is shorter."""
    return float(min(model.window_size or seq_length, seq_length))


def causal_keys(model: ModelConfig, seq_length: int) -> float:
    """Keys that a token sees on average: ``s/2``; with a window ``w - w^2/2s``. A token is half a key of its own."""
    window = full_keys(model, seq_length)
    return window - window**2 / (2 * seq_length)


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs per token, forward and backward, under the conventions that figures are quoted in.

    Attributes:
        full: ``6N + 12Lhs`` (PaLM, arXiv:2204.02311, appendix B): every score counts, also those that are masked.
            N is ``matmul_parameters``, L layers, h the width of the queries, s ``full_keys``.
        causal: ``6N + 12Lh`` times ``causal_keys``: scores that are masked do not count.
        hardware: ``full`` and what is recomputed, except inside fused attention kernels, which keep no scores.
        megatron: as Megatron-LM counts: causal, windows ignored, with the padding of the vocabulary, without routers.
    """

    full: float
    causal: float
    hardware: float
    megatron: float

    @classmethod
    def from_config(cls, config: RunConfig) -> FlopsPerToken:
        """Of a run.

        Raises:
            ValueError: while the vocabulary's size is not known, or when the pipeline cannot share the blocks.
        """
        model, training, s = config.model, config.training, config.training.seq_length
        padded = padded_vocabulary(
            model.vocab, model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
        )
        full = flop_table(model, training, full_keys(model, s), model.vocab, config.parallel)
        megatrons = flop_table(model, training, s / 2, padded)
        return cls(
            full=full.model,
            causal=flop_table(model, training, causal_keys(model, s), model.vocab).model,
            hardware=full.model + full.recomputed,
            megatron=megatrons.model - megatrons.of("router"),
        )


def _widths(model: ModelConfig) -> dict[str, int]:
    """Rows of each linear layer of a block, those of the projections back to the hidden size counted as columns.

    Several experts are as one that is as wide as all of them.
    """
    query, mlp = model.num_attention_heads * model.head_dim, model.ffn
    if model.num_experts is not None:
        mlp = model.moe_router_topk * model.expert_ffn + (model.moe_shared_expert_intermediate_size or 0)
    return {
        "qkv": query + 2 * model.kv_groups * model.head_dim,
        "proj": query,
        "router": model.num_experts or 0,
        "fc1": mlp * (2 if model.gated else 1),
        "fc2": mlp,
    }
