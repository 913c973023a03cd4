"""The layers in a plain torch program, and views of their parameters and gradients as DTensors."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron.config.parallel import ParallelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import DenseSharding, ExpertSharding, Init, ShardSpec
from megatron.kernels.linear import with_bias_gradient
from megatron.layers.context import BuildContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.kit.pool import Pool
from tests.kit.solo import one_rank_mesh

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel_mlp.py"
HIDDEN, INNER = 12, 24


def mesh_of(rank: int, size: int, tp: int, pp: int = 1) -> Mesh:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    return Mesh(Layout.from_config(parallel, size), rank)


def run_example(rank: int, size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, and the global weights at the end."""
    mesh = mesh_of(rank, size, size)
    mlp, losses = runpy.run_path(str(EXAMPLE))["train"](mesh, dtype=torch.float64)
    where = mesh.device_mesh()
    return losses, {
        name: DTensor.from_local(p.detach(), where, mlp.specs[name].placements(where.mesh_dim_names)).full_tensor()
        for name, p in mlp.named_parameters()
    }


def test_the_example_trains_like_linears_of_torch(pool: Pool) -> None:
    example = runpy.run_path(str(EXAMPLE))
    whole = example["ParallelMLP"](one_rank_mesh(), 16, 64, torch.float64)
    plain = nn.ModuleDict({"fc1": nn.Linear(16, 64), "fc2": nn.Linear(64, 16)}).double()
    plain.load_state_dict(whole.state_dict())
    x, target = torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(plain["fc2"](F.gelu(plain["fc1"](x))), target)
        loss.backward()
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < 0.8 * expected[0]
    assert example["train"](one_rank_mesh(), dtype=torch.float64)[1] == pytest.approx(expected, rel=1e-12)
    for losses, weights in pool.run(2, run_example, backend="gloo"):
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def build(mesh: Mesh, sequence_parallel: bool) -> tuple[nn.ModuleDict, dict[str, ShardSpec]]:
    """A column- and a row-parallel linear whose gradients are in ``Parameter.grad``."""
    params: dict[str, nn.Parameter] = {}
    context = BuildContext(
        mesh, GradAccumulator.to_grad(params), torch.float64, params=params, sequence_parallel=sequence_parallel
    )
    shard = context.sharding.dense
    specs = {
        "fc1.weight": shard.split((INNER, HIDDEN), 0, Init(0.3)),
        "fc1.bias": shard.split((INNER,), 0, Init(0.3)),
        "fc2.weight": shard.split((HIDDEN, INNER), 1, Init(0.3)),
        "fc2.bias": shard.replicate((HIDDEN,), Init(0.3), partial=sequence_parallel),
    }
    context.declare(specs)
    column, row = ColumnParallelLinear(context.submodule("fc1")), RowParallelLinear(context.submodule("fc2"))
    return nn.ModuleDict({"fc1": column, "fc2": row}), specs


