"""The numbers do not change unnoticed, whatever is refactored."""

from __future__ import annotations

import pytest
import torch

from tests.golden import losses
from tests.kit.pool import Pool

TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""Relative. Initial values are drawn in fp32, also for fp64, and ten steps of Adam amplify their last bits, which
differ between processors."""


@pytest.fixture(scope="module")
def found(pool: Pool) -> dict[str, list[float]]:
    return pool.run(1, losses.losses)[0]


def test_losses_are_the_same_to_the_bit_when_computed_again(pool: Pool, found: dict[str, list[float]]) -> None:
    assert pool.run(1, losses.losses)[0] == found


@pytest.mark.parametrize("name", losses.CASES)
def test_losses_are_as_recorded(found: dict[str, list[float]], name: str) -> None:
    assert found[name] == pytest.approx(losses.read()[name], rel=TOLERANCE, abs=0.0)
