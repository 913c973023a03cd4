"""Declaration of gated DeltaNet (:mod:`megatron.layers.gated_delta_net`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.gated_delta_net import CHUNK, SEGMENT
from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import INDEX_BYTES, MASK_BYTES, ActivationShape, KeptTensor
from megatron.layers.mixers.base import Matmul, Mixer, Passed, channel_convolution, linear, output_projection, under
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext


DECAYS = (1.0, 16.0)
"""Range of the rates of decay of a new model."""


class GatedDeltaNetMixer(Mixer):
    """Gated DeltaNet."""

    module = "gated_delta_net"
    supports = ("context parallelism", "documents", "generation")
    uses_attention_heads = False
    operations = ("causal_conv", "gated_delta_rule")

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare the projections, the convolution, the decays of the heads, and the norm of their outputs.

        Each part of the fused projection, and of the channels of the convolution, is sharded over TP. Initial values
        are those of Megatron-LM.
        """
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        heads, channels = config.linear_num_value_heads, config.linear_value_head_dim
        values, width = heads * channels, config.linear_conv_kernel_dim
        parts = (keys, keys, values, values, heads, heads)  # q, k, v, gate, beta, alpha
        weight = sharding.dense.parts(parts, (config.hidden_size,), Init(config.init_method_std))
        convolution = channel_convolution(sharding, parts[:3], width, has_bias=False)
        of_heads = {"dt_bias": Init(value=1.0), "A_log": Init(uniform=DECAYS, transform="log")}
        # Each rank normalises its own heads only, so the gradient is always partial.
        norm = {"weight": sharding.dense.replicate((channels,), Init(value=1.0), partial=True)}
        return (
            under(linear_in=linear(weight, None), conv=convolution)
            | {name: replace(sharding.dense.split((heads,), 0, init), wide=True) for name, init in of_heads.items()}
            | under(norm=norm, linear_out=output_projection(config, sharding, values, has_bias=False))
        )

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module."""
        from megatron.layers.gated_delta_net import GatedDeltaNet

        return GatedDeltaNet(config, context, plan)

    def describe(self, config: ModelConfig) -> str:
        """Return the heads."""
        keys = f"{config.linear_num_key_heads} key heads of {config.linear_key_head_dim}"
        values = f"{config.linear_num_value_heads} value heads of {config.linear_value_head_dim}"
        return f"{keys}, {values}"

    def passed(self, config: ModelConfig, tp: int) -> Passed:
        """Return the inputs and outputs of the heads, their states with the matrices between, and the rows before."""
        keys, heads = config.linear_num_key_heads // tp, config.linear_num_value_heads // tp
        d, v = config.linear_key_head_dim, config.linear_value_head_dim
        rows, state = config.linear_conv_kernel_dim - 1, heads * d * (v + d)
        return Passed(heads * (v + 2), 2 * keys * d, heads * v, config.linear_num_key_heads, heads * v, rows, state)

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the products of the projections, and the three of the recurrence with a state.

        They are those that read the value of a key, write another one, and read that of a query. The products of
        chunks, of which there are more, are not counted, like those that fused attention repeats.
        """
        size = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        product = Matmul(2.0 * size, of_weight=False)
        return super().matmuls(config, plan, keys) | {"recall": product, "write": product, "read": product}

    def megatron_flops(self, config: ModelConfig) -> float:
        """Return those of four products of square states, and of the convolution, instead of three products."""
        heads, keys, values = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        convolved = 2 * config.linear_num_key_heads * keys + heads * values
        return 2.0 * (4 * heads * values**2 - 3 * heads * keys * values + config.linear_conv_kernel_dim * convolved)

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the input, the fused projection, and what the norm takes and gives."""
        sizes = DeltaShape.of(shape)
        yield shape.input("layernorm")
        yield KeptTensor("projection", sizes.projected, shape.width)
        yield from shape.magnitudes(self.module, self.parameters(shape.model, shape.sharding))
        yield KeptTensor("output of the rule", sizes.values, shape.width)
        yield KeptTensor("output of the gated norm", sizes.values, shape.width, ("layernorm",), True)
        if shape.config.data.reset_attention_mask:
            before = sizes.chunks * (shape.model.linear_conv_kernel_dim - 1)
            yield KeptTensor("documents", shape.tokens + before, INDEX_BYTES)
            yield KeptTensor("tokens of the first document", shape.tokens, MASK_BYTES)

    def temporary(self, shape: ActivationShape) -> tuple[int, int]:
        """Return the most memory besides, of the rule in PyTorch: its tensors of a segment of chunks."""
        sizes, model, width = DeltaShape.of(shape), shape.model, shape.width
        keys, values = model.linear_num_key_heads // shape.tp, model.linear_num_value_heads // shape.tp
        d, v, chunk = model.linear_key_head_dim, model.linear_value_head_dim, min(CHUNK, sizes.length)
        tokens = sizes.chunks * min(sizes.length, CHUNK * SEGMENT)
        scores, states = values * chunk, values * d * v / chunk
        forward = 3 * scores + values * (7 * v + 3 * d) + keys * d + 1.5 * states
        backward = 7.5 * scores + values * (7.5 * v + 2 * d) + 8 * keys * d + 2.7 * states
        outside = shape.residual + (2 * sizes.convolved + sizes.values) * width
        gradients = (sizes.convolved + sizes.values) * width
        return int(outside + tokens * forward * shape.wide), int(outside + gradients + tokens * backward * shape.wide)


class DeltaShape(NamedTuple):
    """Elements of a rank's part of a micro-batch."""

    # Outputs of the first projection, the channels that are convolved, and values.
    projected: int
    convolved: int
    values: int
    # Sequences of consecutive tokens, those of all samples, and the tokens of one.
    chunks: int
    length: int

    @classmethod
    def of(cls, shape: ActivationShape) -> DeltaShape:
        """Compute the sizes."""
        model, parallel, tokens = shape.model, shape.config.parallel, shape.tokens
        keys = tokens * model.linear_num_key_heads // shape.tp * model.linear_key_head_dim
        heads = tokens * model.linear_num_value_heads // shape.tp
        values = heads * model.linear_value_head_dim
        chunks = shape.samples * (2 if parallel.context_parallel_size > parallel.cp_head_ranks else 1)
        length = tokens * parallel.cp_head_ranks // chunks
        return cls(2 * keys + 2 * values + 2 * heads, 2 * keys + values, values, chunks, length)
