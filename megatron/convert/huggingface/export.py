"""Export of a checkpoint to a Hugging Face folder, tensor by tensor.

The folder is written under a name ending in ``.tmp`` and without a config.json, so that it is not mistaken for a model
before it is complete and checked.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.durable_files import durable_rename, make_folder, sync_folder, write_file
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.tensor_file import TensorEntry, TensorFileWriter
from megatron.convert.huggingface.check import check_tokenizer
from megatron.convert.huggingface.config import CONFIG_FILE, SPECIAL_TOKEN_IDS, build_config_json, model_type_for
from megatron.convert.huggingface.weight_map import TensorMapping, map_tensors
from megatron.convert.huggingface.weights import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, read_in_blocks
from megatron.convert.saved_model import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_PREFIX,
    ConversionProgress,
    ProgressCallback,
    SavedModel,
    by_huggingface_names,
    find_tokenizer_files,
    saved_tokenizer_files,
)
from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON, find_eod_id, find_special_token
from megatron.distributed.sharding import Box

PENDING_CONFIG_FILE = "config.json.unfinished"
"""Name of config.json until the folder is complete."""


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to write."""

    ours: str  # our tensor that contains it
    slot: TensorMapping

    def bytes(self, dtype: torch.dtype) -> int:
        """Return its size in a file."""
        return prod(self.slot.shape) * dtype.itemsize


