"""Checks of batch sizes, the batch ramp, the length of the run and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.batch import batch_at, batch_stages, global_batch, total_samples, total_steps, trained_samples
from megatron.config.numbers import beside, divisors, multiples_beside, offers
from megatron.config.problems import Problem
from megatron.config.run import RunConfig

PADDED = "--pad-global-batch"


def batch_multiple(config: RunConfig, world_size: int) -> int:
    """Return micro-batch size x DP, in samples: every global batch is a multiple of it, or padded to one."""
    return config.training.micro_batch_size * config.parallel.data_parallel_size(world_size)


def check_global_batch(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that micro-batch size x DP divides the global batch, unless it is padded."""
    training = config.training
    unit = batch_multiple(config, world_size)
    if training.pad_global_batch and training.global_batch_size is None:
        sentence = "--pad-global-batch needs --global-batch-size"
        yield Problem("E307", sentence, (f"--global-batch-size {unit}", f"drop {PADDED}"))
    if training.global_batch_size is None or training.global_batch_size % unit == 0 or training.pad_global_batch:
        return
    micro = training.micro_batch_size
    ranks = unit // training.micro_batch_size
    fixes = offers("--global-batch-size", multiples_beside(training.global_batch_size, unit))
    if training.global_batch_size % ranks == 0:
        fixes += offers("--micro-batch-size", beside(micro, divisors(training.global_batch_size // ranks))[:1])
    sentence = f"global batch {training.global_batch_size} is not a multiple of micro-batch {micro} x DP {ranks}"
    yield Problem("E301", sentence, (*fixes, PADDED))


def check_ramp(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the ramp reaches the full batch in whole increments, and that the ranks can divide every batch."""
    training = config.training
    ranks = config.parallel.data_parallel_size(world_size)
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    full = global_batch(training, ranks)
    unit = batch_multiple(config, world_size)
    uneven = [size for _, size in batch_stages(training, ranks)[:-1] if size % unit]
    if start >= full:
        sentence = f"the batch cannot grow from {start} to {full}"
        yield Problem("E302", sentence, (f"--global-batch-size {start + increment}", "drop --rampup-batch-size"))
    elif (full - start) % increment:
        sentence = f"the batch cannot grow from {start} to {full} in steps of {increment}"
        yield Problem("E302", sentence, _suggest_ramps(start, increment, samples, full, unit))
    elif uneven and full % unit == 0 and not training.pad_global_batch:
        shown = ", ".join(map(str, uneven[:3])) + (", ..." if len(uneven) > 3 else "")
        sentence = f"batches of the ramp must be multiples of micro-batch x DP = {unit}: {shown}"
        yield Problem("E303", sentence, (*_suggest_ramps(start, increment, samples, full, unit), PADDED))


def _suggest_ramps(start: int, increment: int, samples: int, full: int, unit: int) -> tuple[str, ...]:
    """Return similar ramps whose batches are all multiples of ``unit``."""
    first = max(unit, start // unit * unit)
    if full % unit or first >= full:
        return ("drop --rampup-batch-size",)
    steps = [unit * d for d in divisors((full - first) // unit)]
    near = [increment] if increment in steps else beside(increment, steps)
    return tuple(f"--rampup-batch-size {first} {step} {samples}" for step in near)


def check_length(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the length of the run is given once, and is at least one step."""
    training = config.training
    ranks = config.parallel.data_parallel_size(world_size)
    if training.train_iters is None and training.train_samples is None:
        yield Problem("E304", "the run has no length", ("--train-iters 1000", "--train-samples 1000000"))
    elif training.train_iters is not None and training.train_samples is not None:
        fixes = ("drop --train-iters", "drop --train-samples")
        yield Problem("E304", "train_iters and train_samples both set the length of the run", fixes)
    elif training.train_samples is not None and total_steps(training, ranks) == 0:
        first = batch_stages(training, ranks)[0][1]
        sentence = f"{training.train_samples} samples do not fill one step of {first}"
        yield Problem("E305", sentence, (f"--train-samples {first}",))


def batch_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note about samples at the end of the run that do not fill a batch."""
    training = config.training
    ranks = config.parallel.data_parallel_size(world_size)
    left_over = total_samples(training, ranks) - trained_samples(training, ranks)
    if left_over:
        last = batch_at(training, ranks, trained_samples(training, ranks))
        unused = f"the last {left_over:,} are not used, because they do not fill a step of {last:,}"
        yield f"--train-samples {training.train_samples:,}: {unused}"


def check_recomputation(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the options of activation recomputation."""
    training = config.training
    layers = config.model.num_layers
    if (
        training.recompute_granularity == "full"
        and training.recompute_num_layers is not None
        and training.recompute_num_layers > layers
    ):
        sentence = f"{training.recompute_num_layers} layers cannot be recomputed: the model has {layers}"
        yield Problem("E306", sentence, (f"--recompute-num-layers {layers}",))
    if training.recompute_granularity == "selective" and not training.recompute_modules:
        fixes = ("--recompute-modules layernorm activation", "drop --recompute-granularity")
        yield Problem("E306", "--recompute-granularity selective needs --recompute-modules", fixes)


BATCH_CHECKS = (check_global_batch, check_ramp, check_length, check_recomputation)
