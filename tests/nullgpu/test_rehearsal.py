"""Rehearse runs on the null GPU: ``bash tests/nullgpu/run.sh``.

Each case is a run of ``pretrain_gpt.py`` with 1 to 4 ranks. Its traces are checked; numbers are not.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit.pool import Pool, RankError
from tests.nullgpu import checks
from tests.nullgpu.rehearse import rehearse
from tests.nullgpu.trace import Trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("nullcuda" not in os.environ.get("LD_PRELOAD", ""), reason="run bash tests/nullgpu/run.sh"),
]

MODEL = (
    "--mock-data --vocab-size 1000 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --device cuda --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 "
    "--clip-grad 1 --train-iters 8 --eval-iters 0 --log-interval 3 --hidden-dropout 0 --attention-dropout 0 "
    "--distributed-timeout-minutes 10 --cuda-graph none"
)
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --activation swiglu --no-add-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights"
)


@dataclass(frozen=True)
class Case:
    """A run, and what is allowed in its steps."""

    ranks: int
    flags: str
    # Host waits per step.
    waits: int = 0
    # Streams beside the compute streams that run kernels.
    streams: int = 0
    # Part of the collectives on their own streams that computation must hide.
    hidden: float = 0.0
    # By direction (D2H, H2D), the part of the copies on side streams that computation must hide.
    copied: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "bf16"
    # The host does not wait between steps either, without log lines.
    between: bool = False


MOE = f"{LLAMA} --num-experts 4 --moe-router-topk 2"
EP = "--moe-exchange bounded --expert-model-parallel-size 4"
FP8 = "--fp8-format hybrid --ffn-hidden-size 256"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
FURTHER = "--mtp-num-layers 2"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce"

CP = "--context-parallel-size"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
PATTERNS = "--attention-pattern local:32+first:2,chunked:48,dilated:8:3,prefix:16"

OFFLOAD = "--min-offloaded-tensor-size 1000 --cpu-offloading-num-layers"

CASES = {
    "gpt": Case(1, ""),
    "llama": Case(1, LLAMA, between=True),
    "graph by choice": Case(1, f"{LLAMA} --cuda-graph auto", between=True),
    "graph by choice, ZeRO-1": Case(2, f"{LLAMA} --use-distributed-optimizer --cuda-graph auto", between=True),
    "graph of the step": Case(1, f"{LLAMA} --cuda-graph step"),
    "graph of the optimizer": Case(1, f"{LLAMA} --cuda-graph optimizer"),
    "deterministic": Case(1, f"{LLAMA} --deterministic --hidden-dropout 0.1"),
    "health and profiler": Case(
        1,
        f"{LLAMA} --run-dir {{folder}}/run --log-health-interval 2 --profile --profile-step-start 2 "
        "--profile-step-end 4",
    ),
    "async save": Case(1, f"{LLAMA} --save {{folder}}/checkpoints --save-interval 2 --async-save"),
    "muon": Case(1, f"{LLAMA} --optimizer muon"),
    "lion": Case(1, f"{LLAMA} --optimizer lion"),
    "sgd": Case(1, f"{LLAMA} --optimizer sgd"),
    "low-precision moments": Case(1, f"{LLAMA} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --store-param-remainders"),
    # the host waits once, for the gradients and the clip factor
    "optimizer offload": Case(
        1,
        f"{LLAMA} --optimizer-cpu-offload --ema-decay 0.9 --ddp-bucket-size 50000",
        waits=1,
        copied={"D2H": 0.5},
    ),
    "optimizer offload, part, lion": Case(
        2, f"{LLAMA} {ZERO1} --optimizer lion --optimizer-cpu-offload --optimizer-offload-fraction 0.5", waits=1
    ),
    "weights on the host": Case(
        2,
        f"{LLAMA} --data-parallel-sharding-strategy optim_grads_params --param-cpu-offload --optimizer-cpu-offload",
        waits=1,
        copied={"H2D": 0.5},
    ),
    "activation offload": Case(1, f"{LLAMA} {OFFLOAD} 3", copied={"D2H": 0.9, "H2D": 0.9}, between=True),
    "activation offload, all, recomputation": Case(1, f"{LLAMA} {OFFLOAD} 4 --recompute-granularity full"),
    "activation offload, pipeline zb-h1": Case(
        2, f"{LLAMA} {OFFLOAD} 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"
    ),
    "average": Case(1, f"{LLAMA} --ema-decay 0.99 --eval-iters 2 --eval-interval 3"),
    "documents": Case(1, f"{LLAMA} {DOCUMENTS}"),
    "window": Case(1, f"{LLAMA} --window-size 32"),
    "fp16": Case(1, LLAMA, dtype="fp16"),
    "FP8 tensorwise": Case(1, f"{LLAMA} {FP8}"),
    "FP8 tensorwise, graph": Case(1, f"{LLAMA} {FP8} --cuda-graph step"),
    "FP8 rowwise, tensor-parallel": Case(2, f"{LLAMA} {FP8} --fp8-recipe rowwise {TP}"),
    "FP8 blockwise": Case(1, f"{LLAMA} --fp8-format e4m3 --fp8-recipe blockwise --ffn-hidden-size 256"),
    "recomputation": Case(1, f"{LLAMA} --recompute-granularity full"),
    "experts": Case(1, MOE, between=True),
    "experts, graph": Case(1, f"{MOE} --cuda-graph step"),
    "experts in FP8": Case(1, f"{MOE} {FP8} --cuda-graph step"),
    "experts in parallel": Case(4, f"{MOE} {EP} {ZERO1}", between=True),
    "experts in parallel, graph": Case(4, f"{MOE} {EP} --use-distributed-optimizer --cuda-graph step"),
    "experts in parallel, exact": Case(4, f"{MOE} {EP} {ZERO1} --moe-exchange exact", waits=64),
    "experts in parallel, halves": Case(4, f"{MOE} {EP} --overlap-moe-expert-parallel-comm", hidden=1.0),
    "experts in parallel, shared": Case(
        4, f"{MOE} {EP} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", hidden=1.0
    ),
    "further tokens": Case(1, f"{LLAMA} {FURTHER}", between=True),
    "further tokens, graph": Case(1, f"{LLAMA} {FURTHER} --cuda-graph step"),
    "further tokens, experts, graph": Case(
        2, f"{MOE} {FURTHER} --mtp-use-repeated-layer --mtp-detach-heads --use-distributed-optimizer --cuda-graph step"
    ),
    "data-parallel": Case(2, f"{LLAMA} --overlap-grad-reduce", hidden=0.5, between=True),
    "ZeRO-1": Case(2, f"{LLAMA} {ZERO1}", hidden=0.5),
    "ZeRO-2": Case(2, f"{LLAMA} {ZERO1} --data-parallel-sharding-strategy optim_grads", hidden=0.5),
    "optimizer instances": Case(4, f"{LLAMA} {ZERO1} --num-distributed-optimizer-instances 2"),
    # all but the gather of the embedding, with which a micro-batch begins
    "ZeRO-3": Case(2, f"{LLAMA} {ZERO3}", hidden=0.95, between=True),
    "ZeRO-3, kept": Case(2, f"{LLAMA} {ZERO3} --no-reshard-after-forward", hidden=0.95),
    "ZeRO-3, prefetch 2": Case(4, f"{LLAMA} {ZERO3} --param-gather-prefetch 2", hidden=0.95),
    "ZeRO-3, recomputation": Case(2, f"{LLAMA} {ZERO3} --recompute-granularity full --recompute-num-layers 2"),
    "ZeRO-3, instances": Case(4, f"{LLAMA} {ZERO3} --num-distributed-optimizer-instances 2"),
    "ZeRO-3, muon": Case(2, f"{LLAMA} {ZERO3} --optimizer muon"),
    "ZeRO-3, FP8": Case(2, f"{LLAMA} {ZERO3} {FP8}"),
    "ZeRO-3, graph of the optimizer": Case(2, f"{LLAMA} {ZERO3} --cuda-graph optimizer"),
    "ZeRO-3, tensor-parallel": Case(4, f"{LLAMA} {ZERO3} {TP}"),
    "ZeRO-3, experts": Case(4, f"{MOE} {EP} {ZERO3}"),
    "ZeRO-3, pipeline": Case(4, f"{LLAMA} {ZERO3} --pipeline-model-parallel-size 2 --reshard-after-forward"),
    "graph over data-parallel": Case(2, f"{LLAMA} --cuda-graph step"),
    "tensor-parallel": Case(2, f"{LLAMA} {TP}"),
    "overlap by parts": Case(2, f"{LLAMA} {TP} --tp-comm-overlap --tp-comm-overlap-method pipelined", hidden=0.5),
    "overlap by symmetric memory": Case(2, f"{LLAMA} {TP} --tp-comm-overlap", streams=1),
    "graph over tensor-parallel": Case(2, f"{LLAMA} {TP} --cuda-graph step"),
    **{
        f"pipeline {schedule}": Case(
            2, f"{LLAMA} --pipeline-model-parallel-size 2 --pipeline-schedule {schedule} {more}"
        )
        for schedule, more in {
            "1f1b": "",
            "interleaved": "--num-layers-per-virtual-pipeline-stage 1",
            "zb-h1": "",
            "zb-v": "",
            "dualpipe-v": "",
        }.items()
    },
    "patterns": Case(1, f"{LLAMA} {PATTERNS}", between=True),
    "patterns, documents": Case(1, f"{LLAMA} {PATTERNS} {DOCUMENTS}"),
    "patterns, torch": Case(1, f"{LLAMA} {PATTERNS} {DOCUMENTS} --kernels auto attention=torch"),
    # all exchanges of a layer but one: the last gradients return after the last tile
    "cp p2p": Case(2, f"{LLAMA} {CP} 2", hidden=2 / 3, between=True),
    "cp p2p, 4 ranks": Case(4, f"{LLAMA} {CP} 4", hidden=0.85),
    "cp p2p, documents": Case(4, f"{LLAMA} {CP} 4 {DOCUMENTS}", hidden=0.85),
    "cp p2p, window": Case(4, f"{LLAMA} {CP} 4 --window-size 12"),
    "cp p2p, patterns": Case(2, f"{LLAMA} {CP} 2 {PATTERNS} {DOCUMENTS}"),
    "cp all_gather": Case(2, f"{LLAMA} {CP} 2 --cp-comm-type all_gather"),
    "cp a2a": Case(2, f"{LLAMA} {CP} 2 --cp-comm-type a2a"),
    "cp a2a, patterns": Case(2, f"{LLAMA} {CP} 2 --cp-comm-type a2a {PATTERNS}"),
    "cp a2a+p2p": Case(4, f"{LLAMA} {CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    "cp p2p, tensor-parallel": Case(4, f"{LLAMA} {CP} 2 {TP}"),
    "cp p2p, pipeline zb-v": Case(4, f"{LLAMA} {CP} 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "cp p2p, ZeRO-2": Case(4, f"{LLAMA} {CP} 2 {ZERO1} --data-parallel-sharding-strategy optim_grads"),
    "cp p2p, graph of the optimizer": Case(2, f"{LLAMA} {CP} 2 --cuda-graph optimizer"),
    "everything": Case(4, f"{LLAMA} {TP} --pipeline-model-parallel-size 2 {ZERO1}"),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    os.environ["NULLCUDA_DEVICES"] = "4"
    with Pool(max_workers=4) as pool:
        yield pool


def run(ranks: Pool, case: Case, folder: Path, fault: str | None = None, program: str = "pretrain_gpt") -> list[Trace]:
    """Run a case and return the traces of its ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = shlex.split(case.flags)
    if program == "pretrain_gpt":
        argv = [*MODEL.split(), f"--{case.dtype}", *argv]
    arguments = str(folder), port, program, argv, fault
    ranks.run(case.ranks, rehearse, *arguments, timeout=600.0, backend="gloo")
    return [Trace.load(folder / f"rank{rank}.trace") for rank in range(case.ranks)]


