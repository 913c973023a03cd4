"""The model in a checkpoint, without the run: its weights, read box by box, and its tokenizer files.

A checkpoint with adapters names the model that they belong to; its weights are those of that model with the adapters
added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import local
from typing import Any

import torch
from torch import Tensor

from megatron.arguments.compatibility import tensor_differences, unknown_options
from megatron.arguments.sources import from_dict
from megatron.checkpoint.errors import CheckpointError, raise_if_any
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.location import Location, parse_location
from megatron.checkpoint.tensor_file import DTYPES
from megatron.config.checkpoint import HUGGING_FACE_PREFIX
from megatron.config.errors import UserError
from megatron.config.files import TABLE_FILE_BYTES, parse_json
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.text import format_bytes, shell_word
from megatron.convert.adapters import MergedWeights
from megatron.convert.base_model import BaseModel, recorded_base
from megatron.convert.huggingface.config import (
    SPECIAL_TOKEN_IDS,
    check_model_config,
    model_folder,
    read_model_config,
    refuse_outside_links,
)
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.data.errors import DataError
from megatron.distributed.sharding import Box, ShardSpec
from megatron.layers.parameters import WORD_EMBEDDINGS, gpt, trainable

TOKENIZER_PREFIX = "tokenizer/"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Tokenizer files of a Hugging Face folder, and those ending in ``MODEL_SUFFIX``. A checkpoint stores them under
``TOKENIZER_PREFIX``."""

MODEL_SUFFIX = ".model"
"""Suffix of the models of sentencepiece and tiktoken."""

GENERATION_CONFIG_FILE = "generation_config.json"

SmallFiles = Mapping[str, Path | bytes]
"""Contents or paths of small files, by their names in a checkpoint."""

EMA_PREFIX = "optim.ema."
"""Prefix of the names of averaged weights in a checkpoint."""


def open_checkpoint(path: Location, step: int | None = None) -> tuple[Manifest, list[str]]:
    """Open a checkpoint folder, or the newest valid checkpoint (or that of ``step``) in a ``--save`` folder.

    Returns:
        The manifest, and notes for the user: which checkpoint it is, which newer ones were skipped and why, and
        options in it that this version does not know.

    Raises:
        CheckpointError: when there is none, or a newer version wrote it.
        DamagedCheckpointError: when it is damaged.
    """
    manifest, skipped = CheckpointFolder(path).newest(step)
    notes = [f"from {manifest.path}, step {manifest.state.get('iteration')}"]
    notes += [f"passed over {found.path}: {found.problem}" for found in skipped]
    unknown = unknown_options(manifest.config)
    if unknown:
        notes.append(f"it has options that this version does not know: {', '.join(unknown)}")
    return manifest, notes


def open_model(location: str, follow_links: bool = False) -> SavedModel | HuggingFaceWeights:
    """Open the model of a checkpoint (the newest in a folder), of ``hf:DIR`` or of ``megatron:DIR``.

    Args:
        location: in the forms of ``--load``.
        follow_links: also read files to which links lead out of a Hugging Face folder.

    Raises:
        CheckpointError: when there is none, or its weights do not match its model.
        UserError: when the configuration of a Hugging Face folder is not supported.
    """
    if not location.startswith(HUGGING_FACE_PREFIX):
        return SavedModel(open_checkpoint(parse_location(location))[0])
    folder = model_folder(location.removeprefix(HUGGING_FACE_PREFIX))
    if not follow_links:
        refuse_outside_links(folder)
    return HuggingFaceWeights(folder, read_model_config(folder))


