"""Numbers that are offered in place of others."""

from __future__ import annotations

from megatron.config.numbers import divisors


def test_divisors_are_those_that_leave_nothing() -> None:
    for number in range(1, 400):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_mistyped_number_of_thirty_digits_is_answered() -> None:
    number = 10**30 - 1
    found = divisors(number)  # there are 10**15 numbers below its root
    assert found[:4] == [1, 3, 7, 9]
    assert found[-1] == number
    assert all(number % d == 0 for d in found)
