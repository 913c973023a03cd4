"""Moments in bf16: rounding that is right in the mean, and the same in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.param_layout import ParamShard
from megatron.distributed.sharding import DenseSharding, Init, ShardSpec
from megatron.kernels.adam import AdamKernel, AdamSettings, AdamState, adam
from megatron.kernels.dropout import random_bits
from megatron.optimizer import low_precision_state
from megatron.optimizer.build import build_rule
from megatron.optimizer.low_precision_state import stochastic_round
from megatron.optimizer.main_params import MainParams
from megatron.optimizer.param_groups import ParamGroup
from megatron.optimizer.rules import RULES, UpdateArgs, UpdateRule, iterate_blocks

BF16 = OptimizerConfig(adam_eps=1e-3, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
GO, SKIP = torch.zeros(()), torch.ones(())
INIT = Init()


def made(
    main_params: dict[str, Tensor],
    specs: dict[str, ShardSpec],
    config: OptimizerConfig,
    seed: int,
    kernel: AdamKernel = adam,
) -> UpdateRule:
    """The rule of all parameters, which this rank updates whole."""
    group = ParamGroup(tuple(specs), config.optimizer, decoupled=False, lr_factor=1.0, weight_decay_factor=1.0)
    shares = {name: ParamShard(0, prod(spec.local_shape)) for name, spec in specs.items()}
    return build_rule(
        group, MainParams(main_params, config.store_param_remainders), specs, shares, config, seed, kernel
    )


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 values on both sides of an fp32 value, by cutting off bits and by the next pattern."""
    low = torch.tensor(value).view(torch.int32).item() >> 16
    patterns = torch.tensor([low, low + (value != _float(low << 16))], dtype=torch.int64) << 16
    first, second = patterns.to(torch.int32).view(torch.float32).tolist()
    return first, second


def _float(pattern: int) -> float:
    return torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(torch.float32).item()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_rounding_is_to_a_neighbour_and_right_in_the_mean(value: float) -> None:
    """Over all 2^16 draws the mean is the value itself, exactly."""
    bits = torch.arange(1 << 16, dtype=torch.int32) + (5 << 16)  # what is above the lowest 16 does not count
    rounded = stochastic_round(torch.full(bits.shape, value), bits)
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.double().tolist()) <= set(neighbours(value))
    torch.testing.assert_close(rounded.double().mean().item(), value, rtol=1e-9, atol=1e-44)


ROWS, COLUMNS = torch.arange(1 << 8) + (1 << 40) - (1 << 7), torch.arange(1 << 8)


def test_bits_are_even_and_differ_from_step_to_step_and_from_place_to_place() -> None:
    """Each of 32 bits is set half of the time, and no two draws, of neighbours too, agree more often than that."""
    step = torch.tensor(5)
    draws = [random_bits(7, torch.tensor(at), ROWS, COLUMNS) for at in (5, 6, 7)]
    draws += [random_bits(8, step, ROWS, COLUMNS), random_bits(7, step, ROWS + 1, COLUMNS)]
    draws += [random_bits(7, step, ROWS, COLUMNS + 1), random_bits(7, step, ROWS + (1 << 32), COLUMNS)]
    deviation = 0.5 * (1 << 16) ** -0.5
    for i, draw in enumerate(draws):
        for shift in range(32):
            bit = draw >> shift & 1
            others = [(other >> shift & 1) == bit for other in draws[:i]]
            for share in (bit, *others):
                assert share.double().mean().item() == pytest.approx(0.5, abs=5 * deviation)


def specs_of(shard: DenseSharding) -> dict[str, ShardSpec]:
    """Every way in which a tensor is cut."""
    return {
        "rows": shard.split((8, 6), 0, INIT),
        "columns": shard.split((6, 8), 1, INIT),
        "gate_up": shard.split((16, 4), 1, INIT, view=(2, 8, 4)),
        "norm": shard.replicate((16,), INIT, partial=True),
        "words": shard.vocabulary(13, 4, 8, INIT),
        "qkv": shard.qkv(2, 4, (2, 8), INIT),
        "qkv_bias": shard.qkv(2, 4, (2,), INIT),
        "bias": shard.split((16,), 0, INIT),
    }


def part(spec: ShardSpec, whole: Tensor) -> Tensor:
    """Return a rank's part of a global tensor; padding is 0."""
    local = torch.zeros(spec.local_view, dtype=whole.dtype)
    for piece in spec.pieces:
        local[piece.local_box.slices] = whole.view(spec.view)[piece.global_box.slices]
    return local.view(spec.local_shape)


def whole_of(spec: ShardSpec, local: Tensor) -> Tensor:
    """The global tensor, of a rank that is alone."""
    (piece,) = spec.pieces
    return local.view(spec.local_view)[piece.local_box.slices].reshape(spec.shape)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(("adam", "lion")), st.booleans(), st.integers(0, 1), st.data())
