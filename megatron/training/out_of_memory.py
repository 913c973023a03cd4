"""Explain why a run is out of memory: predicted against actual bytes by part, the largest tensors, and what would fit.

The report is made after the error, from the frames that the error holds and the tensors that are alive
(:mod:`megatron.training.live_tensors`), so a run that has enough memory computes nothing for it. It describes this
rank, and does not communicate.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron.config.launch import Launch
from megatron.config.machine import memory_bytes
from megatron.config.run import RunConfig
from megatron.config.text import counted, format_bytes
from megatron.planner.memory import STATE_KINDS, max_peak_bytes, rank_state_bytes
from megatron.training.failure_report import MEMORY, failure_kind
from megatron.training.fake_world import state_tensors
from megatron.training.live_tensors import KEPT, OTHER, LiveTensor, ModuleNames, frames_of, live_tensors, trainer_of
from megatron.training.trainer import Trainer

LARGEST = 8
"""Groups of equal tensors that are listed."""

GATHERED, FREE, OUTSIDE = "gathered weights", "free in the allocator", "outside of PyTorch"

OF_BACKWARD = ("activations", "delayed gradients")
"""Parts of the forecast that are kept for backward; its others, beside the state, exist within an operation."""

REQUEST = (
    re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMGT]?i?B)"),
    re.compile(r"you tried to allocate (\d+) (bytes)"),
)
"""The size that an allocator could not allocate: CUDA's, and that of the host."""

UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class DeviceMemory(NamedTuple):
    """Memory of a rank's device after the error, in bytes."""

    total: int
    # In tensors; held by PyTorch's allocator but free; the CUDA context, NCCL and other processes.
    allocated: int
    free: int
    outside: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory | None:
        """Read the counters of a GPU; None for a CPU, whose memory PyTorch does not count."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return cls(total, allocated, reserved - allocated, total - free - reserved)


def explain_out_of_memory(error: BaseException, config: RunConfig) -> str:
    """Return a report on an error that is one of memory; an empty text for others. Never raises.

    Args:
        error: with its traceback, whose frames keep the tensors alive.
        config: validated and resolved.
    """
    if failure_kind(error) != MEMORY:
        return ""
    try:
        return "\n".join(_report(error, config, Launch.read(os.environ)))
    except Exception as other:  # the first error is what counts; maybe the report was out of memory, too
        return f"there is no report on the memory: {type(other).__name__}: {other}"


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the allocation that failed; None if the text does not have it."""
    for pattern in REQUEST:
        if (found := pattern.search(str(error))) is not None:
            return round(float(found[1]) * UNITS[found[2]])
    return None


def _report(error: BaseException, config: RunConfig, launch: Launch) -> Iterator[str]:
    """Yield the lines of the report."""
    frames = frames_of(error)
    trainer = trainer_of(frames)
    device = _device(config, trainer)
    names = ModuleNames(trainer)
    state = {} if trainer is None else _state(trainer)
    tensors = live_tensors(device, frames, names, state)
    memory = DeviceMemory.of(device)
    capacity = memory_bytes() if memory is None else memory.total
    asked, module = requested_bytes(error), names.of_frames(frames)
    yield (
        f"memory of rank {launch.rank} on {device}"
        + (f", which has {format_bytes(capacity)}" if capacity else "")
        + (f": {format_bytes(asked)} could not be allocated" if asked else "")
        + (f" in {module}" if module else "")
    )
    predicted = rank_peak_bytes(config, launch.world_size, launch.rank)
    yield from table(predicted, actual_bytes(tensors, memory))
    yield from largest(tensors)


def _device(config: RunConfig, trainer: Trainer | None) -> torch.device:
    if trainer is not None:
        return trainer.device
    cuda = config.training.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _state(trainer: Trainer) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return the tensors of the state by part, and the whole weights that ZeRO-3 has gathered."""
    weights = trainer.optimizer.weights.buffers
    return state_tensors(trainer) | {GATHERED: {f"bucket {number}": each.whole for number, each in enumerate(weights)}}


def rank_peak_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, int]:
    """Return the forecast of a rank's peak by part: of the state exactly, else as of its pipeline rank."""
    return max_peak_bytes(config, world_size) | rank_state_bytes(config, world_size, rank)


def actual_bytes(tensors: Sequence[LiveTensor], memory: DeviceMemory | None) -> dict[str, int]:
    """Return the bytes of live tensors by part, and of the device's memory that is in no tensor."""
    found = Counter[str]()
    for tensor in tensors:
        found[tensor.part] += tensor.size
    if memory is not None:
        # Buffers that only C++ holds, such as workspaces of cuBLAS; the allocator rounds sizes up, too.
        found[OTHER] += max(0, memory.allocated - found.total())
        found |= {FREE: memory.free, OUTSIDE: memory.outside}
    return dict(found)


def table(predicted: Mapping[str, int], actual: Mapping[str, int]) -> Iterator[str]:
    """Yield lines that compare the forecast with what there is, part by part."""
    parts = [part for part in predicted if part in (*STATE_KINDS, GATHERED)]
    parts += [part for part in actual if part not in (*parts, KEPT, OTHER, FREE, OUTSIDE)]
    rows = {part: (predicted.get(part, 0), actual.get(part, 0)) for part in parts}
    outside = predicted.get("NCCL estimate", 0)
    kept = sum(predicted.get(part, 0) for part in OF_BACKWARD)
    rows[KEPT] = kept, actual.get(KEPT, 0)
    others = sum(predicted.values()) - sum(row[0] for row in rows.values()) - outside
    rows[OTHER] = others, actual.get(OTHER, 0)
    rows |= {FREE: (0, actual.get(FREE, 0)), OUTSIDE: (outside, actual.get(OUTSIDE, 0))}
    rows = {part: row for part, row in rows.items() if any(row)}
    total = tuple(map(sum, zip(*rows.values()))) or (0, 0)
    yield f"  {'':<22}{'predicted peak':>16}{'at the error':>16}"
    for part, row in {**rows, "sum": total}.items():
        yield f"  {part:<22}" + "".join(f"{format_bytes(size):>16}" for size in row)


def largest(tensors: Sequence[LiveTensor]) -> Iterator[str]:
    """Yield lines on the largest groups of equal tensors; those of equal modules in several layers are one group."""
    groups = Counter[tuple[str, str, tuple[int, ...], torch.dtype]]()
    count = Counter[tuple[str, str, tuple[int, ...], torch.dtype]]()
    for tensor in tensors:
        owner = re.sub(r"\blayers\.\d+\b|\bbucket \d+", lambda found: found[0].rstrip("0123456789") + "*", tensor.owner)
        group = (tensor.part, owner, tensor.shape, tensor.dtype)
        groups[group] += tensor.size
        count[group] += 1
    if groups:
        yield "largest tensors:"
    for group, size in groups.most_common(LARGEST):
        part, owner, shape, dtype = group
        sizes = " x ".join(map(str, shape))
        kind = str(dtype).removeprefix("torch.")
        number = counted(count[group], "tensor")
        yield f"  {format_bytes(size):>12}  {number:<12} {kind} [{sizes}]  {part}: {owner or '?'}"
