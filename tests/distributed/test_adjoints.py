"""``<Ax, y> = <x, A*y>`` for everything that communicates and differentiates, in fp64 on real ranks.

An inner product runs over the global tensor: a tensor that is the same on all ranks counts once, one that each rank
has its own of is summed over the ranks. That the forward is the right map, and not just one with a fitting adjoint,
is checked too: against the formula, or the same layer on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megatron.config.attention_pattern import AttentionPattern
from megatron.config.parallel import ParallelConfig
from megatron.distributed import mappings
from megatron.distributed.comm import Group
from megatron.distributed.context_parallel import ContextParallel
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mappings import PIPELINED, TPComm
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import Init
from megatron.kernels.attention import sdpa
from megatron.kernels.attention_mask import AttentionMask
from megatron.kernels.linear import with_bias_gradient
from megatron.kernels.registry import Kernels
from megatron.layers import parameters
from megatron.layers.context import BuildContext
from megatron.layers.embedding import Embedding
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.kit.cases import MODEL
from tests.kit.pool import Pool
from tests.kit.solo import Gradients

ROWS, BATCH, WIDTH, OUT = 8, 3, 12, 20


@dataclass(frozen=True)
class Products:
    """A rank's share of the inner products that must agree: ``<Ax, y>``, and one for each argument ``A`` is linear in.

    Attributes:
        forward_error: largest difference of this rank's output from what it should be.
    """

    output: float
    arguments: dict[str, float]
    forward_error: float


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dot(a: Tensor, b: Tensor) -> float:
    return (a * b).sum().item()


def once(rank: int, value: float) -> float:
    """The share of a rank in the inner product of tensors that are the same on all."""
    return value if rank == 0 else 0.0


def tp_mesh(rank: int, size: int) -> Mesh:
    return Mesh(Layout.from_config(ParallelConfig(tensor_model_parallel_size=size), size), rank)


def rows_of(x: Tensor, rank: int, size: int) -> Tensor:
    return x.chunk(size)[rank]


def agree(ranks: Sequence[Products]) -> None:
    output = sum(r.output for r in ranks)
    assert abs(output) > 1e-3
    for name in ranks[0].arguments:
        assert sum(r.arguments[name] for r in ranks) == pytest.approx(output, rel=1e-12), name
    assert max(r.forward_error for r in ranks) < 1e-12


COLLECTIVES: dict[str, tuple[bool, bool, Callable[[Sequence[Tensor], int], Tensor]]] = {
    "copy_to_region": (True, False, lambda xs, rank: xs[0]),
    "reduce_from_region": (False, True, lambda xs, rank: sum(xs[1:], xs[0])),
    "gather_rows": (False, False, lambda xs, rank: torch.cat(list(xs))),
    "reduce_scatter_rows": (False, False, lambda xs, rank: rows_of(sum(xs[1:], xs[0]), rank, len(xs))),
}
"""Two flags, for x and y equal on all ranks, and the formula of ``rank``'s output from all inputs."""


