"""Tensor-parallel layers in a program of your own: an MLP that an optimizer of PyTorch trains.

Run it with ``torchrun --nproc-per-node 2 examples/parallel_mlp.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import Init
from megatron.kernels.linear import with_bias_gradient
from megatron.layers.context import BuildContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nn.Module):
    """``x -> W2 gelu(W1 x + b1) + b2`` on ``[S, B, H]``; each rank holds a part of the inner units."""

    def __init__(self, mesh: Mesh, hidden: int, inner: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        params: dict[str, nn.Parameter] = {}
        # Layers accumulate gradients themselves; this accumulator leaves them in Parameter.grad.
        context = BuildContext(mesh, GradAccumulator.to_grad(params), dtype, params=params)
        shard = context.sharding.dense
        self.specs = {
            "fc1.weight": shard.split((inner, hidden), 0, Init(0.1)),
            "fc1.bias": shard.split((inner,), 0, Init()),
            "fc2.weight": shard.split((hidden, inner), 1, Init(0.1)),
            "fc2.bias": shard.replicate((hidden,), Init(), partial=False),
        }
        context.declare(self.specs)
        self.fc1 = ColumnParallelLinear(context.submodule("fc1"))
        self.fc2 = RowParallelLinear(context.submodule("fc2"))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP. A linear adds its bias; what consumes its output computes the gradient of the bias."""
        inner = F.gelu(with_bias_gradient(self.fc1(x), self.fc1.bias))
        return with_bias_gradient(self.fc2(inner), self.fc2.bias)


def train(mesh: Mesh, steps: int = 20, dtype: torch.dtype = torch.float32) -> tuple[ParallelMLP, list[float]]:
    """Fit random outputs, with the global gradient norm clipped to 0.1; return the model and the losses."""
    mlp, generator = ParallelMLP(mesh, 16, 64, dtype), torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 8, 4, 16, generator=generator, dtype=torch.float64).to(dtype)
    optimizer, losses = torch.optim.AdamW(mlp.parameters(), lr=1e-2), []
    device_mesh = mesh.device_mesh() if mesh.world.size > 1 else None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(mlp(x), target)
        loss.backward()
        grads = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
        if device_mesh is not None:  # the norm is that of the global tensors, not of this rank's parts
            axes = device_mesh.mesh_dim_names or ()
            places = {name: mlp.specs[name].placements(axes) for name in grads}
            grads = {name: DTensor.from_local(grad, device_mesh, places[name]) for name, grad in grads.items()}
        norm = nn.utils.get_total_norm(grads.values())
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(mlp.parameters(), 0.1, norm)
        optimizer.step()
        losses.append(loss.item())
    return mlp, losses


def main() -> None:
    """Train on the ranks that torchrun has started."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    _, losses = train(Mesh(Layout.from_config(ParallelConfig(tensor_model_parallel_size=size), size), rank))
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
