"""The hash behind dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.distributed.random import stable_hash
from megatron.kernels.dropout import keep_mask


def mask(key: int, probability: float = 0.5, n: int = 128) -> Tensor:
    index = torch.arange(n)
    return keep_mask(probability, key, index.view(-1, 1, 1)[:4], index.view(-1, 1), index)


def test_keep_mask_is_elementwise_in_its_coordinates() -> None:
    whole = mask(stable_hash("x"))
    index = torch.arange(128)
    picked = torch.tensor([77, 3, 12])
    part = keep_mask(0.5, stable_hash("x"), torch.tensor([2]).view(1, 1, 1), picked.view(-1, 1), index[40:50])
    assert torch.equal(part, whole[2:3, picked, 40:50])


def test_keep_mask_has_no_structure() -> None:
    """The spectrum of every sample's mask is flat: no stripe, no period, along positions or channels."""
    signs = mask(stable_hash("y")).double() * 2 - 1
    power = torch.fft.fft2(signs).abs().square() / signs[0].numel()
    assert power.mean().item() == pytest.approx(1.0, abs=1e-9)
    assert power.max() < 25, "white noise of this size exceeds 25 once in a million"


@pytest.mark.parametrize("probability", [0.0, 1e-12])
def test_keep_mask_of_nothing_keeps_all(probability: float) -> None:
    assert mask(1, probability).all()
