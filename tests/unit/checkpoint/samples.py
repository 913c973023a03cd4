"""Tensors to save, and random layouts of their parts."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.format import MANIFEST, MARKER, Manifest, marker_content, whole_box
from megatron.checkpoint.location import Location, local_path
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.distributed.comm import Group
from megatron.distributed.sharding import Box

ALONE = Group()


def attempt(path: Path) -> Path:
    """The folder with the files of a checkpoint on disk that was saved once."""
    return next(path.glob("attempt-*"), path)


@dataclass(frozen=True)
class Sample:
    """A tensor of its stored shape, and the view boxes refer to."""

    tensor: Tensor
    view: tuple[int, ...]

    def entry(self, boxes: list[Box], dtype: torch.dtype | None = None) -> GlobalTensor:
        """To write these boxes; parts are views with odd strides."""
        seen = self.tensor.view(self.view)
        return self._global(tuple(TensorPart(box, seen[box.slices]) for box in boxes), dtype)

    def empty(self, boxes: list[Box], dtype: torch.dtype | None = None) -> GlobalTensor:
        """To fill these boxes, from whatever the memory held."""
        dtype = dtype or self.tensor.dtype
        return self._global(tuple(TensorPart(box, torch.full(box.size, 77, dtype=dtype)) for box in boxes), dtype)

    def is_in(self, filled: GlobalTensor) -> bool:
        """Return True if every part has its elements, to the bit."""
        seen = self.tensor.view(self.view)
        return all(same(part.resolve(), seen[part.box.slices].to(filled.dtype)) for part in filled.parts)

    def _global(self, parts: tuple[TensorPart, ...], dtype: torch.dtype | None) -> GlobalTensor:
        return GlobalTensor(tuple(self.tensor.shape), self.view, dtype or self.tensor.dtype, parts)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def samples(seed: int, count: int = 6) -> dict[str, Sample]:
    """Odd shapes and types, one element to some thousand; 0-d and 4-d views; infinities and NaN among the values."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found = {}
    for i in range(count):
        view = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 4)))
        shape = draw.choice([(prod(view),), (prod(view[:-1]), view[-1])] if len(view) > 1 else [view])
        dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        values.view(-1)[0] = draw.choice([float("nan"), float("-inf"), -0.0])
        found[f"layers.{i}.weight"] = Sample(values, view)
    return found | {"step": Sample(torch.tensor(seed), ())}


def small() -> dict[str, Sample]:
    """Always the same two tensors."""
    values = torch.arange(24 * 5, dtype=torch.float32)
    return {"a": Sample(values.view(24, 5), (2, 12, 5)), "optim.exp_avg.a": Sample(-values.view(24, 5), (2, 12, 5))}


def partition(view: tuple[int, ...], draw: random.Random, pieces: int) -> list[Box]:
    """Random boxes that make up a tensor: each is cut in two at a random place while there are too few."""
    found = [whole_box(view)]
    for _ in range(pieces - 1):
        box = max(found, key=lambda b: b.numel)
        dims = [i for i, n in enumerate(box.size) if n > 1]
        if not dims:
            break
        dim = draw.choice(dims)
        n = draw.randint(1, box.size[dim] - 1)
        found.remove(box)
        start = (*box.start[:dim], box.start[dim] + n, *box.start[dim + 1 :])
        found.append(Box(box.start, (*box.size[:dim], n, *box.size[dim + 1 :])))
        found.append(Box(start, (*box.size[:dim], box.size[dim] - n, *box.size[dim + 1 :])))
    return found


def dealt(tensors: Mapping[str, Sample], rank: int, world: int, seed: int) -> dict[str, list[Box]]:
    """This rank's share of a random layout: parts of all tensors, dealt to random ranks."""
    draw = random.Random(seed)
    share: dict[str, list[Box]] = {}
    for name, sample in tensors.items():
        boxes = partition(sample.view, draw, draw.randint(1, 3 * world))
        share[name] = [box for box in boxes if draw.randrange(world) == rank]
    return share


def all_of(tensors: Mapping[str, Sample]) -> dict[str, GlobalTensor]:
    """To write everything from one process."""
    return {name: sample.entry([whole_box(sample.view)]) for name, sample in tensors.items()}


def files_of(path: Path) -> Path:
    """Return the folder with the files of a checkpoint."""
    return local_path(Manifest.read(path).folder)


def forge(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the manifest of a checkpoint, and write a valid marker."""
    manifest = Manifest.read(path)
    content = change((files_of(path) / MANIFEST).read_bytes())
    (files_of(path) / MANIFEST).write_bytes(content)
    (path / MARKER).write_bytes(marker_content(content, manifest.inside))


def save(path: Location, tensors: Mapping[str, Sample], **state: object) -> None:
    """A checkpoint by one process, with a small file."""
    save_sharded(
        path, all_of(tensors), state, {"model": {"hidden_size": 5}}, ALONE, {"tokenizer/tokenizer.json": b"{}"}
    )


def refuse_renames(patch: pytest.MonkeyPatch, refused: Callable[[Path], bool], code: int = errno.EIO) -> None:
    """Let the disk refuse renames to some targets."""
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if refused(Path(target)):
            raise OSError(code, os.strerror(code), str(target))
        real(source, target)

    patch.setattr(os, "rename", rename)
