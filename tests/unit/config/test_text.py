"""Numbers that are offered in place of others."""

from __future__ import annotations

from megatron.config.errors import divisors, format_bytes


def test_bytes_in_powers_of_1000_and_of_1024() -> None:
    decimal = {0: "0 bytes", 1: "1 byte", 999: "999 bytes", 1000: "1.0 kB", 43_341: "43.3 kB", 999_950: "1.0 MB"}
    decimal |= {12_345_678: "12.3 MB", 999_999_999: "1.0 GB", 3_210_000_000_000: "3,210.0 GB"}
    assert {n: format_bytes(n) for n in decimal} == decimal
    binary = {0.5: "0.50 MiB", 102: "102.00 MiB", 103: "0.10 GiB", 1.5 * 2**20: "1,536.00 GiB"}
    assert {n: format_bytes(n * 2**20, binary=True) for n in binary} == binary


def test_divisors_are_those_that_leave_nothing() -> None:
    for number in range(1, 400):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_a_mistyped_number_of_thirty_digits_is_answered() -> None:
    number = 10**30 - 1
    found = divisors(number)  # there are 10**15 numbers below its root
    assert found[:4] == [1, 3, 7, 9]
    assert found[-1] == number
    assert all(number % d == 0 for d in found)
