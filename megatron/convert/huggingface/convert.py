"""Conversion of checkpoints from and to Hugging Face, tensor by tensor.

Nothing is published before the check against `transformers`: a checkpoint is written to a staging folder whose name is
not that of one, and its marker last; a Hugging Face folder to one whose name ends in ``.tmp``, without a config.json.
A conversion that is killed leaves its staging folder, in which the next one continues (:class:`StagingFolder`).
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.arguments.sources import resolve, to_dict
from megatron.checkpoint.durable_files import (
    checksum,
    durable_rename,
    make_folder,
    publish_file,
    sync_folder,
    write_file,
)
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import (
    MANIFEST,
    MARKER,
    TensorChunk,
    TensorRecord,
    encode_manifest,
    marker_content,
    parse_manifest,
    split_box,
    whole_box,
)
from megatron.checkpoint.location import local_path
from megatron.checkpoint.publish import ATTEMPT_PREFIX
from megatron.checkpoint.save import (
    CheckpointExtras,
    RankFile,
    build_manifest,
    rank_file_name,
    storage_errors,
    write_rank_file,
    write_small_files,
)
from megatron.checkpoint.tensor_file import (
    DTYPE_NAMES,
    GlobalTensor,
    TensorEntry,
    TensorFileWriter,
    TensorPart,
    copy_tiled,
)
from megatron.config.files import parse_json
from megatron.config.model import ModelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.text import package_version
from megatron.convert.huggingface.check import OutputDifference, check_model, check_tokenizer
from megatron.convert.huggingface.config import (
    CONFIG_FILE,
    SPECIAL_TOKEN_IDS,
    WEIGHTS_INDEX_FILE,
    build_config_json,
    read_config,
)
from megatron.convert.huggingface.weights import (
    WEIGHTS_FILE,
    HuggingFaceWeights,
    TensorMapping,
    huggingface_tensors,
)
from megatron.convert.model_card import CARD_FILE, OTHER_CARD_FILE, model_card
from megatron.convert.saved_model import SavedModel
from megatron.convert.staging import (
    JOURNAL,
    ConversionProgress,
    ProgressCallback,
    StagedFile,
    StagingFolder,
    disk_errors,
    removed_on_error,
)
from megatron.convert.tokenizer_files import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_PREFIX,
    by_huggingface_names,
    find_tokenizer_files,
    saved_tokenizer_files,
)
from megatron.convert.weight_source import BLOCK_ELEMENTS
from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import TOKENIZER_CONFIG, TOKENIZER_JSON, find_eod_id, find_special_token
from megatron.distributed.sharding import Box
from megatron.layers.context import DTYPES

PENDING_CONFIG_FILE = "config.json.unfinished"
"""Name of config.json until the folder is complete."""

NO_LENGTH = 1e20
"""Values of ``model_max_length`` from here on stand for no limit in transformers."""

FILE_BYTES = 2 << 30
"""Maximum size of a tensor file of an imported checkpoint, unless a single tensor is larger."""

ATTEMPT = f"{ATTEMPT_PREFIX}import"
"""Folder of the files in an imported checkpoint."""


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion."""

    path: Path  # what was written
    model: ModelConfig
    differences: Sequence[OutputDifference]  # to transformers; empty without a check
    kept: int = 0  # files that an interrupted conversion had completed
    architecture: str = ""  # class of transformers that an export is for


# ---- From Hugging Face ----


