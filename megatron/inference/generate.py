"""Continuing prompts token by token.

Shapes: S tokens, B prompts, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from megatron.config.model import ModelConfig
from megatron.inference.errors import InferenceError
from megatron.inference.sampling import Sampling, draw, sample
from megatron.layers.cache import KVCache
from megatron.model.gpt import GPTChunk

OnToken = Callable[[int, int, bool], None]
"""Told the prompt's number, the token, and whether it is the last."""


def generate(
    chunk: GPTChunk,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    on_token: OnToken | None = None,
    batch_size: int = 8,
) -> list[list[int]]:
    """What the model writes after each prompt; the same on every tensor-parallel rank, all of which must call.

    A prompt's continuation depends on its place among the prompts, the seed and itself, not on which others are
    computed beside it.

    Args:
        chunk: the whole model; is put into evaluation mode.
        prompts: ids, at least one each.
        max_new_tokens: a continuation's greatest length, at least 1.
        sampling: how tokens are chosen.
        stop_ids: tokens that end a continuation, of which they are the last one.
        on_token: told of every token as soon as it is chosen.
        batch_size: prompts computed at once.

    Returns:
        The new ids of each prompt.

    Raises:
        InferenceError: when the model cannot continue the prompts, or its logits are not finite.
    """
    check(chunk.config, prompts, max_new_tokens)
    chunk.eval()
    new: list[list[int]] = [[] for _ in prompts]

    def take(prompt: int, token: int) -> bool:
        """Note a token; whether it is the last."""
        new[prompt].append(token)
        last = token in stop_ids or len(new[prompt]) == max_new_tokens
        if on_token is not None:
            on_token(prompt, token, last)
        return last

    for first in range(0, len(prompts), batch_size):
        _continue_batch(chunk, prompts[first : first + batch_size], first, max_new_tokens, sampling, take)
    return new


def _continue_batch(
    chunk: GPTChunk,
    prompts: Sequence[Sequence[int]],
    first: int,
    max_new_tokens: int,
    sampling: Sampling,
    take: Callable[[int, int], bool],
) -> None:
    """Continue prompts ``first``.. together until ``take`` has said of each that a token was its last."""
    device = chunk.context.device
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padding_B = torch.tensor([longest - length for length in lengths], device=device)
    cache = KVCache(longest + max_new_tokens, padding_B if min(lengths) < longest else None)
    tokens_BS = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    going = set(range(len(prompts)))
    while going:
        logits_BV = chunk.logits(tokens_BS, cache, last=1)[0]
        chosen_B = sample(logits_BV, sampling, _draws(sampling, first, lengths).to(device))
        for index, token in enumerate(chosen_B.tolist()):
            if index in going and take(first + index, token):
                going.discard(index)
        tokens_BS, lengths = chosen_B.unsqueeze(1), [length + 1 for length in lengths]


def _draws(sampling: Sampling, first: int, positions: Sequence[int]) -> torch.Tensor:
    """``[B]``, for the tokens at these positions of prompts ``first``..."""
    numbers = [draw(sampling.seed, first + index, position) for index, position in enumerate(positions)]
    return torch.tensor(numbers, dtype=torch.float64)


def check(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Whether a model can continue these prompts so far.

    Raises:
        InferenceError: when a prompt is empty, has ids that are not in the vocabulary, or does not leave as many
            positions as there shall be new tokens.
    """
    if max_new_tokens < 1:
        raise InferenceError(f"{max_new_tokens} new tokens are nothing to generate", "--max-new-tokens 100")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise InferenceError(f"prompt {number} is empty: there is nothing to continue")
        wrong = next((token for token in prompt if not 0 <= token < config.vocab), None)
        if wrong is not None:
            raise InferenceError(f"prompt {number} has id {wrong}, but the model's ids are 0..{config.vocab - 1}")
        limit = config.max_position_embeddings
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise _too_long(number, len(prompt), max_new_tokens, limit)


def _too_long(number: int, length: int, max_new_tokens: int, limit: int) -> InferenceError:
    if length >= limit:
        return InferenceError(
            f"prompt {number} has {length} tokens; the model has {limit} positions, which must hold the new tokens too",
            f"a prompt of at most {limit - 1} tokens",
        )
    return InferenceError(
        f"prompt {number} has {length} tokens; {max_new_tokens} new ones would exceed the model's {limit} positions",
        f"--max-new-tokens {limit - length}",
    )
