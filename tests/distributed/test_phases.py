"""Phases of a run on several ranks: the same losses in every layout, which may change with the phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.resume import run_rank
from tests.kit.pool import Pool
from tests.kit.runs import column, differences, start, steps, tiny_phases
from tests.unit.training.test_phases import FLAGS, PHASES

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-sp": ("--tensor-model-parallel-size 2 --sequence-parallel", {}),
    "zero, then cp2": ("--use-distributed-optimizer", {"context_parallel_size": 2}),
    "pp2, then zero-3": (
        "--pipeline-model-parallel-size 2",
        {"pipeline_model_parallel_size": 1, "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
}
"""Options of the command line, and of the second phase."""


FAST = {"zero, then cp2"}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAYOUTS]
)
def test_losses_are_the_same_in_every_layout(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Also if the ranks are killed in the second phase, and start again in it."""
    flags, of_long = LAYOUTS[layout]
    main, long, anneal = PHASES
    phases = [main, {**long, **of_long}, anneal]
    assert start(tiny_phases(tmp_path / "alone", PHASES, FLAGS)).status == 0
    plans = {name: tiny_phases(tmp_path / name, phases, f"{FLAGS} {flags}", 2) for name in ("whole", "parts")}
    whole = pool.run(2, run_rank, plans["whole"])
    killed = pool.run(2, run_rank, plans["parts"], "kill", 6)
    again = pool.run(2, run_rank, plans["parts"])
    assert [(each.status, each.err) for each in [*whole, *again]] == [(0, "")] * 4
    assert [each.status for each in killed] == [None, None]
    for name in ("lm loss", "grad-norm"):
        assert column(tmp_path / "whole", name) == pytest.approx(column(tmp_path / "alone", name), rel=1e-10)
    for name in ("consumed-tokens", "samples-digest", "learning-rate"):
        assert column(tmp_path / "whole", name) == column(tmp_path / "alone", name)
    assert steps(tmp_path / "whole") == steps(tmp_path / "parts")
    assert differences(*(tmp_path / f"{name}/saved/iter_0000009" for name in ("whole", "parts"))) == []
