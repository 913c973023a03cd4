"""Cells that compare a model with the same model of `transformers`: files, numbers and text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.convert.weight_source import fill_weights
from megatron.distributed.micro_batch import MicroBatch
from megatron.inference.generate import SamplingParams, generate
from tests.cards.card import Card
from tests.cards.cell import CardError, Cell, Measures, largest
from tests.kit.pool import Pool
from tests.kit.solo import Solo, random_batch
from tests.parity.families import everything_in_double
from tests.parity.test_hf import ADAM_EPSILON, CLIP, torch_adamw
from tests.parity.test_hf_convert import IGNORED, weights_of
from tests.parity.test_hybrid_families import twin_of
from tests.unit.convert.folders import ignore, opened

PROMPTS, NEW = 3, 11
STEPS = 3


@dataclass
class Twins:
    """A model of `transformers` and ours, which read its files, both in fp64."""

    theirs: nn.Module
    ours: Solo
    card: Card

    @classmethod
    def build(cls, card: Card, folder: Path) -> Twins:
        """Write the files of a random model, and convert them."""
        model = card.build()
        saved = converted(card.save(folder / "theirs", model), folder / "ours")
        rules = OptimizerConfig(clip_grad=CLIP, adam_eps=ADAM_EPSILON)
        ours = Solo.build(saved.model, torch.float64, TrainingConfig(cross_entropy_chunk_size=7), rules)
        fill_weights(ours.chunk.specs, ours.chunk.params, saved)
        with everything_in_double():
            return cls(twin_of(model), ours, card)

    def batch(self, seed: int) -> MicroBatch:
        """Random tokens of the card's length."""
        return random_batch(
            self.ours.chunk.config, samples=1 if self.card.is_long else 3, length=self.card.length, seed=seed
        )

    def their_loss(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logits, and the loss after its backward."""
        labels = batch.labels.where(batch.loss_mask > 0, IGNORED)
        self.theirs.zero_grad()
        with everything_in_double():
            out = self.theirs(input_ids=batch.tokens, labels=labels, shift_labels=labels, use_cache=False)
            out.loss.backward()
        return out.logits.detach(), out.loss.detach()

    def their_grads(self) -> dict[str, Tensor]:
        """By our names; zero of what has none."""
        held = {**dict(self.theirs.named_parameters()), **dict(self.theirs.named_buffers())}
        grads = {name: getattr(held[name], "grad", None) for name in self.theirs.state_dict() if name in held}
        filled = {name: torch.zeros_like(held[name]) if grad is None else grad for name, grad in grads.items()}
        return self.card.translate(filled, self.ours.chunk.config)

    def their_weights(self) -> dict[str, Tensor]:
        """By our names."""
        state = {name: value.detach() for name, value in self.theirs.state_dict().items()}
        return self.card.translate(state, self.ours.chunk.config)


def converted(folder: Path, save: Path) -> SavedModel:
    """A folder of Hugging Face as a checkpoint."""
    convert_from_huggingface(opened(folder), save, ignore, checked=False)
    return SavedModel(open_checkpoint(save)[0])


def relative(a: float | Tensor, b: float | Tensor) -> float:
    """``|a - b| / |b|``, of tensors in the 2-norm."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    return ((a - b).norm() / b.norm()).item()


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], floor: float) -> float:
    """The largest relative difference of a tensor of ours; ``floor`` is the least norm, as a share of the largest one.

    A key bias has a gradient of rounding noise alone, which has no relative error.
    """
    missing = {name for name in theirs.keys() ^ ours.keys() if not name.endswith("expert_bias")}  # has no gradient
    if missing:
        raise CardError(f"tensors without a counterpart: {sorted(missing)[:3]}")
    scale = floor * max(value.norm() for value in theirs.values())
    pairs = [(ours[name][: len(value)], value) for name, value in theirs.items() if name in ours]
    return largest(((a - b).norm() / b.norm().clamp(min=scale)).item() for a, b in pairs)


