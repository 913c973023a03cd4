"""The kept results of megatron-core are complete and inside of their limits, and those of its page."""

from __future__ import annotations

import re

from tests.megatron_core import moves
from tests.megatron_core.__main__ import key, read, within
from tests.megatron_core.cases import CASES, LOSS, NORM
from tests.megatron_core.page import PAGE, filled
from tests.unit.pages import ROOT

ROWS = read()


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    assert filled(text) == text, "python -m tests.megatron_core.page"


def test_every_case_has_a_row_inside_of_its_limits() -> None:
    assert [key(case) for case in CASES if key(case) not in ROWS or not within(ROWS[key(case)], case)] == []
    assert ROWS.keys() == {key(case) for case in CASES}
    assert [case.name for case in CASES if case.loss > LOSS and not case.why] == []


def test_the_numbers_of_the_readme() -> None:
    plain = [ROWS[key(case)] for case in CASES if (case.loss, case.norm) == (LOSS, NORM)]
    losses, norms = (max(float(row[name]) for row in plain) for name in ("loss", "norm"))
    sentence = f"{len(plain)} cases: loss within {losses:.1e}, gradient norm within {norms:.1e}"
    assert sentence in (ROOT / "README.md").read_text()


def test_every_move_has_a_row_and_500_orders_are_compared() -> None:
    lines = moves.read()
    assert {name for name in lines if not name.startswith("sample orders")} == moves.MOVES.keys()
    orders = [line for name, line in lines.items() if name.startswith("sample orders")]
    assert sum(int(re.match(r"(\d+) settings", line)[1]) for line in orders) >= 500  # type: ignore[index]
    assert all(" 0 refused here alone, 0 different" in line for line in orders)
