"""Whether schedules and number formats make sense together."""

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

SCHEDULE_LENGTHS = [ways for ways in LENGTHS if ways[0].startswith("lr_")]


def rates(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The peak is the largest learning rate."""
    o = config.optimizer
    for name, rate in (("min_lr", o.min_lr), ("lr_warmup_init", o.lr_warmup_init)):
        if rate > o.lr:
            yield _above("lr", o.lr, name, rate)
    if o.decoupled_lr is None:
        return
    floor = ("min_lr", o.min_lr) if o.decoupled_min_lr is None else ("decoupled_min_lr", o.decoupled_min_lr)
    for name, rate in (floor, ("lr_warmup_init", o.lr_warmup_init)):
        if rate > o.decoupled_lr:
            yield _above("decoupled_lr", o.decoupled_lr, name, rate)


def _above(peak: str, highest: float, name: str, rate: float) -> Problem:
    lower = "decoupled_min_lr" if peak == "decoupled_lr" and name == "min_lr" else name
    fixes = (f"{flag(lower)} {highest / 10:g}", f"{flag(peak)} {rate * 10:g}")
    return Problem("E401", f"{name} {rate:g} is above {flag(peak)} {highest:g}", fixes)


def factors(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Factors of groups of parameters can be read."""
    o = config.optimizer
    for name, texts in (("lr_factors", o.lr_factors), ("weight_decay_factors", o.weight_decay_factors)):
        for text in texts:
            try:
                read_factor(text)
            except ValueError as error:
                yield Problem("E408", f"'{text}' in {name} {error}", (f"{flag(name)} 'embedding.*=0.5'",))


def patterns(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every pattern matches a parameter. Names depend on neither the layout nor the size of the vocabulary."""
    o = config.optimizer
    if not (o.lr_factors or o.weight_decay_factors):
        return
    model = replace(config.model, vocab_size=1)
    names = [parameter.name for parameter in parameters(model, ParallelConfig(), 0)]
    for option, texts in (("lr_factors", o.lr_factors), ("weight_decay_factors", o.weight_decay_factors)):
        for text in texts:
            with suppress(ValueError):  # reported as E408
                pattern, factor = read_factor(text)
                if not any(fnmatchcase(name, pattern) for name in names):
                    nearest = get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
                    sentence = f"'{pattern}' in {option} matches no parameter; one is called {nearest}"
                    yield Problem("E407", sentence, (f"{flag(option)} '{nearest}={factor:g}'",))


def said_once(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """A length is given in steps, in samples or as a share: not in two ways."""
    o = config.optimizer
    for ways in SCHEDULE_LENGTHS:
        used = [way for way in ways if getattr(o, way)]
        if len(used) > 1:
            fixes = tuple(f"drop {flag(way)}" for way in used)
            yield Problem("E402", f"{' and '.join(used)} say the same thing", fixes)


def schedule(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Warm-up, decay and WSD's final decay fit into one another; once a run goes on, it is judged from there."""
    t, c = config.training, config.checkpoint
    if (t.train_iters is None) == (t.train_samples is None):  # no length to measure them by
        return
    if not any(holds_checkpoints(folder) for folder in (c.save, c.load)):
        yield from schedule_problems(config, config.parallel.data_parallel_size(world_size))


def schedule_problems(config: RunConfig, data_parallel_size: int, begin: tuple[int, int] = (0, 0)) -> Iterator[Problem]:
    """What does not fit in the schedule of a run that has its present batches since ``begin``: steps, and samples."""
    o, unit = config.optimizer, None if any(begin) else global_batch(config.training, data_parallel_size)
    warmup, decay, final, _ = lengths(config, data_parallel_size, *begin)
    if warmup >= decay:
        sentence = f"the warm-up of {_shown(warmup)} samples does not end before the decay does, at {_shown(decay)}"
        shorter = _flag("lr_warmup", bool(o.lr_warmup_samples), decay / 10, unit)
        yield Problem("E403", sentence, (shorter, _flag("lr_decay", bool(o.lr_decay_samples), 10 * warmup, unit)))
    elif o.lr_decay_style == "WSD" and final is None:
        tenth = _flag("lr_wsd_decay", False, decay / 10, unit, 1)
        yield Problem("E404", "WSD needs the length of its final decay", (tenth,))
    elif o.lr_decay_style == "WSD" and final is not None and final > decay - warmup:
        sentence = f"WSD's final decay of {_shown(final)} samples does not fit between the end of the warm-up"
        room = _flag("lr_wsd_decay", bool(o.lr_wsd_decay_samples), decay - warmup, unit, 1)
        yield Problem("E404", f"{sentence} at {_shown(warmup)} and that of the decay at {_shown(decay)}", (room,))


def _shown(samples: float) -> str:
    return f"{samples:,.10g}"


def _flag(name: str, in_samples: bool, samples: float, unit: int | None, least: int = 0) -> str:
    """What sets a length, rounded down, in samples or in steps of ``unit`` samples; None where steps differ."""
    if in_samples:
        return f"{flag(name)}-samples {max(least, int(samples))}"
    if unit is None:
        return f"--set optimizer.{name}_samples={max(least, int(samples))}"
    return f"{flag(name)}-iters {max(least, int(samples // unit))}"


def weight_decay(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Weight decay is one number, or moves between two."""
    o = config.optimizer
    ends = {"start_weight_decay": o.start_weight_decay, "end_weight_decay": o.end_weight_decay}
    if o.weight_decay_incr_style == "constant":
        for name, value in ends.items():
            if value is not None:
                fixes = ("--weight-decay-incr-style linear", f"drop {flag(name)} and use --weight-decay {value:g}")
                yield Problem("E405", f"{name} has no effect on a constant weight decay", fixes)
        return
    for name, value in ends.items():
        if value is None:
            fixes = (f"{flag(name)} {o.weight_decay:g}", "--weight-decay-incr-style constant")
            yield Problem("E405", f"a {o.weight_decay_incr_style} weight decay needs {name}", fixes)


def loss_scale(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The dynamic scale starts at or above its floor."""
    p = config.precision
    if p.params_dtype == "fp16" and p.loss_scale is None and p.initial_loss_scale < p.min_loss_scale:
        sentence = f"the loss scale starts at {p.initial_loss_scale:g}, below its floor {p.min_loss_scale:g}"
        fixes = (f"--min-loss-scale {p.initial_loss_scale:g}", f"--initial-loss-scale {p.min_loss_scale:g}")
        yield Problem("E406", sentence, fixes)


CHECKS = (rates, factors, patterns, said_once, schedule, weight_decay, loss_scale)
