"""From the configuration to the micro-batches of a step.

Every rank reads its own samples from memory-mapped files; nothing is broadcast. The samples of a step are a function
of the samples consumed before it (`rank_micro_batches`), so there is no loader state to restore on resume.
`build_data` builds the splits; `DataSource.micro_batch` reads samples, applies the masks and returns a `MicroBatch`.

Shapes: b samples of s tokens. The order of masking is Megatron-LM's: documents and positions are computed from the
tokens as stored, padding ids are replaced last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.batch import (
    WHOLE_RUN,
    Origin,
    final_consumed_samples,
    final_iteration,
    full_global_batch_size,
    planned_samples,
)
from megatron.config.data import DOCUMENT_BOUNDARY_OPTIONS, DataConfig
from megatron.config.data_paths import SPLITS, chat_splits, data_sources
from megatron.config.text import counted
from megatron.config.training import TrainingConfig
from megatron.data.build import (
    TABLE_CHECKS,
    SegmentBuilder,
    build_split,
    chat_segment_builders,
    file_segment_builders,
    generated_segment_builders,
)
from megatron.data.chat import load_conversations
from megatron.data.dataset import DIGEST_BLOCK, Dataset, Sample, sample_digest, split_heading, split_kind, split_label
from megatron.data.dataset_info import (
    check_vocab_size,
    find_eod_id,
    find_tokenizer_info,
    note_missing_records,
    note_unused_entries,
)
from megatron.data.errors import DataError
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import raise_open_file_limit
from megatron.data.skipped_dataset import SKIPPED, PlaceRanges, SampleSkips
from megatron.data.teacher_logits import with_teacher_logits
from megatron.data.tokenizers.tokenizer import TokenizerRecord

if TYPE_CHECKING:
    import torch

    from megatron.distributed.micro_batch import MicroBatch

PAD_REPLACEMENT = 0  # replaces the padding id in tokens and labels


def rank_micro_batches(
    consumed_samples: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int, padded: bool = False
) -> list[range]:
    """Return the places in the sample stream of each of this rank's micro-batches, in the order of computation.

    The global batch is the next ``global_batch`` places. It is cut into groups of ``micro_batch * dp_size``; of each
    group, data-parallel rank ``r`` computes places ``[r * micro_batch, (r + 1) * micro_batch)`` (Megatron-LM's "single"
    order), so a growing batch size never moves a sample to another place. If ``padded``, the last group need not be
    full: its micro-batches are then shorter, or empty ranges at the end of the global batch.

    Raises:
        ValueError: when the groups do not fill the global batch and ``padded`` is False.
    """
    group = micro_batch * dp_size
    if group <= 0 or global_batch <= 0 or (global_batch % group and not padded):
        raise ValueError(
            f"a global batch of {global_batch} is not a multiple of micro-batch {micro_batch} x DP {dp_size} = {group}"
        )
    end = consumed_samples + global_batch
    starts = (first + dp_rank * micro_batch for first in range(consumed_samples, end, group))
    return [range(min(start, end), min(start + micro_batch, end)) for start in starts]


class BatchArrays(NamedTuple):
    """A micro-batch as arrays."""

    tokens: NDArray[np.int64]  # int64 [b, s], the model's inputs
    labels: NDArray[np.int64]  # int64 [b, s], the next token at each position
    loss_mask: NDArray[np.float32]  # float32 [b, s], 1 where a label counts, else 0
    positions: NDArray[np.int64] | None  # int64 [b, s]; None: 0..s-1 in every sample
    documents: NDArray[np.int64] | None  # int64 [b, s]; None: attention sees the whole sample
    boundaries: NDArray[np.int32] | None = None  # int32 [documents + 1], `document_boundaries` of ``documents``
    extra: Mapping[str, NDArray[Any]] = MappingProxyType({})  # [b, s, ...] each, by name

    def cut(self, positions: NDArray[np.int64]) -> BatchArrays:
        """Return the tokens at ``positions``; documents stay whole, as attention needs those of all tokens."""
        tokens, labels, loss_mask = self.tokens[:, positions], self.labels[:, positions], self.loss_mask[:, positions]
        places = np.tile(positions, (len(tokens), 1)) if self.positions is None else self.positions[:, positions]
        extra = {name: column[:, positions] for name, column in self.extra.items()}
        return BatchArrays(tokens, labels, loss_mask, places, self.documents, self.boundaries, extra)

    def with_columns(self, add: SampleColumns, eod: int | None) -> BatchArrays:
        """Add columns of whole samples; ``eod`` ends a document if the masks are derived from it."""
        return self._replace(extra={**self.extra, **add(self, eod)})


SampleColumns = Callable[[BatchArrays, int | None], Mapping[str, NDArray[Any]]]
"""Computes further columns ``[b, s, ...]`` by name (:mod:`megatron.data.sample_columns`) from whole samples, before
context parallelism cuts these, and the id that ends a document, if the masks are derived from it."""


@dataclass(frozen=True)
class MaskBuilder:
    """Masks that a run derives from its samples: from their documents, or from the special ids in them."""

    eod: int | None = None  # the id that ends a document; None if no mask needs it
    pad: int | None = None  # the padding id; None if there is none, or if it has another meaning too
    reset_positions: bool = False  # restart positions in every document
    reset_attention: bool = False  # no attention across documents
    mask_eod_loss: bool = False  # no loss where the input is ``eod``: the start of a document cannot be predicted
    reset_pattern: bool = False  # attention patterns restart in every document
    prefix: int = 0  # first tokens that attend to each other in both directions: no loss where the label is visible

    def describe(self) -> str | None:
        """Describe the masks for the run's summary; None if there are none."""
        effects = {
            "no attention across documents": self.reset_attention,
            "positions restart in each": self.reset_positions,
            "the attention pattern restarts in each": self.reset_pattern,
            "no loss on the first token of each": self.mask_eod_loss,
        }
        active = ", ".join(text for text, is_on in effects.items() if is_on and self.eod is not None)
        parts = [f"end with id {self.eod}: {active}"] if active else []
        if self.prefix > 1:
            of_each = " of each" if self.reset_pattern else ""
            parts.append(f"no loss on the first {counted(self.prefix - 1, 'label')}{of_each}, which the prefix shows")
        return "; ".join(parts) or None

    def build(
        self,
        tokens: NDArray[np.int64],
        labels: NDArray[np.int64],
        loss_mask: NDArray[np.float32] | None = None,
        documents: NDArray[np.int64] | None = None,
    ) -> BatchArrays:
        """Build the arrays of a micro-batch, from columns ``[b, s]`` as in `Sample`, which are not modified."""
        loss_mask = np.ones(tokens.shape, dtype=np.float32) if loss_mask is None else loss_mask.copy()
        ids = documents
        if self.eod is not None:
            loss_mask[(tokens == self.eod) & self.mask_eod_loss] = 0.0
            if ids is None:
                ids = np.zeros(tokens.shape, dtype=np.int64)  # documents that end before; the id ends its own one
                np.cumsum(tokens[:, :-1] == self.eod, axis=1, out=ids[:, 1:])
        positions = positions_in_documents(ids) if ids is not None and self.reset_positions else None
        documents = ids if self.reset_attention else None
        places = np.arange(tokens.shape[1]) if ids is None or not self.reset_pattern else positions_in_documents(ids)
        loss_mask[np.broadcast_to(places < self.prefix - 1, tokens.shape)] = 0.0
        if self.pad is not None:
            loss_mask[labels == self.pad] = 0.0
            tokens, labels = (np.where(row == self.pad, PAD_REPLACEMENT, row) for row in (tokens, labels))
        boundaries = None if documents is None else document_boundaries(documents)
        return BatchArrays(tokens, labels, loss_mask, positions, documents, boundaries)

    def build_samples(self, samples: Sequence[Sample]) -> BatchArrays:
        """Build the arrays of a micro-batch of samples, which have the same columns."""
        columns: list[Any] = [
            None if column[0] is None else np.stack(column) for column in zip(*(s[:-1] for s in samples))
        ]
        extra = {name: np.stack([sample.extra[name] for sample in samples]) for name in samples[0].extra}
        return self.build(*columns)._replace(extra=extra)


