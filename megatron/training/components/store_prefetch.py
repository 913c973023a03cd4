"""Fetch from object stores what the next steps read, while the run computes.

The order of samples is known, so the blocks of the next steps are, too. They are fetched into the cache of the machine,
and count as used, so that it does not delete them. If the store fails for a block of the next steps, every rank stops
before it, after a checkpoint, instead of failing within a step. A cache too small for two steps cannot promise this.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import NamedTuple

from megatron.config.launch import Launch
from megatron.data.block_prefetch import HELD_SECONDS, Block, BlockPrefetch
from megatron.data.dataset import split_kind
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.loader import DataSource
from megatron.data.prefixes import has_remote_data
from megatron.training.component import Component
from megatron.training.stop import StopRequest
from megatron.training.trainer import Trainer

MOST_STEPS = 256
"""Steps that are planned ahead at most."""

STEPS_BEFORE_STOP = 2
"""Steps whose missing blocks stop the run; on GPUs a stop takes effect a step late."""


class PlannedStep(NamedTuple):
    """The blocks that this rank reads in a step."""

    iteration: int  # steps taken before
    blocks: tuple[Block, ...]


class StorePrefetch(Component):
    """Plans and fetches the blocks of this rank's next steps."""

    pauses = False

    def __init__(self, trainer: Trainer, stop: StopRequest) -> None:
        """Fetch nothing yet; ``stop`` ends the run if data are missing."""
        self._trainer, self._stop_request = trainer, stop
        data, ranks = trainer.config.data, Launch.read(os.environ).local_size
        self._most_bytes = data.data_store_cache_bytes // (2 * ranks)  # so that ranks do not delete each other's blocks
        self._source: DataSource | None = None
        self._steps: deque[PlannedStep] = deque()
        self._next_place = 0  # first of the step after the last planned one
        self._open = cache(partial(IndexedDataset, floats=True, verify=False))  # which the run has checked
        self.fetches = BlockPrefetch(self._plan)

    @classmethod
    def create(cls, trainer: Trainer, stop: StopRequest) -> StorePrefetch | None:
        """Return the component, which fetches from now on; None for data on disks."""
        if not has_remote_data() or trainer.config.training.skip_train:
            return None
        component = cls(trainer, stop)
        component.fetches.start()
        return component

    def on_step_end(self, metrics: object) -> None:
        """Plan further, and stop the run if the store fails for the next steps; see :class:`Component`."""
        self.fetches.move()
        if not self.fetches.errors:
            return
        reader, place, iteration = self._trainer.reader, self._trainer.progress.place, self._trainer.iteration
        try:
            for _ in range(min(STEPS_BEFORE_STOP, self._trainer.total_steps - iteration)):
                size, places = reader.train_places(place)
                for tokens, number in dict.fromkeys(self._blocks("train", places)):
                    while not tokens.fetch(number):
                        time.sleep(HELD_SECONDS)
                place += size
        except BlockingIOError:  # the reader does without the cache
            pass
        except DataError as error:
            self._stop_request.stop_without_data(error)

    def on_stop(self, error: BaseException | None) -> None:
        """End the threads; see :class:`Component`."""
        self.fetches.stop()

    def _plan(self) -> list[Block]:
        """Return the blocks of the next steps, as many as the cache holds twice."""
        trainer, progress = self._trainer, self._trainer.progress
        source, iteration = trainer.reader.source, progress.iteration
        if source is not self._source or (self._steps and self._steps[0].iteration > iteration):
            self._source = source
            self._steps.clear()
        while self._steps and self._steps[0].iteration < iteration:
            self._steps.popleft()
        if not self._steps:
            self._next_place = progress.place
        planned = dict.fromkeys(block for step in self._steps for block in step.blocks)
        held = sum(tokens.block_bytes for tokens, _ in planned)
        following = self._steps[-1].iteration + 1 if self._steps else iteration
        while held < self._most_bytes and len(self._steps) < MOST_STEPS and following < progress.total_steps:
            size, places = trainer.reader.train_places(self._next_place)
            blocks = dict.fromkeys(self._blocks("train", places))
            for split in self._evaluated_after(following + 1):
                blocks |= dict.fromkeys(self._blocks(split, trainer.reader.evaluation_places(split)))
            self._steps.append(PlannedStep(following, tuple(blocks)))
            held += sum(tokens.block_bytes for tokens, number in blocks if (tokens, number) not in planned)
            planned |= blocks
            self._next_place += size
            following += 1
        return list(planned)

    def _evaluated_after(self, steps: int) -> Iterator[str]:
        """Yield the splits on which the run evaluates after a number of steps."""
        interval, last = self._trainer.config.training.eval_interval, self._trainer.total_steps
        for split in self._trainer.data.used:
            kind = split_kind(split)
            if (kind != "train" and steps == last) or (kind == "valid" and interval and steps % interval == 0):
                yield split

    def _blocks(self, split: str, places: Iterable[range]) -> Iterator[Block]:
        """Yield the blocks of samples, in order; those of one file may repeat."""
        dataset = self._trainer.data.datasets[split]
        for sample in (i for group in places for i in group):
            for span in dataset.spans(sample):
                data = self._open(span.source)
                if data.remote is None:
                    continue
                tokens, size = data.remote.tokens, data.dtype.itemsize
                first = int(data.pointers[span.sequence]) + span.offset * size
                stop = first + span.tokens * size
                for number in range(first // tokens.block_bytes, -(-stop // tokens.block_bytes)):
                    yield tokens, number
