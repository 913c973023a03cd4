"""Checks of linears in FP8: the recipe, the model, the layers, and the sizes of matrices and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from megatron.config.errors import Problem
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.text import multiples_as_fixes
from megatron.distributed.sharding import Sharding
from megatron.layers.parameters import block_of_any_kind

NO_FP8 = "drop --fp8-format"
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}
"""Divisor of the sizes of a rank's matrices: of a block, or of cuBLAS for 8-bit operands."""


def check_fp8_recipe(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject delayed scaling, and blocks of e5m2, which cuBLAS does not multiply."""
    fp8_format, recipe = config.precision.fp8_format, config.precision.fp8_recipe
    if fp8_format is None:
        return
    if recipe == "delayed":
        sentence = "--fp8-recipe delayed is not supported: scales always come from the current tensor"
        yield Problem("E920", sentence, ("--fp8-recipe tensorwise",))
    elif recipe in ("blockwise", "mxfp8") and fp8_format == "hybrid":
        sentence = f"--fp8-recipe {recipe} has e4m3 gradients only; their blocks need no wider range"
        yield Problem("E920", sentence, ("--fp8-format e4m3", "--fp8-recipe tensorwise"))


def check_fp8_experts(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Reject experts: the numbers of their rows are those of the data, not multiples of a block."""
    if config.precision.fp8_format is not None and config.model.num_experts is not None:
        yield Problem(
            "E922", "--fp8-format does not support --num-experts: experts are not multiplied in FP8", (NO_FP8,)
        )


def check_fp8_sizes(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the matrices of a rank consist of whole blocks."""
    model, parallel, training = config.model, config.parallel, config.training
    recipe = config.precision.fp8_recipe
    if config.precision.fp8_format is None or model.num_experts is not None or recipe not in MULTIPLES:
        return
    of, other = MULTIPLES[recipe], ("--fp8-recipe tensorwise",) if MULTIPLES[recipe] > 16 else ()
    try:
        specs = block_of_any_kind(model, Sharding.of_first_rank(parallel))
    except ValueError:
        return  # a dimension does not divide, which other checks report
    for name, spec in specs.items():
        if len(spec.local_shape) == 2 and any(size % of for size in spec.local_shape):
            rows, columns = spec.local_shape
            sentence = f"--fp8-recipe {recipe} needs multiples of {of}, and a rank's {name} is {rows} x {columns}"
            yield Problem("E923", sentence, (*other, NO_FP8))
            break
    parts, ring = _sequence_parts(parallel), parallel.context_parallel_size // parallel.cp_head_ranks
    chunks = 2 * ring if ring > 1 and of > 16 else 1  # of a sequence; where ranks hold two, a block must not be in both
    tokens, chunk = (training.seq_length * training.micro_batch_size // n for n in (parts, chunks))
    if tokens % of or chunk % of:
        has = f"a rank has {tokens}" if tokens % of else f"a chunk of context parallelism has {chunk}"
        sentence = f"--fp8-recipe {recipe} needs multiples of {of}, and {has} tokens of a micro-batch"
        fixes = multiples_as_fixes("--seq-length", training.seq_length, of * lcm(parts, chunks))
        yield Problem("E923", sentence, (*fixes, *other))


def _sequence_parts(parallel: ParallelConfig) -> int:
    """Return the ranks over which the rows of a sequence are distributed."""
    return parallel.context_parallel_size * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)


def check_fp8_chunks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that chunks of the MLP do not divide the rows that share a scale."""
    parallel, recipe = config.parallel, config.precision.fp8_recipe
    size, samples = config.training.mlp_chunk_size, config.training.micro_batch_size
    rows = config.training.seq_length // _sequence_parts(parallel)
    if config.precision.fp8_format is None or recipe not in MULTIPLES or size is None or size >= rows:
        return
    of, chunk = MULTIPLES[recipe], f"--mlp-chunk-size {size}"
    if recipe in ("tensorwise", "rowwise"):
        sentence = f"{chunk} would give each chunk a scale: those of --fp8-recipe {recipe} cover all rows"
        yield Problem("E925", sentence, ("drop --mlp-chunk-size", "--fp8-format e4m3 --fp8-recipe mxfp8", NO_FP8))
    elif size * samples % of:
        sentence = f"{chunk} x --micro-batch-size {samples} is no multiple of {of}, as --fp8-recipe {recipe} needs"
        yield Problem("E925", sentence, multiples_as_fixes("--mlp-chunk-size", size, of // gcd(of, samples)))


def check_fp8_layers(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that a layer is left for FP8."""
    precision, layers = config.precision, config.model.num_layers
    if precision.fp8_format is None or any(precision.layer_in_fp8(layer, layers) for layer in range(layers)):
        return
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    sentence = (
        f"--first-last-layers-bf16 keeps {start} first and {end} last of {layers} layers out of FP8: none is left"
    )
    yield Problem("E924", sentence, (NO_FP8, "--no-first-last-layers-bf16"))


def fp8_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note about layers whose communication does not overlap with products."""
    if config.precision.fp8_format is not None and config.parallel.tp_comm_overlap:
        yield "--tp-comm-overlap does not apply to layers in FP8"
