"""Describe the data for ``--check-config``: the files of each split, their sizes, and whether they are enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.config.batch import WHOLE_RUN, Origin, final_consumed_samples
from megatron.config.data import DOCUMENT_BOUNDARY_OPTIONS
from megatron.config.data_paths import SPLITS, Blend, SplitSource, data_sources, split_shares
from megatron.config.run import RunConfig
from megatron.config.text import listed
from megatron.data.best_fit_dataset import pack_files
from megatron.data.blend_usage import blend_usage, usage_table, whole_run
from megatron.data.build import file_segment_builders, resolve_sources
from megatron.data.dataset import split_heading, split_kind
from megatron.data.dataset_info import find_tokenizer_info
from megatron.data.fim_dataset import SPARE_IDS
from megatron.data.gpt_dataset import split_ranges
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import DataSource, build_data, build_masks, note_many_epochs, split_sample_counts
from megatron.data.skipped_dataset import SKIPPED, SampleSkips

MAX_DATASETS_SHOWN = 8  # datasets listed

FEW_SEQUENCES = 100
"""A split with fewer sequences may hold no sample, so its files are opened; otherwise only headers are read."""


class DatasetUse(NamedTuple):
    """How a run reads a dataset of a blend."""

    prefix: str
    documents: int
    tokens: int
    share: float  # of the samples
    epochs: float
    padding: float | None  # share of the samples that holds no token; None if documents are not packed


def preview_data(
    config: RunConfig,
    world_size: int,
    iteration: int = 0,
    consumed_samples: int = 0,
    segments: Mapping[str, Sequence[int]] | None = None,
    origin: Origin = WHOLE_RUN,
) -> list[str]:
    """Return lines for the configuration summary, one per dataset; none for mock data.

    Reads only the size and the header of each file, unless a split might be too small for a sample. ``iteration`` and
    ``consumed_samples`` are where the run begins, ``segments`` and ``origin`` are those of `build_data`.

    Raises:
        UserError: if the data options are invalid, or skip what has been consumed.
        DataError: if a file is invalid, or the data are too small for the run, as at its start.
    """
    if config.data.mock_data:
        return []
    dp = config.parallel.data_parallel_size(world_size)
    begin = iteration, consumed_samples
    streams = config.diloco.streams
    if config.data.chat_data_path or config.data.generated:
        return _generated(config, dp, begin, segments, origin).summary()
    length, before = config.training.seq_length, streams * origin.read
    samples = before + streams * final_consumed_samples(config.training, dp, *begin)
    known_skips, position = (segments or {}).get(SKIPPED, ()), before + streams * consumed_samples
    skips = SampleSkips(config.data, length, known_skips, position, config.training.phase_name)
    tokens = (skips.ranges.end(samples) - skips.ranges.end(before)) * length  # skipped ones included
    packed = None if config.data.packing == "concat" else (length, SPARE_IDS * config.data.fim_data)
    read = split_sample_counts(config.data, config.training, dp, begin, streams=streams, read=origin.read)
    sources = data_sources(config.data)
    mixture = [] if config.data.data_mixture is None else blend_usage(config, world_size, origin, begin, segments)
    if mixture:
        table = usage_table(mixture, MAX_DATASETS_SHOWN)
        rows = [f"{'train' if line is table[0] else '':<11}{line}" for line in table]
        rows += _rows({name: source for name, source in sources.items() if name != "train"}, tokens, packed)
    else:
        rows = list(_rows(sources, tokens, packed))
    prefix = config.model.attention_prefix
    if prefix or any(getattr(config.data, flag) for flag in DOCUMENT_BOUNDARY_OPTIONS):
        known = find_tokenizer_info(config.data, config.model.vocab)
        masks = build_masks(config.data, known, config.model.vocab, prefix).describe()
        rows += [f"{'documents':<11}{masks}"] if masks else []
    notes = skips.notes(samples)
    needed = {split: source for split, source in resolve_sources(config.data, read).items() if split in read}
    prefixes = dict.fromkeys(prefix for source in needed.values() for prefix in source.blend.prefixes)
    sequences = {prefix: len(IndexedDataset(prefix, verify=False)) for prefix in prefixes}
    if config.data.fim_data or any(
        _fewest_sequences(split, source, sequences) < FEW_SEQUENCES for split, source in needed.items()
    ):
        notes += file_segment_builders(config.data, read, config.training, config.model.vocab, None)[1]
    if mixture:
        most_used = max(whole_run(mixture), key=lambda use: use.epochs_at_end)
        note = note_many_epochs(most_used.name, most_used.epochs_at_end)
    else:
        train = sources["train"]
        part = 1.0 if train.split is None else split_shares(train.split)[0]
        most_read = max(_dataset_use(train.blend, tokens, part, packed), key=lambda use: use.epochs)
        note = note_many_epochs(most_read.prefix, most_read.epochs)
    if note is not None:
        notes.append(note)
    return rows + [f"{'note':<11}{note}" for note in notes]


def data_fingerprints(
    config: RunConfig,
    world_size: int,
    iteration: int = 0,
    consumed_samples: int = 0,
    segments: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, str]:
    """Return `DataSource.fingerprints` of the data that :func:`preview_data` describes; no order is built for files."""
    data, training, streams = config.data, config.training, config.diloco.streams
    dp, begin = config.parallel.data_parallel_size(world_size), (iteration, consumed_samples)
    if data.generated or data.chat_data_path:
        return _generated(config, dp, begin, segments).fingerprints
    read = split_sample_counts(data, training, dp, begin, streams=streams)
    builders, _ = file_segment_builders(data, read, training, config.model.vocab, None)
    return {split: builder.fingerprint for split, builder in builders.items()}


def _generated(
    config: RunConfig,
    dp: int,
    begin: tuple[int, int],
    segments: Mapping[str, Sequence[int]] | None,
    origin: Origin = WHOLE_RUN,
) -> DataSource:
    """Return the data of a run without token files."""
    vocab_size, stream = config.model.vocab, (0, config.diloco.streams)
    return build_data(
        config.data, config.training, vocab_size, dp, segments=segments, begin=begin, origin=origin, stream=stream
    )


def _fewest_sequences(split: str, source: SplitSource, sequences: Mapping[str, int]) -> int:
    """Return the smallest number of sequences that a split gets from one of its datasets."""
    counts = [sequences[prefix] for prefix in source.blend.prefixes]
    if source.split is None:
        return min(counts)
    return min(len(split_ranges(source.split, count)[SPLITS.index(split_kind(split))]) for count in counts)


def _rows(sources: Mapping[str, SplitSource], tokens: int, packed: tuple[int, int] | None) -> Iterator[str]:
    """Yield a line for each dataset of a run that trains on ``tokens`` tokens; see `_dataset_use`."""
    ratios = next((source.split for source in sources.values() if source.split is not None), None)
    if ratios is None:
        for name in list(sources)[:MAX_DATASETS_SHOWN]:
            lines = _datasets(sources[name].blend, tokens if name == "train" else 0, 1.0, packed)
            yield split_heading(name) + next(lines)
            yield from (f"{'':<11}{line}" for line in lines)
        if len(sources) > MAX_DATASETS_SHOWN:
            yield f"{'':<11}and {listed(list(sources)[MAX_DATASETS_SHOWN:], MAX_DATASETS_SHOWN)}"
        return
    shares = split_shares(ratios)
    parts = ", ".join(f"{split} {_percent(share)}" for split, share in zip(SPLITS, shares) if share)
    yield f"{'data':<11}of each dataset {parts}"
    yield from (f"{'':<11}{line}" for line in _datasets(sources["train"].blend, tokens, shares[0], packed))
    sets = [name.partition(":")[2] for name in sources if ":" in name]
    if sets:
        yield f"{'valid':<11}each by itself: {listed(sets, MAX_DATASETS_SHOWN)}"


def _datasets(blend: Blend, tokens: int, part: float, packed: tuple[int, int] | None) -> Iterator[str]:
    """Yield a line for each dataset of a blend, as `_dataset_use`."""
    for use in _dataset_use(blend, tokens, part, packed):
        weight = f"{_percent(use.share)} " if len(blend.prefixes) > 1 and use.share else ""
        repeats = (
            f", {use.epochs:,.1f} epochs" if use.epochs >= 1 else f", {use.epochs:.2g} epochs" if use.epochs else ""
        )
        padding = "" if use.padding is None else f", {use.padding:.2%} padding"
        yield f"{weight}{use.prefix}: {use.documents:,} documents, {use.tokens:,} tokens{repeats}{padding}"
    if len(blend.prefixes) > MAX_DATASETS_SHOWN:
        yield f"and {len(blend.prefixes) - MAX_DATASETS_SHOWN:,} more"


def _dataset_use(blend: Blend, tokens: int, part: float, packed: tuple[int, int] | None) -> list[DatasetUse]:
    """Return the listed datasets of a blend, of which the fraction ``part`` is used, with their shares and epochs.

    ``tokens`` are those that training reads, padding included. ``packed`` are the length of samples that documents are
    packed into, and what is spared for each; None if they are not.
    """
    shown = [IndexedDataset(prefix, verify=False) for prefix in blend.prefixes[:MAX_DATASETS_SHOWN]]
    lengths = [data.num_tokens for data in shown]
    weights = blend.weights or (lengths if len(shown) == len(blend.prefixes) else [0])
    total = sum(weights) or math.inf
    shares = [*(weight / total for weight in weights), *[0.0] * len(shown)]
    uses = []
    for data, size, share in zip(shown, lengths, shares):
        bins = None if packed is None else pack_files(data, range(len(data)), *packed).bins
        once = size if packed is None or bins is None else len(bins) * packed[0]
        padding = None if packed is None or bins is None else bins.padding(*packed)
        epochs = tokens * share / (once * part) if once else 0.0
        uses.append(DatasetUse(data.prefix, data.num_documents, size, share, epochs, padding))
    return uses


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
