"""All checks of a configuration."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import fields, replace
from typing import Any, NoReturn

from megatron.config.checks import (
    batch,
    checkpoint,
    compute,
    data,
    ends,
    experts,
    graphs,
    idle,
    layout,
    logging,
    model,
    optimizer,
    pipeline,
    profiling,
    sharding,
)
from megatron.config.problems import Problem
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, Setting
from megatron.config.sources import flat

CHECKS = (
    *model.MODEL_CHECKS,
    *layout.LAYOUT_CHECKS,
    *experts.EXPERT_CHECKS,
    *sharding.SHARDING_CHECKS,
    *pipeline.PIPELINE_CHECKS,
    *batch.BATCH_CHECKS,
    *optimizer.OPTIMIZER_CHECKS,
    *data.DATA_CHECKS,
    *checkpoint.CHECKPOINT_CHECKS,
    *ends.STOPPING_CHECKS,
    *compute.KERNEL_CHECKS,
    *graphs.CUDA_GRAPH_CHECKS,
    *logging.LOGGING_CHECKS,
    *profiling.PROFILING_CHECKS,
    *idle.UNUSED_OPTION_CHECKS,
)


def problems(config: RunConfig, world_size: int, doubtful: Set[str] = frozenset()) -> list[Problem]:
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
    for name, value in flat(config).items():
        setting = SETTINGS[name]
        if value is None or setting.kind.scalar not in (int, float):
            continue
        limits = setting.option.limits
        if not all(limits.hold(item) for item in (value if setting.kind.many else (value,))):
            wrong.add(name)
            shown = setting.spell(value).partition(" ")[2]
            fix = setting.spell(_suggest(setting, value))
            found.append(Problem("E600", f"{name} {shown}: must be {limits}", (fix,)))
    known = _without(config, wrong)
    for check in CHECKS:
        try:
            found.extend(check(known, world_size))
        except _UnknownError:
            continue
    return found


def _suggest(setting: Setting, value: Any) -> Any:
    """Return the upper limit for a larger value; else the default, the example or the lower limit."""
    limits = setting.option.limits
    default = setting.default
    if setting.kind.many:
        return default or tuple(item if limits.hold(item) else limits.at_least for item in value)
    if limits.at_most is not None and value > limits.at_most:
        return setting.kind.scalar(limits.at_most)
    suggested = default if default is not None else setting.option.example
    return setting.kind.scalar(limits.at_least if suggested is None else suggested)


class _UnknownError(Exception):
    """A check used a value that is already known to be wrong."""


class _Unknown:
    """Placeholder for a wrong value: every use of it raises ``_UnknownError``."""

    def _refuse(self, *others: object) -> NoReturn:
        raise _UnknownError

    __getattr__ = __call__ = __fspath__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __hash__ = __format__ = __str__ = __repr__ = __int__ = __float__ = __index__ = __round__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse


def _without(config: RunConfig, names: set[str]) -> RunConfig:
    """Replace the values of ``names`` by ``_Unknown``."""
    hidden: dict[str, dict[str, Any]] = {}
    for name in names:
        hidden.setdefault(SETTINGS[name].group, {})[name] = _Unknown()
    groups = {f.name: getattr(config, f.name) for f in fields(config)}
    return replace(config, **{group: replace(groups[group], **values) for group, values in hidden.items()})
