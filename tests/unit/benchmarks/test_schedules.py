"""The page of benchmarks.schedules says what was measured."""

from __future__ import annotations

import pytest

from benchmarks import schedules


def test_a_small_pipeline_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "2", "--chunks", "3", "--microbatches", "4", "--repeats", "2"]
    assert schedules.main(["--schedules", "interleaved", "1f1b", *sizes]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    sizes_of = {row[0].strip("| "): row[1:3] for row in rows if len(row) > 3}
    # of m micro-batches over s stages: 2ms computed, and 2m sent and received over each of the s - 1 edges
    assert sizes_of["interleaved"] == ["3", str(2 * 4 * 6 + 4 * 4 * 5)]
    assert sizes_of["1f1b"] == ["1", str(2 * 4 * 2 + 4 * 4 * 1)]


def test_sums_medians_and_what_is_above_the_limit() -> None:
    micros = {"made": [1.0, 3.0, 2.0], "communication": [4.0] * 3, "proof": [2.0] * 3, "simulation": [1.0, 1.0, 4.0]}
    row = {"chunks": 1, "actions": 3000, "computing": 1000, "micros": micros | {schedules.COLLECTOR: [0.5] * 3}}
    result = {"schedules": {"zb-h1": row}, "ranks": 4, "microbatches": 8, "rounds": 3, "clock": "wall"}
    machine = {"processor": "a processor", "load": 0.5, "python": "3"}
    page = schedules.report(result | machine)
    assert "| zb-h1 | 1 | 3,000 | 2.00 | 4.00 | 2.00 | 1.00 | 10.00 | 8.00 | 12.00 | 0.50 | 30.0 |" in page
    assert "all below 10 microseconds" in page
    row["micros"]["proof"] = [9.0] * 3
    assert "above 10 microseconds: zb-h1" in schedules.report(result | machine)
