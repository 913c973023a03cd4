"""Conversion from and to Hugging Face. Nothing is published before the check against `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.durable_files import durable_rename
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.object_store import local_path
from megatron.checkpoint.publish import delete_checkpoint
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.check import OutputDifference, check_model
from megatron.convert.huggingface.config import CONFIG_FILE
from megatron.convert.huggingface.export import HuggingFaceExport
from megatron.convert.saved_model import ProgressCallback, SavedModel, import_huggingface
from megatron.layers.build import DTYPES


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion."""

    path: Path  # what was written
    model: ModelConfig
    differences: Sequence[OutputDifference]  # to transformers; empty without a check


def convert_from_huggingface(
    folder: Path, save: Path, report: ProgressCallback, checked: bool = True
) -> ConversionResult:
    """Convert a Hugging Face folder to a checkpoint of step 0 in ``save``.

    Args:
        folder: the Hugging Face model.
        save: a ``--save`` folder without checkpoints.
        report: progress callback.
        checked: compare with `transformers` before publishing the checkpoint.

    Raises:
        UserError, CheckpointError: when the model cannot be converted, or the check fails.
    """
    checkpoints = CheckpointFolder(save)
    if checkpoints.named():
        raise CheckpointError(f"{save} holds checkpoints already", "--save A_NEW_FOLDER")
    path = local_path(checkpoints.path(0))
    unchecked = path.with_name(f"{path.name}.unchecked")  # not recognised as a checkpoint
    import_huggingface(folder, unchecked, report)
    try:
        saved = SavedModel(Manifest.open(unchecked))
        differences = check_model(folder, folder / CONFIG_FILE, saved.model, saved) if checked else ()
    except BaseException:
        delete_checkpoint(unchecked)
        raise
    try:
        durable_rename(unchecked, path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}; nothing was written", "--save A_NEW_FOLDER") from error
    return ConversionResult(path, saved.model, differences)


def convert_to_huggingface(
    manifest: Manifest,
    folder: Path,
    report: ProgressCallback,
    *,
    dtype: str | None = None,
    shard_bytes: int,
    tokenizer: Path | None = None,
    average: bool = False,
    checked: bool = True,
) -> ConversionResult:
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
    export = HuggingFaceExport(saved, folder, DTYPES[dtype or saved.precision], tokenizer)
    if checked:
        export.check_tokenizer()
    export.build(shard_bytes, report)
    try:
        differences = check_model(export.building, export.pending_config, saved.model, export.source) if checked else ()
    except BaseException:
        export.abandon()
        raise
    export.publish()
    return ConversionResult(folder, saved.model, differences)
