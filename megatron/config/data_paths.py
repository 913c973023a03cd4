"""Which files a run reads: Megatron-LM's ways to say it, made into one blend of token files for each split.

Nothing but the two small argument files is read here.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.names import APART, unique_names
from megatron.config.problems import Problem, UserError, did_you_mean
from megatron.config.run import DataConfig
from megatron.config.settings import SETTINGS

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"
"""How ``--data-path`` is cut where nobody says it."""

WAYS: tuple[tuple[str, ...], ...] = (
    ("data_path",),
    ("train_data_path", "valid_data_path", "test_data_path"),
    ("data_args_path",),
    ("per_split_data_args_path",),
    ("mock_data",),
)
"""Fields that say where tokens come from. Those of one way go together, and a run uses one way."""

MOST_SOURCES = 32766
"""A blend's table holds the number of each sample's source in 16 bits, and Megatron-LM leaves the last one out."""

NUMBER = r"\d+(\.\d*)?|\.\d+"
CALLED = {"validation": "valid", "val": "valid", "dev": "valid", "eval": "valid"}
"""What others call a split."""

MOST_WORDS = 16  # of a list that is written out in a fix


@dataclass(frozen=True)
class Blend:
    """Datasets that are read together.

    Attributes:
        prefixes: paths of their files, without ``.bin``.
        weights: as they were said, above 0 and not normalised, one for each prefix; None where none were said: each
            dataset then counts by its size, and a single one is read by itself.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Source:
    """Where the samples of a split come from.

    Attributes:
        blend: the datasets.
        split: weights that cut each dataset into its train, validation and test parts; None for whole files.
    """

    blend: Blend
    split: str | None = None


@dataclass(frozen=True)
class Words:
    """A list of prefixes and weights as it was said.

    Attributes:
        words: of the list.
        key: the flag, or the name of the list in a file; empty where the list is the whole file.
        file: where it was read; None for a flag.
    """

    words: tuple[str, ...]
    key: str
    file: str | None = None

    @property
    def origin(self) -> str:
        """Where it was said."""
        return ", ".join(filter(None, (self.file, self.key)))

    def instead(self, words: Sequence[str]) -> tuple[str, ...]:
        """A fix that says ``words`` instead; none where that would be too long to paste, or there are none."""
        if not 0 < len(words) <= MOST_WORDS:
            return ()
        if self.file is None:
            return (f"{self.key} {shlex.join(words)}",)
        text = " ".join(words)
        return (f"write in {self.file}: " + (f'"{self.key}": "{text}"' if self.key else text),)


def data_sources(data: DataConfig) -> dict[str, Source]:
    """Where each split's samples come from.

    Returns:
        By ``train``, ``valid`` (or ``valid:NAME`` for each of several validation sets) and ``test``, in this order,
        those that there are data for: with ``data_path`` those whose weight in the split is above 0. Nothing for
        generated tokens.

    Raises:
        UserError: for what cannot be understood, all at once.

    """
    found = list(way_problems(data))
    if found:
        raise UserError(found)
    lists = word_lists(data)
    found = [problem for words in lists.values() for problem in blend_problems(words)]
    found += split_problems(data) if "all" in lists else []
    found += name_problems(data, lists)
    if found:
        raise UserError(found)
    sources: dict[str, Source] = {}
    for split in SPLITS:
        said, cut = _of_split(split, lists, data)
        if said is None:
            continue
        blend = read_blend(said.words)
        if split == "valid" and data.multiple_validation_sets:
            names = data.validation_set_names or unique_names(blend.prefixes)
            sources |= {f"valid:{n}": Source(Blend((p,)), cut) for n, p in zip(names, blend.prefixes, strict=True)}
        elif cut is None and len(blend.prefixes) == 1:
            sources[split] = Source(Blend(blend.prefixes))  # whatever its weight, it is all there is
        else:
            sources[split] = Source(blend, cut)
    return sources


def _of_split(split: str, lists: Mapping[str, Words], data: DataConfig) -> tuple[Words | None, str | None]:
    """The list that a split reads, None without one, and how its prefixes are cut."""
    if "all" not in lists:
        return lists.get(split), None
    text = split_text(data)
    weight = dict(zip(SPLITS, split_weights(text)))[split]
    return (lists["all"] if weight > 0 else None), text


def flag_of_files(data: DataConfig) -> str | None:
    """The flag that names the files which a run trains on; None for generated tokens."""
    flags = (SETTINGS[name].flag for way in WAYS for name in way if name != "mock_data" and getattr(data, name))
    return next(flags, None)


def way_problems(data: DataConfig) -> Iterator[Problem]:
    """Whether tokens come from one place: the files that one way names, or a generator."""
    said = [[name for name in way if getattr(data, name) not in (None, (), False)] for way in WAYS]
    used = [names for names in said if names]
    if not used:
        yield Problem("E501", "there is no data", ("--data-path PREFIX", "--mock-data"))
    elif len(used) > 1:
        flags = [SETTINGS[names[0]].flag for names in used]
        named = ", ".join(flags[:-1]) + f" and {flags[-1]}"
        each = "both" if len(used) == 2 else "all"
        others = ([name for names in used if names is not kept for name in names] for kept in used)
        fixes = tuple(" ".join(SETTINGS[name].spell(SETTINGS[name].default) for name in some) for some in others)
        yield Problem("E501", f"{named} {each} say where tokens come from", (*_trained_on(data, used), *fixes))


