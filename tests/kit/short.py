"""The part of a test's cases that is in the default set."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def one_in(share: int, cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """Return the parameters of a test, most of which are slow.

    Args:
        share: of as many cases, the first is in the default set.
        cases: values of the argument, or tuples of values of several arguments.
        but: cases that are slow, and not counted.
    """
    found, number = [], 0
    for case in cases:
        marks = pytest.mark.slow if case in but or number % share else ()
        number += case not in but
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found
