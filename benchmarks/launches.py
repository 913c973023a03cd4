"""Count launches, matrix products, bytes, host time and synchronisations of a training step on the null GPU.

    source tests/nullgpu/setup.sh                   # the null GPU: 5 GB the first time
    python -m benchmarks.launches                   # the table
    python -m benchmarks.launches --write           # keep it in benchmarks/results
    python -m benchmarks.launches --cases gpt2-124m-mb32 --implementations ours

The null GPU runs the CUDA build of PyTorch and records every call, but computes nothing. Counts and host times are
real; GPU times are predicted from the counts by a roofline.

Rows of torchtitan need it as `benchmarks.titan` says. Rows that cannot be measured show why.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import gpu_contestants
from benchmarks.gpu_contestants import Ours, Theirs
from benchmarks.record import RESULTS, keep, options, table, versions
from benchmarks.roofline import GAP, GEMM_RATES, GRAPH_GAP, H100, H200, PEAK_FLOPS, Gpu, gpu_seconds, step_seconds
from benchmarks.titan import titan_step
from benchmarks.traffic import Traffic
from megatron.config.run import RunConfig
from megatron.distributed import comm
from megatron.kernels import registry
from megatron.planner.flops import FlopsPerToken

ROOT = Path(__file__).parents[1]
TIMED_STEPS = 9
FIGURES = "launches", "gemms", "bytes", "host_ms", "syncs"
DEPTHS = 2, 4
"""Numbers of layers whose difference gives the figures of one layer."""

LLAMA = "--preset llama3-8b --max-position-embeddings 8192"
LLAMA_1B = (
    f"{LLAMA} --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 8192 "
    "--no-untie-embeddings-and-output-weights"
)
MIXTRAL = f"{LLAMA} --vocab-size 32000 --num-experts 8 --moe-router-topk 2"
QWEN = (
    f"{LLAMA} --vocab-size 151936 --hidden-size 2048 --kv-channels 128 --num-query-groups 4 --qk-layernorm "
    "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 768"
)
EP = "--use-distributed-optimizer --moe-exchange bounded --moe-exchange-bound 1 --expert-model-parallel-size"
DEEPSEEK = "--preset deepseek-v3 --moe-layer-freq 1 --max-position-embeddings 4096 --mtp-num-layers 0"
SMALL_DEEPSEEK = (
    f"{DEEPSEEK} --hidden-size 2048 --num-attention-heads 16 --q-lora-rank 768 --moe-ffn-hidden-size 512 "
    "--moe-shared-expert-intermediate-size 512"
)


@dataclass(frozen=True)
class Case:
    """A model and its batch; ``layers`` and ``micro_batches`` are those of the whole step."""

    flags: str
    micro_batch: int
    layers: int
    micro_batches: int = 1
    # Further flags of ours.
    more: str = ""
    # Of which the first is counted.
    ranks: int = 1

    def model(self, layers: int, micro_batches: int) -> gpu_contestants.Case:
        """Return the case for `benchmarks.gpu_contestants`."""
        flags, samples = f"{self.flags} --num-layers {layers}", self.micro_batch * micro_batches
        return gpu_contestants.Case(flags, samples, (self.micro_batch,), 0.0)

    def config(self, layers: int, micro_batches: int) -> RunConfig:
        """Return the configuration of ours."""
        ours = Ours(self.micro_batch, self.more, self.ranks)
        return ours.config(self.model(layers, micro_batches), torch.device("cuda"))


CASES = {
    "gpt2-124m-mb4": Case("--preset gpt2-124m --seq-length 1024", 4, 12),
    "gpt2-124m-mb32": Case("--preset gpt2-124m --seq-length 1024", 32, 12),
    "llama3-8b-s2048": Case(f"{LLAMA} --seq-length 2048", 1, 8, 4),
    "llama3-8b-s8192": Case(f"{LLAMA} --seq-length 8192", 1, 8, 4),
    "mixtral-s4096": Case(f"{MIXTRAL} --seq-length 4096", 1, 4, 4),
    "qwen3-moe-s4096": Case(f"{QWEN} --seq-length 4096", 1, 4, 4),
    "qwen3-moe-ep4-s4096": Case(f"{QWEN} --seq-length 4096", 1, 4, 4, f"{EP} 4", 4),
    "deepseek-256-experts-s4096": Case(f"{SMALL_DEEPSEEK} --seq-length 4096", 1, 4, 4),
    "deepseek-v3-ep64-s4096": Case(f"{DEEPSEEK} --seq-length 4096", 1, 4, 4, f"{EP} 64", 64),
}
"""Eight layers of Llama-3-8B and four of Mixtral-8x7B, as more do not fit on one GPU with their optimizer state."""

MIXTURES = [
    name for name, case in CASES.items() if case.ranks == 1 and ("experts" in case.flags or "deepseek" in case.flags)
]
"""Cases on one rank whose layers have experts."""

MEASURED = {
    "h100-124m-s1024": Case(
        "--preset gpt2-124m --seq-length 1024", 64, 12, 1, "--cuda-graph step --cross-entropy-chunk-size 4096"
    ),
    "h100-1b-s2048": Case(f"{LLAMA_1B} --seq-length 2048", 4, 16, 4),
    "h100-1b-s4096": Case(f"{LLAMA_1B} --seq-length 4096", 4, 16, 2),
    "h100-8b-s8192": CASES["llama3-8b-s8192"],
}
"""The fastest settings of ours in `gpu.md`, against which the roofline is checked."""

MILLISECONDS = {
    "h100-124m-s1024": (134.6, 122.5),
    "h100-1b-s2048": (523.5, 494.6),
    "h100-1b-s4096": (541.2, 517.6),
    "h100-8b-s8192": (921.2, 870.7),
}
"""Measured for a step of ours and of compiled `transformers`."""

NO_GRAPH, RIVAL, FORCED = "ours, --cuda-graph none", "transformers, compiled", "ours, forced balance"
SMALL_STATE = "ours, 12 bytes of state"
SAME_STATE = f"{RIVAL}, 18 bytes of state"
WIDE_STATES = {
    SAME_STATE: "main",
    "torchtitan, compiled, 16 bytes of state": "fp32",
}
"""Others with fp32 state, and how they keep it."""
IMPLEMENTATIONS = {
    "ours": "",
    NO_GRAPH: "--cuda-graph none",
    "ours, --kernels torch": "--cuda-graph none --kernels torch",
    "transformers, eager": None,
    RIVAL: None,
    FORCED: "--cuda-graph none --moe-router-force-load-balancing",
    "ours, busiest rank 1.5": "--cuda-graph none --moe-exchange-bound 1.5",
    "ours, busiest rank 2": "--cuda-graph none --moe-exchange-bound 2",
    "torchtitan, eager": None,
    "torchtitan, compiled": None,
    **dict.fromkeys(WIDE_STATES),
    SMALL_STATE: "--cuda-graph none --store-param-remainders --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
}
"""Names of rows, and flags of ours."""


def step_of(implementation: str, case: Case, layers: int, micro_batches: int) -> Callable[[], object]:
    """Build the training step of an implementation."""
    who, model, device = implementation.partition(",")[0], case.model(layers, micro_batches), torch.device("cuda", 0)
    compiled, weights = "compiled" in implementation, WIDE_STATES.get(implementation, "bf16")
    if who == "torchtitan":
        return titan_step(case.config(layers, micro_batches), micro_batches, compiled, weights == "fp32")
    if who == "transformers":
        return Theirs(case.micro_batch, weights, compiled).make(model, device)
    return Ours(case.micro_batch, f"{case.more} {IMPLEMENTATIONS[implementation]}", case.ranks).make(model, device)


def embedding_shapes() -> set[torch.Size]:
    """Return the shapes of the weights of all living embeddings."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and "Embedding" in type(m).__name__]
    return {m.weight.shape for m in modules if isinstance(getattr(m, "weight", None), Tensor)}


