"""Declaration of gated DeltaNet (:mod:`megatron.layers.gated_delta_net`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Init, Sharding, Specs
from megatron.layers.mixers.base import Mixer, channel_convolution, linear, output_projection, under
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
        """Return the heads and the convolution."""
        keys = f"{config.linear_num_key_heads} key heads of {config.linear_key_head_dim}"
        values = f"{config.linear_num_value_heads} value heads of {config.linear_value_head_dim}"
        return f"gated DeltaNet with {keys}, {values}, convolution {config.linear_conv_kernel_dim}"
