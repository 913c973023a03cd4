"""Conversations packed into samples, none truncated, with masks that keep them apart.

A sample is filled by best-fit decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv
2404.10830). A conversation of n ids takes n - 1 positions: its last id is only a label. The rest of a sample is
padding: a document of its own without labels.

The order of samples is a function of the seed. In every epoch, conversations of equal length are shuffled among their
places, and then the samples are. Empty samples complete the last batch of an epoch.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.router import PADDING
from megatron.config.text import counted
from megatron.data.chat import Conversations
from megatron.data.dataset import Dataset, Sample, SourceUsage, fingerprint, splitmix64


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack items into bins: each goes to the fullest bin with room for it.

    Args:
        lengths: of the items ``[n]``, in decreasing order, from 1 to ``capacity``.
        capacity: of a bin.

    Returns:
        The numbers of the items in each bin.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)  # bins that have this much room left
    rooms: list[int] = []  # the keys with a bin, in increasing order
    for item, length in enumerate(lengths.tolist()):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[place]
            number = by_room[room].pop()
            if not by_room[room]:
                del rooms[place]
        bins[number].append(item)
        if left := room - length:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(number)
    return bins


class Epoch(NamedTuple):
    """The order of an epoch."""

    by_length: NDArray[np.int64]  # int64 [n], conversations from the longest to the shortest, ties at random
    samples: NDArray[np.int64]  # int64 [packs], the pack at each place


class PackedDataset(Dataset):
    """Samples of ``seq_length`` positions, each with one or more whole conversations."""

    def __init__(
        self, conversations: Conversations, seq_length: int, batch: int, seed: int, num_samples: int, first: int = 0
    ) -> None:
        """Serve places ``first .. first + num_samples - 1`` of the stream of epochs as samples 0, 1, ...

        Args:
            conversations: each, or with its other one, of 1 to ``seq_length`` positions.
            seq_length: positions of a sample.
            batch: global batch size; an epoch is a multiple of it.
            seed: of the order.
            num_samples: of the stream, which has no end.
            first: place of the first one.
        """
        self.seq_length = seq_length
        self.conversations, self._seed, self._num_samples, self._first = conversations, seed, num_samples, first
        # Of what shares a sample: a conversation, or a pair of them.
        self._lengths = conversations.lengths.reshape(-1, conversations.per_line).sum(1)
        packs = best_fit_decreasing(-np.sort(-self._lengths), seq_length)
        self._ranks = np.concatenate([np.array(pack) for pack in packs])  # of all packs, in the order of length
        self._bounds = np.cumsum([0, *map(len, packs)])  # where each pack begins in `_ranks`
        self.packs = len(packs)  # samples of an epoch with conversations
        self.epoch_samples = -(-self.packs // batch) * batch
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        return self._num_samples

    def _shuffled(self, number: int) -> Epoch:
        random = np.random.RandomState(np.array([self._seed, number], dtype=np.uint32))  # the same in every version
        order = random.permutation(len(self._lengths))
        by_length = order[np.argsort(-self._lengths[order], kind="stable")]
        return Epoch(by_length, random.permutation(self.packs))

    def members(self, i: int) -> NDArray[np.int64]:
        """Return the numbers of the lines of sample ``i``; none for a sample that completes a batch."""
        number, place = divmod(self._first + i, self.epoch_samples)
        if place >= self.packs:
            return np.empty(0, dtype=np.int64)
        epoch = self._epoch(number)
        pack = epoch.samples[place]
        return epoch.by_length[self._ranks[self._bounds[pack] : self._bounds[pack + 1]]]

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        tokens, labels = np.zeros((2, self.seq_length), dtype=np.int64)
        loss_mask = np.zeros(self.seq_length, dtype=np.float32)
        start, data = 0, self.conversations
        members = (self.members(i)[:, None] * data.per_line + np.arange(data.per_line)).flatten()
        documents = np.full(self.seq_length, len(members), dtype=np.int64)  # padding is the last one
        for document, member in enumerate(members):
            begin, end = data.starts[member], data.stops[member]
            here = slice(start, start := start + int(end - begin - 1))
            tokens[here], labels[here] = data.ids[begin : end - 1], data.ids[begin + 1 : end]
            loss_mask[here] = data.answers[begin + 1 : end]
            documents[here] = document
        extra: dict[str, NDArray[Any]] = {PADDING: documents == len(members)}
        if data.per_line > 1:
            extra |= self._preferences(members, loss_mask, documents)
        return Sample(tokens, labels, loss_mask, documents, extra)

    def _preferences(
        self, members: NDArray[np.int64], loss_mask: NDArray[np.float32], documents: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """Return what preference optimization reads of a sample (see `megatron.model.objective`)."""
        answer = np.where(loss_mask > 0, documents, 0)
        last = [np.flatnonzero((documents == document) & (loss_mask > 0))[-1] for document in range(len(members))]
        pairs = np.zeros(self.seq_length, dtype=np.float32)
        pairs[last[::2]] = 1.0
        extra: dict[str, NDArray[Any]] = {"answer": answer, "pairs": pairs}
        if self.conversations.logps is not None:
            extra["reference_logps"] = np.zeros(self.seq_length)
            extra["reference_logps"][last] = self.conversations.logps[members]
        return extra

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the conversations, the sample length and the length of an epoch."""
        data = self.conversations
        parts: list[NDArray[Any]] = [data.ids, data.answers, data.starts, data.stops]
        parts += [] if data.logps is None else [data.logps]
        digests = [hashlib.sha256(part.data).hexdigest() for part in parts]
        return fingerprint("chat", *digests, self.seq_length, self.epoch_samples)

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Hash the conversations in each of the samples ``places [n]``, and their order."""
        hashes = np.zeros(len(places), dtype=np.uint64)
        numbers, at = np.divmod(places + self._first, self.epoch_samples)
        for number in np.unique(numbers).tolist():
            epoch = self._epoch(number)
            placed = self._ranks << 32 | epoch.by_length[self._ranks]
            of_packs = np.add.reduceat(splitmix64(placed.astype(np.uint64)), self._bounds[:-1])
            chosen = np.flatnonzero((numbers == number) & (at < self.packs))
            hashes[chosen] = of_packs[epoch.samples[at[chosen]]]
        return hashes

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return the tokens that the first ``samples`` samples read, on average over the samples of an epoch."""
        once = int(self._lengths.sum())
        return (SourceUsage(self.conversations.source, once * samples // self.epoch_samples, once),)

    def describe(self, tokens: int) -> str:
        """Describe the conversations in one line."""
        samples, data = tokens // self.seq_length, self.conversations
        what = "conversations" if data.per_line == 1 else "pairs"
        used = self._lengths.sum() / (self.packs * self.seq_length)
        return (
            f"{samples / self.epoch_samples:.2f} epochs of {len(self._lengths):,} {what} in {data.source}, "
            f"packed into {counted(self.packs, 'sample')} ({used:.1%} full)"
        )