def problems(case: Case, traces: list[Trace], warm_up: int = 5) -> list[str]:
    """Return all that is wrong in the traces of a run."""
    found = [*checks.differing_collectives(traces), *checks.deadlocks(traces)]
    for rank, trace in enumerate(traces):
        steps, batches = checks.regions(trace, "step"), checks.regions(trace, "batch")
        steady = steps[warm_up:]
        mine = [problem for step in steady for problem in checks.host_waits(step, case.waits)]
        if case.between:
            mine += [f"between steps: {problem}" for problem in checks.host_waits(checks.regions(trace, "pause")[6])]
        if not case.waits:
            mine += [problem for part in (*steady, *batches[1:]) for problem in checks.pageable_copies(part)]
        mine += checks.stray_kernels(trace, case.streams)
        mine += checks.capture_leaks(trace)
        mine += checks.unordered_collectives(trace)
        mine += checks.late_modules(steps, warm_up)
        hidden = [launches for _, launches in checks.hidden_work(steps[-1])]
        if sum(map(bool, hidden)) < case.hidden * len(hidden) or (case.hidden and not hidden):
            mine.append(f"{sum(map(bool, hidden))} of {len(hidden)} collectives are hidden behind computation")
        copies = checks.hidden_copies(steps[-1]) if case.copied else {}
        for direction, part in case.copied.items():
            some, total = copies.get(direction, (0, 0))
            if total == 0 or some < part * total:
                mine.append(f"{direction}: {some} of {total} copies are hidden behind computation")
        found += [f"rank {rank}: {problem}" for problem in mine]
    return found


