"""Registries of what a user's own module adds to a run: callbacks, kernels, mixers, optimizers, and so on.

``--plugin MODULE`` imports MODULE before the other flags are checked; the module calls :func:`register`. The built-in
things of a kind are found in the module that owns the kind (``OPERATIONS`` of ``kernels.registry``, for example), which
looks here too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from megatron.config.errors import Problem, UserError
from megatron.config.text import shell_word

T = TypeVar("T")

ENTRY_POINTS = "megatron.plugins"
"""Group of entry points by whose names ``--plugin`` finds modules of installed packages."""

KINDS = (
    "attention_pattern",
    "callback",
    "dataset",
    "dispatcher",
    "kernel",
    "lr_schedule",
    "metric_logger",
    "mixer",
    "model_family",
    "model_options",
    "objective",
    "optimizer",
    "options",
)

_registered: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Return a decorator that adds a class, function or object to a kind.

    Args:
        kind: one of ``KINDS``.
        name: what flags call it; of a kernel ``operation=name``, as in ``--kernels attention=mine``.

    Raises:
        ValueError: for an unknown kind, or a name that another object has already.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of plugin is called {kind!r}; there are {', '.join(KINDS)}")

    def add(thing: T) -> T:
        if _registered[kind].setdefault(name, thing) is not thing:
            raise ValueError(f"two plugins register the {kind} {name!r}")
        return thing

    return add


def registered(kind: str) -> Mapping[str, Any]:
    """Return what plugins have added to a kind, by name."""
    return _registered[kind]


def option_groups() -> dict[str, type]:
    """Return the classes of options that plugins have registered, those of the model last."""
    return _registered["options"] | _registered["model_options"]


def load_plugins(names: Sequence[str]) -> None:
    """Import plugins, each a module or the name of an entry point in ``ENTRY_POINTS``.

    The working directory is searched too, as Python does for ``python -m``.

    Raises:
        UserError: when a plugin cannot be found or fails while it is imported.
    """
    if not names:
        return
    from importlib import metadata  # slow to import, and seldom needed

    found = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    problems = []
    for name in names:
        try:
            found[name].load() if name in found else import_module(name)
        except (Exception, SystemExit) as error:  # a user's module may fail in any way
            problems.append(_import_problem(name, error))
    if problems:
        raise UserError(problems)


def _import_problem(name: str, error: BaseException) -> Problem:
    missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
    if missing and name.endswith(".py"):
        sentence = f"--plugin {name}: a plugin is the name of a module, not a file"
        return Problem("E914", sentence, (f"write --plugin {name.removesuffix('.py').strip('./').replace('/', '.')}",))
    if missing:
        sentence = f"--plugin {name}: no such module in the working folder or on PYTHONPATH, and no such entry point"
        return Problem("E914", sentence, ("PYTHONPATH=FOLDER python pretrain_gpt.py ...",))
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return Problem(
        "E914",
        f"--plugin {name} failed while it was imported: {reason}",
        (f"python -c {shell_word(f'import {name}')}",),
    )
