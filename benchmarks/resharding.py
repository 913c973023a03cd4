"""Memory needed to load a checkpoint in a different layout (Linux).

    python -m benchmarks.resharding --folder DIR

TP 2 x DP 2 under ZeRO-1 writes a GPT-2 of width 768 and 18 layers (2 GB: bf16 with fp32 main parameters and moments);
other layouts load it. Each rank first touches all memory it holds, so the rise of its anonymous memory (RssAnon,
without mapped files) is the extra memory of loading. Limit: 1 GB. The sum of all bits shows that the tensors are equal.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks import run_ranks
from benchmarks.record import conditions, options, run, status_bytes, table
from megatron.arguments.cli import parse
from megatron.arguments.sources import to_dict
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor
from megatron.config.run import RunConfig
from megatron.distributed import comm
from megatron.planner.memory import checkpoint_bytes
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import local_tensors, restore_run, run_state, tensors_to_save
from megatron.training.trainer import Trainer

LIMIT, INTERVAL = 1e9, 0.002
"""Bytes; seconds between two readings of a process's memory."""

ZERO = "--data-parallel-sharding-strategy"
WRITTEN = (4, f"--tensor-model-parallel-size 2 {ZERO} optim")
"""Ranks and flags of the layout that writes."""

LOADED = (
    (1, f"{ZERO} no_shard"),
    (2, f"--pipeline-model-parallel-size 2 {ZERO} no_shard"),
    (3, f"{ZERO} optim_grads"),
    (4, f"{ZERO} optim_grads_params"),
    (4, f"--tensor-model-parallel-size 2 {ZERO} optim_grads_params"),
    (4, f"--tensor-model-parallel-size 4 --sequence-parallel {ZERO} no_shard"),
)
"""Of those that load."""


def config_of(layers: int, ranks: int, flags: str) -> RunConfig:
    """Return the run's configuration."""
    shape = f"--preset gpt2-124m --num-layers {layers} --bf16 --mock-data --train-iters 1 --device cpu"
    batch = f"--global-batch-size {12 // ranks * ranks}"
    return parse(f"{shape} {batch} {flags}".split(), {"RANK": "0", "WORLD_SIZE": str(ranks)}).config


def bits(trainer: Trainer) -> int:
    """Sum of the bits of all that a checkpoint holds, each element counted by the rank that answers for it."""

    def of(tensor: Tensor) -> int:
        return int(tensor.contiguous().view(torch.int32).sum(dtype=torch.int64).item())

    parts = (part for entry in tensors_to_save(trainer).values() for part in entry.parts)
    return sum(comm.all_gather_objects(sum(of(part.resolve()) for part in parts), trainer.mesh.world))


def save(rank: int, world_size: int, layers: int, flags: str, folder: str) -> int:
    """Write a checkpoint with something in every tensor; returns the sum of its bits."""
    config = config_of(layers, world_size, flags)
    trainer = build_trainer(config, rank, world_size)
    for number, tensor in enumerate(local_tensors(trainer).values()):
        tensor.add_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1000 * rank + number)))
    entries: dict[str, GlobalTensor] = tensors_to_save(trainer)
    save_sharded(Path(folder) / "iter_0000000", entries, run_state(trainer), to_dict(config), trainer.mesh.world)
    return bits(trainer)


def load(rank: int, world_size: int, layers: int, flags: str, folder: str) -> tuple[int, int, int, float]:
    """Load it; returns the sum of its bits, bytes held before, the peak above them, and seconds."""
    trainer = build_trainer(config_of(layers, world_size, flags), rank, world_size, fresh=False)
    weights = [b.whole if b.whole.untyped_storage().nbytes() else b.part for b in trainer.optimizer.weights.buffers]
    touch([*local_tensors(trainer).values(), *weights, *(bucket.shard for bucket in trainer.buckets.buckets)])
    gc.collect()
    before, started = status_bytes("RssAnon"), time.perf_counter()
    peak = peak_while(lambda: restore_run(trainer, Manifest.open(Path(folder) / "iter_0000000"), (0, 0)))
    seconds = time.perf_counter() - started
    return bits(trainer), before, peak - before, seconds


@torch.no_grad()
def touch(tensors: Iterable[Tensor]) -> None:
    """Make the system allocate all reserved memory."""
    for tensor in tensors:
        tensor.fill_(1.0)


def peak_while(action: Callable[[], object]) -> int:
    """Return the peak anonymous memory of this process during ``action``, without mapped files."""
    peak, done = [status_bytes("RssAnon")], threading.Event()

    def look() -> None:
        while not done.wait(INTERVAL):
            peak[0] = max(peak[0], status_bytes("RssAnon"))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return max(peak[0], status_bytes("RssAnon"))


def load_all(folder: Path, layers: int) -> list[dict[str, Any]]:
    """One row for each layout that loads.

    Raises:
        RuntimeError: when what is loaded is not what was written, or loading takes more than the limit.
    """
    ranks, flags = WRITTEN
    (written, *_) = run_ranks(ranks, save, layers, flags, str(folder))
    rows = []
    for ranks, flags in LOADED:
        found = run_ranks(ranks, load, layers, flags, str(folder))
        extra = max(more for _, _, more, _ in found)
        if any(loaded != written for loaded, *_ in found) or extra > LIMIT:
            raise RuntimeError(f"{flags} on {ranks} ranks: {found}, and {written} was written")
        held_before = max(before for _, before, _, _ in found)
        seconds = max(taken for *_, taken in found)
        rows.append({"ranks": ranks, "flags": flags, "held": held_before, "extra": extra, "seconds": round(seconds, 1)})
    return rows


def page(result: dict[str, Any]) -> str:
    """Return the page of results."""
    heads = ("ranks", "layout", "held before, MB", "loading takes in addition, MB", "seconds")
    rows = [
        [row["ranks"], f"`{row['flags']}`", f"{row['held'] / 1e6:,.0f}", f"{row['extra'] / 1e6:,.0f}", row["seconds"]]
        for row in result["rows"]
    ]
    text = [
        "# Loading a checkpoint in another layout",
        *table(heads, rows, "rlrrr"),
        "",
        f"{result['bytes'] / 1e9:.2f} GB, written by `{WRITTEN[1]}` on {WRITTEN[0]} ranks; RssAnon of the rank that "
        f"takes most, all of it held before was touched; limit {LIMIT / 1e9:.0f} GB. All bits were those that were "
        f"written. {conditions(result)}",
    ]
    return "\n".join(text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each layout, and the size of the checkpoint."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = load_all(Path(folder), args.num_layers)
    return {"rows": rows, "bytes": checkpoint_bytes(config_of(args.num_layers, 1, ""))}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=None)
    parser.add_argument("--folder", type=Path, default=None, help="for the checkpoint (default: a temporary one)")
    parser.add_argument("--num-layers", type=int, default=18, help="less for a quick look")
    return run("resharding", parser, argv, measure, page, fixed=("num_layers",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
