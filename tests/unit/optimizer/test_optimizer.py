"""Finishing a step: norm, clipping, decay, main_params, skips."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.distributed.comm import Group
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import DenseSharding, Init
from megatron.optimizer.distributed_optimizer import GradNorm
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.main_params import flat_runs
from megatron.optimizer.rules import BLOCK_ELEMENTS, RULES, UpdateArgs
from tests.kit.solo import Solo, grad_buffer_of, one_rank_mesh, random_batch, tiny

CONFIG = tiny(num_query_groups=2)
RATES = Rates(1e-3, 0.1)
BATCHES = [random_batch(CONFIG, seed=seed) for seed in (1, 2)]


def state(solo: Solo) -> dict[str, Tensor]:
    """Copies of weights, main_params, moments and step counts."""
    out = {f"weight {n}": p for n, p in solo.params.items()}
    out |= {f"master {n}": m for n, m in solo.optimizer.main_params.items()}
    for group, rule in solo.optimizer.groups:
        out |= {f"{kind} {group.names[i]}": t for kind, ts in rule.state.items() for i, t in enumerate(ts)}
    out |= {f"average {n}": a for n, a in solo.average.items()}
    return {name: t.detach().clone() for name, t in out.items()}


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_norm_and_clipping_match_torch(dtype: torch.dtype, clip: float) -> None:
    solo = Solo.build(CONFIG, dtype, optimizer=OptimizerConfig(clip_grad=clip))
    solo.backward(BATCHES)
    reference = [nn.Parameter(torch.zeros_like(g)) for g in solo.buckets.grads.values()]
    for param, grad in zip(reference, solo.snapshot().values()):
        param.grad = grad
    norm = nn.utils.clip_grad_norm_(reference, clip if clip else float("inf"))
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    solo.optimizer.reduce_gradients()
    outcome = solo.optimizer.update(Rates(1e-3, 0.0), torch.ones(()))
    assert outcome.grad_norm.item() == pytest.approx(norm.item(), rel=tolerance)
    assert outcome.grad_norm.dtype == torch.float64
    assert outcome.skipped.item() == 0
    for param, (name, grad) in zip(reference, solo.buckets.grads.items()):
        assert param.grad is not None
        torch.testing.assert_close(grad, param.grad, rtol=10 * tolerance, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_norm_counts_owned_shards() -> None:
    """Copies count on their first holder only, vocabulary padding nowhere."""
    init, squares = Init(), []
    for rank in range(2):
        shard = DenseSharding(rank, 2)
        specs = {
            "norm": shard.replicate((6,), init, partial=False),
            "split": shard.split((8, 3), 0, init),
            "vocabulary": shard.vocabulary(5, 3, 4, init),  # 4 rows and 1, of 4 each
            "qkv": shard.qkv(1, 2, (2, 3), init),
        }
        buckets = grad_buffer_of(specs, torch.float32, ParallelConfig())
        for gradient in buckets.grads.values():
            gradient.fill_(3.0)
        squares.append(GradNorm(specs, buckets, one_rank_mesh()).compute().square().item())
    elements = 6 + 8 * 3 + 5 * 3 + (2 + 2) * 2 * 3
    assert sum(squares) == pytest.approx(9 * elements)
    assert squares[1] == pytest.approx(9 * (12 + 3 + 6)), "rank 1 owns half of the split, one row, one query head"


RULE_OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {},
    "adam, bf16 moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "adam, remainders": {"store_param_remainders": True},
    "sgd": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion"},
    "muon": {"optimizer": "muon"},
}


SKIPPING = RULE_OPTIONS | {"offload": {"optimizer_cpu_offload": True, "ema_decay": 0.9}}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", SKIPPING.values(), ids=SKIPPING)
def test_a_gradient_that_is_not_finite_skips_the_step(options: dict[str, Any], bad: float) -> None:
    """Not a bit of weights, main parameters, moments and averages changes; the next step goes on."""
    solo = Solo.build(CONFIG, torch.bfloat16, optimizer=OptimizerConfig(**options))
    solo.step(BATCHES)
    before = state(solo)
    solo.backward(BATCHES)
    for name in ("layers.1.mlp.linear_fc2.bias", "layers.1.mlp.linear_fc1.weight"):
        solo.buckets.grads[name].view(-1)[3] = bad
    solo.optimizer.reduce_gradients()
    outcome = solo.optimizer.update(RATES, torch.ones(()), hooks=solo.hooks)
    assert outcome.skipped.item() == 1
    assert not outcome.grad_norm.isfinite()
    after = state(solo)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert solo.optimizer.steps_applied() in (0, 1)  # 0 where no rule counts them
    _, outcome = solo.step(BATCHES)
    assert outcome.skipped.item() == 0
    assert all(t.isfinite().all() for t in state(solo).values())


@pytest.mark.parametrize("options", RULE_OPTIONS.values(), ids=RULE_OPTIONS)
def test_clipping_equals_an_update_with_clipped_gradients(options: dict[str, Any]) -> None:
    """Compare clipping inside the rule with a separate pass before it, gradients included."""
    dtype, scale = (torch.bfloat16 if "store_param_remainders" in options else torch.float32), 2.0**10
    model = replace(CONFIG, add_bias_linear=False)  # the gradient of a key bias is only rounding
    solo, plain = (
        Solo.build(model, dtype, optimizer=OptimizerConfig(clip_grad=clip, **options)) for clip in (0.1, 0.0)
    )
    for step in range(2):
        for one in (solo, plain):
            one.backward(BATCHES)
        norm = sum(grad.double().square().sum() for grad in plain.buckets.grads.values()) ** 0.5
        assert norm > 0.2
        for grad in plain.buckets.grads.values():
            grad.mul_(0.1 / (norm + 1e-6))
        for bucket in solo.buckets.buckets:
            bucket.shard.mul_(scale)
        solo.optimizer.update(RATES, torch.tensor(scale))
        plain.optimizer.update(RATES, torch.ones(()))
        for name, grad in plain.buckets.grads.items():
            torch.testing.assert_close(solo.buckets.grads[name], grad, rtol=1e-4, atol=1e-6 if step else 0.0)
    found, expected = state(solo), state(plain)
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).norm()
        assert difference <= (1e-2 if value.dtype == torch.bfloat16 else 1e-4) * value.double().norm(), name


@pytest.mark.parametrize("options", RULE_OPTIONS.values(), ids=RULE_OPTIONS)
def test_an_observed_update_is_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; every element is seen once, before and after, in blocks."""
    monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", 256)
    dtype = torch.bfloat16 if "store_param_remainders" in options else torch.float32
    solo, observed = (Solo.build(CONFIG, dtype, optimizer=OptimizerConfig(**options)) for _ in range(2))
    main = observed.optimizer.main_params
    for _ in range(2):
        seen = {
            when: {name: torch.full((value.numel(),), torch.nan) for name, value in main.items()} for when in range(2)
        }

        def observe(name: str, start: int, *values: Tensor, seen: Any = seen) -> None:
            for when, x in enumerate(values):
                part = seen[when][name][start : start + x.numel()]
                assert part.isnan().all()
                part.copy_(x.flatten())

        observed.optimizer.observe_update = observe
        before = {name: value.clone().flatten() for name, value in main.items()}
        solo.step(BATCHES)
        observed.step(BATCHES)
        for name, value in main.items():
            assert torch.equal(seen[0][name], before[name]), name
            assert torch.equal(seen[1][name], value.flatten()), name
    found = state(observed)
    assert [name for name, value in state(solo).items() if not torch.equal(found[name], value)] == []
    assert observed.optimizer.steps_applied() == solo.optimizer.steps_applied()


