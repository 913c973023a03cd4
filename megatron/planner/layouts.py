"""The space of layouts: values of the options that a planner chooses, axis by axis.

A layout is a choice of options that change no number of the training (role ``free``). Options that are given stay as
they are; the others start from their defaults. An axis lists its choices, each a set of options with their values, from
what the axes before it have chosen. Whether a run accepts a layout is for its checks to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.config.batch import full_global_batch_size
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import divisors, nearest
from megatron.pipeline.plan import required_virtual_stages, schedule_name, virtual_stages

Choice = Mapping[str, Any]
"""Values of options by name."""

CHOSEN = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "tp_comm_overlap",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
    "micro_batch_size",
    "use_distributed_optimizer",
    "data_parallel_sharding_strategy",
    "num_distributed_optimizer_instances",
    "overlap_param_gather",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "optimizer_cpu_offload",
    "param_cpu_offload",
    "cpu_offloading_num_layers",
)
"""Options that the planner chooses unless they are given."""

MOST_RECOMPUTE_COUNTS = 8
"""Numbers of recomputed blocks per stage that are tried: as many, evenly spaced."""

LEAST_SEQUENCE_PART = 256
"""Tokens of a sample on a context-parallel rank below which CP is not tried."""

MOST_VIRTUAL_STAGES = 16
"""Most stages of a pipeline rank that are tried."""


NO_RECOMPUTATION: Choice = {
    name: SETTINGS[name].default
    for name in ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
}
NO_OFFLOAD: Choice = {
    name: SETTINGS[name].default for name in ("optimizer_cpu_offload", "param_cpu_offload", "cpu_offloading_num_layers")
}


def describe(choice: Choice) -> str:
    """Return a choice of one axis in words."""
    match choice:
        case {"tp_comm_overlap": overlap}:
            return "TP communication overlapped" if overlap else "TP communication not overlapped"
        case {"cp_comm_type": method, "hierarchical_context_parallel_sizes": sizes}:
            return " ".join(["CP by", method, *map(str, sizes)])
        case {"expert_tensor_parallel_size": size}:
            return f"expert TP {size}"
        case {"pipeline_schedule": name, "num_virtual_stages_per_pipeline_rank": stages}:
            return f"VPP {stages}" if stages else f"schedule {name or '1f1b'}"
        case {"num_distributed_optimizer_instances": instances}:
            stage = ParallelConfig(**{name: choice[name] for name in choice}).zero_stage
            overlap = " without overlap" if stage and stage < 3 and not choice["overlap_param_gather"] else ""
            return f"ZeRO-{stage}{overlap}" + (f", {instances} instances" if instances > 1 else "")
        case {"recompute_granularity": None}:
            return "no recomputation"
        case {"recompute_granularity": "selective", "recompute_modules": modules}:
            return f"recompute {' '.join(modules)}"
        case {"recompute_granularity": _, "recompute_num_layers": count}:
            return f"recompute {count} blocks of a stage" if count else "recompute all blocks"
        case {"optimizer_cpu_offload": optimizer, "param_cpu_offload": weights, "cpu_offloading_num_layers": layers}:
            parts = [*["optimizer"] * optimizer, *["weights"] * weights, *["activations"] * bool(layers)]
            return f"offload {' and '.join(parts) or 'nothing'}"
    raise ValueError(f"no axis has the options {', '.join(choice)}")


def apply(config: RunConfig, choice: Choice) -> RunConfig:
    """Return the configuration with other values of some options."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in choice.items():
        groups.setdefault(SETTINGS[name].group, {})[name] = value
    for group, values in groups.items():
        config = config.with_group(group, replace(config.group(group), **values))
    return config


def choices_of(config: RunConfig) -> dict[str, Any]:
    """Return all choices of a configuration, resolved or not, as the space spells them."""
    parallel = config.parallel
    stages, schedule = virtual_stages(config.model, parallel), parallel.pipeline_schedule
    usual = schedule in (None, schedule_name(replace(parallel, pipeline_schedule=None), stages))
    needed = required_virtual_stages(parallel) if parallel.pipeline_schedule else None
    found = {name: SETTINGS[name].value_in(config) for name in CHOSEN}
    return found | {
        "pipeline_schedule": None if usual else schedule,
        "num_virtual_stages_per_pipeline_rank": None if stages == (1 if usual else needed) else stages,
        "expert_tensor_parallel_size": parallel.expert_tp if config.model.num_experts else None,
    }


