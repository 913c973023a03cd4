"""Read the weights of a checkpoint of nanotron: a safetensors file for each parameter and rank of TP, in a tree.

The path of a file is the name of the parameter: ``model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_...``. Its
metadata has the shape of the whole tensor, and pairs of slices, of the file and of the whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import MAX_DIMS, whole_box
from megatron.checkpoint.tensor_file import TensorFile
from megatron.config.text import clipped
from megatron.convert.frameworks.pieces import AssembledTensor, PartialTensor, TensorPiece
from megatron.distributed.sharding import Box

FOLDER = "model"
FILE = re.compile(r"model_(\w+?)(?:_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+))?\.safetensors")
CONTENT = "data"
"""Key of the tensor in a file."""


def read_nanotron(path: Path) -> dict[str, PartialTensor]:
    """Return the weights of a checkpoint by nanotron's names. No tensor is read.

    Args:
        path: folder with ``model`` and ``model_config.json``.

    Raises:
        DamagedCheckpointError: if the file of a rank is missing, damaged, or does not fit the others.
    """
    root = path / FOLDER
    files = sorted(file for file in root.rglob("*.safetensors") if FILE.fullmatch(file.name))
    if not files:
        raise DamagedCheckpointError(f"{root} holds no files of nanotron's parameters, model_*.safetensors")
    found: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        match = FILE.fullmatch(file.name)
        if match is not None:
            found[".".join((*file.parent.relative_to(root).parts, match[1]))].append(file)
    return {name: _assemble(name, path, parts) for name, parts in found.items()}


def _assemble(name: str, folder: Path, paths: list[Path]) -> AssembledTensor:
    pieces: list[TensorPiece] = []
    shapes: set[tuple[int, ...]] = set()
    dtypes: set[torch.dtype] = set()
    for path in paths:
        file = TensorFile(path)
        if CONTENT not in file.keys:
            raise DamagedCheckpointError(f"{path} holds no tensor {CONTENT}, of nanotron's {name}")
        local = file.shape(CONTENT)
        shape, pairs = _metadata(path, local)
        shapes.add(shape)
        dtypes.add(file.dtype(CONTENT))
        pieces += [TensorPiece(box, partial(_slice, file, part)) for part, box in pairs]
    if len(shapes) > 1 or len(dtypes) > 1:
        raise DamagedCheckpointError(
            f"{folder}: the files of {clipped(name)} differ in shape or type of the whole tensor"
        )
    whole = AssembledTensor(dtypes.pop(), shapes.pop(), tuple(pieces))
    whole.check(name, folder)
    return whole


def _slice(file: TensorFile, part: Box) -> Tensor:
    return file.tensor(CONTENT)[part.slices]


def _metadata(path: Path, local: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[Box, Box]]]:
    """Return the shape of the whole tensor, and pairs of boxes: of the file, and of the whole."""
    try:
        with safe_open(path, "numpy") as header:
            metadata = header.metadata() or {}
        if "unsharded_shape" not in metadata:  # a parameter that every rank has
            return local, [(whole_box(local), whole_box(local))]
        shape = tuple(_number(size) for size in metadata["unsharded_shape"].strip("() ,").split(","))
        if len(shape) > MAX_DIMS:
            raise ValueError(f"{len(shape)} dimensions")
        pairs = []
        for pair in metadata["local_global_slices_pairs"].split(";"):
            part, whole = (_box(text, size) for text, size in zip(pair.split("#"), (local, shape), strict=True))
            if part.size != whole.size:
                raise ValueError(f"{pair} joins slices of different sizes")
            pairs.append((part, whole))
        return shape, pairs
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(f"{path} has no metadata of nanotron, or is damaged: {clipped(error)}") from error


def _box(text: str, shape: tuple[int, ...]) -> Box:
    """Parse slices such as ``0,8,None|None,None,None``."""
    starts, sizes = [], []
    for item, size in zip(text.split("|"), shape, strict=True):
        first, stop, step = (None if number == "None" else _number(number) for number in item.split(","))
        start, end, stride = slice(first, stop, step).indices(size)
        if stride != 1 or end <= start or (stop is not None and stop > size):
            raise ValueError(f"{item} are no elements of {size}")
        starts.append(start)
        sizes.append(end - start)
    return Box(tuple(starts), tuple(sizes))


def _number(text: str) -> int:
    """Parse a number, which may be one of NumPy, ``np.int64(8)``: nanotron writes what prints it."""
    return int(text.strip().removeprefix("np.int64(").removesuffix(")"))