def measure(implementation: str, case: Case, layers: int, micro_batches: int) -> dict[str, Any]:
    """Return the counts and the host time of a step."""
    from tests.nullgpu.trace import record

    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    step = step_of(implementation, case, layers, micro_batches)
    for _ in range(2):
        step()
    traffic = Traffic(embedding_shapes())
    with record() as eager, traffic.counting():  # still eager where CUDA graphs are used
        step()
    for _ in range(3):
        step()
    milliseconds = []
    for _ in range(TIMED_STEPS):
        start = time.process_time()
        step()
        milliseconds.append(1e3 * (time.process_time() - start))
    with record() as trace:
        step()
    return {
        "launches": len(trace.launches()),
        "gemms": sum(traffic.matmuls.values()),
        "bytes": traffic.bytes,
        "host_ms": statistics.median(milliseconds),
        "syncs": len(trace.syncs()),
        "kernels": len(eager.launches()),
        "matmuls": [[*shape, count] for shape, count in sorted(traffic.matmuls.items())],
        "attention": [[*shape, count] for shape, count in sorted(traffic.attention.items())],
        "traffic": dict(traffic.by_op.most_common(8)),
    }


def applies(name: str, implementation: str) -> bool:
    """Return False for models that an implementation does not have, and for options that they do not need."""
    case, mixture = (CASES | MEASURED)[name], name in MIXTURES
    if "busiest" in implementation:
        return case.ranks > 1
    if implementation == FORCED:
        return name.startswith("qwen3")
    if implementation == SMALL_STATE:  # of larger models a step takes minutes
        return name == "qwen3-moe-s4096"
    if implementation in WIDE_STATES:
        return mixture
    return implementation.startswith("ours") or (
        case.ranks == 1 and (mixture or implementation.startswith("transformers") or name.startswith("llama"))
    )


