"""Bytes that each rank sends in a step: counted where tensors leave it, beside the closed formulas.

    python -m benchmarks.wire

Four replicas of a small Llama train a step with every way of sharding and of sending gradients. The bytes counted by
their collectives must equal the formulas of `megatron/planner/memory.py`. The same formulas are shown for Llama-2 7B,
which is not run. ZeRO-3 is also run beside PyTorch's FSDP2 (`fully_shard`) on the Llama of `transformers`: bytes of all
collectives of both, and the peak of the memory of all tensors from the start to the end of the step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ranks import run_ranks
from benchmarks.record import options, run, table
from megatron.arguments.cli import parse
from megatron.config.batch import get_num_microbatches
from megatron.config.parallel import ZERO_STAGES
from megatron.config.run import RunConfig
from megatron.convert.huggingface.config import build_config_json
from megatron.layers.parameters import num_parameters
from megatron.optimizer.lr_scheduler import Rates
from megatron.planner.memory import data_parallel_traffic
from megatron.training.build import build_trainer
from megatron.training.step import train_step

RANKS, MICROBATCHES = 4, (1, 4)
OPERATIONS = ("reduce-scatter", "all-to-all", "all-reduce", "all-gather")
SMALL = "--preset tiny-llama --vocab-size 512 --seq-length 32 --train-iters 1 --mock-data --device cpu --bf16"
LARGE = "--preset llama2-7b --train-iters 1 --mock-data --bf16"
SCALARS = 2 * 8
"""Bytes of the tokens of a step and of their loss, which replicas add up; they are taken out of what is counted."""


WIDE = SMALL + " --hidden-size 512 --num-layers 8 --num-attention-heads 8 --ffn-hidden-size 1376"
"""Of the comparison with FSDP2: weights take much more memory than activations."""

WIRES = {
    "fp32": "",
    "bf16": "--grad-reduce-in-bf16",
    "int8": "--grad-compression int8",
    "PowerSGD, rank 4": "--grad-compression powersgd:4",
    "top 1%": "--grad-compression topk:0.01",
}
"""Forms in which gradients are sent; the last two replace an all-reduce, so they need ZeRO-0 here."""

RESHARD, KEEP = "--reshard-after-forward", "--no-reshard-after-forward"
REMAINDERS = f"{RESHARD} --store-param-remainders"


class Way(NamedTuple):
    """A ZeRO stage, the micro-batches of a step, and how gradients are sent."""

    strategy: str
    batches: int
    wire: str = "fp32"
    more: str = ""

    @property
    def flags(self) -> str:
        """Flags of a run."""
        strategy = f"--data-parallel-sharding-strategy {self.strategy} {self.more}"
        return f"{strategy} --global-batch-size {RANKS * self.batches} {WIRES[self.wire]}"


def config_of(model: str, way: Way) -> RunConfig:
    """Return the run's configuration."""
    environment = {"RANK": "0", "WORLD_SIZE": str(RANKS)}
    return parse([*model.split(), *way.flags.split()], environment).config


def count(rank: int, world_size: int, way: Way) -> dict[str, float]:
    """Return the bytes this rank sends to other replicas in a step, by operation."""
    trainer = build_trainer(config_of(SMALL, way), rank, world_size)
    meter = trainer.mesh.meter
    meter.pop_bytes_sent()
    train_step(trainer, trainer.next_batches(), Rates(1e-3, 0.0))
    found = {operation: count for (axes, operation), count in meter.pop_bytes_sent().items() if axes == "dp"}
    found["all-reduce"] -= 2 * SCALARS * (RANKS - 1) / RANKS
    return {operation: count for operation, count in found.items() if count}


