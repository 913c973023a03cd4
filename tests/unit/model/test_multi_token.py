"""Multi-token prediction against a model in plain PyTorch, position by position, and what a token changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.data.loader import MaskBuilder
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from tests.kit.cases import MODEL, RATES, Case, batches_of, global_batch
from tests.kit.solo import Solo, random_batch, tiny

EOD = 7
DOCUMENTS = MaskBuilder(eod=EOD, reset_positions=True, reset_attention=True)
ONE = replace(
    MODEL,
    position_embedding_type="rope",
    normalization="RMSNorm",
    add_bias_linear=False,
    activation="gelu",
    num_query_groups=2,
    embedding_multiplier=3.0,
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.3,
)
CASES = {
    "tied": Case(ONE, masked=False),
    "untied, masked": Case(replace(ONE, untie_embeddings_and_output_weights=True)),
    "documents": Case(ONE, documents=DOCUMENTS),
    "three depths": Case(replace(ONE, mtp_num_layers=3), documents=DOCUMENTS),
    "one layer": Case(replace(ONE, mtp_num_layers=3, mtp_use_repeated_layer=True), documents=DOCUMENTS),
    "detached, tied": Case(replace(ONE, mtp_detach_heads=True)),
    "one detached layer, untied": Case(
        replace(ONE, mtp_use_repeated_layer=True, mtp_detach_heads=True, untie_embeddings_and_output_weights=True)
    ),
}


class Plain:
    """The model as formulas of one sample; ``weights`` by global name."""

    def __init__(self, weights: Mapping[str, Tensor], case: Case) -> None:
        self.w, self.model, self.eod = weights, case.model, case.documents.eod

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.model.norm_epsilon).sqrt() * self.w[f"{name}.weight"]

    def block(self, x_SH: Tensor, name: str, mask_SS: Tensor, positions_S: Tensor) -> Tensor:
        n, g, d = self.model.num_attention_heads, self.model.kv_groups, self.model.head_dim
        a = self.norm(x_SH, f"{name}.input_layernorm") @ self.w[f"{name}.self_attention.linear_qkv.weight"].t()
        q, k, v = a.view(-1, g, n // g + 2, d).split((n // g, 1, 1), 2)
        angles = positions_S[:, None] / 10_000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
        cos, sin = (f(angles)[:, None, None] for f in (torch.cos, torch.sin))

        def rotate(y: Tensor) -> Tensor:
            one, two = y.chunk(2, -1)
            return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

        scores = torch.einsum("igqd,jgd->gqij", rotate(q), rotate(k)[:, :, 0]) / d**0.5
        share = scores.masked_fill(~mask_SS, -torch.inf).softmax(-1)
        o = torch.einsum("gqij,jgd->igqd", share, v[:, :, 0]).flatten(1)
        x_SH = x_SH + o @ self.w[f"{name}.self_attention.linear_proj.weight"].t()
        m = self.norm(x_SH, f"{name}.pre_mlp_layernorm")
        m = F.gelu(m @ self.w[f"{name}.mlp.linear_fc1.weight"].t())
        return x_SH + m @ self.w[f"{name}.mlp.linear_fc2.weight"].t()

    def losses(self, ids: list[int], counts: list[bool]) -> list[list[Tensor]]:
        """Cross-entropies that count, of the next token and of each depth; ``counts`` of labels."""
        s, embed = len(ids) - 1, self.w["embedding.word_embeddings.weight"]
        output = self.w.get("output_layer.weight", embed)
        document = [ids[:i].count(self.eod) if self.eod is not None else 0 for i in range(s + 1)]
        first = [document.index(each) for each in document]
        mask_SS = torch.tensor([[document[j] == document[i] and j <= i for j in range(s)] for i in range(s)])
        run = partial(self.block, mask_SS=mask_SS, positions_S=torch.tensor([i - first[i] for i in range(s)]))
        embedded = [embed[each] * self.model.embedding_multiplier for each in ids]
        h_SH = torch.stack(embedded[:s])
        for layer in range(self.model.num_layers):
            h_SH = run(h_SH, f"layers.{layer}")
        h_SH = self.norm(h_SH, "final_layernorm")
        found = [[self.entropy(h_SH[i], output, ids[i + 1]) for i in range(s) if counts[i]]]
        if self.model.mtp_detach_heads:
            h_SH, embed, output, *embedded = (x.detach() for x in (h_SH, embed, output, *embedded))
        for k in range(1, self.model.prediction_depths + 1):
            name = f"mtp.layers.{0 if self.model.mtp_use_repeated_layer else k - 1}"
            zero = embed[0] * self.model.embedding_multiplier
            inside = [i + k <= s and document[i + k] == document[i] for i in range(s)]
            e_SH = torch.stack([embedded[i + k] if inside[i] else zero for i in range(s)])
            both = torch.cat((self.norm(e_SH, f"{name}.enorm"), self.norm(h_SH, f"{name}.hnorm")), -1)
            h_SH = run(both @ self.w[f"{name}.eh_proj.weight"].t(), f"{name}.mtp_model_layer")
            h_SH = self.norm(h_SH, f"{name}.final_layernorm")
            there = [i for i in range(s - k) if counts[i + k] and document[i + k + 1] == document[i]]
            found.append([self.entropy(h_SH[i], output, ids[i + k + 1]) for i in there])
        return found

    def entropy(self, h_H: Tensor, output: Tensor, label: int) -> Tensor:
        logits = output[: self.model.vocab] @ h_H
        return torch.logsumexp(logits, 0) - logits[label]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_formulas(name: str) -> None:
    case = replace(CASES[name], optimizer=OptimizerConfig(clip_grad=0.0))
    batch, trainer = global_batch(case, 0), build_trainer(case.config(), 0, 1)
    weights = {n: p.detach().clone().requires_grad_() for n, p in trainer.params.items()}
    plain, sums = Plain(weights, case), list[list[Tensor]]()
    for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask):
        of_sample = plain.losses([*tokens.tolist(), int(labels[-1])], mask.bool().tolist())
        sums = [a + b for a, b in zip(sums, of_sample)] if sums else of_sample
    main, *depths = (torch.stack(each).mean() for each in sums)
    (main + case.model.mtp_loss_scaling_factor * torch.stack(depths).mean()).backward()  # type: ignore[no-untyped-call]
    metrics = train_step(trainer, trainer.complete(batches_of(trainer, case, 0)), RATES)
    assert metrics.loss.item() == pytest.approx(main.item(), rel=1e-12)
    logged = {f"mtp loss {k}": each.item() for k, each in enumerate(depths, 1)}
    assert {key: x.item() for key, x in metrics.extra.items()} == pytest.approx(logged, rel=1e-12)
    for key, weight in weights.items():
        assert weight.grad is not None
        error = (trainer.optimizer.grads[key].view_as(weight) - weight.grad).norm() / weight.grad.norm()
        assert error < 1e-11, key


@pytest.mark.parametrize("untied", [False, True])
def test_a_model_trains_beside_detached_heads_as_without(untied: bool) -> None:
    """To the bit: its norm leaves out that of the heads, which are clipped apart."""
    clip, model = 0.01, replace(ONE, mtp_detach_heads=True, untie_embeddings_and_output_weights=untied)
    models = model, replace(model, mtp_num_layers=None)
    cases = [Case(each, optimizer=OptimizerConfig(clip_grad=clip)) for each in models]
    detached, alone = (build_trainer(case.config(), 0, 1) for case in cases)
    for step in range(3):
        norms = [
            train_step(trainer, trainer.complete(batches_of(trainer, case, step)), RATES).grad_norm.item()
            for trainer, case in zip((detached, alone), cases)
        ]
        assert norms[0] == norms[1] > clip
    assert all(torch.equal(detached.params[name], weight) for name, weight in alone.params.items())
    of_heads = [grad.flatten() for name, grad in detached.optimizer.grads.items() if name.startswith("mtp.")]
    assert torch.linalg.vector_norm(torch.cat(of_heads)).item() == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_depths_of_a_shared_layer_drop_different_elements(dropout: float) -> None:
    config = tiny(position_embedding_type="rope", mtp_num_layers=2, mtp_use_repeated_layer=True, hidden_dropout=dropout)
    chunk, inputs = Solo.build(config).chunk, list[Any]()
    assert chunk.heads is not None
    first, second = chunk.heads.parts[1:]
    first.register_forward_pre_hook(lambda _, given: inputs.append(given))
    chunk(None, random_batch(config))
    outputs = [depth(*inputs[0])[0] for depth in (first, first, second)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2]) == (dropout == 0.0)


def test_the_losses_of_a_shared_router_are_a_mean_over_the_depths() -> None:
    """Its gradient is the sum of those of two layers with the same weights and half of the coefficients."""
    apart = tiny(
        num_layers=1,
        num_experts=4,
        position_embedding_type="rope",
        add_bias_linear=False,
        mtp_num_layers=2,
        moe_router_load_balancing_type=("seq_aux_loss",),
        moe_aux_loss_coeff=(0.1,),
        moe_z_loss_coeff=0.2,
    )
    shared = replace(apart, mtp_use_repeated_layer=True, moe_aux_loss_coeff=(0.2,), moe_z_loss_coeff=0.4)
    one, two = Solo.build(shared), Solo.build(apart)
    for name, weight in two.chunk.params.items():
        weight.data.copy_(one.chunk.params[name.replace("mtp.layers.1.", "mtp.layers.0.")])
    for solo in (one, two):
        solo.backward([random_batch(shared)])
    found, parts = one.buckets.grads, two.buckets.grads
    for name in (name for name in found if name.startswith("mtp.")):
        expected = parts[name] + parts[name.replace("mtp.layers.0.", "mtp.layers.1.")]
        assert (found[name] - expected).norm() < 1e-12 * expected.norm(), name


def test_evaluation_and_generation_run_without_the_heads() -> None:
    """So they need no later tokens."""
    config = tiny(position_embedding_type="rope", mtp_num_layers=2)
    without = replace(config, mtp_num_layers=None)
    with_heads, plain = (Solo.build(each).chunk.eval() for each in (config, without))
    batch = random_batch(without)
    with torch.no_grad():
        assert torch.equal(with_heads(None, batch)[0], plain(None, batch)[0])
    assert with_heads.sums.pop().keys() == {"lm loss"}
    assert torch.equal(with_heads.logits(batch.tokens), plain.logits(batch.tokens))
