"""Autoregressive generation with a key/value cache, and sampling of the next token.

A continuation depends on the prompt, its index and the seed only: random numbers are a hash of these and the
position, so neither the batch nor the layout of the ranks changes the text.

Shapes: S tokens, B prompts, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.random import stable_hash
from megatron.inference.scoring import ComputingModel, record
from megatron.inference.text import InferenceError
from megatron.layers.context import DTYPES
from megatron.layers.kv_cache import KVCache
from megatron.layers.mixers.registry import find_mixer


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Invalid values raise InferenceError."""

    temperature: float = 1.0  # divides the logits; 0 is greedy decoding
    top_k: int | None = None  # keep the k most likely tokens and ties with the k-th; None for all
    top_p: float | None = None  # keep the fewest most likely tokens with this total probability; None for all
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InferenceError(f"temperature {self.temperature}: must be at least 0", "--temperature 0.8", "--greedy")
        if self.top_k is not None and self.top_k < 1:
            raise InferenceError(f"top-k {self.top_k}: must be at least 1", "--top-k 50")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InferenceError(f"top-p {self.top_p}: must be above 0 and at most 1", "--top-p 0.95")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0


def sample_tokens(logits_BV: Tensor, sampling: SamplingParams, draws_B: Tensor) -> Tensor:
    """Sample one token per prompt, int64 ``[B]``.

    Args:
        logits_BV: logits of the next token.
        sampling: sampling parameters.
        draws_B: fp64 numbers in [0, 1); the token is the first whose cumulative probability exceeds the number.

    Raises:
        InferenceError: if the logits are not finite.
    """
    if not logits_BV.isfinite().all():
        raise InferenceError(
            "the model's logits are not finite: its weights are NaN or infinite, or overflow in 16 bits"
        )
    if sampling.greedy:
        return logits_BV.argmax(-1)
    cumulative_BV = filter_logits(logits_BV, sampling).softmax(-1).cumsum(-1)
    cumulative_BV /= cumulative_BV[:, -1:].clone()  # the last entry is exactly 1, above every draw
    return torch.searchsorted(cumulative_BV, draws_B.unsqueeze(1), right=True).squeeze(1)


def filter_logits(logits_BV: Tensor, sampling: SamplingParams) -> Tensor:
    """Scale logits by the temperature and set filtered tokens to -inf; fp64, the largest logit is 0.

    Top-k is applied before top-p (nucleus sampling, Holtzman et al. 2020), which keeps tokens if all more likely ones
    sum to less than ``top_p``. The order and the treatment of ties under top-k are those of `transformers`.
    """
    logits_BV = logits_BV.double()
    shifted_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # before dividing, so that the largest logit stays 0
    # a tensor, because CUDA replaces the division by a Python number with a multiplication by its reciprocal
    logits_BV = shifted_BV / shifted_BV.new_tensor(sampling.temperature)
    if sampling.top_k is not None:
        kth_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
        probabilities_BV = sorted_BV.softmax(-1)
        likelier_BV = probabilities_BV.cumsum(-1) - probabilities_BV
        likelier_BV = torch.empty_like(likelier_BV).scatter_(1, order_BV, likelier_BV)  # back to the order of IDs
        logits_BV = logits_BV.masked_fill(likelier_BV >= sampling.top_p, float("-inf"))
    return logits_BV


def uniform_draw(seed: int, prompt: int, position: int) -> float:
    """Return a uniform number in [0, 1) that depends only on seed, prompt index and token position."""
    return (stable_hash("sample", seed, prompt, position) >> 10) * 2.0**-53


class NextTokenModel(Protocol):
    """Interface of a model that generates: a whole chunk, or the stages of a :class:`PipelinedModel`."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the whole model."""

    @property
    def device(self) -> torch.device:
        """Of the tokens and logits."""

    def eval(self) -> object:
        """Turn dropout off."""

    def logits(self, tokens_BS: Tensor, cache: KVCache | None = None, last: int = 0) -> Tensor:
        """Return the logits ``[S, B, vocab]``, see :meth:`GPTChunk.logits`."""

    def log_probs(self, logits_BV: Tensor, ids_B: Tensor) -> Tensor:
        """Return the log-probability of an id under each row of logits, ``[B]``."""


