"""Passes that only compute: record what a function makes of the last hidden states, in any layout.

Evaluation measures the log-probabilities of tokens with it, preference tuning those of its reference, and distillation
the logits of its teacher. The model is a run's own (:class:`megatron.training.trainer.Trainer`) or a
:class:`megatron.training.frozen_models.FrozenModel`, which has neither gradients nor an optimizer.

Shapes: B samples, S tokens of a sample, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.distributed import comm
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import DTYPES
from megatron.layers.kv_cache import KVCache
from megatron.layers.loss import OutputLayer
from megatron.model.gpt import GPTChunk, LossSums
from megatron.model.objective import Objective

T = TypeVar("T")

Measure = Callable[[Tensor, MicroBatch, OutputLayer], T]
"""``measure(hidden_SBH, micro_batch, output_layer)``, with the hidden states after the final norm, ``[S(/tp), B, H]``.

It is called on all tensor-parallel ranks of the last stage."""


BATCHES_PER_PASS = 64
"""Micro-batches that run through the pipeline at once in :func:`score_tokens`."""


class ComputingModel(Protocol):
    """Interface of a model in a pass."""

    @property
    def config(self) -> RunConfig:
        """Configuration, resolved."""

    @property
    def mesh(self) -> Mesh:
        """The groups of the ranks."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""

    @property
    def chunks(self) -> Mapping[int, GPTChunk]:
        """Model chunks of this rank, by stage number."""

    def compute(self, batches: Sequence[MicroBatch], loss_grad: None) -> None:
        """Run the pipeline over this rank's micro-batches, forward only."""


def record(
    model: ComputingModel, batches: Sequence[MicroBatch], measure: Measure[T], cache: KVCache | None = None
) -> list[T]:
    """Run forward passes of micro-batches, without dropout; return what ``measure`` returns for each.

    Collective over the ranks of a pipeline, and those that share weights or experts: all need equally many
    micro-batches. With a ``cache``, the tokens of the only micro-batch follow the cached ones.

    Returns:
        One result per micro-batch on ranks that hold the last stage, and no result on others.
    """
    recorder = _Recorder(measure)
    kept = [(chunk, chunk.objective, chunk.sums) for chunk in model.chunks.values()]
    for chunk, _, _ in kept:
        chunk.objective, chunk.sums, chunk.cache = recorder, LossSums(), cache
    try:
        model.compute(batches, None)
    finally:
        for chunk, objective, sums in kept:
            chunk.objective, chunk.sums, chunk.cache = objective, sums, None
    return recorder.results


