"""Shard specs against a mark for every element of the global tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest

from megatron.distributed.sharding import DenseSharding, Init, ShardSpec, padded_vocab_size

INIT = Init(std=0.02)
MakeSpec = Callable[[DenseSharding], ShardSpec]

CONSTRUCTORS: dict[str, MakeSpec] = {
    "column weight": lambda s: s.split((840, 3), 0, INIT),
    "row weight": lambda s: s.split((3, 840), 1, INIT),
    "column bias": lambda s: s.split((840,), 0, INIT),
    "gate and up": lambda s: s.split((2 * 840, 3), 1, INIT, (2, 840, 3)),
    "gate and up bias": lambda s: s.split((2 * 840,), 1, INIT, (2, 840)),
    "norm": lambda s: s.replicate((5,), INIT, partial=False),
    "norm, sequence parallel": lambda s: s.replicate((5,), INIT, partial=True),
    "positions": lambda s: s.replicate((6, 5), INIT, partial=True),
    **{
        f"vocabulary {entries}/{divisible}": lambda s, e=entries, d=divisible: s.vocabulary(e, 3, d, INIT)
        for entries in (1, 7, 64, 101)
        for divisible in (1, 8, 128)
    },
}
QKV: dict[str, tuple[int, int, tuple[int, ...]]] = {
    f"qkv {groups} groups of {queries} {len(tail)}-D": (groups, queries, tail)
    for groups in (1, 2, 3, 4, 8)
    for queries in (1, 2, 4, 6, 8)
    for tail in ((2, 3), (2,))
}
CONSTRUCTORS |= {name: lambda s, a=a: s.qkv(*a, INIT) for name, a in QKV.items()}


def divides(name: str, tp: int) -> bool:
    """Whether ``tp`` ranks can hold this parameter."""
    if name not in QKV:
        return 840 % tp == 0
    groups, queries, _ = QKV[name]
    return groups % tp == 0 or (tp % groups == 0 and queries % (tp // groups) == 0)


def specs_of(name: str, tp: int) -> list[ShardSpec]:
    """One per rank."""
    return [CONSTRUCTORS[name](DenseSharding(rank, tp)) for rank in range(tp)]


CASES = [(name, tp) for name in CONSTRUCTORS for tp in range(1, 9) if divides(name, tp)]


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_pieces_tile_the_global_tensor(name: str, tp: int) -> None:
    specs = specs_of(name, tp)
    owners = np.zeros(specs[0].view, int)
    holders = np.zeros((tp, *specs[0].view), int)
    for rank, spec in enumerate(specs):
        for piece in spec.owned:
            owners[piece.global_box.slices] += 1
        for piece in spec.pieces:
            holders[rank][piece.global_box.slices] += 1
    assert (owners == 1).all(), "the owned pieces of all ranks must hold every element exactly once"
    assert holders.max() == 1, "a rank holds an element twice"
    for rank, spec in enumerate(specs):
        for piece in spec.pieces:
            holding = holders[(slice(None), *piece.global_box.slices)].reshape(tp, -1)
            assert rank in piece.tp_ranks
            assert list(piece.tp_ranks) == [r for r in range(tp) if holding[r].all()]
            assert not any(holding[r].any() for r in range(tp) if r not in piece.tp_ranks)


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_local_tensors_hold_their_pieces(name: str, tp: int) -> None:
    specs = specs_of(name, tp)
    for spec in specs:
        assert len(spec.shape) in (1, 2)
        assert spec.shape == specs[0].shape == CONSTRUCTORS[name](DenseSharding(0, 1)).shape, (
            "a global shape knows no layout"
        )
        assert spec.local_view == specs[0].local_view, "ranks hold tensors of one shape"
        assert prod(spec.view) == prod(spec.shape) == spec.numel
        assert prod(spec.local_view) == prod(spec.local_shape)
        assert len(spec.local_shape) == len(spec.shape)
        used = np.zeros(spec.local_view, int)
        for piece in spec.pieces:
            assert piece.local_box.size == piece.global_box.size
            assert used[piece.local_box.slices].shape == piece.local_box.size, "a piece reaches out of the local tensor"
            used[piece.local_box.slices] += 1
        assert used.max(initial=0) <= 1, "two pieces share a local element"
        if not name.startswith("vocabulary"):
            assert used.min() == 1, "only a vocabulary has padding"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_what_is_summed_over_sharers(tp: int) -> None:
    """Partial gradients: sequence-parallel norms and shared keys and values; nothing else."""
    shard = DenseSharding(0, tp)
    assert shard.replicate((5,), INIT, partial=True).pieces[0].partial
    assert not shard.replicate((5,), INIT, partial=False).pieces[0].partial
    assert not any(p.partial for p in shard.split((840, 3), 0, INIT).pieces)
    pieces = shard.qkv(2, 4, (2, 3), INIT).pieces
    assert [p.partial for p in pieces] == ([False] if tp <= 2 else [False, True])


@pytest.mark.parametrize(("groups", "queries", "tp"), [(3, 4, 2), (2, 3, 4), (4, 1, 8), (1, 1, 2), (2, 8, 3)])
def test_refuses_heads_that_do_not_divide(groups: int, queries: int, tp: int) -> None:
    with pytest.raises(ValueError, match=f"do not divide over TP {tp}"):
        DenseSharding(0, tp).qkv(groups, queries, (2, 3), INIT)


def test_refuses_a_dimension_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="dimension 1 of \\(2, 10, 3\\) does not divide by TP 4"):
        DenseSharding(0, 4).split((20, 3), 1, INIT, (2, 10, 3))


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("divisible_by", [1, 3, 128])
@pytest.mark.parametrize("entries", [1, 127, 128, 129, 50257])
def test_padded_vocabulary_is_the_next_multiple(entries: int, divisible_by: int, tp: int) -> None:
    rows = padded_vocab_size(entries, divisible_by, tp)
    assert rows % (divisible_by * tp) == 0
    assert entries <= rows < entries + divisible_by * tp


def test_decay() -> None:
    weight, bias = DenseSharding(0, 2).split((4, 3), 0, INIT), DenseSharding(0, 2).split((4,), 0, INIT)
    assert (weight.decays, bias.decays) == (True, False)
