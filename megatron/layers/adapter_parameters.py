"""The parameters of adapters (LoRA, DoRA) and of quantised weights, declared without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from megatron.config.adapters import QUANTIZED_BLOCK
from megatron.config.model import ModelConfig
from megatron.distributed.sharding import Box, Init, Sharding, ShardSpec, Specs

Dims = tuple[int, ...]
"""A value per dimension of a tensor."""


class AdapterSwitch:
    """Switch that all linears of a model share: they compute with their adapters, or without."""

    def __init__(self) -> None:
        self.on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the linears compute with their frozen weights alone inside."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


def is_adaptable(parameter: str, spec: ShardSpec) -> bool:
    """Return True for the weight of a linear that may have adapters, by its name: those of mixers but experts."""
    return is_linear(parameter) and not spec.expert


def is_linear(parameter: str) -> bool:
    """Return True for the weight of a linear of a mixer, by its name."""
    module, _, kind = parameter.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2].startswith("linear_")


def linear_parts(weight: ShardSpec) -> tuple[str, ...]:
    """Return the names of the linears that a weight ``[out, in]`` fuses; one name, empty, if it is a single linear."""
    if weight.fused:
        return ("q", "k", "v") if len(weight.fused) == 3 else ("q", "gate", "k", "v")
    count = prod(weight.view[: weight.matrices])
    return ("gate", "up") if count == 2 else tuple(map(str, range(count))) if count > 2 else ("",)


def part_of_rows(weight: ShardSpec) -> tuple[int, ...]:
    """Return the index in :func:`linear_parts` of each local output row of a weight."""
    count, view = len(linear_parts(weight)), weight.local_view
    if count == 1:
        return (0,) * prod(view[:-1])
    if not weight.fused:
        return tuple(part for part in range(count) for _ in range(prod(view[weight.matrices : -1])))
    wide = count - 2  # queries, and gates
    queries = (view[1] - 2) // wide
    of_heads = [*(head // queries for head in range(wide * queries)), wide, wide + 1]
    per_group = tuple(part for part in of_heads for _ in range(view[2]))
    return per_group * view[0]


def adapted_parts(config: ModelConfig, linear: str, weight: ShardSpec) -> tuple[int, ...]:
    """Return the indices of the parts of a linear that have adapters, ascending.

    Args:
        config: of the model.
        linear: global name.
        weight: of the linear.
    """
    if config.lora_rank is None or not is_adaptable(f"{linear}.weight", weight):
        return ()
    whole, parts = config.adapts(linear), linear_parts(weight)
    return tuple(i for i, part in enumerate(parts) if whole or (part and config.adapts(f"{linear}.{part}")))


def with_adapters(config: ModelConfig, rank: int, sharding: Sharding, specs: Specs) -> Specs:
    """Add adapters after the parameters of each linear that has some, and freeze all others."""
    found: Specs = {}
    for name, spec in specs.items():
        linear, _, local = name.rpartition(".")
        found[name], size = replace(spec, frozen=True, buffer=False), config.quantized_block_bytes
        if size is not None and is_adaptable(name, spec):
            found[name] = replace(_packed(found[name], size), precision=config.frozen_weights_precision)
        weight = specs.get(f"{linear}.weight", spec)
        last = local == "bias" or f"{linear}.bias" not in specs
        if last and (parts := adapted_parts(config, linear, weight)):
            adapters = _adapters(config, rank, sharding, weight, len(parts))
            found |= {f"{linear}.{each}": adapter for each, adapter in adapters.items()}
    return found


def _packed(weight: ShardSpec, size: int) -> ShardSpec:
    """Return the spec of the bytes of a quantised weight; ``size`` are those of a block of inputs.

    Raises:
        ValueError: when a block is cut.
    """

    def in_bytes(dims: Dims) -> Dims:
        if dims[-1] % QUANTIZED_BLOCK:
            raise ValueError(f"{dims[-1]} inputs are not a multiple of {QUANTIZED_BLOCK}")
        return (*dims[:-1], dims[-1] // QUANTIZED_BLOCK * size)

    return replace(_with_inputs(weight, in_bytes, in_bytes), dense=weight)


def _adapters(config: ModelConfig, rank: int, sharding: Sharding, weight: ShardSpec, parts: int) -> Specs:
    """Declare LoRA's matrices A ``[parts x rank, in]`` and B ``[out, rank]``, and DoRA's magnitudes ``[out]``.

    The variance of A is that of PEFT's uniform distribution. Its gradient is partial where the outputs are sharded,
    that of B where the inputs are, both where a replicated linear multiplies a part of the rows.
    """
    (out, inputs), dense = weight.shape, sharding.dense
    init, view = Init(1 / math.sqrt(3 * inputs)), (parts, rank, inputs) if parts > 1 else (rank, inputs)
    if dense.size > 1 and weight.local_shape == weight.shape:
        a = dense.replicate((rank, inputs), init, partial=sharding.sequence_parallel)
        b = dense.replicate((out, rank), Init(), partial=sharding.sequence_parallel)
        magnitude = dense.replicate((out,), Init(), partial=sharding.sequence_parallel)
    elif weight.row_parallel:
        a = dense.split((rank, inputs), 1, init)
        b = dense.replicate((out, rank), Init(), partial=True)
        magnitude = dense.replicate((out,), Init(), partial=sharding.sequence_parallel)
    else:
        a = replace(dense.replicate(view, init, partial=True), shape=(parts * rank, inputs), matrices=len(view) - 2)
        b = replace(_with_inputs(weight, lambda size: (*size[:-1], rank), lambda start: (*start[:-1], 0)), init=Init())
        rows = _with_inputs(weight, lambda size: size[:-1], lambda start: start[:-1])
        magnitude = replace(rows, init=Init(), matrices=0, fused=())
    specs = {"lora_a": a, "lora_b": b}
    return specs | {"lora_magnitude": replace(magnitude, wide=True)} if config.lora_dora else specs


def _with_inputs(weight: ShardSpec, sizes: Callable[[Dims], Dims], starts: Callable[[Dims], Dims]) -> ShardSpec:
    """Return the spec of a tensor that has the outputs of a weight, and other inputs: those of ``sizes``."""

    def of_box(box: Box) -> Box:
        return Box(starts(box.start), sizes(box.size))

    pieces = tuple(replace(p, local_box=of_box(p.local_box), global_box=of_box(p.global_box)) for p in weight.pieces)
    shape, view, local_view = map(sizes, (weight.shape, weight.view, weight.local_view))
    return replace(weight, shape=shape, view=view, local_view=local_view, pieces=pieces)
