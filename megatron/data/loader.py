"""From the configuration to the micro-batches of a step.

Every rank reads its own samples from the memory-mapped files; nothing is broadcast. Which samples a step has is a
function of the samples consumed before it, so a run that resumes has no state to restore here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.batch import global_batch, total_samples, total_steps, trained_samples
from megatron.config.data_paths import SPLITS, data_sources
from megatron.config.run import AFTER_DOCUMENTS, DataConfig, TrainingConfig
from megatron.data.cache import Cache
from megatron.data.dataset import Dataset, Sample
from megatron.data.digest import PLACES_PER_BLOCK, digest
from megatron.data.errors import DataError
from megatron.data.files.open_files import allow_many
from megatron.data.masks import Masks, document_boundaries
from megatron.data.sampler import micro_batches
from megatron.data.splits import kind_of, spoken, titled
from megatron.data.stretches import generators, lay_out, readers
from megatron.data.vocabulary import Known, end_of_document, fitting, known_tokenizer, unrecorded, unused_entries

if TYPE_CHECKING:
    import torch

    from megatron.parallel.microbatch import MicroBatch

PLAIN = Masks()
MOST_LINES = 10
FEW_EPOCHS = 4  # up to here repeated text is worth almost as much as new text (Muennighoff et al., arXiv 2305.16264)


@dataclass(frozen=True)
class DataSource:
    """The samples of a run.

    Attributes:
        datasets: by split name, those asked for that need samples.
        stretches: by split name, the numbers of samples its order was made for, one after another. They fix the order:
            a run that resumes gives them to `build_data`, and earlier samples keep their places however long it gets.
        used: samples that the run reads of each of them.
        seq_length: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
        vocab_size: entries of the model's vocabulary; no id may be beyond.
        padded: whether a global batch need not fill the micro-batches of all ranks.
        masks: what special ids do in them.
        notes: what a person may not have meant, a sentence each.
    """

    datasets: Mapping[str, Dataset]
    stretches: Mapping[str, tuple[int, ...]]
    used: Mapping[str, int]
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    masks: Masks = PLAIN
    padded: bool = False
    notes: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        """Lines in the form of the configuration's summary: a split's samples and where they come from, then notes."""
        lines = [line for name, count in self.used.items() for line in self._summary_of(name, count)]
        documents = self.masks.describe()
        lines += [f"{'documents':<11}{documents}"] if documents else []
        return lines + [f"{'note':<11}{note}" for note in self.notes]

    def _summary_of(self, name: str, count: int) -> list[str]:
        """A line for a split of one source; with several, a line for each of the most read ones below it."""
        title, dataset = f"{titled(name)}{count:,} samples", self.datasets[name]
        readings = sorted(dataset.readings(count), key=lambda reading: -reading.tokens)
        if len(readings) <= 1:
            return [f"{title}, {dataset.describe(count * self.seq_length)}"]
        rest = readings[MOST_LINES:]
        more = [f"{sum(reading.tokens for reading in rest):,} tokens of {len(rest)} others"] if rest else []
        return [
            f"{title} of {len(readings)} sources",
            *(f"{'':<13}{line}" for line in [*map(str, readings[:MOST_LINES]), *more]),
        ]

    @property
    def fingerprints(self) -> dict[str, str]:
        """By split name, 16 hexadecimal digits of what its samples are made from (`Dataset.fingerprint`)."""
        return {name: dataset.fingerprint for name, dataset in self.datasets.items()}

    def digest(self, split: str, first: int, stop: int) -> int:
        """64 bits that say which samples are at places ``first .. stop - 1``, and what they are made from.

        It is a sum modulo 2**64 over the places: digests of parts, in whatever order they were read, add up to that
        of the whole.

        Raises:
            DataError: when the split has no such samples.
        """
        starts = range(first, stop, PLACES_PER_BLOCK)
        return self.digest_places(split, (range(at, min(at + PLACES_PER_BLOCK, stop)) for at in starts))

    def digest_places(self, split: str, groups: Iterable[range]) -> int:
        """The `digest` of the places in all ``groups``, such as those of `share`.

        Raises:
            DataError: when the split has no such samples.
        """
        total = 0
        for places in groups:
            dataset = self._dataset(split, places)
            numbers = np.arange(places.start, places.stop, places.step)
            total += digest(numbers, dataset.identities(numbers), int(dataset.fingerprint, 16))
        return total % 2**64

    def share(self, split: str, consumed_samples: int, global_batch: int, dp_rank: int, dp_size: int) -> list[range]:
        """Places of this data-parallel rank's micro-batches of the global batch that starts at ``consumed_samples``.

        Evaluation counts ``consumed_samples`` from 0 each time, so that all evaluations of a run see the same
        batches and their losses can be compared (Megatron-LM moves on through the validation data).

        Raises:
            DataError: when the split has no such samples.
        """
        self._dataset(split, range(consumed_samples, consumed_samples + global_batch))
        return micro_batches(consumed_samples, global_batch, self.micro_batch_size, dp_rank, dp_size, self.padded)

    def micro_batch(self, split: str, places: range, step: int, device: torch.device | str = "cpu") -> MicroBatch:
        """The samples at ``places``, read for step ``step``, and padding where they are not a micro-batch.

        Padding is the sample before the end of ``places`` again, of which no label counts. It has that sample's
        identity too, so what a rank computes of it, dropout included, is finite where the sample itself is.

        Raises:
            DataError: when the split has no such samples, or holds ids beyond the vocabulary.
        """
        self._dataset(split, places)
        import torch  # whoever only lays the samples out does not wait for it

        from megatron.parallel.microbatch import MicroBatch

        def tensor(column: NDArray[Any]) -> torch.Tensor:
            host = torch.from_numpy(column)
            if torch.device(device).type == "cuda":
                host = host.pin_memory()  # a GPU fetches from such memory by itself, and nobody waits
            return host.to(device, non_blocking=True)

        missing = self.micro_batch_size - len(places) if self.padded else 0
        ids = [*places, *[places.stop - 1] * missing]
        tokens, labels = (np.stack(column) for column in zip(*(self._sample(split, i) for i in ids)))
        columns = self.masks.columns(tokens, labels)
        columns.loss_mask[len(places) :] = 0.0
        return MicroBatch(
            tensor(columns.tokens),
            tensor(columns.labels),
            tensor(columns.loss_mask),
            tensor(np.array(ids, dtype=np.int64)),
            step,
            None if columns.positions is None else tensor(columns.positions),
            None if columns.documents is None else tensor(columns.documents),
            None if columns.documents is None else tensor(document_boundaries(columns.documents)),
        )

    def _dataset(self, split: str, places: range) -> Dataset:
        """The samples of a split, which has all of ``places``."""
        if split not in self.datasets:
            has = " and ".join(map(spoken, self.datasets))
            raise DataError(f"there are no {spoken(split)} samples in this run: it has {has or 'none'}")
        dataset = self.datasets[split]
        if places and (places[0] < 0 or places[-1] >= len(dataset)):
            outside = places[0] if places[0] < 0 else places[-1]
            raise DataError(f"{spoken(split)} sample {outside} was asked for; this run has {len(dataset)}")
        return dataset

    def _sample(self, split: str, i: int) -> Sample:
        """Sample ``i``, all of whose ids the model knows: others would crash an embedding, or silently read padding."""
        sample = self.datasets[split][i]
        low, high = min(int(ids.min()) for ids in sample), max(int(ids.max()) for ids in sample)
        if low < 0 or high >= self.vocab_size:
            source = source_of(self.datasets[split], i)
            raise DataError(
                f"{spoken(split)} sample {i} holds id {low if low < 0 else high}, "
                f"but the vocabulary has ids 0..{self.vocab_size - 1}" + (f"; it is from {source}" if source else ""),
                f"--vocab-size {high + 1} or more, or the data of this model's tokenizer",
            )
        return sample


def source_of(dataset: Dataset, i: int) -> str | None:
    """The source of which sample ``i`` reads; None where it is generated."""
    pairs = zip(dataset.readings(i), dataset.readings(i + 1))
    return next((after.source for before, after in pairs if after.tokens > before.tokens), None)


def requested_samples(training: TrainingConfig, dp_size: int, begin: tuple[int, int] = (0, 0)) -> dict[str, int]:
    """Samples of each kind of split that Megatron-LM would build for such a run; they fix the order of the data.

    ``begin`` are the steps taken and the samples consumed where the run begins.
    """
    evaluation = training.eval_iters * global_batch(training, dp_size)
    steps = total_steps(training, dp_size, *begin)
    evaluations = steps // training.eval_interval + 1 if training.eval_interval else 1
    train = total_samples(training, dp_size, *begin)
    return {"train": train, "valid": evaluations * evaluation, "test": evaluation}


def used_samples(training: TrainingConfig, dp_size: int, begin: tuple[int, int] = (0, 0)) -> dict[str, int]:
    """Samples of each kind of split that such a run reads: those of whole steps, and the same at every evaluation."""
    evaluation = training.eval_iters * global_batch(training, dp_size)
    return {"train": trained_samples(training, dp_size, *begin), "valid": evaluation, "test": evaluation}


def samples_read(
    data: DataConfig,
    training: TrainingConfig,
    dp_size: int,
    begin: tuple[int, int] = (0, 0),
    splits: Sequence[str] | None = None,
) -> dict[str, int]:
    """By split name, the samples that a run reads: of ``splits``, or of all that it has data for, if it needs any."""
    requested, used = requested_samples(training, dp_size, begin), used_samples(training, dp_size, begin)
    names = split_names(data, training.eval_iters > 0) if splits is None else splits
    return {name: used[kind_of(name)] for name in names if requested[kind_of(name)] > 0}


def build_data(
    data: DataConfig,
    training: TrainingConfig,
    vocab_size: int,
    dp_size: int,
    splits: Sequence[str] | None = None,
    stretches: Mapping[str, Sequence[int]] | None = None,
    begin: tuple[int, int] = (0, 0),
) -> DataSource:
    """The splits of a run that need samples (none for evaluation when ``eval_iters`` is 0).

    Args:
        data: where they come from.
        training: how many are needed.
        vocab_size: entries of the model's vocabulary.
        dp_size: data-parallel ranks, which the default batch depends on.
        splits: names of the splits to build; None for all that there are data for.
        stretches: `DataSource.stretches` of the run that this one goes on with. Those of splits that are not built now
            are handed on.
        begin: steps taken and samples consumed by then.

    Raises:
        DataError: when the files are damaged, their tokenizer is another or has more than ``vocab_size`` ids, what
            ends a document must be known and is not, or a split that is needed has no data.
        UserError: when what names the files cannot be understood.
    """
    allow_many()
    known = known_tokenizer(data, vocab_size)
    fitting(known, vocab_size)
    masks = masks_of(data, known, vocab_size)
    requested = requested_samples(training, dp_size, begin)
    frozen = {name: tuple(counts) for name, counts in (stretches or {}).items()}
    read = samples_read(data, training, dp_size, begin, splits)
    cache = Cache(data.data_cache_path) if data.data_cache_path is not None else None
    makers, notes = (generators(training, vocab_size), []) if data.mock_data else readers(data, read, training, cache)
    read = {name: count for name, count in read.items() if name in makers}
    begun = {name: frozen.get(name) or (requested[kind_of(name)],) for name in read}
    built = {name: lay_out(name, makers[name], begun[name], count) for name, count in read.items()}
    datasets = {name: dataset for name, (dataset, _) in built.items()}
    grown = {name: counts for name, (_, counts) in built.items()}
    told = (
        repeated(datasets, read),
        unused_entries(known, vocab_size),
        unrecorded(data),
        *notes,
        *(extended(name, frozen[name], grown[name]) for name in read if name in frozen),
        *(cache.notes if cache is not None else ()),
    )
    return DataSource(
        datasets,
        frozen | grown,
        read,
        training.seq_length,
        training.micro_batch_size,
        vocab_size,
        masks,
        training.pad_global_batch,
        tuple(note for note in told if note),
    )


def split_names(data: DataConfig, evaluates: bool) -> list[str]:
    """The splits of a run: those that there are data for, and those that it cannot do without."""
    has = list(SPLITS) if data.mock_data else list(data_sources(data))
    needs = ("train", "valid") if evaluates else ("train",)
    missing = [kind for kind in needs if kind not in map(kind_of, has)]
    return sorted([*has, *missing], key=lambda name: SPLITS.index(kind_of(name)))


def masks_of(data: DataConfig, known: Known | None, vocab_size: int) -> Masks:
    """What special ids do in the samples of a run.

    Raises:
        DataError: when what ends a document must be known and nothing says it, or what is said cannot be.
    """
    if data.mock_data:
        return Masks()
    wanted = [flag for flag in AFTER_DOCUMENTS if getattr(data, flag)]
    eod = end_of_document(data, known, vocab_size)
    if wanted and eod is None:
        flag = f"--{wanted[0].replace('_', '-')}"
        raise DataError(
            f"{flag} needs the id that ends a document, and nothing beside the data says which it is",
            "--eod-id ID",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR_OR_tokenizer.json",
        )
    pad = None if known is None else known.pad
    return Masks(eod, pad, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


def repeated(datasets: Mapping[str, Dataset], used: Mapping[str, int]) -> str | None:
    """A note where training reads a source more than a few times."""
    readings = datasets["train"].readings(used["train"]) if "train" in datasets else ()
    most = max(readings, key=lambda reading: reading.epochs, default=None)
    return None if most is None else many_epochs(most.source, most.epochs)


def many_epochs(source: str, epochs: float) -> str | None:
    """A note where a source is read more than a few times."""
    if epochs <= FEW_EPOCHS:
        return None
    return f"training reads {source} {epochs:,.1f} times; beyond {FEW_EPOCHS}, more text is worth more than more epochs"


def extended(split: str, before: Sequence[int], after: Sequence[int]) -> str | None:
    """A note where a run that goes on got more stretches of a split than it had."""
    if len(after) == len(before):
        return None
    planned, more = (" + ".join(f"{count:,}" for count in some) for some in (before, after[len(before) :]))
    return f"the {spoken(split)} data, laid out for {planned} samples, are used up: {more} more follow"
