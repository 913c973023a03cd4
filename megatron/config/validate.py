"""All checks of a configuration at once."""

from __future__ import annotations

from collections.abc import Iterator, Set
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
    *model.CHECKS,
    *layout.CHECKS,
    *experts.CHECKS,
    *sharding.CHECKS,
    *pipeline.CHECKS,
    *batch.CHECKS,
    *optimizer.CHECKS,
    *data.CHECKS,
    *checkpoint.CHECKS,
    *ends.CHECKS,
    *compute.CHECKS,
    *graphs.CHECKS,
    *logging.CHECKS,
    *profiling.CHECKS,
    *idle.CHECKS,
)


def problems(config: RunConfig, world_size: int, doubtful: Set[str] = frozenset()) -> list[Problem]:
    """Everything that is wrong with a run on ``world_size`` ranks.

    Each number is checked by itself first. Checks of how values fit together leave out those that are already known
    to be wrong, so that one mistake is not told twice.

    Args:
        config: resolved or not.
        world_size: ranks.
        doubtful: fields about which something unreadable was said.

    """
    beyond = [(s, v) for s, v in _numbers(config) if not _within(s, v)]
    found = [_beyond(setting, value) for setting, value in beyond]
    known = _without(config, set(doubtful) | {setting.name for setting, _ in beyond})
    for check in CHECKS:
        try:
            found.extend(check(known, world_size))
        except _UnknownError:
            continue
    return found


def _numbers(config: RunConfig) -> Iterator[tuple[Setting, Any]]:
    for name, value in flat(config).items():
        setting = SETTINGS[name]
        if value is not None and setting.kind.scalar in (int, float):
            yield setting, value


def _within(setting: Setting, value: Any) -> bool:
    return all(setting.option.limits.hold(v) for v in (value if setting.kind.many else (value,)))


def _beyond(setting: Setting, value: Any) -> Problem:
    shown = setting.spell(value).partition(" ")[2]
    sentence = f"{setting.name} {shown}: must be {setting.option.limits}"
    return Problem("E600", sentence, (setting.spell(_better(setting, value)),))


def _better(setting: Setting, value: Any) -> Any:
    """The upper limit in place of more, else the default, an example, or the lower limit: the first that there is."""
    limits, default = setting.option.limits, setting.default
    if setting.kind.many:
        return default or tuple(item if limits.hold(item) else limits.at_least for item in value)
    if limits.at_most is not None and value > limits.at_most:
        return setting.kind.scalar(limits.at_most)
    usual = default if default is not None else setting.option.example
    return setting.kind.scalar(limits.at_least if usual is None else usual)


class _UnknownError(Exception):
    """Somebody looked at a value that is not known."""


class _Unknown:
    """In place of a value that is known to be wrong: whoever computes with it raises ``_UnknownError``."""

    def _refuse(self, *others: object) -> NoReturn:
        raise _UnknownError

    __getattr__ = __call__ = __fspath__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _refuse
    __hash__ = __format__ = __str__ = __repr__ = __int__ = __float__ = __index__ = __round__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse


def _without(config: RunConfig, names: set[str]) -> RunConfig:
    """The configuration with the values of ``names`` made unknown."""
    hidden: dict[str, dict[str, Any]] = {}
    for name in names:
        hidden.setdefault(SETTINGS[name].group, {})[name] = _Unknown()
    groups = {f.name: getattr(config, f.name) for f in fields(config)}
    return replace(config, **{group: replace(groups[group], **values) for group, values in hidden.items()})
