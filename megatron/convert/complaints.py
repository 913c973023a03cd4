"""What is wrong with a model or a set of tensors, told at once and by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.remote import Location
from megatron.config.model import ModelConfig
from megatron.config.problems import UserError
from megatron.config.run import RunConfig, TrainingConfig
from megatron.config.validate import problems

SHOWN = 8


def refuse(where: Location, complaints: Mapping[str, Collection[str]], *fixes: str) -> None:
    """Say which names each complaint is about; nothing when no complaint has any.

    Raises:
        CheckpointError: ``where lacks: a, b; it holds: c``.
    """
    said = [f"{what}: {some(sorted(names))}" for what, names in complaints.items() if names]
    if said:
        raise CheckpointError(f"{where} {'; it '.join(said)}", *fixes)


def refuse_impossible(where: Location, model: ModelConfig) -> None:
    """Say what keeps a model that ``where`` describes from being built; nothing when its numbers fit together.

    Raises:
        UserError: when they do not.
    """
    run = RunConfig(model=model, training=TrainingConfig(seq_length=model.max_position_embeddings or 1))
    found = [p for p in problems(run, 1) if p.code == "E600" or p.code.startswith("E1")]
    if found:
        raise UserError([replace(problem, sentence=f"{where}: {problem.sentence}", fixes=()) for problem in found])


def some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(list(names)[:SHOWN]) + more
