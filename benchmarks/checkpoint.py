"""Speed of saving and loading a checkpoint beside raw writes and reads, what an asynchronous one costs, and memory.

    python -m benchmarks.checkpoint --folder DIR_ON_THE_DISK_TO_MEASURE

The tensors are those of GPT-2 layers of width 1024 with Adam's moments, in fp32: matrices of megabytes and vectors of
kilobytes. Raw writing is one file in blocks of 64 MB and an fsync; raw reading is the checkpoint's own file in blocks
of 4 MB; both do nothing else with the bytes. A save also plans, proves, hashes, syncs every file and folder and
renames; a load also proves every byte. Before each reading the system is asked to forget what it has cached of the
files. Both take turns, every other round in the other order; a ratio is the median over rounds.

What an asynchronous save costs training is the copy into the host's memory, and the start of its thread. Beside it
stands the C library's memcpy of the same tensors to the same memory, which was touched before.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import conditions, options, ratios, reset_peak_memory, run, spreads, status_bytes, timed
from megatron.checkpoint.format import Manifest, whole_box
from megatron.checkpoint.load import load_sharded
from megatron.checkpoint.save import HostCopyBuffer, run_in_background, save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart, tensor_bytes
from megatron.distributed.comm import Group

ALONE = Group()
KINDS = ("weight", "bias")
PREFIXES = ("", "optim.exp_avg.", "optim.exp_avg_sq.")

LINES = {"save / raw write": ("raw write", "save"), "load / raw read": ("raw read", "load")}


def layer(hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a GPT-2 layer's parameters, by name."""
    matrices = {
        "self_attention.linear_qkv": (3 * hidden, hidden),
        "self_attention.linear_proj": (hidden, hidden),
        "mlp.linear_fc1": (4 * hidden, hidden),
        "mlp.linear_fc2": (hidden, 4 * hidden),
    }
    norms = {f"{norm}.{kind}": (hidden,) for norm in ("input_layernorm", "pre_mlp_layernorm") for kind in KINDS}
    biases = {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return {f"{name}.weight": shape for name, shape in matrices.items()} | biases | norms


def model(megabytes: int, hidden: int) -> dict[str, Tensor]:
    """Tensors of as many layers as fit, at least one."""
    shapes = layer(hidden)
    layers = max(1, int(megabytes * 1e6) // sum(4 * 3 * prod(shape) for shape in shapes.values()))
    names = [(f"{prefix}layers.{i}.{name}", name) for i in range(layers) for prefix in PREFIXES for name in shapes]
    return {full: torch.randn(shapes[name]) for full, name in names}


def entries(tensors: Mapping[str, Tensor], transposed: bool = False) -> dict[str, GlobalTensor]:
    """All of them from one rank; ``transposed`` in memory, so that each must be copied to be written."""
    found = {}
    for name, tensor in tensors.items():
        source = tensor.mT.contiguous().mT if transposed and tensor.ndim == 2 else tensor
        shape = tuple(tensor.shape)
        found[name] = GlobalTensor(shape, shape, tensor.dtype, (TensorPart(whole_box(shape), source),))
    return found


def raw_write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the same bytes into one file and fsync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for tensor in tensors.values():
            content = tensor_bytes(tensor)
            while content:
                content = content[os.write(fd, content[: 64 << 20]) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path) -> None:
    """All bytes of the file into one buffer."""
    buffer = memoryview(bytearray(4 << 20))
    fd = os.open(path, os.O_RDONLY)
    try:
        while os.readv(fd, [buffer]):
            pass
    finally:
        os.close(fd)


def forget(paths: Iterator[Path]) -> None:
    """Ask the system to drop what it has cached of files that are on the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def take_turns(folder: Path, tensors: Mapping[str, Tensor], repeats: int) -> dict[str, list[float]]:
    """Seconds of each round, by contestant, after a round that warms up.

    Raises:
        RuntimeError: when what was loaded is not what was saved.
    """
    raw, path = folder / "raw", folder / "iter_0000001"
    saved = entries(tensors)
    loaded = entries({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    writers = {"raw write": lambda: raw_write(raw, tensors), "save": lambda: save_sharded(path, saved, {}, {}, ALONE)}

    def data() -> Path:
        return next(path.glob("*/tensors_00000.safetensors"))  # every save has a folder of its own

    readers = {"raw read": lambda: raw_read(data()), "load": lambda: load_sharded(Manifest.open(path), loaded, ALONE)}
    seconds: dict[str, list[float]] = {name: [] for name in (*writers, *readers)}

    def time_all(actions: dict[str, Callable[[], None]], round_: int) -> None:
        for name in sorted(actions, reverse=bool(round_ % 2)):
            spent = timed(actions[name])
            if round_:
                seconds[name].append(spent)
            forget(p for p in (raw, *path.rglob("*")) if p.is_file())

    for round_ in range(repeats + 1):
        time_all(writers, round_)
        raw.unlink()
        raw_read(data())  # the first read after a write may find a virtual disk busy
        forget(iter([data()]))
        time_all(readers, round_)
        shutil.rmtree(path)  # what comes next finds as much free memory as this did
        os.sync()
    wrong = [name for name, entry in loaded.items() if not torch.equal(entry.parts[0].resolve(), tensors[name])]
    if wrong:
        raise RuntimeError(f"these were not loaded as they were saved: {wrong}")
    return seconds


def standstill(folder: Path, tensors: Mapping[str, Tensor], repeats: int) -> list[float]:
    """Return the blocking time of an asynchronous save over a memcpy: median, lowest and highest round."""
    saved, pending = entries(tensors), []
    staging = HostCopyBuffer(saved)
    places = {name: copy.parts[0].resolve() for name, copy in staging.copy(saved).items()}
    seconds: dict[str, list[float]] = {"memcpy": [], "save": []}

    def by_memcpy() -> None:
        for name, tensor in tensors.items():
            ctypes.memmove(places[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)

    def start_save() -> None:
        copies = staging.copy(saved)
        pending.append(run_in_background(partial(save_sharded, path, copies, {}, {}, ALONE), "save"))

    for round_ in range(repeats + 1):
        path = folder / f"iter_{round_:07d}"
        for name in sorted(seconds, reverse=bool(round_ % 2)):
            seconds[name].append(timed(by_memcpy if name == "memcpy" else start_save))
            if pending:
                pending.pop().result()
                shutil.rmtree(path)
    return ratios(seconds["save"][1:], seconds["memcpy"][1:])


def peak_memory(folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """Bytes by which a save of transposed tensors raises the memory of the process (Linux)."""
    saved = entries(tensors, transposed=True)
    before = reset_peak_memory()
    save_sharded(folder / "iter_0000002", saved, {}, {}, ALONE)
    return status_bytes("VmHWM") - before


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    text = ["# Checkpoint, one process, fp32, local disk", *spreads("ratio of speeds", result["ratios"])]
    still = {"asynchronous save": result["standstill"]}
    text += spreads("seconds that training stands still, over seconds of a memcpy", still)
    speeds = ", ".join(f"{name} {speed}" for name, speed in result["megabytes_per_second"].items())
    text += [
        "",
        f"Medians in MB/s: {speeds}. A save takes {result['peak_megabytes']} MB of memory beyond the tensors.",
        "",
        f"{result['megabytes']} MB in {result['tensors']} tensors, {result['rounds']} alternating rounds, caches "
        f"dropped before reading; {conditions(result)}",
    ]
    return "\n".join(text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures."""
    torch.set_num_threads(1)
    tensors = model(args.megabytes, args.hidden_size)
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds = take_turns(Path(folder), tensors, args.repeats)
        still = standstill(Path(folder), tensors, args.repeats)
        peak = peak_memory(Path(folder), tensors) / 1e6
    return {
        "ratios": {line: ratios(seconds[raw], seconds[ours]) for line, (raw, ours) in LINES.items()},
        "standstill": still,
        "megabytes": round(megabytes),
        "tensors": len(tensors),
        "megabytes_per_second": {name: round(megabytes / statistics.median(s)) for name, s in seconds.items()},
        "peak_megabytes": round(peak),
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (default: this one)")
    parser.add_argument("--megabytes", type=int, default=1000, help="less for a quick look")
    parser.add_argument("--hidden-size", type=int, default=1024, help="width of the layers")
    return run("checkpoint", parser, argv, measure, page, fixed=("megabytes", "hidden_size"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
