"""The data of a run: Megatron-LM's options, converted to one blend of token files per split.

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
from pathlib import Path, PurePath
from typing import Any

from megatron.config.errors import Problem, UserError
from megatron.config.run import DataConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import counted, did_you_mean

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"
"""The default of ``--split``."""

SOURCE_OPTIONS: tuple[tuple[str, ...], ...] = (
    ("data_path",),
    ("train_data_path", "valid_data_path", "test_data_path"),
    ("data_args_path",),
    ("per_split_data_args_path",),
    ("mock_data",),
)
"""Groups of fields that give the source of tokens. A run uses one group."""

MAX_BLEND_DATASETS = 32766
"""The index of a blend stores each sample's dataset in 16 bits; Megatron-LM does not use the largest value."""

NUMBER = r"\d+(\.\d*)?|\.\d+"
SPLIT_ALIASES = {"validation": "valid", "val": "valid", "dev": "valid", "eval": "valid"}
"""Other names of splits."""

NAME_SEPARATORS = r"[\s:/]+"
"""Characters that dataset names must not contain: they separate names in records, curves and folders."""

MAX_WORDS = 16  # in a list that is written out in a fix


@dataclass(frozen=True)
class Blend:
    """Datasets that are sampled together."""

    prefixes: tuple[str, ...]  # paths of the files, without suffix
    # One above 0 for each prefix, not normalised. None: datasets count by their size, and a single one is read alone.
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class SplitSource:
    """Sources of the samples of one split."""

    blend: Blend
    split: str | None = None  # weights of the train, validation and test parts; None for whole files