def document_boundaries(documents: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return where each run of equal ids starts in the flattened ``documents [b, s]``, then the total size.

    These are the cumulative sequence lengths that variable-length attention kernels take.
    """
    begins = np.ones(documents.shape, dtype=np.bool_)
    np.not_equal(documents[:, 1:], documents[:, :-1], out=begins[:, 1:])
    return np.append(np.flatnonzero(begins), documents.size).astype(np.int32)


def positions_in_documents(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each token in its run of equal ids in ``documents [b, s]``."""
    places = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int64), documents.shape)
    starts = np.zeros(documents.shape, dtype=np.int64)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], places[:, 1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)


MAX_SUMMARY_SOURCES = 10
MAX_USEFUL_EPOCHS = 4  # up to here repeated text is almost as good as new text (Muennighoff et al., arXiv 2305.16264)


@dataclass(frozen=True)
class DataSource:
    """The splits of a run and how micro-batches are read from them."""

    datasets: Mapping[str, Dataset]  # by split name
    # By split name: the sample counts of its segments, which fix the order. A resumed run passes `laid_out` to
    # `build_data`, so that earlier samples keep their places however long it gets.
    segments: Mapping[str, tuple[int, ...]]
    used: Mapping[str, int]  # samples the run reads, by split name
    seq_length: int  # tokens per sample
    micro_batch_size: int  # samples per micro-batch
    vocab_size: int  # size of the model's vocabulary; larger ids are errors
    masks: MaskBuilder = field(default_factory=MaskBuilder)
    padded: bool = False  # whether a global batch may leave micro-batches partly filled
    # index and number of the streams that training samples are dealt to in turn: one for each replica of DiLoCo
    stream: tuple[int, int] = (0, 1)
    origin: Origin = WHOLE_RUN  # of the phase of the run that reads them
    columns: tuple[SampleColumns, ...] = ()  # what the model reads beside tokens and labels
    mixture: Mapping[str, Any] = field(default_factory=dict)  # what decides its order, besides files; empty without one
    skipped: PlaceRanges = field(default_factory=PlaceRanges)  # places of training samples that are left out
    notes: tuple[str, ...] = ()  # warnings for the user, a sentence each

    def summary(self) -> list[str]:
        """Return the lines of the run's summary: each split's samples and sources, then notes."""
        lines = []
        for name, count in self.used.items():
            dataset = self.datasets[name]
            title = f"{split_heading(name)}{count:,} samples"
            usage = sorted(dataset.planned_usage(count), key=lambda source: -source.tokens)
            if len(usage) <= 1:
                lines.append(f"{title}, {dataset.describe(count * self.seq_length)}")
                continue
            lines.append(f"{title} of {len(usage)} sources")
            lines += [f"{'':<13}{source}" for source in usage[:MAX_SUMMARY_SOURCES]]
            rest = usage[MAX_SUMMARY_SOURCES:]
            if rest:
                lines.append(f"{'':<13}{sum(source.tokens for source in rest):,} tokens of {len(rest)} others")
        documents = self.masks.describe()
        if documents:
            lines.append(f"{'documents':<11}{documents}")
        return lines + [f"{'note':<11}{note}" for note in self.notes]

    @property
    def fingerprints(self) -> dict[str, str]:
        """`Dataset.fingerprint` by split name."""
        return {name: dataset.fingerprint for name, dataset in self.datasets.items()}

    def laid_out(self, read: int) -> dict[str, list[int]]:
        """Return ``segments``, and under `SKIPPED` the places skipped before the sample that follows ``read``."""
        skipped = self.skipped.clip(0, self.skipped.end(self.stream[1] * read))
        lists = {name: list(counts) for name, counts in self.segments.items()}
        return lists | ({SKIPPED: skipped.to_list()} if skipped else {})

    def tokens_of_sources(self, read: int) -> dict[str, int]:
        """Return the tokens read of each source since the beginning of the run, by :attr:`SourceUsage.source`.

        Args:
            read: training samples read of each stream of these data.
        """
        tokens, count, dataset = dict(self.origin.sources), self.stream[1], self.datasets["train"]
        before = {usage.source: usage.tokens for usage in dataset.source_usage(count * self.origin.read)}
        for usage in dataset.source_usage(count * read):
            tokens[usage.source] = tokens.get(usage.source, 0) + usage.tokens - before.get(usage.source, 0)
        return tokens

    def digest(self, split: str, first: int, stop: int) -> int:
        """Return a 64-bit digest of samples ``first .. stop - 1`` of the stream and of what they are made from.

        It is a sum modulo 2**64 over the places: digests of parts add up to that of the whole.
        """
        starts = range(first, stop, DIGEST_BLOCK)
        blocks = (range(at, min(at + DIGEST_BLOCK, stop)) for at in starts)
        return self.digest_places(split, (self.stream_places(split, block) for block in blocks))

    def stream_places(self, split: str, samples: range) -> range:
        """Return the places of consecutive samples of this replica's stream: sample i of stream k of n is at n i + k.

        Together, the streams of n replicas read the batches of one run with n times the batch size.
        """
        index, count = self.stream if split == "train" else (0, 1)
        # the last place before the end is the stream's own, also of an empty range: padding repeats it
        return range(samples.start * count + index, (samples.stop - 1) * count + index + 1, count)

    def digest_places(self, split: str, groups: Iterable[range]) -> int:
        """Return the `sample_digest` of all places in ``groups``, such as those returned by `rank_places`."""
        total = 0
        for places in groups:
            dataset = self._dataset(split, places)
            numbers = np.arange(places.start, places.stop, places.step)
            total += sample_digest(numbers, dataset.sample_hashes(numbers), int(dataset.fingerprint, 16))
        return total % 2**64

    def rank_places(
        self, split: str, consumed_samples: int, global_batch: int, dp_rank: int, dp_size: int
    ) -> list[range]:
        """Return the places of this rank's micro-batches in a global batch, as `rank_micro_batches`.

        Evaluation counts ``consumed_samples`` from 0 each time, so that all evaluations of a run read the same samples
        and their losses can be compared (Megatron-LM advances through the validation data).
        """
        self._dataset(split, self.stream_places(split, range(consumed_samples, consumed_samples + global_batch)))
        batches = rank_micro_batches(
            consumed_samples, global_batch, self.micro_batch_size, dp_rank, dp_size, self.padded
        )
        return [self.stream_places(split, batch) for batch in batches]

    def micro_batch(
        self,
        split: str,
        places: range,
        step: int,
        device: torch.device | str = "cpu",
        rows: tuple[range, ...] | None = None,
    ) -> MicroBatch:
        """Read the samples at ``places`` as a micro-batch of step ``step``, padded to the micro-batch size.

        ``rows`` are the positions of the tokens that this rank holds of every sample; None for all of them.

        Padding repeats the sample before the end of ``places`` with loss mask 0. It also has that sample's id, so that
        its activations, dropout included, are finite whenever those of the real sample are.

        Raises:
            DataError: when the split has no such samples, or holds ids beyond the vocabulary.
        """
        dataset = self._dataset(split, places)
        import torch  # here, so that tools that only build the index do not wait for the import

        from megatron.distributed.micro_batch import MicroBatch

        def tensor(column: NDArray[Any]) -> torch.Tensor:
            host = torch.from_numpy(column)
            if torch.device(device).type == "cuda":
                host = host.pin_memory()  # makes the copy to the GPU asynchronous
            return host.to(device, non_blocking=True)

        missing = self.micro_batch_size - len(places) if self.padded else 0
        ids = [*places, *[places.stop - 1] * missing]
        samples = [self._sample(split, dataset, i) for i in ids]
        arrays = self.masks.build_samples(samples)
        arrays.loss_mask[len(places) :] = 0.0
        for add in self.columns:
            arrays = arrays.with_columns(add, self.masks.eod)
        if rows is not None:
            arrays = arrays.cut(np.concatenate([np.arange(r.start, r.stop) for r in rows]))
        columns: dict[str, Any] = {name: column for name, column in arrays._asdict().items() if column is not None}
        extra = {name: tensor(column) for name, column in columns.pop("extra").items()}
        columns = {name: tensor(column) for name, column in columns.items()}
        return MicroBatch(
            sample_ids=tensor(np.array(ids, dtype=np.int64)),
            step=step,
            pattern_restarts=self.masks.reset_pattern,
            host_documents=None if arrays.documents is None else torch.from_numpy(arrays.documents),
            seq_length=None if rows is None else self.seq_length,
            extra=extra,
            **columns,
        )

    def _dataset(self, split: str, places: range) -> Dataset:
        """Return the dataset of a split after checking that it has ``places``."""
        if split not in self.datasets:
            has = " and ".join(map(split_label, self.datasets))
            raise DataError(f"there are no {split_label(split)} samples in this run: it has {has or 'none'}")
        dataset = self.datasets[split]
        if places and (places[0] < 0 or places[-1] >= len(dataset)):
            outside = places[0] if places[0] < 0 else places[-1]
            raise DataError(f"{split_label(split)} sample {outside} is out of range: this run has {len(dataset)}")
        return dataset

    def _sample(self, split: str, dataset: Dataset, i: int) -> Sample:
        """Return sample ``i`` after checking its ids: others would crash the embedding or read vocabulary padding."""
        try:
            sample = dataset[i]
            if len(sample.tokens) != self.seq_length:
                raise IndexError(f"it has {len(sample.tokens):,} tokens instead of {self.seq_length:,}")
        except DataError:  # of an object store
            raise
        except (IndexError, ValueError) as error:
            seen = f"{split_label(split)} sample {i} cannot be read: {error}; its index table is not that of the data"
            raise DataError(seen, "--data-cache-path ANOTHER") from error
        ids = np.concatenate([sample.tokens, sample.labels])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            source = find_source(dataset, i)
            raise DataError(
                f"{split_label(split)} sample {i} holds id {low if low < 0 else high}, "
                f"but the vocabulary has ids 0..{self.vocab_size - 1}" + (f"; it is from {source}" if source else ""),
                f"--vocab-size {high + 1} or more, or the data of this model's tokenizer",
            )
        return sample


