"""Builds what an optimizer is configured to have: the update rules, and the memory of what they update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from megatron.config.run import OptimizerConfig
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import ParamShard
from megatron.distributed.sharding import ShardSpec
from megatron.kernels.adam import AdamKernel, adam
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.low_precision_state import LowPrecisionRule
from megatron.optimizer.main_params import MainParams, ShardMemory
from megatron.optimizer.muon import Muon
from megatron.optimizer.offload import HostMemory
from megatron.optimizer.param_groups import ParamGroup, offloaded_params, param_groups
from megatron.optimizer.parameter_store import ParameterStore
from megatron.optimizer.rules import AdamW, ElementwiseRule, UpdateRule, update_rule


def build_memory(
    specs: Mapping[str, ShardSpec], buckets: GradBuffer, weights: ParameterStore, config: OptimizerConfig
) -> ShardMemory:
    """Return weights and gradients of this rank's shards, in the memory where they are updated."""
    in_order = [name for bucket in buckets.buckets for name in bucket.specs if name in buckets.shards]
    on_host = offloaded_params({name: buckets.shards[name].numel for name in in_order}, specs, config)
    if on_host:
        return HostMemory(on_host, specs, buckets, weights)
    return ShardMemory(weights.shards, buckets.grads)


def build_rules(
    main_params: MainParams,
    memory: ShardMemory,
    specs: Mapping[str, ShardSpec],
    buckets: GradBuffer,
    mesh: Mesh,
    config: OptimizerConfig,
    seed: int,
    kernel: AdamKernel,
) -> list[tuple[ParamGroup, UpdateRule]]:
    """Return the groups of parameters that this rank updates, and their rules.

    The order of groups, and so of Muon's collectives, is the same on all ranks.

    Args:
        main_params: to update.
        memory: of their weights. Parameters that the host updates are in the last groups.
        specs: of the parameters.
        buckets: of the gradients.
        mesh: the groups.
        config: rules and their options.
        seed: of the run; keys the stochastic rounding of bf16 moments.
        kernel: the implementation of Adam; it may need a GPU.
    """
    built: list[tuple[ParamGroup, UpdateRule]] = []
    for group in param_groups(buckets.specs, config, memory.on_host):
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