@dataclass(frozen=True)
class DataPathArgs:
    """A list of prefixes and weights as it was given."""

    words: tuple[str, ...]
    key: str  # the flag, or the key in a JSON file; empty for a whole file
    file: str | None = None  # None for a flag

    @property
    def origin(self) -> str:
        """The file and key, or the flag, that the list was given in."""
        return ", ".join(filter(None, (self.file, self.key)))

    def replace_with(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return a fix that gives ``words`` instead; none for no words or too many to paste."""
        if not 0 < len(words) <= MAX_WORDS:
            return ()
        if self.file is None:
            return (f"{self.key} {shlex.join(words)}",)
        text = " ".join(words)
        return (f"write in {self.file}: " + (f'"{self.key}": "{text}"' if self.key else text),)


def unique_names(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return a unique name for each prefix: as few of its last path components as tell all prefixes apart.

    Equal names get a number; characters that names must not contain become ``-``.
    """
    paths = [PurePath(prefix) for prefix in prefixes]
    parts = [tuple(re.sub(NAME_SEPARATORS, "-", part) for part in path.parts if part != path.anchor) for path in paths]
    names: list[str] = []
    for length in range(1, max([1, *map(len, parts)]) + 1):
        names = ["-".join(path_parts[-length:]) for path_parts in parts]
        if len(set(names)) == len(set(parts)):
            break
    unique: dict[str, None] = {}
    for name in names:
        numbered = name
        number = 2
        while numbered in unique:
            numbered = f"{name}-{number}"
            number += 1
        unique[numbered] = None
    return tuple(unique)


def data_sources(data: DataConfig) -> dict[str, SplitSource]:
    """Return the sources of each split's samples.

    Returns:
        Keys are ``train``, ``valid`` (or ``valid:NAME`` for each of several validation sets) and ``test``, in this
        order, only those with data: with ``data_path`` those of a weight above 0. Empty for generated tokens.

    Raises:
        UserError: with all problems.
    """
    found = list(source_problems(data))
    if found:
        raise UserError(found)
    lists = data_path_args(data)
    found = [problem for words in lists.values() for problem in blend_problems(words)]
    found += split_problems(data) if "all" in lists else []
    found += name_problems(data, lists)
    if found:
        raise UserError(found)
    sources: dict[str, SplitSource] = {}
    cut = split_text(data) if "all" in lists else None
    for split, weight in zip(SPLITS, split_weights(cut) if cut is not None else (1, 1, 1)):
        paths = lists.get("all", lists.get(split))
        if paths is None or weight == 0:
            continue
        blend = read_blend(paths.words)
        if split == "valid" and data.multiple_validation_sets:
            names = data.validation_set_names or unique_names(blend.prefixes)
            sources |= {f"valid:{n}": SplitSource(Blend((p,)), cut) for n, p in zip(names, blend.prefixes, strict=True)}
        elif cut is None and len(blend.prefixes) == 1:
            sources[split] = SplitSource(Blend(blend.prefixes))  # the only dataset: its weight does not matter
        else:
            sources[split] = SplitSource(blend, cut)
    return sources


def train_data_flag(data: DataConfig) -> str | None:
    """Return the flag that names the files to train on; None for generated tokens."""
    names = (name for group in SOURCE_OPTIONS for name in group if name != "mock_data")
    return next((SETTINGS[name].flag for name in names if getattr(data, name)), None)


def source_problems(data: DataConfig) -> Iterator[Problem]:
    """Yield a problem unless tokens come from exactly one source."""
    given = ([name for name in group if getattr(data, name) not in (None, (), False)] for group in SOURCE_OPTIONS)
    used = [names for names in given if names]
    if not used:
        yield Problem("E501", "there are no data", ("--data-path PREFIX", "--mock-data"))
    elif len(used) > 1:
        *flags, last = (SETTINGS[names[0]].flag for names in used)
        off = {name: SETTINGS[name].spell(SETTINGS[name].default) for names in used for name in names}
        fixes = [" ".join(off[name] for names in used if names is not kept for name in names) for kept in used]
        if used[0] == ["data_path"] and used[1][0] in ("valid_data_path", "test_data_path") and len(used) == 2:
            # evaluation files were given with --data-path: use that for training only
            for_training = DataPathArgs(data.data_path, "--train-data-path").replace_with(data.data_path)
            fixes = [*(f"{fix} {off['data_path']}" for fix in for_training), *fixes]
        each = "both" if len(used) == 2 else "all"
        yield Problem("E501", f"{', '.join(flags)} and {last} {each} give the source of tokens", tuple(fixes))


def data_path_args(data: DataConfig) -> dict[str, DataPathArgs]:
    """Return the nonempty lists by split, or by ``all`` for one list that is cut by ``split``.

    Raises:
        UserError: if an argument file cannot be read.
    """
    if data.data_args_path is not None:
        return {"all": DataPathArgs(_argument_file(data.data_args_path), "", data.data_args_path)}
    if data.per_split_data_args_path is not None:
        return _per_split(data.per_split_data_args_path)
    given = {"all": data.data_path} | {split: getattr(data, f"{split}_data_path") for split in SPLITS}
    flags = {split: f"--{split}-data-path" for split in SPLITS} | {"all": "--data-path"}
    return {split: DataPathArgs(words, flags[split]) for split, words in given.items() if words}


def _argument_file(path: str) -> tuple[str, ...]:
    """Read the words of a ``--data-args-path`` file."""
    form = "WEIGHT PREFIX WEIGHT PREFIX ..."
    text = _read(path, "--data-args-path")
    words = text.split()
    without_comments = re.sub(r"(?m)(?<!\S)#.*$", "", text).split()
    if words != without_comments:
        sentence = f"--data-args-path {path} has a '#', but a list of weights and prefixes cannot have comments"
        raise _unusable(sentence, " ".join(without_comments) if 0 < len(without_comments) <= MAX_WORDS else form)
    if not words:
        raise _unusable(f"--data-args-path {path} is empty", form)
    return tuple(words)


def _per_split(path: str) -> dict[str, DataPathArgs]:
    """Read a ``--per-split-data-args-path`` JSON file."""
    where = f"--per-split-data-args-path {path}"
    form = '{"train": ["PREFIX"], "valid": ["PREFIX"], "test": null}'
    text = _read(path, "--per-split-data-args-path")
    try:
        pairs = json.loads(text, parse_float=str, parse_int=str, parse_constant=str, object_pairs_hook=list)
    except ValueError as error:
        raise _unusable(f"{where} is not JSON: {error}", form) from None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise _unusable(f"{where} must be an object with train, valid and test", form)
    found = [Problem("E507", f"{where}: {rule}", fixes) for pair in pairs for rule, fixes in _entry_problems(*pair)]
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    found += [Problem("E507", f"{where}: {key} occurs twice", (f"write {key} once",)) for key in twice]
    if found:
        raise UserError(found)
    lists = {key: tuple(value.split() if isinstance(value, str) else value or ()) for key, value in pairs}
    if not any(lists.values()):
        raise _unusable(f"{where} contains no prefixes", form)
    return {key: DataPathArgs(words, key, path) for key, words in lists.items() if words}


def _entry_problems(key: str, value: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is wrong with one entry of the JSON file, and fixes."""
    is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
    if key not in SPLITS:
        meant = SPLIT_ALIASES.get(key.lower()) or did_you_mean(key, SPLITS)
        fix = f"call it {meant}" if meant else f"remove {key}"
        yield f"there is no split {key!r}, only train, valid and test", (fix,)
    elif not (is_list or value is None or isinstance(value, str)):
        yield f"{key} must be text or a list of weights and prefixes", (f'write in it: "{key}": ["PREFIX"]',)


def _read(path: str, flag: str) -> str:
    if not path:
        raise UserError([Problem("E507", f"{flag} '' is empty; is a shell variable unset?")])
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text file"
        raise UserError([Problem("E507", f"{flag} {path} cannot be read: {reason}")]) from None


def _unusable(sentence: str, form: str) -> UserError:
    return UserError([Problem("E507", sentence, (f"write in it: {form}",))])


def as_weight(word: str) -> float | None:
    """Return the number that a word is, as Megatron-LM parses it; None for a prefix."""
    try:
        return float(word)
    except ValueError:
        return None


def read_blend(words: Sequence[str]) -> Blend:
    """Parse a list without `blend_problems`.

    An even number of words are (weight, prefix) pairs if the words in the place of weights are numbers. Otherwise
    all are prefixes.
    """
    numbers = [as_weight(word) for word in words[::2]]
    weights = tuple(number for number in numbers if number is not None)
    if len(words) % 2 or not weights:
        return Blend(tuple(word.strip() for word in words))
    return Blend(tuple(word.strip() for word in words[1::2]), weights)


def blend_problems(paths: DataPathArgs) -> Iterator[Problem]:
    """Yield problems of a list of weights and prefixes; files are not checked."""
    words = paths.words
    where = paths.origin
    numbers = [as_weight(word) for word in words[::2]]
    if len(words) % 2 == 0 and len({number is None for number in numbers}) > 1:
        odd = next(word for word, number in zip(words[::2], numbers) if number is None)
        sentence = f"{where}: {odd} is in the place of a weight; give a weight before every prefix, or none"
        prefixes = [word for word in words if as_weight(word) is None]
        weights = [word for word in words if as_weight(word) is not None]
        paired = [word for pair in zip(weights, prefixes) for word in pair]
        yield Problem("E502", sentence, paths.replace_with(paired if len(weights) == len(prefixes) else prefixes))
        return
    blend = read_blend(words)
    if not all(blend.prefixes):
        rest = paths.replace_with(_without(paths, {i for i, prefix in enumerate(blend.prefixes) if not prefix}))
        yield Problem("E502", f"{where} has an empty prefix; is a shell variable unset?", rest)
    if len(blend.prefixes) > MAX_BLEND_DATASETS:
        sentence = f"{where} has {len(blend.prefixes):,} prefixes; a blend holds at most {MAX_BLEND_DATASETS:,}"
        yield Problem("E502", sentence, ("python tools/merge_datasets.py",))
    if blend.weights is not None:
        yield from _weight_problems(paths, blend.prefixes, blend.weights)


def _weight_problems(paths: DataPathArgs, prefixes: Sequence[str], weights: Sequence[float]) -> Iterator[Problem]:
    bad = {i for i, weight in enumerate(weights) if not 0 < weight < math.inf}
    shown = ", ".join(f"{prefixes[i]} the weight {paths.words[2 * i]}" for i in sorted(bad)[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    if bad:
        rest = paths.replace_with(_without(paths, bad)) or paths.replace_with(prefixes)
        yield Problem("E502", f"{paths.origin} gives {shown}{more}; weights must be finite and above 0", rest)
    elif math.isinf(sum(weights)):
        yield Problem("E502", f"{paths.origin}: the sum of the weights overflows", paths.replace_with(prefixes))


def _without(paths: DataPathArgs, places: Collection[int]) -> list[str]:
    """Return the words without the prefixes at ``places``, and without their weights."""
    blend = read_blend(paths.words)
    width = 1 if blend.weights is None else 2
    kept = (i for i in range(len(blend.prefixes)) if i not in places)
    return [word for i in kept for word in paths.words[width * i : width * (i + 1)]]


def split_text(data: DataConfig) -> str:
    """Return the weights that cut ``data_path``, as text."""
    return DEFAULT_SPLIT if data.split is None else data.split


def split_problems(data: DataConfig) -> Iterator[Problem]:
    """Yield problems of the weights that cut ``data_path``."""
    try:
        split_weights(split_text(data))
    except ValueError as error:
        yield Problem("E504", f"split {error}", ("--split 969,30,1",))


def split_weights(text: str) -> tuple[float, float, float]:
    """Parse the weights of train, validation and test; missing ones are 0.

    Raises:
        ValueError: if ``text`` is not up to three numbers.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) > len(SPLITS) or not all(re.fullmatch(NUMBER, word) for word in words):
        raise ValueError(f"{text!r} is not up to three numbers")
    train, valid, test = ([float(word) for word in words] + [0.0, 0.0])[:3]
    return train, valid, test


def split_shares(text: str) -> tuple[float, float, float]:
    """Return the `split_weights` divided by their sum.

    Raises:
        ValueError: if ``text`` is not up to three numbers, or none is above 0.
    """
    train, valid, test = split_weights(text)
    total = train + valid + test  # as Megatron-LM adds; since Python 3.12 sum() rounds differently
    if total == 0:
        raise ValueError(f"{text!r} has no weight above 0")
    return train / total, valid / total, test / total


def name_problems(data: DataConfig, lists: Mapping[str, DataPathArgs]) -> Iterator[Problem]:
    """Yield problems of the names of several validation sets."""
    names = data.validation_set_names
    paths = lists.get("valid", lists.get("all"))
    if not names or not data.multiple_validation_sets or paths is None:
        return
    prefixes = read_blend(paths.words).prefixes
    default = ("--validation-set-names " + shlex.join(unique_names(prefixes)),) if len(prefixes) <= MAX_WORDS else ()
    fixes = (*default, "--set data.validation_set_names=null")
    yield from (
        Problem("E506", f"{name!r} cannot name a validation set: a name is one word without ':' and '/'", fixes)
        for name in dict.fromkeys(names)
        if not name or re.search(NAME_SEPARATORS, name)
    )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        yield Problem("E506", f"two validation sets are named {twice[0]}", fixes)
    if len(names) != len(prefixes) and not any(True for _ in blend_problems(paths)):
        sentence = f"{counted(len(names), 'name')} for {counted(len(prefixes), 'validation set')} ({paths.origin})"
        yield Problem("E506", sentence, fixes)
