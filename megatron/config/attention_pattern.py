"""Attention patterns: which earlier tokens a token attends to, layer by layer.

The text of ``--attention-pattern`` is parsed here, and the rule applied to positions: plain numbers, or arrays and
tensors of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.plugins import registered

KIND = "attention_pattern"
"""Kind of the plugins that add patterns: functions ``(query, key) -> allowed`` of int64 tensors that broadcast."""

SYNTAX = (
    "global, local:WINDOW, chunked:SIZE, dilated:WINDOW:STEP, prefix:TOKENS, or a plugin's pattern; first:TOKENS is "
    "added to one of them by +; commas separate the patterns of layers"
)


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
        pattern = cls()
        for part in text.split("+"):
            name, *numbers = part.strip().split(":")
            if name in registered(KIND) and not numbers:
                pattern = replace(pattern, plugin=name)
                continue
            form = _FORMS.get(name)
            if form is None or len(numbers) != form[0]:
                raise ValueError(f"{part!r} is no attention pattern: {SYNTAX}")
            if not all(number.isdecimal() and int(number) > 0 for number in numbers):
                raise ValueError(f"{part!r}: sizes of attention patterns are positive numbers of tokens")
            pattern = replace(pattern, **form[1](*map(int, numbers)))
        if pattern.first and replace(pattern, first=0, prefix=0) == CAUSAL:
            raise ValueError(f"{text!r}: first:{pattern.first} changes nothing, as all earlier tokens are visible")
        return pattern

    @property
    def rule(self) -> Callable[[Any, Any], Any] | None:
        """The function of the plugin, or None."""
        return None if self.plugin is None else registered(KIND)[self.plugin]

    @property
    def only_window(self) -> bool:
        """True for causal attention with or without a window, which fused kernels compute."""
        return replace(self, window=None) == CAUSAL

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

        Closed form for one condition: ``s/2``; ``w - w²/2s`` with a window (a dilation divides it); ``c/2`` in blocks
        of ``c``. The first tokens and a prefix are added where nothing else shows them. A plugin's rule counts as
        plain causal attention, because only the whole mask could be counted.
        """
        window = min(self.window or length, length)
        keys = (window - window**2 / (2 * length)) / self.dilation
        if self.chunk is not None:
            keys = min(keys, min(self.chunk, length) / 2)
        first, prefix = (min(tokens, length) for tokens in (self.first, self.prefix))
        return min(keys + first, length / 2 + first / 2) + prefix**2 / (2 * length)


CAUSAL = AttentionPattern()
"""Every token sees itself and all before it."""

_FORMS: dict[str, tuple[int, Callable[..., dict[str, Any]]]] = {
    "global": (0, dict),
    "local": (1, lambda window: {"window": window}),
    "chunked": (1, lambda chunk: {"chunk": chunk}),
    "dilated": (2, lambda window, step: {"window": (window - 1) * step + 1, "dilation": step}),
    "prefix": (1, lambda prefix: {"prefix": prefix}),
    "first": (1, lambda first: {"first": first}),
}
"""Numbers that follow a name, and the fields they set."""


def parse_layers(text: str) -> tuple[AttentionPattern, ...]:
    """Parse the patterns of ``--attention-pattern``: of layers 0, 1, ..., repeated as often as needed.

    ``local:1024*5,global`` is five local layers, then a global one.

    Raises:
        ValueError: for anything else.
    """
    patterns: list[AttentionPattern] = []
    for part in text.split(","):
        pattern, star, count = part.partition("*")
        if star and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"{part!r}: the number of layers after * is a positive number")
        patterns += [AttentionPattern.parse(pattern)] * (int(count) if star else 1)
    return tuple(patterns)