def test_a_share_moves_as_the_whole_does(optimizer: str, remainders: bool, rank: int, data: st.DataObject) -> None:
    """A flat range of a rank's part, to the bit: weights, main_params and moments."""
    config = OptimizerConfig(
        optimizer=optimizer, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", store_param_remainders=remainders
    )
    specs = specs_of(DenseSharding(rank, 2))
    whole_shares = {name: ParamShard(0, prod(spec.local_shape)) for name, spec in specs.items()}
    starts = {name: data.draw(st.integers(0, share.stop - 1)) for name, share in whole_shares.items()}
    shares = {n: ParamShard(starts[n], data.draw(st.integers(starts[n] + 1, s.stop))) for n, s in whole_shares.items()}
    group = ParamGroup(tuple(specs), optimizer, decoupled=False, lr_factor=1.0, weight_decay_factor=1.0)
    results = []
    for held_shares in (whole_shares, shares):
        weights = {n: part(spec, normal(spec, len(n))).flatten().bfloat16() for n, spec in specs.items()}
        weights = {name: weights[name][s.start : s.stop].clone() for name, s in held_shares.items()}
        main_params = MainParams(weights, remainders)
        rule = build_rule(group, main_params, specs, held_shares, config, 5, plain_adam)
        for step in range(3):
            grads = {name: part(spec, normal(spec, 100 * step + 1)).flatten() for name, spec in specs.items()}
            rule.update(UpdateArgs([grads[name][s.start : s.stop] for name, s in held_shares.items()], 0.1, 0.05, GO))
        main_params.write_weights()
        found = {f"weight {name}": weight for name, weight in weights.items()} | dict(main_params)
        for kind, moments in rule.state.items():
            found |= {f"{kind} {name}": moment for name, moment in zip(specs, moments)}
        results.append(found)
    whole, cut = results
    for key, got in cut.items():
        share = shares[key.split()[-1]]
        assert torch.equal(got, whole[key][share.start : share.stop]), key


def plain_adam(
    state: AdamState,
    grads: Sequence[Tensor],
    numbers: AdamSettings,
    lr: float | Tensor,
    decay: float,
    skip: Tensor,
    grad_scale: Tensor | None,
) -> None:
    """Sums, products and roots only: torch's fused kernel rounds elements at the end of a tensor otherwise."""
    assert grad_scale is None
    torch._foreach_add_(state.step_counts, 1.0 - skip)
    everything = zip(state.params, grads, state.exp_avgs, state.exp_avg_sqs, state.step_counts)
    for p, g, m, v, count in everything if skip == 0 else ():
        m.mul_(numbers.beta1).add_(g * (1 - numbers.beta1))
        v.mul_(numbers.beta2).add_(g * g * (1 - numbers.beta2))
        root = (v / (1 - numbers.beta2 ** count.item())).sqrt() + numbers.eps
        p.mul_(1 - lr * decay).sub_(m / (1 - numbers.beta1 ** count.item()) / root * lr)


def trained(
    specs: dict[str, ShardSpec], config: OptimizerConfig, seed: int = 3
) -> tuple[UpdateRule, dict[str, Tensor]]:
    """A rule on a rank's parts after five steps, one of them skipped; and the parts."""
    main_params = {name: part(spec, normal(spec, len(name))) for name, spec in specs.items()}
    rule = made(main_params, specs, config, seed, plain_adam)
    for step in range(5):
        grads = [part(spec, normal(spec, 100 * step + 1)) for spec in specs.values()]
        rule.update(UpdateArgs(grads, 0.1, 0.05, SKIP if step == 2 else GO))
    return rule, main_params


def normal(spec: ShardSpec, seed: int) -> Tensor:
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("optimizer", ["adam", "lion"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_layout_rounds_equally(optimizer: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, copies on several ranks too; and wherever blocks are cut."""
    config = OptimizerConfig(optimizer=optimizer, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    alone = specs_of(DenseSharding(0, 1))
    whole, main_params = trained(alone, config)
    monkeypatch.setattr(low_precision_state, "iterate_blocks", lambda tensors: iterate_blocks(tensors, 16))
    for rank in range(tp):
        specs = specs_of(DenseSharding(rank, tp))
        cut, parts = trained(specs, config)
        for i, (name, spec) in enumerate(specs.items()):
            assert torch.equal(parts[name], part(spec, whole_of(alone[name], main_params[name]))), (name, rank)
            for kind in whole.state:
                expected = part(spec, whole_of(alone[name], whole.state[kind][i]))
                assert expected.dtype == torch.bfloat16
                assert torch.equal(cut.state[kind][i], expected), (kind, name, rank)


def test_a_slow_moment_grows_although_rounding_to_nearest_would_not() -> None:
    """The mean of squares moves by a thousandth of the gap in each step, a quarter of a bf16 step."""
    spec = DenseSharding(0, 1).split((100, 100), 0, INIT)
    rule = made({"w": torch.zeros(100, 100)}, {"w": spec}, BF16, 0)
    moment = rule.state["exp_avg_sq"][0].fill_(1.0)
    grads = [torch.full((100, 100), 2.0**0.5)]
    for _ in range(500):
        rule.update(UpdateArgs(grads, 0.0, 0.0, GO))
    exact = 2.0 - 0.999**500
    assert moment.double().mean().item() == pytest.approx(exact, rel=1.5e-3)
    assert torch.tensor(1.001).bfloat16() == 1.0, "to the nearest it would still be 1"


@pytest.mark.parametrize("kinds", [("exp_avg",), ("exp_avg_sq",), ("exp_avg", "exp_avg_sq")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_first_step_matches_wide_moments(kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    """An update is made with moments before they are rounded; those that are wide stay exactly so."""
    formats = {f"{kind}_dtype": "bf16" for kind in kinds}
    specs = specs_of(DenseSharding(0, 1))
    config = OptimizerConfig(**formats)
    ours, theirs = ([normal(s, 1).to(dtype) for s in specs.values()] for _ in range(2))
    rule = made(dict(zip(specs, ours)), specs, config, 0)
    wide = RULES["adam"](theirs, config)
    grads = [normal(s, 2).to(dtype) for s in specs.values()]
    for r in (rule, wide):
        r.update(UpdateArgs(grads, 0.1, 0.05, GO))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for kind, moments in rule.state.items():
        narrow_kind = kind in kinds
        assert {m.dtype for m in moments} == {torch.bfloat16 if narrow_kind else dtype}
        for a, b in zip(moments, wide.state[kind]):
            torch.testing.assert_close(a.to(dtype), b, rtol=2**-7 if narrow_kind else tolerance, atol=1e-12)
