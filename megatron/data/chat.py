"""Conversations, and prompts with completions, from JSON lines to token ids with a mask of what the model answers.

A line is ``{"messages": [{"role": ..., "content": ...}, ...]}``, which the tokenizer's chat template renders, or
``{"prompt": ..., "completion": ...}``, texts or messages, which are concatenated. The answers are the assistant's turns
or the completion, including the token that ends them. For preferences a line is ``{"prompt": ..., "chosen": ...,
"rejected": ...}``, also without ``prompt`` where both begin with it. Lines that cannot be used are collected with file
and line; nothing is truncated.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from megatron.config.data import DataConfig
from megatron.config.text import counted
from megatron.data.chat_rendering import MAX_TEXT, Span, shared_length
from megatron.data.chat_template import OTHER_TEMPLATE, Rendered, TemplateRenderer, template_options
from megatron.data.dataset_info import tokenizer_files_to_save, tokenizer_from_flags
from megatron.data.errors import DataError
from megatron.data.index_cache import IndexCache, Tables
from megatron.data.preprocess.corpus import BadDocumentError, parse_record, split_lines, split_lines_file, text_of
from megatron.data.tokenizers.base import convert_library_errors
from megatron.data.tokenizers.huggingface import load_with_transformers

END_WITHIN = 3  # ids at the end of an answer, or after it, among which a special token ends it
MAX_REPORTED = 5  # lines that cannot be used and are named one by one

BadLine = tuple[int, int, str]
"""Number of the file, line from 1 on, and what is wrong with it: a sentence without its subject."""


class Conversation(NamedTuple):
    """A conversation as ids."""

    ids: NDArray[np.int32]  # int32 [n]
    answers: NDArray[np.uint8]  # uint8 [n], 1 for the ids of an answer, else 0
    ends: NDArray[np.uint8]  # uint8 [n], 1 for the id of an answer that ends it


class ChatTokenizer:
    """The tokenizer of a run with its chat template, as ``transformers`` applies it."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Build it from the files of a Hugging Face folder, by name.

        Raises:
            DataError: if ``transformers`` cannot read them.
        """
        with convert_library_errors(DataError, "transformers cannot read the tokenizer", "--tokenizer-model DIR"):
            self._tokenizer: Any = load_with_transformers(files)
            added = self._tokenizer.added_tokens_decoder
            self._plain = plain_copy(self._tokenizer)
            self._unknown = unknown_ids(self._tokenizer)
        self._markers = frozenset(added)
        self._special = frozenset(number for number, token in added.items() if token.special)
        self._renderer = TemplateRenderer()
        self._is_space = cache(lambda number: not self._decode([number]).strip())

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], answers: bool = False
    ) -> Rendered:
        """Return the text of a conversation with its answers, or with the generation prompt.

        Raises:
            BadDocumentError: if the template refuses it.
            DataError: if there is no template.
        """
        options, templates = dict(options), self._tokenizer.chat_template
        if templates is None:
            raise DataError("the tokenizer has no chat template", OTHER_TEMPLATE)
        name, tools = options.pop("chat_template", None), options.get("tools")
        names = [*templates] if isinstance(templates, dict) else []
        if name is not None and name not in names:
            has = ", ".join(map(str, names)) or "one without a name"
            raise BadDocumentError(f": 'chat_template' is not the name of a template of the tokenizer, which has {has}")
        with convert_library_errors(DataError, "the chat template is unknown", OTHER_TEMPLATE):
            template: str = self._tokenizer.get_chat_template(name, tools)
        special = self._tokenizer.special_tokens_map
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **special, **options}
        eos = self._tokenizer.eos_token or ""
        return self._renderer.render(
            {
                "template": template,
                "variables": variables,
                "messages": [dict(message) for message in messages],
                "answers": answers,
                "eos": eos,
            }
        )

    def conversation(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Conversation:
        """Return a rendered conversation with the answers of the assistant, and the tokens that end them.

        A template with ``{% generation %}`` marks them. Otherwise an answer is what its message adds to the messages
        before it and the generation prompt. A token belongs to an answer if one of its characters does. If an answer
        has no special token at its end, the one that follows it ends it, such as the marker of the next role; after a
        marked answer, only one that closes the turn.

        Raises:
            BadDocumentError: if the template refuses the conversation, or renders the messages before an answer
                differently once it follows, or the tokens of the answers do not decode to their text.
        """
        text, spans, marked = self._render(messages, options, answers=True)
        ids = self._encode(text, add_special_tokens=False)
        plain = None if self._plain is None else self._plain.encode(text, add_special_tokens=False)
        if plain is not None and plain.ids == ids:
            answers = self._checked(text, ids, np.array(plain.offsets, dtype=np.int64).reshape(-1, 2), spans)
        else:
            answers = self._aligned(text, ids, spans)
        return self._with_ends(ids, answers, marked)

    def _encode(self, text: str, **options: Any) -> list[int]:
        """Return the ids of a text; raise BadDocumentError if it is too long, or not Unicode."""
        grown = len(text)
        if not text.isascii():
            pieces = (text[i : i + 4096] for i in range(0, len(text), 4096))
            grown = max(grown, sum(len(unicodedata.normalize("NFKD", piece)) for piece in pieces))
        if grown > MAX_TEXT:
            what = "characters" if grown == len(text) else "characters in its decomposed form (NFKD)"
            raise BadDocumentError(f" is a text of {grown:,} {what}; the limit is {MAX_TEXT:,}")
        with convert_library_errors(BadDocumentError, " cannot be encoded"):
            text.encode()
            ids: list[int] = self._tokenizer(text, **options)["input_ids"]
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        with convert_library_errors(BadDocumentError, " cannot be decoded"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _checked(
        self, text: str, ids: Sequence[int], offsets: NDArray[np.int64], spans: Sequence[Span]
    ) -> NDArray[np.uint8]:
        """Return the mask of the tokens with a character in ``spans``, whose text must be that of the spans.

        ``offsets`` are the characters of each token ``[n, 2]``.
        """
        inside = np.zeros(len(text) + 2, dtype=np.int64)
        for begin, end in spans:
            inside[begin + 1 : end + 1] = 1
        begins, stops = offsets[:, 0], np.maximum(offsets[:, 1], np.minimum(offsets[:, 0] + 1, len(text)))
        covered = np.cumsum(inside)
        answers = (covered[stops] > covered[begins]).astype(np.uint8)
        missing = inside[1:-1].copy()
        for first, last in runs_of(answers):
            begin, end = int(begins[first:last].min()), int(stops[first:last].max())
            missing[begin:end] = 0
            if not self._unknown.isdisjoint(ids[first:last]):
                continue  # the unknown token has no text
            self._compare(self._decode(ids[first:last]), text[begin:end])
        self._compare("", "".join(text[i] for i in np.flatnonzero(missing)))
        return answers

    def _compare(self, decoded: str, text: str) -> None:
        """Raise BadDocumentError unless a text is that of an answer, apart from what the tokenizer does not keep."""
        if decoded != text and self._kept(decoded) != self._kept(text):
            seen = f": the tokens of an answer are {decoded[:40]!r}, but its text is {text[:40]!r}"
            raise BadDocumentError(f"{seen}; the tokenizer does not say where its tokens are")

    def _kept(self, text: str) -> str:
        """Return what encoding and decoding keep of a text in any tokenizer."""
        normalizer = None if self._plain is None else self._plain.normalizer
        return "".join((text if normalizer is None else normalizer.normalize_str(text)).replace("▁", " ").split())

    def _aligned(self, text: str, ids: Sequence[int], spans: Sequence[Span]) -> NDArray[np.uint8]:
        """Return the same mask for a tokenizer without offsets, from the ids of the texts before each edge."""
        answers = np.zeros(len(ids), dtype=np.uint8)
        for begin, end in spans:
            first = shared_length(self._encode(text[:begin], add_special_tokens=False), ids)
            head = self._encode(text[:end], add_special_tokens=False)
            last = shared_length(head, ids)
            answers[first : last + (last < len(head))] = 1
            whole, inner = self._decode(ids[first : last + (last < len(head))]), self._decode(ids[first + 1 : last])
            wanted = self._kept(text[begin:end])
            if wanted not in self._kept(whole) or self._kept(inner) not in wanted:
                self._compare(whole, text[begin:end])
        return answers

    def _with_ends(self, ids: Sequence[int], answers: NDArray[np.uint8], marked: bool = False) -> Conversation:
        """Return a conversation with the tokens that end its answers, which may follow them.

        With ``marked`` answers, only a token that closes the turn is added.
        """
        ends = np.zeros_like(answers)
        runs = runs_of(answers)
        for (first, last), (following, _) in zip(runs, [*runs[1:], (len(ids), 0)]):
            found = self._first_special(range(last - 1, first - 1, -1), ids, self._special)
            if found is None:
                found = self._first_special(range(last, following), ids, self._markers)
                if found is not None and marked and not self._closes(range(found, len(ids)), ids):
                    found = None
                if found is not None:
                    answers[last : found + 1] = 1
            if found is not None:
                ends[found] = 1
        return Conversation(np.array(ids, dtype=np.int32), answers, ends)

    def _first_special(self, places: Sequence[int], ids: Sequence[int], wanted: Collection[int]) -> int | None:
        """Return the first of a few places that has a wanted id, with white space alone before it."""
        for i in places[:END_WITHIN]:
            if ids[i] in wanted:
                return i
            if not self._is_space(ids[i]):
                break
        return None

    def _closes(self, rest: Sequence[int], ids: Sequence[int]) -> bool:
        """Return True if the first token of the rest is the end of a turn: no text of the next role follows it."""
        after = rest[1:]
        at_end = len(after) <= END_WITHIN and all(self._is_space(ids[i]) for i in after)
        closing = at_end or self._first_special(after, ids, self._markers) is not None
        return closing or ids[rest[0]] == self._tokenizer.eos_token_id

    def completions(self, prompt: str, *completions: str) -> list[Conversation]:
        """Return a prompt with each of its completions, ended by the tokenizer's ``eos_token``, encoded as one text."""
        eos = self._tokenizer.eos_token or ""
        texts = [prompt + each + ("" if each.endswith(eos) else eos) for each in completions]
        return self._after_prompt(*(self._encode(text) for text in (prompt, *texts)))

    def continuations(
        self, prompt: Sequence[Mapping[str, Any]], *answers: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[Conversation]:
        """Return a rendered prompt with each of its answers; raise BadDocumentError if the template refuses one."""
        texts = [self._render(prompt, {**options, "add_generation_prompt": True}).text]
        texts += [self._render([*prompt, *each], options).text for each in answers]
        return self._after_prompt(*(self._encode(text, add_special_tokens=False) for text in texts))

    def _after_prompt(self, prompt: Sequence[int], *texts: Sequence[int]) -> list[Conversation]:
        """Return texts as conversations whose answers begin where the ids of one of them differ from the prompt's."""
        same = min(shared_length(prompt, ids) for ids in texts)
        masks = (np.array([int(i >= same) for i in range(len(ids))], dtype=np.uint8) for ids in texts)
        return [self._with_ends(ids, mask) for ids, mask in zip(texts, masks)]


def plain_copy(tokenizer: Any) -> Tokenizer | None:
    """Return the tokenizer without post-processor, which may trim white space from offsets; None if it has no offsets.

    It gives the same ids where no special tokens are added.
    """
    if not tokenizer.is_fast:
        return None
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.post_processor = None
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    return copy


def unknown_ids(tokenizer: Any) -> set[int]:
    """Return the ids that stand for any text. Byte-level tokenizers have none, and may name ``eos_token`` so."""
    found = {tokenizer.unk_token_id}
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        model = json.loads(backend.to_str())["model"]
        found |= {model.get("unk_id"), backend.token_to_id(model.get("unk_token") or "")}
    return found - {None, tokenizer.eos_token_id}


def runs_of(mask: NDArray[np.uint8]) -> list[Span]:
    """Return where each run of ones begins and ends."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def encode_record(tokenizer: ChatTokenizer, record: Mapping[str, object]) -> Conversation:
    """Return the conversation of a JSON object.

    Raises:
        BadDocumentError: if it is none, or has no answer.
    """
    record = _in_roles(record)
    if "messages" in record:
        found = tokenizer.conversation(_messages(record["messages"]), **template_options(record))
    elif "prompt" in record and "completion" in record:
        if isinstance(record["prompt"], list):
            prompt = _messages(record["prompt"], "prompt", answered=False)
            answer = _messages(record["completion"], "completion")
            (found,) = tokenizer.continuations(prompt, answer, **template_options(record))
        else:
            (found,) = tokenizer.completions(text_of(record, "prompt"), text_of(record, "completion"))
            if not text_of(record, "completion").strip():
                raise BadDocumentError(" has an empty completion")
    else:
        has = ", ".join(list(record)[:8]) or "none"
        raise BadDocumentError(f" has neither 'messages' nor 'prompt' and 'completion'; its keys: {has}")
    if not found.answers[1:].any():
        lacks = "answer in the text that the chat template makes of it" if "messages" in record else "token to complete"
        raise BadDocumentError(f" has no {lacks}")
    return found


def encode_pair(tokenizer: ChatTokenizer, record: Mapping[str, object]) -> tuple[list[Conversation], list[float]]:
    """Return the preferred and the other answer of a JSON object, each after the prompt, and their reference log-probs.

    Texts or messages without a prompt begin with it: it is what they have in common, as in TRL.

    Raises:
        BadDocumentError: if it is no pair, or an answer is empty.
    """
    record = _in_roles(record)
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
        if not before:
            raise BadDocumentError(": 'chosen' and 'rejected' begin with different messages, and there is no 'prompt'")
        found = tokenizer.continuations(before, *(each[shared:] for each in turns), **template_options(record))
    for key, conversation in zip(("chosen", "rejected"), found):
        if not conversation.answers[1:].any():
            raise BadDocumentError(f": '{key}' has no token to answer with")
    logps = [logp for key in ("chosen", "rejected") if isinstance(logp := record.get(f"ref_{key}_logps"), float | int)]
    if len(logps) == 1 or not np.isfinite(logps).all():
        raise BadDocumentError(": 'ref_chosen_logps' and 'ref_rejected_logps' are not both finite numbers")
    return found, logps or [np.nan, np.nan]


def _in_roles(record: Mapping[str, object]) -> dict[str, Any]:
    """Return a JSON object with the names of OpenAI: ``conversations`` are messages, ``from`` a role, as in TRL."""
    names = {"conversations": "messages", "from": "role", "value": "content"}

    def renamed(value: Mapping[str, object], *keys: str) -> dict[str, Any]:
        return {names[key] if key in keys and names[key] not in value else key: each for key, each in value.items()}

    found = renamed(record, "conversations")
    for key in ("messages", "prompt", "completion", "chosen", "rejected"):
        if isinstance(found.get(key), list):
            found[key] = [renamed(each, "from", "value") if isinstance(each, dict) else each for each in found[key]]
    return found


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
            _check_message(message)
        except BadDocumentError as error:
            raise BadDocumentError(f": message {number}{error.seen}") from error
    answers = [message for message in value if message["role"] == "assistant"]
    trained = [message for message in answers if message.get("weight") != 0]
    if answered and not trained:
        raise BadDocumentError(" has no assistant turn" + (" whose 'weight' is not 0" if answers else ""))
    if answered and key != "messages" and len(trained) < len(answers):
        raise BadDocumentError(f": '{key}' has an answer of 'weight' 0, which counts in 'messages' alone")
    return value


def _check_message(message: Mapping[str, Any]) -> None:
    """Raise BadDocumentError unless a message has a role, and a content or calls of tools."""
    if not text_of(message, "role"):
        raise BadDocumentError(" has an empty role")
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise BadDocumentError(": 'weight' is not 0 or 1")
    if weight == 1 and message["role"] != "assistant":
        raise BadDocumentError(
            f" of role {message['role'][:40]!r} has 'weight' 1: only answers of the assistant are trained"
        )
    calls, content = message.get("tool_calls"), message.get("content")
    if not isinstance(calls, list | None) or not all(isinstance(call, dict) for call in calls or ()):
        raise BadDocumentError(": 'tool_calls' is not an array of objects")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        others = [part.get("type") for part in content if part.get("type") != "text"]
        if others:
            raise BadDocumentError(f": 'content' has a part of type {str(others[0])[:40]!r}; the only type is 'text'")
        texts = [text_of(part, "text") for part in content]
    elif content is None and calls:
        return
    else:
        texts = [text_of(message, "content")]
    if not calls and message["role"] not in ("system", "tool") and not "".join(texts).strip():
        raise BadDocumentError(" has an empty content")


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
    ends: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)  # uint8 [total], 1 for the ids that end an answer

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions ``[n]`` that each takes in a sample: one fewer than its ids, as the last is only a label."""
        return self.stops - self.starts - 1


def load_conversations(data: DataConfig, split: str, seq_length: int, pairs: bool = False) -> Conversations:
    """Return the conversations of the ``train`` or ``valid`` files, in ``pairs`` if their lines are preferences.

    A conversation or pair that is longer than ``seq_length`` cannot be used.

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
    found = Conversations(
        tables["ids"],
        tables["answers"],
        starts[fits].flatten(),
        stops[fits].flatten(),
        ", ".join(paths),
        notes,
        per_line,
        tables["places"][fits],
        None if lacking.any() else logps[fits].flatten(),
        tables["ends"],
    )
    return found._replace(notes=(*notes, *_note_endless_answers(found, paths)))


def _note_endless_answers(conversations: Conversations, paths: Sequence[str]) -> list[str]:
    """Return a note on the answers that no token ends, if there are any."""
    owners, ended = answers_of(conversations)
    if ended.all():
        return []
    file, line = conversations.places[owners[~ended][0] // conversations.per_line].tolist()
    return [
        f"{(~ended).sum():,} of {counted(len(ended), 'answer')} have no special token at their end, the first in "
        f"{paths[file]}:{line}; the model does not learn to stop there"
    ]


BAD_FIXES = ("correct or remove these lines", "--bad-samples skip")


def _describe_bad(bad: Sequence[BadLine], paths: Sequence[str], good: int) -> str:
    """Return a sentence that counts the lines that cannot be used, and names the first ones."""
    named = [f"{paths[file]}:{line}{seen}" for file, line, seen in sorted(bad)[:MAX_REPORTED]]
    more = f"; and {len(bad) - len(named):,} more" if len(bad) > len(named) else ""
    return f"{len(bad):,} of {counted(good + len(bad), 'conversation')} cannot be used: {'; '.join(named)}{more}"


def answers_of(conversations: Conversations) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the conversation of each answer, and whether a special token ends it, ``[n]`` each."""
    answers = conversations.answers > 0
    begins = answers & ~np.concatenate([[False], answers[:-1]])
    begins[conversations.starts] = answers[conversations.starts]
    places = np.flatnonzero(begins)
    ended = np.zeros(len(places) + 1, dtype=np.bool_)
    ended[np.cumsum(begins)[conversations.ends > 0] - 1] = True
    owners = np.searchsorted(conversations.starts, places, side="right") - 1
    kept = (owners >= 0) & (places < conversations.stops[owners])  # others do not fit into a sample
    return owners[kept], ended[:-1][kept]


def end_ids(data: DataConfig, conversations: Conversations) -> list[int]:
    """Return the ids at which a trained model has ended its answer: those that end answers, and the end of a document.

    An id that is found more often within answers than at their ends is none of them.
    """
    tokenizer = tokenizer_from_flags(data, None)
    if tokenizer is None:
        return []
    used = np.zeros(len(conversations.ids), dtype=np.bool_)
    for start, stop in zip(conversations.starts, conversations.stops):
        used[start:stop] = True
    ids, answers, ends = (t[used] for t in (conversations.ids, conversations.answers, conversations.ends))
    kinds, counts = np.unique(ids[ends > 0], return_counts=True)
    within = ids[(answers > 0) & (ends == 0)]
    found = [(-count, kind) for kind, count in zip(kinds.tolist(), counts.tolist()) if count >= (within == kind).sum()]
    return list(dict.fromkeys([*(kind for _, kind in sorted(found)), tokenizer.eod]))


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
        "masks": "ends and weights of answers",
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
        ``ids``, ``answers``, ``ends`` and ``logps`` (NaN where there is none) as in `Conversations`; ``starts`` int64
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
        "ends": np.concatenate([each.ends for each in found]),
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
    dtypes = {"ids": "int32", "answers": "uint8", "ends": "uint8", "starts": "int64", "places": "int64", "bad": "uint8"}
    for name, dtype in {**dtypes, "logps": "float64"}.items():
        if tables[name].dtype != dtype:
            raise ValueError(f"{name} has type {tables[name].dtype}, not {dtype}")
    conversations = len(tables["logps"])
    if tables["places"].shape != (conversations // facts["per_line"], 2) or not len(ids) == len(answers) == len(
        tables["ends"]
    ):
        raise ValueError("the tables have different lengths")
    if len(starts) != conversations + 1 or starts[0] != 0 or starts[-1] != len(ids) or (np.diff(starts) < 2).any():
        raise ValueError("starts is not the partition of ids")