class PipelinedModel:
    """The stages of a model whose ranks compute in turn; all get the logits. Collective over a pipeline."""

    def __init__(self, model: ComputingModel) -> None:
        """Wrap a model without sequence parallelism, whose weights are complete."""
        self.config, self.device, self._model = model.config.model, model.device, model

    def eval(self) -> object:
        """Do nothing: passes that only compute run without dropout."""
        return self

    def logits(self, tokens_BS: Tensor, cache: KVCache | None = None, last: int = 0) -> Tensor:
        """Return next-token logits ``[S, B, vocab]``; arguments as for :meth:`GPTChunk.logits`."""
        batch = MicroBatch.of_tokens(tokens_BS, cache.positions(tokens_BS) if cache is not None else None)
        found = record(self._model, [batch], lambda hidden, _, output: output.logits(hidden[-last:]), cache)
        if cache is not None:
            cache.advance(tokens_BS.shape[1])
        return self._share(found, (last or tokens_BS.shape[1], tokens_BS.shape[0], self.config.vocab))

    def log_probs(self, logits_BV: Tensor, ids_B: Tensor) -> Tensor:
        """Return the log-probability of an id under each row of logits, ``[B]``."""
        last = [chunk.log_probs(logits_BV, ids_B) for chunk in self._model.chunks.values() if chunk.last]
        return self._share(last, (len(ids_B),))

    def _share(self, found: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Return the result of the last stage, which alone has found it, on all."""
        pipeline, precision = self._model.mesh.pipeline, self._model.config.precision
        if pipeline.size == 1:
            return found[0]
        dtype = torch.promote_types(DTYPES[precision.params_dtype], torch.float32)
        result = found[0] if found else torch.empty(shape, dtype=dtype, device=self.device)
        return comm.start_broadcast(result.contiguous(), pipeline, self._model.mesh.placement[-1]).wait()


TokenCallback = Callable[[int, int, bool], None]
"""Called with the prompt's index, the token, and whether it is the prompt's last."""


@dataclass(frozen=True)
class Continuation:
    """The new tokens of a prompt, and what the model gave them."""

    tokens: list[int]
    # Log-probability of each token: of the model, before temperature, top-k and top-p.
    log_probs: list[float]


def generate(
    chunk: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_ids: Collection[int] = (),
    on_token: TokenCallback | None = None,
    batch_size: int = 8,
    indices: Sequence[int] | None = None,
    is_complete: Callable[[Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """Return the new token IDs of each prompt. Arguments and errors are those of :func:`generate_scored`."""
    options = stop_ids, on_token, batch_size, indices, is_complete
    found = _generate(chunk, prompts, max_new_tokens, sampling, *options, scored=False)
    return [continuation.tokens for continuation in found]


def generate_scored(
    chunk: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_ids: Collection[int] = (),
    on_token: TokenCallback | None = None,
    batch_size: int = 8,
    indices: Sequence[int] | None = None,
    is_complete: Callable[[Sequence[int]], bool] | None = None,
) -> list[Continuation]:
    """Generate a continuation of each prompt. Collective over the ranks of the model; the result is equal on all.

    A continuation depends on the prompt, its index and the seed, not on the other prompts of its batch. With
    ``--batch-invariant`` its log-probabilities are those of :func:`megatron.inference.scoring.compute_logprobs` to the
    bit.

    Args:
        chunk: the model; it is set to evaluation mode.
        prompts: token IDs, at least one per prompt.
        max_new_tokens: maximum length of a continuation, at least 1.
        sampling: sampling parameters.
        stop_ids: tokens that end a continuation; the last one is included.
        on_token: called with every token as soon as it is chosen.
        batch_size: number of prompts computed together.
        indices: of the prompts, for the random numbers; None to count them.
        is_complete: returns True for new tokens that end a continuation, besides ``stop_ids``.

    Returns:
        The new token IDs of each prompt, with their log-probabilities.

    Raises:
        InferenceError: if the model cannot continue the prompts, or its logits are not finite.
    """
    options = stop_ids, on_token, batch_size, indices, is_complete
    return _generate(chunk, prompts, max_new_tokens, sampling, *options, scored=True)


def _generate(
    chunk: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_ids: Collection[int],
    on_token: TokenCallback | None,
    batch_size: int,
    indices: Sequence[int] | None,
    is_complete: Callable[[Sequence[int]], bool] | None,
    scored: bool,
) -> list[Continuation]:
    check_prompts(chunk.config, prompts, max_new_tokens)
    chunk.eval()
    found = [Continuation([], []) for _ in prompts]
    indices = range(len(prompts)) if indices is None else indices
    for batch in (range(i, min(i + batch_size, len(prompts))) for i in range(0, len(prompts), batch_size)):
        unfinished = set(batch)
        drawn = [indices[prompt] for prompt in batch]
        members = prompts[batch.start : batch.stop]
        for row, token, score in _generate_batch(chunk, members, drawn, max_new_tokens, sampling, scored):
            prompt = batch[row]
            if prompt in unfinished:
                new = found[prompt].tokens
                new.append(token)
                found[prompt].log_probs.extend(score)
                last = token in stop_ids or len(new) == max_new_tokens
                if last or (is_complete is not None and is_complete(new)):
                    last = True
                    unfinished.discard(prompt)
                if on_token is not None:
                    on_token(prompt, token, last)
            if not unfinished:
                break
    return found


def _generate_batch(
    chunk: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams,
    scored: bool,
) -> Iterator[tuple[int, int, list[float]]]:
    """Continue prompts of the given indices together; yield (row, token, log-probability if scored) for each token."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padding_B = torch.tensor([longest - length for length in lengths], device=chunk.device)
    cache = KVCache(longest + max_new_tokens, padding_B if min(lengths) < longest else None)
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens_BS = torch.tensor(padded, device=chunk.device)
    for position in range(max_new_tokens):
        logits_BV = chunk.logits(tokens_BS, cache, last=1)[0]
        places = zip(indices, lengths)
        draws = [uniform_draw(sampling.seed, index, length + position) for index, length in places]
        draws_B = torch.tensor(draws, dtype=torch.float64).to(chunk.device)
        chosen_B = sample_tokens(logits_BV, sampling, draws_B)
        scores_BN = chunk.log_probs(logits_BV, chosen_B).unsqueeze(1) if scored else logits_BV[:, :0]
        yield from zip(range(len(prompts)), chosen_B.tolist(), scores_BN.tolist())
        tokens_BS = chosen_B.unsqueeze(1)


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that the model can continue the prompts.

    Raises:
        InferenceError: if a prompt is empty, has IDs outside the vocabulary, or leaves too few positions for the new
            tokens.
    """
    if max_new_tokens < 1:
        raise InferenceError(f"--max-new-tokens {max_new_tokens}: must be at least 1", "--max-new-tokens 100")
    for name in (name for mixers in config.kinds_of_layers for name in mixers):
        if "generation" not in find_mixer(name).supports:
            raise InferenceError(f"--token-mixers {name} does not support generation", "train or evaluate the model")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise InferenceError(f"prompt {number} is empty: it needs at least one token")
        wrong = next((token for token in prompt if not 0 <= token < config.vocab), None)
        if wrong is not None:
            raise InferenceError(f"prompt {number} has id {wrong}, but the model's ids are 0..{config.vocab - 1}")
        length = len(prompt)
        limit = config.max_position_embeddings
        if limit is None or length + max_new_tokens <= limit:
            continue
        if length >= limit:
            raise InferenceError(
                f"prompt {number} has {length} tokens; the model has {limit} positions for prompt and new tokens",
                f"a prompt of at most {limit - 1} tokens",
            )
        raise InferenceError(
            f"prompt {number} has {length} tokens; {max_new_tokens} more would exceed the model's {limit} positions",
            f"--max-new-tokens {limit - length}",
        )
