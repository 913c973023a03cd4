"""Exports, against Megatron-LM itself: it loads every form, and continues like the run here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.arguments.cli import parse
from tests.megatron_core.forms import DATA, FLAGS, FORMS, SAVED, STEPS, THEIRS, missing, run_theirs, write_data
from tests.runs import checkpoint, start, steps
from tools.convert_checkpoint import main as convert

LAYOUTS = {
    "gpt": ("--pipeline-model-parallel-size 2", 2),
    "llama": ("--tensor-model-parallel-size 2", 2),
    "qk norm": ("", 2),
    "shared experts": ("--tensor-model-parallel-size 2", 2),
}
"""Layouts of Megatron-LM, and ranks."""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    ("form", "layout", "ranks"),
    [
        *((form, "", 1) for form in FORMS),
        *((form, *layout) for form, layout in LAYOUTS.items()),
    ],
)
def test_megatron_lm_loads_every_form_and_continues_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, layout: str, ranks: int
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    flags = f"{FLAGS} {FORMS[form]}".split()
    run = parse([*flags, *DATA.split(), "--save", "ours", "--save-interval", str(SAVED), "--device", "cpu", "--run-dir", "log"], {})
    assert start(run.config).status == 0
    assert convert(["--load", f"ours/iter_{SAVED:07d}", "--save-megatron", "export"]) == 0
    theirs = run_theirs(
        tmp_path, [*flags, *THEIRS.split(), *layout.split(), "--load", "export", "--save", "back"], ranks
    )
    ours = [step for number, step in sorted(steps(tmp_path / "log").items()) if number > SAVED]
    assert len(theirs) == len(ours) == STEPS - SAVED
    for mine, step in zip(ours, theirs, strict=True):
        assert step["lm loss"] == pytest.approx(mine["lm loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(mine["grad-norm"], rel=1e-4)
    (mine, _), (back, state) = (checkpoint(tmp_path / name / f"iter_{STEPS:07d}") for name in ("ours", "back"))
    assert state["optimizer"] == {"steps": STEPS}
    assert back.keys() == mine.keys()
    for name, tensor in mine.items():
        assert torch.allclose(back[name], tensor, rtol=1e-4, atol=1e-5), name
