"""Weights of a Hugging Face folder under our names, read box by box."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.boxes import intersect, relative
from megatron.checkpoint.errors import CheckpointError, DamagedError
from megatron.checkpoint.tensorfile import TensorFile
from megatron.config.hf import CONFIG, family_of, model_values, read_config
from megatron.config.model import ModelConfig
from megatron.convert.complaints import refuse, refuse_impossible, some
from megatron.model.hf import TABLES, Slot, Table, shapes_only, slots
from megatron.parallel.shard import Box

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
READABLE = (torch.float32, torch.bfloat16, torch.float16)


def read_model(folder: Path) -> ModelConfig:
    """The shape that a folder's config.json describes.

    Raises:
        UserError: when there is no config.json, it asks for what is not here, or its numbers do not fit together.
    """
    where = folder / CONFIG
    model = ModelConfig(**model_values(read_config(folder), str(where)))
    refuse_impossible(where, model)
    return model


class HFSource:
    """The weights of a model in a Hugging Face folder, under our names and in our arrangement.

    Files are mapped, and only what a box needs of them is read. Names, shapes and types are all checked at the start.

    Attributes:
        specs: of all tensors of the model, by our names.
        dtype: the narrowest that holds all tensors as they are stored.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Find every tensor of ``model``, and nothing else, in ``folder``.

        Raises:
            UserError: when config.json is not one of a model type that is here.
            CheckpointError: naming the tensors that are missing, not used, or of another shape or type.
            DamagedError: when a file cannot be read.
        """
        self.folder = Path(folder)
        self.specs = shapes_only(model).specs
        kind = family_of(read_config(self.folder), str(self.folder / CONFIG))
        try:
            self._slots = slots(kind, self.specs)
        except KeyError as error:
            raise CheckpointError(f"{self.folder} is a {kind}, which has nothing for {error.args[0]}") from error
        self._files = open_weights(self.folder)
        self._prefix = _prefix(TABLES[kind], self._files)
        self._check(TABLES[kind])
        self.dtype = reduce(torch.promote_types, map(self.dtype_of, self.names))

    @property
    def names(self) -> tuple[str, ...]:
        """Our names of all tensors."""
        return tuple(self.specs)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The boxes that make up one of our tensors, each in one of theirs."""
        return tuple(slot.box for slot in self._slots[name])

    def read(self, name: str, view: tuple[int, ...], box: Box) -> Tensor:
        """The elements of ``box``, of shape ``box.size``, as stored; perhaps on the file's pages, so not to be written.

        Args:
            name: one of ``names``.
            view: of the tensor's spec, which the box refers to.
            box: wanted.

        Raises:
            ValueError: when ``view`` is not the tensor's.
        """
        if view != self.specs[name].view:
            raise ValueError(f"{name} is viewed {list(self.specs[name].view)}, not {list(view)}")
        shared = [(slot, found) for slot in self._slots[name] if (found := intersect(slot.box, box))]
        if len(shared) == 1:
            return self._take(*shared[0])
        out = torch.empty(box.size, dtype=self.dtype_of(name))
        for slot, found in shared:
            out[relative(found, box).slices] = self._take(slot, found)
        return out

    def dtype_of(self, name: str) -> torch.dtype:
        """The type one of our tensors is stored with."""
        theirs = (self._theirs(slot.name) for slot in self._slots[name])
        return reduce(torch.promote_types, (self._files[key].dtype(key) for key in theirs))

    def _take(self, slot: Slot, box: Box) -> Tensor:
        key = self._theirs(slot.name)
        return slot.arrange(self._files[key].tensor(key))[relative(box, slot.box).slices]

    def _theirs(self, name: str) -> str:
        """The key in the files of a name of the table."""
        return name.removeprefix(self._prefix)

    def _check(self, table: Table) -> None:
        wanted = {self._theirs(slot.name): slot.shape for found in self._slots.values() for slot in found}
        missing = wanted.keys() - self._files.keys()
        unused = {key for key in self._files.keys() - wanted.keys() if not _is_buffer(key, table)}
        tied = HEAD in unused
        unused.discard(HEAD)
        shapes, types = [], []
        for key in wanted.keys() & self._files.keys():
            shape, dtype = self._files[key].shape(key), self._files[key].dtype(key)
            if shape != wanted[key]:
                shapes.append(f"{key} {list(shape)} instead of {list(wanted[key])}")
            if dtype not in READABLE:
                types.append(f"{key} {dtype}")
        untied = [HEAD] if tied and not self._head_is_tied(table) else []
        complaints = {
            "lacks": missing,
            "ties the output to the embedding in config.json, but stores another": untied,
            "holds tensors that the model does not have": unused,
            "holds tensors of another shape than config.json says": shapes,
            "holds tensors of a type that is not here": types,
        }
        refuse(self.folder, complaints)

    def _head_is_tied(self, table: Table) -> bool:
        """Whether an output projection that is stored although it is tied is a copy of the embedding, to the bit."""
        embedding = self._theirs(next(their[0][0] for ours, _, their in table.rows if "word_embeddings" in ours))
        if embedding not in self._files:
            return False
        head, words = (self._files[key].tensor(key) for key in (HEAD, embedding))
        same_kind = head.dtype == words.dtype and head.shape == words.shape
        return same_kind and torch.equal(head.view(torch.uint8), words.view(torch.uint8))


def _prefix(table: Table, keys: Iterable[str]) -> str:
    """What the names in the files lack: a model saved without its head has no prefix."""
    return "" if any(key.startswith(table.prefix) for key in keys) else table.prefix


def _is_buffer(key: str, table: Table) -> bool:
    return any(re.fullmatch(pattern, key.removeprefix(table.prefix)) for pattern in table.buffers)


def open_weights(folder: Path) -> dict[str, TensorFile]:
    """Every tensor's file, by key.

    Raises:
        CheckpointError: when there are no files that can be read without running what is in them.
        DamagedError: when the index and the files do not fit.
    """
    if (folder / WEIGHTS).exists():
        file = TensorFile(folder / WEIGHTS)
        return dict.fromkeys(file.keys, file)
    if (folder / INDEX).exists():
        return _open_shards(folder)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        fix = "from transformers import AutoModelForCausalLM as M; M.from_pretrained({0!r}).save_pretrained({1!r})"
        command = fix.format(str(folder), f"{folder}-safetensors")
        raise CheckpointError(
            f"{folder} holds pickled weights, which can run any program when they are read; only {WEIGHTS} is read",
            f'python -c "{command}"',
        )
    raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")


def _open_shards(folder: Path) -> dict[str, TensorFile]:
    path = folder / INDEX
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(Path(name).name for name in set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is no index of weights: {error!r}") from error
    strangers = sorted(set(places.values()) - set(shards))
    if strangers:
        raise DamagedError(f"{path} names files outside its folder: {some(strangers)}")
    files = {name: TensorFile(folder / name) for name in shards}
    _check_index(path, places, files)
    return {key: file for file in files.values() for key in file.keys}


def _check_index(path: Path, places: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
    held = {name: set(file.keys) for name, file in files.items()}
    lost = [f"{key} in {name}" for key, name in places.items() if key not in held[name]]
    twice = [f"{key} in {name}" for name, file in files.items() for key in file.keys if places.get(key, name) != name]
    if lost or twice:
        raise DamagedError(f"{path} and the files beside it do not fit: {some(lost + twice)}")