class StoredTensors:
    """The tensors of a checkpoint whose names have a prefix, read box by box from any thread."""

    def __init__(self, manifest: Manifest, prefix: str = "") -> None:
        self._manifest, self._prefix = manifest, prefix
        self._readers = local()  # one for each thread

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, in the precision of the main params.

        Raises:
            ValueError: when ``view`` is not that of the tensor.
            DamagedCheckpointError: when a checksum does not match.
        """
        out = torch.empty(box.size, dtype=DTYPES[self._manifest.tensors[self._prefix + name].dtype])
        self.fill(name, view, box, out)
        return out

    def fill(self, name: str, view: tuple[int, ...], box: Box, out: Tensor) -> None:
        """As :meth:`read`, into a tensor of shape ``box.size`` and any strides and floating-point type."""
        stored = self._prefix + name
        if not hasattr(self._readers, "reader"):
            self._readers.reader = CheckpointReader(self._manifest)
        reader: CheckpointReader = self._readers.reader
        if view != reader.view(stored):
            raise ValueError(f"{stored} is viewed {list(reader.view(stored))}, not {list(view)}")
        reader.fill([(stored, box, out)])

    def check(self, specs: Mapping[str, ShardSpec]) -> None:
        """Check names and shapes. Optimizer state other than the average is ignored."""
        stored = {
            name.removeprefix(self._prefix): (record.shape, record.view)
            for name, record in self._manifest.tensors.items()
            if (name.startswith(EMA_PREFIX) if self._prefix else not name.startswith("optim."))
        }
        if self._prefix and not stored:
            seen = f"{self._manifest.path} has no average of the weights, because its run had no --ema-decay"
            raise CheckpointError(seen, "drop --ema")
        raise_if_any(self._manifest.path, tensor_differences(specs, stored))


class SavedModel:
    """The weights of a checkpoint, read box by box; adapters are added to the weights of their base."""

    manifest: Manifest
    model: ModelConfig  # architecture, with the vocabulary size
    specs: Mapping[str, ShardSpec]  # of all weights, by global name
    precision: str  # data type that the run computed in, such as bf16
    base: BaseModel | None  # that adapters belong to, if the checkpoint holds adapters
    merged: MergedWeights | None  # the adapters, and the weights of the base

    def __init__(
        self, manifest: Manifest, average: bool = False, pretrained: str | None = None, follow_links: bool = False
    ) -> None:
        """Check that the checkpoint holds exactly the weights of the model that its configuration describes.

        Args:
            manifest: manifest of the checkpoint.
            average: read the moving average of the weights instead of the weights.
            pretrained: the model that adapters belong to, if it is no longer where it was.
            follow_links: also read files to which links lead out of the folder of that model.

        Raises:
            CheckpointError: when there is no moving average; when the configuration has no model, or a model with
                unknown options, which could change what it computes; when tensors are missing, unknown or of another
                shape; or when there are no adapters and ``pretrained`` is given.
            UserError: when adapters belong to another model; when the configuration has values that are invalid or
                contradict each other.
        """
        config, tensors = _read_config(manifest), StoredTensors(manifest, EMA_PREFIX if average else "")
        self.manifest, self.precision, self.base, self.merged = manifest, config.precision.params_dtype, None, None
        self._weights: StoredTensors | MergedWeights = tensors
        if config.model.lora_rank is None:
            if pretrained is not None:
                raise CheckpointError(f"{manifest.path} holds no adapters", "drop --pretrained-checkpoint")
            words = manifest.tensors.get(WORD_EMBEDDINGS)
            vocab_size = (config.model.vocab_size or 1) if words is None or not words.shape else words.shape[0]
            stored = self.model = replace(config.model, vocab_size=vocab_size)
        else:
            self.base = find_recorded_base(manifest, pretrained)
            base = open_model(self.base.location, follow_links)
            stored = replace(config.model, vocab_size=base.model.vocab_size)
            self.model = stored.base
            self._weights = self.merged = MergedWeights(base, tensors, stored)
        check_model_config(manifest.path, self.model)
        self.specs = gpt(self.model)
        tensors.check(trainable(gpt(stored)))

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """Return the elements of ``box`` of a tensor, in the precision of the main params.

        Raises:
            ValueError: when ``view`` is not that of the tensor.
            DamagedCheckpointError: when a checksum does not match.
        """
        return self._weights.read(name, view, box)

    def fill(self, name: str, view: tuple[int, ...], box: Box, out: Tensor) -> None:
        """As :meth:`read`, into a tensor of shape ``box.size`` and any strides and floating-point type."""
        self._weights.fill(name, view, box, out)


def find_recorded_base(manifest: Manifest, pretrained: str | None = None) -> BaseModel:
    """Find the model that the adapters of a checkpoint belong to, in ``pretrained`` or where it was.

    Raises:
        CheckpointError: when it is not there.
        UserError: when another model is.
    """
    location = recorded_base(manifest).location
    fix = f"--pretrained-checkpoint {'ITS_LOCATION' if pretrained is None else shell_word(location)}"
    try:
        if pretrained is None and not is_local_or_beside(parse_location(location), manifest.path):
            text = f"it is in a store that only the checkpoint names, {location}; to read it there, name it yourself"
            raise CheckpointError(text)  # a stranger's checkpoint must not choose where this machine sends requests
        base = BaseModel.find(pretrained or location)
    except (CheckpointError, UserError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{manifest.path} holds adapters of a model that cannot be read: {reason}", fix
        ) from error
    base.check_adapters(manifest)
    return base


def is_local_or_beside(location: Location, checkpoint: Location) -> bool:
    """Return True for a location on disk, or in the bucket of a checkpoint."""
    if isinstance(location, Path):
        return True
    return not isinstance(checkpoint, Path) and (location.scheme, location.bucket) == (
        checkpoint.scheme,
        checkpoint.bucket,
    )


def _read_config(manifest: Manifest) -> RunConfig:
    """Return model and precision of the run that wrote a checkpoint. Options that it lacks have their defaults."""
    groups = {name: manifest.config.get(name) for name in ("model", "precision")}
    invalid = [f"config.{name} {json.dumps(group)}" for name, group in groups.items() if not isinstance(group, Mapping)]
    raise_if_any(manifest.path, {"has in its manifest what is no group of options": invalid})
    unknown = [option for option in unknown_options(manifest.config) if option.startswith("model.")]
    findings = {"has a model with options that this version does not know": unknown}
    raise_if_any(manifest.path, findings, "update this program")
    precision = {k: v for k, v in manifest.config["precision"].items() if k == "params_dtype"}
    return from_dict({"model": manifest.config["model"], "precision": precision})


def find_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the small files of a Hugging Face folder that a checkpoint stores, by their names in the checkpoint.

    Raises:
        CheckpointError: when one is not small.
    """
    models = (path.name for path in sorted(folder.glob(f"*{MODEL_SUFFIX}")))
    files = {
        **{TOKENIZER_PREFIX + name: folder / name for name in (*TOKENIZER_FILES, *models)},
        GENERATION_CONFIG_FILE: folder / GENERATION_CONFIG_FILE,
    }
    found = {name: path for name, path in files.items() if path.is_file()}
    large = [str(path) for path in found.values() if path.stat().st_size > TABLE_FILE_BYTES]
    raise_if_any(folder, {f"holds files larger than {format_bytes(TABLE_FILE_BYTES)}": large})
    return found


