"""Declaration of Mamba-2 (:mod:`megatron.layers.mamba`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.activations import INDEX_BYTES, ActivationShape, KeptTensor
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

    def describe(self, config: ModelConfig) -> str:
        """Return the heads and their states."""
        heads = f"{config.mamba_heads} heads of {config.mamba_head_dim} in {config.mamba_num_groups} groups"
        return f"{heads}, states of {config.mamba_state_dim}"

    def passed(self, config: ModelConfig, parallel: ParallelConfig) -> Passed:
        """Return a decay and a state of each head, and rows of x, B and C."""
        tp, groups = parallel.tensor_model_parallel_size, config.mamba_num_groups
        inner, vectors, _, heads = (size // tp for size in mamba_parts(config))
        states, rows = heads + inner * config.mamba_state_dim, config.mamba_conv_kernel_dim - 1
        taken = inner + 2 * vectors * parallel.kv_copies(groups) + heads
        return Passed(states, inner + 2 * vectors, rows, taken + inner)

    def matmuls(self, config: ModelConfig, plan: RecomputePlan, keys: float) -> dict[str, Matmul]:
        """Return the products of the projections, and the two of the recurrence: to write to a state, and to read it.

        The products of chunks, of which there are more, are not counted, like those that fused attention repeats.
        """
        product = Matmul(2.0 * config.mamba_inner_size * config.mamba_state_dim, of_weight=False)
        return super().matmuls(config, plan, keys) | {"write": product, "read": product}

    def kept(self, shape: ActivationShape) -> Iterator[KeptTensor]:
        """Yield the input, the fused projection, and what the norm takes and gives."""
        config, width, tokens = shape.model, shape.width, shape.tokens
        inner, projected = config.mamba_inner_size // shape.tp, mamba_projected(config) // shape.tp
        yield shape.input("layernorm")
        yield KeptTensor("projection", tokens * projected, width)
        yield from shape.magnitudes(self.module, self.parameters(config, shape.sharding))
        yield KeptTensor("output of the scan", tokens * inner, width)
        yield KeptTensor("output of the gated norm", tokens * inner, width, ("layernorm",), True)
        if shape.config.data.reset_attention_mask:
            yield KeptTensor("documents", tokens, INDEX_BYTES)


def mamba_parts(config: ModelConfig) -> tuple[int, int, int, int]:
    """Return the widths of x, B, C and dt; the gate z is as wide as x."""
    vectors = config.mamba_num_groups * config.mamba_state_dim
    return config.mamba_inner_size, vectors, vectors, config.mamba_heads


def mamba_projected(config: ModelConfig) -> int:
    """Return the width of the fused projection."""
    return config.mamba_inner_size + sum(mamba_parts(config))
