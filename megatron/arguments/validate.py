"""All checks of a configuration: ``find_problems`` runs them and reports everything at once.

Numbers are checked against their limits first; later checks skip values already known to be wrong. Classes of options
have rules and checks of their own (`megatron.config.option.option`); those that need more than options, such as
parameters and schedules, are in ``checks/``. The choice of CUDA graphs, and the report of options that are set without
effect (``needs`` of their fields), are here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from megatron.arguments.checks import checkpoint, communication, data, parameters, pipeline, training
from megatron.config.batch import get_num_microbatches
from megatron.config.conditions import broken_rules, group_methods, holds, rules
from megatron.config.errors import Problem
from megatron.config.option import Need
from megatron.config.plugins import registered
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, Setting
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import DEFAULT_VIRTUAL_SCHEDULE, schedule_name, virtual_stages

MAX_GRAPH_ELEMENTS = 2**25
"""Largest hidden state of a micro-batch, in elements on a rank, for which ``--cuda-graph auto`` captures steps. A layer
of this size keeps a GPU busy for milliseconds, longer than the host needs to launch its kernels; a graph would gain
nothing, and keep its memory."""


MAX_GRAPH_BLOCKS = 1024
"""Largest number of blocks times micro-batches that ``--cuda-graph auto`` captures: each is some 30 kernels."""


def choose_cuda_graph(config: RunConfig, world_size: int, cuda: bool = True) -> tuple[str, str]:
    """Return the part of a step to capture, and why ``--cuda-graph auto`` chooses it.

    Args:
        config: resolved or not.
        world_size: number of ranks.
        cuda: True if the run uses a GPU.
    """
    mode, training, parallel = config.compute.cuda_graph, config.training, config.parallel
    if mode != "auto":
        return mode, ""
    if not cuda:
        return "none", "this run uses a CPU"
    step = replace(config, compute=replace(config.compute, cuda_graph="step"))
    broken = [*broken_rules(step, (each for each in rules() if "cuda_graph=" in each.condition))]
    broken += [problem for check in group_methods(step, "check_graph") for problem in check(step, world_size)]
    if broken:
        return "none", broken[0].sentence
    mixers = [("mixer", name) for name in config.model.token_mixer_names]
    others = [("objective", training.objective), ("optimizer", config.optimizer.optimizer)]
    for kind, name in (*others, ("dispatcher", parallel.moe_exchange), *mixers):
        if name in registered(kind):
            return "none", f"the {kind} {name} is a plugin's, whose Python code a graph would freeze"
    blocks = config.model.num_layers * get_num_microbatches(training, parallel.data_parallel_size(world_size))
    if blocks > MAX_GRAPH_BLOCKS:
        return "none", f"a step has {blocks:,} blocks times micro-batches, above {MAX_GRAPH_BLOCKS:,}"
    tokens, hidden = training.micro_batch_size * training.seq_length, config.model.hidden_size
    elements = tokens * hidden // (parallel.tensor_model_parallel_size * parallel.context_parallel_size)
    size = f"a micro-batch of {tokens:,} tokens x {hidden:,} has {elements:,} elements on a rank"
    if elements > MAX_GRAPH_ELEMENTS:
        return "none", f"{size}, above {MAX_GRAPH_ELEMENTS:,}: the GPU is slower than the host"
    return "step", f"{size}, at most {MAX_GRAPH_ELEMENTS:,}: the host would be the limit"


def _has_interleaved_stages(config: RunConfig) -> bool:
    """Return True for the interleaved schedule. Invalid schedules are reported by the pipeline checks."""
    try:
        stages = virtual_stages(config.model, config.parallel)
    except ScheduleError:
        return True
    return stages > 1 and schedule_name(config.parallel, stages) == DEFAULT_VIRTUAL_SCHEDULE


CONDITIONS: Mapping[str, Callable[[RunConfig], bool]] = {
    "several_stages": lambda c: c.parallel.pipeline_model_parallel_size > 1 or virtual_stages(c.model, c.parallel) > 1,
    "interleaved_stages": _has_interleaved_stages,
}
"""Conditions of options that follow from several fields, and so cannot be computed in ``config``."""


def is_met(need: Need, config: RunConfig) -> bool:
    """Return True if options that depend on ``need`` have an effect."""
    known = CONDITIONS.get(need.condition)
    return holds(need.condition, config, or_plugin=True) if known is None else known(config)


def unused_option_notes(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return notes about options without effect; only those in ``given``, not those of a preset."""
    unused: dict[Need, list[Setting]] = {}
    for setting in SETTINGS.values():
        changed = setting.name in given and setting.value_in(config) not in (None, setting.default)
        for need in setting.option.needs:
            unused.setdefault(need, [])
            if changed and not is_met(need, config):
                unused[need].append(setting)
    return [_no_effect(settings, need) for need, settings in unused.items() if settings]


