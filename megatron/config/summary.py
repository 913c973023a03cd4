"""What a configuration amounts to, in a few lines."""

from __future__ import annotations

from megatron.config.run import RunConfig


def summary(config: RunConfig, world_size: int) -> str:
    return f"{world_size} ranks, {config.model.num_layers} layers"
