"""Conversion of checkpoints from and to Hugging Face, tensor by tensor.

Nothing is published before the check against `transformers`: a checkpoint is written under a name that is not taken for
one, a Hugging Face folder under a name ending in ``.tmp`` and without a config.json.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.arguments.sources import resolve, to_dict
from megatron.checkpoint.durable_files import durable_rename, make_folder, sync_folder, write_file
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest, split_box
from megatron.checkpoint.location import local_path
from megatron.checkpoint.publish import delete_checkpoint
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorEntry, TensorFileWriter, TensorPart
from megatron.config.files import parse_json
from megatron.config.model import ModelConfig
from megatron.config.run import PrecisionConfig, RunConfig
from megatron.convert.huggingface.check import OutputDifference, check_model, check_tokenizer
from megatron.convert.huggingface.config import (
    CONFIG_FILE,
    SPECIAL_TOKEN_IDS,
    build_config_json,
    read_config,
    read_model_config,
)
from megatron.convert.huggingface.weights import (
    BLOCK_ELEMENTS,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    HuggingFaceWeights,
    TensorMapping,
    map_tensors,
    read_in_blocks,
)
from megatron.convert.saved_model import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_PREFIX,
    SavedModel,
    by_huggingface_names,
    find_tokenizer_files,
    saved_tokenizer_files,
)
from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON, find_eod_id, find_special_token
from megatron.distributed.comm import Group
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.context import DTYPES

ProgressCallback = Callable[[str, int, int], None]
"""Progress callback: (name of the last tensor, elements done, total elements)."""

PENDING_CONFIG_FILE = "config.json.unfinished"
"""Name of config.json until the folder is complete."""


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion."""

    path: Path  # what was written
    model: ModelConfig
    differences: Sequence[OutputDifference]  # to transformers; empty without a check


class _Progress:
    """Counts converted elements and reports them."""

    def __init__(self, report: ProgressCallback, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, name: str, elements: int) -> None:
        self._done += elements
        self._report(name, self._done, self._total)


# ---- From Hugging Face ----


def convert_from_huggingface(
    folder: Path, save: Path, report: ProgressCallback, checked: bool = True
) -> ConversionResult:
    """Convert a Hugging Face folder to a checkpoint of step 0.

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


def import_huggingface(folder: Path, path: Path, report: ProgressCallback) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0, one block at a time, without a check.

    Args:
        folder: folder with config.json and safetensors files.
        path: folder of the new checkpoint.
        report: progress callback.

    Raises:
        UserError: when config.json has unsupported options.
        CheckpointError: when tensors are missing, unused or of another shape.
        StorageError: when writing fails.
    """
    model = read_model_config(folder)
    source = HuggingFaceWeights(folder, model)
    precision = PrecisionConfig(params_dtype=next(name for name, dtype in DTYPES.items() if dtype == source.dtype))
    config = resolve(RunConfig(model=model, precision=precision), 1)
    progress = _Progress(report, sum(spec.numel for spec in source.specs.values()))
    tensors = {name: _global_tensor(source, name, spec, progress) for name, spec in source.specs.items()}
    settings = read_config(folder)
    special_ids = {name: settings[name] for name in SPECIAL_TOKEN_IDS if settings.get(name) is not None}
    files: dict[str, Path | bytes] = {
        GENERATION_CONFIG_FILE: json.dumps(special_ids).encode(),
        **find_tokenizer_files(folder),
    }
    save_sharded(path, tensors, {"iteration": 0, "consumed_samples": 0}, to_dict(config), Group(), files)


def _global_tensor(source: HuggingFaceWeights, name: str, spec: ShardSpec, progress: _Progress) -> GlobalTensor:
    """Return a tensor whose parts are read only when they are written, so that one part at a time is in memory."""

    def part(box: Box) -> TensorPart:
        def read() -> Tensor:
            values = source.read(name, spec.view, box).to(torch.float32)
            progress.add(name, box.numel)
            return values

        return TensorPart(box, read)

    parts = tuple(part(block) for box in source.boxes(name) for block in split_box(box, BLOCK_ELEMENTS))
    return GlobalTensor(spec.shape, spec.view, torch.float32, parts)