@dataclass(frozen=True)
class LayoutSpace:
    """The layouts of a run on so many ranks."""

    config: RunConfig
    world_size: int
    # Ranks of a node.
    node_size: int
    # Names of options that keep their values.
    given: frozenset[str] = frozenset()

    @cached_property
    def start(self) -> RunConfig:
        """The configuration in which all options that are not given have their defaults."""
        return apply(self.config, {name: SETTINGS[name].default for name in CHOSEN if name not in self.given})

    @cached_property
    def batch(self) -> int:
        """Samples of a step."""
        return full_global_batch_size(self.config.training, self.world_size)

    def allows(self, choice: Choice) -> bool:
        """Return True if a choice keeps all given options."""
        return all(
            value == SETTINGS[name].value_in(self.config) for name, value in choice.items() if name in self.given
        )

    def cores(self) -> Iterator[Choice]:
        """Yield the choices of all that determines the work of a micro-batch: TP, CP, EP, and its size."""
        for tensor in self._allowed(self.tensor()):
            for context in self._allowed(self.context(tensor["tensor_model_parallel_size"])):
                for expert in self._allowed(self.expert(tensor["tensor_model_parallel_size"])):
                    for micro in self._allowed(self.micro()):
                        yield {**tensor, **context, **expert, **micro}

    def tensor(self) -> Iterator[Choice]:
        """Yield the choices of tensor and sequence parallelism, overlapped or not; up to the ranks of two nodes."""
        for size in divisors(self.world_size):
            if size > max(8, 2 * self.node_size):
                return
            sharded = SETTINGS["sequence_parallel"].value_in(self.config) if self._is("sequence_parallel") else size > 1
            for overlap in (False, True)[: 1 + sharded]:
                yield {
                    "tensor_model_parallel_size": size,
                    "sequence_parallel": sharded,
                    "tp_comm_overlap": overlap,
                }

    def context(self, tp: int) -> Iterator[Choice]:
        """Yield the choices of context parallelism with each of its methods."""
        model, length = self.config.model, self.config.training.seq_length
        for size in divisors(self.world_size // tp):
            if size > 1 and length // size < LEAST_SEQUENCE_PART:
                return
            parallel = replace(self.config.parallel, tensor_model_parallel_size=tp, context_parallel_size=size)
            of_node = max(1, self.node_size // tp)
            methods = [
                (each.cp_comm_type, each.hierarchical_context_parallel_sizes)
                for each in parallel.context_parallel_methods(model.num_attention_heads, max(size, of_node))
            ]
            for method, sizes in [("p2p", ())] if size == 1 else [*methods, ("all_gather", ())]:
                yield {
                    "context_parallel_size": size,
                    "cp_comm_type": method,
                    "hierarchical_context_parallel_sizes": sizes,
                }

    def expert(self, tp: int) -> Iterator[Choice]:
        """Yield the choices of expert parallelism; of the TP of experts 1 and that of the dense layers."""
        experts = self.config.model.num_experts
        for size in divisors(experts or 1):
            for of_experts in sorted({1, tp}) if experts else [None]:
                if self.world_size % (size * (of_experts or 1)) == 0:
                    yield {"expert_model_parallel_size": size, "expert_tensor_parallel_size": of_experts}

    def micro(self) -> Iterator[Choice]:
        """Yield sizes of a micro-batch: up to 8 all that divide the batch, beyond powers of two up to 128."""
        for size in divisors(self.batch):
            if size <= 8 or (size <= 128 and size & (size - 1) == 0):
                yield {"micro_batch_size": size}

    def pipelines(self, core: Choice) -> Iterator[Choice]:
        """Yield the choices of stages and schedule for a core: those with whole micro-batches and enough layers."""
        layers, ranks = self.config.model.num_layers, core["tensor_model_parallel_size"] * core["context_parallel_size"]
        for size in divisors(self.world_size // ranks):
            samples = core["micro_batch_size"] * (self.world_size // ranks // size)
            if size > layers + 2 or (self.batch % samples and not self.config.training.pad_global_batch):
                continue
            of_experts = core["expert_model_parallel_size"] * (core["expert_tensor_parallel_size"] or 1)
            if self.world_size // size % of_experts:
                continue
            for choice in self._schedules(size, layers):
                if self.allows(choice):
                    yield choice

    def _schedules(self, ranks: int, layers: int) -> Iterator[Choice]:
        name, stages = "pipeline_schedule", "num_virtual_stages_per_pipeline_rank"
        pipeline = {"pipeline_model_parallel_size": ranks}
        if {name, stages} <= self.given:
            yield pipeline | {key: SETTINGS[key].value_in(self.config) for key in (name, stages)}
            return
        if self._is(name) and SETTINGS[name].value_in(self.config) not in (None, "interleaved"):
            yield pipeline | {name: SETTINGS[name].value_in(self.config), stages: None}
            return
        yield pipeline | {name: None, stages: None}
        if ranks == 1:
            return
        for count in range(2, min(MOST_VIRTUAL_STAGES, layers // ranks) + 1):
            if layers % (ranks * count) == 0:
                yield pipeline | {name: SETTINGS[name].value_in(self.config) if self._is(name) else None, stages: count}
        for other in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
            yield pipeline | {name: other, stages: None}

    def sharding(self, core: Choice, pipeline: Choice) -> Iterator[Choice]:
        """Yield the ZeRO stages, each with one optimizer instance, and with one per node."""
        tp, cp = core["tensor_model_parallel_size"], core["context_parallel_size"]
        replicas = self.world_size // tp // pipeline["pipeline_model_parallel_size"]
        within = max(n for n in divisors(replicas) if n == 1 or n * tp <= self.node_size)
        names = "use_distributed_optimizer", "data_parallel_sharding_strategy", "overlap_param_gather"
        instances = "num_distributed_optimizer_instances"
        for values in (
            (False, None, False),
            (True, None, True),
            (True, None, False),
            (False, "optim_grads", True),
            (False, "optim_grads_params", False),
        ):
            choice = dict(zip(names, values)) | {instances: 1}
            if values[1] is not None and self._is(names[0]):
                choice[names[0]] = SETTINGS[names[0]].value_in(self.config)
            if self.allows(choice):
                yield choice
            choice |= {instances: replicas // within}
            if replicas > within > 1 and cp <= within and any(values) and self.allows(choice):
                yield choice

    def recomputations(self, stages: int) -> Iterator[Choice]:
        """Yield what to compute again in backward, besides nothing, for so many stages of a pipeline."""
        names = "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"
        default = SETTINGS["recompute_modules"].default
        latents = ("mla_up_proj",) * self.config.model.has_latent_attention
        for modules in (default, (*default, "core_attn"), ("layernorm", "mlp")):
            yield dict(zip(names, ("selective", None, None, (*modules, *latents))))
        blocks = -(-self.config.model.num_layers // stages)
        counts = {round(blocks * part / MOST_RECOMPUTE_COUNTS) for part in range(1, MOST_RECOMPUTE_COUNTS)}
        for count in sorted(counts - {0, blocks}):
            yield dict(zip(names, ("full", "block", count, default)))
        yield dict(zip(names, ("full", None, None, default)))

    def offloads(self, sharding: Choice, stages: int) -> Iterator[Choice]:
        """Yield what to keep in the memory of the host, besides nothing."""
        blocks = -(-self.config.model.num_layers // stages)
        names = "optimizer_cpu_offload", "param_cpu_offload", "cpu_offloading_num_layers"
        of_weights = sharding["data_parallel_sharding_strategy"] == "optim_grads_params"
        for optimizer, weights in ((False, False), (True, False), (True, True))[: 2 + of_weights]:
            for layers in (0, blocks):
                if optimizer or layers:
                    yield dict(zip(names, (optimizer, weights, layers)))

    def moves(self, config: RunConfig) -> Iterator[tuple[str, Choice]]:
        """Yield the changes of one choice of a layout, each with its name; to the next sizes of an axis.

        Args:
            config: with the layout, which may be outside of the space.
        """
        now = choices_of(config)
        tp, pp = now["tensor_model_parallel_size"], now["pipeline_model_parallel_size"]
        stages = pp * virtual_stages(config.model, config.parallel)
        sizes: tuple[tuple[str, str, Iterator[Choice]], ...] = (
            ("TP", "tensor_model_parallel_size", self.tensor()),
            ("CP", "context_parallel_size", self.context(tp)),
            ("PP", "pipeline_model_parallel_size", self._ranks_of_pipeline()),
            ("EP", "expert_model_parallel_size", self.expert(tp)),
            ("micro-batch", "micro_batch_size", self.micro()),
        )
        for word, name, choices in sizes:
            by_size: dict[int, Choice] = {}
            for choice in choices:
                by_size.setdefault(choice[name], choice)
            for size in nearest(now[name], by_size):
                choice = dict(by_size[size])
                if "expert_tensor_parallel_size" in choice:
                    choice["expert_tensor_parallel_size"] = now["expert_tensor_parallel_size"]
                yield f"{word} {size}", choice
        others: tuple[Iterator[Choice], ...] = (
            iter([{"tp_comm_overlap": not now["tp_comm_overlap"]}] if now["sequence_parallel"] else []),
            (choice for choice in self.context(tp) if choice["context_parallel_size"] == now["context_parallel_size"]),
            (
                choice
                for choice in self.expert(tp)
                if choice["expert_model_parallel_size"] == now["expert_model_parallel_size"]
            ),
            self._schedules(pp, config.model.num_layers),
            self.sharding(now, now),
            iter([NO_RECOMPUTATION]),
            self.recomputations(stages),
            iter([NO_OFFLOAD]),
            self.offloads(now, stages),
        )
        for choices in others:
            for choice in choices:
                if any(now[name] != value for name, value in choice.items()):
                    yield describe(choice), choice

    def _ranks_of_pipeline(self) -> Iterator[Choice]:
        for size in divisors(self.world_size):
            if size <= self.config.model.num_layers + 2:
                yield {"pipeline_model_parallel_size": size}

    def _allowed(self, choices: Iterator[Choice]) -> list[Choice]:
        return [choice for choice in choices if self.allows(choice)]

    def _is(self, name: str) -> bool:
        return name in self.given
