"""Declaration of Mamba-2 (:mod:`megatron.layers.mamba`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.config.mamba import SEGMENT_CHUNKS
from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import INDEX_BYTES, MASK_BYTES, ActivationShape, KeptTensor
from megatron.layers.mixers.base import Matmul, Mixer, Passed, channel_convolution, linear, output_projection, under
from megatron.layers.recompute_plan import RecomputePlan

if TYPE_CHECKING:
    from torch import nn

    from megatron.layers.context import BuildContext

STEPS = (1e-3, 1e-1)
"""Range of the step sizes of a new model."""

DECAYS = (1.0, 16.0)
"""Range of the rates of decay of a new model."""


class MambaMixer(Mixer):
    """Mamba-2."""

    module = "mamba"
    supports = ("context parallelism", "documents", "generation")
    uses_attention_heads = False
    operations = ("causal_conv", "state_space")

    def parameters(self, config: ModelConfig, sharding: Sharding) -> Specs:
        """Declare both projections, the convolution, the parameters of the heads, and the norm.

        Each part of the fused projection, and of the channels of the convolution, is sharded over TP. Initial values
        are those of Megatron-LM.
        """
        dense, (inner, *vectors, heads) = sharding.dense, mamba_parts(config)
        parts, steps = (inner, inner, *vectors, heads), tuple(map(math.log, STEPS))
        weight = dense.parts(parts, (config.hidden_size,), Init(config.init_method_std))
        bias = dense.parts(parts, (), Init()) if config.mamba_proj_bias else None
        convolution = channel_convolution(
            sharding, (inner, *vectors), config.mamba_conv_kernel_dim, config.mamba_conv_bias
        )
        of_heads = {
            "dt_bias": Init(uniform=(steps[0], steps[1]), transform="inverse_softplus_of_exp"),
            "A_log": Init(uniform=DECAYS, transform="log"),
            "D": Init(value=1.0),
        }
        return (
            under(linear_in=linear(weight, bias), conv=convolution)
            | {name: replace(dense.split((heads,), 0, init), wide=True) for name, init in of_heads.items()}
            | under(
                norm={"weight": dense.split((inner,), 0, Init(value=1.0))},
                linear_out=output_projection(config, sharding, inner, config.mamba_proj_bias),
            )
        )

    def build(self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan) -> nn.Module:
        """Build the module."""
        from megatron.layers.mamba import Mamba

        return Mamba(config, context, plan)

    def passed(self, config: ModelConfig, tp: int) -> Passed:
        """Return the inputs and outputs of the heads, their states, and the rows before a chunk."""
        inner, vector, _, heads = (n // tp for n in mamba_parts(config))
        rows, state = config.mamba_conv_kernel_dim - 1, inner * config.mamba_state_dim + heads
        return Passed(inner + heads, 2 * vector, inner, config.mamba_num_groups, inner, rows, state)

    def describe(self, config: ModelConfig) -> str:
        """Return the heads and their states."""
        heads = f"{config.mamba_heads} heads of {config.mamba_head_dim} in {config.mamba_num_groups} groups"
        return f"{heads}, states of {config.mamba_state_dim}"

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the products of the projections, and the two of the recurrence: to write to a state, and to read it.

        The products of chunks, of which there are more, are not counted, like those that fused attention repeats.
        """
        product = Matmul(2.0 * config.mamba_inner_size * config.mamba_state_dim, of_weight=False)
        return super().matmuls(config, plan, keys) | {"write": product, "read": product}

    def megatron_flops(self, config: ModelConfig) -> float:
        """Return those of 7 FLOPs for an element of the state, instead of two products."""
        return 3.0 * config.mamba_inner_size * config.mamba_state_dim

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the input, the fused projection, and what the norm takes and gives."""
        config, width, tokens = shape.model, shape.width, shape.tokens
        inner, projected = config.mamba_inner_size // shape.tp, mamba_projected(config) // shape.tp
        yield shape.input("layernorm")
        yield KeptTensor("projection", tokens * projected, width)
        ring, exchange, copies = _ranks(shape)
        if exchange > 1:
            _, vector, _, heads = (n // shape.tp for n in mamba_parts(config))
            yield KeptTensor("projection for some heads", tokens * (inner + 2 * vector * copies + heads), width)
        if ring > 1:  # those of all chunks, as they were gathered, and the ones before them
            states = shape.samples * (4 * ring + 1) * inner // exchange * config.mamba_state_dim
            yield KeptTensor("states of the chunks", states, shape.wide)
        yield from shape.magnitudes(self.module, self.parameters(config, shape.sharding))
        yield KeptTensor("output of the scan", tokens * inner, width)
        yield KeptTensor("weight of the norm", inner, shape.wide)
        yield KeptTensor("output of the gated norm", tokens * inner, width, ("layernorm",), True)
        if shape.config.data.reset_attention_mask:
            before = shape.samples * (1 + (ring > 1)) * (config.mamba_conv_kernel_dim - 1)
            yield KeptTensor("documents", tokens + before, INDEX_BYTES)
            if ring > 1:
                yield KeptTensor("tokens of the first document", tokens, MASK_BYTES)

    def temporary(self, shape: ActivationShape) -> tuple[int, int]:
        """Return the most memory of the scan: its inputs, which the convolution gives, and a segment of it.

        In backward with the gradients of both; a segment has about four tensors like its scores of all heads.
        """
        config, width, wide, tokens = shape.model, shape.width, shape.wide, shape.tokens
        ring, exchange, _ = _ranks(shape)
        sequences = shape.samples * (2 if ring > 1 else 1)
        inner, vector, _, heads = (n // shape.tp for n in mamba_parts(config))
        length = tokens * exchange // sequences
        chunk = min(config.mamba_chunk_size, length)
        segment = sequences * min(-(-length // chunk), SEGMENT_CHUNKS) * chunk
        scores = segment * chunk * heads // exchange * wide
        states = (segment // chunk + sequences) * inner // exchange * config.mamba_state_dim * wide
        of_groups = segment * (chunk * config.mamba_num_groups // shape.tp + 2 * vector * (wide > width)) * wide
        rows = segment * inner // exchange * wide
        inputs, steps, output = tokens * (inner + 2 * vector) * width, tokens * heads * wide, tokens * inner * width
        forward = 2 * inputs + 2 * steps + output + 2 * scores + 2 * states + of_groups + 2 * rows
        backward = 3 * inputs + 4 * steps + 2 * output + 4 * scores + 3 * states + 2 * of_groups + 4 * rows
        return shape.residual + forward, shape.residual + backward


def _ranks(shape: ActivationShape) -> tuple[int, int, int]:
    """Return the ranks with different chunks, those that exchange heads for rows, and copies of a group for these."""
    parallel = shape.config.parallel
    groups, exchange = shape.model.mamba_num_groups // shape.tp, parallel.cp_head_ranks
    return parallel.context_parallel_size // exchange, exchange, math.lcm(groups, exchange) // groups


def mamba_parts(config: ModelConfig) -> tuple[int, int, int, int]:
    """Return the widths of x, B, C and dt; the gate z is as wide as x."""
    vectors = config.mamba_num_groups * config.mamba_state_dim
    return config.mamba_inner_size, vectors, vectors, config.mamba_heads


def mamba_projected(config: ModelConfig) -> int:
    """Return the width of the fused projection."""
    return config.mamba_inner_size + sum(mamba_parts(config))