def convert_from_huggingface(
    source: HuggingFaceWeights,
    save: Path,
    report: ProgressCallback,
    checked: bool = True,
    dtype: str | None = None,
    workers: int = 1,
) -> ConversionResult:
    """Write a Hugging Face model as a checkpoint of step 0, one block at a time.

    Args:
        source: the model.
        save: a ``--save`` folder without checkpoints.
        report: progress callback.
        checked: compare with `transformers` before publishing the checkpoint.
        dtype: ``fp32``, ``bf16`` or ``fp16``, of the stored weights; None for fp32.
        workers: files to write at the same time, each in a thread.

    Raises:
        UserError, CheckpointError: when the model cannot be converted, or the check fails.
        StorageError: when writing fails.
    """
    path, folder = new_checkpoint(save), source.folder
    stored = DTYPES[dtype or "fp32"]
    sizes = {name: spec.numel * stored.itemsize for name, spec in source.specs.items()}
    names = [*sizes]
    groups = [names[group] for group in split_into_shards([*sizes.values()], FILE_BYTES)]
    staged = path.with_name(f"{path.name}.unchecked")  # not recognised as a checkpoint
    extra = _imported_extras(source, dtype)
    identity = {
        "program": package_version(),
        "mappings": checksum(repr(source.mappings).encode()),
        "groups": groups,
        "dtype": str(stored),
        "files": _file_versions(folder),
    }
    with storage_errors(path, 0, None):
        make_folder(path.parent, private=True)
        staging = StagingFolder(staged / ATTEMPT, identity)
    with staging, removed_on_error(staged), storage_errors(path, 0, None):
        files = {
            rank_file_name(i): StagedFile(
                sum(sizes[name] for name in group), partial(_write_tensors, staging.folder, i, group, source, stored)
            )
            for i, group in enumerate(groups)
        }
        ranks = staging.write(files, workers, report)
        manifest = build_manifest(ranks, write_small_files(staging.folder, extra.files), extra)
        write_file(staging.folder / MANIFEST, manifest)
        sync_folder(staging.folder)
        saved = SavedModel(parse_manifest(staged, manifest, ATTEMPT))
        differences = check_model(folder, folder / CONFIG_FILE, saved.model, saved, stored) if checked else ()
        staging.close_journal()
        publish_file(staged / MARKER, marker_content(manifest, ATTEMPT))
        durable_rename(staged, path)
    return ConversionResult(path, saved.model, differences, staging.kept)


def new_checkpoint(save: Path, iteration: int = 0) -> Path:
    """Return the path of a checkpoint in a folder; CheckpointError if there are checkpoints in it already."""
    checkpoints = CheckpointFolder(save)
    if checkpoints.named():
        raise CheckpointError(f"{save} holds checkpoints already", "--save A_NEW_FOLDER")
    return local_path(checkpoints.path(iteration))


def _file_versions(folder: Path) -> dict[str, list[int]]:
    """Return size and times of last change of the files that determine the weights, by name."""
    paths = [path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name == CONFIG_FILE]
    found = {path.name: path.stat() for path in sorted(paths)}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in found.items()}


def _imported_extras(source: HuggingFaceWeights, dtype: str | None) -> CheckpointExtras:
    """Return the content of an imported checkpoint besides tensors."""
    precision = PrecisionConfig(params_dtype=dtype or source.precision)
    config, settings = resolve(RunConfig(model=source.model, precision=precision), 1), read_config(source.folder)
    special_ids = {name: settings[name] for name in SPECIAL_TOKEN_IDS if settings.get(name) is not None}
    carried = find_tokenizer_files(source.folder)
    for path in carried.values():
        if path.suffix == ".json":
            _json_object(path.read_bytes(), str(path))
    files: dict[str, Path | bytes] = {GENERATION_CONFIG_FILE: json.dumps(special_ids).encode(), **carried}
    return CheckpointExtras({"iteration": 0, "consumed_samples": 0}, to_dict(config), files)


def _write_tensors(
    folder: Path,
    number: int,
    names: Sequence[str],
    source: HuggingFaceWeights,
    dtype: torch.dtype,
    progress: ConversionProgress,
) -> RankFile:
    """Write one file of a checkpoint, block by block."""
    # for all blocks: new memory costs a page fault every 4 KB
    memory = torch.empty(min(BLOCK_ELEMENTS, max(source.specs[name].numel for name in names)), dtype=dtype)
    tensors = {name: _global_tensor(source, name, memory, progress) for name in names}
    return write_rank_file(folder, number, tensors)


def _global_tensor(source: HuggingFaceWeights, name: str, memory: Tensor, progress: ConversionProgress) -> GlobalTensor:
    """Return a tensor whose parts are read, into ``memory``, only when they are written."""
    spec, dtype = source.specs[name], memory.dtype

    def part(box: Box) -> TensorPart:
        def read() -> Tensor:
            values = memory[: box.numel].view(box.size)
            exact = source.read(name, spec.view, box)
            copy_tiled(values, exact)
            raise_if_overflow(name, values, exact)
            progress.add(name, box.numel * dtype.itemsize)
            return values

        return TensorPart(box, read)

    parts = tuple(part(block) for box in source.boxes(name) for block in split_box(box, BLOCK_ELEMENTS))
    return GlobalTensor(spec.shape, spec.view, dtype, parts)


