"""Text to ids and back, and text that appears while its ids do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from megatron.data.errors import DataError
from megatron.data.tokenizers.huggingface import TOKENIZER, end_of_text
from megatron.inference.errors import InferenceError

REPLACEMENT = "\ufffd"


class Codec(Protocol):
    """How prompts become ids, and ids text."""

    end: int | None
    """The id that ends a document, if any does."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""


class TextCodec:
    """A tokenizer.json, used as `transformers` uses it: its special tokens frame a prompt and are not printed."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """From the files of a tokenizer, by name.

        Raises:
            InferenceError: when one of them cannot be understood.
        """
        try:
            self._tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
        except Exception as error:  # the library raises no other kind
            raise InferenceError(f"{TOKENIZER} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        try:
            self.end = end_of_text(files, self._tokenizer.get_vocab(with_added_tokens=True))
        except DataError as error:
            raise InferenceError(str(error)) from error

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with what the tokenizer puts before and after it."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class IdCodec:
    """For a model that comes without a tokenizer: prompts and continuations are ids, written in decimal."""

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        """The numbers in the text.

        Raises:
            InferenceError: when a word is not a number.
        """
        words = text.split()
        wrong = next((word for word in words if not word.isascii() or not word.isdecimal()), None)
        if wrong is not None:
            seen = f"the model came without a tokenizer, so prompts are ids with blanks between, not '{wrong[:40]}'"
            raise InferenceError(seen, '--prompt "17 4 99"')
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids in decimal."""
        return " ".join(map(str, ids))


def open_codec(files: Mapping[str, bytes]) -> Codec:
    """The tokenizer that a model's ``files`` hold; without one, ids are the text.

    Raises:
        InferenceError: when a file is there and cannot be understood.
    """
    return TextCodec(files) if TOKENIZER in files else IdCodec()


class TextStream:
    """Text of ids that come one by one: characters appear once all their bytes are there.

    What :meth:`push` and :meth:`flush` return is, joined, what follows the prompt in the text of all ids.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int]) -> None:
        self._codec, self._ids = codec, list(prompt)
        # Ids are decoded together with the last ones whose text is out: it may depend on what is before it.
        self._context, self._shown = 0, len(self._ids)

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._hidden()
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def flush(self) -> str:
        """The rest, be it complete or not."""
        return self._show(self._hidden())

    def _hidden(self) -> str:
        ids = self._ids[self._context :]
        before = self._codec.decode(ids[: self._shown - self._context])
        return self._codec.decode(ids)[len(before) :]

    def _show(self, text: str) -> str:
        if text:
            self._context, self._shown = self._shown, len(self._ids)
        return text