def _no_effect(unused: Sequence[Setting], need: Need) -> str:
    *others, last = (setting.flag for setting in unused)
    subject = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    return f"{subject} no effect without {need}"


MODULES = (parameters, pipeline, communication, training, data, checkpoint)
"""Checks and notes that need more than the options, besides those that the classes of options have."""


def _functions(config: RunConfig, check: bool) -> Iterator[Callable[[RunConfig, int], Iterator[Any]]]:
    """Yield the checks of a configuration, or what notes on it."""
    yield from group_methods(config, "check_" if check else "note_")
    for module in MODULES:
        for name, function in vars(module).items():
            if name.startswith("check_") if check else name.endswith("_notes"):
                yield function


def find_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes of one line on a configuration without problems."""
    for function in _functions(config, check=False):
        yield from function(config, world_size)


def find_problems(config: RunConfig, world_size: int, doubtful: Set[str] = frozenset()) -> list[Problem]:
    """Return every problem of a run on ``world_size`` ranks.

    Each number is checked against its limits first. Checks of how values fit together skip values already known to be
    wrong, so that one mistake is reported once.

    Args:
        config: resolved or not.
        world_size: number of ranks.
        doubtful: fields whose given value could not be read.
    """
    found = []
    wrong = set(doubtful)
    for name, setting in SETTINGS.items():
        value = setting.value_in(config)
        if not setting.allows(value):
            wrong.add(name)
            sentence = f"{setting.flag} {setting.show(value)}: must be {setting.option.limits}"
            found.append(Problem("E600", sentence, (setting.spell(_suggest(setting, value)),)))
    known = config
    for setting in (SETTINGS[name] for name in wrong):
        known = known.with_group(setting.group, replace(known.group(setting.group), **{setting.name: _Unknown()}))
    for rule in rules():
        with suppress(_UnknownError):
            found.extend(broken_rules(known, [rule]))
    for check in _functions(known, check=True):
        with suppress(_UnknownError):
            found.extend(check(known, world_size))
    return found


def _suggest(setting: Setting, value: Any) -> Any:
    """Return the upper limit for a larger value; else the default, the example or the lower limit."""
    option, least, most = setting.option, setting.option.bounds.get("at_least"), setting.option.bounds.get("at_most")
    if setting.many:
        return setting.default or tuple(item if option.allows(item) else least for item in value)
    suggestions = (most if most is not None and value > most else None, setting.default, option.example, least)
    above = option.bounds.get("above", 0)
    return setting.scalar(next((number for number in suggestions if number is not None), above + 1))


class _UnknownError(Exception):
    """A check used a value that is already known to be wrong."""


def _refuse(*operands: object) -> NoReturn:
    raise _UnknownError


USES = {"__getattr__", "__call__", "__fspath__"}.union(*map(vars, (int, float, str, tuple)))
_Unknown = type("_Unknown", (), dict.fromkeys(USES - {"__new__", "__getattribute__", "__doc__"}, _refuse))
"""Placeholder for a wrong value: every use of it raises ``_UnknownError``."""
