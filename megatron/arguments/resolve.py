"""Writes out derived defaults, so that the saved configuration contains every number."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from megatron.config.batch import full_global_batch_size
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig, TrainingConfig
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import resolve_pipeline


def resolve(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with derived defaults written out. Idempotent.

    ``vocab_size`` stays open until the tokenizer is known. An open ``lr_decay_iters`` stays open: it means the whole
    run, also when the run is extended later.
    """
    model = config.model
    return replace(
        config,
        model=replace(
            model,
            num_query_groups=model.kv_groups,
            kv_channels=model.head_dim,
            ffn_hidden_size=model.ffn,
            max_position_embeddings=model.max_position_embeddings or config.training.seq_length,
        ),
        parallel=_resolve_parallel(model, config.parallel),
        training=_resolve_training(config, config.parallel.data_parallel_size(world_size)),
    )


def _resolve_parallel(model: ModelConfig, parallel: ParallelConfig) -> ParallelConfig:
    with suppress(ScheduleError):  # reported by the pipeline checks
        parallel = resolve_pipeline(model, parallel)
    return replace(
        parallel,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
    )


def _resolve_training(config: RunConfig, data_parallel_size: int) -> TrainingConfig:
    training = replace(config.training, global_batch_size=full_global_batch_size(config.training, data_parallel_size))
    if training.recompute_granularity != "full":
        return training
    method = training.recompute_method or "uniform"
    default = 1 if method == "uniform" else config.model.num_layers
    return replace(training, recompute_method=method, recompute_num_layers=training.recompute_num_layers or default)