def find_source(dataset: Dataset, i: int) -> str | None:
    """Return the source that sample ``i`` is read from; None for generated data."""
    if spans := dataset.spans(i):
        return spans[0].source
    pairs = zip(dataset.source_usage(i), dataset.source_usage(i + 1))
    return next((after.source for before, after in pairs if after.tokens > before.tokens), None)


def requested_samples(training: TrainingConfig, dp_size: int, begin: tuple[int, int] = (0, 0)) -> dict[str, int]:
    """Return the samples per kind of split that Megatron-LM would build; they fix the order of the data.

    ``begin`` is (steps taken, samples consumed) where the run begins.
    """
    evaluation = training.eval_iters * full_global_batch_size(training, dp_size)
    steps = final_iteration(training, dp_size, *begin)
    evaluations = steps // training.eval_interval + 1 if training.eval_interval else 1
    train = planned_samples(training, dp_size, *begin)
    return {"train": train, "valid": evaluations * evaluation, "test": evaluation}


def split_sample_counts(
    data: DataConfig,
    training: TrainingConfig,
    dp_size: int,
    begin: tuple[int, int] = (0, 0),
    splits: Sequence[str] | None = None,
    streams: int = 1,
    read: int = 0,
) -> dict[str, int]:
    """Return the samples read by split name: of ``splits``, or of all that the run has data for and needs.

    ``read`` are the samples that earlier phases have read of the same data.
    """
    evaluation = training.eval_iters * full_global_batch_size(training, dp_size)  # every evaluation reads the same
    used = {
        "train": streams * (read + final_consumed_samples(training, dp_size, *begin)),
        "valid": evaluation,
        "test": evaluation,
    }
    requested = requested_samples(training, dp_size, begin)
    if splits is None:
        has = SPLITS if data.generated else chat_splits(data) or tuple(data_sources(data))
        needs = ("train", "valid") if training.eval_iters else ("train",)
        missing = [kind for kind in needs if kind not in map(split_kind, has)]
        splits = sorted([*has, *missing], key=lambda name: SPLITS.index(split_kind(name)))
    return {name: used[split_kind(name)] for name in splits if requested[split_kind(name)] > 0}