# ---- To Hugging Face ----


def convert_to_huggingface(
    manifest: Manifest,
    folder: Path,
    report: ProgressCallback,
    *,
    dtype: str | None = None,
    shard_bytes: int,
    tokenizer: Path | None = None,
    model_type: str | None = None,
    average: bool = False,
    checked: bool = True,
) -> ConversionResult:
    """Convert a checkpoint to a Hugging Face folder. All that can be checked is checked before anything is written.

    Args:
        manifest: manifest of the checkpoint.
        folder: must not exist, or be empty.
        report: progress callback.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None for the data type that the run computed in.
        shard_bytes: maximum size of a weights file, unless a single tensor is larger.
        tokenizer: folder with tokenizer files; None for those in the checkpoint.
        model_type: of transformers; None for the first that computes the same.
        average: write the moving average of the weights.
        checked: compare weights and tokenizer with `transformers` before publishing the folder.

    Raises:
        UserError: when no Hugging Face model computes the same.
        CheckpointError: when the folder is not empty, the tokenizer does not fit the model, or the check fails.
        DamagedCheckpointError: when a checksum of the checkpoint does not match.
        StorageError: when writing fails.
    """
    saved = SavedModel(manifest, average)
    if dtype is None and saved.precision == "fp64":
        fixes = ("--dtype fp32", "--dtype bf16")
        raise CheckpointError("the run computed in fp64, which Hugging Face models do not support", *fixes)
    source = RoundedWeights(saved, DTYPES[dtype or saved.precision])
    _check_target(folder)
    building = folder.with_name(folder.name + ".tmp")
    _check_leftover(building, folder)
    files = _small_files(saved, tokenizer)
    special = special_token_ids(files, saved.model.vocab)
    config = build_config_json(saved.model, str(source.dtype).removeprefix("torch."), special, model_type)
    files[GENERATION_CONFIG_FILE] = _generation_config(files, special)
    mappings = map_tensors(config["model_type"], saved.specs)
    if checked:
        files = check_tokenizer(files, config)

    pending_config = building / PENDING_CONFIG_FILE
    try:
        with _disk_errors_as_storage_errors(building):
            if building.exists():
                shutil.rmtree(building)
            make_folder(building)
            write_file(pending_config, _json(config))
            _write_weights(building, source, [m for found in mappings.values() for m in found], shard_bytes, report)
            for name, content in files.items():
                write_file(building / name, content)
            sync_folder(building)
        differences = check_model(building, pending_config, saved.model, source) if checked else ()
        with _disk_errors_as_storage_errors(building):
            durable_rename(pending_config, building / CONFIG_FILE)
            durable_rename(building, folder)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return ConversionResult(folder, saved.model, differences)


