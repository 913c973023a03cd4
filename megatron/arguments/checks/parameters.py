"""Checks that need the declared parameters and mixers: their sizes and names, adapters, and FP8."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import lcm, prod

from megatron.config.adapters import QUANTIZED_BLOCK
from megatron.config.errors import Problem
from megatron.config.model import ModelConfig
from megatron.config.optimizer import parse_factor
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import FP8_MULTIPLES
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import divisors, flag_fixes, listed, multiples_as_fixes
from megatron.distributed.sharding import Sharding
from megatron.layers.adapter_parameters import adapted_parts, is_adaptable, linear_parts
from megatron.layers.mixers.registry import MIXERS, find_mixer
from megatron.layers.parameters import block_of_any_kind, gpt

MAX_ELEMENTS = 2**48
"""Elements of a tensor: more than those of all tensors of the largest published models."""


def check_mixers(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the mixers of the layers are right with distributed sequences and with several documents in one."""
    asked = {
        "context parallelism": ("--context-parallel-size 1", config.parallel.context_parallel_size > 1),
        "batch invariance": ("drop --batch-invariant", config.compute.batch_invariant),
        "documents": ("--no-reset-attention-mask", config.data.reset_attention_mask),
    }
    for name in dict.fromkeys(name for mixers in config.model.kinds_of_layers for name in mixers):
        for feature, (fix, is_asked) in asked.items():
            if is_asked and feature not in find_mixer(name).supports:
                yield Problem("E115", f"the mixer {name} does not support {feature}", (fix,))


def check_mixers_divide(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that TP divides what the mixers of plugins shard; other checks know the sizes of the built-in ones."""
    parallel = config.parallel
    for name in config.model.token_mixer_names:
        if name in MIXERS:
            continue
        if (error := _division_error(name, config.model, parallel)) is not None:
            tp = parallel.tensor_model_parallel_size
            smaller = (replace(parallel, tensor_model_parallel_size=n) for n in reversed(divisors(tp)))
            fit = [each for each in smaller if _division_error(name, config.model, each) is None]
            fixes = flag_fixes("--tensor-model-parallel-size", [each.tensor_model_parallel_size for each in fit[:1]])
            yield Problem("E116", f"the mixer {name} does not divide over TP {tp}: {error}", fixes)


def _division_error(mixer: str, model: ModelConfig, parallel: ParallelConfig) -> ValueError | None:
    try:
        find_mixer(mixer).parameters(model, Sharding.of_first_rank(parallel))
    except ValueError as error:
        return error
    return None


def check_tensor_sizes(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the elements of every tensor, vocabulary padding included, can be counted and addressed."""
    model = replace(config.model, vocab_size=config.model.vocab_size or 1)
    shapes = {name: spec.local_shape for name, spec in (gpt(model, layers=()) | block_of_any_kind(model)).items()}
    name = max(shapes, key=lambda each: math.prod(shapes[each]))
    if math.prod(shapes[name]) > MAX_ELEMENTS:
        sentence = f"{name} would be of shape {list(shapes[name])}; a tensor has at most {MAX_ELEMENTS:,} elements"
        yield Problem("E108", sentence)


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
                f"{listed(names)}{f', or a part: {listed(parts)}' if parts else ''}{experts}"
            )
            fix = SETTINGS["lora_target"].spell(tuple(name.rpartition(".")[2] for name in names[:2]))
            yield Problem("E112", sentence, (fix,))


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
        if is_adaptable(name, spec) and spec.local_view[-1] % QUANTIZED_BLOCK:
            sentence = (
                f"--frozen-weights-precision {precision} has a scale for {QUANTIZED_BLOCK} inputs, and a rank's {name} "
                f"has {spec.local_view[-1]}"
            )
            yield Problem("E114", sentence, (drop,))
            return


def check_fp8_sizes(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the matrices of a rank consist of whole blocks."""
    model, parallel, training = config.model, config.parallel, config.training
    recipe = config.precision.fp8_recipe
    if config.precision.fp8_format is None or recipe not in FP8_MULTIPLES:
        return
    of, other = FP8_MULTIPLES[recipe], ("--fp8-recipe tensorwise",) if FP8_MULTIPLES[recipe] > 16 else ()
    try:
        specs = block_of_any_kind(model, Sharding.of_first_rank(parallel))
    except ValueError:
        return  # a dimension does not divide, which other checks report
    for name, spec in specs.items():
        rows, columns = prod(spec.local_view[spec.expert : -1]), spec.local_view[-1]
        multiplied = spec.is_matrix and name.endswith(".weight") and ".router." not in name
        if multiplied and (rows % of or columns % of):
            sentence = f"--fp8-recipe {recipe} needs multiples of {of}, and a rank's {name} is {rows} x {columns}"
            yield Problem("E923", sentence, (*other, "drop --fp8-format"))
            break
    parts, ring = parallel.sequence_ranks, parallel.context_parallel_size // parallel.cp_head_ranks
    chunks = 2 * ring if ring > 1 and of > 16 else 1  # of a sequence; where ranks hold two, a block must not be in both
    tokens, chunk = (training.seq_length * training.micro_batch_size // n for n in (parts, chunks))
    if tokens % of or chunk % of:
        has = f"a rank has {tokens}" if tokens % of else f"a chunk of context parallelism has {chunk}"
        sentence = f"--fp8-recipe {recipe} needs multiples of {of}, and {has} tokens of a micro-batch"
        fixes = multiples_as_fixes("--seq-length", training.seq_length, of * lcm(parts, chunks))
        yield Problem("E923", sentence, (*fixes, *other))


def check_factors(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that factors of parameter groups can be parsed, and that every pattern matches a parameter."""
    parsed = []
    factors = {"--lr-factors": config.optimizer.lr_factors}
    factors["--weight-decay-factors"] = config.optimizer.weight_decay_factors
    for option, texts in factors.items():
        for text in texts:
            try:
                parsed.append((option, *parse_factor(text)))
            except ValueError as error:
                yield Problem("E408", f"'{text}' in {option} {error}", (f"{option} 'embedding.*=0.5'",))
    if not parsed:
        return
    # Sizes change no names, and a pattern for norms may be for another model.
    every = replace(config.model, vocab_size=1, max_position_embeddings=1, qk_layernorm=True)
    names = [*gpt(replace(every, layernorm_placement="sandwich"))]
    for option, pattern, factor in parsed:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
            sentence = f"'{pattern}' in {option} matches no parameter; one is called {nearest}"
            yield Problem("E407", sentence, (f"{option} '{nearest}={factor:g}'",))
