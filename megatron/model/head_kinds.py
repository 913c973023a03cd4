"""The kinds of heads that a model may have."""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.layers.context import BuildContext
from megatron.model.heads import Heads
from megatron.model.multi_token import MultiTokenPrediction


def build_heads(config: ModelConfig, training: TrainingConfig, context: BuildContext) -> Heads | None:
    """Build the heads of a model, after its output layer; None if it has none."""
    return MultiTokenPrediction(config, training, context) if config.prediction_depths else None
