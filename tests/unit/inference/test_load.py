"""Which tokens end a text, and which ranks can share a model; the weights themselves are read in the tool's tests."""

from __future__ import annotations

import json

import pytest

from megatron.inference.load import check_tensor_parallel_size, stop_ids
from megatron.inference.text import IdCodec, InferenceError
from tests.solo import tiny


class EndsWith9(IdCodec):
    end = 9


def files(**contents: object) -> dict[str, bytes]:
    return {f"{name}.json": json.dumps(content).encode() for name, content in contents.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (files(generation_config={"eos_token_id": [5, 6]}, config={"eos_token_id": 7}), {5, 6}),
        (files(generation_config={"eos_token_id": 5}), {5}),
        (files(generation_config={"eos_token_id": 0}), {0}),
        (files(generation_config={"eos_token_id": None}, config={"eos_token_id": 7}), {7}),
        (files(generation_config={}, config={}), {9}),
        ({}, {9}),
    ],
)
def test_the_first_file_that_says_it(given: dict[str, bytes], expected: set[int]) -> None:
    assert stop_ids(given, EndsWith9()) == expected


def test_without_a_tokenizer_nothing_ends_a_text() -> None:
    assert stop_ids({}, IdCodec()) == set()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"eos_token_id": {}}', b'{"eos_token_id": "x"}'])
def test_a_broken_file_is_named(content: bytes) -> None:
    with pytest.raises(InferenceError, match=r"generation_config\.json"):
        stop_ids({"generation_config.json": content}, IdCodec())


def test_layouts() -> None:
    model = tiny(num_query_groups=2)
    for tp in (1, 2, 4):
        check_tensor_parallel_size(model, tp, tp)
    with pytest.raises(InferenceError, match=r"4 heads do not divide over TP 3; .*\n  fix: torchrun .* 2 "):
        check_tensor_parallel_size(model, 3, 3)
    with pytest.raises(InferenceError, match=r"size 2 on 4 processes.*\n  fix: torchrun --nproc-per-node 2 "):
        check_tensor_parallel_size(model, 2, 4)
