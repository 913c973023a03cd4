"""Preference optimization equals TRL's `DPOTrainer` on a model of `transformers`, and distillation a dense formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.training import TrainingConfig
from megatron.distributed.micro_batch import MicroBatch
from tests.kit.solo import Solo
from tests.parity.families import copy_into, everything_in_double, from_llama
from tests.parity.test_hf import Case

transformers = pytest.importorskip("transformers")
dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer")

CASE = Case("llama", "Llama", {"initializer_range": 0.2})
LLAMA = CASE.config()
BETA = 0.3
PROMPTS, ANSWERS = (3, 5, 2, 4), ((4, 6), (5, 3), (2, 7), (6, 6))
"""Tokens of the prompts, and of the preferred and the other answer of each."""

Pair = tuple[list[int], list[int], list[int]]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with everything_in_double():
        yield


def llama(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return CASE.reference().double()


def pairs(seed: int = 0) -> list[Pair]:
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(0, LLAMA.vocab, (length,), generator=generator).tolist()

    return [(ids(prompt), ids(chosen), ids(rejected)) for prompt, (chosen, rejected) in zip(PROMPTS, ANSWERS)]


def packed(samples: Sequence[Sequence[Pair]], length: int, reference: nn.Module | None = None) -> MicroBatch:
    """A micro-batch of the pairs of each sample one after the other, padded; written down position by position."""
    rows: list[dict[str, list[Any]]] = []
    for sample in samples:
        row: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "labels", "mask", "positions", "documents", "answer", "pairs", "reference")
        }
        for number, (prompt, *answers) in enumerate(sample):
            for which, answer in enumerate(answers):
                ids = prompt + answer
                logps = [0.0] * (len(ids) - 1) if reference is None else token_logps(reference, ids).tolist()
                for i, logp in enumerate(logps):
                    answers_label = i >= len(prompt) - 1
                    row["tokens"].append(ids[i])
                    row["labels"].append(ids[i + 1])
                    row["mask"].append(float(answers_label))
                    row["positions"].append(i)
                    row["documents"].append(2 * number + which)
                    row["answer"].append(2 * number + which if answers_label else 0)
                    row["pairs"].append(float(which == 0 and i == len(ids) - 2))
                    row["reference"].append(logp)
        padding = length - len(row["tokens"])
        assert padding >= 0
        for name, column in row.items():
            column += [2 * len(sample)] * padding if name == "documents" else [0] * padding
        rows.append(row)
    columns = {name: torch.from_numpy(np.array([row[name] for row in rows])) for name in rows[0]}
    return MicroBatch(
        columns["tokens"],
        columns["labels"],
        columns["mask"].to(torch.float64),
        torch.arange(len(rows)),
        positions=columns["positions"],
        documents=columns["documents"],
        extra={"answer": columns["answer"], "pairs": columns["pairs"], "reference_logps": columns["reference"]},
    )


@torch.no_grad()
def token_logps(model: nn.Module, ids: list[int]) -> Tensor:
    logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


class Scorer(nn.Module):
    """Stand-in for the model that TRL calls, with given log-probabilities of labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.is_gradient_checkpointing = model, False

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        logps = self.model(input_ids, attention_mask=attention_mask).logits[:, :-1].log_softmax(-1)
        counted = labels[:, 1:] != -100
        picked = logps.gather(2, labels[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2) * counted
        return SimpleNamespace(log_probs=picked, entropy=picked, mean_logits=picked, is_top1=counted)


def trl_loss(model: nn.Module, reference: nn.Module, of: Sequence[Pair], kind: str) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of `DPOTrainer`, without its data, Accelerate and kernels."""
    scorer, metrics = Scorer(model).train(), {"train": defaultdict(list)}
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=scorer,
        ref_model=Scorer(reference),
        accelerator=accelerator,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        loss_types=[kind],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        beta=BETA,
        label_smoothing=0.0,
        ld_alpha=None,
        use_weighting=False,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    collate = dpo_trainer.DataCollatorForPreference(pad_token_id=0)
    inputs = collate([{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in of])
    loss = dpo_trainer.DPOTrainer._compute_loss(trainer, scorer, inputs, False)
    return loss, {name: values[-1] for name, values in metrics["train"].items()}


def ours(model: nn.Module, batches: Sequence[MicroBatch], training: TrainingConfig) -> Solo:
    solo = Solo.build(LLAMA, training=training)
    copy_into(solo.params, from_llama(dict(model.named_parameters()), LLAMA))
    objective = solo.chunk.objective
    weight = sum(objective.weight(batch) for batch in batches)
    solo.buckets.start_step(len(batches))
    for batch in batches:
        loss, _ = solo.chunk(None, batch)
        (loss / weight).backward()
    solo.buckets.finish()
    solo.chunk.sums.values = {name: value / weight for name, value in solo.chunk.sums.values.items()}
    return solo


def compare(solo: Solo, loss: Tensor, model: nn.Module) -> None:
    model.zero_grad()
    loss.backward()
    assert solo.chunk.sums.values["lm loss"].item() == pytest.approx(loss.item(), rel=1e-12)
    grads = from_llama({name: p.grad for name, p in model.named_parameters()}, LLAMA)
    assert solo.buckets.grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(solo.buckets.grads[name][: len(grad)], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid", "sigmoid_norm", "ipo"])
def test_losses_gradients_and_metrics_match_trl(kind: str) -> None:
    """Packed into micro-batches of two samples and one, of two pairs and of one."""
    model, reference = llama(0), llama(1)
    of = pairs()
    batches = [packed([of[:2], of[2:3]], 40, reference), packed([of[3:]], 40, reference)]
    solo = ours(model, batches, TrainingConfig(objective="dpo", dpo_loss_type=kind, dpo_beta=BETA))
    loss, metrics = trl_loss(model, reference, of, kind)
    compare(solo, loss, model)
    for name in solo.chunk.objective.metric_names:
        assert solo.chunk.sums.values[name].item() == pytest.approx(metrics[name], rel=1e-10), name


def ratios(model: nn.Module, reference: nn.Module, of: Sequence[Pair]) -> Tensor:
    """Log-ratios ``[pairs, 2]``, sequence by sequence."""
    found = []
    for prompt, *answers in of:
        for answer in answers:
            ids = torch.tensor([prompt + answer])
            logps = [m(ids).logits[0, :-1].log_softmax(-1) for m in (model, reference)]
            picked = [lp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum() for lp in logps]
            found.append(picked[0] - picked[1].detach())
    return torch.stack(found).view(-1, 2)


@pytest.mark.parametrize("kind", ["kto_pair", "sigmoid", "sigmoid_norm"])
def test_losses_and_gradients_match_the_formulas(kind: str) -> None:
    """KTO of pairs and the label smoothing of cDPO, which this version of TRL does not have."""
    model, reference = llama(0), llama(1)
    of = pairs()
    smoothing = 0.1 if kind != "kto_pair" else 0.0
    training = TrainingConfig(objective="dpo", dpo_loss_type=kind, dpo_beta=BETA, dpo_label_smoothing=smoothing)
    solo = ours(model, [packed([of[:1], of[1:3]], 36, reference), packed([of[3:]], 36, reference)], training)
    found = ratios(model, reference, of)
    chosen, rejected = found.unbind(1)
    if kind == "kto_pair":
        baseline_of_chosen, baseline_of_rejected = (x.detach().clamp(min=0) for x in (rejected, chosen))
        losses = 1 - torch.sigmoid(BETA * (chosen - baseline_of_chosen))
        losses = (losses + 1 - torch.sigmoid(BETA * (baseline_of_rejected - rejected))) / 2
        assert set(found.sign().flatten().tolist()) == {-1.0, 1.0}
    else:
        lengths = torch.tensor(ANSWERS) if kind == "sigmoid_norm" else torch.ones(4, 2)
        logits = BETA * (chosen / lengths[:, 0] - rejected / lengths[:, 1])
        losses = -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)
    compare(solo, losses.mean(), model)


@pytest.mark.parametrize("label_weight", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [5, LLAMA.vocab])
def test_distillation_is_the_divergence_from_the_normalised_teacher(
    k: int, temperature: float, label_weight: float
) -> None:
    """With the whole vocabulary it is the divergence of PyTorch."""
    model, teacher = llama(0), llama(1)
    batch = packed([pairs()[:2]], 40)
    inputs = {"position_ids": batch.positions, "attention_mask": _separate(batch)}
    with torch.no_grad():
        full = teacher(batch.tokens, **inputs).logits
    top, ids = full.topk(k)
    batch = MicroBatch(**{**vars(batch), "extra": {"teacher_ids": ids, "teacher_logits": top}})
    training = TrainingConfig(
        objective="distillation", distillation_temperature=temperature, distillation_label_weight=label_weight
    )
    solo = ours(model, [batch], training)
    logits = model(batch.tokens, **inputs).logits
    kept = torch.full_like(full, -torch.inf).scatter(2, ids, top)
    log_q = (logits / temperature).log_softmax(-1)
    log_p = (kept / temperature).log_softmax(-1)
    divergence = F.kl_div(log_q, log_p.exp().clamp(min=0), reduction="none").sum(-1) * temperature**2
    entropy = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(divergence)
    losses = (1 - label_weight) * divergence + label_weight * entropy
    compare(solo, (losses * batch.loss_mask).sum() / batch.loss_mask.sum(), model)
    expected = (divergence * batch.loss_mask).sum() / batch.loss_mask.sum()
    assert solo.chunk.sums.values["kl divergence"].item() == pytest.approx(expected.item(), rel=1e-12)


def _separate(batch: MicroBatch) -> Tensor:
    """Causal attention inside of documents, as an added mask."""
    documents, length = batch.documents, batch.tokens.shape[1]
    assert documents is not None
    seen = documents.unsqueeze(2) == documents.unsqueeze(1)
    seen &= torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9).unsqueeze(1)
