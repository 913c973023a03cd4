"""Texts that grow at once, shown one after the other."""

from __future__ import annotations

from io import StringIO
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.inference.text import ContinuationPrinter, IdCodec

END = 0


def printer(out: StringIO, prompts: list[list[int]], live: bool) -> ContinuationPrinter:
    codec = IdCodec()
    return ContinuationPrinter(out, codec, [codec.decode(ids) for ids in prompts], prompts, {END}, live)


def test_one_text_appears_as_it_grows() -> None:
    out = StringIO()
    shown = printer(out, [[7, 8]], live=True)
    states = [out.getvalue()]
    for token, last in ((9, False), (5, False), (END, True)):
        shown.token(0, token, last)
        states.append(out.getvalue())
    assert states == ["7 8", "7 8 9", "7 8 9 5", "7 8 9 5\n"]


def test_otherwise_when_it_is_complete() -> None:
    out = StringIO()
    shown = printer(out, [[7]], live=False)
    shown.token(0, 9, False)
    assert out.getvalue() == "7"
    shown.token(0, 5, True)
    assert out.getvalue() == "7 9 5\n"


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
    live=st.booleans(),
)
def test_several_follow_one_another_whatever_order_they_grow_in(lengths: list[int], order: Random, live: bool) -> None:
    out = StringIO()
    prompts = [[100 + number] for number in range(len(lengths))]
    shown = printer(out, prompts, live)
    turns = [number for number, length in enumerate(lengths) for _ in range(length)]
    order.shuffle(turns)
    grown = [0 for _ in lengths]
    for number in turns:
        grown[number] += 1
        shown.token(number, grown[number], grown[number] == lengths[number])
    blocks = [
        f"--- {number + 1} of {len(lengths)}\n{' '.join(map(str, (100 + number, *range(1, length + 1))))}\n"
        for number, length in enumerate(lengths)
    ]
    assert out.getvalue() == "\n".join(blocks)
