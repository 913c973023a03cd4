"""Conversations, and prompts with completions, from JSON lines to token ids with a mask of what the model answers.

A line is ``{"messages": [{"role": ..., "content": ...}, ...]}``, which the tokenizer's chat template renders, or
``{"prompt": ..., "completion": ...}``, which are concatenated. The answers are the assistant's turns or the completion,
including what ends them. For preferences a line is ``{"prompt": ..., "chosen": ..., "rejected": ...}``, texts or
messages, also without ``prompt`` where both begin with it. Lines that cannot be used are collected with file and line;
nothing is truncated.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.run import DataConfig
from megatron.config.text import counted
from megatron.data.dataset_info import tokenizer_files_to_save, tokenizer_from_flags
from megatron.data.errors import DataError
from megatron.data.index_cache import IndexCache, Tables
from megatron.data.preprocess.corpus import (
    BadDocumentError,
    parse_record,
    split_lines,
    split_lines_file,
    text_of,
)
from megatron.data.tokenizers.base import convert_library_errors
from megatron.data.tokenizers.huggingface import load_with_transformers

END_WITHIN = 3  # last ids of an answer among which a special token ends it
MAX_REPORTED = 5  # lines that cannot be used and are named one by one

BadLine = tuple[int, int, str]
"""Number of the file, line from 1 on, and what is wrong with it: a sentence without its subject."""


class Conversation(NamedTuple):
    """A conversation as ids."""

    ids: NDArray[np.int32]  # int32 [n]
    answers: NDArray[np.uint8]  # uint8 [n], 1 for the ids of an answer, else 0


class ChatTokenizer:
    """The tokenizer of a run with its chat template, as ``transformers`` applies it."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Build it from the files of a Hugging Face folder, by name.

        Raises:
            DataError: if ``transformers`` cannot read them.
        """
        with convert_library_errors(DataError, "transformers cannot read the tokenizer", "--tokenizer-model DIR"):
            self._tokenizer: Any = load_with_transformers(files)

    def _template(self, options: Mapping[str, Any]) -> str:
        """Return the chat template; with several, the one that transformers chooses by the options."""
        if self._tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template", "--chat-template FILE.jinja")
        with convert_library_errors(DataError, "the chat template is unknown", "--chat-template FILE.jinja"):
            template: str = self._tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        return template

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation; raise BadDocumentError if the template refuses it."""
        self._template(options)
        with convert_library_errors(BadDocumentError, " does not fit the chat template"):
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        return text

    def conversation(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Conversation:
        """Return a rendered conversation with the answers of the assistant, including the tokens that end a turn.

        A template with ``{% generation %}`` marks them. Otherwise an answer is what its message adds to the messages
        before it and the generation prompt.

        Args:
            messages: at least one.
            options: ``tools``, and other names of the template.

        Raises:
            BadDocumentError: if the template refuses the conversation, or renders the messages before an answer
                differently once it follows.
        """
        if re.search(r"\{%-?\s*generation\s*-?%\}", self._template(options)):
            with convert_library_errors(BadDocumentError, " does not fit the chat template"):
                found = self._tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
                )
            return _conversation(found["input_ids"], found["assistant_masks"])
        text, eos = self._render(messages, options), self._tokenizer.eos_token or ""
        spans = []
        for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            after = self._render(messages[: i + 1], options)
            before = self._render(messages[: i or 1], options, add_generation_prompt=True)
            if i == 0:  # transformers renders no empty conversation: the prompt is what follows the message
                prompt = before[shared_length(before, after) :]
                before = after[: after.find(prompt) + len(prompt)] if prompt in after else ""
            if not text.startswith(after):  # it may end every conversation
                after = after.removesuffix(eos)
            if not (text.startswith(before) and text.startswith(after)):
                seen = f": the chat template renders the messages up to {i + 1} differently within the conversation"
                raise BadDocumentError(f"{seen}; mark answers in it with {{% generation %}}")
            spans.append((len(before), len(after)))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answers = [
            any(begin < stop and start < end for start, stop in spans) for begin, end in encoded["offset_mapping"]
        ]
        return _conversation(encoded["input_ids"], answers)

    def completions(self, prompt: str, *completions: str) -> list[Conversation]:
        """Return a prompt with each of its completions, ended by the tokenizer's ``eos_token``, encoded as one text."""
        eos = self._tokenizer.eos_token or ""
        texts = [prompt + each + ("" if each.endswith(eos) else eos) for each in completions]
        return _after_prompt(*(self._tokenizer(text)["input_ids"] for text in (prompt, *texts)))

    def continuations(
        self, prompt: Sequence[Mapping[str, Any]], *answers: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[Conversation]:
        """Return a rendered prompt with each of its answers; raise BadDocumentError if the template refuses one."""
        texts = [self._render(prompt, options, add_generation_prompt=True)]
        texts += [self._render([*prompt, *each], options) for each in answers]
        return _after_prompt(*(self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts))


def _after_prompt(prompt: Sequence[int], *texts: Sequence[int]) -> list[Conversation]:
    """Return texts as conversations whose answers begin where the ids of one of them differ from the prompt's."""
    same = min(shared_length(prompt, ids) for ids in texts)
    return [_conversation(ids, [int(i >= same) for i in range(len(ids))]) for ids in texts]


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the number of first items that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _conversation(ids: Sequence[int], answers: Sequence[int]) -> Conversation:
    return Conversation(np.array(ids, dtype=np.int32), np.array(answers, dtype=np.uint8))


def encode_record(tokenizer: ChatTokenizer, record: Mapping[str, object]) -> Conversation:
    """Return the conversation of a JSON object.

    Raises:
        BadDocumentError: if it is none, or has no answer.
    """
    if "messages" in record:
        found = tokenizer.conversation(_messages(record["messages"]), **_template_options(record))
    elif "prompt" in record and "completion" in record:
        (found,) = tokenizer.completions(text_of(record, "prompt"), text_of(record, "completion"))
        if not text_of(record, "completion").strip():
            raise BadDocumentError(" has an empty completion")
    else:
        has = ", ".join(list(record)[:8]) or "none"
        raise BadDocumentError(f" has neither 'messages' nor 'prompt' and 'completion'; its keys: {has}")
    if not found.answers[1:].any():
        raise BadDocumentError(" has no assistant turn" if "messages" in record else " has no token to complete")
    return found


def encode_pair(tokenizer: ChatTokenizer, record: Mapping[str, object]) -> tuple[list[Conversation], list[float]]:
    """Return the preferred and the other answer of a JSON object, each after the prompt, and their reference log-probs.

    Texts or messages without a prompt begin with it: it is what they have in common, as in TRL.

    Raises:
        BadDocumentError: if it is no pair, or an answer is empty.
    """
    missing = [key for key in ("chosen", "rejected") if key not in record]
    if missing:
        raise BadDocumentError(f" has no '{missing[0]}'; its keys: {', '.join(list(record)[:8]) or 'none'}")
    if isinstance(record["chosen"], str):
        chosen, rejected = text_of(record, "chosen"), text_of(record, "rejected")
        prompt = text_of(record, "prompt") if "prompt" in record else None
        if prompt is None:
            prompt = chosen[: shared_length(chosen, rejected)].removesuffix(" ")
            chosen, rejected = chosen.removeprefix(prompt), rejected.removeprefix(prompt)
        found = tokenizer.completions(prompt, chosen, rejected)
    else:
        turns = [_messages(record[key], key) for key in ("chosen", "rejected")]
        if isinstance(record.get("prompt"), list):
            before, shared = _messages(record["prompt"], "prompt", answered=False), 0
        else:  # a prompt that is a text repeats what the messages begin with
            shared = shared_length(*turns)
            before = turns[0][:shared]
        found = tokenizer.continuations(before, *(each[shared:] for each in turns), **_template_options(record))
    for key, conversation in zip(("chosen", "rejected"), found):
        if not conversation.answers[1:].any():
            raise BadDocumentError(f": '{key}' has no token to answer with")
    logps = [logp for key in ("chosen", "rejected") if isinstance(logp := record.get(f"ref_{key}_logps"), float | int)]
    if len(logps) == 1 or not np.isfinite(logps).all():
        raise BadDocumentError(": 'ref_chosen_logps' and 'ref_rejected_logps' are not both finite numbers")
    return found, logps or [np.nan, np.nan]


def _template_options(record: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of the chat template in a JSON object: ``tools`` and ``chat_template_kwargs``, as in TRL."""
    tools, options = record.get("tools"), record.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        with convert_library_errors(BadDocumentError, ": 'tools' is not JSON"):
            tools = json.loads(tools)
    if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or ()):
        raise BadDocumentError(": 'tools' is not an array of objects")
    if not isinstance(options, dict):
        raise BadDocumentError(": 'chat_template_kwargs' is not an object")
    return {"tools": tools, **options}


def _messages(value: object, key: str = "messages", answered: bool = True) -> list[Mapping[str, Any]]:
    """Return the messages of a conversation; raise BadDocumentError unless they have roles and contents."""
    if not isinstance(value, list):
        raise BadDocumentError(f": '{key}' is not an array")
    if not value:
        raise BadDocumentError(" has no messages" if key == "messages" else f": '{key}' has no messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise BadDocumentError(f": message {number} is not an object")
        try:
            role, content = text_of(message, "role"), text_of(message, "content")
        except BadDocumentError as error:
            raise BadDocumentError(f": message {number}{error.seen}") from error
        if not role or not content.strip():
            raise BadDocumentError(f": message {number} has an empty {'content' if role else 'role'}")
    if answered and not any(message["role"] == "assistant" for message in value):
        raise BadDocumentError(" has no assistant turn")
    return value


class Conversations(NamedTuple):
    """The conversations of some files."""

    ids: NDArray[np.int32]  # int32 [total], of all lines one after the other
    answers: NDArray[np.uint8]  # uint8 [total], 1 for the ids of an answer, else 0
    starts: NDArray[np.int64]  # int64 [n], where each conversation begins
    stops: NDArray[np.int64]  # int64 [n], where it ends
    source: str  # names of the files
    notes: tuple[str, ...] = ()  # on lines that are left out
    per_line: int = 1  # conversations that share a sample: 2 for preferences, first the preferred one
    # int64 [lines, 2], number of the file and line from 1 on
    places: NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)
    logps: NDArray[np.float64] | None = None  # float64 [n], of the answers of preferences under the reference model

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions ``[n]`` that each takes in a sample: one fewer than its ids, as the last is only a label."""
        return self.stops - self.starts - 1


def load_conversations(data: DataConfig, split: str, seq_length: int, pairs: bool = False) -> Conversations:
    """Return the conversations of the ``train`` or ``valid`` files.

    Args:
        data: names the files, the tokenizer and the chat template.
        split: name of the split.
        seq_length: tokens per sample; a longer conversation, or pair of them, cannot be used.
        pairs: lines are preferences.

    Raises:
        DataError: if a file cannot be read, or with ``bad_samples`` error if a line cannot be used; else if none can.
    """
    paths = data.chat_data_path if split == "train" else data.valid_chat_data_path
    try:
        versions = tuple(Path(path).stat().st_mtime_ns for path in paths)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    tables, notes = _load(data, paths, versions, pairs)
    per_line = 2 if pairs else 1
    starts, stops, logps = (
        x.reshape(-1, per_line) for x in (tables["starts"][:-1], tables["starts"][1:], tables["logps"])
    )
    bad = [tuple(each) for each in json.loads(tables["bad"].tobytes())]
    positions = (stops - starts - 1).sum(1)
    fits = positions <= seq_length
    for i in np.flatnonzero(~fits):
        file, line = tables["places"][i].tolist()
        bad.append((file, line, f" takes {positions[i]:,} positions, and a sample has {seq_length:,}"))
    lacking = np.isnan(logps[fits]).any(1)
    if lacking.any() and not lacking.all():
        file, line = tables["places"][fits][np.flatnonzero(lacking)[0]].tolist()
        seen = f"{paths[file]}:{line} has no ref_chosen_logps and ref_rejected_logps, which other lines have"
        raise DataError(seen, "python tasks/finetune/precompute.py")
    if bad:
        seen = _describe_bad(bad, paths, int(fits.sum()))
        if data.bad_samples == "error" or not fits.any():
            raise DataError(seen, *BAD_FIXES)
        notes = (*notes, f"left out: {seen}")
    return Conversations(
        tables["ids"],
        tables["answers"],
        starts[fits].flatten(),
        stops[fits].flatten(),
        ", ".join(paths),
        notes,
        per_line,
        tables["places"][fits],
        None if lacking.any() else logps[fits].flatten(),
    )


BAD_FIXES = ("correct or remove these lines", "--bad-samples skip")


def _describe_bad(bad: Sequence[BadLine], paths: Sequence[str], good: int) -> str:
    """Return a sentence that counts the lines that cannot be used, and names the first ones."""
    named = [f"{paths[file]}:{line}{seen}" for file, line, seen in sorted(bad)[:MAX_REPORTED]]
    more = f"; and {len(bad) - len(named):,} more" if len(bad) > len(named) else ""
    return f"{len(bad):,} of {counted(good + len(bad), 'conversation')} cannot be used: {'; '.join(named)}{more}"


def end_ids(data: DataConfig, conversations: Conversations) -> list[int]:
    """Return the ids at which a trained model has ended its answer.

    They are the special token that most answers end with, possibly before white space, and the end of a document.
    """
    tokenizer = tokenizer_from_flags(data, None)
    if tokenizer is None:
        return []
    last = np.flatnonzero(np.diff(conversations.answers.astype(np.int8), append=0) < 0)  # of each answer
    near = conversations.ids[np.maximum(last - np.arange(END_WITHIN)[:, np.newaxis], 0)]
    ends = near[np.isin(near, [*tokenizer.special_ids.values()])]
    usual = [int(np.bincount(ends).argmax())] if 2 * len(ends) > len(last) else []
    return list(dict.fromkeys([*usual, tokenizer.eod]))


@lru_cache(maxsize=4)
def _load(
    data: DataConfig, paths: tuple[str, ...], versions: tuple[int, ...], pairs: bool
) -> tuple[Tables, tuple[str, ...]]:
    """Return the tables of `encode_files`, and notes on the cache; once per process for the same files."""
    files = tokenizer_files_to_save(data, None)
    if not files:
        fix = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
        raise DataError(f"{', '.join(paths)}: conversations need a tokenizer that transformers can read", fix)
    if data.data_cache_path is None:
        return encode_files(paths, ChatTokenizer(files), pairs), ()
    facts = {
        "files": [_digest(path) for path in paths],
        "tokenizer": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
        "transformers": version("transformers"),
        "per_line": 2 if pairs else 1,
    }
    cache = IndexCache(data.data_cache_path, {"chat": _check_tables})
    tables = cache.tables("chat", facts, lambda: encode_files(paths, ChatTokenizer(files), pairs), ", ".join(paths))
    return tables, tuple(cache.notes)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_files(paths: Sequence[str], tokenizer: ChatTokenizer, pairs: bool = False) -> Tables:
    """Return the ids of all lines that hold a conversation, and the other lines.

    Returns:
        ``ids``, ``answers`` and ``logps`` (NaN where there is none) as in `Conversations`; ``starts`` int64
        ``[n + 1]``; ``places`` int64 ``[lines, 2]``, the number of the file and the line from 1 on; ``bad``, JSON of
        the number of the file, the line and what is wrong.

    Raises:
        DataError: if a file cannot be read, or the tokenizer has no chat template.
    """
    found, logps, places = list[Conversation](), list[float](), list[tuple[int, int]]()
    bad = list[BadLine]()
    for number, path in enumerate(paths):
        for line, content in numbered_lines(Path(path)):
            try:
                if isinstance(content, BadDocumentError):
                    raise content
                record = parse_record(content, Path(path))
                more, of_more = (
                    encode_pair(tokenizer, record) if pairs else ([encode_record(tokenizer, record)], [np.nan])
                )
                found += more
                logps += of_more
                places.append((number, line))
            except BadDocumentError as error:
                bad.append((number, line, error.seen))
    if not found:
        what = _describe_bad(bad, paths, 0) if bad else f"{', '.join(paths)}: there are no conversations"
        keys = "'prompt', 'chosen' and 'rejected'" if pairs else "'messages', or 'prompt' and 'completion',"
        raise DataError(what, f"one JSON object with {keys} per line")
    return {
        "ids": np.concatenate([each.ids for each in found]),
        "answers": np.concatenate([each.answers for each in found]),
        "logps": np.array(logps, dtype=np.float64),
        "starts": np.cumsum([0, *(len(each.ids) for each in found)]),
        "places": np.array(places),
        "bad": np.frombuffer(json.dumps(bad).encode(), dtype=np.uint8),
    }


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes | BadDocumentError]]:
    """Yield the number and the content of each line that is not blank; an error for one that cannot be read.

    Raises:
        DataError: if there is no such file, or it cannot be read.
    """
    before = 0
    try:
        for block in split_lines_file(path):
            lines = split_lines(block.read())
            yield from ((number, line) for number, line in enumerate(lines, before + 1) if line.strip())
            before += len(lines) + bool(block.damage)
            if block.damage:
                yield before, BadDocumentError(*block.damage)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_tables(facts: Mapping[str, Any], tables: Tables) -> None:
    """Raise ValueError unless the tables have the types and shapes of `encode_files`."""
    starts, ids, answers = (tables[name] for name in ("starts", "ids", "answers"))
    dtypes = {"ids": "int32", "answers": "uint8", "starts": "int64", "places": "int64", "bad": "uint8"}
    for name, dtype in {**dtypes, "logps": "float64"}.items():
        if tables[name].dtype != dtype:
            raise ValueError(f"{name} has type {tables[name].dtype}, not {dtype}")
    conversations = len(tables["logps"])
    if tables["places"].shape != (conversations // facts["per_line"], 2) or len(ids) != len(answers):
        raise ValueError("the tables have different lengths")
    if len(starts) != conversations + 1 or starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 2).any():
        raise ValueError("starts is not the partition of ids")
