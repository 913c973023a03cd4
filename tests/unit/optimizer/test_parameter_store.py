"""Weights in flat buffers: views, gathers in the order of use, and waits before use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import DenseSharding, Init
from megatron.layers.context import BuildContext
from megatron.optimizer.build import build_optimizer
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.parameter_store import ParameterStore
from megatron.training.components.average import AverageWeights
from tests.kit.solo import Solo, grad_buffer_of, one_rank_mesh, random_batch, tiny

CONFIG = tiny(num_query_groups=2)
PARTS = Group((0, 1), 0)
WIDTH = 16


class Late(Pending):
    """Weights of other ranks that arrive only in the wait for them."""

    def __init__(self, out: Tensor, arrive: Callable[[Tensor], None]) -> None:
        super().__init__(out)
        self.arrive = arrive

    def wait(self) -> Tensor:
        """Now they are there."""
        self.arrive(self.result)
        return self.result


@dataclass
class Gathers:
    """Stands in for the all-gather between two ranks, of which the other has ones everywhere.

    Attributes:
        started: buffers, in order.
        waited: of these, those that were waited for, in order.
    """

    started: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    def __call__(self, part: Tensor, group: Group, out: Tensor) -> Pending:
        assert group == PARTS
        assert part.data_ptr() == out.data_ptr(), "the first rank's part is the first half"
        self.started.append(out.data_ptr())
        given = part.clone()

        def arrive(buffer: Tensor) -> None:
            assert torch.equal(buffer.view(2, -1)[0], given), "weights were moved before they were sent"
            buffer.view(2, -1)[1] = 1
            self.waited.append(buffer.data_ptr())

        return Late(out, arrive)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> Gathers:
    """Two ranks cut everything, and this is the first."""
    found = Gathers()
    monkeypatch.setattr(Mesh, "optimizer_shard_group", lambda self, *axes: PARTS)
    monkeypatch.setattr(Mesh, "optimizer_replica_group", lambda self, *axes: Group())
    monkeypatch.setattr(Mesh, "weight_gather_group", lambda self, *axes: PARTS)
    monkeypatch.setattr(comm, "start_all_gather", found)
    return found


SQUARE = DenseSharding(0, 1).split((WIDTH, WIDTH), 0, Init(1.0))


def layers(count: int, overlap: bool, awaited: bool = True) -> tuple[nn.Sequential, ParameterStore, GradBuffer]:
    """Square layers, each in a bucket of its own."""
    context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(count)))
    for i, layer in enumerate(model):
        layer.weight = context.declare({f"layers.{i}": SQUARE}).parameter(f"layers.{i}")
    config = ParallelConfig(ddp_bucket_size=WIDTH, use_distributed_optimizer=True, overlap_param_gather=overlap)
    buckets = grad_buffer_of(context.specs, torch.float64, config)
    weights = ParameterStore(context.params, buckets, config)
    if awaited:
        weights.gather_before_use(model)
    return model, weights, buckets


def product(model: nn.Sequential, others: float | None) -> Tensor:
    """Return the layers' product with ones, written out: the second half of each, the other rank's, is ``others``."""
    out = torch.ones(WIDTH, dtype=torch.float64)
    for parameter in model.parameters():
        weight = parameter.detach().clone()
        if others is not None:
            weight.view(-1)[WIDTH * WIDTH // 2 :] = others
        out = weight @ out
    return out


def test_parameters_are_views_and_keep_their_values() -> None:
    solo, fresh = Solo.build(CONFIG, bucket_size=3000), Solo.build(CONFIG, bucket_size=100_000_000)
    storages = {param.untyped_storage().data_ptr() for param in solo.params.values()}
    assert len(storages) == len(solo.buckets.buckets) > 1
    for name, param in solo.params.items():
        assert torch.equal(param, fresh.params[name])
        assert param.is_contiguous()
        assert solo.optimizer.weights.shards[name].data_ptr() == param.data_ptr()
    loss, _ = solo.step([random_batch(CONFIG)])
    other, _ = fresh.step([random_batch(CONFIG)])
    assert loss == other, "buffers are a matter of memory alone"


def test_parameters_are_gathered_in_order_of_use(gathers: Gathers) -> None:
    model, weights, _ = layers(4, overlap=True)
    weights.start_gather()
    assert gathers.started == [parameter.data_ptr() for parameter in model.parameters()]
    assert gathers.waited == []
    weights.wait()
    assert gathers.waited == gathers.started


def test_every_module_waits_for_its_own_weights(gathers: Gathers) -> None:
    model, weights, _ = layers(3, overlap=True)
    weights.start_gather()
    model[0](torch.ones(WIDTH, dtype=torch.float64))
    assert gathers.waited == gathers.started[:1], "the others may still be on their way"
    assert torch.equal(model(torch.ones(WIDTH, dtype=torch.float64)), product(model, 1.0))
    assert gathers.waited == gathers.started
    model(torch.ones(WIDTH, dtype=torch.float64))
    assert gathers.waited == gathers.started, "each is waited for once"


def test_weights_are_not_gathered_again_during_a_gather(gathers: Gathers) -> None:
    _, weights, _ = layers(2, overlap=True)
    weights.start_gather()
    weights.start_gather()
    assert gathers.waited == gathers.started[:2]
    weights.wait()
    assert gathers.waited == gathers.started


@pytest.mark.parametrize("moves", ["an update", "an average"])
def test_nothing_moves_weights_that_are_on_their_way(gathers: Gathers, moves: str) -> None:
    """Nor does it where no forward comes between: the stand-in compares what arrives with what was sent."""
    context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float32)
    name = "layers.0.w"
    context.declare({name: SQUARE}).parameter(name)
    parallel = ParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False, overlap_param_gather=True)
    buckets = grad_buffer_of(context.specs, torch.float32, parallel)
    config = OptimizerConfig(clip_grad=0.0)
    weights = ParameterStore(context.params, buckets, parallel)
    optimizer = build_optimizer(weights, context.specs, buckets, context.mesh, config)
    average = AverageWeights(optimizer, 0.5)
    for _ in range(2):
        buckets.buckets[0].shard.fill_(1.0)
        if moves == "an update":
            optimizer.update(Rates(0.1, 0.0), torch.ones(()), hooks=[average])
        else:
            average.average[name].add_(1.0)
            with average.in_model():
                pass
    optimizer.weights.wait()
    assert len(gathers.waited) == len(gathers.started) == (2 if moves == "an update" else 4)