def build_data(
    data: DataConfig,
    training: TrainingConfig,
    vocab_size: int,
    dp_size: int,
    splits: Sequence[str] | None = None,
    segments: Mapping[str, Sequence[int]] | None = None,
    begin: tuple[int, int] = (0, 0),
    origin: Origin = WHOLE_RUN,
    prefix: int = 0,
    stream: tuple[int, int] = (0, 1),
    columns: tuple[SampleColumns, ...] = (),
) -> DataSource:
    """Build the splits of a run that need samples (none for evaluation when ``eval_iters`` is 0).

    Args:
        data: the source files.
        training: the number of samples and the batch size, which also depends on ``dp_size``.
        vocab_size: of the model.
        dp_size: data-parallel ranks.
        splits: to build; None for all.
        segments: `DataSource.laid_out` of the run being resumed. Entries of splits that are not built are passed on.
        begin: steps taken and samples consumed before, in the current phase.
        origin: of the phase.
        prefix: see `MaskBuilder`.
        stream: see `DataSource`.
        columns: see `DataSource`.

    Raises:
        DataError: when files are damaged, a needed split has no data, or the tokenizer does not fit the options.
        UserError: when the data path options are invalid.
    """
    raise_open_file_limit()
    known = find_tokenizer_info(data, vocab_size)
    check_vocab_size(known, vocab_size)
    masks = build_masks(data, known, vocab_size, prefix)
    used = split_sample_counts(data, training, dp_size, begin, splits, stream[1], origin.read)
    cache = None if data.data_cache_path is None else IndexCache(data.data_cache_path, TABLE_CHECKS)
    build_notes: list[str] = []
    builders: Mapping[str, SegmentBuilder]
    if data.generated:
        builders = generated_segment_builders(data, training, vocab_size)
    elif data.chat_data_path:
        builders = chat_segment_builders(data, training, stream[1] * full_global_batch_size(training, dp_size))
        pairs = training.objective == "dpo"
        build_notes = [n for name in used for n in load_conversations(data, name, training.seq_length, pairs).notes]
    else:
        batch = stream[1] * full_global_batch_size(training, dp_size)
        builders, build_notes = file_segment_builders(data, used, training, vocab_size, cache, origin, batch)
    used = {name: count for name, count in used.items() if name in builders}
    requested = requested_samples(training, dp_size, begin)
    requested["train"] *= stream[1]
    datasets: dict[str, Dataset] = {}
    all_segments = {name: tuple(counts) for name, counts in (segments or {}).items()}
    consumed = stream[1] * (origin.read + begin[1])
    skips = SampleSkips(data, training.seq_length, all_segments.pop(SKIPPED, ()), consumed, training.phase_name)
    extended = []
    for name, count in used.items():
        before = all_segments.get(name, ())
        planned = before or (requested[split_kind(name)],)
        leave_out = skips if name == "train" and skips else None
        datasets[name], all_segments[name] = build_split(name, builders[name], planned, count, leave_out)
        added = all_segments[name][len(planned) :]
        if before and added:
            further = f"{' + '.join(f'{n:,}' for n in added)} further samples follow"
            extended.append(f"the {split_label(name)} data keep the order that was planned; {further}")
    usage = datasets["train"].planned_usage(used["train"]) if "train" in datasets else ()
    most_read = max(usage, key=lambda source: source.epochs, default=None)
    notes = (
        None if most_read is None else note_many_epochs(most_read.source, most_read.epochs),
        note_unused_entries(known, vocab_size),
        note_missing_records(data),
        *build_notes,
        *extended,
        *(skips.notes(used["train"]) if "train" in used else ()),
        *(() if cache is None else cache.notes),
    )
    source = DataSource(
        datasets,
        segments=all_segments,
        used=used,
        seq_length=training.seq_length,
        micro_batch_size=training.micro_batch_size,
        vocab_size=vocab_size,
        masks=masks,
        padded=training.pad_global_batch,
        stream=stream,
        origin=origin,
        columns=columns,
        mixture={} if data.data_mixture is None else data.mixture.summary(),
        skipped=skips.ranges,
        notes=tuple(note for note in notes if note),
    )
    if training.teacher_logits is None:
        return source
    digest, folder = replace(source, stream=(0, 1)).digest, Path(training.teacher_logits)
    return replace(source, datasets=with_teacher_logits(datasets, used, digest, folder, training.distillation_top_k))


