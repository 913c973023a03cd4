"""Recurrences over distributed rows against a loop over the whole sequence: states, convolution, documents, heads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed.context_parallel import ContextParallel
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.kv_cache import KVCache
from megatron.layers.recurrence import Recurrence, RecurrentRows
from tests.kit.pool import Pool

HEADS, CHANNELS, BATCH, WIDTH = 4, 3, 2, 4


@dataclass(frozen=True)
class Example:
    """Inputs of the whole sequence: values ``[S, B, N, D]``, transitions, weights ``[N, D, W]`` of the convolution."""

    x: Tensor
    # Factors ``[S, B, N]`` or matrices ``[S, B, N, D, D]``.
    steps: Tensor
    weight: Tensor
    documents: Tensor | None

    @classmethod
    def draw(cls, length: int, matrices: bool, documents: bool) -> Example:
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        steps = normal(length, BATCH, HEADS, *((CHANNELS, CHANNELS) if matrices else ())) / 2
        ids = None
        if documents:
            starts = torch.rand(BATCH, length, generator=generator) < 4 / length
            ids = starts.cumsum(1) % 2  # two runs may have the same id
        return cls(normal(length, BATCH, HEADS, CHANNELS), steps, normal(HEADS, CHANNELS, WIDTH), ids)

    def leaves(self, rows: list[int]) -> list[Tensor]:
        """Copies of what a rank has, to be differentiated."""
        own = (self.x[rows], self.steps[rows], self.weight)
        return [t.clone().requires_grad_() for t in own]


def step(transition: Tensor, state: Tensor) -> Tensor:
    return transition @ state if transition.ndim == state.ndim else transition[..., None, None] * state


def brute_force(example: Example, x: Tensor, steps: Tensor, weight_NDW: Tensor) -> Tensor:
    """Loop over the tokens of each sample; the state is ``S_t = T_t S_{t-1} + c_t``, the output its row sums."""
    samples = []
    for sample in range(BATCH):
        ids = torch.zeros(len(x)) if example.documents is None else example.documents[sample]
        state, begin, rows = x.new_zeros(HEADS, CHANNELS, 1), 0, []
        for t in range(len(x)):
            if t and ids[t] != ids[t - 1]:
                state, begin = torch.zeros_like(state), t
            taps = range(max(begin, t - WIDTH + 1), t + 1)
            convolved = sum((x[s, sample] * weight_NDW[..., WIDTH - 1 - t + s] for s in taps), x.new_zeros(()))
            state = step(steps[t, sample], state) + convolved.unsqueeze(-1)
            rows.append(state.squeeze(-1))
        samples.append(torch.stack(rows))
    return torch.stack(samples, 1)


def convolution(x_NTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, runs_NT: Tensor | None) -> Tensor:
    """The convolution of this test, a sum over taps."""
    length = x_NTC.shape[1] - weight_CW.shape[1] + 1
    total = torch.zeros_like(x_NTC[:, :length])
    for tap in range(weight_CW.shape[1]):
        seen = x_NTC[:, tap : tap + length]
        if runs_NT is not None:
            seen = seen * (runs_NT[:, tap : tap + length] == runs_NT[:, -length:]).unsqueeze(2)
        total = total + seen * weight_CW[:, tap]
    return total


def recur(
    recurrence: Recurrence, ctx: ForwardContext, x: Tensor, steps: Tensor, weight_NDW: Tensor, part: int | None = None
) -> Tensor:
    """The same by the recurrence of a mixer, within chunks, or parts of them, token by token."""
    rows: RecurrentRows = recurrence.rows(ctx)
    x_SBND, flat_SBNE = rows.gather_rows([x, steps.flatten(3) if steps.ndim > 3 else steps.unsqueeze(3)])
    steps = flat_SBNE.unflatten(3, steps.shape[3:]) if steps.ndim > 3 else flat_SBNE.squeeze(3)
    heads = x_SBND.shape[2]
    x_NLC = rows.fold(x_SBND).flatten(2)
    c_NLHD = rows.convolve(x_NLC, rows.own_heads(weight_NDW).flatten(0, 1), None, convolution).unflatten(2, (heads, -1))
    eye = torch.eye(CHANNELS, dtype=x.dtype) if steps.ndim > 3 else torch.ones((), dtype=x.dtype)
    if part is not None:
        c_SBHD, rows = rows.unfold(c_NLHD), rows.split(part)
        c_NLHD = rows.fold(c_SBHD)
        assert c_NLHD.shape[1] <= part
    steps = rows.fold(steps - eye) + eye
    state = c_NLHD.new_zeros(len(c_NLHD), heads, CHANNELS, 1)
    total = torch.zeros_like(steps[:, 0]) + eye
    runs, seen = rows.own_runs, rows.seen
    states, totals = [], []
    for t in range(c_NLHD.shape[1]):
        if runs is not None and t:
            same = (runs[:, t] == runs[:, t - 1])[:, None, None, None]
            state = state * same
        state = step(steps[:, t], state) + c_NLHD[:, t].unsqueeze(-1)
        total = steps[:, t] * total if steps.ndim == 3 else steps[:, t] @ total
        if seen is not None:
            shape = (-1,) + (1,) * (total.ndim - 1)
            total = total * seen[:, t].view(shape)
        states.append(state)
        totals.append(total)
    out = torch.stack(states, 1)
    if rows.passes_states:
        before = rows.state_before(totals[-1], states[-1])
        out = out + torch.stack([step(total, before) for total in totals], 1)
    return rows.scatter_rows(rows.unfold(out.squeeze(-1)))


def distributed(rank: int, size: int, example: Example, head_ranks: int, part: int | None) -> list[Tensor]:
    """Return a rank's rows of the output, and gradients of the sum of squares."""
    mesh = Mesh(Layout.from_config(ParallelConfig(context_parallel_size=size), size), rank, cp_head_ranks=head_ranks)
    cp, length = ContextParallel(mesh.cp_ring, mesh.cp_heads), len(example.x)
    own = [position for part in cp.rows(length) for position in part]
    tokens = torch.zeros(BATCH, len(own), dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, tokens, tokens[:, 0], documents=example.documents, seq_length=length)
    recurrence = Recurrence(BuildContext(mesh, GradAccumulator(), cp=cp, prefix="toy"), WIDTH)
    leaves = example.leaves(own)
    out = recur(recurrence, ForwardContext(batch, {}), *leaves, part)
    found = torch.autograd.grad(out.square().sum(), leaves)
    return [torch.tensor(own), out.detach(), *found]


