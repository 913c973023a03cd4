"""Text of prompts and continuations: tokenizers, incremental decoding, and printing in order."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TextIO

from megatron.config.files import parse_json
from megatron.config.model import ModelConfig
from megatron.config.text import LONGEST_SENTENCE, clipped, printable
from megatron.convert.huggingface.config import CONFIG_FILE, build_config_json
from megatron.convert.tokenizer_files import GENERATION_CONFIG_FILE, MODEL_SUFFIX, TOKENIZER_FILES
from megatron.data.errors import DataError
from megatron.data.tokenizers.base import convert_library_errors
from megatron.data.tokenizers.huggingface import TOKENIZER_JSON, find_eod_id, load_with_transformers, parse_tokenizer


class InferenceError(ValueError):
    """A request that cannot be fulfilled; the message states the problem and fixes."""

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(clipped(seen, LONGEST_SENTENCE) + ("\n  fix: " + " | ".join(fixes) if fixes else ""))


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
            self._tokenizer, ids = parse_tokenizer(files[TOKENIZER_JSON])
        except ValueError as error:
            raise InferenceError(f"{TOKENIZER_JSON} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        try:
            self.end = find_eod_id(files, ids)
        except DataError as error:
            raise InferenceError(str(error)) from error

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a prompt with the tokenizer's special tokens."""
        with convert_library_errors(InferenceError, "the tokenizer cannot encode this prompt"):
            ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs; invalid UTF-8 becomes U+FFFD."""
        with convert_library_errors(InferenceError, "the tokenizer cannot decode these ids"):
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
    return TextCodec(files) if TOKENIZER_JSON in files else IdCodec()


def stop_ids(files: Mapping[str, bytes], codec: Codec) -> frozenset[int]:
    """Return the tokens that end a text, from generation_config.json, else config.json, else the tokenizer."""
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        try:
            named = parse_json(files.get(name, b"{}")).get("eos_token_id")
            ids = named if isinstance(named, list) else [named]
            if named is not None:
                return frozenset(int(i) for i in ids)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise InferenceError(f"{name}: eos_token_id cannot be read: {error}") from error
    return frozenset() if codec.end is None else frozenset({codec.end})


def load_tokenizer(files: Mapping[str, bytes], model: ModelConfig) -> Any:
    """Return the tokenizer in these files, as ``transformers`` loads it from the model's Hugging Face folder.

    Raises:
        InferenceError: if there is none, or it cannot be read.
    """
    from megatron.convert.huggingface.check import check_tokenizer
    from megatron.convert.huggingface.convert import special_token_ids

    if not any(name in TOKENIZER_FILES or name.endswith(MODEL_SUFFIX) for name in files):
        raise InferenceError("the model has no tokenizer, which texts need", "--tokenizer-model DIR")
    try:
        if CONFIG_FILE not in files:  # of a checkpoint: what its export would hold
            config = build_config_json(model, special=special_token_ids(files, model.vocab))
            files = check_tokenizer(files, config) | {CONFIG_FILE: json.dumps(config).encode()}
        return load_with_transformers(files)
    except Exception as error:  # whatever the class that transformers chooses finds wrong with the files
        raise InferenceError(f"the tokenizer cannot be loaded: {error}", "--tokenizer-model DIR") from error


class IncrementalDecoder:
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


class ContinuationPrinter:
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
        self._shown = printable if out.isatty() else str  # a model may generate what controls a terminal
        self._out = out
        self._texts = texts
        self._hidden = hidden
        self._live = live
        self._streams = [IncrementalDecoder(codec, prompt) for prompt in prompts]
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
                self._out.write(self._shown(self._unwritten[self._current]) + "\n" * complete)
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
        self._out.write(self._shown(self._texts[self._current]))
        self._out.flush()
