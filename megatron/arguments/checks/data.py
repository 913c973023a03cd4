"""Checks of the training, validation and test data."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import isdir, isfile, realpath  # unlike pathlib's they do not raise for a very long name
from pathlib import Path

from megatron.checkpoint.location import parse_location
from megatron.config.data import DataConfig
from megatron.config.data_paths import (
    SPLITS,
    DataPathArgs,
    as_weight,
    blend_problems,
    data_path_args,
    data_problems,
    read_blend,
    split_text,
    split_weights,
    unpaired_problem,
)
from megatron.config.data_store import is_remote
from megatron.config.errors import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import did_you_mean

MAX_MISSING = 5  # prefixes without files that are reported one by one
MAX_WORDS_SHOWN = 3
SUFFIXES = (".bin", ".idx")
TEXT_SUFFIX = r"(\.(jsonl|json|txt))?(\.(gz|zst|bz2|xz))?$"
TOKENIZER_OPTIONS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def check_sources(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the data have one source, readable argument files, blends, a split and names of validation sets."""
    return data_problems(config.data)


def _path_lists(data: DataConfig) -> Mapping[str, DataPathArgs]:
    """Return the lists of prefixes; none for generated tokens or if `check_sources` reports an unreadable file."""
    if data.mock_data:
        return {}
    try:
        return data_path_args(data)
    except UserError:
        return {}


