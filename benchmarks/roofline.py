"""Predict the time of a training step from its matrix products, attention calls, bytes and launches.

A step takes as long as the GPU or the host, whichever is slower. GPU time is a sum:

* A matrix product takes the time of its arithmetic or of its bytes, whichever is longer.
* Attention takes the time of its arithmetic, without masked scores.
* Every other operation takes the time of its bytes.
* Every launch adds a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEAK_FLOPS = 989.4e12
"""Dense bf16 peak of H100 SXM and H200."""

GEMM_SIZES = 3e10, 5e11
GEMM_RATES = 650e12, 720e12
"""FLOPs of a small and a large matrix product in bf16, and the assumed FLOP/s at these sizes; logarithmic between.
Alone, large products reach 790 TFLOP/s; 720 makes predictions for `transformers` agree with measurements."""

FP32_RATE = 50e12
"""Assumed FLOP/s of matrix products in fp32, without TF32."""

GAP, GRAPH_GAP = 2.5e-6, 1.2e-6
"""Assumed seconds between two kernels, launched by the host or replayed by a CUDA graph."""

LENGTHS = 1024, 2048, 4096, 8192
FORWARD = {64: (373e12, 395e12, 408e12, 412e12), 128: (574e12, 617e12, 609e12, 600e12)}
BACKWARD = {64: (348e12, 395e12, 417e12, 432e12), 128: (408e12, 465e12, 499e12, 518e12)}
CAUSAL = 410 / 574, 484 / 617, 518 / 609, 529 / 600
"""FLOP/s of cuDNN's attention on an H100 by head dimension and length, without a mask (arXiv:2407.08608, figures 5, 6),
and with a causal mask relative to that (head dimension 128, forward)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU; ``bandwidth`` is what kernels reach, in bytes per second, 83% of the data sheet."""

    name: str
    bandwidth: float


H200, H100 = Gpu("H200", 4.0e12), Gpu("H100", 3.35e12 * 4.0 / 4.8)


def gemm_seconds(flops: int, num_bytes: int, dtype: str, gpu: Gpu) -> float:
    """Return the time of a matrix product."""
    (small, large), (slow, fast) = GEMM_SIZES, GEMM_RATES
    share = min(1.0, max(0.0, math.log(flops / small) / math.log(large / small)))
    rate = FP32_RATE if dtype == "float32" else slow + share * (fast - slow)
    return max(flops / rate, num_bytes / gpu.bandwidth)


def attention_seconds(direction: str, rows: int, length: int, width: int) -> float:
    """Return the time of a causal attention call over ``rows`` heads; backward repeats one of the forward products."""
    at = min(range(len(LENGTHS)), key=lambda i: abs(LENGTHS[i] - length))
    rate = (FORWARD if direction == "forward" else BACKWARD)[64 if width <= 64 else 128][at] * CAUSAL[at]
    return (2 if direction == "forward" else 5) * rows * length**2 * width / rate


def gpu_seconds(counts: Mapping[str, Any], gpu: Gpu) -> float:
    """Return the predicted GPU time of a step."""
    seconds = sum(n * gemm_seconds(flops, moved, dtype, gpu) for flops, moved, dtype, n in counts["matmuls"])
    seconds += sum(n * attention_seconds(*shape) for *shape, n in counts["attention"])
    graphed = counts["launches"] < counts["kernels"]
    return float(seconds + counts["bytes"] / gpu.bandwidth + counts["kernels"] * (GRAPH_GAP if graphed else GAP))


def step_seconds(counts: Mapping[str, Any], gpu: Gpu) -> float:
    """Return the predicted time of a step."""
    return max(gpu_seconds(counts, gpu), counts["host_ms"] / 1e3)
