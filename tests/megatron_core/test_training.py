"""Training, against megatron-core itself: the same weights, data and options give the same losses and norms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.pool import Pool
from tests.megatron_core.beside import missing, run_case
from tests.megatron_core.cases import CASES, Case

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool, case: Case) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_case(tmp_path, case, pool)
    assert found.steps >= 50
    assert found.loss <= case.loss
    assert found.grad_norm <= case.norm