def build_masks(data: DataConfig, known: TokenizerRecord | None, vocab_size: int, prefix: int = 0) -> MaskBuilder:
    """Return the masks of a run."""
    if data.mock_data:
        return MaskBuilder(prefix=prefix)
    if data.plugin_dataset is not None or data.chat_data_path:  # documents of the samples' own are always apart
        return MaskBuilder(None, None, reset_positions=True, reset_attention=True, reset_pattern=True, prefix=prefix)
    wanted = [flag for flag in DOCUMENT_BOUNDARY_OPTIONS if getattr(data, flag)]
    eod = find_eod_id(data, known, vocab_size)
    if wanted and eod is None and data.packing == "concat":
        flag = f"--{wanted[0].replace('_', '-')}"
        raise DataError(
            f"{flag} needs the id that ends a document, and the data have no tokenizer record",
            "--eod-id ID",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR_OR_tokenizer.json",
        )
    pad = None if known is None else known.pad
    reset_pattern = data.reset_attention_mask and data.reset_attention_pattern
    resets = data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss, reset_pattern
    return MaskBuilder(eod, pad, *resets, prefix)


def note_many_epochs(source: str, epochs: float) -> str | None:
    """Return a note if ``epochs`` of a source are more than a few."""
    if epochs <= MAX_USEFUL_EPOCHS:
        return None
    return (
        f"training reads {source} {epochs:,.1f} times; "
        f"beyond {MAX_USEFUL_EPOCHS}, more text is worth more than more epochs"
    )