@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize(("size", "head_ranks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_ranks_continue_each_other(pool: Pool, size: int, head_ranks: int, matrices: bool, documents: bool) -> None:
    for length, part in ((16, None), (48, None), (48, 5)):  # chunks shorter than the convolution, longer ones, split
        example = Example.draw(length, matrices, documents)
        leaves = example.leaves(list(range(length)))
        out = brute_force(example, *leaves)
        expected = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
        parts = pool.run(size, distributed, example, head_ranks, part)
        for index, whole in enumerate(expected[:3]):
            for rows, *values in parts:
                torch.testing.assert_close(values[index], whole[rows], rtol=1e-12, atol=1e-12)
        weight = sum((part[-1] for part in parts[1:]), parts[0][-1])
        torch.testing.assert_close(weight, expected[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 7, 12])
@pytest.mark.parametrize("part", [3, 5, 12, 20])
def test_decays_are_products_within_documents(length: int, part: int) -> None:
    generator = torch.Generator().manual_seed(3)
    documents_BS = (torch.rand(BATCH, length, generator=generator) < 0.3).cumsum(1)
    log = -torch.rand(length, BATCH, HEADS, generator=generator, dtype=torch.float64)
    tokens = torch.zeros(BATCH, length, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, tokens, tokens[:, 0], documents=documents_BS)
    mesh = Mesh(Layout.from_config(ParallelConfig(), 1), 0)
    rows = (
        Recurrence(BuildContext(mesh, GradAccumulator(), prefix="toy"), 1).rows(ForwardContext(batch, {})).split(part)
    )
    between, since = rows.decays(rows.fold(log))
    first = 0
    for of_chunk, since_chunk in zip(between.split(BATCH), since.split(BATCH)):
        for sample, (products, before) in enumerate(zip(of_chunk, since_chunk)):
            ids = documents_BS[sample]
            for t in range(first, min(first + products.shape[1], length)):
                for s in range(first, min(first + products.shape[1], length)):
                    seen = s <= t and ids[s] == ids[t]
                    expected = log[s + 1 : t + 1, sample].sum(0).exp() * seen
                    torch.testing.assert_close(products[:, t - first, s - first], expected)
                seen = first > 0 and ids[first - 1] == ids[t]
                torch.testing.assert_close(before[:, t - first], log[first : t + 1, sample].sum(0).exp() * seen)
        first += products.shape[1]
    assert first >= length


@pytest.mark.parametrize("part", [None, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_generation_continues(padded: bool, part: int | None) -> None:
    example = Example.draw(12, matrices=True, documents=False)
    padding = torch.tensor([0, 5]) if padded else None
    documents = None if padding is None else (torch.arange(12) >= padding.unsqueeze(1)).long()
    expected = brute_force(
        Example(example.x, example.steps, example.weight, documents), *example.leaves(list(range(12)))
    )
    mesh, cache = Mesh(Layout.from_config(ParallelConfig(), 1), 0), KVCache(12, padding)
    recurrence = Recurrence(BuildContext(mesh, GradAccumulator(), prefix="toy"), WIDTH)
    found = []
    with torch.no_grad():
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 12)):
            batch = MicroBatch.of_tokens(torch.zeros(BATCH, stop - start, dtype=torch.int64))
            rows = list(range(start, stop))
            found.append(recur(recurrence, ForwardContext(batch, {}, cache=cache), *example.leaves(rows), part))
            cache.advance(stop - start)
    torch.testing.assert_close(torch.cat(found), expected.detach(), rtol=1e-12, atol=1e-12)
    sizes = {name: tuple(state.shape) for name, state in cache.states.items()}
    assert sizes == {"toy.rows": (BATCH, WIDTH - 1, HEADS * CHANNELS), "toy": (BATCH, HEADS, CHANNELS, 1)}
