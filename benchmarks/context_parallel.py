"""Context parallelism beside one process, and block-sparse attention beside dense, on a CPU.

    python -m benchmarks.context_parallel            # --write keeps the results
    python -m benchmarks.context_parallel --long     # also one sample of 131,072 tokens, 10 minutes
    python -m benchmarks.context_parallel --mixers   # instead, how time and memory of mixers grow, 15 minutes

* Processor seconds of a training step, summed over the ranks, over those of one process with the same tokens.
* Bytes that a rank sends in a step, counted, over the formula of `megatron/planner/communication.py`.
* Time of attention, forward and backward, over that of plain causal attention, beside the share of tiles computed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.ranks import run_ranks
from benchmarks.record import conditions, options, reset_peak_memory, run, status_bytes, table
from megatron.arguments.cli import parse
from megatron.config.attention_pattern import CAUSAL, AttentionPattern
from megatron.config.run import RunConfig
from megatron.distributed.comm import ALL_REDUCE
from megatron.kernels.attention import sdpa
from megatron.kernels.attention_mask import TRIANGLE, AttentionMask
from megatron.kernels.block_attention import BLOCK, block_attention
from megatron.optimizer.lr_scheduler import Rates
from megatron.planner.communication import attention_traffic
from megatron.training.build import build_trainer
from megatron.training.step import train_step

MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --num-query-groups 4 --position-embedding-type rope "
    "--swiglu --disable-bias-linear --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0 --vocab-size 1024 "
    "--mock-data --train-iters 100 --global-batch-size 1 --micro-batch-size 1 --device cpu"
)
LENGTH, STEPS, ROUNDS = 8192, 2, 3
BOTH = "a2a+p2p --hierarchical-context-parallel-sizes 2 2"
METHODS = ((2, "p2p"), (2, "all_gather"), (2, "a2a"), (4, "p2p"), (4, "all_gather"), (4, "a2a"), (4, BOTH))
GOAL = 1.10
"""Processor seconds over those of one process."""

SPARSE_LENGTH = 16_384
PATTERNS = ("local:4096", "local:1024", "chunked:2048", "local:512+first:64", "prefix:4096")
DOCUMENTS = (1024, 4096)
"""Tokens of each document of packed samples."""

LONG = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --position-embedding-type rope --swiglu "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --vocab-size 64 --mock-data --train-iters 100 "
    "--global-batch-size 1 --micro-batch-size 1 --device cpu --attention-pattern local:8192,global"
)
LONG_LENGTH = 131_072

GROWTH = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --position-embedding-type rope "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --vocab-size 64 --mock-data --train-iters 100 "
    "--global-batch-size 1 --micro-batch-size 1 --device cpu"
)
MIXERS = {
    "attention": "",
    "mamba2": "--mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 1 --mamba-chunk-size 64",
    "gated-delta-net": "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 16 "
    "--linear-value-head-dim 16",
}
"""Options of the mixers that are compared; heads have 16 channels."""
LENGTHS = (16_384, 32_768, 65_536, LONG_LENGTH)
CONTEXTS = (1, 4)


def config_of(flags: str, length: int, size: int, method: str) -> RunConfig:
    """Return the configuration of a run on ``size`` context-parallel ranks."""
    context = f"--context-parallel-size {size} --cp-comm-type {method}" if size > 1 else ""
    flags = f"{flags} --seq-length {length} --max-position-embeddings {length} {context}"
    return parse(flags.split(), {"RANK": "0", "WORLD_SIZE": str(size)}).config


def measure_steps(rank: int, world_size: int, config: RunConfig, steps: int) -> dict[str, Any]:
    """Return this rank's processor seconds and bytes sent per step, the last loss, and the growth of peak memory."""
    trainer = build_trainer(config, rank, world_size)
    rates, meter = Rates(1e-3, 0.0), trainer.mesh.meter
    loss, seconds = torch.zeros(()), []
    gc.collect()
    before = reset_peak_memory()
    for _ in range(steps):
        batches = trainer.next_batches()
        meter.pop_bytes_sent()
        began = time.process_time()
        loss = train_step(trainer, batches, rates).loss
        seconds.append(time.process_time() - began)
        trainer.progress.iteration += 1
        trainer.progress.consumed_samples += 1
    peak = status_bytes("VmHWM")
    # All-reduces are those of gradients and of the loss.
    sent = sum(count for (axes, how), count in meter.pop_bytes_sent().items() if axes == "cp" and how != ALL_REDUCE)
    typical = statistics.median(seconds[1:] or seconds)
    return {"seconds": typical, "bytes": sent, "loss": loss.item(), "KiB": (peak - before) // 1024}


def measure_long_step(rank: int, world_size: int, size: int, method: str) -> dict[str, Any]:
    """Measure a step on a long sample, after one on a short sample, which loads libraries."""
    measure_steps(rank, world_size, config_of(LONG, 1024, size, method), 1)
    return measure_steps(rank, world_size, config_of(LONG, LONG_LENGTH, size, method), 1)


def step_rows() -> list[dict[str, Any]]:
    """Measure every method beside one process, in turn."""
    found: dict[tuple[int, str], list[list[dict[str, Any]]]] = {case: [] for case in ((1, "one process"), *METHODS)}
    for _ in range(ROUNDS):
        for (size, method), runs in found.items():
            runs.append(run_ranks(size, measure_steps, config_of(MODEL, LENGTH, size, method), STEPS))
    ratios: dict[tuple[int, str], list[float]] = {}
    for case, runs in found.items():
        totals = [sum(rank["seconds"] for rank in ranks) for ranks in runs]
        ones = [ranks[0]["seconds"] for ranks in found[1, "one process"]]
        ratios[case] = [total / one for total, one in zip(totals, ones)]
    rows = []
    for size, method in METHODS:
        ranks = found[size, method][0]
        counted = statistics.mean(rank["bytes"] for rank in ranks)
        config = config_of(MODEL, LENGTH, size, method)
        formula = attention_traffic(config).sent * config.model.num_layers
        ratio = ratios[size, method]
        loss = abs(ranks[0]["loss"] / found[1, "one process"][0][0]["loss"] - 1)
        rows.append({
            "CP": size, "method": method.replace(" --hierarchical-context-parallel-sizes 2 2", ", 2 x 2"),
            "ratio": statistics.median(ratio), "low": min(ratio), "high": max(ratio),
            "bytes": counted, "formula": formula, "loss": loss,
        })  # fmt: skip
    return rows


def share_of(mask: AttentionMask) -> float:
    """Return the scores that are computed, over those of plain causal attention."""
    computed = 0.0
    for tile in mask.tiles(BLOCK):
        q, k = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
        computed += q * k / (2 if tile.kind == TRIANGLE else 1)
    return computed / (SPARSE_LENGTH**2 / 2)


def attention_seconds(mask: AttentionMask | None) -> float:
    """Return the processor seconds of attention, forward and backward; None for plain causal attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, SPARSE_LENGTH, 1, 4, 64, generator=generator).unbind()
    for t in (q, k, v):
        t.requires_grad_()
    plain = AttentionMask.of_sequence(SPARSE_LENGTH, q.device)
    began = time.process_time()
    y = sdpa(q, k, v, plain) if mask is None else block_attention(q, k, v, mask)
    y.backward(torch.ones_like(y))
    return time.process_time() - began


def sparse_rows() -> list[dict[str, Any]]:
    """Measure the patterns and packed documents beside plain causal attention, in turn."""
    device = torch.device("cpu")
    masks = {text: AttentionMask.of_sequence(SPARSE_LENGTH, device, AttentionPattern.parse(text)) for text in PATTERNS}
    for tokens in DOCUMENTS:
        documents = (torch.arange(SPARSE_LENGTH) // tokens).unsqueeze(0)
        masks[f"documents of {tokens:,}"] = AttentionMask.of_sequence(SPARSE_LENGTH, device, CAUSAL, documents)
    attention_seconds(None)
    times: dict[str, list[float]] = {name: [] for name in masks}
    for _ in range(ROUNDS):
        dense = attention_seconds(None)
        for name, mask in masks.items():
            times[name].append(attention_seconds(mask) / dense)
    return [
        {"pattern": name, "share": share_of(masks[name]), "time": statistics.median(t), "low": min(t), "high": max(t)}
        for name, t in times.items()
    ]


def long_rows() -> list[dict[str, Any]]:
    """Train a step on one long sample with and without context parallelism."""
    rows = []
    for size, method in ((1, "p2p"), (4, "p2p"), (4, "all_gather"), (4, BOTH)):
        ranks = run_ranks(size, measure_long_step, size, method)
        rows.append({
            "CP": size, "method": method.split()[0] if size > 1 else "-", "loss": ranks[0]["loss"],
            "MiB": max(rank["KiB"] for rank in ranks) / 1024,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def measure_growth(rank: int, world_size: int, mixer: str, length: int) -> dict[str, Any]:
    """Measure a step on a sample, after one on a short sample, which loads libraries."""
    flags = f"{GROWTH} --token-mixers {mixer} {MIXERS[mixer]}"
    measure_steps(rank, world_size, config_of(flags, 1024, world_size, "p2p"), 1)
    return measure_steps(rank, world_size, config_of(flags, length, world_size, "p2p"), 1)


def growth_rows(mixers: Sequence[str]) -> list[dict[str, Any]]:
    """Train a step on one sample of each length, with each mixer, with and without context parallelism."""
    rows = []
    for length, mixer, size in product(LENGTHS, mixers, CONTEXTS):
        ranks = run_ranks(size, measure_growth, mixer, length)
        rows.append({
            "tokens": length, "mixer": mixer, "CP": size, "loss": ranks[0]["loss"],
            "seconds": sum(rank["seconds"] for rank in ranks), "MiB": max(rank["KiB"] for rank in ranks) / 1024,
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def growth_page(result: dict[str, Any]) -> str:
    """Return how time and memory grow as Markdown."""
    found = {(r["mixer"], r["CP"], r["tokens"]): r for r in result["growth"]}
    unit, kinds = found["attention", 1, LENGTHS[0]], list(dict.fromkeys(key[:2] for key in found))

    def lines(what: str) -> list[str]:
        cells = [[f"{found[*kind, n][what] / unit[what]:.2f}" for n in LENGTHS] for kind in kinds]
        heads = ("mixer", "CP", *(f"{n:,}" for n in LENGTHS))
        return table(heads, [[*kind, *row] for kind, row in zip(kinds, cells)])

    return "\n".join([
        "# Time and memory of mixers over the length of a sample, CPU, one thread a rank",
        "",
        "A step on one sample, one block of width 32, heads of 16 channels, fp32. Processor seconds of all ranks",
        f"over those of attention on {LENGTHS[0]:,} tokens in one process:",
        *lines("seconds"),
        "",
        "Growth of the peak memory of a rank in the step, over the same:",
        *lines("MiB"),
        "",
        conditions(result),
    ])  # fmt: skip


def page(result: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    if "growth" in result:
        return growth_page(result)
    heads = ("CP", "method", "seconds / one process", "lowest", "highest", "MB sent", "/ formula", "loss differs by")
    rows = [
        [r["CP"], r["method"], *(f"{r[name]:.2f}" for name in ("ratio", "low", "high"))]
        + [f"{r['bytes'] / 1e6:.2f}", f"{r['bytes'] / r['formula']:.4f}", f"{r['loss']:.0e}"]
        for r in result["steps"]
    ]
    sparse = [
        [r["pattern"], *(f"{r[name]:.3f}" for name in ("share", "time", "low", "high"))] for r in result["sparse"]
    ]
    lines = [
        "# Context parallelism and block-sparse attention, CPU, one thread a rank",
        "",
        f"A step on one sample of {LENGTH:,} tokens, two layers of width 256, fp32. Processor seconds of all ranks",
        f"over those of one process: median of {ROUNDS} alternating rounds (goal {GOAL}). Bytes sent by a rank: mean.",
        *table(heads, rows),
        "",
        f"Attention of {SPARSE_LENGTH:,} tokens, 4 heads of 64, fp32, forward and backward: processor seconds over",
        "those of plain causal attention (SDPA), beside the share of its scores that is computed.",
        *table(("pattern", "scores", "seconds", "lowest", "highest"), sparse),
    ]
    if result["long"]:
        one = result["long"][0]["MiB"]
        long = [
            [r["CP"], r["method"], f"{r['loss']:.6f}", f"{r['MiB']:,.0f}", f"{r['MiB'] / one:.2f}"]
            for r in result["long"]
        ]
        lines += [
            "",
            f"A step on one sample of {LONG_LENGTH:,} tokens (layers `local:8192,global`, width 32): growth of",
            "the peak memory of a rank in the step, after a step on a short sample.",
            *table(("CP", "method", "loss", "MiB", "of one process"), long),
        ]
    return "\n".join([*lines, "", conditions(result)])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    torch.set_num_threads(1)
    if args.mixers is not None:
        return {"growth": growth_rows(args.mixers or [*MIXERS])}
    return {"sparse": sparse_rows(), "steps": step_rows(), "long": long_rows() if args.long else []}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=None)
    parser.add_argument("--long", action="store_true", help="train on one sample of 131,072 tokens too")
    text = "measure how time and memory of these mixers, by default of all, grow with a sample, and nothing else"
    parser.add_argument("--mixers", nargs="*", choices=[*MIXERS], help=text)
    return run("context_parallel", parser, argv, measure, page, fixed=("mixers",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
