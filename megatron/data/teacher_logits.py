"""Logits of a teacher, computed in advance by tasks/finetune/precompute.py for distillation.

A folder holds for each split the files ``SPLIT.logits.npy`` and ``SPLIT.ids.npy`` ``[samples, s, k]``, the largest
first, which are memory-mapped, and ``teacher.json`` with the digests of the samples that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.files import parse_json, read_small
from megatron.data.blended_dataset import ConcatDataset
from megatron.data.dataset import Dataset, Sample
from megatron.data.errors import DataError

INDEX = "teacher.json"
ARRAYS = ("logits", "ids")


def array_path(folder: Path, split: str, name: str) -> Path:
    """Return the file of ``logits`` or ``ids`` of a split."""
    return folder / f"{split}.{name}.npy"


class TeacherDataset(ConcatDataset):
    """Samples with the logits of the teacher."""

    def __init__(self, dataset: Dataset, arrays: Mapping[str, NDArray[Any]], k: int) -> None:
        """Add the ``k`` first logits and ids ``[samples, s, k or more]`` to the samples of a dataset."""
        super().__init__([dataset])
        self._arrays, self._k = arrays, k

    def __len__(self) -> int:
        return len(self._arrays["ids"])

    def __getitem__(self, i: int) -> Sample:
        ids, logits = (self._arrays[name][i, :, : self._k] for name in ("ids", "logits"))
        sample = super().__getitem__(i)
        extra = {**sample.extra, "teacher_ids": ids.astype(np.int64), "teacher_logits": np.array(logits)}
        return sample._replace(extra=extra)

    def describe(self, tokens: int) -> str:
        """Describe the samples."""
        return self.segments[0].describe(tokens)


def with_teacher_logits(
    datasets: Mapping[str, Dataset],
    used: Mapping[str, int],
    digest: Callable[[str, int, int], int],
    folder: Path,
    k: int,
) -> dict[str, Dataset]:
    """Return the data sets by split, with the ``k`` largest logits of the teacher in ``folder``.

    ``digest`` returns that of consecutive samples of a split, from its name, the first one and the end.

    Raises:
        DataError: if the folder cannot be read, or is that of other samples, of fewer, or with fewer logits.
    """
    try:
        index = dict(parse_json(read_small(folder / INDEX)))
        arrays = {
            split: {name: np.load(array_path(folder, split, name), mmap_mode="r") for name in ARRAYS}
            for split in datasets
        }
        shapes = {split: [*arrays[split]["ids"].shape, 0, 0, 0][:3] for split in datasets}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"--teacher-logits {folder} cannot be read: {error}", PRECOMPUTE) from error
    for split, dataset in datasets.items():
        samples, length, stored = shapes[split]
        if samples < used[split] or stored < k or length != dataset.seq_length:
            wanted = f"{used[split]:,} samples of {dataset.seq_length:,} tokens with {k} logits"
            seen = f"has {samples:,} samples of {length:,} tokens with {stored} logits, not {wanted}"
            raise DataError(f"--teacher-logits {folder}: {split} {seen}", PRECOMPUTE)
        if digest(split, 0, samples) != index.get(split):
            raise DataError(f"--teacher-logits {folder}: {split} belongs to other samples", PRECOMPUTE)
    return {split: TeacherDataset(dataset, arrays[split], k) for split, dataset in datasets.items()}


PRECOMPUTE = "python tasks/finetune/precompute.py distill --output FOLDER, with the flags of this run"
