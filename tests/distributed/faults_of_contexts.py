"""Faults of context parallelism and of attention in tiles, each a patch of the library while a context is open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config.multi_token import LATER_MASK, LATER_TOKENS
from megatron.data.later_tokens import later_tokens
from megatron.data.loader import BatchArrays
from megatron.distributed import context_parallel
from megatron.distributed.context_parallel import ContextParallel, PassedKeyValues, chunks_of
from megatron.distributed.micro_batch import MicroBatch
from megatron.kernels import block_attention
from megatron.kernels.attention_mask import AttentionMask, Tile
from megatron.kernels.block_attention import AttentionDropout, Use
from megatron.model.gpt import GPTChunk
from megatron.training.batch_reader import BatchReader

Tiles = list[Tile]


def _with_tiles(change: Callable[[Tiles], Tiles]) -> AbstractContextManager[Any]:
    original = AttentionMask.tiles
    return patch.object(AttentionMask, "tiles", lambda self, *sizes, **more: change(original(self, *sizes, **more)))


def tile_skipped() -> AbstractContextManager[Any]:
    """The last tile of a part of the mask is left out where there are several."""
    return _with_tiles(lambda tiles: tiles[:-1] if len(tiles) > 1 else tiles)


def tile_counted_twice() -> AbstractContextManager[Any]:
    """The last tile of a part of the mask counts twice."""
    return _with_tiles(lambda tiles: tiles + tiles[-1:])


def results_averaged() -> AbstractContextManager[Any]:
    """The results for two parts of the keys count equally, whatever the sums of their exponentials."""

    def merge(y: Tensor, lse: Tensor, new_y: Tensor, new_lse: Tensor) -> None:
        old, new = (x.isfinite().to(y.dtype).unsqueeze(-1) for x in (lse, new_lse))
        y.copy_((y * old + new_y * new) / (old + new).clamp(min=1.0))
        lse.copy_(torch.logaddexp(lse, new_lse))

    return patch.object(block_attention, "_merge", merge)


def _with_chunks(change: Callable[[PassedKeyValues, int, list[int]], Sequence[range]]) -> AbstractContextManager[Any]:
    """Take the keys that came in a step for those at other positions."""
    original = PassedKeyValues._steps

    def steps(self: PassedKeyValues, k: Tensor, v: Tensor, mask: AttentionMask) -> Iterator[tuple[Any, ...]]:
        for step, seen, came_k, came_v, part in original(self, k, v, mask):
            wrong = mask.with_keys(tuple(change(self, step, seen))) if step else part
            yield step, seen, came_k, came_v, wrong

    return patch.object(PassedKeyValues, "_steps", steps)


def chunks_of_the_next_rank() -> AbstractContextManager[Any]:
    """Give keys the positions of the rank after their owner."""

    def change(self: PassedKeyValues, step: int, seen: list[int]) -> Sequence[range]:
        chunks = chunks_of(self.length, self.ring.size, (self._peers(step)[1] + 1) % self.ring.size)
        return [chunks[i] for i in seen]

    return _with_chunks(change)


def halves_swapped() -> AbstractContextManager[Any]:
    """The two chunks of a rank are taken for each other, in the mask only."""

    def change(self: PassedKeyValues, step: int, seen: list[int]) -> Sequence[range]:
        chunks = chunks_of(self.length, self.ring.size, self._peers(step)[1])
        return [chunks[1 - i] for i in seen]

    return _with_chunks(change)


def _with_gradients(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Change the gradients of keys and values of other ranks before they go back."""
    original = PassedKeyValues.backward

    def backward(self: PassedKeyValues, k: Tensor, v: Tensor, mask: AttentionMask, use: Use) -> tuple[Tensor, Tensor]:
        def changed(k: Tensor, v: Tensor, part: AttentionMask) -> Sequence[Tensor]:
            grads = use(k, v, part)
            return grads if part.keys == mask.keys else [change(grad) for grad in grads]

        return original(self, k, v, mask, changed)

    return patch.object(PassedKeyValues, "backward", backward)


def gradients_not_returned() -> AbstractContextManager[Any]:
    """Owners of keys and values learn from their own queries only."""
    return _with_gradients(torch.zeros_like)