def raise_if_overflow(name: str, rounded: Tensor, exact: Tensor, fix: str = "--dtype bf16") -> None:
    """Raise CheckpointError if values are infinite in fp16 alone."""
    if rounded.dtype == torch.float16 and not torch.isfinite(rounded).all() and torch.isfinite(exact).all():
        seen = f"{name} has values above {torch.finfo(rounded.dtype).max:g}, too large for fp16"
        raise CheckpointError(seen, fix)


# ---- To Hugging Face ----


def convert_to_huggingface(
    saved: SavedModel,
    folder: Path,
    report: ProgressCallback,
    *,
    dtype: str | None = None,
    shard_bytes: int,
    tokenizer: Path | None = None,
    model_type: str | None = None,
    checked: bool = True,
    workers: int | None = None,
) -> ConversionResult:
    """Convert a checkpoint to a Hugging Face folder. All that can be checked is checked before anything is written.

    Args:
        saved: the checkpoint.
        folder: must not exist, or be empty.
        report: progress callback.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None for the data type that the run computed in.
        shard_bytes: maximum size of a weights file, unless a single tensor is larger.
        tokenizer: folder with tokenizer files; None for those in the checkpoint.
        model_type: of transformers; None for the first that computes the same.
        checked: compare weights and tokenizer with `transformers` before publishing the folder.
        workers: files to write at the same time, each in a thread with two buffers of the size of a tensor; None for as
            many as need no more than two times the largest tensor in fp32.

    Raises:
        UserError: when no Hugging Face model computes the same.
        CheckpointError: when the folder is not empty, the tokenizer does not fit the model, or the check fails.
        DamagedCheckpointError: when a checksum of the checkpoint does not match.
        StorageError: when writing fails.
    """
    manifest = saved.manifest
    if dtype is None and saved.precision == "fp64":
        fixes = ("--dtype fp32", "--dtype bf16")
        raise CheckpointError("the run computed in fp64, which Hugging Face models do not support", *fixes)
    source = RoundedWeights(saved, DTYPES[dtype or saved.precision])
    check_target(folder)
    building = folder.with_name(folder.name + ".tmp")
    _check_leftover(building, folder)
    files = _small_files(saved, tokenizer)
    special = special_token_ids(files, saved.model.vocab)
    config = build_config_json(saved.model, str(source.dtype).removeprefix("torch."), special, model_type)
    files[GENERATION_CONFIG_FILE] = _generation_config(files, special)
    files |= _tokenizer_config(files, saved.model)
    card = model_card(manifest, saved.model, config["architectures"][0], config["dtype"])
    files[OTHER_CARD_FILE if CARD_FILE in files else CARD_FILE] = card
    tensors = huggingface_tensors(config["model_type"], saved.model, saved.specs)
    if checked:
        files = check_tokenizer(files, config)

    shards = _plan_shards(tensors, source, shard_bytes)
    identity = {
        "program": package_version(),
        "manifest": checksum(encode_manifest(manifest.tensors, manifest.files, manifest.state, manifest.config)),
        "shards": checksum(repr((shards, source.dtype, saved.average)).encode()),
    }
    with disk_errors(building):
        staging = StagingFolder(building, identity)
    with staging, removed_on_error(building), disk_errors(building):
        pending_config = building / PENDING_CONFIG_FILE
        write_file(pending_config, _json(config))
        _write_weights(staging, source, shards, workers or 4 // source.dtype.itemsize, report)
        for name, content in files.items():
            write_file(building / name, content)
        sync_folder(building)
        differences = check_model(building, pending_config, saved.model, source) if checked else ()
        staging.close_journal()
        durable_rename(pending_config, building / CONFIG_FILE)
        durable_rename(building, folder)  # replaces an empty folder
    return ConversionResult(folder, saved.model, differences, staging.kept, config["architectures"][0])


class RoundedWeights:
    """The weights of a checkpoint, rounded to the exported data type; values that overflow it are refused."""

    def __init__(self, saved: SavedModel, dtype: torch.dtype) -> None:
        self.specs, self.dtype, self._saved = saved.specs, dtype, saved

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the data type with which one of our tensors is written."""
        return torch.float32 if self.specs[name].wide else self.dtype

    def size_of(self, mapping: TensorMapping) -> int:
        """Return the bytes of a tensor of Hugging Face."""
        return prod(mapping.stored) * self.dtype_of(mapping.ours).itemsize

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor."""
        exact = self._saved.read(name, view, box)
        rounded = exact.to(self.dtype_of(name))
        raise_if_overflow(name, rounded, exact)
        return rounded

    def fill(self, mapping: TensorMapping, theirs: Tensor) -> None:
        """Read what ``mapping`` takes of a tensor of Hugging Face, ``[*mapping.stored]``."""
        view = self.specs[mapping.ours].view
        part = mapping.arrange(theirs)
        self._saved.fill(mapping.ours, view, mapping.box, part)
        if part.dtype == torch.float16 and not torch.isfinite(part).all():
            for block in split_box(mapping.box, BLOCK_ELEMENTS):
                self.read(mapping.ours, view, block)  # raises if only the rounded values are infinite


Shards = dict[str, list[list[TensorMapping]]]
"""Tensors of each weights file, by its name; of each tensor the parts that it joins."""


def _plan_shards(tensors: Sequence[list[TensorMapping]], source: RoundedWeights, shard_bytes: int) -> Shards:
    """Return the weights files of an export."""
    groups = split_into_shards([source.size_of(parts[0]) for parts in tensors], shard_bytes)
    if len(groups) == 1:
        return {WEIGHTS_FILE: [*tensors]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": [*tensors[group]] for i, group in enumerate(groups, 1)}


def _write_weights(
    staging: StagingFolder, source: RoundedWeights, shards: Shards, workers: int, report: ProgressCallback
) -> None:
    """Write the weights files that are not complete, and their index if there are several."""
    sizes = {name: sum(source.size_of(parts[0]) for parts in tensors) for name, tensors in shards.items()}
    files = {
        name: StagedFile(sizes[name], partial(_write_shard, staging.folder / name, tensors, source))
        for name, tensors in shards.items()
    }
    staging.write(files, workers, report)
    if len(shards) > 1:
        weight_map = {parts[0].name: name for name, tensors in shards.items() for parts in tensors}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_file(staging.folder / WEIGHTS_INDEX_FILE, _json(index))


def _write_shard(
    path: Path, tensors: Sequence[Sequence[TensorMapping]], source: RoundedWeights, progress: ConversionProgress
) -> RankFile:
    """Write a weights file, one tensor while the next is read; return its size and checksums."""
    entries: list[TensorEntry] = [(parts[0].name, source.dtype_of(parts[0].ours), parts[0].stored) for parts in tensors]
    records: dict[str, TensorRecord] = {}
    # two for all tensors: new memory costs a page fault every 4 KB
    largest = max(source.size_of(parts[0]) for parts in tensors)
    buffers = torch.empty(2, -(-largest // 8) * 8, dtype=torch.uint8)  # aligned for every type

    def write(name: str, theirs: Tensor) -> None:
        written, shape = file.write(name, theirs), tuple(theirs.shape)
        chunk = TensorChunk(whole_box(shape), path.name, *written)
        records[name] = TensorRecord(DTYPE_NAMES[theirs.dtype], shape, shape, (chunk,))
        progress.add(name, written[1])

    with TensorFileWriter(path, entries, {"format": "pt"}) as file, ThreadPoolExecutor(1) as writer:
        writing: Future[None] | None = None
        for parts, buffer in zip(tensors, cycle(buffers)):
            dtype = source.dtype_of(parts[0].ours)
            theirs = buffer[: source.size_of(parts[0])].view(dtype).view(parts[0].stored)
            for part in parts:
                source.fill(part, theirs)
            if writing is not None:
                writing.result()
            writing = writer.submit(write, parts[0].name, theirs)
        if writing is not None:
            writing.result()
    return RankFile(records, {path.name: file.record})


def split_into_shards(sizes: Sequence[int], limit: int) -> list[slice]:
    """Group consecutive items so that the sizes of a group sum to at most ``limit``; a larger item is a group alone."""
    starts, total = [0], 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            starts.append(i)
            total = 0
        total += size
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)])]


