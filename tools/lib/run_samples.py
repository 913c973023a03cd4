"""The training samples of a run: which ones a step reads, on which rank, and from which documents. No torch.

A run is known from its folder (`--run-dir`), where each start has left its configuration and a summary of its data, or
from its flags. The samples are checked against the digests in ``metrics.jsonl`` around the step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.arguments.sources import from_dict
from megatron.config.batch import Origin, batch_size_stages
from megatron.config.files import parse_json, parse_yaml, read_small
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.data.document_finder import DocumentFinder
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.data.skipped_dataset import SKIPPED, SkippedDataset
from megatron.distributed.layout import Layout
from megatron.training.loggers.run_folder import (
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    HistoryPoint,
    read_history,
)

DIGEST_MODULUS = 2**64
SAMPLES_DIGEST = "samples-digest"


@dataclass(frozen=True)
class RunStart:
    """One start of a run, as far as its samples depend on it."""

    config: RunConfig
    world_size: int
    train: Mapping[str, Any]  # entry of the training data in the data summary; empty for a run that has not started

    @property
    def origin(self) -> Origin:
        """Origin of the phase in which the start was."""
        return Origin.from_state(self.train)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.config.parallel.data_parallel_size(self.world_size)

    def open(self) -> DataSource:
        """Open the training data, with what this start has skipped.

        Raises:
            DataError: if files are missing or damaged.
        """
        config, data, segments = self.config, self.config.data, None
        if self.train:
            data = replace(data, skip_samples=(), skip_tokens=(), skip_documents=())
            segments = {"train": self.train["laid_out_for_samples"], SKIPPED: self.train.get(SKIPPED, ())}
        index, count = self.train.get("stream", (0, config.diloco.streams))
        return build_data(
            data,
            replace(config.training, teacher_logits=None),
            config.model.vocab,
            self.data_parallel_size,
            ("train",),
            segments,
            origin=self.origin,
            stream=(index, count),
        )


def read_starts(folder: Path) -> Iterator[RunStart]:
    """Yield the starts that a run folder records, the newest first.

    Files that a later start has written with other content are named ``config.1.yaml`` and so on; a file without such
    a version is the same for both.

    Raises:
        DataError: if the folder is no run folder, or a file cannot be read.
        UserError: if a configuration is invalid.
    """
    numbers = {
        int(match[1])
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"(?:config|data|environment)\.(\d+)\.(?:yaml|json)", path.name))
    }

    def version(name: str, number: int) -> Path:
        paths = ((folder / name).with_stem(f"{Path(name).stem}.{n}") for n in sorted(numbers) if n >= number)
        return next((path for path in paths if path.exists()), folder / name)

    for number in [max(numbers, default=0) + 1, *sorted(numbers, reverse=True)]:
        try:
            groups = parse_yaml(read_small(version(CONFIG_FILE, number)))
            data = parse_json(read_small(version(DATA_FILE, number)))
            environment = parse_json(read_small(version(ENVIRONMENT_FILE, number)))
            known = {
                name: value for group in groups.values() for name, value in (group or {}).items() if name in SETTINGS
            }
            yield RunStart(from_dict(known), int(environment.get("world_size", 1)), data["train"])
        except (OSError, LookupError, AttributeError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else "its records are not complete"
            seen = f"{folder} is not the folder of a run, as given to it by --run-dir: {why}"
            raise DataError(seen) from error


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step."""

    step: int
    start: RunStart
    source: DataSource
    consumed: int  # samples of the run consumed before the step
    size: int  # global batch
    checked: bool  # against digests that the run has logged

    @property
    def first(self) -> int:
        """Number of the first sample among those that are not skipped, in the stream of the run."""
        return self.start.origin.read + self.consumed - self.start.origin.samples

    @property
    def phase(self) -> str:
        """Prefix ``PHASE/`` of places for ``--skip-samples``; empty in a run without phases."""
        name = self.start.config.training.phase_name
        return "" if name is None else f"{name}/"

    def numbers(self) -> list[int]:
        """Return the numbers of the samples in the dataset."""
        return [*self.source.stream_places("train", range(self.first, self.first + self.size))]

    def place(self, number: int) -> int:
        """Return the place of a sample in the order of the data, as ``--skip-samples`` counts it."""
        train = self.source.datasets["train"]
        return train.place(number) if isinstance(train, SkippedDataset) else number

    def readers(self) -> dict[int, tuple[int, list[int]]]:
        """Return the micro-batch that each sample is in, from 0, and the ranks that read it."""
        layout = Layout.from_config(self.start.config.parallel, self.start.world_size)
        ranks: dict[int, list[int]] = {}
        for rank in range(layout.world_size):
            ranks.setdefault(layout.coordinate(rank)["dp"], []).append(rank)
        dp = self.start.data_parallel_size
        return {
            number: (micro_batch, ranks[replica])
            for replica in range(dp)
            for micro_batch, places in enumerate(self.source.rank_places("train", self.first, self.size, replica, dp))
            for number in places
        }