def check(way: Way, ranks: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Compare the bytes of all ranks with the formula; return a row of results.

    Raises:
        RuntimeError: when a rank sends other bytes than the formula.
    """
    formula = data_parallel_traffic(config_of(SMALL, way), RANKS)
    if any(rank != formula for rank in ranks):
        raise RuntimeError(f"{way}: the ranks sent {ranks}, the formula says {formula}")
    large = config_of(LARGE, way)
    return {
        "stage": ZERO_STAGES[way.strategy],
        "micro-batches": get_num_microbatches(large.training, RANKS),
        "wire": way.wire,
        "small": formula,
        "large": data_parallel_traffic(large, RANKS),
    }


class Collectives(TorchDispatchMode):
    """Count the bytes that a ring sends of this rank's collectives in PyTorch code."""

    def __init__(self, ranks: int) -> None:
        """Count over groups of so many ranks."""
        super().__init__()
        self.share, self.sent = (ranks - 1) / ranks, dict[str, float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the larger of what a rank passes in and what it gets."""
        if func.namespace == "c10d":
            name = func.__name__.partition(".")[0].strip("_")
            largest = max(sum(x.nbytes for x in tree_leaves(arg) if isinstance(x, Tensor)) for arg in args)
            passes = 2 if name.startswith("allreduce") else 1
            self.sent[name] = self.sent.get(name, 0.0) + passes * self.share * largest
        return func(*args, **(kwargs or {}))


def run_ours(rank: int, world_size: int, way: Way) -> tuple[float, int | None]:
    """Return the bytes that a rank sends in a step of ZeRO-3, and the peak memory of its tensors (see `peak`)."""
    with tracker(way) as memory:
        trainer = build_trainer(config_of(WIDE, way), rank, world_size)
        batches = trainer.next_batches()
        trainer.mesh.meter.pop_bytes_sent()
        train_step(trainer, batches, Rates(1e-3, 0.0))
    return sum(trainer.mesh.meter.pop_bytes_sent().values()), peak(memory)


def run_fsdp(rank: int, world_size: int, way: Way) -> tuple[float, int | None]:
    """Return the same of FSDP2 with AdamW: bf16 weights in the model, fp32 reductions and state."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

    config = config_of(WIDE, way)
    values = build_config_json(config.model) | {"use_cache": False}
    described = AutoConfig.for_model(**{name: value for name, value in values.items() if name != "torch_dtype"})
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with tracker(way) as memory:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, dtype=torch.float32, trust_remote_code=False)
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=way.more != KEEP)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(0.01)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():  # so that the moments exist, as in every step but the first
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        ids = torch.randint(config.model.vocab, (1, config.training.seq_length + 1))
        with Collectives(world_size) as collectives:
            for _ in range(way.batches):
                given = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "shift_labels": ids[:, 1:]}
                (model(**given).loss / way.batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return sum(collectives.sent.values()), peak(memory)


def tracker(way: Way) -> AbstractContextManager[MemTracker | None]:
    """Return torch's memory tracker, which covers one micro-batch only."""
    return MemTracker() if way.batches == 1 else nullcontext()


def peak(memory: MemTracker | None) -> int | None:
    """Return the peak bytes of all tensors; None without a tracker."""
    return memory and max(parts["Total"] for parts in memory.get_tracker_snapshot("peak").values())


def run_all(rank: int, world_size: int, ways: Sequence[Way], beside: Sequence[Way]) -> tuple[list[Any], list[Any]]:
    """Return the bytes sent by this rank for each way of sharding, and figures of ZeRO-3 and of FSDP2."""
    counts = [count(rank, world_size, way) for way in ways]
    return counts, [(*run_ours(rank, world_size, way), *run_fsdp(rank, world_size, way)) for way in beside]


def page(result: dict[str, Any]) -> str:
    """Return the page of results."""
    rows = [
        [row["stage"], row["micro-batches"], row["wire"]]
        + [describe(row["small"], 2**20, "MB"), describe(row["large"], 2**30, "GB")]
        for row in result["rows"]
    ]
    beside = []
    for row in result["beside"]:
        shown = [row[name] for name in ("sent", "FSDP2 sent", "peak", "FSDP2 peak")]
        cells = ["" if figure is None else f"{figure / 2**20:,.1f}" for figure in shown]
        beside.append([row["micro-batches"], f"`{row['flags']}`", *cells])
    model = config_of(WIDE, Way("optim_grads_params", 1)).model
    heads = ("ZeRO", "micro-batches", "gradients travel as", "counted = formula, a small Llama", "Llama-2 7B, formula")
    others = ("micro-batches", "flags", "sent, MB: ours", "FSDP2", "peak memory, MB: ours", "FSDP2")
    text = [
        "# Bytes that a rank sends in a step, 4 replicas, bf16 weights",
        *table(heads, rows, "rr"),
        "",
        "As a ring sends them (`megatron/distributed/comm.py`); every rank sends as much; MB are 2^20 bytes, GB 2^30. "
        "Counted on real ranks over gloo, whose own algorithms may send more; all counts were equal to the formula to "
        "the byte.",
        "",
        "## ZeRO-3 beside FSDP2",
        *table(others, beside, "rlrrrr"),
        "",
        f"A Llama of {num_parameters(model):,} parameters, {RANKS} ranks, sequences of 32 tokens, bf16 weights, fp32 "
        "gradients and state; ours and that of `transformers` with `fully_shard` on each block and on the model. Bytes "
        "of all collectives as rings send them. The peak of a rank's tensors (torch's `MemTracker`), with all state of "
        "the optimizer, from building the model to the end of a step. Ours has three tensors where FSDP2 has none or a "
        "shorter-lived one: a bf16 shard of the weights beside the fp32 shard (11.3 MB; gone with "
        "`--store-param-remainders`), gradient shards that live as long as the run (22.6 MB; those of FSDP2 are "
        "allocated in backward), and a second fp32 buffer of a block's gradients: one is filled, one is reduced.",
    ]
    return "\n".join(text)


def describe(sent: dict[str, float], unit: int, name: str) -> str:
    """Return the sum and its parts as text."""
    parts = ", ".join(f"{op} {sent[op] / unit:,.2f}" for op in OPERATIONS if op in sent)
    return f"{sum(sent.values()) / unit:,.2f} {name}: {parts}"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Count all ways."""
    ways = [Way(*way) for way in product(ZERO_STAGES, MICROBATCHES, ("fp32", "bf16", "int8"))]
    ways += [Way("no_shard", 1, wire) for wire in ("PowerSGD, rank 4", "top 1%")]
    sharded = [Way("optim_grads_params", *way) for way in product(MICROBATCHES, ("fp32",), (RESHARD, KEEP))]
    sharded.append(Way("optim_grads_params", 1, "fp32", REMAINDERS))
    counts, figures = zip(*run_ranks(RANKS, run_all, ways, sharded))
    rows = [check(way, ranks) for way, ranks in zip(ways, zip(*counts))]
    beside = []
    for way, ranks in zip(sharded, zip(*figures)):
        most = [None if None in of_ranks else max(of_ranks) for of_ranks in zip(*ranks)]
        named = dict(zip(("sent", "peak", "FSDP2 sent", "FSDP2 peak"), most))
        beside.append({"micro-batches": way.batches, "flags": way.more} | named)
    return {"rows": rows, "beside": beside}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    return run("wire", options(__doc__, rounds=None), argv, measure, page, ("torch", "transformers"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
