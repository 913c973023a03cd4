from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import PrecisionConfig, RunConfig, TrainingConfig
from megatron.planner.flops import FlopsPerToken
from megatron.training.loggers.base import Metrics
from megatron.training.metrics import PEAK_FLOPS, ThroughputModel, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM2e", "bf16", None),
        ("NVIDIA H200", "fp16", 989.4e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA RTX A4000", "bf16", None),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L40", "bf16", None),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Instinct MI250X / MI250", "bf16", None),  # 191.5 or 181.05
        ("AMD Instinct MI250X/MI250", "bf16", None),
        ("cpu", "bf16", None),
        ("Some GPU of 2031", "bf16", None),
    ],
)
def test_only_known_hardware_has_a_peak(name: str, dtype: str, expected: float | None) -> None:
    assert peak_flops(name, dtype) == expected


def test_every_row_of_the_table_can_be_reached() -> None:
    assert [peak_flops(f"Maker {name}", "bf16") for name, _ in PEAK_FLOPS] == [peak for _, peak in PEAK_FLOPS]


def record(consumed_samples: int = 40) -> Metrics:
    return {"consumed-samples": consumed_samples, "tokens-per-second": 800.0}


def test_yardstick_of_a_run() -> None:
    config = RunConfig(
        model=ModelConfig(vocab_size=100),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        precision=PrecisionConfig(params_dtype="bf16"),
        training=TrainingConfig(seq_length=100, micro_batch_size=1, train_iters=100),
    )
    throughput_model = ThroughputModel.from_config(config, 8, "NVIDIA A100-SXM4-80GB")
    flops = FlopsPerToken.from_config(config)
    assert (throughput_model.total_iterations, throughput_model.total_samples) == (
        100,
        400,
    )  # 8 ranks / TP2 = 4 samples a step
    smaller_before = ThroughputModel.from_config(config, 8, "cpu", iteration=60, consumed_samples=120)
    assert (smaller_before.total_iterations, smaller_before.total_samples) == (100, 280)
    assert throughput_model.metrics(record())["mfu"] == pytest.approx(
        100 * flops.full / 312e12
    )  # 800 tokens/s on 8 ranks
    assert throughput_model.metrics(record()) == {
        "throughput": pytest.approx(100 * flops.megatron / 1e12),
        "mfu": throughput_model.metrics(record())["mfu"],
        "mfu-causal": pytest.approx(100 * flops.causal / 312e12),
        "hfu": throughput_model.metrics(record())["mfu"],
    }
    assert throughput_model.seconds_left(record()) == pytest.approx(90 * 0.5)
    assert throughput_model.seconds_left(record(consumed_samples=400)) == 0
    by_samples = replace(config, training=replace(config.training, train_iters=None, train_samples=403))
    assert ThroughputModel.from_config(by_samples, 8, "cpu").seconds_left(record(consumed_samples=400)) == 0
    cpu = ThroughputModel.from_config(config, 2, "cpu")
    assert cpu.metrics(record())["mfu"] is None
    assert [name for name, value in cpu.metrics(record()).items() if value is None] == ["mfu", "mfu-causal", "hfu"]
    again = replace(config, training=replace(config.training, recompute_granularity="full"))
    values = ThroughputModel.from_config(again, 8, "NVIDIA A100-SXM4-80GB").metrics(record())
    assert values["mfu"] == throughput_model.metrics(record())["mfu"]
    assert values["hfu"] == pytest.approx(100 * FlopsPerToken.from_config(again).hardware / 312e12)
    assert not cpu.on_gpu