class StepPlace(NamedTuple):
    """Place of a step in the samples of a run."""

    step: int
    start: int  # number of the start that `RunSamples.at` uses
    consumed: int  # samples of the run consumed before the step
    size: int  # global batch


class RunSamples:
    """The samples of a run by step."""

    def __init__(self, starts: Sequence[RunStart], lines: Sequence[HistoryPoint] = ()) -> None:
        """Take the starts of a run, the newest first, and its log lines."""
        self.starts, self.lines = starts, lines
        self._open = cache(lambda number: self.starts[number].open())

    @classmethod
    def of_folder(cls, folder: Path) -> RunSamples:
        """Read a run folder.

        Raises:
            DataError: see `read_starts`.
        """
        starts = [*read_starts(folder)]
        try:
            return cls(starts, read_history(folder / METRICS_FILE).train)
        except ValueError:  # the run has not logged a step yet
            return cls(starts)

    def at(self, step: int) -> StepSamples:
        """Return the samples of a step, counted from 1.

        Raises:
            DataError: if the data are not those that the run has read, or do not reach that far.
        """
        number = next((n for n, start in enumerate(self.starts) if start.origin.iteration < step), None)
        if number is None or step < 1:
            raise DataError(f"step {step} is not recorded: steps are counted from 1")
        start, source = self.starts[number], self._open(number)
        taken, consumed = start.origin.iteration, start.origin.samples
        for line in self.lines:
            if taken < line.iteration < step:
                taken, consumed = line.iteration, int(line.line["consumed-samples"])
        while True:
            size = self._batch_size(number, consumed)
            taken += 1
            if taken == step:
                break
            consumed += size
        checked = self._check(start, source, step)
        return StepSamples(step, start, source, consumed, size, checked)

    def _batch_size(self, number: int, consumed: int) -> int:
        start = self.starts[number]
        stages = batch_size_stages(start.config.training, start.data_parallel_size)
        return next(size for first, size in reversed(stages) if first <= consumed - start.origin.samples)

    def steps_that_read(self, documents: Collection[tuple[str, int]], last: int) -> dict[tuple[str, int], set[int]]:
        """Return the steps up to ``last`` that read each of some documents, which are pairs of source and number."""
        finder, found = DocumentFinder(shown=0), {document: set[int]() for document in documents}
        sequences = finder.sequences(documents)
        for number, steps in groupby(self._steps(last), key=lambda step: step.start):
            each, origin, source = [*steps], self.starts[number].origin, self._open(number)
            begins = origin.read + np.array([step.consumed for step in each]) - origin.samples
            read = source.stream_places("train", range(int(begins[0]), int(begins[-1]) + each[-1].size))
            train = source.datasets["train"]
            for sample in train.places_of(sequences).tolist():
                if sample in read:
                    at = int(np.searchsorted(begins, begins[0] + read.index(sample), side="right")) - 1
                    for span in train.spans(sample):
                        if span.tokens and (document := (span.source, finder.document(span))) in found:
                            found[document].add(each[at].step)
        return found

    def _steps(self, last: int) -> Iterator[StepPlace]:
        """Yield the steps of the run up to ``last``, in one pass over the log."""
        consumed_at = {line.iteration: int(line.line["consumed-samples"]) for line in self.lines}
        before, consumed = -1, 0
        for step in range(min(start.origin.iteration for start in self.starts) + 1, last + 1):
            number = next(n for n, start in enumerate(self.starts) if start.origin.iteration < step)
            if number != before:
                before, consumed = number, self.starts[number].origin.samples
            elif step - 1 in consumed_at:
                consumed = consumed_at[step - 1]
            size = self._batch_size(number, consumed)
            yield StepPlace(step, number, consumed, size)
            consumed += size

    def _check(self, start: RunStart, source: DataSource, step: int) -> bool:
        """Compare the digest of the samples between the log lines around a step; return False without two lines."""
        origin, after = start.origin, None
        before = 0, origin.digest  # place, and the digest of all samples of the run before it
        for line in self.lines:
            if SAMPLES_DIGEST not in line.line or line.iteration <= origin.iteration:
                continue
            place = origin.read + int(line.line["consumed-samples"]) - origin.samples
            known = place, int(line.line[SAMPLES_DIGEST], 16)
            if line.iteration >= step:
                after = known
                break
            before = known
        if after is None:
            return False
        if (after[1] - before[1] - source.digest("train", before[0], after[0])) % DIGEST_MODULUS:
            raise DataError(
                f"the training data are not those that the run has read before step {step}: have files changed since?",
                "run this in the folder where the run was started, with the same files",
            )
        return True
