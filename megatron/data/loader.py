"""From the configuration to the micro-batches of a step.

Every rank reads its own samples from the memory-mapped files; nothing is broadcast. Which samples a step has is a
function of the samples consumed before it, so a run that resumes has no state to restore here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.config.batch import global_batch, total_samples, total_steps, trained_samples
from megatron.config.run import DataConfig, TrainingConfig
from megatron.data.dataset import Dataset, Sample
from megatron.data.digest import PLACES_PER_BLOCK, digest
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import SPLITS, GPTDataset, extend_order, split_ranges
from megatron.data.indexed import IndexedDataset
from megatron.data.mock import MockDataset
from megatron.data.sampler import micro_batches
from megatron.data.vocabulary import dataset_prefix, unused_entries, vocabulary
from megatron.parallel.microbatch import MicroBatch

WORDS = {"train": "training", "valid": "validation", "test": "test"}
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
        notes: what a person may not have meant, a sentence each.
    """

    datasets: Mapping[str, Dataset]
    stretches: Mapping[str, tuple[int, ...]]
    used: Mapping[str, int]
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    notes: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        """Lines in the form of the configuration's summary: a split's samples and where they come from, then notes."""
        splits = [
            f"{name:<11}{count:,} samples, {self.datasets[name].describe(count * self.seq_length)}"
            for name, count in self.used.items()
        ]
        return splits + [f"{'note':<11}{note}" for note in self.notes]

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
        return micro_batches(consumed_samples, global_batch, self.micro_batch_size, dp_rank, dp_size)

    def micro_batch(self, split: str, places: range, step: int, device: torch.device | str = "cpu") -> MicroBatch:
        """The samples at ``places``, read for step ``step``.

        Raises:
            DataError: when the split has no such samples, or holds ids beyond the vocabulary.
        """
        self._dataset(split, places)
        samples = [self._sample(split, i) for i in places]
        columns = [np.stack(column) for column in zip(*samples)]
        columns.append(np.array(places, dtype=np.int64))
        tokens, labels, sample_ids = (torch.from_numpy(c).to(device, non_blocking=True) for c in columns)
        return MicroBatch(tokens, labels, torch.ones(tokens.shape, device=device), sample_ids, step)

    def _dataset(self, split: str, places: range) -> Dataset:
        """The samples of a split, which has all of ``places``."""
        if split not in self.datasets:
            has = " and ".join(WORDS[name] for name in self.datasets)
            raise DataError(f"there are no {WORDS[split]} samples in this run: it has {has or 'none'}")
        dataset = self.datasets[split]
        if places and (places[0] < 0 or places[-1] >= len(dataset)):
            outside = places[0] if places[0] < 0 else places[-1]
            raise DataError(f"{WORDS[split]} sample {outside} was asked for; this run has {len(dataset)}")
        return dataset

    def _sample(self, split: str, i: int) -> Sample:
        """Sample ``i``, all of whose ids the model knows: others would crash an embedding, or silently read padding."""
        sample = self.datasets[split][i]
        low, high = min(int(ids.min()) for ids in sample), max(int(ids.max()) for ids in sample)
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"{WORDS[split]} sample {i} holds id {low if low < 0 else high}, "
                f"but the vocabulary has ids 0..{self.vocab_size - 1}",
                f"--vocab-size {high + 1} or more, or the data of this model's tokenizer",
            )
        return sample


def requested_samples(training: TrainingConfig, dp_size: int, begin: tuple[int, int] = (0, 0)) -> dict[str, int]:
    """Samples of each split that Megatron-LM would build for such a run; they fix the order of the data.

    ``begin`` are the steps taken and the samples consumed where the run begins.
    """
    evaluation = training.eval_iters * global_batch(training, dp_size)
    steps = total_steps(training, dp_size, *begin)
    evaluations = steps // training.eval_interval + 1 if training.eval_interval else 1
    train = total_samples(training, dp_size, *begin)
    return {"train": train, "valid": evaluations * evaluation, "test": evaluation}


def used_samples(training: TrainingConfig, dp_size: int, begin: tuple[int, int] = (0, 0)) -> dict[str, int]:
    """Samples of each split that such a run reads: those of whole steps, and the same at every evaluation."""
    evaluation = training.eval_iters * global_batch(training, dp_size)
    return {"train": trained_samples(training, dp_size, *begin), "valid": evaluation, "test": evaluation}


