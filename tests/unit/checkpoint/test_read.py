"""Write and read by one process: streaming, conversion, refusals."""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.checkpoint import save as save_module
from megatron.checkpoint.dcp_reader import CheckpointStorageReader
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.format import Manifest, whole_box
from megatron.checkpoint.load import CheckpointReader, load_sharded
from megatron.checkpoint.save import save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from megatron.distributed.sharding import Box
from tests.kit.runs import contents
from tests.unit.checkpoint.samples import (
    ALONE,
    Sample,
    attempt,
    forge,
    partition,
    same,
    samples,
    save,
    small,
)


def test_equal_checkpoints_are_equal_files(tmp_path: Path) -> None:
    for name in ("iter_1", "iter_2"):
        save(tmp_path / name, samples(1))
    assert contents(attempt(tmp_path / "iter_1")) == contents(attempt(tmp_path / "iter_2"))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False), st.integers(0, 1000), st.sampled_from([8, 40, 1 << 20]))
def test_any_boxes_of_any_chunks(tmp_path_factory: pytest.TempPathFactory, draw, seed: int, chunk: int) -> None:  # noqa: ANN001
    """Written in random parts, cut into small chunks; read as a whole, by boxes, and by the library."""
    path, tensors = tmp_path_factory.mktemp("random") / "iter_1", samples(seed, 4)
    entries = {name: s.entry(partition(s.view, draw, draw.randint(1, 6))) for name, s in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "CHUNK_BYTES", chunk)
        save_sharded(path, entries, {}, {}, ALONE)
    manifest = Manifest.open(path)
    reader = CheckpointReader(manifest)
    assert set(reader.names) == set(tensors)
    for name, sample in tensors.items():
        assert all(c.bytes <= chunk for c in manifest.tensors[name].chunks)
        assert (reader.shape(name), reader.view(name)) == (tuple(sample.tensor.shape), sample.view)
        for box in [whole_box(sample.view), *partition(sample.view, draw, 3)]:
            assert same(reader.read(name, box), sample.tensor.view(sample.view)[box.slices])
    filled = {name: s.empty(partition(s.view, draw, 4)) for name, s in tensors.items()}
    load_sharded(manifest, filled, ALONE)
    assert all(tensors[name].is_in(entry) for name, entry in filled.items())
    plain = {name: torch.zeros_like(sample.tensor) for name, sample in tensors.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(plain, storage_reader=CheckpointStorageReader(manifest), no_dist=True)
    assert all(same(plain[name], sample.tensor) for name, sample in tensors.items())


def test_parts_are_asked_for_one_after_the_other(tmp_path: Path) -> None:
    """The values of a part are freed before the next part is computed."""
    alive: list[weakref.ref[Any]] = []
    most = 0

    def compute(value: int) -> Tensor:
        nonlocal most
        most = max(most, 1 + sum(ref() is not None for ref in alive))
        memory = np.full((4, 5), value, dtype=np.float32)
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)  # as long as any tensor uses it, the array lives

    parts = tuple(TensorPart(Box((4 * i, 0), (4, 5)), lambda i=i: compute(i)) for i in range(6))
    save_sharded(tmp_path / "iter_1", {"w": GlobalTensor((24, 5), (24, 5), torch.float32, parts)}, {}, {}, ALONE)
    assert len(alive) == 6
    assert most == 1
    found = CheckpointReader(Manifest.open(tmp_path / "iter_1")).read("w")
    assert same(found, torch.arange(6.0).repeat_interleave(4)[:, None].expand(24, 5))


def test_floating_types_are_converted_and_others_are_not(tmp_path: Path) -> None:
    save(tmp_path / "iter_1", small() | {"ids": Sample(torch.arange(5), (5,))})
    manifest = Manifest.open(tmp_path / "iter_1")
    half = small()["a"].empty([Box((1, 2, 0), (1, 3, 5))], torch.bfloat16)
    load_sharded(manifest, {"a": half}, ALONE)
    assert small()["a"].is_in(half)
    with pytest.raises(CheckpointError, match=r"ids is I64 in the checkpoint, torch.float32 here"):
        load_sharded(manifest, {"ids": GlobalTensor((5,), (5,), torch.float32, ())}, ALONE)


def test_a_tensor_without_elements(tmp_path: Path) -> None:
    save(tmp_path / "iter_1", {"none": Sample(torch.zeros(0, 5), (0, 5))})
    manifest = Manifest.open(tmp_path / "iter_1")
    assert CheckpointReader(manifest).read("none").shape == (0, 5)
    load_sharded(manifest, {"none": GlobalTensor((0, 5), (0, 5), torch.float32, ())}, ALONE)


