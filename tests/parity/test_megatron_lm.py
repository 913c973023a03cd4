"""Exports, against Megatron-LM itself: it loads every form, and continues like the run here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.arguments.cli import parse
from tests.kit.runs import checkpoint, start, steps
from tests.megatron_core.forms import (
    DATA,
    FLAGS,
    FORMS,
    GROUPED,
    PATTERNS,
    SAVED,
    STEPS,
    THEIRS,
    TRANSFORMER_ENGINE_ALONE,
    missing,
    run_theirs,
    write_data,
)
from tools.convert_checkpoint import main as convert

TP = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"  # without padding, of which it has a loss
PP = "--pipeline-model-parallel-size 2"
ROUNDING = 1e-7
"""Gradients of which Adam makes steps that rounding decides."""
OTHERS = [
    ("gpt", "local", PP, 2),
    ("llama", "local", TP, 2),
    ("qk norm", "local", "", 2),
    ("shared experts", "local", PP, 2),
    ("shared experts", "transformer_engine", GROUPED, 1),
]
"""Forms, with the layers, flags and ranks of Megatron-LM."""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    ("form", "layers", "layout", "ranks"),
    [
        *((form, "local", "", 1) for form in FORMS if form not in TRANSFORMER_ENGINE_ALONE),
        *((form, "transformer_engine", "", 1) for form in {**FORMS, **PATTERNS}),
        *OTHERS,
    ],
)
def test_megatron_lm_loads_every_form_and_continues_equally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, layers: str, layout: str, ranks: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    flags = f"{FLAGS} {(FORMS | PATTERNS)[form]}"
    own = f"{flags} {DATA} --save ours --save-interval {SAVED} --device cpu --run-dir log"
    assert start(parse(own.split(), {}).config).status == 0
    assert convert(["--load", f"ours/iter_{SAVED:07d}", "--save-megatron", "export"]) == 0
    grouped = GROUPED if "--hybrid-layer-pattern" in flags else ""
    flags = f"{flags} {THEIRS} {layout} {grouped} --load export --save back"
    theirs = run_theirs(tmp_path, flags.split(), ranks, layers)
    ours = [step for number, step in sorted(steps(tmp_path / "log").items()) if number > SAVED]
    assert len(theirs) == len(ours) == STEPS - SAVED
    for mine, step in zip(ours, theirs, strict=True):
        assert step["lm loss"] == pytest.approx(mine["lm loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(mine["grad-norm"], rel=1e-5)
    (mine, _), (back, state) = (checkpoint(tmp_path / name / f"iter_{STEPS:07d}") for name in ("ours", "back"))
    assert state["optimizer"] == {"steps": STEPS}
    assert back.keys() == mine.keys()
    for name in mine.keys() - {name for name in mine if "k_layernorm.bias" in name}:  # no softmax depends on it
        different = ~torch.isclose(back[name], mine[name], rtol=1e-4, atol=1e-5)
        squares = mine.get(f"optim.exp_avg_sq.{name}")
        if squares is not None:
            different &= squares.sqrt().view_as(different) > ROUNDING
        assert not different.any(), name
