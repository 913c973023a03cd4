"""Checks of the training, validation and test data."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import isdir, isfile  # unlike pathlib's they do not raise for a very long name
from pathlib import Path

from megatron.config.data_paths import (
    SPLITS,
    DataPathArgs,
    as_weight,
    blend_problems,
    data_path_args,
    name_problems,
    read_blend,
    source_problems,
    split_problems,
    split_text,
    split_weights,
)
from megatron.config.errors import Problem, UserError
from megatron.config.run import DataConfig, RunConfig
from megatron.config.settings import SETTINGS

MAX_MISSING = 5  # prefixes without files that are reported one by one
MAX_FIXES = 3
SUFFIXES = (".bin", ".idx")
TEXT_SUFFIX = r"(\.(jsonl|json|txt))?(\.(gz|zst|bz2|xz))?$"
TOKENIZER_OPTIONS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def check_source(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the data have one source, and that argument files can be read."""
    yield from source_problems(config.data)
    try:
        data_path_args(config.data)
    except UserError as error:
        yield from error.problems


def check_blends(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every list holds prefixes, or pairs of a weight and a prefix."""
    for paths in _path_lists(config.data).values():
        found = list(blend_problems(paths))
        yield from found
        stray = [] if found else _numbers_as_prefixes(paths)
        if stray:
            yield _unpaired(paths, stray)


def _path_lists(data: DataConfig) -> Mapping[str, DataPathArgs]:
    """Return the lists of prefixes; none for generated tokens or if `check_source` reports an unreadable file."""
    if data.mock_data:
        return {}
    try:
        return data_path_args(data)
    except UserError:
        return {}


def _numbers_as_prefixes(paths: DataPathArgs) -> list[str]:
    """Return words that are read as prefixes, look like weights, and have no files."""
    blend = read_blend(paths.words)
    alone = blend.prefixes if blend.weights is None else ()
    return [word for word in alone if as_weight(word) is not None and not isfile(word + SUFFIXES[1])]


def _unpaired(paths: DataPathArgs, numbers: Sequence[str]) -> Problem:
    """Return the problem of numbers that are not in the place of a weight."""
    words = paths.words
    prefixes = paths.replace_with([word for word in words if word not in numbers])
    shown = " and ".join(numbers[:MAX_FIXES])
    if len(words) % 2 == 0 and set(words[1::2]) <= set(numbers):
        swapped = [word for prefix, number in zip(words[::2], words[1::2]) for word in (number, prefix)]
        sentence = f"{paths.origin}: {shown} would be prefixes; a weight comes before its prefix"
        return Problem("E502", sentence, (*paths.replace_with(swapped), *prefixes))
    kind = "a prefix" if len(numbers) == 1 else "prefixes"
    sentence = f"{paths.origin}: {shown} would be {kind}; give a weight before every prefix, or none"
    return Problem("E502", sentence, prefixes)


def check_files(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the token files exist, and are named without their suffixes."""
    for paths in _path_lists(config.data).values():
        numbers = set(_numbers_as_prefixes(paths))
        prefixes = [prefix for prefix in dict.fromkeys(_prefixes(paths)) if prefix.strip() and prefix not in numbers]
        missing = {prefix: ends for prefix in prefixes if (ends := _missing(prefix))}
        reported = list(missing)[:MAX_MISSING] if len(missing) > MAX_MISSING + 1 else list(missing)
        for prefix in reported:
            yield _missing_files(paths, prefix, missing[prefix], config.data)
        if len(reported) < len(missing):
            more = f"{len(missing) - len(reported):,} more of its {len(prefixes):,} prefixes"
            yield Problem("E503", f"{paths.origin}: the files of {more} do not exist")


def _prefixes(paths: DataPathArgs) -> tuple[str, ...]:
    """Return the prefixes of a list; for an invalid list, all words that are not numbers."""
    if any(True for _ in blend_problems(paths)):
        return tuple(word for word in paths.words if as_weight(word) is None)
    return read_blend(paths.words).prefixes


def _missing(prefix: str) -> list[str]:
    return [prefix + end for end in SUFFIXES if not isfile(prefix + end)]


def _missing_files(paths: DataPathArgs, prefix: str, missing: Sequence[str], data: DataConfig) -> Problem:
    if len(prefix.split()) > 1:
        sentence = f"{paths.origin}: {prefix!r} is one word because of its quotes; there are no files of that name"
        return Problem("E502", sentence, _replace(paths, prefix, prefix.split()))
    stem = re.sub(r"\.(bin|idx)$", "", prefix)
    if stem != prefix:
        return Problem("E503", f"{paths.origin} {prefix} is a file; give its prefix", _replace(paths, prefix, [stem]))
    if isdir(prefix):
        return _folder_given(paths, prefix, data)
    is_text = isfile(prefix)
    start = re.sub(TEXT_SUFFIX, "", prefix) if is_text else prefix
    existing = sorted(
        _datasets(Path(prefix).parent) - set(paths.words), key=lambda name: (not name.startswith(start), name)
    )
    near = [name for name in existing if name.startswith(start)] if is_text else existing
    fixes = [fix for other in near for fix in _replace(paths, prefix, [other])][:MAX_FIXES]
    if is_text:
        sentence = f"{paths.origin} {prefix} is text; tokenize it first and give the prefix of the token files"
        return Problem("E503", sentence, (*fixes, _preprocess_command(prefix, start, data)))
    files = f"{' and '.join(missing)} {'do' if len(missing) > 1 else 'does'} not exist"
    folder = Path(prefix).parent
    why = "" if isdir(folder) else f", nor does the folder {folder}"
    written = re.sub(r"_[^_/]+_document$", "", prefix)
    text = next((written + end for end in (".jsonl", ".json", ".txt") if isfile(written + end)), "TEXT.jsonl")
    return Problem("E503", f"{paths.origin}: {files}{why}", tuple(fixes) or (_preprocess_command(text, written, data),))


def _folder_given(paths: DataPathArgs, folder: str, data: DataConfig) -> Problem:
    """Return the problem of a folder in place of a prefix, with the prefixes in it as fixes."""
    existing = sorted(_datasets(Path(folder)))
    sentence = f"{paths.origin} {folder} is a folder; give the prefixes of token files"
    if not existing:
        return Problem("E503", f"{sentence}; it contains none", (_preprocess_command(folder, f"{folder}/all", data),))
    together = _replace(paths, folder, existing) if read_blend(paths.words).weights is None else ()
    each = [fix for name in existing for fix in _replace(paths, folder, [name])]
    return Problem("E503", sentence, tuple(dict.fromkeys([*together, *each]))[:MAX_FIXES])


def _datasets(folder: Path) -> set[str]:
    """Return the prefixes of token files in a folder."""
    return {str(path.with_suffix("")) for path in folder.glob("*.idx")}


def _replace(paths: DataPathArgs, prefix: str, others: Sequence[str]) -> tuple[str, ...]:
    """Return the fix that replaces one of the prefixes by ``others``."""
    changed = (others if word.strip() == prefix else (word,) for word in paths.words)
    return paths.replace_with([word for words in changed for word in words])


def _preprocess_command(text: str, written: str, data: DataConfig) -> str:
    """Return the command that tokenizes a text, with the tokenizer of the flags."""
    named = [SETTINGS[name].spell(getattr(data, name)) for name in TOKENIZER_OPTIONS if getattr(data, name) is not None]
    tokenizer = " ".join(named) if data.tokenizer_type else "--tokenizer-type ByteTokenizer"
    files = f"--input {shlex.quote(text)} --output-prefix {shlex.quote(written)}"
    return f"python tools/preprocess_data.py {files} {tokenizer}"


def check_split(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the split is up to three weights."""
    return split_problems(config.data)


def check_needed(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there are data to train on, and to evaluate on if evaluation is on."""
    data = config.data
    lists = _path_lists(config.data)
    if not lists or any(True for _ in split_problems(data)):
        return
    weights = dict(zip(SPLITS, split_weights(split_text(data))))
    available = {part for part in SPLITS if weights[part] > 0} if "all" in lists else set(lists)
    missing = f"split {split_text(data)!r} leaves no data" if "all" in lists else "there are no data"
    if "train" not in available:
        yield Problem("E505", f"{missing} to train on", _add_data("train", lists))
    if "valid" not in available and config.training.eval_iters > 0:
        yield Problem("E505", f"{missing} to evaluate on", (*_add_data("valid", lists), "--eval-iters 0"))


def _add_data(part: str, lists: Mapping[str, DataPathArgs]) -> tuple[str, ...]:
    """Return fixes that give data to a part without any."""
    paths = next(iter(lists.values()))
    if "all" in lists:
        return ("--split 969,30,1",)
    return replace(paths, key=part if paths.file else f"--{part}-data-path").replace_with(["PREFIX"])


def check_validation_sets(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that every validation set has a unique name."""
    return name_problems(config.data, _path_lists(config.data))


def check_eod_id(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the end-of-document id is in the vocabulary."""
    eod = config.data.eod_id
    size = config.model.vocab_size
    if eod is not None and size is not None and eod >= size:
        fixes = (f"--eod-id {size - 1}", f"--vocab-size {eod + 1}")
        yield Problem("E508", f"--eod-id {eod} is not in the vocabulary: ids are 0 to {size - 1}", fixes)


def data_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about repeated prefixes and unused weights."""
    data = config.data
    for part, paths in _path_lists(data).items():
        blend = read_blend(paths.words)
        twice = [prefix for prefix, count in Counter(blend.prefixes).items() if count > 1]
        if twice:
            yield f"{paths.origin} contains {twice[0]} more than once: every occurrence is read in the same order"
        if data.multiple_validation_sets and part == "valid" and blend.weights is not None:
            yield f"the weights of {paths.origin} have no effect: each of its prefixes is a separate validation set"
