"""Published runs as configurations of this project, and what the planner predicts for them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from statistics import median

import pytest

from benchmarks.published import Prediction, Row, UnusableRowError, read_rows


@cache
def sample() -> tuple[Prediction, ...]:
    """Return the predictions of the first and every 40th row of each source, without those that cannot be used."""
    seen: Counter[str] = Counter()
    found = []
    for row in read_rows():
        seen[row["source"]] += 1
        if seen[row["source"]] % 40 == 1:
            try:
                found.append(Prediction.of(row))
            except UnusableRowError:
                continue
    return tuple(found)


def rows_with(source: str, **flags: object) -> list[Row]:
    rows = [row for row in read_rows() if row["source"].startswith(source)]
    return [row for row in rows if all(row["par"].get(name) == value for name, value in flags.items())]


def test_flops_of_published_runs_are_counted_as_their_sources_do() -> None:
    errors = [each.flops_error() for each in sample() if not each.has_experts]
    counted = [error for error in errors if error is not None]
    assert len(counted) >= 10
    assert max(map(abs, counted)) < 0.015


def test_the_time_of_published_dense_runs_is_predicted() -> None:
    errors = [each.time_error() for each in sample() if not each.has_experts]
    sizes = sorted(abs(error) for error in errors if error is not None)
    assert len(sizes) >= 20
    assert median(sizes) < 0.1
    assert sizes[int(0.9 * len(sizes))] < 0.25


def test_bubbles_of_zero_bubble_schedules_are_predicted() -> None:
    errors = [
        error
        for row in rows_with("Zero Bubble", schedule="1F1B")[::3]
        for error in Prediction.of(row).bubble_errors().values()
    ]
    assert len(errors) >= 4
    assert max(map(abs, errors)) < 0.03


@pytest.mark.parametrize(("id", "fits"), [("bloom-092", False), ("bloom-140", True), ("titan-8b-cp8", True)])
def test_a_published_run_fits_unless_it_was_out_of_memory(id: str, fits: bool) -> None:
    (row,) = (row for row in read_rows() if row["id"] == id)
    assert Prediction.of(row).fits is fits