def compare_with_dtensors(rank: int, size: int, sequence_parallel: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Return our output and gradients as global tensors, and the results of DTensors."""
    mesh = mesh_of(rank, size, 2)
    where = mesh.device_mesh()
    axes = where.mesh_dim_names
    assert axes == ("dp_cp", "tp")
    assert [where.get_group(axis) for axis in axes] == [mesh.dp_cp.handle, mesh.tp.handle]
    layers, specs = build(mesh, sequence_parallel)
    x = torch.randn(8, 2 * mesh.dp_size, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    samples = [Shard(1), Shard(0) if sequence_parallel else Replicate()]
    theirs = DTensor.from_local(x, where, [Replicate(), Replicate()]).redistribute(where, samples)
    mine = theirs.to_local().clone().requires_grad_()
    hidden = torch.tanh(with_bias_gradient(layers["fc1"](mine), layers["fc1"].bias))
    y = with_bias_gradient(layers["fc2"](hidden), layers["fc2"].bias)
    y.square().sum().backward()
    theirs = theirs.detach().requires_grad_()
    weights = {
        name: DTensor.from_local(p.detach(), where, specs[name].placements(axes)).requires_grad_()
        for name, p in layers.named_parameters()
    }
    hidden = torch.tanh(F.linear(theirs, weights["fc1.weight"], weights["fc1.bias"]))
    expected = F.linear(hidden, weights["fc2.weight"], weights["fc2.bias"])
    expected.redistribute(where, samples).square().sum().backward()
    assert mine.grad is not None
    found = {
        "y": (DTensor.from_local(y.detach(), where, samples).full_tensor(), expected.detach().full_tensor()),
        "x": (DTensor.from_local(mine.grad, where, samples).full_tensor(), theirs.grad.full_tensor()),
    }
    for name, parameter in layers.named_parameters():
        grad = DTensor.from_local(parameter.grad, where, specs[name].placements(axes, gradient=True))
        found[name] = grad.full_tensor(), weights[name].grad.full_tensor()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_match_dtensors(pool: Pool, sequence_parallel: bool) -> None:
    for found in pool.run(4, compare_with_dtensors, sequence_parallel, backend="gloo"):
        assert set(found) == {"y", "x", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
        for ours, theirs in found.values():
            assert ours.abs().max() > 1e-3
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def slices_of_the_mesh(rank: int, size: int) -> dict[str, Any]:
    mesh = mesh_of(rank, size, 2, pp=2)
    where = mesh.device_mesh()
    stage = where["dp_cp", "tp"]
    spec = DenseSharding(mesh.tp.rank, 2).split((4, 6), 0, Init())
    whole = torch.arange(24.0).view(4, 6)
    view = DTensor.from_local(whole.chunk(2)[mesh.tp.rank], stage, spec.placements(stage.mesh_dim_names))
    return {"names": where.mesh_dim_names, "shape": where.shape, "whole": torch.equal(view.full_tensor(), whole)}


def test_a_stage_is_a_slice_of_the_device_mesh(pool: Pool) -> None:
    for found in pool.run(8, slices_of_the_mesh, backend="gloo"):
        assert found == {"names": ("pp", "dp_cp", "tp"), "shape": (2, 2, 2), "whole": True}


def test_a_single_rank_has_no_device_mesh() -> None:
    with pytest.raises(ValueError, match="single rank"):
        one_rank_mesh().device_mesh()


AXES = ("dp_cp", "tp")


def test_placements() -> None:
    shard = DenseSharding(1, 2)
    assert shard.split((8, 6), 0, Init()).placements(AXES) == (Replicate(), Shard(0))
    assert shard.split((8, 6), 1, Init()).placements(AXES) == (Replicate(), Shard(1))
    assert shard.split((8,), 0, Init()).placements(("tp",)) == (Shard(0),)
    assert shard.qkv(2, 3, (4, 6), Init()).placements(AXES) == (Replicate(), Shard(0))
    assert shard.vocabulary(64, 4, 32, Init()).placements(AXES) == (Replicate(), Shard(0))
    assert shard.split((8, 6), 0, Init()).placements(AXES, gradient=True) == (Partial(), Shard(0))
    norm = shard.replicate((8,), Init(), partial=True)
    assert norm.placements(AXES) == (Replicate(), Replicate())
    assert norm.placements(AXES, gradient=True) == (Partial(), Partial())
    assert DenseSharding(0, 1).qkv(2, 3, (4, 6), Init()).placements(("dp_cp",)) == (Replicate(),)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name", ["gate and up", "shared heads", "keys of shared heads", "padded vocabulary", "padding alone", "experts"]
)
def test_layouts_without_a_dtensor_placement_are_refused(name: str, rank: int) -> None:
    shard = DenseSharding(rank, 2)
    spec = {
        "gate and up": shard.split((16, 6), 1, Init(), (2, 8, 6)),
        "shared heads": shard.qkv(1, 4, (4, 6), Init()),
        "keys of shared heads": DenseSharding(rank, 4).heads(8, 2, 4, Init())[1],
        "padded vocabulary": shard.vocabulary(61, 4, 32, Init()),
        "padding alone": shard.vocabulary(32, 4, 32, Init()),
        "experts": ExpertSharding(0, 1, rank, 2).split((4, 8, 6), 1, Init()),
    }[name]
    with pytest.raises(ValueError, match="device mesh" if name == "experts" else "neither one of equal parts"):
        spec.placements(AXES)
    with pytest.raises(ValueError, match="device mesh"):
        shard.split((8, 6), 0, Init()).placements(("pp", "tp"))
