"""The space of layouts: values of the options that a planner chooses, axis by axis.

A layout is a choice of options that change no number of the training (role ``free``). Options that are given stay as
they are; the others start from their defaults. An axis lists its choices, each a set of options with their values, from
what the axes before it have chosen. Whether a run accepts a layout is for its checks to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.config.batch import full_global_batch_size
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import counted, divisors, nearest
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import required_virtual_stages, schedule_name, virtual_stages

Choice = Mapping[str, Any]
"""Values of options by name."""

TENSOR = TP, SEQUENCE, OVERLAP = "tensor_model_parallel_size", "sequence_parallel", "tp_comm_overlap"
CONTEXT = CP, METHOD, HIERARCHY = "context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"
EXPERT = EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
MICRO = ("micro_batch_size",)
PIPELINE = PP, STAGES, SCHEDULE = (
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_schedule",
)
SHARDING = OPTIMIZER, STRATEGY, GATHER, INSTANCES = (
    "use_distributed_optimizer",
    "data_parallel_sharding_strategy",
    "overlap_param_gather",
    "num_distributed_optimizer_instances",
)
RECOMPUTATION = GRANULARITY, _, BLOCKS, MODULES = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
OFFLOAD = "optimizer_cpu_offload", "param_cpu_offload", "cpu_offloading_num_layers"

UNSHARDED: Choice = dict(zip(SHARDING, (False, None, False, 1)))

NO_OFFLOAD: Choice = {name: SETTINGS[name].default for name in OFFLOAD}

AXES = (TENSOR, CONTEXT, EXPERT, MICRO, PIPELINE, SHARDING, RECOMPUTATION, OFFLOAD)
"""Options that the planner chooses unless they are given, by axis."""

CHOSEN = tuple(name for axis in AXES for name in axis)
"""All of these options."""

GRID = (TP, CP, PP, EP, ETP)
"""Options that size the grid of ranks."""

MOST_MICRO_BATCH, ALL_MICRO_BATCHES = 128, 8
"""Largest micro-batch that is tried; up to the second number all that divide the batch are, beyond it powers of two."""

LEAST_SEQUENCE_PART = 1024
"""Tokens of a sample on a context-parallel rank below which CP is not tried, unless it is given: its matrix products
and messages are too small to be fast, and ZeRO and recomputation save the same memory."""

MOST_VIRTUAL_STAGES = 16
"""Most stages of a pipeline rank that are tried."""

DELAYING_SCHEDULES = "zb-h1", "zb-h2", "zb-v", "dualpipe-v"
"""Schedules besides 1F1B and the interleaved one: those that delay weight gradients."""

RECOMPUTED_PARTS = 8
"""Recomputation of some blocks of a stage is tried in eighths."""


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
    needed = 1 if usual else required_virtual_stages(parallel)
    return {name: SETTINGS[name].value_in(config) for name in CHOSEN} | {
        SCHEDULE: None if usual else schedule,
        STAGES: None if stages == needed else stages,
        ETP: parallel.expert_tp if config.model.num_experts else None,
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
        case {"num_distributed_optimizer_instances": instances, "overlap_param_gather": overlaps}:
            stage = ParallelConfig(**choice).zero_stage
            how = " without overlap" * (stage in (1, 2) and not overlaps)
            return f"ZeRO-{stage}{how}" + f", {instances} instances" * (instances > 1)
        case {"recompute_granularity": None}:
            return "no recomputation"
        case {"recompute_granularity": "selective", "recompute_modules": modules}:
            return f"recompute {', '.join(modules)}"
        case {"recompute_granularity": _, "recompute_num_layers": count}:
            return f"recompute {counted(count, 'block')} of a stage" if count else "recompute all blocks"
        case {"optimizer_cpu_offload": optimizer, "param_cpu_offload": weights, "cpu_offloading_num_layers": layers}:
            parts = [*["optimizer"] * optimizer, *["weights"] * weights, *["activations"] * bool(layers)]
            return f"offload {' and '.join(parts)}" if parts else "no offload"
    raise ValueError(f"no axis has the options {', '.join(choice)}")


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
        names = (name for name in CHOSEN if name not in self.given)
        return apply(self.config, {name: SETTINGS[name].default for name in names})

    @cached_property
    def batch(self) -> int:
        """Samples of a step."""
        return full_global_batch_size(self.config.training, self.world_size)

    def data_parallel(self, chosen: Choice) -> int:
        """Return the data-parallel size that the other axes leave."""
        return self.world_size // (chosen[TP] * chosen[CP] * chosen[PP])

    def cores(self) -> Iterator[Choice]:
        """Yield the choices of all that determines the work of a micro-batch: TP, CP, EP, and its size."""
        for tensor in self._kept(self._tensor()):
            for context in self._kept(self._context(tensor[TP])):
                for expert in self._kept(self._expert(tensor[TP])):
                    for micro in self._kept(self._micro()):
                        yield {**tensor, **context, **expert, **micro}

    def pipelines(self, core: Choice) -> Iterator[Choice]:
        """Yield the choices of stages and schedule for a core: those with whole micro-batches and whole EP groups."""
        ranks = self.world_size // (core[TP] * core[CP])
        for size in self._kept(self._pipeline_ranks()):
            samples = core["micro_batch_size"] * (ranks // size[PP])
            if ranks % size[PP] or (self.batch % samples and not self.config.training.pad_global_batch):
                continue
            if self.world_size // size[PP] % (core[EP] * (core[ETP] or 1)) == 0:
                for schedule in self._kept(self._schedules(size[PP])):
                    yield {**size, **schedule}

    def shardings(self, chosen: Choice) -> list[Choice]:
        """Return the choices of what data-parallel ranks shard."""
        return self._kept(self._shardings(chosen))

    def recomputations(self, chosen: Choice) -> list[Choice]:
        """Return the choices of what backward computes again, the first one the least."""
        return self._kept(self._recomputations(chosen))

    def offloads(self, chosen: Choice) -> list[Choice]:
        """Return the choices of what is kept in the memory of the host, the first one the least."""
        return self._kept(self._offloads(chosen))

    def layouts(self) -> Iterator[Choice]:
        """Yield all layouts, valid or not."""
        for core in self.cores():
            for pipeline in self.pipelines(core):
                chosen = {**core, **pipeline}
                for sharding in self.shardings(chosen):
                    for recomputation in self.recomputations(chosen):
                        for offload in self.offloads({**chosen, **sharding}):
                            yield {**chosen, **sharding, **recomputation, **offload}

    def moves(self, config: RunConfig) -> Iterator[tuple[str, Choice]]:
        """Yield the changes of one choice of a layout, each with its name; to the next sizes of an axis.

        Args:
            config: with the layout, which may be outside of the space.
        """
        now = choices_of(config)
        sizes = (
            ("TP", TP, self._tensor()),
            ("CP", CP, self._context(now[TP])),
            ("PP", PP, self._pipeline_ranks()),
            ("EP", EP, ({EP: choice[EP]} for choice in self._expert(now[TP]))),
            ("micro-batch", *MICRO, self._micro()),
        )
        for word, name, choices in sizes:
            by_size: dict[int, Choice] = {}
            for choice in choices:
                alike = all(now[other] == value for other, value in choice.items() if other in (OVERLAP, METHOD))
                if alike or choice[name] not in by_size:
                    by_size[choice[name]] = choice
            for size in nearest(now[name], by_size):
                yield f"{word} {size}", by_size[size]
        others: tuple[Iterable[Choice], ...] = (
            [{OVERLAP: not now[OVERLAP]}] if now[SEQUENCE] else [],
            (choice for choice in self._context(now[TP]) if choice[CP] == now[CP]),
            ({ETP: choice[ETP]} for choice in self._expert(now[TP]) if choice[EP] == now[EP]),
            self._schedules(now[PP]),
            self._shardings(now),
            self._recomputations(now),
            self._offloads(now),
        )
        for alternatives in others:
            for choice in alternatives:
                if any(now[name] != value for name, value in choice.items()):
                    yield describe(choice), choice

    def _tensor(self) -> Iterator[Choice]:
        """Yield tensor and sequence parallelism, overlapped or not, up to the ranks of two nodes."""
        for size in divisors(self.world_size):
            if size > max(8, 2 * self.node_size):
                return
            sharded = self.start.parallel.sequence_parallel if SEQUENCE in self.given else size > 1
            for overlap in (True, False) if sharded else (False,):
                yield dict(zip(TENSOR, (size, sharded, overlap)))

    def _context(self, tp: int) -> Iterator[Choice]:
        """Yield context parallelism with each of its methods."""
        start = self.start.parallel
        yield dict(zip(CONTEXT, (1, start.cp_comm_type, start.hierarchical_context_parallel_sizes)))
        for size in divisors(self.world_size // tp)[1:]:
            if self.config.training.seq_length // size < LEAST_SEQUENCE_PART:
                return
            grid = replace(start, tensor_model_parallel_size=tp, context_parallel_size=size)
            heads, in_node = self.config.model.num_attention_heads, max(1, self.node_size // tp)
            ways = [way for most in (in_node, size) for way in grid.context_parallel_methods(heads, most)]
            methods = ((each.cp_comm_type, each.hierarchical_context_parallel_sizes) for each in ways)
            for method in dict.fromkeys((*methods, ("all_gather", ()))):
                yield dict(zip(CONTEXT, (size, *method)))

    def _expert(self, tp: int) -> Iterator[Choice]:
        """Yield expert parallelism; TP of the experts 1, and as of the dense layers."""
        experts = self.config.model.num_experts
        for size in divisors(experts or 1):
            for of_experts in sorted({1, tp}) if experts else (None,):
                if self.world_size % (size * (of_experts or 1)) == 0:
                    yield dict(zip(EXPERT, (size, of_experts)))

    def _micro(self) -> Iterator[Choice]:
        """Yield sizes of a micro-batch."""
        for size in divisors(self.batch):
            if size <= ALL_MICRO_BATCHES or (size <= MOST_MICRO_BATCH and size & (size - 1) == 0):
                yield dict(zip(MICRO, (size,)))

    def _pipeline_ranks(self) -> Iterator[Choice]:
        for size in divisors(self.world_size):
            if size <= self.config.model.num_layers + 2:
                yield {PP: size}

    def _schedules(self, ranks: int) -> Iterator[Choice]:
        """Yield schedules and numbers of stages."""
        yield {STAGES: None, SCHEDULE: None}
        if ranks > 1:
            layers = self.config.model.num_layers
            for count in range(2, min(MOST_VIRTUAL_STAGES, layers // ranks) + 1):
                if layers % (ranks * count) == 0:
                    yield {STAGES: count, SCHEDULE: None}
            for name in DELAYING_SCHEDULES:
                yield {STAGES: None, SCHEDULE: name}

    def _shardings(self, chosen: Choice) -> Iterator[Choice]:
        """Yield the ZeRO stages, each with one optimizer instance, and with one per node."""
        ranks = self.data_parallel(chosen) * chosen[CP]
        in_node = max(n for n in divisors(ranks) if n == 1 or n * chosen[TP] <= self.node_size)
        kept = self.start.parallel.use_distributed_optimizer
        for values in (
            (False, None, False),
            (True, None, True),
            (True, None, False),
            (kept, "optim_grads", True),
            (kept, "optim_grads", False),
            (kept, "optim_grads_params", False),
        ):
            for instances in (1, ranks // in_node) if any(values) and 1 < in_node < ranks else (1,):
                yield dict(zip(SHARDING, (*values, instances)))

    def _recomputations(self, chosen: Choice) -> Iterator[Choice]:
        """Yield recomputation of nothing, of modules, of some blocks of every stage, and of all."""
        default = SETTINGS[MODULES].default
        latents = ("mla_up_proj",) * self.config.model.has_latent_attention
        yield dict(zip(RECOMPUTATION, (None, None, None, default)))
        for modules in (default, (*default, "core_attn"), ("layernorm", "mlp")):
            yield dict(zip(RECOMPUTATION, ("selective", None, None, (*modules, *latents))))
        blocks = self._blocks(chosen)
        counts = {round(blocks * part / RECOMPUTED_PARTS) for part in range(1, RECOMPUTED_PARTS)}
        for count in sorted(counts - {0, blocks}):
            yield dict(zip(RECOMPUTATION, ("full", "block", count, default)))
        yield dict(zip(RECOMPUTATION, ("full", None, None, default)))

    def _offloads(self, chosen: Choice) -> Iterator[Choice]:
        """Yield offload of nothing, of the optimizer, with ZeRO-3 of the weights too, and of all activations."""
        with_weights = chosen[STRATEGY] == "optim_grads_params"
        for optimizer, weights in ((False, False), (True, False), (True, True))[: 2 + with_weights]:
            for layers in (0, self._blocks(chosen)):
                yield dict(zip(OFFLOAD, (optimizer, weights, layers)))

    def _blocks(self, chosen: Choice) -> int:
        """Return the blocks of a stage."""
        parallel, each = apply(self.start, {name: chosen[name] for name in PIPELINE}).parallel, 1
        with suppress(ScheduleError):  # which the checks report
            each = virtual_stages(self.config.model, parallel)
        return -(-self.config.model.num_layers // (chosen[PP] * each))

    def _kept(self, choices: Iterable[Choice]) -> list[Choice]:
        """Return the choices of an axis that keep what is given; if none does, those that are left of them with it."""
        every = [*choices]
        given = {name: SETTINGS[name].value_in(self.config) for name in self.given}
        kept = [choice for choice in every if all(given.get(name, value) == value for name, value in choice.items())]
        if kept or not every:
            return kept
        changed = ({name: given.get(name, value) for name, value in choice.items()} for choice in every)
        return [*{tuple(choice.values()): choice for choice in changed}.values()]