def check_target(folder: Path, flag: str = "--save-hf") -> None:
    """Raise CheckpointError unless a folder can be renamed to ``folder``, the value of ``flag``."""
    new = f"{flag} A_NEW_FOLDER"
    if folder.is_symlink():
        fix = f"{flag} {shlex.quote(str(folder.resolve()))}"
        raise CheckpointError(f"{folder} is a link, which a folder cannot replace", fix)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty", new)
    if folder.resolve() == Path.cwd():
        raise CheckpointError(f"{folder} is the current folder, which cannot be replaced", new)


def _check_leftover(building: Path, folder: Path) -> None:
    """Raise CheckpointError if the temporary folder exists and is not an unfinished conversion."""
    if not building.exists() or any((building / name).exists() for name in (PENDING_CONFIG_FILE, JOURNAL)):
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


def withdraw_export(folder: Path) -> None:
    """Make an exported folder an unfinished conversion again, whose files the next conversion to ``folder`` replaces.

    If this is interrupted, another call continues; the folder has no config.json from the start.
    """
    building = folder.with_name(folder.name + ".tmp")
    if (folder / CONFIG_FILE).exists():
        durable_rename(folder / CONFIG_FILE, folder / PENDING_CONFIG_FILE)
    if (folder / PENDING_CONFIG_FILE).exists():
        if building.exists():
            shutil.rmtree(building)
        durable_rename(folder, building)


