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
from itertools import chain, count
from pathlib import PurePath

from megatron.config.data import DataConfig
from megatron.config.errors import Problem, UserError
from megatron.config.files import read_small
from megatron.config.mixture import read_mixture
from megatron.config.settings import SETTINGS
from megatron.config.text import counted, did_you_mean

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"
"""The default of ``--split``."""

SOURCE_OPTIONS: tuple[tuple[str, ...], ...] = (
    ("data_path",),
    ("train_data_path", "data_mixture", "valid_data_path", "test_data_path"),
    ("data_args_path",),
    ("per_split_data_args_path",),
    ("mock_data",),
    ("plugin_dataset",),
    ("chat_data_path",),
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
    unique: list[str] = []
    for name in names:
        numbered = chain([name], (f"{name}-{number}" for number in count(2)))
        unique.append(next(candidate for candidate in numbered if candidate not in unique))
    return tuple(unique)


def data_sources(data: DataConfig) -> dict[str, SplitSource]:
    """Return the sources of each split's samples.

    Returns:
        Keys are ``train``, ``valid`` (or ``valid:NAME`` for each of several validation sets) and ``test``, in this
        order, only those with data: with ``data_path`` those of a weight above 0. Empty for generated tokens.

    Raises:
        UserError: with all problems.
    """
    if found := list(data_problems(data)):
        raise UserError(found)
    lists = data_path_args(data)
    cut = split_text(data) if "all" in lists else None
    sources: dict[str, SplitSource] = {}
    for split, weight in zip(SPLITS, (1, 1, 1) if cut is None else split_weights(cut)):
        paths = lists.get("all", lists.get(split))
        if paths is None or weight == 0:
            continue
        blend = read_blend(paths.words)
        if data.data_mixture is not None and split == "valid" and data.valid_data_path == ():
            valid = read_mixture(data.data_mixture).valid
            sources |= {f"valid:{name}": SplitSource(Blend(source.paths)) for name, source in valid.items()}
        elif split == "valid" and data.multiple_validation_sets:
            names = data.validation_set_names or unique_names(blend.prefixes)
            sources |= {f"valid:{n}": SplitSource(Blend((p,)), cut) for n, p in zip(names, blend.prefixes, strict=True)}
        elif cut is None and len(blend.prefixes) == 1:
            sources[split] = SplitSource(Blend(blend.prefixes))  # the only dataset: its weight does not matter
        else:
            sources[split] = SplitSource(blend, cut)
    return sources


def chat_splits(data: DataConfig) -> tuple[str, ...]:
    """Return the splits that conversations are given for."""
    given = {"train": data.chat_data_path, "valid": data.valid_chat_data_path}
    return tuple(split for split, paths in given.items() if paths)


def data_problems(data: DataConfig) -> Iterator[Problem]:
    """Yield the problems of the data options that show without opening token files."""
    yield from _source_problems(data)
    try:
        split_weights(split_text(data))
    except ValueError as error:
        yield Problem("E504", f"split {error}", ("--split 969,30,1",))
    try:
        lists = data_path_args(data)
    except UserError as error:
        yield from error.problems
        return
    for paths in lists.values():
        yield from blend_problems(paths)
    yield from _name_problems(data, lists)


def train_data_flag(data: DataConfig) -> str | None:
    """Return the flag that names the files to train on; None for generated tokens."""
    names = (name for group in SOURCE_OPTIONS for name in group if name not in ("mock_data", "plugin_dataset"))
    return next((SETTINGS[name].flag for name in names if getattr(data, name)), None)


def _source_problems(data: DataConfig) -> Iterator[Problem]:
    """Yield a problem unless tokens come from exactly one source."""
    given = ([name for name in group if getattr(data, name) not in (None, (), False)] for group in SOURCE_OPTIONS)
    used = [names for names in given if names]
    if not used:
        yield Problem("E501", "there are no data", ("--data-path PREFIX", "--chat-data-path FILE", "--mock-data"))
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
    elif data.data_mixture and data.train_data_path:
        fixes = [SETTINGS[name].spell(SETTINGS[name].default) for name in ("data_mixture", "train_data_path")]
        yield Problem("E501", "--data-mixture and --train-data-path both give the training data", tuple(fixes))


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
    lists = {split: DataPathArgs(words, flags[split]) for split, words in given.items() if words}
    if data.data_mixture is not None:
        mixture = read_mixture(data.data_mixture)
        of_file = {
            split: DataPathArgs(words, split, mixture.path) for split, words in mixture.prefixes.items() if words
        }
        lists = of_file | lists
    return lists


def _argument_file(path: str) -> tuple[str, ...]:
    """Read the words of a ``--data-args-path`` file."""
    form = "WEIGHT PREFIX WEIGHT PREFIX ..."
    text = _read("--data-args-path", path)
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
    text = _read("--per-split-data-args-path", path)
    try:
        pairs = json.loads(text, parse_float=str, parse_int=str, parse_constant=str, object_pairs_hook=list)
    except ValueError as error:
        raise _unusable(f"{where} is not JSON: {error}", form) from None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise _unusable(f"{where} must be an object with train, valid and test", form)
    found: list[tuple[str, str]] = []  # what is wrong, and the fix
    for key, value in pairs:
        is_list = isinstance(value, list) and all(isinstance(word, str) for word in value)
        if key not in SPLITS:
            meant = SPLIT_ALIASES.get(key.lower()) or did_you_mean(key, SPLITS)
            fix = f"call it {meant}" if meant else f"remove {key}"
            found.append((f"there is no split {key!r}, only train, valid and test", fix))
        elif not (is_list or value is None or isinstance(value, str)):
            fix = f'write in it: "{key}": ["PREFIX"]'
            found.append((f"{key} must be text or a list of weights and prefixes", fix))
    twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    found += [(f"{key} occurs twice", f"write {key} once") for key in twice]
    if found:
        raise UserError([Problem("E507", f"{where}: {wrong}", (fix,)) for wrong, fix in found])
    lists = {key: tuple(value.split() if isinstance(value, str) else value or ()) for key, value in pairs}
    if not any(lists.values()):
        raise _unusable(f"{where} contains no prefixes", form)
    return {key: DataPathArgs(words, key, path) for key, words in lists.items() if words}


def _read(flag: str, path: str) -> str:
    if not path:
        raise UserError([Problem("E507", f"{flag} '' is empty; is a shell variable unset?")])
    try:
        return read_small(path).decode()
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
    numbers = [word for word in words if as_weight(word) is not None]
    odd = [word for word in words[::2] if as_weight(word) is None]
    if len(words) % 2 == 0 and 0 < len(odd) < len(words) // 2:
        yield unpaired_problem(paths, f"{odd[0]} is in the place of a weight", numbers)
        return
    blend = read_blend(words)
    size = len(blend.prefixes)
    width = len(words) // size

    def without(places: Collection[int]) -> list[str]:
        return [words[width * i + j] for i in range(size) if i not in places for j in range(width)]

    empty = [i for i, prefix in enumerate(blend.prefixes) if not prefix]
    if empty:
        fix = paths.replace_with(without(empty))
        yield Problem("E502", f"{paths.origin} has an empty prefix; is a shell variable unset?", fix)
    if size > MAX_BLEND_DATASETS:
        sentence = f"{paths.origin} has {size:,} prefixes; a blend holds at most {MAX_BLEND_DATASETS:,}"
        yield Problem("E502", sentence, ("python tools/merge_datasets.py",))
    weights = blend.weights or ()
    bad = [i for i, weight in enumerate(weights) if not 0 < weight < math.inf]
    if bad:
        shown = ", ".join(f"{blend.prefixes[i]} the weight {words[2 * i]}" for i in bad[:3])
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        fix = paths.replace_with(without(bad) or blend.prefixes)
        yield Problem("E502", f"{paths.origin} gives {shown}{more}; weights must be finite and above 0", fix)
    elif math.isinf(sum(weights)):
        sentence = f"{paths.origin}: the sum of the weights overflows"
        yield Problem("E502", sentence, paths.replace_with(blend.prefixes))


def unpaired_problem(paths: DataPathArgs, seen: str, numbers: Collection[str]) -> Problem:
    """Return the problem of a list in which not every prefix follows a weight.

    The fix gives the ``numbers`` to the prefixes in their order; without as many of both, it drops the numbers.
    """
    weights = [word for word in paths.words if word in numbers]
    prefixes = [word for word in paths.words if word not in numbers]
    paired = [word for pair in zip(weights, prefixes) for word in pair]
    fix = paths.replace_with(paired if len(weights) == len(prefixes) else prefixes)
    return Problem("E502", f"{paths.origin}: {seen}; give a weight before every prefix, or none", fix)


def split_text(data: DataConfig) -> str:
    """Return the weights that cut ``data_path``, as text."""
    return DEFAULT_SPLIT if data.split is None else data.split


def split_weights(text: str) -> tuple[float, float, float]:
    """Parse the weights of train, validation and test; missing ones are 0, and quotes around them do not count.

    Raises:
        ValueError: if ``text`` is not up to three numbers.
    """
    words = [word.strip() for word in text.strip("'\"").split(",")]
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


def _name_problems(data: DataConfig, lists: Mapping[str, DataPathArgs]) -> Iterator[Problem]:
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
