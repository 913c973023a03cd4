"""Folders of small models with a tokenizer of bytes, as `transformers` saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.kit.checkpoints import BYTES
from tests.parity.test_hf import precision

POSITIONS = 24


LEARNT = ("He opened the old door", "one two three one two", "Two and two is four.", "The sky is blue.")
"""Texts that the models predict well."""


def save_transformers_model(kind: str, folder: Path) -> Any:
    """Save a model that has learnt some texts, and return it in fp64, for use within `precision`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "bos_token_id": 256, "eos_token_id": 256}
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            **sizes,
        )
    else:
        config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=POSITIONS, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor([*text.encode()]) for text in LEARNT], True, 256)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    for name, content in BYTES.items():
        (folder / name.removeprefix("tokenizer/")).write_bytes(content)
    with precision(torch.float64):
        wide = type(model)(config).double().eval()
    wide.load_state_dict(model.state_dict())
    return wide