class RoundedWeights:
    """The weights of a checkpoint, rounded to the exported data type."""

    def __init__(self, saved: SavedModel, dtype: torch.dtype) -> None:
        self._saved, self._dtype = saved, dtype

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor.

        Raises:
            CheckpointError: when a value overflows the data type.
            DamagedCheckpointError: when a checksum does not match.
        """
        exact = self._saved.read(name, view, box)
        rounded = exact.to(self._dtype)
        if self._dtype == torch.float16 and not torch.isfinite(rounded).all() and torch.isfinite(exact).all():
            raise CheckpointError(
                f"{name} has values above {torch.finfo(self._dtype).max:g}, too large for fp16", "--dtype bf16"
            )
        return rounded


class HuggingFaceExport:
    """Export of one checkpoint: create, then :meth:`build`, then :meth:`publish` or :meth:`abandon`."""

    def __init__(self, saved: SavedModel, folder: Path, dtype: torch.dtype, tokenizer: Path | None = None) -> None:
        """Check everything that can be checked before anything is written.

        Args:
            saved: the checkpoint.
            folder: must not exist, or be empty.
            dtype: data type of the written tensors.
            tokenizer: folder with tokenizer files; None for those in the checkpoint.

        Raises:
            CheckpointError: when the folder is not empty, or the tokenizer does not fit the model.
            UserError: when no Hugging Face model computes the same.
        """
        _check_target(folder)
        self.folder = folder
        self.building = folder.with_name(folder.name + ".tmp")
        self.source = RoundedWeights(saved, dtype)
        self._saved = saved
        self._dtype = dtype
        _check_leftover(self.building, folder)
        self._files = _small_files(saved, tokenizer)
        special = special_token_ids(self._files, saved.model.vocab)
        self._config = build_config_json(saved.model, str(dtype).removeprefix("torch."), special)
        self._files[GENERATION_CONFIG_FILE] = _generation(self._files, special)
        kind = model_type_for(saved.model)
        self._items = [
            ExportedTensor(name, slot) for name, found in map_tensors(kind, saved.specs).items() for slot in found
        ]

    @property
    def pending_config(self) -> Path:
        """Path of config.json before the export is published."""
        return self.building / PENDING_CONFIG_FILE

    def check_tokenizer(self) -> None:
        """Check the ids of ``AutoTokenizer``, and change ``tokenizer_class`` if that helps. Call before `build`.

        Raises:
            MismatchError: when it gives other ids than the run's tokenizer.
        """
        self._files = check_tokenizer(self._files, self._config)

    def build(self, shard_bytes: int, report: ProgressCallback) -> None:
        """Write all files; config.json gets its name in :meth:`publish`.

        Args:
            shard_bytes: maximum size of a weights file, unless a single tensor is larger.
            report: progress callback.

        Raises:
            StorageError: when writing fails; the files are then removed.
            DamagedCheckpointError: when a checksum of the checkpoint does not match.
        """
        with self._removing_on_failure():
            if self.building.exists():
                shutil.rmtree(self.building)
            make_folder(self.building)
            write_file(self.pending_config, _json(self._config))
            self._write_weights(list(split_into_shards(self._items, self._dtype, shard_bytes)), report)
            for name, content in self._files.items():
                write_file(self.building / name, content)
            sync_folder(self.building)

    def publish(self) -> None:
        """Give config.json and the folder their final names.

        Raises:
            StorageError: when renaming fails; the files are then removed.
        """
        with self._removing_on_failure():
            durable_rename(self.pending_config, self.building / CONFIG_FILE)
            durable_rename(self.building, self.folder)  # replaces an empty folder

    def abandon(self) -> None:
        """Remove the unpublished files."""
        shutil.rmtree(self.building, ignore_errors=True)

    @contextmanager
    def _removing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            seen = f"{error.filename or self.building}: {error.strerror or error}"
            raise StorageError(f"{seen}; nothing was exported", "--save-hf A_FOLDER_ELSEWHERE") from error
        except BaseException:
            self.abandon()
            raise

    def _write_weights(self, groups: list[list[ExportedTensor]], report: ProgressCallback) -> None:
        progress = ConversionProgress(report, sum(prod(item.slot.shape) for item in self._items))
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = WEIGHTS_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            entries: list[TensorEntry] = [(item.slot.name, self._dtype, item.slot.shape) for item in group]
            with TensorFileWriter(self.building / name, entries, {"format": "pt"}) as file:
                for item in group:
                    view = self._saved.specs[item.ours].view
                    ours = read_in_blocks(self.source, item.ours, view, item.slot.box, self._dtype)
                    file.write(item.slot.name, item.slot.restore(ours))
                    progress.add(item.slot.name, prod(item.slot.shape))
            weight_map |= {item.slot.name: name for item in group}
        if len(groups) > 1:
            total = sum(item.bytes(self._dtype) for item in self._items)
            write_file(
                self.building / WEIGHTS_INDEX_FILE, _json({"metadata": {"total_size": total}, "weight_map": weight_map})
            )


def _check_target(folder: Path) -> None:
    """Raise CheckpointError unless a folder can be renamed to ``folder``."""
    new = "--save-hf A_NEW_FOLDER"
    if folder.is_symlink():
        fix = f"--save-hf {shlex.quote(str(folder.resolve()))}"
        raise CheckpointError(f"{folder} is a link, which a folder cannot replace", fix)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty", new)
    if folder.resolve() == Path.cwd():
        raise CheckpointError(f"{folder} is the current folder, which cannot be replaced", new)


def _check_leftover(building: Path, folder: Path) -> None:
    """Raise CheckpointError if the temporary folder exists and is not an unfinished conversion."""
    if (
        not building.exists()
        or (building / PENDING_CONFIG_FILE).exists()
        or (building.is_dir() and not any(building.iterdir()))
    ):
        return
    if (building / CONFIG_FILE).exists():
        free = f"rmdir {shlex.quote(str(folder))} && " if folder.exists() else ""
        raise CheckpointError(
            f"{building} holds a model; if a conversion was killed before its last rename, it is complete and only "
            "lacks its name",
            f"{free}mv {shlex.quote(str(building))} {shlex.quote(str(folder))}",
            "--save-hf A_NEW_FOLDER",
        )
    raise CheckpointError(f"{building} exists and was not left by a conversion", "--save-hf A_NEW_FOLDER")


def split_into_shards(items: list[ExportedTensor], dtype: torch.dtype, limit: int) -> Iterator[list[ExportedTensor]]:
    """Yield groups of consecutive items of at most ``limit`` bytes; a larger item is a group of its own."""
    group: list[ExportedTensor] = []
    size = 0
    for item in items:
        if group and size + item.bytes(dtype) > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.bytes(dtype)
    yield group


def _small_files(saved: SavedModel, tokenizer: Path | None) -> dict[str, bytes]:
    """Return tokenizer files and generation settings, by their names in a Hugging Face folder.

    Raises:
        CheckpointError: when the given folder has no tokenizer.
    """
    if tokenizer is None:
        return by_huggingface_names(saved_tokenizer_files(saved.manifest))
    found = find_tokenizer_files(tokenizer)
    if not any(name.startswith(TOKENIZER_PREFIX) for name in found):
        raise CheckpointError(f"{tokenizer} holds no tokenizer.json or other file of a tokenizer", "--tokenizer FOLDER")
    return by_huggingface_names(found)


def special_token_ids(files: Mapping[str, bytes], entries: int) -> dict[str, int | list[int] | None]:
    """Return the ids of begin, end and padding tokens, by ``SPECIAL_TOKEN_IDS``; None for those that do not exist.

    Args:
        files: tokenizer files, and generation_config.json, which takes precedence.
        entries: vocabulary size of the model.

    Raises:
        CheckpointError: when the tokenizer has larger ids than the model, or a file is malformed.
    """
    ids = _vocabulary(files)
    largest = max(ids.values(), default=-1)
    if largest >= entries:
        seen = f"the tokenizer has ids up to {largest}, but the model's vocabulary {entries} entries"
        raise CheckpointError(seen, "--tokenizer ANOTHER_FOLDER")
    generation = _object(files, GENERATION_CONFIG_FILE)
    try:
        named = {name: find_special_token(files, name.removesuffix("_id")) for name in SPECIAL_TOKEN_IDS}
        found = {name: None if token is None else ids.get(token) for name, token in named.items()}
        found["eos_token_id"] = find_eod_id(files, ids)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    return {name: found[name] if generation.get(name) is None else generation[name] for name in SPECIAL_TOKEN_IDS}


def _generation(files: Mapping[str, bytes], special: Mapping[str, int | list[int] | None]) -> bytes:
    """Return a generation_config.json with the special tokens of config.json; unchanged if it has them already."""
    ids = {name: value for name, value in special.items() if value is not None}
    settings = _object(files, GENERATION_CONFIG_FILE)
    return (
        files[GENERATION_CONFIG_FILE]
        if GENERATION_CONFIG_FILE in files and settings | ids == settings
        else _json(settings | ids)
    )


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty object if there is no such file.

    Raises:
        CheckpointError: when it is not a JSON object.
    """
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise CheckpointError(f"the tokenizer's {name} is no JSON: {error}", "--tokenizer ANOTHER_FOLDER") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"the tokenizer's {name} is no JSON object", "--tokenizer ANOTHER_FOLDER")
    return content


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return token -> id of tokenizer.json; empty if there is no such file.

    Raises:
        CheckpointError: when it does not have the structure of the `tokenizers` library.
    """
    tokenizer = _object(files, TOKENIZER_JSON)
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((t, i) for i, (t, _) in enumerate(vocabulary))
        added = ((token["content"], token["id"]) for token in tokenizer.get("added_tokens", ()))
        return {str(token): int(i) for token, i in (*pairs, *added)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        seen = f"the tokenizer's {TOKENIZER_JSON} is not one of the tokenizers library: {error!r}"
        raise CheckpointError(seen, "--tokenizer ANOTHER_FOLDER") from error


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
