"""Muon: against torch's, against singular values, and against whole matrices where ranks have parts of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.distributed.comm import Group
from megatron.distributed.sharding import DenseSharding, Init, ShardSpec
from megatron.optimizer.muon import (
    NEWTON_SCHULZ_COEFFICIENTS,
    MatrixShard,
    Muon,
    matrix_shards,
    orthogonalize,
    update_scale,
)
from megatron.optimizer.param_groups import rule_of
from megatron.optimizer.rules import UpdateArgs
from tests.kit.solo import Solo, one_rank_mesh, random_batch, tiny

INIT = Init()
GO = torch.zeros(())
H, D = 24, 3
"""Width of the hidden state, and of a head."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def single(rows: int, columns: int, config: OptimizerConfig, dtype: torch.dtype) -> Muon:
    specs = {"layers.0.w": DenseSharding(0, 1).split((rows, columns), 0, INIT)}
    return Muon([draw(rows, columns, dtype=dtype)], ["layers.0.w"], specs, one_rank_mesh(), config)


def by_singular_values(x: Tensor, steps: int = 5) -> Tensor:
    """Iterate each singular value by itself: ``s <- a s + b s^3 + c s^5``, the largest sum first."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@pytest.mark.parametrize("shape", [(8, 8), (24, 5), (5, 24), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iteration_is_a_polynomial_of_singular_values(shape: tuple[int, int], steps: int) -> None:
    x = draw(3, *shape)
    out = orthogonalize(x, MatrixShard((), shape, 3, None), Group(), steps)
    for matrix, got in zip(x, out):
        torch.testing.assert_close(got, by_singular_values(matrix, steps), rtol=1e-10, atol=1e-12)
    if steps == 5:
        values = torch.linalg.svdvals(out)
        assert values.min() > 0.4
        assert values.max() < 1.4


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96)], ids=str)
def test_bf16_is_accurate_enough_for_the_iteration(shape: tuple[int, int]) -> None:
    """Singular values end near one, in about the same directions."""
    x = draw(2, *shape).float()
    exact = orthogonalize(x.double(), MatrixShard((), shape, 2, None), Group(), 5)
    out = orthogonalize(x, MatrixShard((), shape, 2, None), Group(), 5, torch.bfloat16)
    assert out.dtype == torch.float32
    assert not torch.equal(out, orthogonalize(x, MatrixShard((), shape, 2, None), Group(), 5))
    assert (out - exact).norm() < 0.05 * exact.norm()
    assert torch.linalg.svdvals(out).max() < 1.4


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64)], ids=str)
@pytest.mark.parametrize(("mode", "adjust"), [("shape_scaling", "original"), ("spectral", "match_rms_adamw")])
def test_moves_like_torchs(shape: tuple[int, int], nesterov: bool, mode: str, adjust: str) -> None:
    """Up to bf16, in which torch iterates; its other scale has a factor of 0.2 besides."""
    extra = 0.2 if adjust == "match_rms_adamw" else 1.0
    config = OptimizerConfig(
        muon_momentum=0.95, muon_nesterov=nesterov, muon_scale_mode=mode, muon_extra_scale_factor=extra
    )
    ours = single(*shape, config, torch.float32)
    theirs = torch.nn.Parameter(ours.params[0].clone())
    reference = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust
    )
    before = ours.params[0].clone()
    for step in range(3):
        grad = draw(*shape, seed=step + 1, dtype=torch.float32)
        theirs.grad = grad.clone()
        reference.step()
        ours.update(UpdateArgs([grad], 0.02, 0.1, GO))
        assert torch.equal(ours.state["exp_avg"][0], reference.state[theirs]["momentum_buffer"])
    moved = (theirs.detach() - before).norm()
    assert (ours.params[0] - theirs.detach()).norm() < 0.02 * moved


@pytest.mark.parametrize(("m", "n"), [(4, 9), (9, 4), (5, 5)])
def test_scales(m: int, n: int) -> None:
    """Spectral: a root mean square of the update that does not depend on the shape; the others as defined."""
    assert update_scale((m, n), "spectral") == pytest.approx(sqrt(max(m, n)))
    assert update_scale((m, n), "unit_rms_norm") == pytest.approx(sqrt(m / n))
    assert update_scale((m, n), "shape_scaling") == pytest.approx(sqrt(max(1, m / n)))
    orthogonal = torch.linalg.qr(draw(max(m, n), min(m, n)))[0]
    rms = orthogonal.square().mean().sqrt().item()
    assert rms * update_scale((m, n), "spectral") == pytest.approx(1)


def fused(groups: int, queries: int) -> Callable[[DenseSharding], ShardSpec]:
    return lambda shard: shard.qkv(groups, queries, (D, H), INIT)


def qkv_rows(groups: int, queries: int, *which: range) -> list[int]:
    """Rows of the stored tensor that belong to one matrix, group by group; which of a group's heads it has."""
    width = queries + 2
    return [(g * width + i) * D + d for g in range(groups) for heads in which for i in heads for d in range(D)]


def gated(shard: DenseSharding) -> ShardSpec:
    return replace(shard.split((16, H), 1, INIT, (2, 8, H)), matrices=1)


def plain(dim: int) -> Callable[[DenseSharding], ShardSpec]:
    return lambda shard: shard.split((16, H), dim, INIT)


