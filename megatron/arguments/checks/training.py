"""Checks of batch sizes, the batch ramp, the length of the run, recomputation, schedules and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.sources import LENGTH_OPTIONS
from megatron.config.batch import (
    batch_size_stages,
    final_consumed_samples,
    final_iteration,
    full_global_batch_size,
    global_batch_size_at,
    lr_scale,
    planned_samples,
    schedule_lengths,
)
from megatron.config.errors import Problem
from megatron.config.run import RunConfig
from megatron.config.text import divisors, flag, flag_fixes, listed, multiples_as_fixes, nearest
from megatron.config.training import parse_batch_steps

PADDED = "--pad-global-batch"


def batch_multiple(config: RunConfig, world_size: int) -> int:
    """Return micro-batch size x DP, in samples: every global batch is a multiple of it, or padded to one."""
    return config.training.micro_batch_size * config.parallel.data_parallel_size(world_size)


def check_global_batch(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that micro-batch size x DP divides the global batch, unless it is padded."""
    training = config.training
    unit = batch_multiple(config, world_size)
    batch, micro = training.global_batch_size, training.micro_batch_size
    if training.pad_global_batch and batch is None:
        sentence = "--pad-global-batch needs --global-batch-size"
        yield Problem("E307", sentence, (f"--global-batch-size {unit}", f"drop {PADDED}"))
    if batch is None or batch % unit == 0 or training.pad_global_batch:
        return
    ranks = unit // micro
    fixes = multiples_as_fixes("--global-batch-size", batch, unit)
    if batch % ranks == 0:
        fixes += flag_fixes("--micro-batch-size", nearest(micro, divisors(batch // ranks))[:1])
    sentence = f"global batch {batch} is not a multiple of micro-batch {micro} x DP {ranks}"
    yield Problem("E301", sentence, (*fixes, PADDED))


def check_ramp(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the batch sizes end with the full one, and that the ranks can divide each of them."""
    training = config.training
    ranks = config.parallel.data_parallel_size(world_size)
    full = full_global_batch_size(training, ranks)
    unit = batch_multiple(config, world_size)
    if training.step_batch_size_schedule:
        begins = [tokens for tokens, _ in parse_batch_steps(training.step_batch_size_schedule)]
        if begins[0] != 0 or begins != sorted(set(begins)):
            sentence = "the first batch size must begin at 0 tokens, and each of the others after the one before"
            yield Problem("E302", f"--step-batch-size-schedule: {sentence}")
        if training.rampup_batch_size is not None:
            sentence = "--step-batch-size-schedule and --rampup-batch-size both set the batch size"
            yield Problem("E302", sentence, ("drop --rampup-batch-size", "drop --step-batch-size-schedule"))
        elif training.global_batch_size not in (None, full):
            sentence = f"--step-batch-size-schedule ends with a batch of {full}, not {training.global_batch_size}"
            yield Problem("E302", sentence, (f"--global-batch-size {full}",))
        uneven = [size for _, size in batch_size_stages(training, ranks) if size % unit]
        if uneven and not training.pad_global_batch:
            sentence = f"batches of the schedule must be multiples of micro-batch x DP = {unit}: {listed(uneven)}"
            yield Problem("E303", sentence, (f"--step-batch-size-schedule 0:{unit}", PADDED))
        return
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    uneven = [size for _, size in batch_size_stages(training, ranks)[:-1] if size % unit]
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
    near = [increment] if increment in steps else nearest(increment, steps)
    return tuple(f"--rampup-batch-size {first} {step} {samples}" for step in near)


def check_length(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the length of the run is given once, and is at least one step."""
    training = config.training
    ranks = config.parallel.data_parallel_size(world_size)
    given = [flag(name) for name in LENGTH_OPTIONS[0] if getattr(training, name) is not None]
    if not given:
        fixes = ("--num-epochs 3",) if config.data.chat_data_path else ("--train-iters 1000", "--train-samples 1000000")
        yield Problem("E304", "the run has no length", fixes)
    elif len(given) > 1:
        sentence = f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} set the length of the run"
        yield Problem("E304", sentence, tuple(f"drop {name}" for name in given))
    elif training.num_epochs is not None and not config.data.chat_data_path:
        fixes = ("--chat-data-path FILE.jsonl", "--train-iters 1000 --set training.num_epochs=null")
        yield Problem("E304", "--num-epochs counts passes over --chat-data-path", fixes)
    elif training.train_samples is not None and final_iteration(training, ranks) == 0:
        first = batch_size_stages(training, ranks)[0][1]
        sentence = f"{training.train_samples} samples do not fill one step of {first}"
        yield Problem("E305", sentence, (f"--train-samples {first}",))


def batch_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note about samples at the end of the run that do not fill a batch."""
    training = config.training
    ranks = config.parallel.data_parallel_size(world_size)
    left_over = planned_samples(training, ranks) - final_consumed_samples(training, ranks)
    if left_over:
        last = global_batch_size_at(training, ranks, final_consumed_samples(training, ranks))
        unused = f"the last {left_over:,} are not used, because they do not fill a step of {last:,}"
        yield f"--train-samples {training.train_samples:,}: {unused}"


def check_learning_rates(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that no other learning rate exceeds the peak, and that a scaling rule has its base."""
    optimizer = config.optimizer
    ranks = config.parallel.data_parallel_size(world_size)
    if optimizer.lr_scaling != "none" and optimizer.lr_base_batch_size is None:
        fixes = (f"--lr-base-batch-size {full_global_batch_size(config.training, ranks)}", "drop --lr-scaling")
        yield Problem("E409", f"--lr-scaling {optimizer.lr_scaling} needs the batch that --lr was chosen for", fixes)
    scale = lr_scale(config, ranks)
    pairs = [("lr", "min_lr"), ("lr", "lr_warmup_init")]
    if optimizer.decoupled_lr is not None:
        floor = "min_lr" if optimizer.decoupled_min_lr is None else "decoupled_min_lr"
        pairs += [("decoupled_lr", floor), ("decoupled_lr", "lr_warmup_init")]
    for peak, name in pairs:
        factor = scale if name == "lr_warmup_init" else 1.0  # minimum and peak are both scaled
        highest = getattr(optimizer, peak)
        rate = getattr(optimizer, name)
        if rate > highest * factor:
            lower = "decoupled_min_lr" if (peak, name) == ("decoupled_lr", "min_lr") else name
            fixes = (f"{flag(lower)} {highest * factor / 10:g}", f"{flag(peak)} {rate * 10 / factor:g}")
            scaled = "" if factor == 1 else f" x {factor:g}"
            yield Problem("E401", f"{flag(name)} {rate:g} is above {flag(peak)} {highest:g}{scaled}", fixes)


def learning_rate_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about a rate raised by linear scaling that the run starts with, and about steps skipped in fp16."""
    ranks = config.parallel.data_parallel_size(world_size)
    scale = lr_scale(config, ranks)
    if config.optimizer.lr_scaling == "linear" and scale > 1 and schedule_lengths(config, ranks).warmup == 0:
        rule = "large batches need a warm-up (arXiv 1706.02677), such as --lr-warmup-fraction 0.01"
        yield f"--lr-scaling linear: the first step has {scale:g} times --lr; {rule}"
    precision = config.precision
    if precision.params_dtype == "fp16" and precision.loss_scale is None:
        others = "Megatron-LM's and accelerate's do not advance"
        first = f"a smaller --initial-loss-scale than {precision.initial_loss_scale:g} skips fewer first steps"
        yield f"fp16: learning rate and weight decay follow the samples, also over skipped steps; {others}; {first}"


def check_schedule_units(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that each length is given once: in steps, in samples or as a fraction."""
    optimizer = config.optimizer
    for options in LENGTH_OPTIONS[1:]:  # the first is the length of the run
        used = [flag(option) for option in options if getattr(optimizer, option)]
        if len(used) > 1:
            fixes = tuple(f"drop {option}" for option in used)
            yield Problem("E402", f"{' and '.join(used)} set the same length", fixes)


def check_schedule(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the schedule of a new run; a resumed run is checked from the step of its checkpoint."""
    training, checkpoint = config.training, config.checkpoint
    if (training.train_iters is None) == (training.train_samples is None):  # no length to measure them by
        return
    if not any(holds_checkpoints(folder) for folder in (checkpoint.save, checkpoint.load)):
        yield from schedule_problems(config, config.parallel.data_parallel_size(world_size))


def schedule_problems(config: RunConfig, data_parallel_size: int, begin: tuple[int, int] = (0, 0)) -> Iterator[Problem]:
    """Yield problems of the schedule: warm-up, decay and WSD's final decay must fit into one another.

    Args:
        begin: steps and samples before the run's batch sizes last changed.
    """
    optimizer = config.optimizer
    unit = None if any(begin) else full_global_batch_size(config.training, data_parallel_size)
    warmup, decay, final, _ = schedule_lengths(config, data_parallel_size, *begin)
    if warmup >= decay:
        sentence = f"the warm-up of {_shown(warmup)} samples does not end before the decay does, at {_shown(decay)}"
        shorter = _length_flag("lr_warmup", bool(optimizer.lr_warmup_samples), decay / 10, unit)
        longer = _length_flag("lr_decay", bool(optimizer.lr_decay_samples), 10 * warmup, unit)
        yield Problem("E403", sentence, (shorter, longer))
    elif optimizer.lr_decay_style == "WSD" and final is None:
        tenth = _length_flag("lr_wsd_decay", False, decay / 10, unit, 1)
        yield Problem("E404", "WSD needs the length of its final decay", (tenth,))
    elif optimizer.lr_decay_style == "WSD" and final is not None and final > decay - warmup:
        sentence = f"WSD's final decay of {_shown(final)} samples does not fit between the end of the warm-up"
        longest = _length_flag("lr_wsd_decay", bool(optimizer.lr_wsd_decay_samples), decay - warmup, unit, 1)
        yield Problem("E404", f"{sentence} at {_shown(warmup)} and the end of the decay at {_shown(decay)}", (longest,))


def _shown(samples: float) -> str:
    return f"{samples:,.10g}"


def _length_flag(name: str, in_samples: bool, samples: float, unit: int | None, least: int = 0) -> str:
    """Return the flag that sets a length, rounded down, in samples or in steps of ``unit`` samples (None: varying)."""
    if in_samples:
        return f"{flag(name)}-samples {max(least, int(samples))}"
    if unit is None:
        return f"--set optimizer.{name}_samples={max(least, int(samples))}"
    return f"{flag(name)}-iters {max(least, int(samples // unit))}"


def profiling_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if the run ends before the profile starts."""
    profiling = config.profiling
    steps = final_iteration(config.training, config.parallel.data_parallel_size(world_size))
    start = profiling.profile_step_start
    if profiling.requested and start > steps:
        yield f"--profile-step-start {start}: no profile, because the run ends with step {steps:,}"
