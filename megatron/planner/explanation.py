"""The formulas behind a predicted step, with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.config.run import RunConfig
from megatron.config.text import format_bytes
from megatron.layers.mixers.activations import ActivationShape
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.actions import FORWARD, INPUT, WEIGHT
from megatron.pipeline.plan import resolve_pipeline
from megatron.planner.block_time import KernelRates, ProductShape
from megatron.planner.communication import Collective, block_collectives
from megatron.planner.hardware import Cluster
from megatron.planner.network import bus_bandwidth, seconds
from megatron.planner.stage_time import stage_times
from megatron.planner.step_time import StepTime


def explain_step(config: RunConfig, world_size: int, cluster: Cluster, time: StepTime) -> Iterator[str]:
    """Yield the formulas of the time of a step, each with its numbers and its result."""
    config = replace(config, parallel=resolve_pipeline(config.model, config.parallel))
    parallel, accelerator, efficiency = config.parallel, cluster.accelerator, cluster.efficiency
    yield (
        f"rates: {accelerator.peak('bf16') / 1e12:,.0f} TFLOP/s x {efficiency.matmul:.2f} in matrix products, "
        f"x {efficiency.attention:.2f} in attention; memory {accelerator.bandwidth / 1e9:,.0f} GB/s x "
        f"{efficiency.memory:.2f}; link {cluster.link.bandwidth / 1e9:,.0f} GB/s x {efficiency.link:.2f}; network "
        f"{cluster.network.bandwidth / 1e9:,.1f} GB/s x {efficiency.network:.2f}"
    )
    yield from _block(config, cluster)
    stages, count, ranks = time.stages, time.microbatches, parallel.pipeline_model_parallel_size
    longest = max(range(len(stages.forward)), key=lambda s: stages.forward[s] + stages.input[s] + stages.weight[s])
    phases = stages.forward[longest], stages.input[longest], stages.weight[longest]
    yield f"slowest stage = F + I + W = {' + '.join(f'{1e3 * t:.3f}' for t in phases)} = {1e3 * sum(phases):.3f} ms"
    if ranks > 1:
        virtual = parallel.num_virtual_stages_per_pipeline_rank or 1
        yield (
            f"bubble of a textbook's pipeline = (p - 1) / (v m + p - 1) = {ranks - 1} / ({virtual} x {count} + "
            f"{ranks - 1}) = {(ranks - 1) / (virtual * count + ranks - 1):.1%}; {parallel.pipeline_schedule} with "
            f"these stages, simulated: {time.bubble:.1%} of the step"
        )
    shown = [f"{name} {second:.4f}" for name, second in time.parts.items() if second]
    yield f"step = {' + '.join(shown)} = {time.seconds:.4f} s"


def _block(config: RunConfig, cluster: Cluster) -> Iterator[str]:
    """Yield the products and the communication of the first block that differs from no other in the middle."""
    model, shape, rates = config.model, ActivationShape.of(config), KernelRates.of(config, cluster)
    layer, plan = model.num_layers // 2, RecomputePlan.from_config(config.training, 1)
    keys = model.pattern(layer).mean_keys(config.training.seq_length)
    yield f"block {layer}, {shape.tokens:,} tokens of a micro-batch on a rank:"
    for mixer in block_mixers(model, layer):
        specs = mixer.parameters(model, shape.sharding)
        for name, product in mixer.matmuls(model, plan, keys).items():
            flops, spec = product.flops * shape.tokens / shape.tp, specs.get(f"{name}.weight")
            if spec is None:
                share = cluster.efficiency.matmul if product.of_weight else cluster.efficiency.attention
                yield (
                    f"  {mixer.module}.{name}: {flops / 1e9:,.1f} GFLOP, at least "
                    f"{1e6 * rates.arithmetic(flops, share):,.0f} us"
                )
                continue
            size = ProductShape.of(spec, flops)
            moved = (size.taken + size.weight + size.given) * shape.width
            grouped = f"{size.experts} x " if size.experts > 1 else ""
            yield (
                f"  {mixer.module}.{name}: {grouped}[{size.rows:,.0f}, {size.inputs:,}] x [{size.inputs:,}, "
                f"{size.outputs:,}] = {flops / 1e9:,.1f} GFLOP, {moved / 1e6:,.0f} MB: "
                f"{1e6 * rates.product(flops, moved):,.0f} us"
            )
    for each in block_collectives(config, layer, plan.blocks > 0):
        yield f"  {_collective(each, cluster)}"
    forward, back, weight = stage_times(config, cluster).block(layer, plan.blocks > 0).phases
    yield (
        f"  with all other operations by the bytes they move: {FORWARD} {1e3 * forward:.3f}, {INPUT} {1e3 * back:.3f}, "
        f"{WEIGHT} {1e3 * weight:.3f} ms"
    )


def _collective(each: Collective, cluster: Cluster) -> str:
    group = cluster.group(*each.ranks)
    takes = each.times * seconds(cluster, each.operation, each.size, group)
    nodes = "in a node" if group.per_node == group.size else f"{group.per_node} a node"
    rate = bus_bandwidth(cluster, group)
    hidden = f", hidden behind the {each.behind}" if each.behind else ""
    times = f"{each.times:g} x " if each.times != 1 else ""
    return (
        f"{each.axis} {each.operation} of {each.name} ({each.when}): {times}{format_bytes(each.size)} over "
        f"{group.size} ranks, {nodes}, {rate / 1e9:,.0f} GB/s: {1e6 * takes:,.0f} us{hidden}"
    )
