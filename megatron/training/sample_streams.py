"""The samples of two runs side by side: their data are opened anew, from the configurations in the runs' folders."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.config.settings import SETTINGS
from megatron.config.sources import from_dict
from megatron.data.digest import PLACES_PER_BLOCK
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data, source_of
from megatron.training.differences import RunFolder

BY_CONTENT = 100_000
"""Samples whose tokens are compared, where data are made from different files and so have no common identities."""


def first_different_sample(a: RunFolder, b: RunFolder, first: int, stop: int) -> str:
    """A sentence on the training samples ``first .. stop - 1`` of two runs.

    Raises:
        DataError: when data cannot be opened, or what is there is not what a run has read.
        UserError: when a configuration cannot be understood.
        OSError: when files cannot be read.
    """
    streams = [open_stream(run) for run in (a, b)]
    found = _first_difference(streams[0], streams[1], first, stop)
    if found is None:
        return f"samples {first:,} to {stop - 1:,} are the same"
    sources = [source_of(stream.datasets["train"], found) or "generated" for stream in streams]
    return f"sample {found:,} is the first that differs; it is from {sources[0]} | {sources[1]}"


def open_stream(run: RunFolder) -> DataSource:
    """The training samples of a run.

    Raises:
        DataError: when they cannot be opened, or are not those that its log lines tell of.
        UserError: when its configuration cannot be understood.
    """
    if run.options is None:
        raise DataError(run.missing[0])
    known: dict[str, Any] = {name: value for name, value in run.options.items() if name in SETTINGS}
    config = from_dict(known)
    replicas = config.parallel.data_parallel_size(int(run.facts.get("world_size", 1)))
    data = build_data(config.data, config.training, config.model.vocab, replicas, splits=("train",))
    last = run.lines[max(run.lines)] if run.lines else {}
    digest, samples = last.get("samples-digest"), int(last.get("consumed-samples", 0))
    if digest is not None and f"{data.digest('train', 0, samples):016x}" != digest:
        raise DataError(
            f"the training data that {run.folder} names are not, or not in the order, that it has read: "
            "files have changed, or it went on from a checkpoint of a run of another length"
        )
    return data


def _first_difference(a: DataSource, b: DataSource, first: int, stop: int) -> int | None:
    left, right = a.datasets["train"], b.datasets["train"]
    stop = min(stop, len(left), len(right))
    if left.fingerprint != right.fingerprint:
        numbers = range(first, min(stop, first + BY_CONTENT))
        return next((i for i in numbers if not np.array_equal(left[i].tokens, right[i].tokens)), None)
    for at in range(first, stop, PLACES_PER_BLOCK):
        places = np.arange(at, min(at + PLACES_PER_BLOCK, stop))
        (differing,) = np.nonzero(left.identities(places) != right.identities(places))
        if differing.size:
            return int(places[differing[0]])
    return None
