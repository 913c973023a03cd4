"""The mixers by name, built in and of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.config.gated_delta_net import GATED_DELTA_NET
from megatron.config.latent_attention import LATENT_ATTENTION
from megatron.config.mamba import MAMBA_MIXER
from megatron.config.model import ModelConfig, RotaryTable
from megatron.config.plugins import registered
from megatron.layers.mixers.attention import AttentionMixer
from megatron.layers.mixers.base import Mixer
from megatron.layers.mixers.experts import ExpertsMixer
from megatron.layers.mixers.feed_forward import FeedForwardMixer
from megatron.layers.mixers.gated_delta_net import GatedDeltaNetMixer
from megatron.layers.mixers.latent_attention import LatentAttentionMixer
from megatron.layers.mixers.mamba import MambaMixer

MIXERS: Mapping[str, Mixer] = {
    "attention": AttentionMixer(),
    LATENT_ATTENTION: LatentAttentionMixer(),
    GATED_DELTA_NET: GatedDeltaNetMixer(),
    MAMBA_MIXER: MambaMixer(),
    "mlp": FeedForwardMixer(),
    "experts": ExpertsMixer(),
}
"""The built-in mixers."""


def find_mixer(name: str) -> Mixer:
    """Return a mixer by its name in the configuration."""
    mixer: Mixer = MIXERS[name] if name in MIXERS else registered("mixer")[name]()
    return mixer


def auxiliary_losses(config: ModelConfig) -> dict[str, float]:
    """Return the coefficients of the auxiliary losses of a model by name, summed over the mixers that have them."""
    total: dict[str, float] = {}
    for layer in (*range(config.num_layers), *config.head_blocks):
        for mixer in block_mixers(config, layer):
            for name, coefficient in mixer.losses(config).items():
                total[name] = total.get(name, 0.0) + coefficient
    return total


def rotary_tables(config: ModelConfig, layers: Iterable[int]) -> list[RotaryTable]:
    """Return the different tables of rotary positions that the mixers of some layers read."""
    tables = (mixer.rotary(config, layer) for layer in layers for mixer in block_mixers(config, layer))
    return [*dict.fromkeys(table for table in tables if table is not None)]


def unused_operations(config: ModelConfig) -> set[str]:
    """Return the operations that only built-in mixers call which a model does not have."""
    kinds = {name for names in config.kinds_of_layers for name in names}
    used = {operation for name in kinds for operation in find_mixer(name).operations}
    return {operation for mixer in MIXERS.values() for operation in mixer.operations} - used


def block_mixers(config: ModelConfig, layer: int) -> list[Mixer]:
    """Return the mixers of a block, in order, by its global index."""
    return [find_mixer(name) for name in config.mixers(layer)]
