"""Preferences: ids and labels match trl, pairs stay together, and unusable lines are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.chat import Conversations, _load, encode_pair, load_conversations
from megatron.data.errors import DataError
from megatron.data.packed_dataset import PackedDataset
from tests.unit.data.test_chat import (
    CALL,
    CALLING,
    GOOD,
    PLAIN,
    TOOLS,
    calling,
    data,
    in_parts,
    messages,
    parts,
    tokenizer,
)

QUESTION, ANSWERS = ("user", "1+1?"), (("assistant", "It is 2"), ("assistant", "It is 3"))
CHOSEN, REJECTED = (messages(answer) for answer in ANSWERS)
TEXTS = [
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"},
    {"prompt": "é", "chosen": "nd<|endoftext|>", "rejected": ""},
]
MESSAGES = [
    {"prompt": messages(QUESTION), "chosen": CHOSEN, "rejected": REJECTED},
    {
        "prompt": messages(("system", "x"), QUESTION),
        "chosen": messages(ANSWERS[0], ("user", "sure?"), ("assistant", "yes")),
        "rejected": REJECTED,
    },
]
WITHOUT_PROMPT = [{key: [*record["prompt"], *record[key]] for key in ("chosen", "rejected")} for record in MESSAGES]
TEXTS_WITHOUT_PROMPT = [{"chosen": "2 + 2 = 4", "rejected": "2 + 2 = five"}]


CALLED = [
    {"prompt": turns[:1], "chosen": turns[1:], "rejected": REJECTED, "tools": TOOLS}
    for turns in (calling(CALL, content=None), calling(CALL, content="I add"))
]
IN_PARTS = [{key: in_parts(turns) for key, turns in record.items()} for record in MESSAGES]


@pytest.mark.parametrize("records", [TEXTS, MESSAGES, WITHOUT_PROMPT, TEXTS_WITHOUT_PROMPT, CALLED, IN_PARTS])
def test_ids_and_labels_match_trl(records: list[dict[str, Any]], tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    chat = tokenizer(CALLING if records in (CALLED, IN_PARTS) else PLAIN)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    models = [LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)) for _ in range(2)]
    config = DPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    theirs = DPOTrainer(*models, config, train_dataset=Dataset.from_list(records), processing_class=chat._tokenizer)
    for record, row in zip(records, theirs.train_dataset, strict=True):
        found, logps = encode_pair(chat, record)
        assert np.isnan(logps).all()
        for conversation, key in zip(found, ("chosen_ids", "rejected_ids"), strict=True):
            assert conversation.ids.tolist() == row["prompt_ids"] + row[key]
            assert conversation.answers.tolist() == [0] * len(row["prompt_ids"]) + [1] * len(row[key])


def test_a_text_beside_messages_repeats_their_prompt() -> None:
    """As in data sets whose column ``prompt`` is for people."""
    with_text, plain = ({**WITHOUT_PROMPT[0], **more} for more in ({"prompt": "1+1?"}, {}))
    for ours, theirs in zip(encode_pair(tokenizer(), with_text)[0], encode_pair(tokenizer(), plain)[0], strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.answers.tolist() == theirs.answers.tolist()


def line(number: int, **more: Any) -> str:
    return json.dumps({"prompt": f"{number}?", "chosen": "a" * (number + 1), "rejected": "b" * (7 - number), **more})


BAD = {
    GOOD: " has no 'chosen'; its keys: messages",
    '{"chosen": "a"}': " has no 'rejected'; its keys: chosen",
    '{"prompt": "?", "chosen": "a", "rejected": 5}': ": 'rejected' is a number, not a string",
    '{"prompt": 1, "chosen": "a", "rejected": "b"}': ": 'prompt' is a number, not a string",
    json.dumps({"chosen": CHOSEN, "rejected": "b"}): ": 'rejected' is not an array",
    json.dumps({"prompt": [], "chosen": CHOSEN, "rejected": REJECTED}): ": 'prompt' has no messages",
    json.dumps({"chosen": messages(QUESTION), "rejected": REJECTED}): " has no assistant turn",
    json.dumps({"prompt": messages(QUESTION), "chosen": CHOSEN, "rejected": []}): ": 'rejected' has no messages",
    json.dumps({"chosen": [*messages(QUESTION), *CHOSEN], "rejected": [*messages(QUESTION), *CHOSEN]}): (
        ": 'chosen' has no token to answer with"
    ),
    line(1, ref_chosen_logps=1.0): ": 'ref_chosen_logps' and 'ref_rejected_logps' are not both finite numbers",
    line(1, ref_chosen_logps=1, ref_rejected_logps=1e999): (
        ": 'ref_chosen_logps' and 'ref_rejected_logps' are not both finite numbers"
    ),
}


def load(options: Any, seq_length: int = 100) -> Conversations:
    _load.cache_clear()
    return load_conversations(options, "train", seq_length, pairs=True)


@pytest.mark.parametrize("bad", BAD)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, bad: str) -> None:
    options = data(tmp_path, [line(0), bad, line(1)])
    with pytest.raises(DataError) as refused:
        load(options)
    assert refused.value.seen == f"1 of 3 conversations cannot be used: {tmp_path}/chat.jsonl:2{BAD[bad]}"
    found = load(replace(options, bad_samples="skip"))
    assert found.places.tolist() == [[0, 1], [0, 3]]
    assert len(found.lengths) == 4


def test_a_pair_that_does_not_fit_and_a_line_without_a_reference(tmp_path: Path) -> None:
    options = data(tmp_path, [line(0), line(1)])
    positions = 2 * len("0?$") + 8 - 2
    assert len(load(options, positions).lengths) == 4
    with pytest.raises(DataError, match=rf"chat.jsonl:1 takes {positions} positions, and a sample has {positions - 1}"):
        load(options, positions - 1)
    logps = {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2}
    with pytest.raises(DataError, match=r"chat.jsonl:2 has no ref_chosen_logps and ref_rejected_logps, which other"):
        load(data(tmp_path, [line(0, **logps), line(1)]))
    assert load(data(tmp_path, [line(0, **logps)])).logps.tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("cached", [False, True])
def test_pairs_stay_together_in_a_sample(tmp_path: Path, cached: bool) -> None:
    """Every position of every sample of an epoch, in words."""
    numbers = range(7)
    lines = [line(n, ref_chosen_logps=-float(n), ref_rejected_logps=-n - 0.5) for n in numbers]
    options = data(tmp_path, lines, **({"data_cache_path": str(tmp_path / "cache")} if cached else {}))
    pairs = [load(options, 30) for _ in range(2)][-1]
    dataset = PackedDataset(pairs, 30, 1, 5, 50)
    seen = []
    for i in range(dataset.epoch_samples):
        sample = dataset[i]
        last = -1
        for document in range(int(sample.documents.max())):
            here = sample.documents == document
            assert (sample.extra["answer"][here & (sample.loss_mask > 0)] == document).all()
            text = parts([sample.tokens[here][0], *sample.labels[here]], [0, *sample.loss_mask[here].astype(int)])
            number = int(text[0][1][:1])
            expected = b"a" * (number + 1) if document % 2 == 0 else b"b" * (7 - number)
            assert text == [(0, f"{number}?".encode()), (1, expected + b"$")]
            assert sample.extra["pairs"][here].tolist() == [0] * (here.sum() - 1) + [1 - document % 2]
            assert sample.extra["reference_logps"][here].sum() == -number - 0.5 * (document % 2)
            assert document % 2 == 0 or number == last
            last = number
            seen += [number] * (document % 2)
        assert sample.documents.max() % 2 == 0  # padding follows a whole pair
        assert sample.extra["pairs"].sum() == sample.documents.max() // 2
    assert sorted(seen) == [*numbers]
    assert "7 pairs" in dataset.describe(30)
