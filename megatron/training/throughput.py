"""Speed of a run: model FLOP/s per log interval, and goodput over all starts of the run."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.batch import final_consumed_samples, final_iteration
from megatron.config.run import RunConfig
from megatron.planner.flops import FlopsPerToken
from megatron.training.loggers.base import Metrics

# Dense peak of bf16 and fp16 with fp32 accumulation in FLOP/s, from the vendors' data sheets (figures "with sparsity"
# halved), by words in the device name that the driver reports. The first matching row is used. Products that share a
# name are left out, because no MFU is better than a wrong one. A rank on an MI250X has half of the product.
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("GH200", 989.4e12),
    ("H100 80GB HBM3", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("MI300X", 1307.4e12),
    ("MI250X", 191.5e12),
)


def peak_flops(device_name: str, params_dtype: str) -> float | None:
    """Return the dense peak of one device in FLOP/s, or None for unknown devices, device slices and other dtypes.

    A name with a slash is ambiguous: AMD's driver reports ``MI250X / MI250`` for both products.
    """
    if params_dtype not in ("bf16", "fp16") or re.search(r"\bMIG\b|/", device_name):
        return None
    return next((peak for words, peak in PEAK_FLOPS if re.search(rf"\b{words}\b", device_name)), None)


@dataclass(frozen=True)
class ThroughputModel:
    """Converts tokens per second into FLOP/s, utilisation and remaining time."""

    total_iterations: int  # of the whole run
    total_samples: int  # of the whole run
    seq_length: int  # tokens per sample
    world_size: int
    flops: FlopsPerToken
    peak_flops: float | None  # of one device in FLOP/s, if known
    on_gpu: bool

    @classmethod
    def from_config(
        cls, config: RunConfig, world_size: int, device_name: str, iteration: int = 0, consumed_samples: int = 0
    ) -> ThroughputModel:
        """Create the model of a run.

        Args:
            config: resolved configuration.
            world_size: number of ranks.
            device_name: product name, or ``cpu``.
            iteration: steps taken before this start.
            consumed_samples: samples used in these steps.

        """
        data_parallel_size = world_size // config.parallel.model_ranks
        return cls(
            total_iterations=final_iteration(config.training, data_parallel_size, iteration, consumed_samples),
            total_samples=final_consumed_samples(config.training, data_parallel_size, iteration, consumed_samples),
            seq_length=config.training.seq_length,
            world_size=world_size,
            flops=FlopsPerToken.from_config(config),
            peak_flops=peak_flops(device_name, config.precision.params_dtype),
            on_gpu=device_name != "cpu",
        )

    def metrics(self, metrics: Metrics) -> dict[str, float | None]:
        """Return throughput and utilisation of a log line. Utilisations are 0 to 1, or None for an unknown peak.

        ``throughput`` is TFLOP/s per rank as Megatron-LM counts it. ``mfu`` counts all attention scores
        (6N + 12Lhs), ``mfu-causal`` only the unmasked ones, and ``hfu`` adds recomputation to ``mfu``.
        """
        tokens_per_second = metrics["tokens-per-second"] / self.world_size
        counts = {"mfu": self.flops.full, "mfu-causal": self.flops.causal, "hfu": self.flops.hardware}
        peak = self.peak_flops
        return {
            "throughput": tokens_per_second * self.flops.megatron / 1e12,
            **{name: None if peak is None else tokens_per_second * x / peak for name, x in counts.items()},
        }

    def seconds_left(self, metrics: Metrics) -> float:
        """Return the time that the remaining samples take at the speed of a log line."""
        samples_left = max(0, self.total_samples - metrics["consumed-samples"])
        return float(samples_left * self.seq_length / metrics["tokens-per-second"])


class Goodput:
    """Productive seconds of a run, divided by all seconds since its first start.

    Steps lost in a crash do not count, because this state is restored from the checkpoint; nor does the time of
    starting, loading, evaluating, saving, and between two starts. Waiting for data or for other ranks within a step
    does count.
    """

    def __init__(self, started: float | None = None) -> None:
        """Start counting for a new run.

        Args:
            started: start of the process on the clock of ``time.monotonic()``; None for now.

        """
        elapsed = 0.0 if started is None else time.monotonic() - started
        self.first_start = time.time() - elapsed  # seconds since 1970
        self.productive_seconds = 0.0
        self.starts = 1  # of the run, this one included

    def add(self, seconds: float) -> None:
        """Add ``seconds`` of training steps."""
        self.productive_seconds += seconds

    def run_seconds(self) -> float:
        """Return the seconds since the run's first start."""
        return time.time() - self.first_start

    def value(self) -> float | None:
        """Return the goodput, 0 to 1; None if the machine's clock was set back so far that it would exceed 1."""
        passed = self.run_seconds()
        return self.productive_seconds / passed if passed > 0 and self.productive_seconds <= passed else None

    def state_dict(self) -> dict[str, float | int]:
        """Return the values to save in a checkpoint."""
        return {
            "first_start": self.first_start,
            "productive_seconds": self.productive_seconds,
            "starts": self.starts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that saved ``state``, and count this start."""
        self.first_start = float(state["first_start"])
        self.productive_seconds = float(state["productive_seconds"])
        self.starts = int(state["starts"]) + 1
