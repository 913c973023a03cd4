"""Several texts that grow at once, shown one after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TextIO

from megatron.inference.text import Codec, TextStream


class Printer:
    """Writes each prompt and what follows it; the text whose turn it is appears while it grows.

    Args:
        out: where to write.
        codec: of the texts.
        texts: the prompts.
        prompts: their ids.
        hidden: tokens that are not shown.
        live: whether text appears before it is complete.
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
        self._out, self._texts, self._hidden, self._live = out, texts, hidden, live
        self._streams = [TextStream(codec, prompt) for prompt in prompts]
        self._unwritten, self._complete = ["" for _ in texts], [False for _ in texts]
        self._turn = 0
        self._begin()

    def token(self, prompt: int, token: int, last: bool) -> None:
        """Take the next token of a prompt."""
        stream = self._streams[prompt]
        self._unwritten[prompt] += "" if token in self._hidden else stream.push(token)
        if last:
            self._unwritten[prompt] += stream.flush()
            self._complete[prompt] = True
        self._write()

    def _write(self) -> None:
        while self._turn < len(self._texts):
            complete = self._complete[self._turn]
            if complete or self._live:
                self._out.write(self._unwritten[self._turn] + "\n" * complete)
                self._unwritten[self._turn] = ""
            if not complete:
                break
            self._turn += 1
            self._begin()
        self._out.flush()

    def _begin(self) -> None:
        """The prompt whose turn it is, under its number if there are several."""
        if self._turn == len(self._texts):
            return
        if len(self._texts) > 1:
            self._out.write("\n" * (self._turn > 0) + f"--- {self._turn + 1} of {len(self._texts)}\n")
        self._out.write(self._texts[self._turn])
        self._out.flush()
