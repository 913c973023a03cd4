"""Fine-tuning on packed conversations equals `transformers` on each conversation alone; packs keep them apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.data.loader import DataSource, build_data
from megatron.distributed.micro_batch import MicroBatch
from tests.parity.test_hf import Case, Pair, assert_close, precision
from tests.unit.data.test_chat import MARKED, PLAIN, messages, tokenizer

SEQ_LENGTH = 64
SIZES = {"vocab_size": 257}
CASES = [
    Case("gpt2", "GPT2", SIZES | {"n_positions": SEQ_LENGTH}),
    Case("llama", "Llama", SIZES | {"num_key_value_heads": 2}),
]
TURNS = [
    [("user", "Hi"), ("assistant", "Hello!")],
    [("user", "a"), ("assistant", "b"), ("user", "?"), ("assistant", "d\n\ne")],
    [("system", "x"), ("user", "yes or no"), ("assistant", "no")],
    [("user", "1"), ("assistant", "2")],
    [("user", "3"), ("assistant", "fourteen")],
]


def data_of(folder: Path, turns: list[list[tuple[str, str]]] = TURNS) -> DataSource:
    """An epoch of conversations in one global batch."""
    (folder / "t.jinja").write_text(PLAIN)
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": messages(*each)}) + "\n" for each in turns))
    options = DataConfig(
        chat_data_path=(str(folder / "a.jsonl"),),
        tokenizer_type="ByteTokenizer",
        chat_template=str(folder / "t.jinja"),
    )
    training = TrainingConfig(seq_length=SEQ_LENGTH, train_samples=4, global_batch_size=4, micro_batch_size=4)
    return build_data(options, training, 257, 1)


def their_batches() -> list[tuple[Tensor, Tensor]]:
    """Ids and labels of each conversation, as `transformers` makes them of a template with marks."""
    chat = tokenizer(MARKED)
    found = []
    for turns in TURNS:
        encoded = chat._tokenizer.apply_chat_template(
            messages(*turns), return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        ids = encoded["input_ids"]
        found.append((ids, ids.where(torch.as_tensor(encoded["assistant_masks"]) > 0, -100)))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_of_a_pack(case: Case, tmp_path: Path) -> None:
    """The loss is the sum over all answers by the number of their ids."""
    pair = Pair.build(case, torch.float64)
    data = data_of(tmp_path)
    assert data.datasets["train"].packs == 3
    loss = pair.ours.backward([data.micro_batch("train", range(4), 0)])
    total, count = torch.zeros((), dtype=torch.float64), 0
    with precision(torch.float64):
        for ids, labels in their_batches():
            logits = pair.theirs(input_ids=ids).logits[:, :-1]
            total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[0, 1:], reduction="sum")
            count += int((labels[:, 1:] >= 0).sum())
        (total / count).backward()
    assert loss.item() == pytest.approx((total / count).item(), rel=1e-12)
    assert_close(pair.ours.buckets.grads, pair.their_grads(), 1e-12)


def losses(pair: Pair, batch: MicroBatch) -> dict[int, float]:
    """The summed loss of each conversation of a sample, and of its padding."""
    assert batch.documents is not None
    return {
        document: pair.ours.chunk(None, replace(batch, loss_mask=batch.loss_mask * (batch.documents == document)))[
            0
        ].item()
        for document in batch.documents.unique().tolist()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_conversation_does_not_change_the_others_in_its_sample(case: Case, tmp_path: Path) -> None:
    """To the bit; every one of its own tokens changes its own loss, if answers follow."""
    pair = Pair.build(case, torch.float64)
    data = data_of(tmp_path)
    fullest = max(range(3), key=lambda i: len(data.datasets["train"].members(i)))
    batch = replace(data, micro_batch_size=1).micro_batch("train", range(fullest, fullest + 1), 0)
    before = losses(pair, batch)
    assert len(before) >= 3
    for place, document in enumerate(batch.documents[0].tolist()):
        tokens = batch.tokens.clone()
        tokens[0, place] = (tokens[0, place] + 7) % 257
        after = losses(pair, replace(batch, tokens=tokens))
        changed = {name for name in before if before[name] != after[name]}
        answers = batch.loss_mask[0, place:] * (batch.documents[0, place:] == document)
        assert changed == ({document} if answers.any() else set()), place
