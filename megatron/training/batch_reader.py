"""Read the micro-batches of a rank, in the order of samples that the position of the run determines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from socket import gethostname
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.checkpoint.format import Manifest
from megatron.config.batch import WHOLE_RUN, Origin, batch_size_stages
from megatron.config.run import RunConfig
from megatron.config.text import listed, listed_ranks
from megatron.data.dataset import fingerprint as content_hash
from megatron.data.dataset import split_label
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, build_data
from megatron.data.sample_columns import sample_columns
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.context_parallel import ContextParallel
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.timing import Timers
from megatron.training.component import Component
from megatron.training.resume_source import compare_data, is_own_checkpoint

DIGEST_MODULUS = 2**64
"""Digests of samples are added modulo this number."""


@dataclass
class Progress:
    """Position of a run: steps, samples, evaluations."""

    iteration: int = 0  # steps taken
    consumed_samples: int = 0
    total_steps: int = 0  # at the end of the current phase
    origin: Origin = WHOLE_RUN  # of the current phase
    later: tuple[int, int] = (0, 0)  # steps and tokens of the phases after it
    # steps and samples of the phase at which the current batch size options took effect
    batches_since: tuple[int, int] = (0, 0)
    evaluated: dict[str, int] = field(default_factory=dict)  # by split: steps taken before the last evaluation on it
    losses: dict[str, float] = field(default_factory=dict)  # last ones by split; of train, those of the last log line
    run_id: str = ""  # the same through all starts of the run

    @property
    def in_phase(self) -> tuple[int, int]:
        """Steps taken and samples consumed in the current phase."""
        return self.origin.local(self.iteration, self.consumed_samples)

    @property
    def place(self) -> int:
        """Samples read of the data of the current phase: the place of the next one."""
        return self.origin.read + self.consumed_samples - self.origin.samples


class Prefetched(NamedTuple):
    """This rank's micro-batches of the next step, read before the step begins."""

    place: tuple[int, int]  # first sample of the global batch, and its number of samples
    batches: list[MicroBatch]
    digest: int  # of the samples in ``batches``


