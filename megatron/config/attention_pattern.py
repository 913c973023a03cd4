"""Attention patterns: which earlier tokens a token attends to, layer by layer.

The text of ``--attention-pattern`` is parsed here, and the rule applied to positions: plain numbers, or arrays and
tensors of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from megatron.config.plugins import registered
from megatron.config.text import counted

KIND = "attention_pattern"
"""Kind of the plugins that add patterns: functions ``(query, key) -> allowed`` of int64 tensors that broadcast."""

SYNTAX = (
    "global, local:WINDOW, chunked:SIZE, dilated:WINDOW:STEP, prefix:TOKENS, or a pattern of a module that --plugin "
    "names; first:TOKENS is added to one of them by +; commas separate the patterns of layers"
)
EMPTY = "a pattern is empty: drop a comma, or write global"

MAX_TOKENS, MAX_LAYERS = 10**9, 10**4
"""Limits of the numbers of a pattern."""


@dataclass(frozen=True)
class AttentionPattern:
    """Positions that a query attends to, in the same document.

    A key is visible if it is not after the query and meets all of ``window``, ``dilation``, ``chunk`` and ``plugin``
    that are set, or is one of the ``first`` tokens. The tokens of the ``prefix`` are visible to all. The default is
    plain causal attention.
    """

    # Tokens before a query that it can see, itself included; None for all.
    window: int | None = None
    # Keys at a multiple of this distance only.
    dilation: int = 1
    # Tokens of the blocks of the sequence that do not attend to each other; None for one block.
    chunk: int | None = None
    # Name of a plugin's rule.
    plugin: str | None = None
    # First tokens of the sequence that all later ones can see too (global tokens, attention sinks).
    first: int = 0
    # First tokens of the sequence that see each other in both directions (prefix-LM).
    prefix: int = 0

    @classmethod
    def parse(cls, text: str) -> AttentionPattern:
        """Parse the pattern of a layer, such as ``local:4096+first:4``.

        Raises:
            ValueError: for anything else.
        """
        fields: dict[str, Any] = {}
        for part in text.split("+"):
            name, *numbers = part.strip().split(":")
            if not part.strip():
                raise ValueError(f"{text!r}: a pattern is missing before or after +" if "+" in text else EMPTY)
            known = (name, partial(dict, plugin=name)) if name in registered(KIND) else _FORMS.get(name)
            if known is None:
                raise ValueError(f"{part!r} is no attention pattern: {SYNTAX}")
            form, fields_of = known
            if len(numbers) != form.count(":"):
                takes = counted(form.count(":"), "number") if ":" in form else "no number"
                raise ValueError(f"{part!r}: {name} takes {takes}: {form}")
            if not all(_is_number(number, MAX_TOKENS) for number in numbers):
                raise ValueError(f"{part!r}: sizes are whole numbers in digits, from 1 to {MAX_TOKENS}")
            more = fields_of(*map(int, numbers))
            if fields.keys() & more.keys():
                raise ValueError(f"{text!r}: {part!r} contradicts an earlier part of the pattern")
            fields |= more
        pattern = cls(**fields)
        if fields.keys() == {"first"} and "+" not in text:
            raise ValueError(f"{text!r} is added to another pattern: write local:WINDOW+first:{pattern.first}")
        if pattern.first and replace(pattern, first=0, prefix=0) == CAUSAL:
            raise ValueError(f"{text!r}: first:{pattern.first} changes nothing, as all earlier tokens are visible")
        return pattern

    @property
    def rule(self) -> Callable[[Any, Any], Any] | None:
        """The function of the plugin, or None; with it too, a token sees itself."""
        if self.plugin is None:
            return None
        rule = registered(KIND)[self.plugin]
        return lambda query, key: rule(query, key) | (query == key)

    @property
    def only_window(self) -> bool:
        """True for causal attention with or without a window, which fused kernels compute."""
        return replace(self, window=None) == CAUSAL

    @property
    def only_distance(self) -> bool:
        """True if it does not matter where in the sequence a query and a key are."""
        return replace(self, window=None, dilation=1) == CAUSAL

    def allows(self, query: Any, key: Any) -> Any:
        """Return whether tokens at positions ``query`` see those at ``key``; numbers, or tensors that broadcast."""
        distance = query - key
        near = distance >= 0
        if self.window is not None:
            near = near & (distance < self.window)
        if self.dilation > 1:
            near = near & (distance % self.dilation == 0)
        if self.chunk is not None:
            near = near & (query // self.chunk == key // self.chunk)
        if self.rule is not None:
            near = near & self.rule(query, key)
        if self.first:
            near = near | ((distance >= 0) & (key < self.first))
        return near | (key < self.prefix) if self.prefix else near

    def mean_keys(self, length: int) -> float:
        """Return the keys that a token of a sequence sees on average, itself counted as half a key.

        It is ``s/2`` for plain causal attention. A plugin's rule is ignored, because that would take the whole mask.
        """
        window, chunk = (min(limit or length, length) for limit in (self.window, self.chunk))

        def pairs(tokens: int) -> int:
            """Return the visible pairs of a query and a key in a chunk of so many tokens."""
            near = min(tokens, window)  # these see all before them
            steps, rest = divmod(near, self.dilation)
            seen = self.dilation * steps * (steps + 1) // 2 + rest * (steps + 1)
            return seen + (tokens - near) * ((window - 1) // self.dilation + 1)

        def pairs_of_keys(stop: int) -> int:
            """Return those with a key before ``stop``: in a chunk, the first keys have as many as the last queries."""
            chunks, keys = divmod(stop, chunk)
            size = min(chunk, length - chunks * chunk)
            return chunks * pairs(chunk) + pairs(size) - pairs(size - keys)

        prefix = min(self.prefix, length)
        shown = max(prefix, min(self.first, length))  # keys that all later tokens see, and of the prefix all tokens
        added = shown * length - (shown * (shown - 1) - prefix * (prefix - 1)) // 2
        return (pairs_of_keys(length) - pairs_of_keys(shown) + added) / length - 0.5

    def full_keys(self, length: int) -> int:
        """Return the keys that a token sees in a sequence when those after it count too: the largest number."""
        near = min(length, self.chunk or length, self.window or length)
        return min((near - 1) // self.dilation + 1 + max(self.first, self.prefix), length)


CAUSAL = AttentionPattern()
"""Every token sees itself and all before it."""

_FORMS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "global": ("global", dict),
    "local": ("local:WINDOW", lambda window: {"window": window}),
    "chunked": ("chunked:SIZE", lambda chunk: {"chunk": chunk}),
    "dilated": ("dilated:WINDOW:STEP", lambda window, step: {"window": (window - 1) * step + 1, "dilation": step}),
    "prefix": ("prefix:TOKENS", lambda prefix: {"prefix": prefix}),
    "first": ("first:TOKENS", lambda first: {"first": first}),
}
"""How the pattern of a name is written, and the fields that its numbers set."""


def _is_number(text: str, most: int) -> bool:
    return text.isdecimal() and len(text) < 12 and 0 < int(text) <= most


def parse_layers(text: str) -> tuple[AttentionPattern, ...]:
    """Parse the patterns of ``--attention-pattern``: of layers 0, 1, ..., repeated as often as needed.

    ``local:1024*5,global`` is five local layers, then a global one.

    Raises:
        ValueError: for anything else.
    """
    texts = split_layers(text)
    parsed = {each: AttentionPattern.parse(each) for each in dict.fromkeys(texts)}
    return tuple(parsed[each] for each in texts)


def split_layers(text: str) -> list[str]:
    """Return the text of each layer's pattern.

    Raises:
        ValueError: for a number after ``*`` that is none.
    """
    texts: list[str] = []
    for part in text.split(","):
        pattern, star, count = (each.strip() for each in part.partition("*"))
        if star and not _is_number(count, MAX_LAYERS):
            raise ValueError(f"{part!r}: after * is a number of layers from 1 to {MAX_LAYERS}")
        texts += [pattern] * (int(count) if star else 1)
    return texts


def format_layers(patterns: Sequence[str]) -> str:
    """Return the shortest text of ``--attention-pattern`` for one pattern per layer: at most one period, with ``*``."""
    periods = range(1, len(patterns) + 1)
    period = next(n for n in periods if all(a == b for a, b in zip(patterns, patterns[n:])))
    runs = ((pattern, len([*run])) for pattern, run in groupby(patterns[:period]))
    return ",".join(f"{pattern}*{count}" if count > 1 else pattern for pattern, count in runs)
