"""Columns of samples that parts of a model read, beside tokens and labels."""

from __future__ import annotations

from functools import partial

from megatron.config.model import ModelConfig
from megatron.data.later_tokens import columns_of_samples
from megatron.data.loader import SampleColumns


def sample_columns(model: ModelConfig) -> tuple[SampleColumns, ...]:
    """Return the functions that add columns to the samples of a model."""
    return (partial(columns_of_samples, model.prediction_depths),) if model.prediction_depths else ()