def apply_collective(rank: int, size: int, name: str) -> Products:
    same_x, same_y, formula = COLLECTIVES[name]
    collective = getattr(mappings, name)
    group: Group = tp_mesh(rank, size).tp
    inputs = [draw(0 if same_x else r, ROWS, BATCH) for r in range(size)]
    x = inputs[rank].clone().requires_grad_()
    out = collective(x, group)
    y = draw(100 if same_y else 100 + rank, *out.shape)
    out.backward(y)
    assert x.grad is not None
    left, right = dot(out.detach(), y), dot(x.detach(), x.grad)
    return Products(
        once(rank, left) if same_y else left,
        {"x": once(rank, right) if same_x else right},
        (out.detach() - formula(inputs, rank)).abs().max().item(),
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(pool: Pool, name: str, size: int) -> None:
    agree(pool.run(size, apply_collective, name))


def rows_from(source: int, target: int) -> int:
    """Return the number of rows that one rank has for another: from 0 to 5."""
    return (3 * source + 5 * target + source * target) % 6


def apply_exchange(rank: int, size: int) -> Products:
    sent = [[rows_from(i, j) for j in range(size)] for i in range(size)]
    inputs = [draw(i, sum(sent[i]), BATCH) for i in range(size)]
    x = inputs[rank].clone().requires_grad_()
    out = mappings.all_to_all(x, sent[rank], [n[rank] for n in sent], tp_mesh(rank, size).tp)
    expected = torch.cat([inputs[i].split(sent[i])[rank] for i in range(size)])
    y = draw(100 + rank, *out.shape)
    out.backward(y)
    assert x.grad is not None
    error = (out.detach() - expected).abs().amax() if len(expected) else torch.zeros(())
    return Products(dot(out.detach(), y), {"x": dot(x.detach(), x.grad)}, error.item())


@pytest.mark.parametrize("size", [2, 4])
def test_exchange_of_rows(pool: Pool, size: int) -> None:
    agree(pool.run(size, apply_exchange))


def context(rank: int, size: int, head_ranks: int, gathers: bool = False) -> ContextParallel:
    layout = Layout.from_config(ParallelConfig(context_parallel_size=size), size)
    mesh = Mesh(layout, rank, cp_head_ranks=head_ranks)
    return ContextParallel(mesh.cp_ring, mesh.cp_heads, gathers)


LENGTH, HEADS, GROUPS = 24, 4, 2


def apply_exchange_of_heads(rank: int, size: int, back: bool) -> Products:
    """Rows of all heads become all rows of some heads, of two tensors at once, and one of them back again."""
    cp, sizes = context(rank, size, size), (HEADS, 2 * HEADS)
    wholes = [draw(i, LENGTH, BATCH, n, WIDTH) for i, n in enumerate(sizes)]
    rows = [whole.chunk(size)[rank] for whole in wholes]
    heads = torch.cat([whole.chunk(size, 2)[rank] for whole in wholes], 2)
    if back:
        inputs, expected = [wholes[0].chunk(size, 2)[rank].contiguous()], rows[0]
    else:
        inputs, expected = rows, heads
    inputs = [t.clone().requires_grad_() for t in inputs]
    out = cp.scatter_rows(inputs[0]) if back else torch.cat(cp.gather_rows(inputs), 2)
    y = draw(100 + rank, *out.shape)
    found = torch.autograd.grad(out, inputs, y)
    error = (out.detach() - expected).abs().max().item()
    return Products(dot(out.detach(), y), {"x": sum(dot(x.detach(), dx) for x, dx in zip(inputs, found))}, error)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("back", [False, True])
def test_exchange_of_heads(pool: Pool, back: bool, size: int) -> None:
    agree(pool.run(size, apply_exchange_of_heads, back))


METHODS = {"p2p": (1, False), "all_gather": (1, True), "a2a": (4, False), "a2a+p2p": (2, False)}


def apply_attention(rank: int, size: int, method: str, pattern: str, documents: bool) -> Products:
    """Attention is linear in the values, which ranks send each other."""
    head_ranks, gathers = METHODS[method]
    cp = context(rank, size, head_ranks, gathers)
    wholes = [draw(i, LENGTH, BATCH, n, WIDTH) for i, n in enumerate((HEADS, GROUPS, GROUPS))]
    ids = torch.tensor([[0] * 7 + [1] * 17, [0] * 24, [0] * 20 + [1] * 4]) if documents else None
    mask = AttentionMask.of_sequence(LENGTH, torch.device("cpu"), AttentionPattern.parse(pattern), ids)
    rows = [i for part in cp.rows(LENGTH) for i in part]
    q, k, v = (whole[rows] for whole in wholes)
    v.requires_grad_()
    out = cp.attention(q, k, v, mask, None, sdpa)
    y = draw(100 + rank, *out.shape)
    (dv,) = torch.autograd.grad(out, (v,), y)
    q, k, whole_v = (whole.repeat_interleave(HEADS // whole.shape[2], 2) for whole in wholes)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / WIDTH**0.5
    weights = scores.masked_fill(~mask.dense(), -torch.inf).softmax(-1)
    expected = torch.einsum("bnst,tbnd->sbnd", weights, whole_v)[rows]
    error = (out.detach() - expected).abs().max().item()
    return Products(dot(out.detach(), y), {"v": dot(v.detach(), dv)}, error)


@pytest.mark.parametrize("documents", [False, True], ids=["one", "documents"])
@pytest.mark.parametrize("pattern", ["global", "local:5+first:2"])
@pytest.mark.parametrize("method", METHODS)
def test_attention_of_context_parallel_ranks(pool: Pool, method: str, pattern: str, documents: bool) -> None:
    agree(pool.run(4, apply_attention, method, pattern, documents))


@dataclass
class Layer:
    """A layer with its parameters filled and its gradients collected."""

    module: nn.Module
    context: BuildContext
    grads: dict[str, Tensor]


def make(
    build: Callable[[BuildContext], nn.Module],
    mesh: Mesh,
    sequence_parallel: bool,
    tp_overlap: TPComm | None = None,
    dtype: torch.dtype = torch.float64,
    kernels: Kernels = Kernels(),
) -> Layer:
    """Build a layer; parameters that start constant become arange, so that no gradient meets a zero."""
    context = BuildContext(
        mesh,
        GradAccumulator(),
        dtype,
        sequence_parallel=sequence_parallel,
        tp_overlap=tp_overlap,
        kernels=kernels,
    )
    module = build(context)
    for name, parameter in module.named_parameters():
        spec = context.specs[name]
        if spec.init.std is None:
            whole = torch.arange(1.0, spec.numel + 1.0, dtype=torch.float64).view(spec.view)
            for piece in spec.pieces:
                parameter.data.view(spec.local_view)[piece.local_box.slices] = whole[piece.global_box.slices]
    grads = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    context.grad_accumulator.bind(Gradients(grads))
    return Layer(module, context, grads)


def weigh(layer: Layer, rank: int) -> dict[str, float]:
    """A rank's share of ``<w, dw>`` for each parameter: one that is replicated and not partial counts once."""
    out = {}
    for name, parameter in layer.module.named_parameters():
        value = dot(parameter.detach(), layer.grads[name])
        whole = all(len(p.tp_ranks) > 1 and not p.partial for p in layer.context.specs[name].pieces)
        out[name] = once(rank, value) if whole else value
    return out


def column(context: BuildContext) -> ColumnParallelLinear:
    shard = context.sharding.dense
    specs = {"weight": shard.split((OUT, WIDTH), 0, Init(0.3)), "bias": shard.split((OUT,), 0, Init())}
    return ColumnParallelLinear(context.declare(specs))


def row(context: BuildContext) -> RowParallelLinear:
    shard, partial = context.sharding.dense, context.sequence_parallel
    specs = {"weight": shard.split((OUT, WIDTH), 1, Init(0.3)), "bias": shard.replicate((OUT,), Init(), partial)}
    return RowParallelLinear(context.declare(specs))


def apply_linear(rank: int, size: int, kind: str, sequence_parallel: bool, overlap: bool) -> Products:
    """``y = xW + b`` is linear in (x, b) for a fixed W, and in (W, b) for a fixed x."""
    mesh, build = tp_mesh(rank, size), column if kind == "column" else row
    layer = make(build, mesh, sequence_parallel, PIPELINED if overlap else None)
    whole_x = draw(1, ROWS, BATCH, WIDTH)
    mine = whole_x.chunk(size, -1)[rank] if kind == "row" else whole_x
    if kind == "column" and sequence_parallel:
        mine = rows_of(whole_x, rank, size)
    x = mine.clone().requires_grad_()
    out = with_bias_gradient(layer.module(x), layer.module.bias)
    same_x, same_y = kind == "column" and not sequence_parallel, kind == "row" and not sequence_parallel
    y = draw(2 if same_y else 2 + rank, *out.shape)
    with layer.context.grad_accumulator.deferring_wgrad(0, 0) if overlap else nullcontext():
        out.backward(y)
    layer.context.grad_accumulator.run_deferred(0, 0)
    assert x.grad is not None
    left, dx, weights = dot(out.detach(), y), dot(x.detach(), x.grad), weigh(layer, rank)
    arguments = {
        "x and bias": (once(rank, dx) if same_x else dx) + weights["bias"],
        "weight and bias": weights["weight"] + weights["bias"],
    }
    expected = make(build, Mesh(Layout.from_config(ParallelConfig(), 1), 0), False).module(whole_x).detach()
    if kind == "column":
        expected = expected.chunk(size, -1)[rank]
    elif sequence_parallel:
        expected = rows_of(expected, rank, size)
    error = (out.detach() - expected).abs().max().item()
    return Products(once(rank, left) if same_y else left, arguments, error)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("sequence_parallel", "overlap"), [(False, False), (True, False), (True, True)], ids=["copies", "rows", "overlap"]
)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linears(pool: Pool, kind: str, sequence_parallel: bool, overlap: bool, size: int) -> None:
    agree(pool.run(size, apply_linear, kind, sequence_parallel, overlap))


def apply_embedding(rank: int, size: int, sequence_parallel: bool) -> Products:
    """A look-up is linear in its tables. The vocabulary is odd, so the last rank's rows are partly padding."""

    def build(context: BuildContext) -> Embedding:
        specs = parameters.gpt(MODEL, context.sharding, layers=(), last=False)
        context.declare({name.removeprefix("embedding."): spec for name, spec in specs.items()})
        return Embedding(MODEL, context)

    layer = make(build, tp_mesh(rank, size), sequence_parallel)
    tokens = torch.randint(0, MODEL.vocab, (BATCH, ROWS), generator=torch.Generator().manual_seed(3))
    out = layer.module(tokens, None)
    y = draw(4 + rank if sequence_parallel else 4, *out.shape)
    out.backward(y)
    left = dot(out.detach(), y)
    expected = make(build, Mesh(Layout.from_config(ParallelConfig(), 1), 0), False).module(tokens, None).detach()
    if sequence_parallel:
        expected = rows_of(expected, rank, size)
    return Products(
        left if sequence_parallel else once(rank, left),
        {"tables": sum(weigh(layer, rank).values())},
        (out.detach() - expected).abs().max().item(),
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding(pool: Pool, sequence_parallel: bool, size: int) -> None:
    agree(pool.run(size, apply_embedding, sequence_parallel))
