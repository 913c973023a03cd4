"""A step never synchronises the host with the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.metrics import MetricsWindow
from megatron.training.step import train_step
from tests.kit.runs import tiny_run
from tests.kit.solo import random_batch

LOOKS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal", "unique_consecutive")
"""Operations that synchronise the host; ``item`` and ``bool`` are the first."""


class HostLooks(TorchDispatchMode):
    """Count them while active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LOOKS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16",
        "--fp16",
        "--hidden-dropout 0.1 --attention-dropout 0.1",
        "--recompute-granularity full",
        "--recompute-granularity selective --recompute-modules layernorm activation core_attn",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --bf16",
        "--optimizer lion",
        "--optimizer sgd",
        "--skip-spikes 6 --ema-decay 0.99 --decoupled-lr 1e-4 --lr-factors *norm*=0.5",
        "--window-size 3 --z-loss-coeff 1e-3 --position-embedding-type rope",
    ],
)
def test_the_host_reads_nothing_inside_a_step(flags: str, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_run(tmp_path, flags), 0, 1)
    documents = torch.arange(8).expand(2, 8) // 3
    batches = [random_batch(trainer.config.model, 2, 8, seed=seed, documents=documents) for seed in range(2)]
    rates = Rates(torch.tensor(1e-3), 0.1, torch.tensor(1e-4) if "decoupled" in flags else None)
    window = MetricsWindow(trainer.device, 8)
    train_step(trainer, batches, rates)
    with HostLooks() as looks:
        window.add(train_step(trainer, batches, replace(rates, lr=torch.tensor(2e-3))), 4)
    assert looks.seen == []


def test_a_look_would_be_seen(tmp_path: Path) -> None:
    trainer = build_trainer(tiny_run(tmp_path), 0, 1)
    with HostLooks() as looks:
        metrics = train_step(trainer, trainer.next_batches(), Rates(1e-3, 0.1))
        assert torch.isfinite(metrics.loss)
        metrics.loss.item()
    assert looks.seen == ["is_nonzero", "_local_scalar_dense"] or looks.seen == ["_local_scalar_dense"] * 2
