"""Compare the peak of PyTorch's allocator in a training step with the planner's, on the null GPU.

Every case runs in new processes, because what others leave behind would count: ``python -m tests.nullgpu.test_memory
FLAGS`` is one rank of it. CUDA graphs are off: their private pools keep what a replay needs beside the rest.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("nullcuda" not in os.environ.get("LD_PRELOAD", ""), reason="needs the null GPU"),
]

GPT2 = "--preset gpt2-124m --seq-length 1024"
LLAMA = "--preset llama3-8b --seq-length 8192 --num-layers 4 --micro-batch-size 1 --global-batch-size 2"
VOCABULARY = "--num-layers 2 --vocab-size 128256"
LONG = f"{LLAMA} --seq-length 32768 --max-position-embeddings 32768 --global-batch-size 1"
CP2 = f"{LONG} --context-parallel-size 2 --mlp-chunk-size 2048"
CP4 = f"{CP2} --seq-length 65536 --max-position-embeddings 65536 --num-layers 2 --context-parallel-size 4"
SMALL = (
    "--vocab-size 32000 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 4 "
    "--seq-length 2048 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 "
    "--global-batch-size 16"
)
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
PP = f"{SMALL} --pipeline-model-parallel-size 2"
COMMON = "--mock-data --bf16 --train-iters 9 --eval-iters 0 --clip-grad 1 --device cuda --cuda-graph none"
CASES = {
    "GPT-2 124M, micro-batch 8": (1, f"{GPT2} --micro-batch-size 8 --global-batch-size 8"),
    "GPT-2 124M, micro-batch 32": (1, f"{GPT2} --micro-batch-size 32 --global-batch-size 32"),
    "Llama-3 8B, 4 layers": (1, LLAMA),
    "selective recomputation": (1, f"{LLAMA} --recompute-granularity selective"),
    "full recomputation": (1, f"{LLAMA} --recompute-granularity full"),
    "activation offload": (1, f"{LLAMA} --vocab-size 128256 --cpu-offloading-num-layers 4"),
    "activation offload of 2 layers": (1, f"{LLAMA} --vocab-size 128256 --cpu-offloading-num-layers 2"),
    "eager": (1, f"{LLAMA} --kernels torch"),
    "long": (1, LONG),
    "long, MLP in chunks": (1, f"{LONG} --mlp-chunk-size 4096"),
    "CP 2": (2, CP2),
    "CP 2, all_gather": (2, f"{CP2} --cp-comm-type all_gather"),
    "CP 2, a2a": (2, f"{CP2} --cp-comm-type a2a"),
    "CP 4": (4, f"{CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    "TP 2": (2, f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel"),
    "TP 2, remainders": (2, f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel --store-param-remainders"),
    "ZeRO-1": (2, f"{SMALL} --use-distributed-optimizer"),
    "ZeRO-3": (2, f"{SMALL} {ZERO3}"),
    "ZeRO-3, kept": (2, f"{SMALL} {ZERO3} --no-reshard-after-forward"),
    "ZeRO-3, prefetch 2": (2, f"{SMALL} {ZERO3} --param-gather-prefetch 2"),
    "ZeRO-3, full recomputation": (2, f"{SMALL} {ZERO3} --recompute-granularity full --recompute-num-layers 2"),
    "ZeRO-3, 1 micro-batch, large vocabulary": (2, f"{LLAMA} {VOCABULARY} {ZERO3}"),
    "ZeRO-3, 2 micro-batches, large vocabulary": (2, f"{LLAMA} {VOCABULARY} {ZERO3} --global-batch-size 4"),
    "ZeRO-3, FP8": (2, f"{SMALL} {ZERO3} --fp8-format hybrid"),
    "PP 2": (2, PP),
    "PP 2, interleaved": (2, f"{PP} --num-virtual-stages-per-pipeline-rank 2"),
    "PP 2, zb-h1": (2, f"{PP} --pipeline-schedule zb-h1"),
}


@pytest.mark.parametrize("name", CASES)
def test_peak(name: str, record_property: Callable[[str, object], None]) -> None:
    ranks, flags = CASES[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"NULLCUDA_DEVICES": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "tests.nullgpu.test_memory", *flags.split()]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = [process.communicate(timeout=600)[0].split() for process in processes]
    for column, values in zip(("peak", "forecast"), zip(*found)):
        record_property(column, ", ".join(f"{int(value) / 2**30:.2f}" for value in values))
    record_property("ranks", ranks)
    for peak, predicted in found:
        assert int(predicted) == pytest.approx(int(peak), rel=0.05)


def measure(argv: list[str]) -> tuple[int, int]:
    """Return the allocator's peak in the third step of this rank, and the planner's."""
    from unittest.mock import patch

    import torch
    import torch.distributed as dist

    from megatron.arguments.cli import parse
    from megatron.distributed.layout import Layout
    from megatron.optimizer.lr_scheduler import Rates
    from megatron.planner.activations import peak_activations
    from megatron.planner.memory import max_peak_bytes, rank_state_bytes
    from megatron.training.build import build_trainer
    from megatron.training.step import train_step

    config = parse([*argv, *COMMON.split()], os.environ).config
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its kernels are built by the driver
    if ranks > 1:
        dist.init_process_group("cuda:nccl,cpu:gloo")
    with patch("megatron.kernels.registry.check_kernel", lambda *arguments, **options: None):  # numbers are zeros
        trainer = build_trainer(config, rank, ranks, fresh=False)
    trainer.start_at(0, 0)
    batches = trainer.next_batches()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        train_step(trainer, batches, Rates(1e-3, 0.1))
        torch.cuda.synchronize()
    layout = Layout.from_config(config.parallel, ranks)
    activations = peak_activations(config, layout.sizes["dp"])[layout.coordinate(rank)["pp"]]
    parts = max_peak_bytes(config, ranks)
    during = [parts[kind] for kind in ("gathered weights", "reduction", "FP8 weights")]
    predicted = sum((*rank_state_bytes(config, ranks, rank).values(), *activations.values(), *during))
    peak = torch.cuda.max_memory_allocated()
    if ranks > 1:
        dist.barrier(dist.new_group(backend="gloo"))  # the first rank keeps the store
    return peak, predicted


if __name__ == "__main__":
    print(*measure(sys.argv[1:]), flush=True)
    os._exit(0)  # without waiting for compilers and communicators
