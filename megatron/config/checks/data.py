"""Whether there are tokens to read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megatron.config.problems import Problem
from megatron.config.run import RunConfig

NUMBER = r"\d+(\.\d*)?|\.\d+"


def source(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Tokens come from one pair of files, or are generated."""
    data = config.data
    if not data.data_path and not data.mock_data:
        yield Problem("E501", "there is no data", ("--data-path PREFIX", "--mock-data"))
    elif data.data_path and data.mock_data:
        yield Problem("E501", "data_path and mock_data both say where tokens come from", ("drop one",))
    elif len(data.data_path) > 1:
        sentence = f"data_path has {len(data.data_path)} entries; this version reads one prefix and blends nothing"
        prefixes = [entry for entry in data.data_path if not re.fullmatch(NUMBER, entry)]
        yield Problem("E502", sentence, tuple(f"--data-path {prefix}" for prefix in prefixes[:3]))


def files(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The pair of files is there, and is named without its endings."""
    if len(config.data.data_path) != 1 or config.data.mock_data:
        return
    prefix = config.data.data_path[0]
    stem = re.sub(r"\.(bin|idx)$", "", prefix)
    if stem != prefix:
        yield Problem("E503", f"data_path {prefix} is a file; its prefix is wanted", (f"--data-path {stem}",))
        return
    missing = [end for end in (".bin", ".idx") if not Path(prefix + end).is_file()]
    if missing:
        there = sorted(str(p.with_suffix("")) for p in Path(prefix).parent.glob("*.idx"))[:3]
        fixes = (*(f"--data-path {p}" for p in there), f"python tools/preprocess_data.py --output-prefix {prefix}")
        files = " and ".join(prefix + end for end in missing)
        yield Problem("E503", f"{files} {'are' if len(missing) > 1 else 'is'} not there", fixes[: max(1, len(there))])


def split(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """The split is up to three weights, and every part that is needed has one."""
    text, evaluates = config.data.split, config.training.eval_iters > 0
    words = [word.strip() for word in text.split(",")]
    if len(words) > 3 or not all(re.fullmatch(NUMBER, word) for word in words):
        yield Problem("E504", f"split {text!r} is not up to three numbers", ("--split 969,30,1",))
        return
    train, valid, _ = ([float(word) for word in words] + [0.0, 0.0])[:3]
    if config.data.mock_data:
        return
    if not train:
        yield Problem("E505", f"split {text!r} leaves nothing to train on", ("--split 969,30,1",))
    if evaluates and not valid:
        fixes = ("--split 969,30,1", "--eval-iters 0")
        yield Problem("E505", f"split {text!r} leaves nothing to evaluate on", fixes)


CHECKS = (source, files, split)
