"""Checks of learning rates, schedules, weight decay and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from megatron.config.batch import global_batch
from megatron.config.checks.checkpoint import holds_checkpoints
from megatron.config.factors import read_factor
from megatron.config.lengths import lengths
from megatron.config.parallel import ParallelConfig
from megatron.config.parameters import parameters
from megatron.config.problems import Problem
from megatron.config.run import RunConfig
from megatron.config.settings import flag
from megatron.config.sources import LENGTHS

SCHEDULE_LENGTHS = [options for options in LENGTHS if options[0].startswith("lr_")]


def check_learning_rates(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that no other learning rate exceeds the peak."""
    optimizer = config.optimizer
    for name, rate in (("min_lr", optimizer.min_lr), ("lr_warmup_init", optimizer.lr_warmup_init)):
        if rate > optimizer.lr:
            yield _rate_above_peak("lr", optimizer.lr, name, rate)
    if optimizer.decoupled_lr is None:
        return
    floor = (
        ("min_lr", optimizer.min_lr)
        if optimizer.decoupled_min_lr is None
        else ("decoupled_min_lr", optimizer.decoupled_min_lr)
    )
    for name, rate in (floor, ("lr_warmup_init", optimizer.lr_warmup_init)):
        if rate > optimizer.decoupled_lr:
            yield _rate_above_peak("decoupled_lr", optimizer.decoupled_lr, name, rate)


def _rate_above_peak(peak: str, highest: float, name: str, rate: float) -> Problem:
    lower = "decoupled_min_lr" if peak == "decoupled_lr" and name == "min_lr" else name
    fixes = (f"{flag(lower)} {highest / 10:g}", f"{flag(peak)} {rate * 10:g}")
    return Problem("E401", f"{name} {rate:g} is above {flag(peak)} {highest:g}", fixes)


def check_factors(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that factors of parameter groups can be parsed."""
    optimizer = config.optimizer
    for name, texts in (("lr_factors", optimizer.lr_factors), ("weight_decay_factors", optimizer.weight_decay_factors)):
        for text in texts:
            try:
                read_factor(text)
            except ValueError as error:
                yield Problem("E408", f"'{text}' in {name} {error}", (f"{flag(name)} 'embedding.*=0.5'",))


def check_patterns(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every pattern matches a parameter. Names depend on neither the layout nor the vocabulary."""
    optimizer = config.optimizer
    if not (optimizer.lr_factors or optimizer.weight_decay_factors):
        return
    model = replace(config.model, vocab_size=1)
    names = [parameter.name for parameter in parameters(model, ParallelConfig(), 0)]
    for option, texts in (
        ("lr_factors", optimizer.lr_factors),
        ("weight_decay_factors", optimizer.weight_decay_factors),
    ):
        for text in texts:
            with suppress(ValueError):  # reported as E408
                pattern, factor = read_factor(text)
                if not any(fnmatchcase(name, pattern) for name in names):
                    nearest = get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
                    sentence = f"'{pattern}' in {option} matches no parameter; one is called {nearest}"
                    yield Problem("E407", sentence, (f"{flag(option)} '{nearest}={factor:g}'",))


def check_schedule_units(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that each length is given once: in steps, in samples or as a fraction."""
    optimizer = config.optimizer
    for options in SCHEDULE_LENGTHS:
        used = [option for option in options if getattr(optimizer, option)]
        if len(used) > 1:
            fixes = tuple(f"drop {flag(option)}" for option in used)
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
    unit = None if any(begin) else global_batch(config.training, data_parallel_size)
    warmup, decay, final, _ = lengths(config, data_parallel_size, *begin)
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


def check_weight_decay(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that a constant weight decay has one value, and a changing one a start and an end."""
    optimizer = config.optimizer
    ends = {"start_weight_decay": optimizer.start_weight_decay, "end_weight_decay": optimizer.end_weight_decay}
    if optimizer.weight_decay_incr_style == "constant":
        for name, value in ends.items():
            if value is not None:
                fixes = ("--weight-decay-incr-style linear", f"drop {flag(name)} and use --weight-decay {value:g}")
                yield Problem("E405", f"{name} has no effect on a constant weight decay", fixes)
        return
    for name, value in ends.items():
        if value is None:
            fixes = (f"{flag(name)} {optimizer.weight_decay:g}", "--weight-decay-incr-style constant")
            yield Problem("E405", f"a {optimizer.weight_decay_incr_style} weight decay needs {name}", fixes)


def check_loss_scale(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the dynamic scale starts at or above its minimum."""
    precision = config.precision
    first, lowest = precision.initial_loss_scale, precision.min_loss_scale
    if precision.params_dtype == "fp16" and precision.loss_scale is None and first < lowest:
        sentence = f"--initial-loss-scale {first:g} is below --min-loss-scale {lowest:g}"
        yield Problem("E406", sentence, (f"--min-loss-scale {first:g}", f"--initial-loss-scale {lowest:g}"))


OPTIMIZER_CHECKS = (
    check_learning_rates,
    check_factors,
    check_patterns,
    check_schedule_units,
    check_schedule,
    check_weight_decay,
    check_loss_scale,
)