class BatchReader(Component):
    """Reads this rank's micro-batches. Its state identifies the data, and the samples that were read."""

    name = "data"
    source: DataSource
    """Data of the run, set by :meth:`open`."""

    def __init__(
        self,
        config: RunConfig,
        progress: Progress,
        mesh: Mesh,
        device: torch.device,
        cp: ContextParallel | None,
        timers: Timers,
    ) -> None:
        """Read nothing yet.

        Args:
            config: of the run.
            progress: position from which batches are read, kept up to date by the loop.
            mesh: the groups.
            device: of the micro-batches.
            cp: distribution of every sample over ranks; None for whole samples.
            timers: measure reading.
        """
        self._config, self._progress, self._mesh, self._device = config, progress, mesh, device
        self.cp = cp
        self._timers = timers
        self.start_digest = 0  # of the samples consumed before this start
        self.digest_read = 0  # of the samples that this rank has read since
        self._digest = 0, 0  # number of samples and digest of the last :meth:`samples_digest`
        self._prefetched: Prefetched | None = None
        self._stream = 0  # of training samples, among those of the replicas
        # Returns which of the micro-batches of a step, given their number, this rank reads; None for all.
        self._part: Callable[[int], Sequence[int]] | None = None
        # First sample and size of the global batches, ascending.
        self._batch_sizes = batch_size_stages(config.training, mesh.dp_size)

    def open(self, segments: Mapping[str, Sequence[int]] | None = None) -> None:
        """Open the data at the position of the run; collective.

        Args:
            segments: segments in which the data were laid out, by split; None for a new run.

        Raises:
            DataError: if the data cannot be opened, or are not the same on all ranks.
        """
        config, origin = self._config, self._progress.origin
        self._prefetched = None
        self.source = build_data(
            config.data,
            config.training,
            config.model.vocab,
            self._mesh.dp_size,
            segments=segments,
            begin=self._progress.in_phase,
            origin=origin,
            prefix=config.model.attention_prefix,
            stream=(self._stream, config.diloco.streams),
            columns=sample_columns(config.model),
        )
        check_same_data(self.source, self._mesh.world)
        read = self._progress.place
        self.start_digest = (origin.digest + self.source.digest("train", 0, read)) % DIGEST_MODULUS
        self._digest, self.digest_read = (read, self.start_digest), 0

    def use_stream(self, index: int) -> None:
        """Read the training samples of a stream, before the first step."""
        self._stream = index
        if hasattr(self, "source"):  # of a run that starts from scratch
            self.source = replace(self.source, stream=(index, self._config.diloco.streams))

    def use_part(self, part: Callable[[int], Sequence[int]]) -> None:
        """Read a part of the micro-batches of a step from now on; others read the rest.

        Args:
            part: returns the numbers of the micro-batches to read, given how many there are.
        """
        self._part, self._prefetched = part, None

    @property
    def next_batch_size(self) -> int:
        """Samples of the next global batch."""
        return self._batch_size_at(self._progress.place)

    def _batch_size_at(self, place: int) -> int:
        samples = place - self._progress.origin.read
        return next(size for first, size in reversed(self._batch_sizes) if first <= samples)

    def next_batches(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next step, prefetched or read now."""
        place = self._progress.place, self.next_batch_size
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or prefetched.place != place:
            return self._read("train", *place)
        self.digest_read += prefetched.digest
        return [replace(batch, step=self._progress.iteration) for batch in prefetched.batches]

    def pass_over(self) -> None:
        """Count the samples of the next step as read."""
        self._prefetched = None
        self._count(self.step_places())

    def prefetch(self) -> None:
        """Read the batch of the step after the current one, which a GPU is computing and which is not counted yet."""
        if self._progress.iteration + 1 >= self._progress.total_steps:
            return
        first = self._progress.place + self.next_batch_size
        place = first, self._batch_size_at(first)
        digest_before = self.digest_read
        try:
            with self._timers("batch-generator"):  # a GPU that finishes its step meanwhile idles during this
                batches = self._read("train", *place)
            self._prefetched = Prefetched(place, batches, self.digest_read - digest_before)
        except (DataError, OSError):  # :meth:`next_batches` will raise it, after the current step is counted
            self._prefetched = None
        self.digest_read = digest_before

    def range_of_steps(self, first: int, stop: int) -> tuple[int, int]:
        """Return the places of the samples of steps in the order of the data, from begin to end - 1.

        Skipped ones are counted. The batch sizes are those of this start; no step is before the phase.

        Args:
            first: steps taken before.
            stop: steps taken after them, at most one more than now.
        """
        place, taken, first_place = self._progress.place, self._progress.iteration, self._progress.origin.read
        if stop > taken:
            place, taken = place + self.next_batch_size, taken + 1
        ends = [place]  # after step ``taken``, the one before, ...
        while taken - len(ends) >= first and ends[-1] > first_place:
            ends.append(max(first_place, ends[-1] - self._batch_size_at(ends[-1] - 1)))
        numbers = self.source.stream_places("train", range(ends[-1], ends[taken - stop]))
        places = self.source.skipped.places(np.array([numbers.start, numbers.stop - 1]))
        return int(places[0]), int(places[1]) + 1

    def step_places(self) -> list[range]:
        """Return the places of all micro-batches of the next step that data-parallel ranks like this one read."""
        mesh, size = self._mesh, self.next_batch_size
        return self.source.rank_places("train", self._progress.place, size, mesh.dp_rank, mesh.dp_size)

    def read_more(self, numbers: Sequence[int]) -> list[MicroBatch]:
        """Read micro-batches of the next step by number, beside those of :meth:`next_batches`."""
        places = self.step_places()
        return self._read_places("train", self._count([places[number] for number in numbers]))

    def train_places(self, first: int) -> tuple[int, list[range]]:
        """Return the size of the global batch from place ``first`` on, and the places that this rank reads of it."""
        size = self._batch_size_at(first)
        return size, self.source.rank_places("train", first, size, self._mesh.dp_rank, self._mesh.dp_size)

    def evaluation_places(self, split: str) -> list[range]:
        """Return the places that this rank reads in an evaluation on a validation or test split."""
        size, mesh = self._batch_sizes[-1][1], self._mesh
        firsts = range(0, self._config.training.eval_iters * size, size)
        return [p for first in firsts for p in self.source.rank_places(split, first, size, mesh.dp_rank, mesh.dp_size)]

    def evaluation_batches(self, split: str, index: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of global batch ``index`` of a validation or test split."""
        size = self._batch_sizes[-1][1]
        return self._read(split, index * size, size)

    def _read(self, split: str, first: int, size: int) -> list[MicroBatch]:
        return self._read_places(split, self._places(split, first, size))

    def _read_places(self, split: str, places: Sequence[range]) -> list[MicroBatch]:
        data = self.source
        rows = None if self.cp is None else self.cp.rows(data.seq_length)
        return [data.micro_batch(split, group, self._progress.iteration, self._device, rows) for group in places]

    def _places(self, split: str, first: int, size: int) -> list[range]:
        """Return the places of this rank's micro-batches, and add training samples to the digest."""
        data, mesh = self.source, self._mesh
        places = data.rank_places(split, first, size, mesh.dp_rank, mesh.dp_size)
        if split != "train":
            return places
        if self._part is not None:
            places = [places[number] for number in self._part(len(places))]
        return self._count(places)

    def _count(self, places: list[range]) -> list[range]:
        """Add training samples to the digest of what was read."""
        self.digest_read += self.digest_of(places)
        return places

    def digest_of(self, places: Sequence[range]) -> int:
        """Return the digest of training samples; 0 on a context-parallel rank whose peer reads the same ones."""
        return self.source.digest_places("train", places) if self._mesh.coordinate["cp"] == 0 else 0

    def samples_digest(self) -> int:
        """Return the digest of all consumed samples, computed from the sample order."""
        known, digest = self._digest
        read = self._progress.place
        digest = (digest + self.source.digest("train", known, read)) % DIGEST_MODULUS
        self._digest = read, digest
        return digest

    def consumed_digest(self) -> int:
        """Return the digest of all samples that the ranks have read for the run's steps; collective.

        Raises:
            RuntimeError: if it is not that of the first ``consumed_samples`` samples of the stream.
        """
        read = sum(comm.all_gather_objects(self.digest_read, self._mesh.dp_cp))
        digest = self.samples_digest()
        if (self.start_digest + read - digest) % DIGEST_MODULUS:
            steps = self._progress.iteration
            raise RuntimeError(f"the samples read up to step {steps} are not those of the sample stream")
        return digest

    def prepare(self, manifest: Manifest) -> Sequence[str]:
        """Compare the data with the checkpoint's; see :class:`Component`.

        Raises:
            UserError: if the training samples, consumed or still to come, are not those of the run that saved.
        """
        progress, saved, now = self._progress, manifest.state["data"], self.source.stream
        if progress.place == 0 < progress.iteration:  # a phase with data of its own begins
            return ()
        stream = tuple(saved.get("stream", (0, 1)))
        recorded = bool(saved["digest"])  # Megatron-LM records no samples
        reordered = recorded and stream == now and f"{self.start_digest:016x}" != saved["digest"]
        own = is_own_checkpoint(manifest.path, self._config.checkpoint)
        notes = compare_data(saved, self.source.fingerprints, self._config, own, reordered)
        if stream != now:
            then, new = (f"stream {index} of {count}" for index, count in (stream, now))
            notes.append(f"samples are now read from {new}, the checkpoint read {then}: some may be read twice")
        return notes

    def state_dict(self) -> Mapping[str, Any]:
        """Return the identity of the data and of the samples that were read; see :class:`Component`.

        Raises:
            RuntimeError: see :meth:`consumed_digest`.
        """
        return {
            # "stretches" is the name of the segments in this file format.
            "stretches": self.source.laid_out(self._progress.place),
            "fingerprints": dict(self.source.fingerprints),
            "digest": f"{self.consumed_digest():016x}",
            "stream": list(self.source.stream),
            "mixture": dict(self.source.mixture),
            "sources": self.source.tokens_of_sources(self._progress.place),
        }


def check_same_data(data: DataSource, world: Group) -> None:
    """Check that all ranks read the same data in the same order; collective.

    Raises:
        DataError: on every rank, if they do not.
    """
    layout = {
        name: f"content {fingerprint}, {len(data.datasets[name]):,} samples laid out for "
        + " + ".join(f"{count:,}" for count in data.segments[name])
        for name, fingerprint in data.fingerprints.items()
    }
    if data.skipped:
        layout["train"] += f", skipped {content_hash(*data.skipped.to_list())}"
    differing, versions = differences(layout, world)
    if differing:
        kinds = " and ".join(map(split_label, differing))
        raise DataError(
            f"the {kinds} data are not the same on all ranks: {versions}",
            "copy the same files to every machine, or use files on a shared file system",
        )


def differences(mine: Mapping[str, str], world: Group) -> tuple[list[str], str]:
    """Compare texts of this rank with those of the others; collective.

    Returns:
        The names of texts that are not the same on all ranks, and a phrase on the first of them such as
        ``ranks 0, 1 (node1): A; rank 2 (node2): B``.
    """
    gathered: list[list[Any]] = comm.all_gather_objects([gethostname(), dict(mine)], world)
    names = dict.fromkeys(name for _, texts in gathered for name in texts)
    differing = [name for name in names if len({texts.get(name) for _, texts in gathered}) > 1]
    members: dict[str, list[int]] = {}
    for rank, (_, texts) in enumerate(gathered if differing else ()):
        members.setdefault(texts.get(differing[0], "nothing"), []).append(rank)
    described = []
    for version, ranks in members.items():
        machines = dict.fromkeys(gathered[rank][0] for rank in ranks)
        described.append(f"{listed_ranks(ranks)} ({listed([*machines])}): {version}")
    return differing, "; ".join(described)
