"""Time of a training step, predicted from the configuration without torch.

The time of a micro-batch on a stage is that of its matrix products and core attention (FLOPs over the rate that the
hardware reaches), of the bytes that all other operations move, and of the communication that nothing hides. The
simulator of schedules (:mod:`megatron.pipeline.simulate`) makes a step of them, to which reductions, gathers and the
optimizer's update are added as far as they are not hidden behind computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.config.batch import get_num_microbatches
from megatron.config.run import RunConfig
from megatron.distributed.layout import Layout
from megatron.layers.mixers.activations import ActivationShape
from megatron.layers.mixers.registry import block_mixers
from megatron.layers.recompute_plan import RecomputePlan
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import build_program, resolve_pipeline, stage_layers
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from megatron.planner.hardware import Cluster
from megatron.planner.memory import data_parallel_traffic, max_rank_parameters
from megatron.planner.network import seconds

AXES = ("tensor", "context", "expert", "pipeline", "data")
"""Axes of communication."""

PARTS = ("compute", "recompute", "bubble", *AXES, "optimizer")
"""Where the time of a step goes; of communication only what is exposed."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step of the full batch."""

    # Seconds that add up to those of the step, by :data:`PARTS`.
    parts: Mapping[str, float]
    # By :data:`AXES`: bytes that a rank sends in a step, and the seconds that it takes, hidden or not.
    sent: Mapping[str, float]
    communicating: Mapping[str, float]
    # Seconds of F, I and W by stage.
    stages: StageCosts
    # Tokens of a step, over all ranks.
    tokens: int
    # Lines that show how the parts were computed, each with its formula and its numbers.
    explanation: tuple[str, ...] = field(default=(), compare=False)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def bubble(self) -> float:
        """Fraction of a step in which ranks wait for other stages."""
        return self.parts["bubble"] / self.seconds


def step_time(config: RunConfig, world_size: int, cluster: Cluster) -> StepTime:
    """Predict the time of a step.

    Args:
        config: of the run, with its vocabulary size.
        world_size: ranks.
        cluster: that they run on.
    """
    config = _resolved(config)
    layout = Layout.from_config(config.parallel, world_size)
    stages = stage_layers(config.model, config.parallel, config.training.seq_length)
    costs = stage_costs(config, cluster, stages)
    count = get_num_microbatches(config.training, layout.sizes["dp"])
    timeline = step_timeline(config, count, costs)
    busy = sum(timeline.busy) / len(timeline.busy)
    sent = sum(data_parallel_traffic(config, world_size).values())
    replicas = layout.sizes["dp"] * layout.sizes["cp"]
    reducing = seconds(
        cluster,
        "all-gather",
        sent,
        cluster.group(replicas, config.parallel.tensor_model_parallel_size),
    )
    state = max_rank_parameters(config) * 36 / (replicas if config.parallel.zero_stage else 1)
    none = dict.fromkeys(AXES, 0.0)
    parts = dict.fromkeys(PARTS, 0.0) | {
        "compute": busy,
        "bubble": timeline.makespan - busy,
        "data": max(0.0, reducing - 0.5 * timeline.makespan / count),
        "optimizer": state / cluster.accelerator.bandwidth / cluster.efficiency.memory,
    }
    tokens = count * layout.sizes["dp"] * config.training.micro_batch_size * config.training.seq_length
    return StepTime(parts, none | {"data": sent}, none | {"data": reducing}, costs, tokens)


def step_timeline(config: RunConfig, microbatches: int, costs: StageCosts) -> Timeline:
    """Return the simulated timeline of a step; ``config`` has a resolved pipeline."""
    return simulate(build_program(config.parallel, microbatches), costs)


def stage_costs(config: RunConfig, cluster: Cluster, stages: tuple[StageLayers, ...]) -> StageCosts:
    """Return the seconds of F, I and W of a micro-batch, by stage."""
    model, shape, efficiency = config.model, ActivationShape.of(config), cluster.efficiency
    peak = cluster.accelerator.peak("bf16")
    forward, backward = [], []
    for stage in stages:
        plan = RecomputePlan.from_config(config.training, stage.count)
        ahead = back = 0.0
        for place, layer in enumerate(stage.layers):
            keys = model.pattern(layer).mean_keys(config.training.seq_length)
            for mixer in block_mixers(model, layer):
                for product in mixer.matmuls(model, plan, keys).values():
                    rate = peak * (efficiency.matmul if product.of_weight else efficiency.attention)
                    once = product.flops * shape.tokens / shape.tp / rate
                    ahead += once
                    back += once * (product.gradients + product.again + (place < plan.blocks))
        if stage.last:
            once = 2.0 * model.hidden_size * model.vocab * shape.tokens / shape.tp / peak / efficiency.matmul
            ahead, back = ahead + once, back + 2 * once
        forward.append(ahead)
        backward.append(back)
    half = tuple(each / 2 for each in backward)
    return StageCosts(tuple(forward), half, half)


def _resolved(config: RunConfig) -> RunConfig:
    """Return the configuration with the number of stages per rank and the schedule filled in."""
    return replace(config, parallel=resolve_pipeline(config.model, config.parallel))
