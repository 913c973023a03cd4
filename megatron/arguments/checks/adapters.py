"""Checks of adapters (LoRA): the linears they are for, and what they are not combined with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from megatron.config.errors import Problem
from megatron.config.model import QUANTIZED_BLOCK
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import listed
from megatron.distributed.sharding import Sharding
from megatron.layers.adapter_parameters import ADAPTABLE, adapted_parts, linear_parts
from megatron.layers.parameters import block_of_any_kind

NO_ADAPTERS = "drop --lora-rank"


def check_lora_target(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every pattern matches a linear that may have adapters."""
    model = config.model
    if model.lora_rank is None:
        return
    try:
        specs = block_of_any_kind(model)
        weights = {name.removesuffix(".weight"): spec for name, spec in specs.items() if name.endswith("weight")}
    except ValueError:
        return  # a dimension does not divide, which other checks report
    for pattern in model.lora_target or ("",):
        alone = replace(model, lora_target=(pattern,))
        linears = ((f"layers.{i}.{name}", spec) for i in range(model.num_layers) for name, spec in weights.items())
        if not any(adapted_parts(alone, linear, weight) for linear, weight in linears):
            every = replace(model, lora_target=("*",))
            names = [name for name, spec in weights.items() if adapted_parts(every, f"layers.0.{name}", spec)]
            parts = [f"{name}.{part}" for name in names for part in linear_parts(weights[name]) if part]
            experts = "; experts have no adapters" if model.num_experts is not None else ""
            sentence = (
                f"--lora-target {shlex.quote(pattern)} matches no linear of layers.0 to layers.{model.num_layers - 1}: "
                f"{listed(names)}, or a part: {listed(parts)}{experts}"
            )
            yield Problem("E112", sentence, (SETTINGS["lora_target"].spell(("linear_qkv", "linear_proj")),))


def check_lora_precision(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject FP8: the products with adapters are not in it."""
    if config.model.lora_rank is not None and config.precision.fp8_format is not None:
        yield Problem("E113", "--fp8-format does not support --lora-rank", ("drop --fp8-format", NO_ADAPTERS))


def check_graph_adapters(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject capturing a step with adapters, which is untested."""
    if config.compute.cuda_graph == "step" and config.model.lora_rank is not None:
        yield Problem("E113", "--cuda-graph step is untested with --lora-rank", ("--cuda-graph none", NO_ADAPTERS))


def check_frozen_weights(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that a rank's inputs of quantised weights are whole blocks, and that the weights are not cut by ZeRO-3."""
    model, parallel = config.model, config.parallel
    precision = model.frozen_weights_precision
    if model.quantized_block_bytes is None:
        return
    drop = "drop --frozen-weights-precision"
    if parallel.zero_stage == 3:
        sentence = f"--frozen-weights-precision {precision} does not support optim_grads_params, which cuts blocks"
        yield Problem("E114", sentence, ("--data-parallel-sharding-strategy optim_grads", drop))
    try:
        specs = block_of_any_kind(model.base, Sharding.of_first_rank(parallel))
    except ValueError:
        return  # a dimension does not divide, which other checks report
    for name, spec in specs.items():
        linear, _, local = f"layers.0.{name}".rpartition(".")
        if local == "weight" and ADAPTABLE.fullmatch(linear) and spec.local_view[-1] % QUANTIZED_BLOCK:
            sentence = (
                f"--frozen-weights-precision {precision} has a scale for {QUANTIZED_BLOCK} inputs, and a rank's {name} "
                f"has {spec.local_view[-1]}"
            )
            yield Problem("E114", sentence, (drop,))
            return
