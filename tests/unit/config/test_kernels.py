"""The words of ``--kernels``."""

from __future__ import annotations

import pytest

from megatron.config.run import KERNEL_CANDIDATES, KernelChoice, kernel_choices, kernel_problems


def names(*words: str) -> dict[str, str]:
    return {operation: wish.name for operation, wish in kernel_choices(words).items()}


def test_a_word_alone_speaks_of_every_operation() -> None:
    assert set(names("auto").values()) == {"auto"}
    assert set(names("torch").values()) == {"torch"}
    found = names("compiled")
    assert {operation for operation, name in found.items() if name == "compiled"} == {
        operation for operation, known in KERNEL_CANDIDATES.items() if "compiled" in known
    }
    assert found["attention"] == "torch", "what cannot be compiled is torch's own"


def test_later_words_win() -> None:
    assert names("compiled", "norm=apex", "norm=torch")["norm"] == "torch"
    assert set(names("norm=apex", "torch").values()) == {"torch"}
    assert names("torch", "norm=apex") == names("torch") | {"norm": "apex"}


def test_only_an_operations_own_name_insists() -> None:
    asked = kernel_choices(("compiled", "norm=compiled", "rotary=auto"))
    assert asked["norm"] == KernelChoice("compiled", alone=True)
    assert asked["add_norm"] == KernelChoice("compiled", alone=False)
    assert asked["rotary"] == KernelChoice("auto", alone=False)


@pytest.mark.parametrize(
    "word", ["auto", "torch", "compiled", *(f"{o}={n}" for o in KERNEL_CANDIDATES for n in KERNEL_CANDIDATES[o])]
)
def test_every_word_that_means_something_is_taken(word: str) -> None:
    assert list(kernel_problems((word,))) == []


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("norm=apexx", "--kernels norm=apex"),
        ("atention=torch", "--kernels attention=torch"),
        ("compile", "--kernels compiled"),
        ("norm", "--kernels norm=torch"),
        ("=", "--kernels auto"),
        ("norm=", "--kernels norm=auto"),
        ("x=y=z", "--kernels auto"),
    ],
)
def test_other_words_are_told_with_a_way_out(word: str, fix: str) -> None:
    (problem,) = kernel_problems((word,))
    assert (problem.code, problem.fixes) == ("E901", (fix,))


def test_no_word_at_all_is_a_mistake() -> None:
    assert [problem.code for problem in kernel_problems(())] == ["E901"]