class RoundedWeights:
    """The weights of a checkpoint, rounded to the exported data type; values that overflow it are refused."""

    def __init__(self, saved: SavedModel, dtype: torch.dtype) -> None:
        self.specs, self.dtype, self._saved = saved.specs, dtype, saved

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor."""
        exact = self._saved.read(name, view, box)
        rounded = exact.to(self.dtype)
        if self.dtype == torch.float16 and not torch.isfinite(rounded).all() and torch.isfinite(exact).all():
            raise CheckpointError(
                f"{name} has values above {torch.finfo(self.dtype).max:g}, too large for fp16", "--dtype bf16"
            )
        return rounded


@contextmanager
def _disk_errors_as_storage_errors(building: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        seen = f"{error.filename or building}: {error.strerror or error}"
        raise StorageError(f"{seen}; nothing was exported", "--save-hf A_FOLDER_ELSEWHERE") from error


def _write_weights(
    folder: Path, source: RoundedWeights, tensors: list[TensorMapping], shard_bytes: int, report: ProgressCallback
) -> None:
    """Write the weights files, and their index if there are several."""
    stored = [list(parts) for _, parts in groupby(tensors, lambda tensor: tensor.name)]  # some join several parts
    sizes = [prod(parts[0].stored) * source.dtype.itemsize for parts in stored]
    progress = _Progress(report, sum(prod(parts[0].stored) for parts in stored))
    shards = split_into_shards(sizes, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        held = stored[shard]
        entries: list[TensorEntry] = [(parts[0].name, source.dtype, parts[0].stored) for parts in held]
        with TensorFileWriter(folder / file_name, entries, {"format": "pt"}) as file:
            for first, *more in held:
                view = source.specs[first.ours].view
                restored = [
                    part.restore(read_in_blocks(source, part.ours, view, part.box, source.dtype))
                    for part in (first, *more)
                ]
                file.write(first.name, torch.cat(restored, first.joined) if more else restored[0])
                progress.add(first.name, prod(first.stored))
        weight_map |= {parts[0].name: file_name for parts in held}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_file(folder / WEIGHTS_INDEX_FILE, _json(index))


def split_into_shards(sizes: Sequence[int], limit: int) -> list[slice]:
    """Group consecutive items so that the sizes of a group sum to at most ``limit``; a larger item is a group alone."""
    starts, total = [0], 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            starts.append(i)
            total = 0
        total += size
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)])]


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
    if not building.exists() or (building / PENDING_CONFIG_FILE).exists():
        return
    if building.is_dir() and not any(building.iterdir()):
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


def _small_files(saved: SavedModel, tokenizer: Path | None) -> dict[str, bytes]:
    """Return tokenizer files and generation settings, by their names in a Hugging Face folder."""
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
    """
    ids = _vocabulary(files)
    largest = max(ids.values(), default=-1)
    if largest >= entries:
        seen = f"the tokenizer has ids up to {largest}, but the model's vocabulary {entries} entries"
        raise CheckpointError(seen, "--tokenizer ANOTHER_FOLDER")
    generation = _json_object(files, GENERATION_CONFIG_FILE)
    try:
        named = {name: find_special_token(files, name.removesuffix("_id")) for name in SPECIAL_TOKEN_IDS}
        found = {name: None if token is None else ids.get(token) for name, token in named.items()}
        found["eos_token_id"] = find_eod_id(files, ids)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    return {name: found[name] if generation.get(name) is None else generation[name] for name in SPECIAL_TOKEN_IDS}


def _generation_config(files: Mapping[str, bytes], special: Mapping[str, int | list[int] | None]) -> bytes:
    """Return a generation_config.json with the special tokens of config.json; unchanged if it has them already."""
    settings = _json_object(files, GENERATION_CONFIG_FILE)
    wanted = settings | {name: value for name, value in special.items() if value is not None}
    unchanged = GENERATION_CONFIG_FILE in files and wanted == settings
    return files[GENERATION_CONFIG_FILE] if unchanged else _json(wanted)


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return token -> id of tokenizer.json; empty if there is no such file."""
    tokenizer = _json_object(files, TOKENIZER_JSON)
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((t, i) for i, (t, _) in enumerate(vocabulary))
        added = ((token["content"], token["id"]) for token in tokenizer.get("added_tokens", ()))
        return {str(token): int(i) for token, i in (*pairs, *added)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        seen = f"the tokenizer's {TOKENIZER_JSON} is not one of the tokenizers library: {error!r}"
        raise CheckpointError(seen, "--tokenizer ANOTHER_FOLDER") from error


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the content of a JSON file, or an empty object if there is no such file."""
    try:
        content = parse_json(files.get(name, b"{}"))
    except ValueError as error:
        raise CheckpointError(f"the tokenizer's {name} is no JSON: {error}", "--tokenizer ANOTHER_FOLDER") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"the tokenizer's {name} is no JSON object", "--tokenizer ANOTHER_FOLDER")
    return content


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
