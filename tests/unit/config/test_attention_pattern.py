"""The text of attention patterns, and which keys each of them shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import plugins
from megatron.config.attention_pattern import AttentionPattern, format_layers, parse_layers
from megatron.config.model import ModelConfig

LENGTH = 40


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "even": lambda query, key: (query - key) % 2 == 0,  # also of later keys, which the pattern must hide
    "others": lambda query, key: (query - key) % 3 == 1,  # not of the token itself, which must always see a key
}
"""Rules of plugins."""


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins._registered, "attention_pattern", RULES)


Truth = Callable[[int], list[int]]
"""The keys that a query sees, in order."""


def block(start: int, size: int) -> list[int]:
    return [*range(start, start + size)]


FORMS: dict[str, Truth] = {
    "global": lambda q: block(0, q + 1),
    "local:1": lambda q: [q],
    "local:4": lambda q: [k for k in (q - 3, q - 2, q - 1, q) if k >= 0],
    "local:1000": lambda q: block(0, q + 1),
    "chunked:8": lambda q: block(q - q % 8, q % 8 + 1),
    "dilated:3:5": lambda q: [k for k in (q - 10, q - 5, q) if k >= 0],
    "dilated:1:9": lambda q: [q],
    "prefix:6": lambda q: block(0, max(6, q + 1)),
    "prefix:1": lambda q: block(0, q + 1),
    "even": lambda q: [k for k in range(q + 1) if (q - k) % 2 == 0],
    "others": lambda q: sorted({q, *range(q - 1, -1, -3)}),
    "local:3+first:2": lambda q: sorted({k for k in (0, 1, q - 2, q - 1, q) if 0 <= k <= q}),
    "chunked:8+first:10": lambda q: sorted({*block(0, min(10, q + 1)), *block(q - q % 8, q % 8 + 1)}),
    "dilated:2:7+first:1": lambda q: sorted({k for k in (0, q - 7, q) if k >= 0}),
    "local:2+prefix:5": lambda q: sorted({*block(0, 5), *(k for k in (q - 1, q) if k >= 0)}),
    "local:12+chunked:8": lambda q: block(q - q % 8, q % 8 + 1),
    "local:3+chunked:8": lambda q: [k for k in (q - 2, q - 1, q) if k >= q - q % 8],
    "even+local:4": lambda q: [k for k in (q - 2, q) if k >= 0],
    "even+first:2": lambda q: sorted({k for k in range(q + 1) if k < 2 or (q - k) % 2 == 0}),
}


@pytest.mark.parametrize("text", FORMS)
def test_the_keys_that_each_query_sees(text: str) -> None:
    (pattern,) = parse_layers(text)
    for query in range(LENGTH):
        assert [key for key in range(max(LENGTH, 6)) if pattern.allows(query, key)] == FORMS[text](query)


@pytest.mark.parametrize("text", FORMS)
def test_arrays_and_tensors_are_allowed_elementwise(text: str) -> None:
    (pattern,) = parse_layers(text)
    expected = [[key in FORMS[text](query) for key in range(LENGTH)] for query in range(LENGTH)]
    for at in (np.arange(LENGTH), torch.arange(LENGTH)):
        assert pattern.allows(at[:, None], at).tolist() == expected


ERRORS = {
    "": "a pattern is empty: drop a comma, or write global",
    "locl:4": "'locl:4' is no attention pattern: global, local:WINDOW",
    "local": "'local': local takes 1 number: local:WINDOW",
    "local:4:2": "'local:4:2': local takes 1 number: local:WINDOW",
    "global:3": "'global:3': global takes no number: global",
    "dilated:4": "'dilated:4': dilated takes 2 numbers: dilated:WINDOW:STEP",
    "even:2": "'even:2': even takes no number: even",
    "odd": "prefix:TOKENS, or a pattern of a module that --plugin names",
    "global,": "a pattern is empty",
    "*3": "a pattern is empty",
    "+first:4": "'+first:4': a pattern is missing before or after +",
    "local:0": "'local:0': sizes are whole numbers in digits, from 1 to 1000000000",
    "local:4k": "'local:4k': sizes are whole numbers in digits",
    "local:-3": "'local:-3': sizes",
    "local:1e3": "'local:1e3': sizes",
    "prefix:1000000001": "sizes are whole numbers",
    "chunked:" + "9" * 5000: "sizes are whole numbers",
    "local:4*0": "'local:4*0': after * is a number of layers from 1 to 10000",
    "local:4*two": "after * is a number of layers",
    "local:4*": "after * is a number of layers",
    "local:4*1000000000000": "after * is a number of layers",
    "first:4": "'first:4' is added to another pattern: write local:WINDOW+first:4",
    "global+first:4": "'global+first:4': first:4 changes nothing, as all earlier tokens are visible",
    "prefix:9+first:4": "'prefix:9+first:4': first:4 changes nothing",
    "local:4+local:8": "'local:4+local:8': 'local:8' contradicts an earlier part",
    "dilated:4:2+local:8": "'local:8' contradicts an earlier part",
    "even+even": "'even' contradicts an earlier part",
}


@pytest.mark.parametrize("text", ERRORS)
def test_invalid_patterns_are_refused(text: str) -> None:
    for whole in (text, f"global,{text}") if text else (text,):
        with pytest.raises(ValueError, match=r"\w") as error:
            parse_layers(whole)
        assert ERRORS[text] in str(error.value)


def test_layers_repeat() -> None:
    local, full = AttentionPattern(window=16), AttentionPattern()
    assert parse_layers("local:16 * 2 , global") == (local, local, full)
    model = ModelConfig(num_layers=7, attention_pattern="local:16*2,global")
    assert [model.pattern(layer) for layer in range(7)] == [local, local, full, local, local, full, local]
    assert ModelConfig(window_size=16).pattern(1) == local
    assert ModelConfig().pattern(1) == full
    assert [p.only_window for p in parse_layers("global,local:4,chunked:4,local:4+first:1,prefix:4,even")] == [
        *(True, True),
        *(False, False, False, False),
    ]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (["global"] * 4, "global"),
        (["local:8", "global"] * 3, "local:8,global"),
        (["local:8", "global"] * 3 + ["local:8"], "local:8,global"),
        ((["local:8"] * 5 + ["global"]) * 2 + ["local:8"], "local:8*5,global"),
        (["global"] * 3 + ["local:8"] * 2, "global*3,local:8*2"),
        (["local:8", "global", "global", "local:8"], "local:8,global*2"),
        (["local:8"], "local:8"),
    ],
)
def test_the_shortest_text_of_layers(layers: list[str], text: str) -> None:
    assert format_layers(layers) == text
    model = ModelConfig(num_layers=len(layers), attention_pattern=text)
    assert [model.pattern(layer) for layer in range(len(layers))] == [*map(AttentionPattern.parse, layers)]
