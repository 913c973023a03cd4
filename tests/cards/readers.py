"""Cells in which programs of others read an export: `transformers`, llama.cpp and vLLM."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.checkpoint.format import Manifest
from megatron.convert.huggingface.convert import convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from tests.cards.card import Card, set_model_type
from tests.cards.cell import Cell, Measures
from tests.cards.twin import MODEL, Twins, relative
from tests.kit.checkpoints import save_model
from tests.kit.pool import Pool
from tests.parity.families import everything_in_double
from tests.parity.test_hybrid_families import twin_of
from tests.unit.convert.folders import ignore

READ_AS = {"kimi_k2": "deepseek_v3"}
"""Types of remote code -> the type by which `transformers` reads them."""


def trained_export(card: Card, folder: Path) -> tuple[Twins, Path]:
    """A model that was trained here for three steps, rounded to fp32, and its export."""
    twins = Twins.build(card, folder)
    for step in range(3):
        twins.ours.step([twins.batch(seed=step)], lr=1e-2)
    with torch.no_grad():
        for weight in twins.ours.params.values():
            weight.copy_(weight.float())
    saved = SavedModel(Manifest.open(save_model(twins.ours.chunk, folder / "run", files={})))
    out = folder / "export"
    convert_to_huggingface(saved, out, ignore, shard_bytes=10**9, checked=False, model_type=card.model_type)
    return twins, out


def logits_of(twins: Twins, tokens_BS: Tensor) -> Tensor:
    """Ours, ``[B, S, V]``."""
    twins.ours.chunk.eval()
    return twins.ours.chunk.logits(tokens_BS).transpose(0, 1).detach()


def export(card: Card, folder: Path, pool: Pool) -> Measures:
    """Load the export with `transformers` as a person does, and compare logits in fp64."""
    import transformers

    twins, out = trained_export(card, folder)
    set_model_type(out, READ_AS.get(card.model_type, card.model_type))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    unread = sum(map(len, info.values()))
    theirs: nn.Module = model.eval()
    tokens_BS = twins.batch(seed=3).tokens
    with everything_in_double(), torch.no_grad():
        logits_BSV = twin_of(theirs)(input_ids=tokens_BS, use_cache=False).logits
    difference = relative(logits_of(twins, tokens_BS), logits_BSV)
    return {"tensors": len(theirs.state_dict()), "unread": unread, "logits": difference}


CELLS = {
    "export": Cell(
        export,
        "a model trained here for 3 steps, exported, loaded by `AutoModelForCausalLM`: tensors missing, unexpected or "
        "of other shapes; relative difference of logits in fp64",
        {"unread": 0, "logits": 1e-11},
        (*MODEL, "megatron/optimizer", "tests/cards/readers.py"),
    ),
}
