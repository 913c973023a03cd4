"""The small languages of options: ``--kernels``, PATTERN=FACTOR; numbers and bytes in messages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron.config.compute import KERNEL_CANDIDATES, KernelChoice, kernel_choices, kernel_problems
from megatron.config.optimizer import matching_factor, parse_factor
from megatron.config.text import divisors, format_bytes, format_number, printable, shell_word


def names(*words: str) -> dict[str, str]:
    return {operation: choice.name for operation, choice in kernel_choices(words).items()}


def test_kernels_of_every_operation_and_of_one() -> None:
    assert set(names("auto").values()) == {"auto"}
    assert set(names("torch").values()) == {"torch"}
    compiled = {operation for operation, known in KERNEL_CANDIDATES.items() if "compiled" in known}
    assert {operation for operation, name in names("compiled").items() if name == "compiled"} == compiled
    assert names("compiled")["attention"] == "torch", "it cannot be compiled"
    assert names("compiled", "norm=apex", "norm=torch")["norm"] == "torch"
    assert names("weight_gradient=addmm")["linear"] == "addmm", "an earlier name"
    assert set(names("norm=apex", "torch").values()) == {"torch"}, "the last one wins"
    asked = kernel_choices(("compiled", "norm=compiled", "rotary=auto"))
    assert asked["norm"] == KernelChoice("compiled", alone=True)
    assert asked["add_norm"] == KernelChoice("compiled", alone=False)
    assert asked["split_qkv"] == KernelChoice("auto", alone=False)
    for word in ("auto", "torch", "compiled", *(f"{o}={n}" for o in KERNEL_CANDIDATES for n in KERNEL_CANDIDATES[o])):
        assert list(kernel_problems((word,))) == []


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("norm=apexx", "--kernels norm=apex"),
        ("atention=torch", "--kernels attention=torch"),
        ("compile", "--kernels compiled"),
        ("norm", "--kernels norm=torch"),
        ("norm=", "--kernels norm=auto"),
        ("x=y=z", "--kernels auto"),
        (None, "--kernels auto"),
    ],
)
def test_kernels_that_do_not_exist(word: str | None, fix: str) -> None:
    (problem,) = kernel_problems((word,) if word else ())
    assert (problem.code, problem.fixes) == ("E901", (fix,))


def test_factors() -> None:
    assert parse_factor("layers.*.w[12]=1e-3") == ("layers.*.w[12]", 1e-3)
    assert parse_factor("x=y=0") == ("x=y", 0.0)
    for text in ("", "a", "=1", "a=", "a=fast", "a=-1", "a=nan", "a=inf"):
        with pytest.raises(ValueError, match=r"has|ends"):
            parse_factor(text)
    factors = [("a*", 2.0), ("*b", 3.0)]
    assert [matching_factor(name, factors, 1.0) for name in ("a", "b", "ab", "c", "A")] == [2.0, 3.0, 3.0, 1.0, 1.0]


def test_numbers() -> None:
    small = {0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 1024: "1.00 KiB", 1536: "1.50 KiB"}
    large = {2**19: "512.00 KiB", 102 * 2**20: "102.00 MiB", 1536 * 2**40: "1,572,864.00 GiB"}
    assert {n: format_bytes(n) for n in small | large} == small | large
    for number in (1e-5, 0.1, 1e6, 123456789.0, 1 / 3):
        assert float(format_number(number)) == number
    for number in range(1, 100):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    found = divisors(10**30 - 1)  # there are 10**15 numbers below its root
    assert found[:4] == [1, 3, 7, 9]
    assert all((10**30 - 1) % d == 0 for d in found)


HOSTILE = (
    "",
    "a b",
    "a'b",
    "$(touch made)",
    "`touch made`",
    "a\nb; touch made",
    "\x1b[2J\r",
    "-x",
    "é",
    "\udc80",
    "\\n",
    "!x",
    "$'",
)


@pytest.mark.parametrize("word", HOSTILE)
def test_a_shell_reads_a_quoted_word_as_it_was(word: str, tmp_path: Path) -> None:
    """Also after `printable`, through which all printed texts go."""
    text = printable(shell_word(word))
    assert "\n" not in text
    done = subprocess.run(["bash", "-c", f"printf %s {text}"], capture_output=True, cwd=tmp_path, check=True)
    assert done.stdout == os.fsencode(word)
    assert not [*tmp_path.iterdir()]