def _trained_on(data: DataConfig, used: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The fix for files to evaluate on beside ``data_path``: that one is to train on, whole."""
    if len(used) != 2 or used[0] != ["data_path"] or used[1][0] not in ("valid_data_path", "test_data_path"):
        return ()
    whole = Words(data.data_path, SETTINGS["train_data_path"].flag).instead(data.data_path)
    return tuple(f"{fix} {SETTINGS['data_path'].spell(())}" for fix in whole)


def word_lists(data: DataConfig) -> dict[str, Words]:
    """The lists of words by split, or by ``all`` where one list is cut by ``split``; empty ones are left out.

    Raises:
        UserError: when an argument file cannot be read.

    """
    if data.data_args_path is not None:
        return {"all": Words(_argument_file(data.data_args_path), "", data.data_args_path)}
    if data.per_split_data_args_path is not None:
        return _per_split(data.per_split_data_args_path)
    said = {"all": data.data_path} | {split: getattr(data, f"{split}_data_path") for split in SPLITS}
    flags = {split: f"--{split}-data-path" for split in SPLITS} | {"all": "--data-path"}
    return {split: Words(words, flags[split]) for split, words in said.items() if words}


def _argument_file(path: str) -> tuple[str, ...]:
    """The words of a file of weights and prefixes."""
    form, text = "WEIGHT PREFIX WEIGHT PREFIX ...", _read(path, "--data-args-path")
    words = text.split()
    without_comments = re.sub(r"(?m)(?<!\S)#.*$", "", text).split()
    if words != without_comments:
        sentence = f"--data-args-path {path} has a '#', which begins no comment: all its words are weights and prefixes"
        raise _unusable(sentence, " ".join(without_comments) if 0 < len(without_comments) <= MOST_WORDS else form)
    if not words:
        raise _unusable(f"--data-args-path {path} is empty", form)
    return tuple(words)


def _per_split(path: str) -> dict[str, Words]:
    """The lists in a JSON file of three of them."""
    flag, form = f"--per-split-data-args-path {path}", '{"train": ["PREFIX"], "valid": ["PREFIX"], "test": null}'
    text = _read(path, "--per-split-data-args-path")
    try:
        pairs = json.loads(text, parse_float=str, parse_int=str, parse_constant=str, object_pairs_hook=list)
    except ValueError as error:
        raise _unusable(f"{flag} is not JSON: {error}", form) from None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise _unusable(f"{flag} holds no object of train, valid and test", form)
    found = [problem for key, value in pairs for problem in _entry_problems(flag, key, value)]
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    found += [Problem("E507", f"{flag}: {key} is there twice", (f"write {key} once",)) for key in twice]
    if found:
        raise UserError(found)
    lists = {key: tuple(value.split() if isinstance(value, str) else value or ()) for key, value in pairs}
    if not any(lists.values()):
        raise _unusable(f"{flag} names no files", form)
    return {key: Words(words, key, path) for key, words in lists.items() if words}


def _entry_problems(flag: str, key: str, value: Any) -> Iterator[Problem]:
    """What is wrong with one entry of that file."""
    if key not in SPLITS:
        meant = CALLED.get(key.lower()) or did_you_mean(key, SPLITS)
        fixes = (f"call it {meant}",) if meant else (f"take {key} out",)
        yield Problem("E507", f"{flag}: there is no split {key!r}, only train, valid and test", fixes)
    elif value is not None and not isinstance(value, str) and not _is_list_of_words(value):
        sentence = f"{flag}: {key} is neither text nor a list of weights and prefixes"
        yield Problem("E507", sentence, (f'write in it: "{key}": ["PREFIX"]',))


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _read(path: str, flag: str) -> str:
    if not path:
        raise UserError([Problem("E507", f"{flag} '' names no file; a shell variable may not be set")])
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no file of text in UTF-8"
        raise UserError([Problem("E507", f"{flag} {path} cannot be read: {reason}")]) from None


def _unusable(sentence: str, form: str) -> UserError:
    return UserError([Problem("E507", sentence, (f"write in it: {form}",))])


def as_weight(word: str) -> float | None:
    """The number that a word is, as Megatron-LM reads it; None for a prefix."""
    try:
        return float(word)
    except ValueError:
        return None


def read_blend(words: Sequence[str]) -> Blend:
    """The blend that a list means: (weight, prefix) pairs if there are as many words and the weights are numbers.

    An odd number of words are prefixes, and so are words none of which stands as a number where a weight would. The
    list must have no `blend_problems`.
    """
    numbers = [as_weight(word) for word in words[::2]]
    weights = tuple(number for number in numbers if number is not None)
    if len(words) % 2 or not weights:
        return Blend(tuple(word.strip() for word in words))
    return Blend(tuple(word.strip() for word in words[1::2]), weights)


def blend_problems(said: Words) -> Iterator[Problem]:
    """What is wrong with a list of weights and prefixes, short of the files."""
    words, where = said.words, said.origin
    numbers = [as_weight(word) for word in words[::2]]
    if len(words) % 2 == 0 and len({number is None for number in numbers}) > 1:
        odd = next(word for word, number in zip(words[::2], numbers) if number is None)
        sentence = f"{where}: {odd} stands in the place of a weight; every prefix has one before it, or none has"
        yield Problem("E502", sentence, said.instead(_paired(words)))
        return
    blend = read_blend(words)
    if not all(blend.prefixes):
        rest = said.instead(_without(said, {i for i, prefix in enumerate(blend.prefixes) if not prefix}))
        yield Problem("E502", f"{where} has an empty prefix; a shell variable may not be set", rest)
    if len(blend.prefixes) > MOST_SOURCES:
        sentence = f"{where} has {len(blend.prefixes):,} prefixes; a blend holds at most {MOST_SOURCES:,}"
        yield Problem("E502", sentence, ("python tools/merge_datasets.py",))
    if blend.weights is not None:
        yield from _weight_problems(said, blend.prefixes, blend.weights)


def _paired(words: Sequence[str]) -> list[str]:
    """The prefixes, each behind its weight where there are as many of these, in the order they have."""
    prefixes = [word for word in words if as_weight(word) is None]
    weights = [word for word in words if as_weight(word) is not None]
    if len(weights) != len(prefixes):
        return prefixes
    return [word for pair in zip(weights, prefixes) for word in pair]


def _weight_problems(said: Words, prefixes: Sequence[str], weights: Sequence[float]) -> Iterator[Problem]:
    bad = {i for i, weight in enumerate(weights) if not 0 < weight < math.inf}
    shown = ", ".join(f"{prefixes[i]} the weight {said.words[2 * i]}" for i in sorted(bad)[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    if bad:
        rest = said.instead(_without(said, bad)) or said.instead(prefixes)
        yield Problem("E502", f"{said.origin} gives {shown}{more}; weights are finite and above 0", rest)
    elif math.isinf(sum(weights)):
        yield Problem("E502", f"{said.origin}: the weights add up to more than any number", said.instead(prefixes))


def _without(said: Words, places: Collection[int]) -> list[str]:
    """The words of a list without the prefixes at some places, and their weights."""
    blend = read_blend(said.words)
    width = 1 if blend.weights is None else 2
    kept = (i for i in range(len(blend.prefixes)) if i not in places)
    return [word for i in kept for word in said.words[width * i : width * (i + 1)]]


def split_text(data: DataConfig) -> str:
    """The weights that cut ``data_path``, as text."""
    return DEFAULT_SPLIT if data.split is None else data.split


def split_problems(data: DataConfig) -> Iterator[Problem]:
    """What is wrong with the weights that cut ``data_path``."""
    try:
        split_weights(split_text(data))
    except ValueError as error:
        yield Problem("E504", f"split {error}", ("--split 969,30,1",))


def split_weights(text: str) -> tuple[float, float, float]:
    """The weights of train, validation and test; those not said are 0.

    Raises:
        ValueError: when ``text`` is not up to three numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) > len(SPLITS) or not all(re.fullmatch(NUMBER, word) for word in words):
        raise ValueError(f"{text!r} is not up to three numbers")
    train, valid, test = ([float(word) for word in words] + [0.0, 0.0])[:3]
    return train, valid, test