def logical(groups: int, queries: int, split: bool) -> list[list[int]]:
    q, k, v = range(queries), range(queries, queries + 1), range(queries + 1, queries + 2)
    wanted = ((q,), (k,), (v,)) if split else ((q, k, v),)
    return [qkv_rows(groups, queries, *which) for which in wanted]


LOGICAL: dict[str, tuple[Callable[[DenseSharding], ShardSpec], bool, list[list[int]]]] = {
    "columns": (plain(0), True, [list(range(16))]),
    "rows": (plain(1), True, [list(range(16))]),
    "gate and up": (gated, True, [list(range(8)), list(range(8, 16))]),
    **{
        f"{groups} groups of {queries}, {'split' if split else 'fused'}": (
            fused(groups, queries),
            split,
            logical(groups, queries, split),
        )
        for groups, queries in ((4, 1), (4, 2), (2, 2), (1, 4))
        for split in (True, False)
    },
}
"""A factory of specs, whether queries, keys and values are apart, and the rows of each matrix in the stored tensor."""


def held(spec: ShardSpec, stored: Tensor) -> Tensor:
    """A rank's tensor, piece by piece out of the whole one."""
    local = torch.zeros(spec.local_view, dtype=stored.dtype)
    for piece in spec.pieces:
        local[piece.local_box.slices] = stored.view(spec.view)[piece.global_box.slices]
    return local.view(spec.local_shape)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", LOGICAL)
def test_parts_of_all_ranks_are_the_matrices(name: str, tp: int) -> None:
    """The Gram matrix summed over ranks equals the whole matrix's, with each row counted once."""
    factory, split, matrices = LOGICAL[name]
    specs = [factory(DenseSharding(rank, tp)) for rank in range(tp)]
    stored = draw(*specs[0].shape)
    cuts = [[(part, i) for part in matrix_shards(spec, split) for i in range(part.count)] for spec in specs]
    assert {len(parts) for parts in cuts} == {len(matrices)}
    for number, rows in enumerate(matrices):
        matrix = stored[rows]
        gram, over_rows = torch.zeros(()), False
        for spec, parts in zip(specs, cuts):
            part, i = parts[number]
            assert part.shape == matrix.shape
            x = part.view_in(held(spec, stored), spec)
            over_rows = part.sharded_dim == 0
            here = part.once(x).mT @ x if over_rows else x @ x.mT
            gram = gram + here[i] / (tp if part.sharded_dim is None else 1)
        expected = matrix.mT @ matrix if over_rows else matrix @ matrix.mT
        torch.testing.assert_close(gram, expected, rtol=1e-12, atol=1e-12)


def matrices_of(name: str, weight: Tensor, queries: int, experts: int) -> list[Tensor]:
    """The logical matrices of a whole stored weight, views of it, by the words of docs/formats.md."""
    h = weight.shape[-1]
    if "linear_qkv" in name:
        view = weight.view(-1, queries + 2, 8, h)
        return [view[:, :queries], view[:, queries], view[:, queries + 1]]
    if "experts.linear_fc1" in name and "shared" not in name:
        return list(weight.view(experts * 2, -1, h))
    if "experts.linear_fc2" in name and "shared" not in name:
        return list(weight.view(experts, -1, h))
    if "linear_fc1" in name:
        return list(weight.view(2, -1, h))
    return [weight]


MODELS = {
    "dense": tiny(num_query_groups=2, activation="swiglu", add_bias_linear=False),
    "experts": tiny(
        num_query_groups=2,
        activation="swiglu",
        add_bias_linear=False,
        num_experts=4,
        moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=16,
    ),
}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_moves_matrix_by_matrix(model: str, mode: str, nesterov: bool) -> None:
    """Every logical matrix of a block by its singular values, and what is no matrix of a block as Adam does."""
    config = MODELS[model]
    chosen = OptimizerConfig(
        optimizer="muon", muon_scale_mode=mode, muon_nesterov=nesterov, muon_extra_scale_factor=0.3, clip_grad=0.0
    )
    solo, adam = Solo.build(config, optimizer=chosen), Solo.build(config, optimizer=OptimizerConfig(clip_grad=0.0))
    momenta = {n: torch.zeros_like(p) for n, p in solo.params.items()}
    lr, decay = 0.02, 0.1
    for step in range(2):
        before = {name: p.detach().clone() for name, p in solo.params.items()}
        batches = [random_batch(config, seed=step)]
        solo.step(batches, lr, decay)
        grads = solo.snapshot()
        for name, old in before.items():
            got = solo.params[name].detach()
            if rule_of(name, solo.chunk.specs[name], chosen) != "muon":
                continue
            momentum = momenta[name].mul_(0.9).add_(grads[name], alpha=0.1)
            direction = 0.9 * momentum + 0.1 * grads[name] if nesterov else momentum
            new = old * (1 - lr * decay)
            queries, experts = config.num_attention_heads // config.kv_groups, config.num_experts or 1
            pairs = zip(*(matrices_of(name, x, queries, experts) for x in (new, direction)), strict=True)
            for target, given in pairs:
                matrix = given.reshape(-1, given.shape[-1])
                scale = lr * 0.3 * update_scale(tuple(matrix.shape), mode)
                target -= scale * by_singular_values(matrix).view(target.shape)
            torch.testing.assert_close(got, new, rtol=1e-9, atol=1e-11, msg=name)
        if step == 0:
            adam.step(batches, lr, decay)
            for name, spec in solo.chunk.specs.items():
                by_adam = rule_of(name, spec, chosen) == "adam"
                assert torch.equal(solo.params[name], adam.params[name]) == by_adam, name
