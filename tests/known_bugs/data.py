"""Bugs of datasets: which samples a run reads, in which order, and which of their tokens are trained."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from megatron.arguments.checks import data as checks
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.data.loader import MaskBuilder, build_data
from megatron.data.packed_dataset import Epoch, PackedDataset
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerRecord
from tests.known_bugs.alone import alone
from tests.known_bugs.bug import KnownBug
from tests.unit.data import made_tokenizers, pairs


def ended(rank: int, world_size: int) -> float:
    """Share of ends of documents that are not trained, of a tokenizer that pads with the same token."""
    with tempfile.TemporaryDirectory() as temporary:
        prefix = pairs.write(Path(temporary) / "text", [[5, 6, 7, 0], [8, 9, 0]] * 20, np.int32)
        record = replace(TokenizerRecord.of(ByteTokenizer()), eod=0, pad=0)
        options = DataConfig(data_path=(made_tokenizers.record(prefix, record),), split="1")
        training = TrainingConfig(seq_length=16, train_samples=4, micro_batch_size=4, global_batch_size=4)
        batch = build_data(options, training, 300, 1).micro_batch("train", range(4), 0)
    ends = batch.labels == 0
    return 1.0 - float(batch.loss_mask[ends].mean())


def shared_padding_masked() -> AbstractContextManager[Any]:
    """Every label that is the padding id is left out, although the id ends documents too."""
    original = MaskBuilder.build
    return patch.object(MaskBuilder, "build", lambda self, *columns: original(replace(self, pad=self.eod), *columns))


def shuffled(rank: int, world_size: int) -> float:
    """1 if two epochs have the same order, plus the share of conversations that an epoch does not have once."""
    from tests.parity.test_sft import data_of

    turns = [[("user", f"question {number}"), ("assistant", "a" * (number % 30 + 1))] for number in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        dataset: Any = data_of(Path(folder), turns).datasets["train"]
    size = dataset.epoch_samples
    epochs = [[n for i in range(first, first + size) for n in read(dataset, i)] for first in (0, size)]
    missing = sum(sorted(epoch) != list(range(len(turns))) for epoch in epochs)
    return float(epochs[0] == epochs[1]) + missing


def read(dataset: PackedDataset, i: int) -> list[int]:
    """The conversations of a sample."""
    return dataset.members(i).tolist()


def every_epoch_alike() -> AbstractContextManager[Any]:
    """The order of an epoch does not depend on its number."""
    original = PackedDataset._shuffled

    def order(self: PackedDataset, number: int) -> Epoch:
        return original(self, 0)

    return patch.object(PackedDataset, "_shuffled", order)


def blended(rank: int, world_size: int) -> float:
    """Share of samples that are read twice without a note, of a blend with two paths to the same files."""
    with tempfile.TemporaryDirectory() as temporary:
        prefix = pairs.write(Path(temporary) / "text", [[number] * 17 for number in range(64)], np.int32)
        (Path(temporary) / "other").symlink_to(temporary)
        paths = ("1", str(prefix), "1", f"{temporary}/other/text")
        options = DataConfig(data_path=paths, split="1")
        training = TrainingConfig(seq_length=16, train_samples=64, micro_batch_size=64, global_batch_size=64)
        batch = build_data(options, training, 64, 1).micro_batch("train", range(64), 0)
        notes = [*checks.data_notes(RunConfig(data=options, training=training), 1)]
    twice = 1.0 - len(batch.tokens.unique(dim=0)) / len(batch.tokens)
    return 0.0 if any("more than once" in note for note in notes) else twice


def paths_compared() -> AbstractContextManager[Any]:
    """Two paths are taken for two datasets."""
    return patch.object(checks, "realpath", lambda path: path)


BUGS = {
    "ends-not-trained": KnownBug(
        reports=("mlabonne/llm-course#33", "unslothai/unsloth#416"),
        kind="Loss",
        bug="padding was the token that ends documents, so ends were masked and models never stopped",
        check="the loss mask of every end of a document, for a tokenizer that pads with the same id",
        detector=alone(ended),
        plant=shared_padding_masked,
    ),
    "epochs-alike": KnownBug(
        reports=("pytorch/pytorch#31771", "lucidrains/DALLE-pytorch#230"),
        kind="Data order",
        bug="every epoch had the same shuffled order",
        check="two epochs: each has every conversation once, and their orders differ",
        detector=alone(shuffled),
        plant=every_epoch_alike,
    ),
    "blended-with-itself": KnownBug(
        reports=("NVIDIA/Megatron-Energon#266",),
        kind="Data order",
        bug="a dataset that a blend reached by two paths was read twice in the same order, without a warning",
        check="the samples of a blend of a dataset with itself by a link: a note names it, or none is read twice",
        detector=alone(blended),
        plant=paths_compared,
        mended="the note compared paths, so a link to the same files had none",
    ),
}
