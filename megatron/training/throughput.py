"""What share of the hardware's peak a run reaches, and when it will be done."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.batch import total_steps, trained_samples
from megatron.config.flops import FlopsPerToken
from megatron.config.run import RunConfig
from megatron.training.records import TrainRecord

# Dense peak of bf16 and fp16 with fp32 accumulation in FLOP/s, from the makers' data sheets (their figures "with
# sparsity" halved), by words of the name the driver reports; the first row that matches counts. Products that the
# name does not tell apart are left out: no MFU is better than a wrong one. A rank of an MI250X is half of the product.
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
    """Dense peak of one device in FLOP/s; None for devices, device slices and dtypes that are not in the table.

    A name with a slash is that of several products: AMD's driver says ``MI250X / MI250`` for either.
    """
    if params_dtype not in ("bf16", "fp16") or re.search(r"\bMIG\b|/", device_name):
        return None
    return next((peak for words, peak in PEAK_FLOPS if re.search(rf"\b{words}\b", device_name)), None)


@dataclass(frozen=True)
class Yardstick:
    """What a run's records are measured against: its length, its ranks and its hardware.

    Attributes:
        total_iterations: steps of the whole run.
        total_samples: samples of the whole run.
        seq_length: tokens of a sample.
        world_size: ranks.
        flops: per token, by convention.
        peak_flops: of one device in FLOP/s; None where it is not known.
        on_gpu: whether a rank is a GPU.
    """

    total_iterations: int
    total_samples: int
    seq_length: int
    world_size: int
    flops: FlopsPerToken
    peak_flops: float | None
    on_gpu: bool

    @classmethod
    def from_config(
        cls, config: RunConfig, world_size: int, device_name: str, iteration: int = 0, consumed_samples: int = 0
    ) -> Yardstick:
        """For a run on ``world_size`` devices called ``device_name`` (``cpu`` on CPUs), from where it goes on."""
        data_parallel_size, begin = world_size // config.parallel.model_ranks, (iteration, consumed_samples)
        return cls(
            total_iterations=total_steps(config.training, data_parallel_size, *begin),
            total_samples=trained_samples(config.training, data_parallel_size, *begin),
            seq_length=config.training.seq_length,
            world_size=world_size,
            flops=FlopsPerToken.from_config(config),
            peak_flops=peak_flops(device_name, config.precision.params_dtype),
            on_gpu=device_name != "cpu",
        )

    def values(self, record: TrainRecord) -> dict[str, float | None]:
        """Speed under the names it is logged by; shares are 0 to 1, and None where the peak is not known.

        ``throughput`` is in TFLOP/s of one rank, counted as Megatron-LM does; ``mfu`` counts every score of attention
        (6N + 12Lhs), ``mfu-causal`` those that are not masked, and ``hfu`` is ``mfu`` with what is recomputed.
        """
        return {
            "throughput": self._flops_per_second(record, self.flops.megatron) / 1e12,
            "mfu": self.mfu(record),
            "mfu-causal": self._utilisation(record, self.flops.causal),
            "hfu": self._utilisation(record, self.flops.hardware),
        }

    def mfu(self, record: TrainRecord) -> float | None:
        """Model FLOPs utilisation by 6N + 12Lhs, 0 to 1; None where the peak is not known."""
        return self._utilisation(record, self.flops.full)

    def _utilisation(self, record: TrainRecord, flops_per_token: float) -> float | None:
        return None if self.peak_flops is None else self._flops_per_second(record, flops_per_token) / self.peak_flops

    def _flops_per_second(self, record: TrainRecord, flops_per_token: float) -> float:
        """Of one rank."""
        return record.tokens_per_second / self.world_size * flops_per_token

    def seconds_left(self, record: TrainRecord) -> float:
        """Time the remaining samples take at this speed."""
        samples_left = max(0, self.total_samples - record.consumed_samples)
        return samples_left * self.seq_length / record.tokens_per_second
