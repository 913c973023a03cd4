"""Conversion from and to Hugging Face. Nothing is published before the check against `transformers`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.files import sync_folder
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.publish import remove
from megatron.checkpoint.remote import on_disk
from megatron.config.hf import CONFIG
from megatron.config.model import ModelConfig
from megatron.convert.check import Difference, check
from megatron.convert.checkpoint import Report, SavedModel, import_hf
from megatron.convert.export import Export
from megatron.parallel.build import DTYPES


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    path: Path  # what was written
    model: ModelConfig
    differences: Sequence[Difference]  # to transformers; empty without a check


def from_hf(folder: Path, save: Path, report: Report, checked: bool = True) -> Converted:
    """Convert a Hugging Face folder to a checkpoint of step 0 in ``save``.

    Args:
        folder: the Hugging Face model.
        save: a ``--save`` folder without checkpoints.
        report: progress callback.
        checked: compare with `transformers` before publishing the checkpoint.

    Raises:
        UserError, CheckpointError: when the model cannot be converted, or the check fails.
    """
    checkpoints = Checkpoints(save)
    if checkpoints.named():
        raise CheckpointError(f"{save} holds checkpoints already", "--save A_NEW_FOLDER")
    path = on_disk(checkpoints.path(0))
    unchecked = path.with_name(f"{path.name}.unchecked")  # not recognised as a checkpoint
    import_hf(folder, unchecked, report)
    try:
        saved = SavedModel(Manifest.open(unchecked))
        differences = check(folder, folder / CONFIG, saved.model, saved) if checked else ()
    except BaseException:
        remove(unchecked)
        raise
    try:
        os.rename(unchecked, path)
        sync_folder(save)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}; nothing was written", "--save A_NEW_FOLDER") from error
    return Converted(path, saved.model, differences)


def to_hf(
    manifest: Manifest,
    folder: Path,
    report: Report,
    *,
    dtype: str | None = None,
    shard_bytes: int,
    tokenizer: Path | None = None,
    average: bool = False,
    checked: bool = True,
) -> Converted:
    """Convert a checkpoint to a Hugging Face folder.

    Args:
        manifest: manifest of the checkpoint.
        folder: must not exist, or be empty.
        report: progress callback.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None for the data type that the run computed in.
        shard_bytes: maximum size of a weights file.
        tokenizer: folder with tokenizer files; None for those in the checkpoint.
        average: write the moving average of the weights.
        checked: compare weights and tokenizer with `transformers` before publishing the folder.

    Raises:
        UserError, CheckpointError: when the model cannot be converted, or the check fails.
    """
    saved = SavedModel(manifest, average)
    if dtype is None and saved.precision == "fp64":
        fixes = ("--dtype fp32", "--dtype bf16")
        raise CheckpointError("the run computed in fp64, which Hugging Face models do not support", *fixes)
    export = Export(saved, folder, DTYPES[dtype or saved.precision], tokenizer)
    if checked:
        export.check_tokenizer()
    export.build(shard_bytes, report)
    try:
        differences = check(export.building, export.pending_config, saved.model, export.source) if checked else ()
    except BaseException:
        export.abandon()
        raise
    export.publish()
    return Converted(folder, saved.model, differences)
