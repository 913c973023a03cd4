"""Numbers that are offered in place of others."""

from __future__ import annotations

from megatron.config.errors import divisors, format_bytes


def test_bytes_in_powers_of_1024() -> None:
    small = {0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 1024: "1.00 KiB", 1536: "1.50 KiB"}
    assert {n: format_bytes(n) for n in small} == small
    large = {0.5: "512.00 KiB", 102: "102.00 MiB", 1536: "1.50 GiB", 1.5 * 2**20: "1,536.00 GiB"}
    assert {n: format_bytes(n * 2**20) for n in large} == large


def test_divisors_are_those_that_leave_nothing() -> None:
    for number in range(1, 400):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_mistyped_number_of_thirty_digits_is_answered() -> None:
    number = 10**30 - 1
    found = divisors(number)  # there are 10**15 numbers below its root
    assert found[:4] == [1, 3, 7, 9]
    assert found[-1] == number
    assert all(number % d == 0 for d in found)