def _small_files(saved: SavedModel, tokenizer: Path | None) -> dict[str, bytes]:
    """Return tokenizer files and generation settings, by their names in a Hugging Face folder."""
    if tokenizer is None:
        return by_huggingface_names(saved_tokenizer_files(saved.manifest))
    found = find_tokenizer_files(tokenizer)
    if not any(name.startswith(TOKENIZER_PREFIX) for name in found):
        raise CheckpointError(f"{tokenizer} holds no tokenizer.json or other file of a tokenizer", "--tokenizer FOLDER")
    card = {CARD_FILE: tokenizer / CARD_FILE} if (tokenizer / CARD_FILE).is_file() else {}
    return by_huggingface_names({**found, **card})


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
    generation = _tokenizer_json(files, GENERATION_CONFIG_FILE)
    try:
        named = {name: find_special_token(files, name.removesuffix("_id")) for name in SPECIAL_TOKEN_IDS}
        found = {name: None if token is None else ids.get(token) for name, token in named.items()}
        found["eos_token_id"] = find_eod_id(files, ids)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    return {name: found[name] if generation.get(name) is None else generation[name] for name in SPECIAL_TOKEN_IDS}


def _generation_config(files: Mapping[str, bytes], special: Mapping[str, int | list[int] | None]) -> bytes:
    """Return a generation_config.json with the special tokens of config.json; unchanged if it has them already."""
    settings = _tokenizer_json(files, GENERATION_CONFIG_FILE)
    wanted = settings | {name: value for name, value in special.items() if value is not None}
    unchanged = GENERATION_CONFIG_FILE in files and wanted == settings
    return files[GENERATION_CONFIG_FILE] if unchanged else _json(wanted)


def _tokenizer_config(files: Mapping[str, bytes], model: ModelConfig) -> dict[str, bytes]:
    """Return a tokenizer_config.json with the number of positions as ``model_max_length`` if it has no length."""
    if model.max_position_embeddings is None or not any(name in files for name in (TOKENIZER_JSON, TOKENIZER_CONFIG)):
        return {}
    settings = _tokenizer_json(files, TOKENIZER_CONFIG)
    length = settings.get("model_max_length")
    if isinstance(length, int | float) and 0 < length < NO_LENGTH:
        return {}
    return {TOKENIZER_CONFIG: _json(settings | {"model_max_length": model.max_position_embeddings})}


def _vocabulary(files: Mapping[str, bytes]) -> dict[str, int]:
    """Return token -> id of tokenizer.json; empty if there is no such file."""
    tokenizer = _tokenizer_json(files, TOKENIZER_JSON)
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((t, i) for i, (t, _) in enumerate(vocabulary))
        added = ((token["content"], token["id"]) for token in tokenizer.get("added_tokens", ()))
        return {str(token): int(i) for token, i in (*pairs, *added)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        seen = f"the tokenizer's {TOKENIZER_JSON} is not one of the tokenizers library: {error!r}"
        raise CheckpointError(seen, "--tokenizer ANOTHER_FOLDER") from error


def _tokenizer_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a tokenizer, or an empty object if there is no such file."""
    return _json_object(files.get(name, b"{}"), f"the tokenizer's {name}", "--tokenizer ANOTHER_FOLDER")


def _json_object(content: bytes, name: str, *fixes: str) -> dict[str, Any]:
    """Return the content of a JSON file."""
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{name} is no JSON: {error}", *fixes) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{name} is no JSON object", *fixes)
    return parsed


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