class _Recorder(Objective, Generic[T]):
    """Stands in for the objective of the chunks, which call it for one micro-batch after the other."""

    def __init__(self, measure: Measure[T]) -> None:
        self.measure, self.results = measure, list[T]()

    def __call__(
        self, hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        self.results.append(self.measure(hidden_SBH, batch, output_layer))
        return hidden_SBH.new_zeros((), dtype=torch.promote_types(hidden_SBH.dtype, torch.float32)), {}


def score_tokens(
    model: ComputingModel, requests: Sequence[tuple[Sequence[int], int]], batch_size: int = 8
) -> list[tuple[list[float], list[bool]]]:
    """Return the log-probabilities of the last tokens of sequences, and whether each is the most likely.

    A sequence is computed as in training, without dropout.

    Collective over all ranks, with the same requests on each; they are divided over data-parallel and context-parallel
    ranks, which read whole sequences here. Sequences of similar length are computed together.

    Args:
        model: of any layout.
        requests: token IDs of each sequence, and how many of its last tokens are scored; fewer than it has.
        batch_size: sequences in a micro-batch.

    Returns:
        The scores of each request, on all ranks.

    Raises:
        ValueError: if more tokens are to be scored than have one before them.
    """
    (log_probs, greedy), starts = _scores(model, requests, batch_size).tolist(), _starts(requests)
    return [(log_probs[start:stop], [score > 0 for score in greedy[start:stop]]) for start, stop in pairwise(starts)]


def compute_logprobs(model: ComputingModel, tokens_BS: Tensor, batch_size: int = 8) -> Tensor:
    """Return the log-probability of every token but the first of each sequence, as training computes them.

    Collective over all ranks of the model, with the same tokens on each; see :func:`score_tokens`.

    Args:
        model: of any layout.
        tokens_BS: int64 ids ``[B, S]``, S at least 2. Sequences that end earlier are padded at their ends with any id.
        batch_size: sequences in a micro-batch.

    Returns:
        ``[B, S - 1]`` in at least fp32, equal on all ranks: entry ``[b, s]`` is that of ``tokens[b, s + 1]`` after the
        tokens before it.
    """
    count = tokens_BS.shape[1] - 1
    scores_2T = _scores(model, [(tokens, count) for tokens in tokens_BS.tolist()], batch_size)
    dtype = torch.promote_types(DTYPES[model.config.precision.params_dtype], torch.float32)
    return scores_2T[0].view(-1, count).to(dtype)


def _starts(requests: Sequence[tuple[Sequence[int], int]]) -> list[int]:
    """Return where the scores of each request begin, and where the last ends."""
    return list(accumulate((count for _, count in requests), initial=0))


def _scores(model: ComputingModel, requests: Sequence[tuple[Sequence[int], int]], batch_size: int) -> Tensor:
    """Return log-probabilities, and 1 where a token is the most likely, of all requests in turn: fp64 ``[2, T]``."""
    if any(count >= len(tokens) for tokens, count in requests):
        raise ValueError("nothing predicts the first token of a sequence")
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index][0]))
    groups = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    readers = model.mesh.dp_cp
    rounds = -(-len(groups) // readers.size)  # all ranks compute equally many, because they may share weights
    mine = [groups[min(place, len(groups) - 1)] for place in range(readers.rank, rounds * readers.size, readers.size)]
    own = rounds if readers.rank + (rounds - 1) * readers.size < len(groups) else rounds - 1
    starts = _starts(requests)
    # Every score has one source, so that sums over ranks are exact.
    scores_2T = torch.zeros(2, starts[-1], dtype=torch.float64, device=model.device)
    for first in range(0, rounds, BATCHES_PER_PASS):
        passed = range(first, min(first + BATCHES_PER_PASS, rounds))
        batches = [_batch_of_sequences(model, [requests[index][0] for index in mine[place]]) for place in passed]
        for place, scores in zip(passed, record(model, batches, _measure_tokens)):
            for row, index in enumerate(mine[place] if place < own else ()):
                tokens, count = requests[index]
                scored = slice(len(tokens) - 1 - count, len(tokens) - 1)
                scores_2T[:, starts[index] : starts[index + 1]] = torch.stack([score[row, scored] for score in scores])
    return comm.all_reduce(comm.all_reduce(scores_2T, readers), model.mesh.pipeline)


def log_likelihoods(
    model: ComputingModel, requests: Sequence[tuple[Sequence[int], int]], batch_size: int = 8
) -> list[tuple[float, bool]]:
    """Return the log-probability of the last tokens of each sequence, and whether all are the most likely."""
    scores = score_tokens(model, requests, batch_size)
    return [(math.fsum(log_probs), all(greedy)) for log_probs, greedy in scores]


def _measure_tokens(hidden_SBH: Tensor, batch: MicroBatch, output_layer: OutputLayer) -> tuple[Tensor, Tensor]:
    return output_layer.token_scores(hidden_SBH, batch.labels)


def _batch_of_sequences(model: ComputingModel, sequences: Sequence[Sequence[int]]) -> MicroBatch:
    """Return a micro-batch of sequences whose last token is only a label, padded at their ends.

    Sequence parallelism needs a multiple of its ranks; what attends to the past only does not see the padding.
    """
    parallel = model.config.parallel
    multiple = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    length = -(-(max(map(len, sequences)) - 1) // multiple) * multiple + 1
    ids = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in sequences]).to(model.device)
    return replace(MicroBatch.of_tokens(ids[:, :-1]), labels=ids[:, 1:])
