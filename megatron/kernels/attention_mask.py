"""Attention masks, and the options that turn products of queries and keys into scores.

A mask is known from the positions of its queries and keys, the attention pattern and the documents. Kernels read these
or work block by block, where blocks are full, partial or empty; no ``S x S`` tensor is needed.

Shapes: B samples, L tokens of the sequence, S queries, T keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.attention_pattern import CAUSAL, AttentionPattern

EMPTY, PARTIAL, TRIANGLE, FULL, BAND = range(5)
"""Kinds of blocks: no query sees a key; some do; all see the keys up to themselves, which are the same tokens; all see
all; all see those at some distances (of tiles only)."""

LARGEST_RULE_BLOCK = 1024
"""Side of the largest blocks for which the rule of a plugin is computed; larger ones are called partial."""

Ranges = tuple[range, ...]


class Tile(NamedTuple):
    """Queries and keys that are computed together: rows of the mask, and their kind."""

    samples: slice
    # May have a step, if the kind is BAND.
    queries: slice
    keys: slice
    kind: int
    # Of a band. Query i of S sees key j of T if ``j <= i + T - S`` where causal, and ``j >= i + T - S - left`` unless
    # left is -1: as in FlashAttention.
    causal: bool = False
    left: int = -1
    # Rows at which separate sequences with this band begin, and the number of rows: int32 tensor, and the longest.
    boundaries: tuple[Tensor, int] | None = None


Method = TypeVar("Method", bound=Callable[..., Any])


def _remembered(method: Method) -> Method:
    """Keep the results of a method in :attr:`AttentionMask.cache`; arguments must be hashable."""

    @wraps(method)
    def call(mask: AttentionMask, *arguments: Any, **options: Any) -> Any:
        key = method.__name__, mask.queries, mask.keys, *arguments, *options.items()
        if key not in mask.cache:
            mask.cache[key] = method(mask, *arguments, **options)
        return mask.cache[key]

    return cast("Method", call)


@dataclass(frozen=True)
class AttentionMask:
    """Mask of some queries and keys of a sequence.

    It is right for any part of the sequence: new tokens after cached ones, or the queries of one context-parallel rank
    and the keys of another. Attention stays in a document. Where the pattern restarts in each, a document has the mask
    that it has alone, wherever it is in the sample.
    """

    # Positions of the queries and of the keys in the sequence: consecutive ranges, in the order of the rows.
    queries: Ranges
    keys: Ranges
    device: torch.device
    pattern: AttentionPattern = CAUSAL
    # int64 [B, L]: documents of all tokens of the sequence, in runs of equal ids; None where every sample is one.
    documents: Tensor | None = None
    # The same on the CPU. None to copy them, which synchronises host and device.
    host_documents: Tensor | None = None
    # The value of :attr:`boundaries`, if known in advance.
    known_boundaries: Tensor | None = None
    # The pattern counts positions from the start of each document, not of the sample.
    restarts: bool = False
    # Results of methods, shared with the masks of other parts: layers of the same pattern compute them once.
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_sequence(
        cls,
        length: int,
        device: torch.device,
        pattern: AttentionPattern = CAUSAL,
        documents: Tensor | None = None,
        first_query: int = 0,
    ) -> AttentionMask:
        """Return the mask of a whole sequence: keys are all its tokens, queries those from ``first_query`` on."""
        return cls((range(first_query, length),), (range(length),), device, pattern, documents)

    @property
    def aligned(self) -> bool:
        """True if queries and keys are the same consecutive tokens."""
        return len(self.keys) == 1 and self.queries == self.keys

    @property
    def queries_end_keys(self) -> bool:
        """True if the queries are the last of the keys: all of them, or new tokens after cached ones."""
        return len(self.queries) == len(self.keys) == 1 and (
            self.keys[0].start <= self.queries[0].start and self.queries[0].stop == self.keys[0].stop
        )

    @property
    def is_causal(self) -> bool:
        """True for the plain causal mask, for which kernels need no tensor."""
        return self.aligned and self.pattern == CAUSAL and self.documents is None

    @cached_property
    def query_positions(self) -> Tensor:
        """Positions of the queries, int64 ``[S]``."""
        return self._positions(self.queries)

    @cached_property
    def key_positions(self) -> Tensor:
        """Positions of the keys, int64 ``[T]``."""
        return self._positions(self.keys)

    def _positions(self, ranges: Ranges) -> Tensor:
        return torch.cat([torch.arange(r.start, r.stop, device=self.device) for r in ranges])

    def dense(self, samples: slice = slice(None), queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Return the boolean mask of some rows, True where a query sees a key: ``[B or 1, 1, queries, keys]``."""
        query_S, key_T = self.query_positions[queries], self.key_positions[keys]
        if self.documents is None:
            return cast("Tensor", self.pattern.allows(query_S.unsqueeze(1), key_T))[None, None]
        documents_BL, starts_BL = self.documents[samples], self.starts
        same_document = documents_BL[:, None, query_S, None] == documents_BL[:, None, None, key_T]
        if starts_BL is not None:
            query_S, key_T = (at - starts_BL[samples, None, at] for at in (query_S, key_T))
        return same_document.logical_and_(self.pattern.allows(query_S.unsqueeze(-1), key_T.unsqueeze(-2)))

    @property
    def starts(self) -> Tensor | None:
        """Start of each token's document, int64 ``[B, L]``; None if the pattern does not depend on it."""
        if self.documents is None or not self.restarts or self.pattern.only_distance:
            return None
        if "starts" not in self.cache:
            self.cache["starts"] = self._find_starts(self.documents)
        starts_BL: Tensor = self.cache["starts"]
        return starts_BL

    def _find_starts(self, documents_BL: Tensor) -> Tensor:
        places_BL = torch.arange(documents_BL.shape[1], device=documents_BL.device).repeat(len(documents_BL), 1)
        places_BL[:, 1:] *= documents_BL[:, 1:] != documents_BL[:, :-1]
        return places_BL.cummax(1).values

    @cached_property
    def boundaries(self) -> Tensor:
        """Starts of the documents in the concatenated samples, and the end of the last: int32 ``[documents + 1]``.

        Unless known in advance, synchronises host and device once per micro-batch, because the shape depends on data.
        """
        if self.known_boundaries is not None:
            return self.known_boundaries
        documents_BL = self.documents
        if documents_BL is None:
            raise ValueError("there are no documents")
        starts_BL = torch.ones_like(documents_BL, dtype=torch.bool)
        starts_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
        end = torch.full((1,), starts_BL.numel(), device=starts_BL.device)
        return torch.cat((starts_BL.flatten().nonzero().flatten(), end)).int()

    @_remembered
    def part(self, queries: Ranges, keys: Ranges) -> AttentionMask:
        """Return the mask of other queries and keys of the sequence; the same object for the same ones."""
        return replace(self, queries=queries, keys=keys)

    def with_keys(self, keys: Ranges) -> AttentionMask:
        """Return the mask of the same queries and other keys."""
        return self.part(self.queries, keys)

    @_remembered
    def sees(self, queries: Ranges, keys: Ranges) -> bool:
        """Return True if any of these queries may see one of these keys."""
        return bool((self.block_kinds(queries, keys) != EMPTY).any())

    def block_kinds(self, queries: Ranges, keys: Ranges) -> NDArray[np.int8]:
        """Return the kinds of all pairs of blocks, int8 ``[B or 1, query blocks, key blocks]``, on the host.

        A pair called partial may be empty or full where pattern and documents together make it so.

        Args:
            queries: positions of each block of queries.
            keys: likewise.
        """
        runs_BL = self._runs
        if runs_BL is None:
            return _kinds_by_position(self.pattern, queries, keys)[None]
        firsts_BQ, lasts_BQ = (runs_BL[:, [r[edge] for r in queries], None] for edge in (0, -1))
        firsts_BK, lasts_BK = (runs_BL[:, None, [r[edge] for r in keys]] for edge in (0, -1))
        overlap = (firsts_BQ <= lasts_BK) & (firsts_BK <= lasts_BQ)
        same = (firsts_BQ == lasts_BK) & (firsts_BK == lasts_BQ)
        inside, across = self._kinds_in_and_across_documents(queries, keys, runs_BL)
        return np.where(overlap, np.where(same, inside, np.minimum(across, PARTIAL)), EMPTY).astype(np.int8)

    def _kinds_in_and_across_documents(
        self, queries: Ranges, keys: Ranges, runs_BL: NDArray[np.int64]
    ) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Return the kinds of pairs of blocks in one document, and of those that have several in common."""
        pattern = self.pattern
        if not self.restarts or pattern.only_distance:
            kinds = _kinds_by_position(pattern, queries, keys)[None]
            return kinds, kinds
        if "host starts" not in self.cache:
            self.cache["host starts"] = self._find_starts(torch.from_numpy(runs_BL)).numpy()
        edges, starts_BL = (_edges(queries), _edges(keys)), self.cache["host starts"]
        q, k = (each[:, None] - starts_BL[:, each[0]] for each in edges)  # [2, B, blocks]
        inside = _kinds(replace(pattern, plugin=None), *q, *k)
        if pattern.rule is not None:
            inside = np.minimum(inside, PARTIAL)
        if pattern.prefix:
            return inside, np.full_like(inside, PARTIAL)
        across = CAUSAL if pattern.first else replace(pattern, chunk=None, plugin=None)
        return inside, _kinds_by_position(across, queries, keys)[None]

    @property
    def _runs(self) -> NDArray[np.int64] | None:
        """Number of the document of every token, counted in its sample, ``[B, L]``, on the host."""
        if self.documents is not None and "runs" not in self.cache:
            self.cache["runs"] = self._count_runs(self.documents)
        return self.cache.get("runs")

    def _count_runs(self, documents_BL: Tensor) -> NDArray[np.int64]:
        host = documents_BL if self.host_documents is None else self.host_documents
        ids = host.cpu().numpy()
        runs = np.zeros(ids.shape, dtype=np.int64)
        np.cumsum(ids[:, 1:] != ids[:, :-1], axis=1, out=runs[:, 1:])
        return runs

    @_remembered
    def tiles(self, block: int, whole: bool = True) -> list[Tile]:
        """Return the parts of the mask that are not empty, which cover it.

        Args:
            block: side of partial tiles.
            whole: let full and triangular tiles be as large as possible; otherwise they are blocks too.
        """
        found: list[Tile] = []
        everything = slice(None)
        for q, q_row in _with_rows(self.queries):
            for k, k_row in _with_rows(self.keys):
                kinds = self.block_kinds((q,), (k,))
                kind = int(kinds.min()) if kinds.min() == kinds.max() else PARTIAL
                if kind in (TRIANGLE, FULL) and (whole or max(len(q), len(k)) <= block):
                    found.append(Tile(everything, slice(q_row, q_row + len(q)), slice(k_row, k_row + len(k)), kind))
                elif kind != EMPTY:
                    found += self._blocks(q, k, q_row, k_row, block, whole)
        return found

    def _blocks(self, queries: range, keys: range, q_row: int, k_row: int, block: int, whole: bool) -> Iterator[Tile]:
        """Yield the tiles of two ranges: per block of queries, runs of full key blocks and single other ones."""
        q_blocks, k_blocks = _cut(queries, block), _cut(keys, block)
        kinds_BQK = self.block_kinds(q_blocks, k_blocks)
        if len(q_blocks) == len(k_blocks) == 1:
            kinds_BQK = np.full((1, 1, 1), PARTIAL)
        for sample, kinds_QK in enumerate(kinds_BQK):
            samples = slice(None) if len(kinds_BQK) == 1 else slice(sample, sample + 1)
            for (q, row), kinds_K in zip(_with_rows(q_blocks), kinds_QK):
                rows = slice(q_row + row, q_row + row + len(q))
                run: Tile | None = None
                for j in np.flatnonzero(kinds_K):
                    first = k_row + int(j) * block
                    tile = Tile(samples, rows, slice(first, first + len(k_blocks[j])), int(kinds_K[j]))
                    if run is not None and run.kind == tile.kind == FULL and run.keys.stop == first and whole:
                        run = run._replace(keys=slice(run.keys.start, tile.keys.stop))
                        continue
                    if run is not None:
                        yield run
                    run = tile
                if run is not None:
                    yield run

    @_remembered
    def bands(self) -> list[Tile]:
        """Return the mask as bands, which do not overlap: a few, but one per residue and document where dilated.

        Raises:
            ValueError: for the rule of a plugin, which need not have bands.
        """
        if self.pattern.rule is not None:
            raise ValueError("the rule of a plugin need not have bands")
        found: list[Tile] = []
        for samples, documents in self._documents():
            bands: list[Tile] = []
            for q, q_row in _with_rows(self.queries):
                for k, k_row in _with_rows(self.keys):
                    for document in documents:
                        for band in self._bands_of(document, q, k):
                            rows = _shifted(band.queries, q_row - q.start), _shifted(band.keys, k_row - k.start)
                            bands.append(Tile(samples, *rows, BAND, band.causal, band.left))
            bands = _joined(bands)
            found += bands if len(documents) == 1 else self._packed(bands)
        return found

    def _bands_of(self, document: range, queries: range, keys: range) -> Iterator[_Band]:
        """Yield the bands of the queries and keys in a document."""
        first = document.start if self.restarts else 0
        q, k = (_meet(each, document) for each in (queries, keys))
        shifted = (range(each.start - first, each.stop - first) for each in (q, k))
        yield from (band.times(1, first) for band in _bands(self.pattern, *shifted))

    def _documents(self) -> Iterator[tuple[slice, list[range]]]:
        """Yield samples and the positions of their documents: of all samples together if each is one document."""
        if self._runs is None:
            yield slice(None), [range(max(r.stop for r in (*self.queries, *self.keys)))]
            return
        for sample, runs in enumerate(self._runs):
            starts = [0, *(np.flatnonzero(np.diff(runs)) + 1).tolist(), len(runs)]
            yield slice(sample, sample + 1), [range(*pair) for pair in zip(starts, starts[1:])]

    def _packed(self, bands: Sequence[Tile]) -> list[Tile]:
        """Join bands of one sample that follow each other, and differ in their rows only."""
        groups: list[list[Tile]] = []
        for tile in bands:
            last = groups[-1][-1] if groups else tile
            follows = tile.queries.start == last.queries.stop and tile.keys.start == last.keys.stop
            if follows and _is_square(tile) and _is_square(last) and tile.left == last.left:
                groups[-1].append(tile)
            else:
                groups.append([tile])
        return [group[0] if len(group) == 1 else self._pack(group) for group in groups]

    def _pack(self, group: Sequence[Tile]) -> Tile:
        lengths = [tile.queries.stop - tile.queries.start for tile in group]
        host = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
        ends = (host.pin_memory() if self.device.type == "cuda" else host).to(self.device, non_blocking=True)
        first, last = group[0], group[-1]
        queries, keys = slice(first.queries.start, last.queries.stop), slice(first.keys.start, last.keys.stop)
        return first._replace(queries=queries, keys=keys, boundaries=(ends, max(lengths)))


@dataclass(frozen=True)
class AttentionScores:
    """How products of queries and keys become scores, and what else the softmax sums."""

    # Factor on the products; None for 1 / sqrt(D).
    scale: float | None = None
    # Scores are ``softcap * tanh(scale * q k / softcap)`` (Gemma 2, arXiv 2408.00118).
    softcap: float | None = None
    # [N]: the score of one more key per query head, whose value is zero (attention sink, arXiv 2309.17453).
    sink: Tensor | None = None

    def factor(self, channels: int) -> float:
        """Return the factor on the products of heads of ``channels`` channels."""
        return channels**-0.5 if self.scale is None else self.scale

    @property
    def plain(self) -> bool:
        """True if all kernels compute them."""
        return self.softcap is None and self.sink is None


PLAIN_SCORES = AttentionScores()


class AttentionKernel(Protocol):
    """An implementation of attention."""

    def __call__(
        self,
        q_SBND: Tensor,
        k_TBGD: Tensor,
        v_TBGD: Tensor,
        mask: AttentionMask,
        scores: AttentionScores = PLAIN_SCORES,
        /,
    ) -> Tensor:
        """Return the outputs of all queries, as wide as the values."""


def _joined(bands: Sequence[Tile]) -> list[Tile]:
    """Join bands of which all is visible, where the next one continues the rows of the keys or of the queries."""
    found: list[Tile] = []
    for tile in bands:
        last = found[-1] if found else None
        if last is None or not (_is_whole(last) and _is_whole(tile)):
            found.append(tile)
        elif last.queries == tile.queries and last.keys.stop == tile.keys.start:
            found[-1] = tile._replace(keys=slice(last.keys.start, tile.keys.stop, 1))
        elif last.keys == tile.keys and last.queries.stop == tile.queries.start:
            found[-1] = tile._replace(queries=slice(last.queries.start, tile.queries.stop, 1))
        else:
            found.append(tile)
    return found


def _is_whole(tile: Tile) -> bool:
    """Return True for bands of consecutive keys that all queries see."""
    return not tile.causal and tile.left == -1 and tile.queries.step == tile.keys.step == 1


def _is_square(tile: Tile) -> bool:
    """Return True for causal bands of equally many consecutive queries and keys."""
    q, k = tile.queries, tile.keys
    return tile.causal and q.step in (1, None) and q.stop - q.start == k.stop - k.start


def _meet(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _shifted(r: range, by: int) -> slice:
    return slice(r.start + by, r.stop + by, r.step)


class _Band(NamedTuple):
    """Positions of queries and keys, and the fields ``causal`` and ``left`` of a :class:`Tile`."""

    queries: range
    keys: range
    causal: bool
    left: int

    def times(self, step: int, first: int) -> _Band:
        """Return the band of positions ``first + step * position``."""
        q, k = (range(first + step * r.start, first + step * r.stop, step * r.step) for r in (self.queries, self.keys))
        return self._replace(queries=q, keys=k)


def _bands(pattern: AttentionPattern, queries: range, keys: range) -> Iterator[_Band]:
    """Yield the bands of a pattern without a plugin's rule, of positions in one document."""
    if not queries or not keys:
        return
    if prefix := _meet(keys, range(pattern.prefix)):
        yield _Band(queries, prefix, False, -1)
    yield from _window_bands(queries, _meet(keys, range(pattern.prefix, pattern.first)), None)
    rest = _meet(keys, range(max(pattern.prefix, pattern.first), keys.stop))
    size, step = pattern.chunk or max(queries.stop, keys.stop), pattern.dilation
    window = None if pattern.window is None else -(-pattern.window // step)
    for start in range(queries.start // size * size, queries.stop, size):
        chunk = range(start, start + size)
        parts = _meet(queries, chunk), _meet(rest, chunk)
        for first in range(step):  # of the positions first + step i, those i have a plain window
            q, k = (range(-((first - p.start) // step), -((first - p.stop) // step)) for p in parts)
            yield from (band.times(step, first) for band in _window_bands(q, k, window))


def _window_bands(queries: range, keys: range, window: int | None) -> Iterator[_Band]:
    """Yield the bands of plain causal attention, with a window or without.

    They have at least as many keys as queries, or all queries see all keys: otherwise FlashAttention's limits of
    windows are wrong.
    """
    if not keys:
        return
    reach = queries.stop if window is None else window
    near, far = _meet(queries, keys), _meet(queries, range(keys.stop, keys.stop - 1 + reach))
    whole, rest = _meet(far, range(keys.start + reach)), _meet(far, range(keys.start + reach, far.stop))
    for part in (near, whole, rest):
        if part:
            seen = _meet(keys, range(part.start - reach + 1, part.stop))
            limited = window is not None and part is not whole
            yield _Band(part, seen, part is near, reach - 1 - (part.stop - seen.stop) if limited else -1)


def _with_rows(ranges: Ranges) -> Iterator[tuple[range, int]]:
    """Yield ranges, and the row at which each begins."""
    return zip(ranges, accumulate((len(r) for r in ranges), initial=0))


def _cut(positions: range, block: int) -> Ranges:
    return tuple(positions[i : i + block] for i in range(0, len(positions), block))


def _edges(ranges: Ranges) -> NDArray[np.int64]:
    """Return the first and the last position of each range, ``[2, ranges]``."""
    return np.array([(r.start, r.stop - 1) for r in ranges], dtype=np.int64).T


@lru_cache(maxsize=256)
def _kinds_by_position(pattern: AttentionPattern, queries: Ranges, keys: Ranges) -> NDArray[np.int8]:
    """Return the kinds of all pairs of blocks in one document, int8 ``[query blocks, key blocks]``."""
    return _kinds(pattern, *_edges(queries), *_edges(keys))


def _kinds(
    pattern: AttentionPattern,
    q_low: NDArray[np.int64],
    q_high: NDArray[np.int64],
    k_low: NDArray[np.int64],
    k_high: NDArray[np.int64],
) -> NDArray[np.int8]:
    """Return the kinds of all pairs of blocks, by the first and last positions ``[..., blocks]`` of each.

    Every condition is judged by the smallest and largest distance of a pair of blocks.
    """
    q_low, q_high, k_low, k_high = q_low[..., None], q_high[..., None], k_low[..., None, :], k_high[..., None, :]
    nearest, farthest = q_low - k_high, q_high - k_low
    low, high = np.maximum(nearest, 0), farthest
    every = np.ones_like(farthest, dtype=bool)  # all pairs in causal order meet the other conditions
    if pattern.window is not None:
        high = np.minimum(high, pattern.window - 1)
        every &= farthest < pattern.window
    some = low <= high
    if pattern.dilation > 1:
        some &= -(-low // pattern.dilation) * pattern.dilation <= high
        every &= farthest == 0
    if pattern.chunk is not None:
        first, last = np.maximum(q_low, k_low) // pattern.chunk, np.minimum(q_high, k_high) // pattern.chunk
        some &= (q_low // pattern.chunk <= k_high // pattern.chunk) & (
            k_low // pattern.chunk <= q_high // pattern.chunk
        )
        every &= (q_low // pattern.chunk == q_high // pattern.chunk) & (first == last)
        every &= k_low // pattern.chunk == k_high // pattern.chunk
    if pattern.rule is not None:
        for i, j in np.argwhere(some):
            q, k = (
                torch.arange(int(low), int(high) + 1)
                for low, high in ((q_low[i, 0], q_high[i, 0]), (k_low[0, j], k_high[0, j]))
            )
            if max(len(q), len(k)) > LARGEST_RULE_BLOCK:
                every[i, j] = False
                continue
            order = q[:, None] >= k
            seen = pattern.rule(q[:, None], k) & order
            some[i, j], every[i, j] = bool(seen.any()), every[i, j] and bool((seen == order).all())
    if pattern.first:
        some |= (k_low < pattern.first) & (farthest >= 0)
        every |= k_high < pattern.first
    same = (q_low == k_low) & (q_high == k_high)
    kinds = np.where(some, PARTIAL, EMPTY)
    if pattern.prefix:
        kinds = np.where(k_low < pattern.prefix, PARTIAL, kinds)
        same &= k_low >= pattern.prefix
    kinds = np.where(some & every & same, TRIANGLE, kinds)
    full = some & every & (nearest >= 0)
    return np.where(full | (k_high < pattern.prefix), FULL, kinds).astype(np.int8)
