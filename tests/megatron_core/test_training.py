"""Training, against megatron-core itself: the same weights, data and options give the same losses and norms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_core.beside import difference, missing, run_core, run_ours
from tests.megatron_core.forms import DATA, FLAGS, FORMS, write_data


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("form", ["gpt"])
def test_training_from_the_same_weights_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    flags = f"{FLAGS} {DATA} {FORMS[form]}".split()
    theirs = run_core(tmp_path, flags, save={"0": "start"})
    ours = run_ours(tmp_path, [*flags, "--load", "megatron:start", "--resume-mode", "weights-only"])
    found = difference(theirs, ours)
    assert found.loss <= 1e-6
    assert found.grad_norm <= 1e-5
