"""Reading PATTERN=FACTOR."""

from __future__ import annotations

import pytest

from megatron.config.run import matching_factor, parse_factor


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a=2", ("a", 2.0)), ("layers.*.w[12]=1e-3", ("layers.*.w[12]", 1e-3)), ("x=y=0", ("x=y", 0.0))],
)
def test_read(text: str, expected: tuple[str, float]) -> None:
    assert parse_factor(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "no '='"), ("a", "no '='"), ("=1", "no '='"), ("a=", "''"), ("a=fast", "'fast'"), ("a=-1", "at least 0")]
    + [(f"a={number}", "finite") for number in ("nan", "inf")],
)
def test_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_factor(text)


def test_the_last_match_counts() -> None:
    factors = [("a*", 2.0), ("*b", 3.0)]
    assert [matching_factor(name, factors, 1.0) for name in ("a", "b", "ab", "c", "A")] == [2.0, 3.0, 3.0, 1.0, 1.0]
