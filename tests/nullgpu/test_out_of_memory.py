"""A run that is out of GPU memory, on the null GPU: the report against PyTorch's own counters, and what it proposes.

PyTorch's allocator stops at a share of the memory (``per_process_memory_fraction``), as it does at the end of a GPU.
``python -m tests.nullgpu.test_out_of_memory FLAGS`` is the run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from megatron.arguments.cli import parse
from megatron.planner.activations import peak_activations
from megatron.planner.memory import STATE_KINDS, max_peak_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("nullcuda" not in os.environ.get("LD_PRELOAD", ""), reason="needs the null GPU"),
]

RUN = (
    "--preset llama3-8b --vocab-size 32000 --seq-length 4096 --num-layers 4 --micro-batch-size 4 --global-batch-size 8 "
    "--mock-data --bf16 --train-iters 2 --eval-iters 0 --device cuda --cuda-graph none --plan-gpu h100-80g"
)
GPU_BYTES = 150_754_820_096
"""Of the null GPU."""


def run(flags: str, allowed: float) -> tuple[int, str]:
    """Start a run that may allocate so many bytes; return its status and output."""
    options = f"expandable_segments:True,per_process_memory_fraction:{allowed / GPU_BYTES}"
    variables = {"PYTORCH_ALLOC_CONF": options, "NULLCUDA_DEVICES": "1"}
    command = [sys.executable, "-m", "tests.nullgpu.test_out_of_memory", *flags.split()]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def gibibytes(text: str, pattern: str) -> list[float]:
    """Return the numbers of the first match in GiB."""
    found = re.search(pattern, text, flags=re.MULTILINE)
    assert found is not None, text
    sizes = zip(found.groups()[::2], found.groups()[1::2])
    return [float(number) * {"bytes": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1}[unit] for number, unit in sizes]


SIZE = r"([\d.]+) (\w+)"


def test_the_report_agrees_with_the_allocator_and_its_proposals_fit() -> None:
    config = parse(RUN.split(), {}).config
    parts = max_peak_bytes(config, 1)
    allowed = 0.9 * sum(parts.values())
    status, output = run(RUN, allowed)
    assert status == 1
    (allocated,) = gibibytes(output, f"Of the allocated memory {SIZE} is allocated by PyTorch")
    error, report = output.split("memory of rank 0 on cuda:0, which has ")
    assert "torch.OutOfMemoryError: CUDA out of memory" in error
    assert gibibytes(report, rf"\A{SIZE}:") == pytest.approx([allowed / 2**30], abs=0.01)
    actual = 0.0
    for part in (*STATE_KINDS, "kept for backward", "other tensors"):
        if parts.get(part, 1):
            predicted, found = gibibytes(report, rf"^  {part}  +{SIZE}  +{SIZE}$")
            actual += found
            if part in STATE_KINDS and part != "buffers":
                assert predicted == found == pytest.approx(parts[part] / 2**30, abs=0.01), part
    assert actual == pytest.approx(allocated, abs=0.02)
    assert gibibytes(report, rf"^  kept for backward  +{SIZE}")[0] == pytest.approx(
        peak_activations(config, 1)[0]["activations"] / 2**30, abs=0.01
    )
    assert re.search(r"could not be allocated in layers\.\d\.(mlp|self_attention)", report)
    proposed = re.findall(r"^  (--\S.*?)  \(saves .* s a step .*\)$", report, flags=re.MULTILINE)
    assert len(proposed) >= 2
    for flags in proposed:
        if "offload" not in flags:  # which takes memory of the host
            assert run(f"{RUN} {flags}", allowed)[0] == 0, flags


def main(argv: list[str]) -> int:
    """Train; numbers are zeros, so kernels are not checked, and cuDNN's are built by the driver."""
    from unittest.mock import patch

    import torch

    import pretrain_gpt

    torch.backends.cuda.enable_cudnn_sdp(False)
    with patch("megatron.kernels.registry.check_kernel", lambda *arguments, **options: None):
        return pretrain_gpt.main(argv)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # without waiting for compilers and communicators
