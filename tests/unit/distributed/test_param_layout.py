"""Parameter ownership: packing, shards, and the boxes inside a shard, against brute force."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.distributed.param_layout import (
    ALIGNMENT,
    MIN_PART_RATIO,
    BucketKey,
    BucketShape,
    ParamShard,
    contiguous_boxes,
    pack,
    plan_buckets,
    shard_boxes,
)
from megatron.distributed.sharding import DENSE_REDUCE_AXES, DenseSharding, ExpertSharding, Init, ShardSpec

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=12).map(lambda sizes: dict(zip("abcdefghijkl", sizes)))


@QUICK
@given(SIZES, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_every_element_lies_in_one_part(sizes: dict[str, int], shards: int, copies: int, uncut: bool) -> None:
    packing = pack(sizes, shards, copies, uncut)
    assert packing.size % (ALIGNMENT * shards * copies) == 0
    taken = np.zeros(packing.size, dtype=int)
    for name, numel in sizes.items():
        assert packing.offsets[name] % ALIGNMENT == 0
        taken[packing.offsets[name] : packing.offsets[name] + numel] += 1
        for parts in (shards, shards * copies):
            shares = [packing.shard_in_part(name, numel, part, parts) for part in range(parts)]
            held = [i for share in shares if share for i in range(share.start, share.stop)]
            assert held == list(range(numel))
        if uncut:
            assert sum(packing.shard_in_part(name, numel, part, shards) is not None for part in range(shards)) == 1
    assert taken.max() == 1, "two parameters overlap"


@QUICK
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_a_range_is_at_most_2n_minus_1_boxes(view: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(view)))
    stop = data.draw(st.integers(start, prod(view)))
    numbers, found = np.arange(prod(view)).reshape(view), []
    boxes = list(contiguous_boxes(view, ParamShard(start, stop)))
    for first, box in boxes:
        inside = numbers[box.slices].flatten().tolist()
        assert inside == list(range(first, first + box.numel)), "neighbouring elements"
        found += inside
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(view) - 1


INIT = Init()
SPECS: dict[str, ShardSpec] = {
    "columns": DenseSharding(1, 2).split((12, 10), 1, INIT),
    "gate and up": DenseSharding(1, 2).split((24, 5), 1, INIT, (2, 12, 5)),
    "padded": DenseSharding(1, 4).vocabulary(13, 6, 4, INIT),
    "shared heads": DenseSharding(3, 4).qkv(2, 4, (3, 8), INIT),
    "experts": ExpertSharding(1, 2, 1, 2).split((4, 2, 6, 5), 2, INIT),
    "vector": DenseSharding(0, 2).replicate((37,), INIT, partial=True),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("cut", [1, 7, 16, 1000])
def test_slots_are_the_pieces_however_they_are_cut(name: str, cut: int) -> None:
    """All slots of all shares put every element of the pieces, and nothing else, where it belongs."""
    spec = SPECS[name]
    numel = prod(spec.local_shape)
    local = np.random.default_rng(0).random(spec.local_view)
    expected, got = np.zeros(spec.view), np.zeros(spec.view)
    for piece in spec.pieces:
        expected[piece.global_box.slices] += local[piece.local_box.slices]
    for start in range(0, numel, cut):
        share = ParamShard(start, min(start + cut, numel))
        held = Viewed(local.flatten()[share.start : share.stop])
        for slot in shard_boxes(spec, share):
            assert np.array_equal(slot.view_in(held).array, local[slot.piece.local_box.slices])
            got[slot.piece.global_box.slices] += slot.view_in(held).array
    assert np.array_equal(got, expected)


class Viewed:
    """An array with the one method of tensors that is needed here."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def view(self, *shape: object) -> Viewed:
        return Viewed(self.array.reshape(*shape))

    def __getitem__(self, index: object) -> Viewed:
        return Viewed(self.array[index])


def planned(keys: dict[str, BucketKey], sizes: dict[str, int], limit: int, ranks: int = 1) -> list[BucketShape]:
    specs = {name: DenseSharding(0, 1).replicate((size,), INIT, partial=False) for name, size in sizes.items()}
    return list(plan_buckets(specs, keys, limit, lambda axes: (ranks, 1)))


KEY = BucketKey("fp32", DENSE_REDUCE_AXES, tied=False, uncut=False, vector=False)
UNCUT = replace(KEY, uncut=True)


@pytest.mark.parametrize(("limit", "expected"), [(2 * ALIGNMENT, ["dc", "b", "a"]), (1, ["d", "c", "b", "a"])])
def test_buckets_are_cut_by_size_and_by_parameter_properties(limit: int, expected: list[str]) -> None:
    keys = {"a": KEY, "b": replace(KEY, dtype="bf16"), "c": KEY, "d": KEY}
    found = planned(keys, dict.fromkeys(keys, ALIGNMENT), limit)
    assert ["".join(shape.sizes) for shape in found] == expected


@QUICK
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 4000))
def test_uncut_buckets_are_large_enough_to_be_dealt_out(elements: list[int], ranks: int, limit: int) -> None:
    """One that holds all matrices wastes little where there are many; a small one would waste nearly all."""
    sizes = {str(i): n * ALIGNMENT for i, n in enumerate(elements)}
    found = planned(dict.fromkeys(sizes, UNCUT), sizes, limit * ALIGNMENT, ranks)
    packed = [shape.packing.size for shape in found]
    if ranks == 1:
        plain = planned(dict.fromkeys(sizes, KEY), sizes, limit * ALIGNMENT)
        assert [[*a.sizes] for a in found] == [[*b.sizes] for b in plain], "without cuts, size is as asked for"
        return
    largest, total = max(sizes.values()), sum(sizes.values())
    assert sum(packed) <= total + len(packed) * ranks * largest
    if total >= MIN_PART_RATIO * ranks * largest:
        capacity = total // max(1, total // max(limit * ALIGNMENT, MIN_PART_RATIO * ranks * largest)) + 1
        assert all(size <= (capacity + largest) * (1 + 1 / MIN_PART_RATIO) for size in packed[:-1])


def test_few_matrices_go_into_one_bucket() -> None:
    """Sixteen of one size over four ranks: no padding, where half of buckets of two would be."""
    sizes = {str(i): ALIGNMENT for i in range(16)}
    found = planned(dict.fromkeys(sizes, UNCUT), sizes, 2 * ALIGNMENT, 4)
    assert [shape.packing.size for shape in found] == [MIN_PART_RATIO * 4 * ALIGNMENT] * (4 // MIN_PART_RATIO)