def pretend_peers(ranks: int) -> None:
    """Make this process the first of several ranks; the null GPU's NCCL needs no others, objects are this rank's."""
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=ranks)
    comm.all_gather_objects = lambda value, group: [value] * group.size
    comm.gather_objects = comm.all_gather_objects
    comm.broadcast_object = lambda value, group: value


def row_of(name: str, implementation: str) -> dict[str, Any]:
    """Return the figures of a whole step, and of steps with one micro-batch at both depths."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention cannot run on the null GPU
    registry.check_kernel = lambda *_, **__: None  # zeros fail every check
    case = (CASES | MEASURED)[name]
    if case.ranks > 1:
        pretend_peers(case.ranks)
    row = {"whole": measure(implementation, case, case.layers, case.micro_batches)}
    for layers in DEPTHS if name in CASES else ():
        counts = measure(implementation, case, layers, 1)
        row[f"{layers} layers"] = {figure: counts[figure] for figure in FIGURES}
    return row


def commit() -> str:
    """Return the short hash of the checked-out commit."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def in_own_process(*arguments: str) -> dict[str, Any]:
    """Return the figures of one row, or why there are none; compiled code and memory end with the process."""
    command = [sys.executable, "-m", "benchmarks.launches", "--row", *arguments]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # workers do not end on the null GPU
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        return {"error": ended.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def per_layer(row: Mapping[str, Any], figure: str) -> float:
    """Return a figure of one layer and micro-batch, with the layer's share of the optimizer."""
    shallow, deep = (row[f"{layers} layers"][figure] for layers in DEPTHS)
    return float((deep - shallow) / (DEPTHS[1] - DEPTHS[0]))


def rest(row: Mapping[str, Any], figure: str) -> float:
    """Return a figure of what is not in layers, in a step of one micro-batch."""
    return float(row[f"{DEPTHS[0]} layers"][figure] - DEPTHS[0] * per_layer(row, figure))


def prediction(case: Case, counts: Mapping[str, Any], gpu: Gpu) -> dict[str, float]:
    """Return milliseconds and MFU of a step."""
    config = case.config(case.layers, case.micro_batches)
    flops = FlopsPerToken.from_config(config)
    tokens = case.micro_batch * case.micro_batches * config.training.seq_length
    seconds = step_seconds(counts, gpu)
    rate = tokens / seconds / PEAK_FLOPS
    return {
        "ms": 1e3 * seconds,
        "gpu_ms": 1e3 * gpu_seconds(counts, gpu),
        "mfu": rate * flops.full,
        "mfu_causal": rate * flops.causal,
    }


def table_of(name: str, rows: Mapping[str, Any]) -> list[str]:
    """Return the rows of a case as Markdown."""
    case = CASES[name]
    heads = ("", "launches a layer (GEMMs)", "MB a layer", "host ms a layer", "rest: launches, MB, host ms")
    heads += ("step: launches, syncs, host ms", "predicted GPU ms", "predicted MFU (causal)")
    found = list[list[str]]()
    for title, row in rows.items():
        if "error" in row:
            found.append([title, f"not measured: {row['error']}", *[""] * 6])
            continue
        whole, predicted = row["whole"], prediction(case, row["whole"], H200)
        cells = [
            title + (f", at {row['at']}" if "at" in row else ""),
            f"{per_layer(row, 'launches'):.1f} ({per_layer(row, 'gemms'):.0f})",
            f"{per_layer(row, 'bytes') / 1e6:,.0f}",
            f"{per_layer(row, 'host_ms'):.2f}",
            f"{rest(row, 'launches'):,.0f}, {rest(row, 'bytes') / 1e6:,.0f}, {rest(row, 'host_ms'):.1f}",
            f"{whole['launches']:,}, {whole['syncs']}, {whole['host_ms']:.1f}",
            f"{predicted['gpu_ms']:.1f}",
            f"{predicted['mfu']:.1%} ({predicted['mfu_causal']:.1%})",
        ]
        found.append(cells)
    title = f"## {name}: {case.layers} layers, {case.micro_batches} x {case.micro_batch} samples a step"
    return ["", title, *table(heads, found, "lrrrrrrr")]


def goals(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the goals beside what was reached."""

    def reached(text: str, met: bool) -> str:
        return f"* {text}: {'met' if met else 'not met'}"

    gpt2, llama = rows["gpt2-124m-mb32"], rows["llama3-8b-s8192"]
    launches = gpt2["ours"]["whole"]["launches"]
    layers = [per_layer(case[NO_GRAPH], "launches") for case in (gpt2, llama)]
    mfus = [
        prediction(CASES[name], rows[name]["ours"]["whole"], H200)["mfu"]
        for name in ("gpt2-124m-mb32", "llama3-8b-s8192")
    ]
    lines = [
        reached(f"124M, micro-batch 32, launches a step, at most 12: {launches}", launches <= 12),
        reached(f"124M, launches a layer without graphs, at most 30: {layers[0]:.1f}", layers[0] <= 30),
        reached(f"Llama-8B, launches a layer without graphs, at most 45: {layers[1]:.1f}", layers[1] <= 45),
        reached(f"124M, predicted MFU, at least 48%: {mfus[0]:.1%}", mfus[0] >= 0.48),
        reached(f"Llama-8B, predicted MFU, at least 62%: {mfus[1]:.1%}", mfus[1] >= 0.62),
    ]
    for name, case in rows.items():
        counts = case["ours"]["whole"]
        share = counts["host_ms"] / 1e3 / gpu_seconds(counts, H200)
        lines.append(reached(f"{name}, host time below half of the predicted GPU time: {share:.0%}", share < 0.5))
        ratio = step_seconds(case[RIVAL]["whole"], H200) / step_seconds(counts, H200)
        lines.append(
            reached(f"{name}, predicted to be faster than compiled `transformers`: {ratio:.2f} times", ratio > 1)
        )
    return lines


def equal_states(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return ours beside compiled `transformers` with the same state, for layers with experts."""
    lines = ["", "## Layers with experts, ours beside `transformers` with the same state", ""]
    for name, case in rows.items():
        if {NO_GRAPH, SAME_STATE} <= set(case):
            ours, theirs = case[NO_GRAPH], case[SAME_STATE]
            counts = (f"{per_layer(row, 'launches'):.1f} launches" for row in (ours, theirs))
            moved = (f"{per_layer(row, 'bytes') / 1e6:,.0f} MB" for row in (ours, theirs))
            ratio = step_seconds(theirs["whole"], H200) / step_seconds(ours["whole"], H200)
            beside = " / ".join(counts) + " a layer, " + " / ".join(moved)
            lines.append(f"* {name}: {beside}, predicted to be {ratio:.2f} times as fast")
    return lines


def checks(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what the roofline predicts for an H100 beside what was measured on one."""
    lines = ["", "## The roofline on an H100, beside measurements", ""]
    lines += ["One rate, that of large matrix products, was chosen to fit the rows of `transformers`."]
    compared = [
        (name, title, 1e3 * step_seconds(row["whole"], H100), ms)
        for name, rows in found.items()
        for (title, row), ms in zip(rows.items(), MILLISECONDS[name])
    ]
    heads = ("case", "", "predicted ms", "measured ms", "predicted / measured")
    shown = [[name, title, f"{ours:.1f}", f"{ms:.1f}", f"{ours / ms:.2f}"] for name, title, ours, ms in compared]
    return lines + table(heads, shown, "llrrr")


NOTES = f"""
Counted on the null GPU (`tests/nullgpu`), where PyTorch for CUDA runs on stand-ins that record every call.
Launches are kernels, matrix products, copies, memsets and graph launches. *A layer* is half the difference of steps
with {DEPTHS[1]} and {DEPTHS[0]} layers and one micro-batch: forward, backward and update. *Rest* is what else such a
step has: embedding, loss, optimizer.

*Host ms* is CPU time of the process, without the driver's own: median of {TIMED_STEPS} steps, on a busy machine.

*MB* (10^6 bytes) are outside matrix products and attention: the distinct inputs and outputs of every operation but
views, and the tensor arguments of Triton kernels. What is updated in place counts twice; of tables that are
read or written by index, only the chosen rows count. A separate step counts them, and the same calls are made in it.

All take the same number of tokens, in bf16, with fused AdamW and clipping. Attention is PyTorch's flash kernel, as
cuDNN's cannot run on the null GPU. State is the bytes of weights, gradients and moments per parameter: 18 of ours,
which has fp32 main parameters beside bf16 weights, and 8 of `transformers` and torchtitan, where all is bf16.
`12 bytes`: ours with `--store-param-remainders` and bf16 moments. `18 bytes`: `transformers` with fp32 main parameters,
gradients and moments beside bf16 weights, as ours: under autocast its experts are a loop that waits for each product.
`16 bytes`: torchtitan under autocast with fp32 of all, as it trains on one GPU.

torchtitan is its models, its loss and its way of compiling: dense blocks whole, others in parts. It has no Mixtral:
that is its Qwen3-MoE with these sizes. The update of expert biases is in ours only.

Tokens are spread evenly over experts, and no rank's transfers take time on a wire. Grouped products of Triton, the
weight gradients of experts, count as matrix products. Cases:

* qwen3-moe: the layer of Qwen3-30B-A3B with 64 experts; `ep4`: the first of 4 ranks, with 16 of them.
* deepseek-256-experts: latent attention, 256 experts, sigmoid scores, bias, groups and shared expert of DeepSeek-V3 at
  a hidden size of 2,048, experts of 512; `deepseek-v3-ep64`: its own sizes on the first of 64 ranks, with 4 experts.
* `forced balance`: with `--moe-router-force-load-balancing`. `busiest rank 1.5`: a rank that gets 1.5 times the mean of
  all ranks from every rank, for which the others wait.

**Predictions, not measurements** (`benchmarks/roofline.py`), for an H200: matrix products run at
{GEMM_RATES[0] / 1e12:.0f} to {GEMM_RATES[1] / 1e12:.0f} TFLOP/s by size, attention at cuDNN's published rates
(arXiv:2407.08608), and other bytes move at 4.0 TB/s. A launch adds {1e6 * GAP:.1f} us, {1e6 * GRAPH_GAP:.1f} us in a
graph. MFU is 6N + 12Lhs (causal: half the scores) over {PEAK_FLOPS / 1e12} TFLOP/s; the host counts where it is slower.
"""


OLDER = "95446ae"
"""Commit of rows that do not name theirs."""

UNDECIDED = """For an H100 the roofline was 2 to 4% more optimistic about ours than about `transformers` (above).
So ratios from 1.00 to 1.04 are undecided. With cuDNN's attention a Llama layer has two launches fewer: the sums of the
gradients of grouped keys and values."""


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    lines = ["# Launches, bytes and host time of a training step, and what they predict"]
    lines += [NOTES.rstrip()]
    for name in CASES:
        if name in result["rows"]:
            before = {
                f"{title}, at {result['before at']}": row for title, row in result["before"].get(name, {}).items()
            }
            lines += table_of(name, before | result["rows"][name])
    lines += equal_states(result["rows"])
    lines += checks(result["checks"])
    compared = {name: rows for name, rows in result["rows"].items() if {"ours", NO_GRAPH, RIVAL} <= set(rows)}
    if {"gpt2-124m-mb32", "llama3-8b-s8192"} <= set(compared):
        lines += ["", "## Goals", "", *goals(compared), "", UNDECIDED]
    versions_of = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    at = {row.get("at", OLDER): None for rows in result["rows"].values() for row in rows.values()}
    return "\n".join([*lines, "", f"{versions_of}; commits {', '.join(at)}."])


def main(argv: Sequence[str]) -> int:
    """Count, print, and write if asked to."""
    parser = options(__doc__, rounds=None)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--implementations", nargs="*", choices=IMPLEMENTATIONS, default=[*IMPLEMENTATIONS])
    text = "write rows of an earlier commit, a tree of which is in PYTHONPATH"
    parser.add_argument("--before", action="store_true", help=text)
    parser.add_argument("--row", nargs=2, metavar=("CASE", "IMPLEMENTATION"), help="print one row as JSON")
    args = parser.parse_args(argv)
    if "nullcuda" not in os.environ.get("LD_PRELOAD", ""):
        print("this needs the null GPU: source tests/nullgpu/setup.sh", file=sys.stderr)
        return 2
    if args.row:
        name, implementation = args.row
        print(json.dumps(row_of(name, implementation)))
        return 0
    kept = RESULTS / "launches.json"
    result: dict[str, Any] = {"before": {}, "rows": {}, "checks": {}, "before at": "-", "rows at": "-"}
    result |= json.loads(kept.read_text()) if kept.exists() else {}
    where = "before" if args.before else "rows"
    result[f"{where} at"] = commit()
    installed = [name for name in ("torch", "triton", "transformers", "torchtitan") if importlib.util.find_spec(name)]
    result["versions"] = versions(*installed)
    pairs = [(where, name, i) for name in args.cases for i in args.implementations if applies(name, i)]
    pairs += [("checks", name, i) for name in MEASURED for i in ("ours", RIVAL) if args.before]
    for part, name, implementation in pairs:
        row = in_own_process(name, implementation) | {"at": commit()}
        print(f"{name} {implementation}: {row.get('error', 'counted')}", flush=True)
        result[part].setdefault(name, {})[implementation] = row
        if args.write:
            keep("launches", result, page(result))
    print(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
