"""Filling in what follows from the rest, so that the written configuration shows every number."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from megatron.config.batch import global_batch
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig, TrainingConfig
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import resolved


def resolve(config: RunConfig, world_size: int) -> RunConfig:
    """The same run with derived defaults written out; resolving twice changes nothing.

    The vocabulary's size stays open until the tokenizer has said it, and an open ``lr_decay_iters`` keeps meaning
    "the whole run", however long that is made later.
    """
    return replace(
        config,
        model=_model(config.model, config.training.seq_length),
        parallel=_parallel(config.model, config.parallel),
        training=_training(config, config.parallel.data_parallel_size(world_size)),
    )


def _model(model: ModelConfig, seq_length: int) -> ModelConfig:
    return replace(
        model,
        num_query_groups=model.kv_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        max_position_embeddings=model.max_position_embeddings or seq_length,
    )


def _parallel(model: ModelConfig, parallel: ParallelConfig) -> ParallelConfig:
    """A pipeline that contradicts itself, which the checks tell of, stays as it is."""
    with suppress(ScheduleError):
        parallel = resolved(model, parallel)
    return replace(
        parallel,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
    )


def _training(config: RunConfig, data_parallel_size: int) -> TrainingConfig:
    training = replace(config.training, global_batch_size=global_batch(config.training, data_parallel_size))
    if training.recompute_granularity != "full":
        return training
    method = training.recompute_method or "uniform"
    every = 1 if method == "uniform" else config.model.num_layers
    return replace(training, recompute_method=method, recompute_num_layers=training.recompute_num_layers or every)
