"""From the configuration to the micro-batches of a step.

Every rank reads its own samples from the memory-mapped files; nothing is broadcast. Which samples a step has is a
function of the samples consumed before it, so a run that resumes has no state to restore here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.config.batch import global_batch, total_samples, total_steps, trained_samples
from megatron.config.run import DataConfig, TrainingConfig
from megatron.data.dataset import Dataset, Sample
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import SPLITS, GPTDataset, build_order, split_ranges
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
        requested: samples each of them was built for; they fix its order, so a run that resumes must ask for the same.
        used: samples that the run reads of each of them.
        seq_length: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
        vocab_size: entries of the model's vocabulary; no id may be beyond.
        notes: what a person may not have meant, a sentence each.
    """

    datasets: Mapping[str, Dataset]
    requested: Mapping[str, int]
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

    def step_batches(
        self,
        split: str,
        consumed_samples: int,
        global_batch: int,
        dp_rank: int,
        dp_size: int,
        step: int,
        device: torch.device | str = "cpu",
    ) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of the global batch that starts at ``consumed_samples``.

        Evaluation counts ``consumed_samples`` from 0 each time, so that all evaluations of a run see the same
        batches and their losses can be compared (Megatron-LM moves on through the validation data).

        Raises:
            DataError: when the split has no such samples, or holds ids beyond the vocabulary.
        """
        if split not in self.datasets:
            has = " and ".join(WORDS[name] for name in self.datasets)
            raise DataError(f"there are no {WORDS[split]} samples in this run: it has {has or 'none'}")
        last = consumed_samples + global_batch
        if last > len(self.datasets[split]):
            raise DataError(f"{WORDS[split]} sample {last - 1} was asked for; this run has {len(self.datasets[split])}")
        groups = micro_batches(consumed_samples, global_batch, self.micro_batch_size, dp_rank, dp_size)
        return [self._micro_batch(split, places, step, device) for places in groups]

    def _micro_batch(self, split: str, places: range, step: int, device: torch.device | str) -> MicroBatch:
        samples = [self._sample(split, i) for i in places]
        columns = [np.stack(column) for column in zip(*samples)]
        columns.append(np.array(places, dtype=np.int64))
        tokens, labels, sample_ids = (torch.from_numpy(c).to(device, non_blocking=True) for c in columns)
        return MicroBatch(tokens, labels, torch.ones(tokens.shape, device=device), sample_ids, step)

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


def requested_samples(training: TrainingConfig, dp_size: int) -> dict[str, int]:
    """Samples of each split that Megatron-LM would build for such a run; they fix the order of the data."""
    evaluation = training.eval_iters * global_batch(training, dp_size)
    evaluations = total_steps(training, dp_size) // training.eval_interval + 1 if training.eval_interval else 1
    return {"train": total_samples(training, dp_size), "valid": evaluations * evaluation, "test": evaluation}


def used_samples(training: TrainingConfig, dp_size: int) -> dict[str, int]:
    """Samples of each split that such a run reads: those of whole steps, and the same at every evaluation."""
    evaluation = training.eval_iters * global_batch(training, dp_size)
    return {"train": trained_samples(training, dp_size), "valid": evaluation, "test": evaluation}


def build_data(
    data: DataConfig,
    training: TrainingConfig,
    vocab_size: int,
    dp_size: int,
    splits: Sequence[str] = ("train", "valid"),
) -> DataSource:
    """The ``splits`` of a run that need samples (none for evaluation when ``eval_iters`` is 0).

    Raises:
        DataError: when the files are damaged, their tokenizer is another or has more than ``vocab_size`` ids, or a
            split that is needed has no data.
    """
    vocabulary(data, vocab_size)
    requested, used = requested_samples(training, dp_size), used_samples(training, dp_size)
    needed = {name: requested[name] for name in splits if requested[name] > 0}
    read = {name: used[name] for name in needed}
    datasets = _mock(needed, training, vocab_size) if data.mock_data else _from_files(needed, data, training)
    found = (repeated(datasets, used["train"] * training.seq_length), unused_entries(data, vocab_size))
    notes = tuple(note for note in found if note)
    return DataSource(datasets, needed, read, training.seq_length, training.micro_batch_size, vocab_size, notes)


def repeated(datasets: Mapping[str, Dataset], tokens: int) -> str | None:
    """A note where ``tokens`` tokens of training are more than a few epochs."""
    train = datasets.get("train")
    if not isinstance(train, GPTDataset) or tokens <= FEW_EPOCHS * train.order.tokens:
        return None
    epochs = tokens / train.order.tokens
    return f"training reads its data {epochs:,.1f} times; beyond {FEW_EPOCHS}, more text is worth more than more epochs"


def _mock(needed: Mapping[str, int], training: TrainingConfig, vocab_size: int) -> dict[str, Dataset]:
    return {
        name: MockDataset(vocab_size, training.seq_length, count, training.seed, stream=SPLITS.index(name))
        for name, count in needed.items()
    }


def _from_files(needed: Mapping[str, int], data: DataConfig, training: TrainingConfig) -> dict[str, Dataset]:
    indexed = IndexedDataset(dataset_prefix(data))
    ranges = dict(zip(SPLITS, split_ranges(data.split, len(indexed))))
    datasets: dict[str, Dataset] = {}
    for name, count in needed.items():
        if not ranges[name]:
            raise _empty_split(name, count, data.split, indexed, needed)
        order = build_order(indexed.lengths, ranges[name], count, training.seq_length, training.seed)
        datasets[name] = GPTDataset(indexed, order)
    return datasets


def _empty_split(name: str, count: int, split: str, indexed: IndexedDataset, needed: Mapping[str, int]) -> DataError:
    """A split that got no sequences, with one that gives every needed part at least one."""
    others = [int(other in needed) for other in SPLITS[1:]]
    train = len(indexed) - sum(others)
    fixes = [f"--split {train},{others[0]},{others[1]}"] if train > 0 else []
    return DataError(
        f"--split '{split}' leaves no {WORDS[name]} data of the {len(indexed)} sequences in {indexed.prefix}, "
        f"but {count} samples are needed",
        *fixes,
        f"a dataset of more documents than {len(indexed)}",
    )
