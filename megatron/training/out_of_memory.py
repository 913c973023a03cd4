"""Explain why a run is out of memory: predicted against actual bytes by part, the largest tensors, and what would fit.

The report is made after the error, from the frames that the error holds and the tensors that are alive
(:mod:`megatron.training.live_tensors`), so a run that has enough memory computes nothing for it. It describes this
rank, and does not communicate.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.arguments.fitting import fitting_changes
from megatron.config.launch import Launch, ranks_per_node
from megatron.config.machine import memory_bytes
from megatron.config.run import RunConfig
from megatron.config.text import counted, format_bytes
from megatron.distributed.layout import Layout
from megatron.planner.memory import STATE_KINDS, peaks_by_rank, rank_state_bytes
from megatron.training.failure_report import MEMORY, failure_kind
from megatron.training.fake_world import bucket_names, state_tensors
from megatron.training.live_tensors import KEPT, OTHER, LiveTensor, ModuleNames, frames_of, live_tensors, trainer_of
from megatron.training.trainer import Trainer

LARGEST = 8
"""Groups of equal tensors that are listed."""

GATHERED, NCCL = "gathered weights", "NCCL estimate"
"""Parts of the forecast."""

FREE, OUTSIDE = "free in the allocator", "outside of PyTorch"
"""Memory that is in no tensor."""

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

    # That this rank may use, with what it uses outside of PyTorch.
    total: float
    # In tensors; held by PyTorch's allocator but free; the CUDA context, NCCL, libraries and other processes.
    allocated: int
    free: int
    outside: int

    @classmethod
    def of(cls, device: torch.device, in_tensors: int, ranks: int) -> DeviceMemory:
        """Read the counters of a GPU, or those of this process, which holds ``in_tensors`` bytes of them.

        Args:
            device: of the rank.
            in_tensors: bytes of live tensors.
            ranks: that share the memory of a host.
        """
        if device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(device)
            allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
            share = torch.cuda.get_per_process_memory_fraction(device)
            outside = whole - free - reserved if share == 1 else 0  # PyTorch stops at its share, whatever is free
            return cls(share * whole, allocated, reserved - allocated, outside)
        pages, resident, *_ = map(int, Path("/proc/self/statm").read_text().split())
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        limited = limit != resource.RLIM_INFINITY
        total = float(limit) if limited else (memory_bytes() or math.inf) / ranks
        used = (pages if limited else resident) * resource.getpagesize()
        return cls(total, in_tensors, 0, max(0, used - in_tensors))


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
    device, names = _device(config, trainer), ModuleNames(trainer)
    tensors = live_tensors(device, frames, names, {} if trainer is None else _state(trainer))
    ranks = ranks_per_node(os.environ)
    memory = DeviceMemory.of(device, sum(tensor.size for tensor in tensors), ranks)
    asked, module = requested_bytes(error), names.of_frames(frames)
    yield (
        f"memory of rank {launch.rank} on {device}, which has {format_bytes(memory.total)}"
        + (f": {format_bytes(asked)} could not be allocated" if asked else "")
        + (f" in {module}" if module else "")
    )
    predicted, actual = rank_peak_bytes(config, launch.world_size, launch.rank), actual_bytes(tensors, memory)
    yield from table(predicted, actual)
    yield from largest(tensors)
    outside = max(0, memory.outside - predicted.get(NCCL, 0))
    beyond = max(0, memory.allocated + (asked or 0) - sum(predicted.values()) + predicted.get(NCCL, 0))
    yield from changes(config, launch.world_size, memory.total - outside, beyond)


def changes(config: RunConfig, world_size: int, capacity: float, beyond: int) -> Iterator[str]:
    """Yield lines on single changes with which the run would fit; arguments: :func:`fitting_changes`."""
    if beyond:
        yield f"the run takes {format_bytes(beyond)} beyond the forecast, which a change has to save, too"
    found = fitting_changes(config, world_size, capacity, beyond)
    if found:
        yield f"cheapest changes that would fit into {format_bytes(capacity)}, by the forecast:"
        yield from (f"  {change}" for change in found)
    else:
        more = "more ranks may" if config.planning.plan else "--plan auto tries several at once"
        yield f"no single change would fit into {format_bytes(capacity)}: {more}"


def _device(config: RunConfig, trainer: Trainer | None) -> torch.device:
    if trainer is not None:
        return trainer.device
    cuda = config.training.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _state(trainer: Trainer) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return the tensors of the state by part, and the whole weights that ZeRO-3 has gathered."""
    whole = (buffer.whole for buffer in trainer.optimizer.weights.buffers)
    return state_tensors(trainer) | {GATHERED: dict(zip(bucket_names(trainer), whole))}


def rank_peak_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, int]:
    """Return the forecast of a rank's peak by part: of the state exactly, else as of its pipeline rank."""
    pp = Layout.from_config(config.parallel, world_size).coordinate(rank)["pp"]
    return peaks_by_rank(config, world_size)[pp] | rank_state_bytes(config, world_size, rank)


def actual_bytes(tensors: Sequence[LiveTensor], memory: DeviceMemory) -> dict[str, int]:
    """Return the bytes of live tensors by part, and of the device's memory that is in no tensor."""
    found = Counter[str]()
    for tensor in tensors:
        found[tensor.part] += tensor.size
    # Buffers that only C++ holds, such as workspaces of cuBLAS; the allocator rounds sizes up, too.
    found[OTHER] += max(0, memory.allocated - found.total())
    return {**found, FREE: memory.free, OUTSIDE: memory.outside}


def table(predicted: Mapping[str, int], actual: Mapping[str, int]) -> Iterator[str]:
    """Yield lines that compare the forecast with what there is, part by part."""
    parts = [part for part in predicted if part in (*STATE_KINDS, GATHERED)]
    parts += [part for part in actual if part not in (*parts, KEPT, OTHER, FREE, OUTSIDE)]
    rows = {part: (predicted.get(part, 0), actual.get(part, 0)) for part in parts}
    outside = predicted.get(NCCL, 0)
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
        owner = re.sub(r"\blayers\.\d+\b", "layers.*", tensor.owner)
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
