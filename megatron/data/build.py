"""From token files to the samples of one stretch of a run: a dataset alone, or a blend of several.

The rules are Megatron-LM's. With weights every source gives its share of the samples asked for, rounded up, and is
laid out for 0.5 % more. Without weights every source is laid out for one epoch and gives in proportion to its length.

Rounded up, the shares of many sources may be much more than was asked for, and a small source too short for its part
of that. Megatron-LM stops there; here such a blend ends before the first sample that a source does not have. It has
the samples asked for: among these, no source is ever asked for more than its share.

A longer run goes on with a blend (`extend_blend`): each source first gives what is left of its order, so no sample of
it is read again while others of that order wait, and then one of a new seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from megatron.data.blend import BlendedDataset, BlendIndex, blend_index, counts, exhaustive_index, normalised, within
from megatron.data.cache import Cache, Tables
from megatron.data.chain import ChainedDataset, stretches_of
from megatron.data.dataset import Dataset
from megatron.data.errors import DataError
from megatron.data.files.indexed import IndexedDataset
from megatron.data.gpt_dataset import GPTDataset, SampleOrder, build_order

SURPLUS = 0.005
SEEDS = 2**32

Part = tuple[IndexedDataset, range]
"""Token files, and which of their sequences are read."""


def build_stretch(
    parts: Sequence[Part],
    weights: Sequence[float] | None,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    cache: Cache | None,
) -> Dataset:
    """Samples of ``parts`` in Megatron-LM's order.

    Args:
        parts: the sources. One without a weight is read alone, else they are blended.
        weights: of each source.
        num_samples: how many are needed; None: one epoch of everything, which excludes weights.
        seq_length: tokens of a sample.
        seed: of every source's order; counted modulo 2**32.
        cache: keeps the tables; None: they are built in memory.

    Raises:
        DataError: when a source holds no sample, a weight is not above 0, or numba is needed and missing.
        ValueError: when there are weights, but no number of samples.
    """
    builder = _Builder(seq_length, seed % SEEDS, cache)
    if len(parts) == 1 and weights is None:
        return builder.alone(parts[0], num_samples)
    if weights is None:
        return builder.in_proportion(parts, num_samples)
    if num_samples is None:
        raise ValueError("a blend with weights needs a number of samples")
    return builder.weighted(parts, weights, num_samples)


def extend_blend(
    blend: BlendedDataset, parts: Sequence[Part], num_samples: int, seq_length: int, seed: int, cache: Cache | None
) -> BlendedDataset:
    """The ``num_samples`` samples that follow a blend of ``parts``, in the same proportions.

    Args:
        blend: the stretch before, which is read to its end.
        parts: its sources.
        num_samples: how many are needed.
        seq_length: tokens of a sample.
        seed: of the orders of sources that have not enough left, another than those before; counted modulo 2**32.
        cache: keeps the tables; None: they are built in memory.

    Raises:
        DataError: when numba is needed and missing.
    """
    return _Builder(seq_length, seed % SEEDS, cache).extended(blend, parts, num_samples)


@dataclass(frozen=True)
class _Builder:
    """What all datasets of a stretch share."""

    seq_length: int
    seed: int
    cache: Cache | None

    def alone(self, part: Part, num_samples: int | None) -> GPTDataset:
        """The samples of one source."""
        indexed, sequences = part
        facts = {
            "files": indexed.fingerprint,
            "sequences": [sequences.start, sequences.stop],
            "samples": num_samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
        }

        def build() -> Tables:
            return build_order(indexed.lengths, sequences, num_samples, self.seq_length, self.seed).tables

        try:
            tables = self._tables("order", facts, build, indexed.prefix)
        except DataError as error:
            raise DataError(f"{indexed.prefix}: {error}") from error
        return GPTDataset(indexed, SampleOrder.of(tables, indexed.lengths, sequences, self.seq_length))

    def in_proportion(self, parts: Sequence[Part], num_samples: int | None) -> BlendedDataset:
        """One epoch of every source, in proportion to their lengths; the first ``num_samples`` samples of that."""
        datasets = [self.alone(part, None) for part in parts]
        sizes = [len(dataset) for dataset in datasets]
        if num_samples is None:
            every = self._index("exhaustive", {"sizes": sizes}, lambda: exhaustive_index(sizes))
            return BlendedDataset(datasets, *every)
        return BlendedDataset(datasets, *within(self._turns(sizes, min(num_samples, sum(sizes))), sizes))

    def weighted(self, parts: Sequence[Part], weights: Sequence[float], num_samples: int) -> BlendedDataset:
        """Every source in proportion to its weight, at least ``num_samples`` samples together."""
        shares = normalised(weights).tolist()
        targets = [ceil(num_samples * share) for share in shares]
        datasets = [self.alone(part, ceil(target * (1 + SURPLUS))) for part, target in zip(parts, targets)]
        # the shares are divided by their sum a second time there, as Megatron-LM does: the last bit decides ties
        index = self._turns(shares, sum(targets))
        return BlendedDataset(datasets, *within(index, list(map(len, datasets))), shares)

    def extended(self, blend: BlendedDataset, parts: Sequence[Part], num_samples: int) -> BlendedDataset:
        """What follows ``blend``: in the proportions of its weights, or of the sources' samples in one epoch."""
        shares = blend.weights or [len(stretches_of(dataset)[0]) for dataset in blend.datasets]
        index = self._turns(shares, num_samples)
        needed = [taken + more for taken, more in zip(blend.taken, counts(index[0], len(parts)))]
        datasets = [self._holding(n, dataset, part) for n, dataset, part in zip(needed, blend.datasets, parts)]
        return BlendedDataset(datasets, *index, blend.weights, blend.taken)

    def _holding(self, samples: int, dataset: Dataset, part: Part) -> Dataset:
        """The dataset, with another order of its samples behind it where it has fewer than ``samples``."""
        missing = samples - len(dataset)
        return dataset if missing <= 0 else ChainedDataset([*stretches_of(dataset), self.alone(part, missing)])

    def _turns(self, weights: Sequence[float], size: int) -> BlendIndex:
        facts = {"weights": list(weights), "size": size}
        return self._index("blend", facts, lambda: blend_index(weights, size))

    def _index(self, kind: str, facts: Mapping[str, object], build: Callable[[], BlendIndex]) -> BlendIndex:
        tables = self._tables(kind, facts, lambda: dict(zip(("datasets", "samples"), build())))
        return tables["datasets"], tables["samples"]

    def _tables(self, kind: str, facts: Mapping[str, object], build: Callable[[], Tables], source: str = "") -> Tables:
        return build() if self.cache is None else self.cache.tables(kind, facts, build, source)