FAULTS = {
    "item": (1, "sync streamSynchronize"),
    "pageable_copy": (1, "H2D async pageable"),
    "tensor_on_cpu": (1, "Expected all tensors to be on the same device"),
    "kernel_on_side_stream": (1, "kernel .* on stream 0x"),
    "collective_on_side_stream": (2, "allReduce .* begins after"),
    "crossed_communicators": (2, "rank 1 waits in allReduce"),
    "missing_collective": (2, "ranks 0 and 1 differ"),
    "late_compilation": (1, "loadModule in step 7"),
}
"""Number of ranks that show a fault, and what is reported."""


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(ranks: Pool, tmp_path: Path, fault: str) -> None:
    count, expected = FAULTS[fault]
    case = Case(count, f"{LLAMA} {ZERO1}" if count > 1 else LLAMA)
    try:
        found = problems(case, run(ranks, case, tmp_path, fault))
    except RankError as error:
        found = [str(error)]
    assert any(re.search(expected, problem) for problem in found), found


@pytest.mark.parametrize("name", CASES)
def test_case(ranks: Pool, tmp_path: Path, record_property: Callable[[str, object], None], name: str) -> None:
    case = CASES[name]
    traces = run(ranks, case, tmp_path)
    step = checks.regions(traces[0], "step")[-1]
    counts = {
        "ranks": case.ranks,
        "launches": len(step.launches()),
        "gemms": len(step.gemms()),
        "collectives": len(step.collectives()),
        "waits": len(step.syncs()),
        "one queue": "-" if case.ranks == 1 else "stuck" if checks.deadlocks(traces, one_queue=True) else "ok",
    }
    for key, value in counts.items():
        record_property(key, value)
    assert problems(case, traces) == []


@pytest.mark.parametrize("count", [1, 2])
def test_generation(ranks: Pool, tmp_path: Path, count: int) -> None:
    run(ranks, Case(1, f"{LLAMA} --save {tmp_path}/checkpoints --train-iters 1"), tmp_path)
    flags = f'--load {tmp_path}/checkpoints --device cuda --greedy --max-new-tokens 4 --prompt "1 2 3"'
    traces = run(ranks, Case(count, flags), tmp_path, program="tools.generate")
    assert traces[0].gemms()
    found = [checks.stray_kernels(trace) + checks.unordered_collectives(trace) for trace in traces]
    assert [*checks.differing_collectives(traces), *checks.deadlocks(traces), *found] == [[]] * count
