"""One line as texts: the fast way and the careful way agree, and what is wrong is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.preprocess import corpus
from megatron.data.preprocess.corpus import BadDocumentError, parse_line, parse_valid_lines, split_lines

FILE = Path("x.jsonl")


@pytest.fixture(params=["orjson", "json"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fast reader of JSON, and a machine without it."""
    if request.param == "json":
        monkeypatch.setitem(sys.modules, "orjson", None)
    corpus._reader.cache_clear()
    yield
    corpus._reader.cache_clear()


def carefully(content: bytes, keys: tuple[str, ...]) -> list[list[bytes]] | None:
    try:
        rows = [parse_line(line, keys, FILE) for line in split_lines(content)]
    except BadDocumentError:
        return None
    return [[row[i].encode() for row in rows] for i in range(len(keys))]


odd_characters = st.characters(codec="utf-8") | st.sampled_from(["\0", "\\", '"', "\n", "\r", "\u2028", "\ufeff"])
texts = st.text(odd_characters, max_size=20)
values = texts | st.none() | st.integers() | st.lists(texts, max_size=2) | st.just("\ud800")
good_line = st.builds(lambda a, b, ascii: json.dumps({"a": a, "b": b}, ensure_ascii=ascii), texts, texts, st.booleans())
any_line = (
    good_line
    | st.builds(lambda value: json.dumps({"a": value, "b": "x"}), values)
    | st.builds(lambda value: json.dumps(value), values)
    | st.sampled_from(["", " ", "{", '{"a": "x"}', '{"a": NaN, "b": ""}', '{"a":"1","b":"2"},{"a":"3","b":"4"}', "[]"])
)


@pytest.mark.usefixtures("reader")
def test_the_fast_way_gives_what_the_careful_way_gives() -> None:
    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(any_line, max_size=4), st.booleans(), st.sampled_from([("a",), ("b", "a")]))
    def check(lines: list[str], ended: bool, keys: tuple[str, ...]) -> None:
        content = "\n".join(lines).encode() + b"\n" * ended
        fast, careful = parse_valid_lines(content, keys), carefully(content, keys)
        assert fast in (None, careful)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(good_line.filter(lambda line: "\\u0000" not in line), max_size=4))
    def check_good(lines: list[str]) -> None:
        content = "\n".join(lines).encode()
        assert parse_valid_lines(content, ("a",)) == carefully(content, ("a",)) is not None

    check()
    check_good()


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', " is not JSON"),
        (b'{"text": "a\0b"}', " is not JSON"),
        (b'["text"]', " is an array, not an object"),
        (b"null", " is null, not an object"),
        (b'{"txt": "a", "id": 1}', " has no key 'text'; its keys: txt, id"),
        (b'{"text": null}', ": 'text' is null, not a string"),
        (b'{"text": 7}', ": 'text' is a number, not a string"),
        (b'{"text": true}', ": 'text' is a boolean, not a string"),
        (b'{"text": "ab\\u0000"}', ": 'text' is not text: character 2 is NUL"),
        (b'{"text": "a\\udc00"}', ": 'text' is not Unicode: character 1 is an unpaired surrogate"),
        (b'{"text": "caf\xe9"}', " is not UTF-8 text"),
        (b"[" * 100_000, " is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(line: bytes, message: str) -> None:
    with pytest.raises(BadDocumentError) as caught:
        parse_line(line, ("text",), FILE)
    assert caught.value.seen.startswith(message)
    assert parse_valid_lines(line, ("text",)) is None


def test_numbers_that_only_some_readers_take_are_no_obstacle() -> None:
    line = b'{"n": NaN, "m": 123456789012345678901234567890, "text": "t"}'
    assert parse_line(line, ("text",), FILE) == ("t",)


def test_an_array_in_one_line_has_a_way_out() -> None:
    with pytest.raises(BadDocumentError) as caught:
        parse_line(b'[{"text": "a"}]', ("text",), Path("all of it.json"))
    assert "jq -c '.[]' 'all of it.json' > lines.jsonl" in caught.value.fixes


def test_lines() -> None:
    assert split_lines(b"") == []
    assert split_lines(b"\n") == [b""]
    assert split_lines(b"a\n\nb") == [b"a", b"", b"b"]
    assert split_lines(b"a\r\nb\n") == [b"a\r", b"b"]
