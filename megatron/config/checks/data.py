"""Whether there are tokens to read, for every part of the run that needs some."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import isdir, isfile  # unlike pathlib's they answer for a name of any length
from pathlib import Path

from megatron.config.data_paths import (
    SPLITS,
    Words,
    as_weight,
    blend_problems,
    name_problems,
    read_blend,
    split_problems,
    split_text,
    split_weights,
    way_problems,
    word_lists,
)
from megatron.config.problems import Problem, UserError
from megatron.config.run import DataConfig, RunConfig
from megatron.config.settings import SETTINGS

MOST_MISSING = 5  # prefixes without files that are told one by one
MOST_OFFERED = 3
ENDINGS = (".bin", ".idx")
TEXT_ENDING = r"(\.(jsonl|json|txt))?(\.(gz|zst|bz2|xz))?$"
TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def source(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Tokens come from files that one way names, or are generated; argument files can be read."""
    yield from way_problems(config.data)
    try:
        word_lists(config.data)
    except UserError as error:
        yield from error.problems


def blends(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Lists are of prefixes, or of weights and prefixes."""
    for said in _lists(config.data).values():
        found = list(blend_problems(said))
        yield from found
        stray = [] if found else _numbers_as_prefixes(said)
        if stray:
            yield _unpaired(said, stray)


def _lists(data: DataConfig) -> Mapping[str, Words]:
    """The lists of words; none for generated tokens, and where a file of them cannot be read, which `source` tells."""
    if data.mock_data:
        return {}
    try:
        return word_lists(data)
    except UserError:
        return {}


def _numbers_as_prefixes(said: Words) -> list[str]:
    """Words that are taken for prefixes, look like weights, and have no files."""
    blend = read_blend(said.words)
    alone = blend.prefixes if blend.weights is None else ()
    return [word for word in alone if as_weight(word) is not None and not isfile(word + ENDINGS[1])]


def _unpaired(said: Words, numbers: Sequence[str]) -> Problem:
    """Numbers that stand where they are no weights."""
    words = said.words
    prefixes = said.instead([word for word in words if word not in numbers])
    shown = " and ".join(numbers[:MOST_OFFERED])
    if len(words) % 2 == 0 and set(words[1::2]) <= set(numbers):
        turned = [word for prefix, number in zip(words[::2], words[1::2]) for word in (number, prefix)]
        sentence = f"{said.origin}: {shown} would be prefixes; a weight stands before its prefix"
        return Problem("E502", sentence, (*said.instead(turned), *prefixes))
    kind = "a prefix" if len(numbers) == 1 else "prefixes"
    sentence = f"{said.origin}: {shown} would be {kind}; every prefix has a weight before it, or none has"
    return Problem("E502", sentence, prefixes)


def files(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The pairs of files are there, and are named without their endings."""
    for said in _lists(config.data).values():
        numbers = set(_numbers_as_prefixes(said))
        prefixes = [prefix for prefix in dict.fromkeys(_prefixes(said)) if prefix.strip() and prefix not in numbers]
        missing = {prefix: ends for prefix in prefixes if (ends := _missing(prefix))}
        told = list(missing)[:MOST_MISSING] if len(missing) > MOST_MISSING + 1 else list(missing)
        for prefix in told:
            yield _not_there(said, prefix, missing[prefix], config.data)
        if len(told) < len(missing):
            more = f"{len(missing) - len(told):,} more of its {len(prefixes):,} prefixes"
            yield Problem("E503", f"{said.origin}: the files of {more} are not there")


def _prefixes(said: Words) -> tuple[str, ...]:
    """The prefixes of a list; all that are no numbers in one that cannot be understood."""
    if any(True for _ in blend_problems(said)):
        return tuple(word for word in said.words if as_weight(word) is None)
    return read_blend(said.words).prefixes


def _missing(prefix: str) -> list[str]:
    return [prefix + end for end in ENDINGS if not isfile(prefix + end)]


def _not_there(said: Words, prefix: str, missing: Sequence[str], data: DataConfig) -> Problem:
    if len(prefix.split()) > 1:
        sentence = f"{said.origin}: {prefix!r} is one word, because it is quoted, and there are no files of that name"
        return Problem("E502", sentence, _instead(said, prefix, prefix.split()))
    stem = re.sub(r"\.(bin|idx)$", "", prefix)
    if stem != prefix:
        return Problem(
            "E503", f"{said.origin} {prefix} is a file; its prefix is wanted", _instead(said, prefix, [stem])
        )
    if isdir(prefix):
        return _is_folder(said, prefix, data)
    is_text = isfile(prefix)
    begun = re.sub(TEXT_ENDING, "", prefix) if is_text else prefix
    there = sorted(
        _datasets(Path(prefix).parent) - set(said.words), key=lambda name: (not name.startswith(begun), name)
    )
    near = [name for name in there if name.startswith(begun)] if is_text else there
    fixes = [fix for other in near for fix in _instead(said, prefix, [other])][:MOST_OFFERED]
    if is_text:
        sentence = f"{said.origin} {prefix} is no prefix of token files; these are made from text first"
        return Problem("E503", sentence, (*fixes, _preprocessing(prefix, begun, data)))
    files = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not there"
    folder = Path(prefix).parent
    why = "" if isdir(folder) else f", nor is the folder {folder}"
    written = re.sub(r"_[^_/]+_document$", "", prefix)
    text = next((written + end for end in (".jsonl", ".json", ".txt") if isfile(written + end)), "TEXT.jsonl")
    return Problem("E503", f"{said.origin}: {files}{why}", tuple(fixes) or (_preprocessing(text, written, data),))


def _is_folder(said: Words, folder: str, data: DataConfig) -> Problem:
    """What to say instead of a folder: the prefixes in it."""
    there = sorted(_datasets(Path(folder)))
    sentence = f"{said.origin} {folder} is a folder; prefixes of token files are wanted"
    if not there:
        return Problem(
            "E503", f"{sentence}, and there are none in it", (_preprocessing(folder, f"{folder}/all", data),)
        )
    together = _instead(said, folder, there) if read_blend(said.words).weights is None else ()
    each = [fix for name in there for fix in _instead(said, folder, [name])]
    return Problem("E503", sentence, tuple(dict.fromkeys([*together, *each]))[:MOST_OFFERED])


def _datasets(folder: Path) -> set[str]:
    """The prefixes of token files in a folder."""
    return {str(path.with_suffix("")) for path in folder.glob("*.idx")}


def _instead(said: Words, prefix: str, others: Sequence[str]) -> tuple[str, ...]:
    """A fix that says ``others`` in place of one of the prefixes."""
    changed = (others if word.strip() == prefix else (word,) for word in said.words)
    return said.instead([word for words in changed for word in words])


def _preprocessing(text: str, written: str, data: DataConfig) -> str:
    """The command that makes token files of a text, with the tokenizer that the flags name, if any."""
    named = [SETTINGS[name].spell(getattr(data, name)) for name in TOKENIZER if getattr(data, name) is not None]
    tokenizer = " ".join(named) if data.tokenizer_type else "--tokenizer-type ByteTokenizer"
    paths = f"--input {shlex.quote(text)} --output-prefix {shlex.quote(written)}"
    return f"python tools/preprocess_data.py {paths} {tokenizer}"


def split(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The split is up to three weights."""
    yield from split_problems(config.data)


def needed(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """There is something to train on, and to evaluate on where that is asked for."""
    data, lists = config.data, _lists(config.data)
    if not lists or any(True for _ in split_problems(data)):
        return
    weights = dict(zip(SPLITS, split_weights(split_text(data))))
    there = {part for part in SPLITS if weights[part] > 0} if "all" in lists else set(lists)
    missing = f"split {split_text(data)!r} leaves nothing" if "all" in lists else "there is nothing"
    if "train" not in there:
        yield Problem("E505", f"{missing} to train on", _give("train", lists))
    if "valid" not in there and config.training.eval_iters > 0:
        yield Problem("E505", f"{missing} to evaluate on", (*_give("valid", lists), "--eval-iters 0"))


def _give(part: str, lists: Mapping[str, Words]) -> tuple[str, ...]:
    """How a part that lacks data gets some."""
    said = next(iter(lists.values()))
    if "all" in lists:
        return ("--split 969,30,1",)
    return replace(said, key=part if said.file else f"--{part}-data-path").instead(["PREFIX"])


def validation_sets(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every validation set has a name of its own."""
    yield from name_problems(config.data, _lists(config.data))


def documents(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The id that ends a document is one of the vocabulary's."""
    eod, size = config.data.eod_id, config.model.vocab_size
    if eod is not None and size is not None and eod >= size:
        fixes = (f"--eod-id {size - 1}", f"--vocab-size {eod + 1}")
        yield Problem("E508", f"--eod-id {eod} is not in a vocabulary of {size} ids, 0 to {size - 1}", fixes)


CHECKS = (source, blends, files, split, needed, validation_sets, documents)


def remarks(config: RunConfig) -> Iterator[str]:
    """A line on what is allowed, and may not be meant."""
    data = config.data
    for part, said in _lists(data).items():
        blend = read_blend(said.words)
        twice = [prefix for prefix, count in Counter(blend.prefixes).items() if count > 1]
        if twice:
            yield f"{said.origin} names {twice[0]} more than once: each time it is read by itself, in the same order"
        if data.multiple_validation_sets and part == "valid" and blend.weights is not None:
            yield f"the weights of {said.origin} have no effect: each of its prefixes is a validation set by itself"
