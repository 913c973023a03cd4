"""Initial values that know no layout, and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.distributed.random import initialize, stable_hash
from megatron.distributed.sharding import DenseSharding, Init, ShardSpec
from tests.unit.distributed.test_sharding import CASES, CONSTRUCTORS, specs_of


def filled(spec: ShardSpec, dtype: torch.dtype = torch.float32, name: str = "w", seed: int = 1) -> Tensor:
    local = torch.full(spec.local_shape, float("nan"), dtype=dtype)
    initialize(local, spec, name, seed)
    return local


@pytest.mark.parametrize(("name", "tp"), [case for case in CASES if case[1] in (2, 3, 8)])
def test_union_over_ranks_is_the_whole(name: str, tp: int) -> None:
    """Every piece, owned or a copy, has the bits that one rank alone would give it; padding is zero."""
    whole_spec = CONSTRUCTORS[name](DenseSharding(0, 1))
    whole = filled(whole_spec)[: whole_spec.shape[0]].view(whole_spec.view)
    for spec in specs_of(name, tp):
        local = filled(spec).view(spec.local_view)
        for piece in spec.pieces:
            assert torch.equal(local[piece.local_box.slices], whole[piece.global_box.slices])
            local[piece.local_box.slices] = 0
        assert not local.any(), "padding is not zero"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_rounds_the_same_numbers(dtype: torch.dtype) -> None:
    spec = DenseSharding(0, 1).split((100, 7), 0, Init(std=0.3))
    assert torch.equal(filled(spec, dtype), filled(spec).to(dtype))


def test_distribution() -> None:
    values = filled(DenseSharding(0, 1).split((1000, 200), 0, Init(std=0.3)))
    n = values.numel()
    assert abs(values.mean().item()) < 5 * 0.3 / n**0.5
    assert values.std().item() == pytest.approx(0.3, abs=5 * 0.3 / (2 * n) ** 0.5)
    assert (values / 0.3).pow(4).mean().item() == pytest.approx(3, abs=5 * (96 / n) ** 0.5)  # a normal's fourth moment
    blocks = values[:960].view(15, 64, 200).flatten(1)
    assert (blocks.corrcoef() - torch.eye(15)).abs().max() < 5 / blocks.shape[1] ** 0.5, "blocks of rows are related"


def test_names_and_seeds_differ() -> None:
    spec = DenseSharding(0, 1).split((64, 64), 0, Init(std=1.0))
    drawn = [filled(spec), filled(spec, name="v"), filled(spec, seed=2)]
    correlations = torch.stack([d.flatten() for d in drawn]).corrcoef() - torch.eye(3)
    assert correlations.abs().max() < 5 / 64
    assert torch.equal(drawn[0], filled(spec))


def test_does_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    filled(DenseSharding(0, 1).split((64, 64), 0, Init(std=1.0)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constants(value: float) -> None:
    assert (filled(DenseSharding(1, 2).split((8,), 0, Init(value=value))) == value).all()


def test_hash_depends_on_every_part() -> None:
    hashes = {
        stable_hash(*parts) for parts in [(1, 2, "a"), (2, 1, "a"), (1, 2, "b"), (12, "a"), (1, "2a"), (1, 2, "a", 0)]
    }
    assert len(hashes) == 6
    assert all(0 <= h < 2**63 for h in hashes)
