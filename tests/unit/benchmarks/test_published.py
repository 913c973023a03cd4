"""Published runs as configurations of this project, and what the planner predicts for them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.published import Prediction, Row, UnusableRowError, read_rows

ROWS = read_rows()


def sample(step: int) -> list[Row]:
    """Return rows of every source: the first one of each, and every ``step``-th one."""
    seen: Counter[str] = Counter()
    found = []
    for row in ROWS:
        if seen[row["source"]] % step == 0:
            found.append(row)
        seen[row["source"]] += 1
    return found


@pytest.mark.parametrize("row", sample(60), ids=lambda row: row["id"])
def test_a_published_run_is_predicted(row: Row) -> None:
    try:
        prediction = Prediction.of(row)
    except UnusableRowError as error:
        pytest.skip(str(error))
    flops = prediction.flops_error()
    if flops is not None and not prediction.has_experts:
        assert abs(flops) < 0.015
    assert all(abs(error) < 0.07 for error in prediction.bubble_errors().values())
    assert prediction.time.seconds > 0