def files(card: Card, folder: Path, pool: Pool) -> Measures:
    """Their files, in bf16, through a checkpoint of ours and back."""
    card.save(folder / "theirs", card.build(torch.bfloat16))
    saved = converted(folder / "theirs", folder / "ours")
    convert_to_huggingface(
        saved, folder / "back", ignore, shard_bytes=30_000, checked=False, model_type=card.model_type
    )
    before, after = (weights_of(folder / name) for name in ("theirs", "back"))
    same = [name for name in before.keys() & after.keys() if same_bits(before[name], after[name])]
    return {"tensors": len(before), "different": len(before.keys() | after.keys()) - len(same)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True for equal data types, shapes and bits."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def numbers(card: Card, folder: Path, pool: Pool) -> Measures:
    """Logits, loss and gradients of one batch, and weights after three steps of AdamW."""
    twins = Twins.build(card, folder)
    batch = twins.batch(seed=3)
    expected_BSV, expected = twins.their_loss(batch)
    ours = twins.ours
    ours.chunk.eval()
    logits_BSV = ours.chunk.logits(batch.tokens).transpose(0, 1)
    ours.chunk.train()
    loss = ours.backward([batch])
    found: Measures = {
        "logits": relative(logits_BSV, expected_BSV),
        "loss": relative(loss, expected),
        "gradients": largest_difference(ours.snapshot(), twins.their_grads(), 1e-3),
    }
    reference = torch_adamw(twins.theirs, ours.optimizer.config)
    for step in range(STEPS):
        batch, lr = twins.batch(seed=10 + step), 1e-3 * (1 + step)
        twins.their_loss(batch)
        nn.utils.clip_grad_norm_(twins.theirs.parameters(), CLIP)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        ours.step([batch], lr)
    held = {name: parameter.detach() for name, parameter in ours.params.items()}
    return found | {"3 steps": largest_difference(held, twins.their_weights(), 1e-3)}


def text(card: Card, folder: Path, pool: Pool) -> Measures:
    """Greedy text of a few prompts."""
    twins = Twins.build(card, folder)
    length = 300 if card.is_long else 5
    prompts = random_batch(twins.ours.chunk.config, samples=PROMPTS, length=length, seed=3).tokens.tolist()
    # without a cache: with one, transformers does not limit the time steps of Mamba-2
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "use_cache": False,
    }
    with everything_in_double():
        theirs = []
        for ids in prompts:
            tokens = torch.tensor([ids])  # no token is padding
            out = twins.theirs.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)  # type: ignore[operator]
            theirs.append(out[0, length:].tolist())
    twins.ours.chunk.eval()
    ours = generate(twins.ours.chunk, prompts, NEW, SamplingParams(0.0))
    pairs = [pair for rows in zip(ours, theirs, strict=True) for pair in zip(*rows, strict=True)]
    return {"tokens": len(pairs), "kinds": len({b for _, b in pairs}), "different": sum(a != b for a, b in pairs)}


MODEL = (
    *("megatron/model", "megatron/layers", "megatron/kernels", "megatron/convert/huggingface", "megatron/checkpoint"),
    *("megatron/config/model.py", "tests/parity/families.py", "tests/parity/hybrids.py", "tests/cards/card.py"),
    "tests/cards/twin.py",
)
CELLS = {
    "files": Cell(
        files,
        "a model that `transformers` saved in bf16, read here and written again: tensors that "
        "differ in a bit, a name or "
        "a data type",
        {"different": 0},
        ("megatron/convert/huggingface", "megatron/checkpoint", "tests/cards/card.py", "tests/cards/twin.py"),
    ),
    "numbers": Cell(
        numbers,
        "against `transformers` in fp64, with the same weights: relative difference of logits, of "
        "the loss, the largest "
        "of the gradient of a parameter, and of a weight after 3 steps of AdamW with clipping",
        {"logits": 1e-11, "loss": 1e-11, "gradients": 1e-10, "3 steps": 1e-9},
        (*MODEL, "megatron/optimizer", "megatron/distributed/grad_accumulator.py"),
    ),
    "text": Cell(
        text,
        f"greedy text of {PROMPTS} prompts, {NEW} tokens each, ours with a key/value cache, against `transformers` in "
        "fp64: tokens that differ",
        {"different": 0},
        (*MODEL, "megatron/inference"),
    ),
}
