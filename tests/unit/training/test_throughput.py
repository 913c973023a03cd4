from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megatron.config.model import ModelConfig
from megatron.config.run import ParallelConfig, PrecisionConfig, RunConfig, TrainingConfig
from megatron.training.records import TrainRecord
from megatron.training.throughput import PEAK_FLOPS, Yardstick, flops_per_token, matmul_parameters, peak_flops

SEQ = 64


def counted_flops_per_token(model: torch.nn.Module) -> float:
    """What torch counts in a forward and backward of 2 x 64 tokens."""
    tokens = torch.randint(0, 100, (2, SEQ))
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    return counter.get_total_flops() / tokens.numel()


def full_attention(model: ModelConfig) -> float:
    """The formula plus the masked half of the attention products, which eager attention computes."""
    return flops_per_token(model, SEQ) + 6 * model.num_layers * model.num_attention_heads * model.head_dim * SEQ


def test_gpt2_costs_what_torch_counts() -> None:
    theirs = GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=96, n_head=4, vocab_size=301, n_positions=SEQ, attn_implementation="eager")
    )
    ours = ModelConfig(num_layers=3, hidden_size=96, num_attention_heads=4, vocab_size=301)
    assert full_attention(ours) == counted_flops_per_token(theirs)


def test_llama_costs_what_torch_counts() -> None:
    theirs = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=96,
            intermediate_size=200,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=301,
            attn_implementation="eager",
        )
    )
    ours = ModelConfig(
        num_layers=2,
        hidden_size=96,
        ffn_hidden_size=200,
        num_attention_heads=6,
        num_query_groups=2,
        kv_channels=32,
        vocab_size=301,
        activation="swiglu",
    )
    # transformers makes its rotary angles with one small matrix product
    assert full_attention(ours) == pytest.approx(counted_flops_per_token(theirs), rel=1e-4)


@pytest.mark.parametrize("window", [1, 100, 400, 1000, 5000])
def test_a_window_saves_the_keys_it_hides(window: int) -> None:
    seq = 1000
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=10, window_size=window)
    keys = (flops_per_token(model, seq) - 6 * matmul_parameters(model)) / (12 * 8)
    seen = sum(min(at + 1, window) for at in range(seq)) / seq
    assert keys == pytest.approx(seen, abs=0.5)  # the formula takes the diagonal as half a key


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
        ("cpu", "bf16", None),
        ("Some GPU of 2031", "bf16", None),
    ],
)
def test_only_known_hardware_has_a_peak(name: str, dtype: str, expected: float | None) -> None:
    assert peak_flops(name, dtype) == expected


def test_every_row_of_the_table_can_be_reached() -> None:
    assert [peak_flops(f"Maker {name}", "bf16") for name, _ in PEAK_FLOPS] == [peak for _, peak in PEAK_FLOPS]


def record(**changes: Any) -> TrainRecord:
    values: dict[str, Any] = {
        "iteration": 10,
        "consumed_samples": 40,
        "consumed_tokens": 4000,
        "loss": 2.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "weight_decay": 0.1,
        "batch_size": 4,
        "loss_scale": 1.0,
        "seconds_per_step": 0.5,
        "tokens_per_second": 800.0,
    }
    return TrainRecord(**(values | changes))


def test_yardstick_of_a_run() -> None:
    config = RunConfig(
        model=ModelConfig(vocab_size=100),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        precision=PrecisionConfig(params_dtype="bf16"),
        training=TrainingConfig(seq_length=100, micro_batch_size=1, train_iters=100),
    )
    yardstick = Yardstick.from_config(config, 8, "NVIDIA A100-SXM4-80GB")
    per_token = flops_per_token(config.model, 100)
    assert (yardstick.total_iterations, yardstick.total_samples) == (100, 400)  # 8 ranks / TP2 = 4 samples a step
    smaller_before = Yardstick.from_config(config, 8, "cpu", iteration=60, consumed_samples=120)
    assert (smaller_before.total_iterations, smaller_before.total_samples) == (100, 280)
    assert yardstick.flops_per_second(record()) == pytest.approx(100 * per_token)
    assert yardstick.mfu(record()) == pytest.approx(100 * per_token / 312e12)
    assert yardstick.seconds_left(record()) == pytest.approx(90 * 0.5)
    assert yardstick.seconds_left(record(consumed_samples=400)) == 0
    by_samples = replace(config, training=replace(config.training, train_iters=None, train_samples=403))
    assert Yardstick.from_config(by_samples, 8, "cpu").seconds_left(record(consumed_samples=400)) == 0
    cpu = Yardstick.from_config(config, 2, "cpu")
    assert cpu.mfu(record()) is None
    assert not cpu.on_gpu