def test_all_mismatches_are_reported_at_once(tmp_path: Path) -> None:
    save(tmp_path / "iter_1", small())
    wanted = {
        "a": GlobalTensor((24, 5), (24, 5), torch.float32, ()),
        "b": GlobalTensor((2,), (2,), torch.float32, ()),
        "optim.exp_avg.a": GlobalTensor(
            (24, 5), (2, 12, 5), torch.float32, (TensorPart(Box((2, 0, 0), (1, 1, 1)), torch.ones(1)),)
        ),
    }
    with pytest.raises(CheckpointError) as caught:
        load_sharded(Manifest.open(tmp_path / "iter_1"), wanted, ALONE)
    assert not isinstance(caught.value, DamagedCheckpointError)
    _, *lines = str(caught.value).splitlines()
    assert lines == [
        "a is [24, 5] viewed as [2, 12, 5] in the checkpoint, [24, 5] viewed as [24, 5] here",
        "b is missing from the checkpoint",
        "[2:3, 0:1, 0:1] is not inside optim.exp_avg.a, which is [2, 12, 5]",
    ]


def test_a_checkpoint_with_a_hole_is_not_read(tmp_path: Path) -> None:
    """Even with a valid marker."""
    path = tmp_path / "iter_1"
    save_sharded(
        path, {"a": small()["a"].entry([Box((0, 0, 0), (1, 12, 5)), Box((1, 0, 0), (1, 12, 5))])}, {}, {}, ALONE
    )

    def make_hole(content: bytes) -> bytes:
        data = json.loads(content)
        del data["tensors"]["a"]["chunks"][1]
        return json.dumps(data).encode()

    forge(path, make_hole)
    manifest = Manifest.open(path)
    for act in (
        lambda: load_sharded(manifest, {"a": small()["a"].empty([Box((0, 0, 0), (1, 1, 1))])}, ALONE),
        lambda: CheckpointReader(manifest).read("a"),
    ):
        with pytest.raises(DamagedCheckpointError, match=r"element \[1, 0, 0\] is not covered"):
            act()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (small()["a"].entry([Box((0, 0, 0), (2, 12, 4))]), r"a: element \[0, 0, 4\] is not covered"),
        (GlobalTensor((24, 5), (5, 24), torch.float32, ()), r"\[5, 24\] is not a view of \[24, 5\]"),
        (
            GlobalTensor((24, 5), (24, 5), torch.float32, (TensorPart(whole_box((24, 5)), torch.ones(5, 24)),)),
            "a tensor .5, 24. for",
        ),
        (
            GlobalTensor((2,), (2,), torch.float32, (TensorPart(whole_box((2,)), torch.ones(2).double()),)),
            "not the next entry",
        ),
    ],
)
def test_parts_that_are_wrong(tmp_path: Path, entry: GlobalTensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        save_sharded(tmp_path / "iter_1", {"a": entry}, {}, {}, ALONE)
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    asked = []
    part = TensorPart(whole_box((2,)), lambda: asked.append(True) or torch.ones(2))
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_sharded(
            tmp_path / "c", {"w": GlobalTensor((2,), (2,), torch.float32, (part,))}, {"loss": float("nan")}, {}, ALONE
        )
    assert asked == list(tmp_path.iterdir()) == []


def test_an_error_of_a_part_is_raised_as_it_is(tmp_path: Path) -> None:
    def fails() -> Tensor:
        raise LookupError("no such expert")

    broken = GlobalTensor((2,), (2,), torch.float32, (TensorPart(whole_box((2,)), fails),))
    with pytest.raises(LookupError, match="no such expert"):
        save_sharded(tmp_path / "iter_1", {"w": broken}, {}, {}, ALONE)
    assert list(tmp_path.iterdir()) == []


def test_state_config_and_files_survive_a_round_trip(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_bytes(b"{}")
    state = {"iteration": 7, "scale": 0.1, "digest": "f" * 16, "splits": {"train": [1, 2]}, "none": None}
    save_sharded(
        tmp_path / "c", {}, state, {"model": {"rotary_base": 1e4}}, ALONE, {"tokenizer/t.json": source, "x": b"1"}
    )
    manifest = Manifest.open(tmp_path / "c")
    assert (manifest.state, manifest.config) == (state, {"model": {"rotary_base": 1e4}})
    assert (manifest.read_file("tokenizer/t.json"), manifest.read_file("x")) == (b"{}", b"1")


def test_reader_refuses_missing_regions(tmp_path: Path) -> None:
    save(tmp_path / "iter_1", small())
    reader = CheckpointReader(Manifest.open(tmp_path / "iter_1"))
    with pytest.raises(CheckpointError, match="has no tensor b"):
        reader.read("b")
    with pytest.raises(CheckpointError, match=r"\[0:3, 0:1, 0:1\] is not inside a, which is \[2, 12, 5\]"):
        reader.read("a", Box((0, 0, 0), (3, 1, 1)))


def test_saving_prints_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        save(tmp_path / "iter_1", small())
        load_sharded(Manifest.open(tmp_path / "iter_1"), {"a": small()["a"].empty([])}, ALONE)
