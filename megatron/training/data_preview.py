"""What ``--check-config`` says of the data: which files each split reads, and how much is in them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat

from megatron.config.batch import trained_samples
from megatron.config.data_paths import SPLITS, Blend, Source, data_sources, split_weights
from megatron.config.run import RunConfig
from megatron.data.files.indexed import IndexedDataset
from megatron.data.files.indexed_format import CODES, HEADER, MAGIC, VERSION

MOST_SHOWN = 8  # datasets of a list; no more are opened, however many there are


def data_rows(config: RunConfig, world_size: int, iteration: int = 0, consumed_samples: int = 0) -> list[str]:
    """Lines in the form of the configuration's summary, one for each dataset; none for generated tokens.

    Of each file only the size and the header are read.

    Args:
        config: one that passed its checks, resolved or not.
        world_size: ranks.
        iteration: steps taken before the run goes on.
        consumed_samples: samples they used.

    Raises:
        UserError: when what names the files cannot be understood.
        DataError: when a file is not what it should be.

    """
    sources = data_sources(config.data)
    dp = config.parallel.data_parallel_size(world_size)
    tokens = trained_samples(config.training, dp, iteration, consumed_samples) * config.training.seq_length
    return [f"{name + ' ':<11}{text}" if name else f"{'':<11}{text}" for name, text in _rows(sources, tokens)]


def _rows(sources: Mapping[str, Source], tokens: int) -> Iterator[tuple[str, str]]:
    """Name and text of each line; a run trains on so many ``tokens``."""
    cut = next((source.split for source in sources.values() if source.split is not None), None)
    if cut is None:
        for name in list(sources)[:MOST_SHOWN]:
            lines = _datasets(sources[name].blend, tokens if name == "train" else 0)
            yield from zip(chain([name], repeat("")), lines)
        if len(sources) > MOST_SHOWN:
            yield "", f"and {_named(list(sources)[MOST_SHOWN:])}"
        return
    weights = split_weights(cut)
    shares = (f"{split} {_percent(weight / sum(weights))}" for split, weight in zip(SPLITS, weights) if weight)
    yield "data", f"of each dataset {', '.join(shares)}"
    for line in _datasets(sources["train"].blend, tokens, weights[0] / sum(weights)):
        yield "", line
    sets = [name.partition(":")[2] for name in sources if ":" in name]
    if sets:
        yield "valid", f"each by itself: {_named(sets)}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more


def _datasets(blend: Blend, tokens: int, part: float = 1.0) -> Iterator[str]:
    """A line for each dataset of a blend, of which ``part`` is trained on for so many ``tokens`` in all."""
    shown = blend.prefixes[:MOST_SHOWN]
    sizes = [measure(prefix) for prefix in shown]
    held = [size for _, size in sizes]
    weights = blend.weights or (held if len(shown) == len(blend.prefixes) else [])
    shares = [weight / sum(weights) for weight in weights[: len(shown)]] if sum(weights) else [0.0] * len(shown)
    for prefix, (documents, size), share in zip(shown, sizes, shares):
        weight = f"{_percent(share)} " if len(blend.prefixes) > 1 and share else ""
        epochs = tokens * share / (size * part) if size else 0.0
        often = f", {epochs:,.1f} epochs" if epochs >= 1 else f", {epochs:.2g} epochs" if epochs else ""
        yield f"{weight}{prefix}: {documents:,} documents, {size:,} tokens{often}"
    if len(blend.prefixes) > len(shown):
        yield f"and {len(blend.prefixes) - len(shown):,} more"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def measure(prefix: str) -> tuple[int, int]:
    """Documents and tokens of a dataset, from the sizes of its files and the header of its index.

    Raises:
        DataError: when they do not fit together, or a file cannot be read.
    """
    try:
        with open(f"{prefix}.idx", "rb") as index:
            magic, version, code, sequences, boundaries = HEADER.unpack(index.read(HEADER.size))
        found = os.path.getsize(f"{prefix}.idx"), os.path.getsize(f"{prefix}.bin")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if (magic, version, found[0]) == (MAGIC, VERSION, expected) and code in CODES and boundaries:
            return boundaries - 1, found[1] // CODES[code].itemsize
    except (OSError, struct.error):
        pass  # opening it says what is wrong
    whole = IndexedDataset(prefix)
    return len(whole.documents) - 1, whole.num_tokens
