"""Greedy generation equals `transformers.generate` with the same weights: prompts alone, in a batch, with an end.

In fp64 and fp32. In bf16 the two round at other places (a norm once here and twice there, a bias the other way round),
and of nearly equal logits another may be the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.inference.generate import SamplingParams, generate
from tests.parity.families import copy_into
from tests.parity.test_hf import BY_NAME, Pair, precision
from tests.unit.inference.test_text import byte_level, sentencepiece_like
from tools.generate import main

GREEDY = SamplingParams(0.0)
LENGTHS = (3, 7, 1, 5)
NEW = 9


def pair_of(name: str, dtype: torch.dtype) -> Pair:
    """With smaller biases, which would make the same token likeliest everywhere."""
    pair = Pair.build(BY_NAME[name], dtype)
    with torch.no_grad():
        for parameter, values in pair.theirs.named_parameters():
            values.mul_(0.05 if parameter.endswith("bias") else 1.0)
    copy_into(pair.ours.params, pair.their_weights())
    return pair


def prompts_of(pair: Pair) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, pair.config.vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def by_transformers(pair: Pair, prompts: Sequence[Sequence[int]], end: int | None = None) -> list[list[int]]:
    """New ids of each prompt, computed in one batch padded on the left; after the first ``end`` nothing counts."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with precision(pair.dtype):
        out = pair.theirs.eval().generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=0,
        )
    new: list[list[int]] = out[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in new]


@pytest.mark.parametrize("name", BY_NAME)
def test_greedy(name: str) -> None:
    pair = pair_of(name, torch.float64)
    prompts = prompts_of(pair)
    expected = by_transformers(pair, prompts)
    assert len({token for ids in expected for token in ids}) > 4, "a model that repeats itself shows little"
    assert generate(pair.ours.chunk, prompts, NEW, GREEDY) == expected
    assert [by_transformers(pair, [prompt])[0] for prompt in prompts] == expected


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_greedy_in_fp32_with_an_end(name: str) -> None:
    pair = pair_of(name, torch.float32)
    prompts = prompts_of(pair)
    end = by_transformers(pair, prompts)[1][3]
    expected = by_transformers(pair, prompts, end)
    assert min(map(len, expected)) < NEW
    assert generate(pair.ours.chunk, prompts, NEW, GREEDY, stop_ids=[end]) == expected


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_the_output_of_the_tool_matches_transformers(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder that `transformers` wrote, tokenizer and all: the whole text, up to the end that it names."""
    import transformers

    torch.manual_seed(4)
    tokenizer = byte_level() if family == "GPT2" else sentencepiece_like()
    shape = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 40, "bos_token_id": None}
    if family == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **shape)
        theirs = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **shape,
        )
        theirs = transformers.LlamaForCausalLM(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    if family == "Llama":  # among bytes that make no character its decoder spoils those that do
        torch.nn.init.zeros_(theirs.lm_head.weight[3:259])
    theirs.save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    codec = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = "the naïve fox"
    ids = codec(prompt, return_tensors="pt").input_ids
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        ids, do_sample=False, max_new_tokens=30, pad_token_id=0
    )[0]
    whole = codec.decode(out[:-1] if out[-1] == 40 else out, skip_special_tokens=True)
    start = codec.decode(ids[0], skip_special_tokens=True)
    assert main(["--load", f"hf:{tmp_path}", "--prompt", prompt, "--max-new-tokens", "30", "--greedy"]) == 0
    assert capsys.readouterr().out == prompt + whole.removeprefix(start) + "\n"
