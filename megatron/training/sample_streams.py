"""Compare the training samples of two runs, reopening their data from the configurations in the run folders."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.config.settings import SETTINGS
from megatron.config.sources import from_dict
from megatron.data.digest import PLACES_PER_BLOCK
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data, source_of
from megatron.training.differences import DIGEST, RunFolder

BY_CONTENT = 100_000
"""Samples compared by their tokens, if the data come from different files and sample identities differ."""


def first_different_sample(a: RunFolder, b: RunFolder, first: int, stop: int) -> str:
    """Describe the first difference among the training samples ``first .. stop - 1`` of two runs.

    Raises:
        DataError: if data cannot be opened, or are not what a run has read.
        UserError: if a configuration is invalid.
        OSError: if files cannot be read.
    """
    streams = [open_stream(run) for run in (a, b)]
    found = first_difference(streams[0], streams[1], first, stop)
    if found is None:
        compared = min(stop, first + BY_CONTENT) if len({s.fingerprints["train"] for s in streams}) > 1 else stop
        return f"samples {first:,} to {compared - 1:,} are the same"
    sources = [source_of(stream.datasets["train"], found) or "generated" for stream in streams]
    return f"sample {found:,} (from 0) is the first that differs; it is from {sources[0]} | {sources[1]}"


def open_stream(run: RunFolder) -> DataSource:
    """Open the training samples of a run.

    Raises:
        DataError: if they cannot be opened, or their digest is not the logged one.
        UserError: if its configuration is invalid.
    """
    if run.options is None:
        raise DataError(run.missing[0])
    known: dict[str, Any] = {name: value for name, value in run.options.items() if name in SETTINGS}
    config = from_dict(known)
    replicas = config.parallel.data_parallel_size(int(run.facts.get("world_size", 1)))
    laid_out = run.facts.get("train.laid_out_for_samples")  # one length per extension of the run
    stretches = {"train": laid_out} if laid_out else None
    data = build_data(config.data, config.training, config.model.vocab, replicas, ("train",), stretches)
    last = run.lines[max(run.lines)] if run.lines else {}
    digest = last.get(DIGEST)
    samples = int(last.get("consumed-samples", 0))
    if digest is not None and f"{data.digest('train', 0, samples):016x}" != digest:
        raise DataError(
            f"the training data that {run.folder} names are not those that it has read, or come in another order; "
            "have files changed since?"
        )
    return data


def first_difference(a: DataSource, b: DataSource, first: int, stop: int) -> int | None:
    """Return the index of the first training sample in ``first .. stop - 1`` that differs; None if none does."""
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
