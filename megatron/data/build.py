"""Build the samples of one segment: one dataset, or a blend of several.

The rules are Megatron-LM's. With weights, each source contributes its share of the samples, rounded up, and is built
for 0.5 % more. Without weights, each source is built for one epoch and contributes in proportion to its length.

With many sources the rounded shares can sum to much more than was requested, and a small source can be too short for
its part. Megatron-LM stops there; here such a blend ends before the first sample that a source lacks. It still has the
requested samples: among these, no source is asked for more than its share.
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
"""Token files, and the sequences of them that are read."""


def build_stretch(
    parts: Sequence[Part],
    weights: Sequence[float] | None,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    cache: Cache | None,
) -> Dataset:
    """Build samples of ``parts`` in Megatron-LM's order.

    Args:
        parts: the sources. A single one without weight is read alone, else they are blended.
        weights: one per source, or None.
        num_samples: samples needed; None for one epoch of everything, which excludes weights.
        seq_length: tokens per sample.
        seed: seed of every source's order, taken modulo 2**32.
        cache: stores the index tables; None builds them in memory.

    Raises:
        DataError: when a source holds no sample, a weight is not above 0, or numba is needed and missing.
        ValueError: when there are weights, but no number of samples.
    """
    builder = _Builder(seq_length, seed % SEEDS, cache)
    if len(parts) == 1 and weights is None:
        return builder.one_source(parts[0], num_samples)
    if weights is None:
        return builder.proportional_blend(parts, num_samples)
    if num_samples is None:
        raise ValueError("a blend with weights needs a number of samples")
    return builder.weighted_blend(parts, weights, num_samples)


def extend_blend(
    blend: BlendedDataset, parts: Sequence[Part], num_samples: int, seq_length: int, seed: int, cache: Cache | None
) -> BlendedDataset:
    """Build the ``num_samples`` samples that follow a blend of ``parts``, in the same proportions.

    Each source first contributes what is left of its order, so that no sample is repeated before all others were read,
    and then a new order of another seed.

    Args:
        blend: the previous segment, which is read to its end.
        parts: its sources.
        num_samples: samples needed.
        seq_length: tokens per sample.
        seed: seed of new orders, different from those before; taken modulo 2**32.
        cache: stores the index tables; None builds them in memory.

    Raises:
        DataError: when numba is needed and missing.
    """
    return _Builder(seq_length, seed % SEEDS, cache).extend(blend, parts, num_samples)


@dataclass(frozen=True)
class _Builder:
    """Builds the datasets of one segment."""

    seq_length: int
    seed: int
    cache: Cache | None

    def one_source(self, part: Part, num_samples: int | None) -> GPTDataset:
        """Build the samples of one source."""
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

    def proportional_blend(self, parts: Sequence[Part], num_samples: int | None) -> BlendedDataset:
        """Blend one epoch of every source in proportion to length; keep the first ``num_samples`` samples."""
        datasets = [self.one_source(part, None) for part in parts]
        sizes = [len(dataset) for dataset in datasets]
        if num_samples is None:
            index = self._index("exhaustive", {"sizes": sizes}, lambda: exhaustive_index(sizes))
            return BlendedDataset(datasets, *index)
        return BlendedDataset(datasets, *within(self._blend_index(sizes, min(num_samples, sum(sizes))), sizes))

    def weighted_blend(self, parts: Sequence[Part], weights: Sequence[float], num_samples: int) -> BlendedDataset:
        """Blend every source in proportion to its weight, at least ``num_samples`` samples in all."""
        shares = normalised(weights).tolist()
        targets = [ceil(num_samples * share) for share in shares]
        datasets = [self.one_source(part, ceil(target * (1 + SURPLUS))) for part, target in zip(parts, targets)]
        # blend_index normalises the shares a second time, as Megatron-LM does: the last bit decides ties
        index = self._blend_index(shares, sum(targets))
        return BlendedDataset(datasets, *within(index, list(map(len, datasets))), shares)

    def extend(self, blend: BlendedDataset, parts: Sequence[Part], num_samples: int) -> BlendedDataset:
        """Continue ``blend`` in the proportions of its weights, or of the sources' samples in one epoch."""
        shares = blend.weights or [len(stretches_of(dataset)[0]) for dataset in blend.datasets]
        index = self._blend_index(shares, num_samples)
        needed = [taken + more for taken, more in zip(blend.taken, counts(index[0], len(parts)))]
        datasets = [self._lengthen(n, dataset, part) for n, dataset, part in zip(needed, blend.datasets, parts)]
        return BlendedDataset(datasets, *index, blend.weights, blend.taken)

    def _lengthen(self, samples: int, dataset: Dataset, part: Part) -> Dataset:
        """Return the dataset; if it has fewer than ``samples``, with another order of its source appended."""
        missing = samples - len(dataset)
        return dataset if missing <= 0 else ChainedDataset([*stretches_of(dataset), self.one_source(part, missing)])

    def _blend_index(self, weights: Sequence[float], size: int) -> BlendIndex:
        facts = {"weights": list(weights), "size": size}
        return self._index("blend", facts, lambda: blend_index(weights, size))

    def _index(self, kind: str, facts: Mapping[str, object], build: Callable[[], BlendIndex]) -> BlendIndex:
        tables = self._tables(kind, facts, lambda: dict(zip(("datasets", "samples"), build())))
        return tables["datasets"], tables["samples"]

    def _tables(self, kind: str, facts: Mapping[str, object], build: Callable[[], Tables], source: str = "") -> Tables:
        return build() if self.cache is None else self.cache.tables(kind, facts, build, source)