def split_shares(text: str) -> tuple[float, float, float]:
    """The `split_weights` over their sum.

    Raises:
        ValueError: when ``text`` is not up to three numbers, or none of them is above 0.
    """
    train, valid, test = split_weights(text)
    total = train + valid + test  # as Megatron-LM adds; Python's sum is compensated from 3.12 on and rounds elsewhere
    if total == 0:
        raise ValueError(f"{text!r} has no weight above 0")
    return train / total, valid / total, test / total


def name_problems(data: DataConfig, lists: Mapping[str, Words]) -> Iterator[Problem]:
    """What is wrong with the names of several validation sets."""
    names, said = data.validation_set_names, lists.get("valid", lists.get("all"))
    if not names or not data.multiple_validation_sets or said is None:
        return
    prefixes = read_blend(said.words).prefixes
    default = ("--validation-set-names " + shlex.join(unique_names(prefixes)),) if len(prefixes) <= MOST_WORDS else ()
    fixes = (*default, "--set data.validation_set_names=null")
    yield from (
        Problem("E506", f"{name!r} cannot name a validation set: a name is one word without ':' and '/'", fixes)
        for name in dict.fromkeys(names)
        if not name or re.search(APART, name)
    )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        yield Problem("E506", f"two validation sets are called {twice[0]}", fixes)
    if len(names) != len(prefixes) and not any(True for _ in blend_problems(said)):
        sentence = f"{_count(len(names), 'name')} for {_count(len(prefixes), 'validation set')} ({said.origin})"
        yield Problem("E506", sentence, fixes)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