def saved_tokenizer_files(manifest: Manifest) -> dict[str, bytes]:
    """Return the content of the same files in a checkpoint.

    Raises:
        DamagedCheckpointError: when one is missing or changed.
    """
    names = {name: name.removeprefix(TOKENIZER_PREFIX) for name in manifest.files if name.startswith(TOKENIZER_PREFIX)}
    known = {
        stored
        for stored, name in names.items()
        if name in TOKENIZER_FILES or (name.endswith(MODEL_SUFFIX) and "/" not in name)
    }
    return {name: manifest.read_file(name) for name in manifest.files if name in known | {GENERATION_CONFIG_FILE}}


def tokenizer_files_of(source: SavedModel | HuggingFaceWeights) -> SmallFiles:
    """Return the same files of an opened model."""
    if isinstance(source, SavedModel):
        return saved_tokenizer_files(source.manifest)
    return find_tokenizer_files(source.folder)


def by_huggingface_names(carried: SmallFiles) -> dict[str, bytes]:
    """Return the content of these files by their names in a Hugging Face folder."""
    contents = {name: file if isinstance(file, bytes) else file.read_bytes() for name, file in carried.items()}
    return {name.removeprefix(TOKENIZER_PREFIX): content for name, content in contents.items()}


TOKENIZER_JSON = TOKENIZER_PREFIX + "tokenizer.json"


def files_to_carry(recorded: SmallFiles, carried: SmallFiles) -> dict[str, Path | bytes]:
    """Return the small files for the run's checkpoints: the tokenizer of its data, and the other files it loaded.

    Args:
        recorded: tokenizer files of the run's data.
        carried: files of the checkpoint or model that the run starts from.

    Raises:
        DataError: if the generation_config.json in ``carried`` cannot be read.
    """
    if not recorded:
        return dict(carried)
    same = TOKENIZER_JSON in carried and not tokenizer_notes(recorded, carried)
    kept = {name: content for name, content in carried.items() if same or not name.startswith(TOKENIZER_PREFIX)}
    if GENERATION_CONFIG_FILE in kept and not same:  # its special token ids belong to another tokenizer
        kept[GENERATION_CONFIG_FILE] = _without_special_ids(_bytes(kept[GENERATION_CONFIG_FILE]))
    return kept | dict(recorded)


def with_end_ids(files: SmallFiles, ends: Sequence[int]) -> dict[str, Path | bytes]:
    """Return the files with a generation_config.json that stops at the ids ``ends`` too.

    Raises:
        DataError: if there is one, and it cannot be read.
    """
    settings = _generation_settings(_bytes(files.get(GENERATION_CONFIG_FILE, b"{}")))
    before = settings.get("eos_token_id")
    known = before if isinstance(before, list) else [] if before is None else [before]
    found = list(dict.fromkeys([*ends, *known]))
    if set(found) == set(known) or (not known and len(found) < 2):  # the end of a document is written in any case
        return dict(files)
    return {**files, GENERATION_CONFIG_FILE: json.dumps(settings | {"eos_token_id": found}).encode()}


def tokenizer_notes(recorded: SmallFiles, carried: SmallFiles) -> list[str]:
    """Return a note if the data's tokenizer is not the one that the weights were trained with."""
    if TOKENIZER_JSON not in recorded or TOKENIZER_JSON not in carried:
        return []
    if _bytes(recorded[TOKENIZER_JSON]) == _bytes(carried[TOKENIZER_JSON]):
        return []
    return [
        "the data's tokenizer is not that of the weights, so token ids may have other meanings: "
        "pass the folder of the right one to tools/preprocess_data.py --tokenizer-model"
    ]


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _without_special_ids(generation: bytes) -> bytes:
    """Return a generation_config.json without special token ids."""
    settings = _generation_settings(generation)
    return json.dumps({name: value for name, value in settings.items() if name not in SPECIAL_TOKEN_IDS}).encode()


def _generation_settings(generation: bytes) -> dict[str, Any]:
    """Parse a generation_config.json."""
    try:
        return dict(parse_json(generation))
    except (ValueError, TypeError) as error:
        raise DataError(f"the {GENERATION_CONFIG_FILE} of the loaded model is not a JSON object: {error}") from error
