"""Build everything that a training step needs from a validated configuration.

The order is: process groups, kernels, model chunks (:mod:`megatron.training.build_model`), optimizer, pipeline, data,
components (:mod:`megatron.training.features`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.distributed.timing import Clock, no_clock
from megatron.optimizer.build import build_grad_buffer, build_optimizer
from megatron.optimizer.param_groups import rule_of
from megatron.optimizer.parameter_store import ParameterStore
from megatron.optimizer.sharded_parameter_store import ShardedParameterStore
from megatron.training.batch_reader import BatchReader, Progress
from megatron.training.build_model import build_context, build_mesh, build_pipeline, build_stages, choose_device
from megatron.training.components.precision import LossScaler
from megatron.training.components.slow_ranks import step_timers
from megatron.training.features import build_components
from megatron.training.trainer import Trainer


def build_trainer(
    config: RunConfig,
    rank: int,
    world_size: int,
    fresh: bool = True,
    device: torch.device | None = None,
    clock: Clock = no_clock,
) -> Trainer:
    """Build the model and everything around it on this rank; collective over all ranks.

    Args:
        config: validated and resolved (derived values are filled in).
        rank: global rank.
        world_size: more than one requires torch.distributed to be initialised.
        fresh: True initialises the weights and starts at step 0; False leaves both for a checkpoint to set.
        device: device to use instead of the configured one; on ``meta`` nothing is allocated.
        clock: times the phases ``groups``, ``kernels``, ``model``, ``optimizer`` and ``data``.

    Raises:
        UserError: if the device or a kernel is not available, or an option names a parameter that does not exist.
        DataError: if the data of a fresh run cannot be opened.
    """
    device, parallel = device or choose_device(config.training.device), config.parallel
    with clock("groups"):
        mesh = build_mesh(config, rank, world_size)
    with clock("kernels"):
        context, notes = build_context(config, mesh, device, draw_initial_values=fresh, allocate=False)
    with clock("model"):
        chunks = build_stages(config, context)
    specs, params = context.specs, context.params
    with clock("optimizer"):
        dtypes = {name: param.dtype for name, param in params.items()}
        uncut = {name for name, spec in specs.items() if rule_of(name, spec, config.optimizer) == "muon"}
        buckets = build_grad_buffer(
            specs, dtypes, mesh, context.grad_accumulator, device, parallel, uncut, config.training.seed
        )
        store = ShardedParameterStore if parallel.zero_stage == 3 else ParameterStore

        def initialize(name: str, zeros: Tensor) -> None:
            if not specs[name].frozen or config.checkpoint.pretrained_checkpoint is None:
                context.initialize(name, zeros)

        weights = store(params, buckets, parallel, initialize)
        optimizer = build_optimizer(
            weights,
            specs,
            buckets,
            mesh,
            config.optimizer,
            config.training.seed,
            context.kernels.adam,
            config.model.norm_groups,
        )
    if context.offload is not None:
        context.offload.leave_out(buffer.whole for buffer in weights.buffers)
    for chunk in chunks.values():
        weights.gather_before_use(chunk.parts)
    timers, progress = step_timers(config, mesh, device), Progress()
    trainer = Trainer(
        config,
        mesh,
        device,
        chunks,
        build_pipeline(config, context, chunks),
        specs,
        params,
        buckets,
        optimizer,
        LossScaler.from_config(config.precision, device),
        timers,
        progress,
        BatchReader(config, progress, mesh, device, context.cp, timers),
        tuple(notes),
        clock,
    )
    trainer.components = build_components(trainer)
    if fresh:
        trainer.start_at(0, 0)
    return trainer
