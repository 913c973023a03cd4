"""Masters as the bits that bf16 weights lack: nothing is lost, and a run is that of whole main_params."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.run import OptimizerConfig
from megatron.optimizer.main_params import MainParams, join_fp32, split_fp32
from tests.solo import Solo, random_batch, tiny

CONFIG = tiny()
BATCHES = [random_batch(CONFIG, seed=seed) for seed in (1, 2)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_number_comes_back_to_the_bit_and_its_weight_is_the_nearest(value: float) -> None:
    master = torch.tensor([value])
    weight, rest = split_fp32(master)
    assert torch.equal(join_fp32(weight, rest).view(torch.int32), master.view(torch.int32))
    nearest, exact = master.bfloat16(), master.double()
    if nearest.isfinite().all():
        assert (weight.double() - exact).abs().item() == (nearest.double() - exact).abs().item()


def test_ties_go_away_from_zero() -> None:
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, -0x407E8000], dtype=torch.int32).view(torch.float32)
    weight, _ = split_fp32(ties)
    assert (weight.float().abs() > ties.abs()).all()


@pytest.mark.parametrize("optimizer", ["adam", "lion", "sgd"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_run_is_that_of_whole_masters(optimizer: str, moments: str) -> None:
    """Weights may differ where a master is a tie; in these few steps none is before the last."""
    formats = {} if optimizer == "sgd" else {"exp_avg_dtype": moments}
    whole, lean = (
        Solo.build(
            CONFIG,
            torch.bfloat16,
            optimizer=OptimizerConfig(optimizer=optimizer, ema_decay=0.9, store_param_remainders=remainders, **formats),
        )
        for remainders in (False, True)
    )
    assert len(lean.optimizer.main_params.remainders) == len(lean.params)
    for _ in range(3):
        assert whole.step(BATCHES)[0] == lean.step(BATCHES)[0]
        for kept in ("main_params", "ema"):
            ours, theirs = getattr(lean.optimizer, kept), getattr(whole.optimizer, kept)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with lean.optimizer.averaged(), whole.optimizer.averaged():  # averages are ties here and there
        assert all(torch.equal(lean.optimizer.main_params[name], m) for name, m in whole.optimizer.main_params.items())
    for name, master in lean.optimizer.main_params.items():
        assert torch.equal(master, whole.optimizer.main_params[name])
        assert torch.equal(lean.params[name], split_fp32(master)[0])


def test_fp32_weights_are_their_own_masters() -> None:
    weight = torch.ones(3)
    main_params = MainParams({"w": weight}, as_remainders=True)
    assert not main_params.remainders
    main_params["w"].mul_(2)
    assert weight.tolist() == [2, 2, 2]
