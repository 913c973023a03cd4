"""Build what a configuration asks for: buckets and their reductions, update rules, and where these update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import BucketKey, ParamShard, matrix_blocks, plan_buckets
from megatron.distributed.sharding import ShardSpec
from megatron.kernels.adam import AdamKernel, adam
from megatron.layers.parameters import trainable
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.optimizer.grad_buffer import Bucket, BucketLayout, BufferPool, GradBuffer, Reduction, ShardedBucket
from megatron.optimizer.grad_compression import Int8Reduction, PowerSGD, RoundedReduction, TopK
from megatron.optimizer.low_precision_state import LowPrecisionRule
from megatron.optimizer.main_params import MainParams
from megatron.optimizer.muon import Muon
from megatron.optimizer.offload import HostMemory, OffloadedOptimizer
from megatron.optimizer.param_groups import ParamGroup, offloaded_params, param_groups
from megatron.optimizer.parameter_store import ParameterStore
from megatron.optimizer.rules import AdamW, ElementwiseRule, UpdateRule, update_rule


def build_grad_buffer(
    specs: Mapping[str, ShardSpec],
    dtypes: Mapping[str, torch.dtype],
    mesh: Mesh,
    grad_accumulator: GradAccumulator,
    device: torch.device,
    config: ParallelConfig,
    uncut: Collection[str] = (),
    seed: int = 0,
) -> GradBuffer:
    """Allocate the gradients of trained parameters, and bind the accumulator to them.

    Args:
        specs: of all parameters, in the order of forward.
        dtypes: of the same parameters.
        mesh: the groups.
        grad_accumulator: will write into the buckets.
        device: of the buffers.
        config: bucket size, ZeRO stage, communication dtype and overlap.
        uncut: parameters that are not divided between ranks, except in ZeRO-3.
        seed: of the run; keys the random numbers of reductions.
    """
    buckets, without_gradients, pool = list[Bucket](), list[BucketLayout](), BufferPool()
    keys = {
        name: BucketKey.of(name, spec, str(dtypes[name]), name in uncut, config.zero_stage)
        for name, spec in specs.items()
    }

    def group_sizes(axes: tuple[str, ...]) -> tuple[int, int]:
        return mesh.optimizer_shard_group(*axes).size, mesh.optimizer_replica_group(*axes).size

    for shape in plan_buckets(specs, keys, config.bucket_size(mesh.dp_cp.size), group_sizes):
        axes, in_bucket = shape.key.axes, {name: specs[name] for name in shape.sizes}
        shards, copies = mesh.optimizer_shard_group(*axes), mesh.optimizer_replica_group(*axes)
        gather = mesh.weight_gather_group(*axes)
        if shape.key.frozen and not shape.key.block:  # whole on every rank
            shards = gather = Group((mesh.rank,))
        dtype = torch.promote_types(dtypes[next(iter(in_bucket))], torch.float32)
        layout = BucketLayout(in_bucket, shape.packing, shards, copies, gather, dtype, device)
        if not shape.key.has_gradients:
            without_gradients.append(layout)
            continue
        reduction = build_reduction(config, layout, seed, len(buckets))
        if config.zero_stage >= 2 and shards.size > 1:
            buckets.append(ShardedBucket(layout, reduction, grad_accumulator.flush, pool))
        else:
            buckets.append(Bucket(layout, reduction, grad_accumulator.flush))
    return GradBuffer(
        trainable(specs),
        buckets,
        without_gradients,
        grad_accumulator,
        device,
        config.zero_stage,
        config.overlap_grad_reduce,
    )


def build_reduction(config: ParallelConfig, layout: BucketLayout, *identity: object) -> Reduction:
    """Create the reduction of a bucket.

    Args:
        config: communication dtype and compression.
        layout: of the bucket.
        identity: keys random numbers: seed of the run and number of the bucket.
    """
    compression, shards, copies = config.compression, layout.shards, layout.copies
    if config.grad_reduce_in_bf16:
        return RoundedReduction(shards, copies, torch.bfloat16)
    if compression is None or (compression.has_errors and copies.size == 1):
        return Reduction(shards, copies)
    if not compression.has_errors:
        return Int8Reduction(shards, copies, *identity)
    blocks = matrix_blocks(layout.packing, layout.specs, shards.rank, shards.size, compression.rank)
    part = layout.zeros(layout.packing.size // shards.size)
    if compression.method == "topk":
        return TopK(shards, copies, blocks, part, compression)
    return PowerSGD(shards, copies, blocks, part, compression, *identity)


def build_optimizer(
    weights: ParameterStore,
    specs: Mapping[str, ShardSpec],
    buckets: GradBuffer,
    mesh: Mesh,
    config: OptimizerConfig,
    seed: int = 0,
    kernel: AdamKernel = adam,
    norm_groups: int = 1,
) -> DistributedOptimizer:
    """Allocate main parameters and state.

    Args:
        weights: of the model.
        specs: of the parameters, by global name.
        buckets: of their gradients.
        mesh: the groups.
        config: rules and their options, clipping, offload.
        seed: of the run; keys the stochastic rounding of bf16 moments.
        kernel: the implementation of Adam; it may need a GPU.
        norm_groups: number of groups of parameters that are clipped apart, also of those that other ranks have.
    """
    in_order = [name for bucket in buckets.buckets for name in bucket.specs if name in buckets.shards]
    on_host = offloaded_params({name: buckets.shards[name].numel for name in in_order}, specs, config)
    memory = HostMemory(on_host, specs, buckets, weights, norm_groups) if on_host else None
    main_params = MainParams(memory.weights if memory else weights.shards, config.store_param_remainders)
    groups = _build_rules(main_params, on_host, specs, buckets, mesh, config, seed, kernel)
    if memory:
        return OffloadedOptimizer(memory, weights, specs, buckets, mesh, config, main_params, groups, norm_groups)
    return DistributedOptimizer(weights, specs, buckets, mesh, config, main_params, groups, norm_groups)


def _build_rules(
    main_params: MainParams,
    on_host: Collection[str],
    specs: Mapping[str, ShardSpec],
    buckets: GradBuffer,
    mesh: Mesh,
    config: OptimizerConfig,
    seed: int,
    kernel: AdamKernel,
) -> list[tuple[ParamGroup, UpdateRule]]:
    """Return the groups of parameters that this rank updates, and their rules.

    The order of groups, and so of Muon's collectives, is the same on all ranks. Those that the host updates come last.
    """
    built: list[tuple[ParamGroup, UpdateRule]] = []
    for group in param_groups(buckets.specs, config, on_host):
        held = replace(group, names=tuple(name for name in group.names if name in buckets.shards))
        divided = group.rule == "muon" and buckets.zero_stage == 3
        if not held.names and not divided:
            continue
        rule: UpdateRule
        if group.rule == "muon":
            gather = partial(buckets.gather_shards, names=group.names) if divided else None
            rule = Muon([main_params[name] for name in held.names], held.names, specs, mesh, config, gather)
        else:
            kernel_here = adam if group.offloaded else kernel
            rule = build_rule(held, main_params, specs, buckets.shards, config, seed, kernel_here)
        built.append((held, rule))
    return built


def build_rule(
    group: ParamGroup,
    main_params: MainParams,
    specs: Mapping[str, ShardSpec],
    shares: Mapping[str, ParamShard],
    config: OptimizerConfig,
    seed: int,
    kernel: AdamKernel = adam,
) -> UpdateRule:
    """Create the elementwise rule of a group, with moments in the configured dtypes.

    Raises:
        TypeError: if a plugin's rule is no subclass of :class:`ElementwiseRule`.
        ValueError: if the rule keeps other state than it declares.
    """
    create = partial(AdamW, kernel=kernel) if group.rule == "adam" else update_rule(group.rule)
    dtypes = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    rule = create([], config)
    if not isinstance(rule, ElementwiseRule):
        raise TypeError(f"optimizer {group.rule}: {type(rule).__name__} is no subclass of {ElementwiseRule.__name__}")
    if set(rule.state) != set(rule.state_kinds):
        raise ValueError(
            f"optimizer {group.rule} keeps state {sorted(rule.state)}, not its state_kinds {sorted(rule.state_kinds)}"
        )
    in_bf16 = {kind: torch.bfloat16 for kind, dtype in dtypes.items() if dtype == "bf16" and kind in rule.state}
    if in_bf16 or any(name in main_params.remainders for name in group.names):
        return LowPrecisionRule(rule, main_params, group.names, specs, shares, in_bf16, seed)
    return create([main_params[name] for name in group.names], config)
