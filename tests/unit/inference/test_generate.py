"""Generation with a cache against a full forward for every token; stop tokens and layouts of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.evaluation.load import check_tensor_parallel_size
from megatron.inference.generate import SamplingParams, generate, sample_tokens, uniform_draw
from megatron.inference.text import IdCodec, InferenceError, stop_ids
from megatron.model.gpt import GPTChunk
from tests.kit.solo import Solo, tiny

GREEDY = SamplingParams(0.0)
LENGTHS = (7, 1, 3, 7, 5)
NEW = 9

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "dropout-in-training": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "rope-gqa-qk-norm": {"position_embedding_type": "rope", "num_query_groups": 2, "qk_layernorm": True},
    "rope-window": {"position_embedding_type": "rope", "window_size": 4, "num_query_groups": 1},
    "interleaved-partial": {"position_embedding_type": "rope", "rotary_interleaved": True, "rotary_percent": 0.5},
    "dilated": {"position_embedding_type": "rope", "attention_pattern": "dilated:3:2,global"},
    "patterns-of-positions": {"attention_pattern": "chunked:4,local:3+first:2"},
    "sinks-capped": {"softmax_type": "learnable", "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.5},
    "no-positions": {"position_embedding_type": "none", "window_size": 3},
}


def model(**changes: Any) -> GPTChunk:
    return Solo.build(tiny(**changes)).chunk


def prompts_of(config: ModelConfig, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, config.vocab, (n,), generator=generator).tolist() for n in lengths]


def reread(chunk: GPTChunk, prompt: list[int], number: int, sampling: SamplingParams, new: int = NEW) -> list[int]:
    """A prompt alone, without a cache."""
    chunk.eval()
    ids = list(prompt)
    for _ in range(new):
        logits = chunk.logits(torch.tensor([ids]))[-1]
        ids.append(
            int(sample_tokens(logits, sampling, torch.tensor([uniform_draw(sampling.seed, number, len(ids))]).double()))
        )
    return ids[len(prompt) :]


class Noted(nn.Module):
    """A model that notes the logits it gives."""

    def __init__(self, chunk: GPTChunk) -> None:
        super().__init__()
        self.chunk, self.config, self.device = chunk, chunk.config, chunk.device
        self.seen: list[Tensor] = []

    def logits(self, *arguments: Any, **named: Any) -> Tensor:
        self.seen.append(self.chunk.logits(*arguments, **named))
        return self.seen[-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_equals_a_full_forward_per_token(name: str) -> None:
    """Tokens, in one batch of prompts of different lengths, in batches of two, and alone; and logits."""
    chunk = model(**CONFIGS[name])
    prompts = prompts_of(chunk.config)
    for sampling, batch_sizes in ((GREEDY, (2,)), (SamplingParams(0.9, 40, 0.95, seed=3), (8, 1))):
        expected = [reread(chunk, prompt, number, sampling) for number, prompt in enumerate(prompts)]
        assert len({tuple(ids) for ids in expected}) > 1
        for batch_size in batch_sizes:
            assert generate(chunk, prompts, NEW, sampling, batch_size=batch_size) == expected
    noted = Noted(chunk)
    chosen = generate(noted, prompts, NEW, GREEDY)
    batches = [noted.seen[i : i + NEW] for i in range(0, len(noted.seen), NEW)]
    cached = torch.cat([torch.cat(batch) for batch in batches], 1)
    for row, (prompt, ids) in enumerate(zip(prompts, chosen)):
        alone = chunk.logits(torch.tensor([prompt + ids]))[len(prompt) - 1 : -1, 0]
        torch.testing.assert_close(cached[:, row], alone, rtol=1e-10, atol=1e-10)


def test_the_prefix_of_a_prompt_is_read_in_both_directions() -> None:
    """As long as the prompt has all of it; a later token does not change what earlier ones have seen."""
    chunk = model(attention_pattern="prefix:5,local:3")
    prompts = prompts_of(chunk.config, (7, 5, 5, 6))
    expected = [reread(chunk, prompt, number, GREEDY) for number, prompt in enumerate(prompts)]
    assert generate(chunk, prompts, NEW, GREEDY) == expected
    (short,) = generate(chunk, [prompts[0][:2]], NEW, GREEDY)
    assert short[:3] == generate(chunk, [prompts[0][:2]], 3, GREEDY)[0]
    other = [prompts[0][0], *prompts[0][1:4], (prompts[0][4] + 1) % chunk.config.vocab, *prompts[0][5:]]
    first, changed = (chunk.logits(torch.tensor([ids]))[0, 0] for ids in (prompts[0], other))
    assert not torch.equal(first, changed), "the first token sees the fifth"


def test_a_stop_token_ends_its_prompt_only() -> None:
    chunk = model()
    prompts = prompts_of(chunk.config)
    free = generate(chunk, prompts, NEW, GREEDY)
    stop = free[2][4]
    expected = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in free]
    assert len(expected[2]) <= 5 < NEW
    assert generate(chunk, prompts, NEW, GREEDY, stop_ids={stop}) == expected


def test_tokens_are_reported_one_by_one() -> None:
    chunk = model()
    prompts = prompts_of(chunk.config)
    printed: list[tuple[int, int, bool]] = []
    stop = generate(chunk, prompts, NEW, GREEDY)[1][3]
    new = generate(chunk, prompts, NEW, GREEDY, [stop], lambda *token: printed.append(token), batch_size=2)
    assert {len(ids) for ids in new} > {NEW}
    for number, ids in enumerate(new):
        assert [token for prompt, token, _ in printed if prompt == number] == ids
        assert [last for prompt, _, last in printed if prompt == number] == [False] * (len(ids) - 1) + [True]
    assert [prompt for prompt, *_ in printed[:4]] == [0, 1, 0, 1]


def test_requests_that_cannot_be_fulfilled() -> None:
    chunk = model()
    for prompts, new, message in [
        ([[1], []], 3, "prompt 2 is empty"),
        ([[1, 101]], 3, r"prompt 1 has id 101, but the model's ids are 0\.\.100"),
        ([[1] * 10], 7, r"exceed the model's 16 positions\n  fix: --max-new-tokens 6"),
        ([[1] * 16], 1, "has 16 positions for prompt and new tokens"),
        ([[1]], 0, "--max-new-tokens 0: must be"),
    ]:
        with pytest.raises(InferenceError, match=message):
            generate(chunk, prompts, new, GREEDY)
    assert len(generate(chunk, [[1] * 10], 6, GREEDY)[0]) == 6
    assert generate(chunk, [], 5, GREEDY) == []
    torch.nn.init.constant_(chunk.params["final_layernorm.weight"], float("inf"))
    with pytest.raises(InferenceError, match="NaN or infinite"):
        generate(chunk, [[1]], 3, GREEDY)


# --- the model's files and layout ---


class EndsWith9(IdCodec):
    end = 9


def test_stop_ids_come_from_the_first_file_that_names_them() -> None:
    for contents, expected in [
        ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 7}}, {5, 6}),
        ({"generation_config": {"eos_token_id": 0}}, {0}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 7}}, {7}),
        ({"generation_config": {}, "config": {}}, {9}),
    ]:
        files = {f"{name}.json": json.dumps(content).encode() for name, content in contents.items()}
        assert stop_ids(files, EndsWith9()) == expected
    assert stop_ids({}, IdCodec()) == set()
    for broken in (b"{", b"[]", b'{"eos_token_id": {}}', b'{"eos_token_id": "x"}'):
        with pytest.raises(InferenceError, match=r"generation_config\.json"):
            stop_ids({"generation_config.json": broken}, IdCodec())


def test_layouts() -> None:
    model = tiny(num_query_groups=2)
    for tp in (1, 2, 4):
        check_tensor_parallel_size(model, tp, tp)
    with pytest.raises(InferenceError, match=r"4 heads do not divide over TP 3; .*\n  fix: torchrun .* 2 "):
        check_tensor_parallel_size(model, 3, 3)
    with pytest.raises(InferenceError, match=r"size 2 on 4 processes.*\n  fix: torchrun --nproc-per-node 2 "):
        check_tensor_parallel_size(model, 2, 4)
