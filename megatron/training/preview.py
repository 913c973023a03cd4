"""What a start would say of the checkpoint that it begins with: without torch, and without the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.manifest import Manifest
from megatron.config.run import HUGGING_FACE, CheckpointConfig, RunConfig
from megatron.training.origin import changes_since, look, place_of


@dataclass(frozen=True)
class Preview:
    """What a start would say.

    Attributes:
        notes: one line each.
        iteration: steps taken before it.
        consumed_samples: samples they used.
    """

    notes: tuple[str, ...] = ()
    iteration: int = 0
    consumed_samples: int = 0


def recall(options: CheckpointConfig) -> Mapping[str, Any] | None:
    """The configuration of the checkpoint that a run begins with; None where it begins with none.

    Raises:
        UserError: when there should be one, and none can be read.
    """
    origin = look(options)
    return Manifest.open(origin.paths[0]).config if origin.paths else None


def preview(config: RunConfig, world_size: int) -> Preview:
    """What the start of a run would say about what it begins with.

    Args:
        config: resolved, the vocabulary's size included.
        world_size: ranks.

    Raises:
        UserError: when there is no such checkpoint, or the run must not go on from it.

    """
    origin = look(config.checkpoint)
    if origin.hf is not None:
        return Preview((*origin.notes, f"checkpoint: {HUGGING_FACE}{origin.hf}, its tensors not read"))
    if origin.fresh:
        return Preview(origin.notes)
    manifest = Manifest.open(origin.paths[0])
    changes = changes_since(manifest, config, world_size, origin.mode, origin.notes)
    notes = (*origin.notes, f"checkpoint: {manifest.path}, its tensors not read", *changes.lines)
    return Preview(notes, *((0, 0) if origin.mode == "weights-only" else place_of(manifest)))
