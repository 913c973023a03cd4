"""Report for ``--check-config`` what a run would start from, without torch and without reading tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.manifest import Manifest
from megatron.config.run import HUGGING_FACE, CheckpointConfig, RunConfig
from megatron.training.origin import changes_since, look, place_of


@dataclass(frozen=True)
class Preview:
    """Notes and position of a start that has not been made."""

    notes: tuple[str, ...] = ()  # one line each
    iteration: int = 0  # steps already taken
    consumed_samples: int = 0


def recall(options: CheckpointConfig) -> Mapping[str, Any] | None:
    """Return the configuration stored in the checkpoint that a run starts from; None without a checkpoint.

    Raises:
        UserError: if a checkpoint is required and none can be read.
    """
    source = look(options)
    return Manifest.open(source.paths[0]).config if source.paths else None


def preview(config: RunConfig, world_size: int) -> Preview:
    """Return the notes and the position with which the run would start.

    Args:
        config: resolved configuration, vocabulary size included.
        world_size: number of ranks.

    Raises:
        UserError: if a required checkpoint is missing, or the run must not resume from it.

    """
    source = look(config.checkpoint)
    if source.hf is not None:
        return Preview((*source.notes, f"checkpoint: {HUGGING_FACE}{source.hf}, its tensors not read"))
    if source.fresh:
        return Preview(source.notes)
    manifest = Manifest.open(source.paths[0])
    changes = changes_since(manifest, config, world_size, source.mode, source.notes)
    notes = (*source.notes, f"checkpoint: {manifest.path}, its tensors not read", *changes.lines)
    return Preview(notes, *((0, 0) if source.mode == "weights-only" else place_of(manifest)))
