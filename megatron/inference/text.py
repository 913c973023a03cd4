"""Encode prompts, decode token IDs, and decode incrementally while tokens are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import TOKENIZER, end_of_text
from megatron.inference.errors import InferenceError

REPLACEMENT = "\ufffd"


class Codec(Protocol):
    """Converts text to token IDs and back."""

    end: int | None  # end-of-document token, if there is one

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs."""


class TextCodec:
    """A tokenizer.json, used as in `transformers`: special tokens are added to prompts and skipped in decoding."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Read the tokenizer from its files, given by name."""
        try:
            self._tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
        except Exception as error:  # the library raises plain Exception
            raise InferenceError(f"{TOKENIZER} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        try:
            self.end = end_of_text(files, self._tokenizer.get_vocab(with_added_tokens=True))
        except DataError as error:
            raise InferenceError(str(error)) from error

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a prompt with the tokenizer's special tokens."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs; invalid UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class IdCodec:
    """For models without a tokenizer: prompts and continuations are decimal token IDs."""

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """Return the numbers in the text."""
        words = text.split()
        wrong = next((word for word in words if not word.isascii() or not word.isdecimal()), None)
        if wrong is not None:
            seen = f"the model has no tokenizer, so a prompt is token ids separated by spaces, not '{wrong[:40]}'"
            raise InferenceError(seen, '--prompt "17 4 99"')
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the IDs in decimal."""
        return " ".join(map(str, ids))


def open_codec(files: Mapping[str, bytes]) -> Codec:
    """Return the codec of the tokenizer in a model's ``files``, or of decimal IDs without a tokenizer."""
    return TextCodec(files) if TOKENIZER in files else IdCodec()


class TextStream:
    """Decodes tokens one by one; a character is returned once all its bytes are there.

    The concatenated results of :meth:`push` and :meth:`flush` are the text of all IDs after the prompt.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int]) -> None:
        self._codec = codec
        self._ids = list(prompt)
        # New IDs are decoded together with the last returned ones, because their text may depend on them.
        self._context_start = 0
        self._returned = len(self._ids)

    def push(self, token: int) -> str:
        """Add a token and return the new text; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._pending_text()
        return "" if text.endswith(REPLACEMENT) else self._mark_returned(text)

    def flush(self) -> str:
        """Return the remaining text, even if a character is incomplete."""
        return self._mark_returned(self._pending_text())

    def _pending_text(self) -> str:
        ids = self._ids[self._context_start :]
        context = self._codec.decode(ids[: self._returned - self._context_start])
        return self._codec.decode(ids)[len(context) :]

    def _mark_returned(self, text: str) -> str:
        if text:
            self._context_start = self._returned
            self._returned = len(self._ids)
        return text