def test_flat_views_cover_every_element_once() -> None:
    """Neighbours are joined, also out of order; not across gaps or with noncontiguous tensors."""
    flat, other = torch.arange(100.0), torch.arange(100.0, 200.0)
    views = [flat[8:16].view(2, 4), other[:10], flat[:8], flat[20:30], flat[30:60].view(5, 6)[:, :3], flat[60:61]]
    merged = [view for _, view in flat_runs(views)]
    assert sorted(torch.cat([x.flatten() for x in merged]).tolist()) == sorted(
        torch.cat([x.flatten() for x in views]).tolist()
    )
    assert sorted(x.numel() for x in merged) == [1, 10, 10, 15, 16]
    for x in merged:
        x.zero_()
    assert not any(view.any() for view in views)
    assert flat[16:20].tolist() == [16, 17, 18, 19]


def test_a_spike_is_skipped_and_not_counted_as_nonfinite() -> None:
    """Weights, moments, counts, average and gradients stay; the next step goes on."""
    config = OptimizerConfig(skip_spikes=6.0, spike_window=8, ema_decay=0.5)
    solo, loss = Solo.build(CONFIG, optimizer=config), torch.tensor(1.0)
    for i in range(6):
        solo.backward(BATCHES)
        outcome = solo.optimizer.update(RATES, torch.ones(()), loss + 0.01 * (i % 2), hooks=solo.hooks)
        assert (outcome.skipped.item(), outcome.nonfinite.item()) == (0, 0)
    before, steps = state(solo), solo.optimizer.steps_applied()
    for value, nonfinite in ((loss * 9, 0.0), (loss * torch.nan, 1.0)):
        solo.backward(BATCHES)
        grads = solo.snapshot()
        if nonfinite:
            solo.buckets.buckets[0].shard[0] = torch.nan
        outcome = solo.optimizer.update(RATES, torch.ones(()), value, hooks=solo.hooks)
        assert (outcome.skipped.item(), outcome.nonfinite.item()) == (1, nonfinite)
        assert outcome.clip.isfinite()
        assert nonfinite or all(torch.equal(grad, grads[name]) for name, grad in solo.buckets.grads.items())
        after = state(solo)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert solo.optimizer.steps_applied() == steps == 6
    solo.backward(BATCHES)
    assert solo.optimizer.update(RATES, torch.ones(()), loss).skipped.item() == 0
    assert not torch.equal(state(solo)["master final_layernorm.weight"], before["master final_layernorm.weight"])


