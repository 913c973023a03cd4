"""Bugs of fine-tuning data: which tokens of a conversation are read, and which are trained."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import Tokenizer, processors

from megatron.data.chat import ChatTokenizer, Conversation
from megatron.data.dataset import Sample
from megatron.data.packed_dataset import PackedDataset
from megatron.data.tokenizers.huggingface import ByteTokenizer
from tests.known_bugs.alone import alone
from tests.known_bugs.bug import KnownBug

SAMPLES, LENGTH, EOD = 4, 64, ByteTokenizer.eod
IGNORED = -100


def trained(rank: int, world_size: int) -> float:
    """Share of packed conversations whose tokens, or those of them that are trained, are not transformers'."""
    from tests.parity.test_sft import data_of, their_batches  # which import transformers

    with tempfile.TemporaryDirectory() as folder:
        batch = data_of(Path(folder)).micro_batch("train", range(SAMPLES), 0)
    found: Counter[str] = Counter()
    if batch.documents is None:
        return 1.0
    labels = batch.labels.where(batch.loss_mask > 0, IGNORED)
    for tokens, targets, documents in zip(batch.tokens, labels, batch.documents):
        for document in documents.unique():
            own = documents == document
            if (targets[own] != IGNORED).any():
                found[str((tokens[own].tolist(), targets[own].tolist()))] += 1
    expected = Counter(str((ids[0, :-1].tolist(), answers[0, 1:].tolist())) for ids, answers in their_batches())
    return ((found - expected).total() + (expected - found).total()) / expected.total()


def _answers(change: Callable[[Conversation], Conversation]) -> AbstractContextManager[Any]:
    """Change what is trained of a conversation."""
    original = ChatTokenizer.conversation
    return patch.object(
        ChatTokenizer, "conversation", lambda self, *given, **named: change(original(self, *given, **named))
    )


def prompts_trained() -> AbstractContextManager[Any]:
    """The loss is that of all tokens."""
    return _answers(lambda found: found._replace(answers=np.ones_like(found.answers)))


def first_token_lost() -> AbstractContextManager[Any]:
    """The first token of each answer is not trained."""
    return _answers(lambda found: found._replace(answers=found.answers * np.append(0, found.answers[:-1])))


def _samples(change: Callable[[Sample], Sample]) -> AbstractContextManager[Any]:
    """Change the samples into which conversations are packed."""
    original = PackedDataset.__getitem__
    return patch.object(PackedDataset, "__getitem__", lambda self, i: change(original(self, i)))


def padding_trained() -> AbstractContextManager[Any]:
    """The padding at the end of a sample counts in the loss."""

    def change(sample: Sample) -> Sample:
        padding = sample.documents == sample.documents[-1]
        return sample._replace(loss_mask=np.where(padding, np.float32(1.0), sample.loss_mask))

    return _samples(change)


def documents_by_their_ends() -> AbstractContextManager[Any]:
    """Conversations end where the inputs have an end, which only the labels have if an answer is the last message."""

    def change(sample: Sample) -> Sample:
        return sample._replace(documents=np.cumsum(np.append(0, sample.tokens[:-1] == EOD)))

    return _samples(change)


def begun(rank: int, world_size: int) -> float:
    """Share of ids of a conversation that are not transformers', if template and tokenizer both begin with a token."""
    from tests.unit.data.test_chat import MARKED, messages

    files = ByteTokenizer().hugging_face_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    config = json.loads(files["tokenizer_config.json"]) | {"bos_token": "<s>"}
    files = files | {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": b"{{ bos_token }}" + MARKED.encode(),
    }
    chat, turns = ChatTokenizer(files), messages(("user", "Hi"), ("assistant", "Hello!"))
    expected = chat._tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    found = chat.conversation(turns).ids.tolist()
    return abs(len(found) - len(expected)) + sum(a != b for a, b in zip(found, expected)) / len(expected)


def first_token_twice() -> AbstractContextManager[Any]:
    """The rendered text is encoded like any text, with a first token before that of the template."""
    original = ChatTokenizer._encode
    return patch.object(ChatTokenizer, "_encode", lambda self, text, **options: original(self, text))


TOKENS = "tokens and trained labels of packed conversations, against transformers' assistant masks of each alone"

BUGS = {
    "prompts-trained": KnownBug(
        reports=("karpathy/nanochat#582", "nvidia-cosmos/cosmos-rl#132"),
        kind="Fine-tuning",
        bug="the mask of answers was dropped, and prompts were trained too",
        check=TOKENS,
        detector=alone(trained),
        plant=prompts_trained,
    ),
    "first-token-of-answers-lost": KnownBug(
        reports=("OpenRLHF/OpenRLHF#973", "jingyaogong/minimind#621"),
        kind="Fine-tuning",
        bug="the mask was off by one, so the first token of each answer was not trained",
        check=TOKENS,
        detector=alone(trained),
        plant=first_token_lost,
    ),
    "padding-trained": KnownBug(
        reports=("axolotl-ai-cloud/axolotl#2227", "huggingface/trl#1625"),
        kind="Fine-tuning",
        bug="labels of padding were not left out of the loss",
        check=TOKENS,
        detector=alone(trained),
        plant=padding_trained,
    ),
    "conversations-not-ended": KnownBug(
        reports=("pytorch/torchtitan#3130",),
        kind="Fine-tuning",
        bug="packed conversations were told apart by an end token that only the labels had, so they saw each other",
        check=TOKENS,
        detector=alone(trained),
        plant=documents_by_their_ends,
    ),
    "begins-twice": KnownBug(
        reports=("unslothai/unsloth#10312", "NVIDIA-NeMo/RL#855"),
        kind="Fine-tuning",
        bug="the first token of a text was added by the chat template and again by the tokenizer",
        check="the ids of a conversation against transformers' apply_chat_template with both",
        detector=alone(begun),
        plant=first_token_twice,
    ),
}
