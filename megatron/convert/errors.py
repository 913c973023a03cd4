"""Errors that list all wrong tensors or options by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megatron.arguments.validate import find_problems
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.object_store import Location
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig, TrainingConfig

MAX_NAMES = 8
"""Names listed in a message before the rest is counted."""


def raise_if_any(where: Location, findings: Mapping[str, Collection[str]], *fixes: str) -> None:
    """Raise an error if any finding has names.

    Args:
        where: file or folder, the subject of the message.
        findings: predicate, such as ``lacks``, -> names it applies to.
        fixes: appended to the message.

    Raises:
        CheckpointError: ``WHERE lacks: a, b; it holds: c``.
    """
    found = [f"{predicate}: {abbreviate(sorted(names))}" for predicate, names in findings.items() if names]
    if found:
        raise CheckpointError(f"{where} {'; it '.join(found)}", *fixes)


def check_model_config(where: Location, model: ModelConfig) -> None:
    """Raise an error if the options of a model contradict each other.

    Raises:
        UserError: with all problems.
    """
    run = RunConfig(model=model, training=TrainingConfig(seq_length=model.max_position_embeddings or 1))
    found = [p for p in find_problems(run, 1) if p.code == "E600" or p.code.startswith("E1")]
    if found:
        raise UserError([replace(problem, sentence=f"{where}: {problem.sentence}", fixes=()) for problem in found])


def abbreviate(names: Collection[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(list(names)[:MAX_NAMES]) + more