@pytest.mark.parametrize("rule", RULES)
def test_groups_move_like_parameters_of_torch_with_rates_of_their_own(rule: str) -> None:
    """Each group against an optimizer that has its parameters, its rate and its decay only."""
    factors = {"lr_factors": ("layers.0.*=0.5",), "weight_decay_factors": ("layers.*.bias=2", "*norm*=0.25")}
    config = OptimizerConfig(optimizer=rule, clip_grad=0.0, decoupled_lr=1.0, **factors)
    solo = Solo.build(CONFIG, optimizer=config)
    twins = {name: p.detach().clone() for name, p in solo.params.items()}
    rules = {name: RULES[rule]([twin], config) for name, twin in twins.items()}
    assert len(solo.optimizer.groups) > 4
    for _ in range(2):
        solo.backward(BATCHES)
        for name, grad in solo.snapshot().items():
            rate = 3e-3 if name == "embedding.word_embeddings.weight" else 1e-3
            rate *= 0.5 if name.startswith("layers.0.") else 1.0
            decay = 0.025 if "norm" in name else 0.2 if name.endswith("bias") else 0.1
            rules[name].update(UpdateArgs([grad], rate, decay, torch.zeros(())))
        solo.optimizer.update(Rates(1e-3, 0.1, decoupled_lr=3e-3), torch.ones(()))
    for name, param in solo.params.items():
        torch.testing.assert_close(param.detach(), twins[name], rtol=1e-13, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_main_params_keep_updates_below_bf16_precision() -> None:
    """Each update is far below a bf16 step; a hundred of them are not."""
    solo = Solo.build(CONFIG, torch.bfloat16)
    main_params = solo.optimizer.main_params
    assert {m.dtype for m in main_params.values()} == {torch.float32}
    start = {n: p.detach().clone() for n, p in solo.params.items()}
    for _ in range(100):
        solo.step(BATCHES, lr=1e-4, weight_decay=0.0)
        for name, param in solo.params.items():
            assert torch.equal(param, main_params[name].bfloat16()), name
    name = "final_layernorm.weight"
    assert (start[name] == 1).all()
    assert (main_params[name] - 1).abs().max() > 5e-3
    assert (solo.params[name] != 1).any(), "no weight moved: 1e-4 alone is lost, a hundred times 1e-4 is not"


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "muon", "lion"])
def test_weights_are_the_rounded_main_params(optimizer: str, observed: bool) -> None:
    """Rounded by Adam's kernel, apart from it, or, with Muon, some of them by each."""
    solo = Solo.build(CONFIG, torch.bfloat16, optimizer=OptimizerConfig(optimizer=optimizer))
    before = {name: param.detach().clone() for name, param in solo.params.items()}
    if observed:
        solo.optimizer.observe_update = lambda *_: None
    for _ in range(2):
        solo.step(BATCHES, lr=1e-2)
    for name, param in solo.params.items():
        assert torch.equal(param, solo.optimizer.main_params[name].bfloat16()), name
        assert not torch.equal(param, before[name]), name