def gradient_of_a_chunk_doubled() -> AbstractContextManager[Any]:
    """The gradient of the first chunk that came counts twice."""

    def double(grad: Tensor) -> Tensor:
        grad[: len(grad) // 2] *= 2
        return grad

    return _with_gradients(double)


def heads_in_another_order() -> AbstractContextManager[Any]:
    """Concatenate the heads of the ranks in reverse order."""
    original = ContextParallel.scatter_rows

    def scatter(self: ContextParallel, y: Tensor) -> Tensor:
        return original(self, y).unflatten(2, (self.heads.size, -1)).flip(2).flatten(2, 3)

    return patch.object(ContextParallel, "scatter_rows", scatter)


def rows_in_another_order() -> AbstractContextManager[Any]:
    """Ranks that share chunks have each other's rows of them."""
    original = ContextParallel.gather_rows

    def gather(self: ContextParallel, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.unflatten(0, (self.heads.size, -1)).flip(0).flatten(0, 1) for t in original(self, tensors)]

    return patch.object(ContextParallel, "gather_rows", gather)


def documents_of_local_rows() -> AbstractContextManager[Any]:
    """Keys are looked up in the documents of this rank's tokens."""
    original = ContextParallel.attention

    def attention(self: ContextParallel, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *rest: Any) -> Tensor:
        if mask.documents is not None:
            size, length = self.ring.size * self.heads.size, mask.documents.shape[1]
            mine = mask.documents[:, [i for part in self.rows(length) for i in part]].repeat(1, size)
            mask = replace(mask, documents=mine, host_documents=None, known_boundaries=None)
        return original(self, q, k, v, mask, *rest)

    return patch.object(ContextParallel, "attention", attention)


def sinks_of_every_rank() -> AbstractContextManager[Any]:
    """The softmax of a query sums as many sinks as there are context-parallel ranks."""
    original = ContextParallel.attention

    def attention(self: ContextParallel, *inputs: Any) -> Tensor:
        *rest, scores = inputs
        return original(self, *rest, replace(scores, sink=scores.sink + math.log(self.ring.size)))

    return patch.object(ContextParallel, "attention", attention)


def dropout_by_exchanged_head() -> AbstractContextManager[Any]:
    """Ranks that have exchanged heads drop the same weights of theirs."""

    def kept(changed: Any, **changes: Any) -> Any:
        return changed if isinstance(changed, AttentionDropout) else replace(changed, **changes)

    return patch.object(context_parallel, "replace", kept)


def positions_of_local_rows() -> AbstractContextManager[Any]:
    """Every rank's tokens begin at position 0."""
    original = GPTChunk.forward

    def forward(self: GPTChunk, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return original(self, x, replace(batch, positions=None))

    return patch.object(GPTChunk, "forward", forward)


def samples_counted_by_every_rank() -> AbstractContextManager[Any]:
    """All ranks that read the same samples add them to the digest."""
    original = BatchReader._read

    def read(self: BatchReader, split: str, first: int, size: int) -> list[MicroBatch]:
        before = self.digest_read
        batches = original(self, split, first, size)
        places = self.source.rank_places(split, first, size, self._mesh.dp_rank, self._mesh.dp_size)
        self.digest_read = before + self.source.digest_places(split, places)
        return batches

    return patch.object(BatchReader, "_read", read)


def later_tokens_of_the_next_document() -> AbstractContextManager[Any]:
    """Multi-token prediction reads on, and counts, across the ends of documents."""

    def found(labels: NDArray[Any], mask: NDArray[Any], documents: Any, depths: int, foreign: Any) -> dict[str, Any]:
        return later_tokens(labels, mask, None, depths)

    return patch(f"{later_tokens.__module__}.later_tokens", found)


def later_tokens_of_own_rows() -> AbstractContextManager[Any]:
    """After the last token of a chunk, multi-token prediction reads what follows on this rank."""
    original = BatchArrays.cut

    def cut(self: BatchArrays, positions: NDArray[np.int64]) -> BatchArrays:
        mine = original(self, positions)
        own = later_tokens(mine.labels, mine.loss_mask, None, mine.extra[LATER_MASK].shape[-1])
        return mine._replace(extra={**mine.extra, LATER_TOKENS: own[LATER_TOKENS]})

    return patch.object(BatchArrays, "cut", cut)
