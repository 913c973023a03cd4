"""Bugs of fine-tuning data: which tokens of a conversation are read, and which are trained."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import Tokenizer, processors

from megatron.config.data import DataConfig
from megatron.config.training import TrainingConfig
from megatron.data.chat import ChatTokenizer, Conversation
from megatron.data.dataset import Sample
from megatron.data.loader import MaskBuilder, build_data
from megatron.data.packed_dataset import Epoch, PackedDataset
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerRecord
from tests.known_bugs.alone import alone
from tests.known_bugs.bug import KnownBug
from tests.unit.data import made_tokenizers, pairs

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


def ended(rank: int, world_size: int) -> float:
    """Share of ends of documents that are not trained, of a tokenizer that pads with the same token."""
    with tempfile.TemporaryDirectory() as temporary:
        prefix = pairs.write(Path(temporary) / "text", [[5, 6, 7, 0], [8, 9, 0]] * 20, np.int32)
        record = replace(TokenizerRecord.of(ByteTokenizer()), eod=0, pad=0)
        options = DataConfig(data_path=(made_tokenizers.record(prefix, record),), split="1")
        training = TrainingConfig(seq_length=16, train_samples=4, micro_batch_size=4, global_batch_size=4)
        batch = build_data(options, training, 300, 1).micro_batch("train", range(4), 0)
    ends = batch.labels == 0
    return 1.0 - float(batch.loss_mask[ends].mean())


def shared_padding_masked() -> AbstractContextManager[Any]:
    """Every label that is the padding id is left out, although the id ends documents too."""
    original = MaskBuilder.build
    return patch.object(MaskBuilder, "build", lambda self, *columns: original(replace(self, pad=self.eod), *columns))


def shuffled(rank: int, world_size: int) -> float:
    """1 if two epochs have the same order, plus the share of conversations that an epoch does not have once."""
    from tests.parity.test_sft import data_of

    turns = [[("user", f"question {number}"), ("assistant", "a" * (number % 30 + 1))] for number in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        dataset: Any = data_of(Path(folder), turns).datasets["train"]
    size = dataset.epoch_samples
    epochs = [[n for i in range(first, first + size) for n in read(dataset, i)] for first in (0, size)]
    missing = sum(sorted(epoch) != list(range(len(turns))) for epoch in epochs)
    return float(epochs[0] == epochs[1]) + missing


def read(dataset: PackedDataset, i: int) -> list[int]:
    """The conversations of a sample."""
    return dataset.members(i).tolist()


def every_epoch_alike() -> AbstractContextManager[Any]:
    """The order of an epoch does not depend on its number."""
    original = PackedDataset._shuffled

    def order(self: PackedDataset, number: int) -> Epoch:
        return original(self, 0)

    return patch.object(PackedDataset, "_shuffled", order)


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
    "ends-not-trained": KnownBug(
        reports=("mlabonne/llm-course#33", "unslothai/unsloth#416"),
        kind="Loss",
        bug="padding was the token that ends documents, so ends were masked and models never stopped",
        check="the loss mask of every end of a document, for a tokenizer that pads with the same id",
        detector=alone(ended),
        plant=shared_padding_masked,
    ),
    "epochs-alike": KnownBug(
        reports=("pytorch/pytorch#31771", "lucidrains/DALLE-pytorch#230"),
        kind="Data order",
        bug="every epoch had the same shuffled order",
        check="two epochs: each has every conversation once, and their orders differ",
        detector=alone(shuffled),
        plant=every_epoch_alike,
    ),
}
