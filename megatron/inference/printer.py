"""Print several continuations in order while they are generated together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TextIO

from megatron.inference.text import Codec, TextStream


class Printer:
    """Writes prompts and continuations in order; the first unfinished continuation is printed as it grows.

    Args:
        out: output stream.
        codec: decodes the tokens.
        texts: texts of the prompts.
        prompts: token IDs of the prompts.
        hidden: tokens that are not printed.
        live: whether to print text before its continuation is complete.

    """

    def __init__(
        self,
        out: TextIO,
        codec: Codec,
        texts: Sequence[str],
        prompts: Sequence[Sequence[int]],
        hidden: Collection[int],
        live: bool,
    ) -> None:
        self._out = out
        self._texts = texts
        self._hidden = hidden
        self._live = live
        self._streams = [TextStream(codec, prompt) for prompt in prompts]
        self._unwritten = ["" for _ in texts]
        self._complete = [False for _ in texts]
        self._current = 0
        self._write_prompt()

    def token(self, prompt: int, token: int, last: bool) -> None:
        """Add the next token of a prompt."""
        stream = self._streams[prompt]
        self._unwritten[prompt] += "" if token in self._hidden else stream.push(token)
        if last:
            self._unwritten[prompt] += stream.flush()
            self._complete[prompt] = True
        self._write()

    def _write(self) -> None:
        while self._current < len(self._texts):
            complete = self._complete[self._current]
            if complete or self._live:
                self._out.write(self._unwritten[self._current] + "\n" * complete)
                self._unwritten[self._current] = ""
            if not complete:
                break
            self._current += 1
            self._write_prompt()
        self._out.flush()

    def _write_prompt(self) -> None:
        """Write the current prompt, with its number if there are several."""
        if self._current == len(self._texts):
            return
        if len(self._texts) > 1:
            self._out.write("\n" * (self._current > 0) + f"--- {self._current + 1} of {len(self._texts)}\n")
        self._out.write(self._texts[self._current])
        self._out.flush()