def build_data(
    data: DataConfig,
    training: TrainingConfig,
    vocab_size: int,
    dp_size: int,
    splits: Sequence[str] = ("train", "valid"),
    stretches: Mapping[str, Sequence[int]] | None = None,
    begin: tuple[int, int] = (0, 0),
) -> DataSource:
    """The ``splits`` of a run that need samples (none for evaluation when ``eval_iters`` is 0).

    Args:
        data: where they come from.
        training: how many are needed.
        vocab_size: entries of the model's vocabulary.
        dp_size: data-parallel ranks, which the default batch depends on.
        splits: names of the splits to build.
        stretches: `DataSource.stretches` of the run that this one goes on with. Those of splits that are not built now
            are handed on.
        begin: steps taken and samples consumed by then.

    Raises:
        DataError: when the files are damaged, their tokenizer is another or has more than ``vocab_size`` ids, or a
            split that is needed has no data.
    """
    vocabulary(data, vocab_size)
    requested, used = requested_samples(training, dp_size, begin), used_samples(training, dp_size, begin)
    read = {name: used[name] for name in splits if requested[name] > 0}
    frozen = {name: tuple(counts) for name, counts in (stretches or {}).items()}
    begun = {name: frozen.get(name) or (requested[name],) for name in read}
    indexed = None if data.mock_data else IndexedDataset(dataset_prefix(data))
    built = {
        name: _generated(name, begun[name], count, training, vocab_size)
        if indexed is None
        else _of_files(name, begun[name], read, indexed, data.split or "969, 30, 1", training)
        for name, count in read.items()
    }
    datasets = {name: dataset for name, (dataset, _) in built.items()}
    grown = {name: counts for name, (_, counts) in built.items()}
    notes = (
        repeated(datasets, used["train"] * training.seq_length),
        unused_entries(data, vocab_size),
        *(_extended(name, begun[name], grown[name]) for name in read),
    )
    told = tuple(note for note in notes if note)
    return DataSource(datasets, frozen | grown, read, training.seq_length, training.micro_batch_size, vocab_size, told)


def repeated(datasets: Mapping[str, Dataset], tokens: int) -> str | None:
    """A note where ``tokens`` tokens of training are more than a few epochs."""
    train = datasets.get("train")
    if not isinstance(train, GPTDataset) or tokens <= FEW_EPOCHS * train.order.tokens:
        return None
    epochs = tokens / train.order.tokens
    return f"training reads its data {epochs:,.1f} times; beyond {FEW_EPOCHS}, more text is worth more than more epochs"


def _extended(split: str, before: Sequence[int], after: Sequence[int]) -> str | None:
    """A note where a split got another stretch."""
    if len(after) == len(before):
        return None
    planned = " + ".join(f"{count:,}" for count in before)
    return f"the {WORDS[split]} data, laid out for {planned} samples, are used up: {after[-1]:,} of a new order follow"


def _generated(
    name: str, stretches: tuple[int, ...], used: int, training: TrainingConfig, vocab_size: int
) -> tuple[Dataset, tuple[int, ...]]:
    """Generated samples and their stretches, with one more where they are fewer than ``used``."""
    missing = used - sum(stretches)
    stretches = (*stretches, missing) if missing > 0 else stretches
    stream = SPLITS.index(name)
    return MockDataset(vocab_size, training.seq_length, sum(stretches), training.seed, stream), stretches


def _of_files(
    name: str,
    stretches: tuple[int, ...],
    read: Mapping[str, int],
    indexed: IndexedDataset,
    split: str,
    training: TrainingConfig,
) -> tuple[Dataset, tuple[int, ...]]:
    """Samples of a part of the files and their stretches, with one more where they are fewer than the run reads."""
    part = split_ranges(split, len(indexed))[SPLITS.index(name)]
    if not part:
        raise _empty_split(name, split, indexed, read)
    lengths, seq_length = indexed.lengths, training.seq_length
    order, stretches = extend_order(lengths, part, stretches, read[name], seq_length, training.seed)
    return GPTDataset(indexed, order), stretches


def _empty_split(name: str, split: str, indexed: IndexedDataset, read: Mapping[str, int]) -> DataError:
    """A split that got no sequences, with one that gives every needed part at least one."""
    others = [int(other in read) for other in SPLITS[1:]]
    train = len(indexed) - sum(others)
    fixes = [f"--split {train},{others[0]},{others[1]}"] if train > 0 else []
    return DataError(
        f"--split '{split}' leaves no {WORDS[name]} data of the {len(indexed)} sequences in {indexed.prefix}, "
        f"but {read[name]} samples are needed",
        *fixes,
        f"a dataset of more documents than {len(indexed)}",
    )