def cut_over(monkeypatch: pytest.MonkeyPatch, shards: Group, copies: Group) -> None:
    """Let this rank be one of several that cut everything."""
    monkeypatch.setattr(Mesh, "optimizer_shard_group", lambda self, *axes: shards)
    monkeypatch.setattr(Mesh, "optimizer_replica_group", lambda self, *axes: copies)
    monkeypatch.setattr(Mesh, "weight_gather_group", lambda self, *axes: Group())


@pytest.mark.parametrize(("shards", "copies"), [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2)])
def test_every_element_counts_once_in_the_norm_however_it_is_cut(
    shards: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {
        "matrix": DenseSharding(0, 1).split((37, 9), 0, Init()),
        "padded": DenseSharding(0, 1).vocabulary(21, 5, 8, Init()),
        "vector": DenseSharding(0, 1).split((70,), 0, Init()),
        "tiny": DenseSharding(0, 1).split((3,), 0, Init()),
    }
    total = 0.0
    for rank in range(shards * copies):
        part, copy = divmod(rank, copies)
        cut_over(monkeypatch, Group(tuple(range(shards)), part), Group(tuple(range(copies)), copy))
        buckets = grad_buffer_of(specs, torch.float64, ParallelConfig(use_distributed_optimizer=True))
        for bucket in buckets.buckets:
            bucket.shard.fill_(1e9)  # what alignment leaves between parameters counts nowhere
        for name, grad in buckets.grads.items():
            places = torch.arange(math.prod(specs[name].local_shape), dtype=torch.float64)
            grad.view(-1).copy_(places[buckets.shards[name].start : buckets.shards[name].stop])
        total += GradNorm(specs, buckets, one_rank_mesh()).compute().square().item()
    elements = {"matrix": 37 * 9, "padded": 21 * 5, "vector": 70, "tiny": 3}
    assert total == pytest.approx(sum(i * i for n in elements.values() for i in range(n)), rel=1e-13)


def test_skip_spikes_needs_a_loss() -> None:
    solo = Solo.build(CONFIG, optimizer=OptimizerConfig(skip_spikes=6.0))
    with pytest.raises(ValueError, match="pass it to update"):
        solo.optimizer.update(RATES, torch.ones(()), hooks=solo.hooks)


def test_a_decoupled_rate_that_is_missing_is_a_mistake() -> None:
    solo = Solo.build(CONFIG, optimizer=OptimizerConfig(decoupled_lr=1e-3))
    with pytest.raises(ValueError, match="decoupled_lr is configured"):
        solo.step(BATCHES)
