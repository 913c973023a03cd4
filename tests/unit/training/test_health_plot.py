"""Which health reports of a metrics.jsonl count, and that a picture comes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.training.loggers.plots import _labelled_rows, draw_health, read_health


def report(step: int, **norms: float | None) -> str:
    named = {f"health/grad-norm/{layer.replace('_', '.')}": x for layer, x in norms.items()}
    line: dict[str, Any] = {"iteration": step, "params-norm": 3.0, "health/grad-norm/total": 9.0, **named}
    return json.dumps(line)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_layers_and_steps_in_order(tmp_path: Path) -> None:
    lines = (
        report(2, embedding=1.0, layers_0=2.0),
        '{"iteration": 3, "lm loss": 1}',
        report(4, embedding=3.0, layers_0=None),
    )
    (kind, found), *others = read_health(write(tmp_path, *lines)).items()
    assert (kind, found.layers, found.steps, others) == ("grad-norm", ["embedding", "layers.0"], [2, 4], [])
    np.testing.assert_array_equal(found.values, [[1.0, 3.0], [2.0, math.nan]])


def test_what_a_restart_threw_away_is_gone(tmp_path: Path) -> None:
    start = '{"event": "start", "iteration": 4}'
    lines = [report(step, head=float(step)) for step in (2, 4, 6, 8)]
    path = write(
        tmp_path, *lines, start, report(6, head=60.0), '{"event": "note", "text": "x"}', report(8)[:-7], "3", ""
    )
    found = read_health(path)["grad-norm"]
    assert (found.steps, found.values.tolist()) == ([2, 4, 6], [[2.0, 4.0, 60.0]])


def test_no_report_no_picture(tmp_path: Path) -> None:
    out = tmp_path / "health.png"
    assert not draw_health(write(tmp_path, '{"iteration": 3, "lm loss": 1}'), "a run", out)
    assert not out.exists()


@pytest.mark.parametrize("values", [(1.0, 2.0), (1e-6, 1e6), (0.0, 0.0), (-3.0, 4.0), (None, None), (None, 2.0)])
def test_it_is_drawn(tmp_path: Path, values: tuple[float | None, float | None]) -> None:
    out = tmp_path / "health.png"
    assert draw_health(write(tmp_path, report(1, embedding=values[0], head=values[1])), "a run", out)
    assert out.stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_names_of_many_layers_are_thinned_out() -> None:
    layers = ["embedding", *(f"layers.{i}" for i in range(48)), "head"]
    assert [layers[at] for at in _labelled_rows(layers)][:3] == ["layers.0", "layers.5", "layers.10"]
    assert _labelled_rows(layers[:9]) == list(range(9))
    assert len(_labelled_rows([f"layers.{i}" for i in range(5000)])) <= 13