def check_files(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the token files exist, and are named without their suffixes."""
    for paths in _path_lists(config.data).values():
        blend = read_blend(paths.words)
        invalid = any(True for _ in blend_problems(paths))
        words = [word for word in paths.words if as_weight(word) is None] if invalid else blend.prefixes
        missing = {word: ends for word in words if word.strip() and (ends := _missing(word))}
        yield from _store_problems(paths, [word for word in words if is_remote(word)])
        numbers = [word for word in missing if blend.weights is None and as_weight(word) is not None]
        if numbers:
            seen = (
                f"{' and '.join(numbers[:MAX_WORDS_SHOWN])} would be {'a prefix' if len(numbers) == 1 else 'prefixes'}"
            )
            yield unpaired_problem(paths, seen, numbers)
        prefixes = [word for word in missing if word not in numbers]
        reported = prefixes[:MAX_MISSING] if len(prefixes) > MAX_MISSING + 1 else prefixes
        for prefix in reported:
            yield _missing_files(paths, prefix, missing[prefix], config.data)
        if len(reported) < len(prefixes):
            more = f"{len(prefixes) - len(reported):,} more of its {len(set(words)):,} prefixes"
            yield Problem("E503", f"{paths.origin}: the files of {more} do not exist")


def _store_problems(paths: DataPathArgs, prefixes: Sequence[str]) -> Iterator[Problem]:
    """Yield problems of prefixes in object stores that are found without a request; one for each kind of store."""
    for uri in {prefix.partition("://")[0]: prefix for prefix in reversed(prefixes)}.values():
        try:
            place = parse_location(uri)
        except UserError as error:
            yield from error.problems
            continue
        missing = None if isinstance(place, Path) else place.missing_library()
        if missing is not None:
            yield Problem("E503", f"{paths.origin} {missing[0]}", (missing[1],))
        elif isinstance(place, Path):
            yield Problem("E503", f"{paths.origin} {uri} is a path", _replace(paths, uri, [str(place)]))


def _missing(prefix: str) -> list[str]:
    if is_remote(prefix):  # the store is asked when the data are opened
        return []
    return [prefix + end for end in SUFFIXES if not isfile(prefix + end)]


def _missing_files(paths: DataPathArgs, prefix: str, missing: Sequence[str], data: DataConfig) -> Problem:
    """Return the problem of a prefix without files, and the prefix or the command that was probably meant."""
    origin, folder = paths.origin, Path(prefix).parent
    if len(prefix.split()) > 1:
        sentence = f"{origin}: {prefix!r} is one word because of its quotes; there are no files of that name"
        return Problem("E502", sentence, _replace(paths, prefix, prefix.split()))
    stem = re.sub(r"\.(bin|idx)$", "", prefix)
    if stem != prefix:
        return Problem("E503", f"{origin} {prefix} is a file; give its prefix", _replace(paths, prefix, [stem]))
    if isdir(prefix):
        sentence = f"{origin} {prefix} is a folder; give the prefixes of token files"
        existing = sorted(_datasets(Path(prefix)))
        if not existing:
            sentence += "; it contains none"
            return Problem("E503", sentence, (_preprocess_command(prefix, f"{prefix}/all", data),))
        together = existing if read_blend(paths.words).weights is None else existing[:1]
        return Problem("E503", sentence, _replace(paths, prefix, together) or _replace(paths, prefix, existing[:1]))
    is_text = isfile(prefix)
    start = re.sub(TEXT_SUFFIX, "", prefix) if is_text else prefix
    existing = sorted(_datasets(folder) - set(paths.words))
    near = [name for name in existing if name.startswith(start)]
    if not near and not is_text:
        close = did_you_mean(Path(prefix).name, [Path(name).name for name in existing])
        near = [str(folder / close)] if close else []
    fixes = _replace(paths, prefix, near[:1]) if near else ()
    if is_text:
        sentence = f"{origin} {prefix} is text; tokenize it first and give the prefix of the token files"
        return Problem("E503", sentence, fixes or (_preprocess_command(prefix, start, data),))
    sentence = f"{origin}: {' and '.join(missing)} {'do' if len(missing) > 1 else 'does'} not exist"
    if not isdir(folder):
        sentence += f", nor does the folder {folder}"
    written = re.sub(r"_[^_/]+_document$", "", prefix)
    text = next((written + end for end in (".jsonl", ".json", ".txt") if isfile(written + end)), "TEXT.jsonl")
    return Problem("E503", sentence, fixes or (_preprocess_command(text, written, data),))


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
    unknown = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER_OR_HUB_NAME"
    tokenizer = " ".join(named) if data.tokenizer_type else unknown
    files = f"--input {shlex.quote(text)} --output-prefix {shlex.quote(written)}"
    return f"python tools/preprocess_data.py {files} --append-eod {tokenizer}"


def check_needed(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that there are data to train on, and to evaluate on if evaluation is on."""
    data = config.data
    lists = _path_lists(data)
    if not lists or any(problem.code == "E504" for problem in data_problems(data)):
        return
    weights = dict(zip(SPLITS, split_weights(split_text(data))))
    available = {part for part in SPLITS if weights[part] > 0} if "all" in lists else set(lists)
    missing = f"split {split_text(data)!r} leaves no data" if "all" in lists else "there are no data"
    paths = next(iter(lists.values()))

    def fixes(part: str) -> tuple[str, ...]:
        if "all" in lists:
            return ("--split 969,30,1",)
        if paths.file and data.data_mixture is None:
            return replace(paths, key=part).replace_with(["PREFIX"])
        return (f"--{part}-data-path PREFIX",)

    if "train" not in available:
        yield Problem("E505", f"{missing} to train on", fixes("train"))
    if "valid" not in available and config.training.eval_iters > 0:
        yield Problem("E505", f"{missing} to evaluate on", (*fixes("valid"), "--eval-iters 0"))


def check_conversations(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the files of conversations exist, and that the other options go with conversations."""
    data = config.data
    if not data.chat_data_path:
        return
    for name in ("chat_data_path", "valid_chat_data_path", "chat_template"):
        given = getattr(data, name)
        for path in (given,) if isinstance(given, str) else given or ():
            if not isfile(path):
                yield Problem("E503", f"{SETTINGS[name].flag} {path} is not a file", (f"{SETTINGS[name].flag} FILE",))
    if config.model.attention_prefix:
        sentence = "--attention-pattern with a prefix does not go with conversations: it would show answers"
        yield Problem("E109", sentence, ("drop --attention-pattern",))


def data_notes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield notes about repeated prefixes and unused weights."""
    data = config.data
    for part, paths in _path_lists(data).items():
        blend = read_blend(paths.words)
        tokens = {prefix: f"{prefix}.bin" for prefix in blend.prefixes}
        files = {prefix: realpath(path) if isfile(path) else prefix for prefix, path in tokens.items()}
        counts = Counter(files[prefix] for prefix in blend.prefixes)  # another path may lead to the same files
        twice = [prefix for prefix, file in files.items() if counts[file] > 1]
        if twice:
            yield f"{paths.origin} contains {twice[0]} more than once: every occurrence is read in the same order"
        if data.multiple_validation_sets and part == "valid" and blend.weights is not None:
            yield f"the weights of {paths.origin} have no effect: each of its prefixes is a separate validation set"
