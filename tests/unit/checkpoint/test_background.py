"""A copy in the host's memory, and a thread: the file has the values at the time of the copy."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.format import Manifest, whole_box
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.save import ALIGNMENT, HostCopyBuffer, local_bytes, run_in_background, save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from tests.kit.processes import anonymous_bytes
from tests.kit.runs import contents
from tests.unit.checkpoint.samples import ALONE, attempt, partition, same, samples


def parts_of(seed: int) -> dict[str, GlobalTensor]:
    """Random tensors in random parts: views with odd strides, and what gives them when it is asked."""
    draw, entries = random.Random(seed), {}
    for name, sample in samples(seed).items():
        entry = sample.entry(partition(sample.view, draw, draw.randint(1, 5)))
        late = tuple(TensorPart(part.box, part.resolve) if draw.random() < 0.5 else part for part in entry.parts)
        entries[name] = GlobalTensor(entry.shape, entry.view, entry.dtype, late)
    return entries


@given(st.integers(0, 2**32))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_the_copy_is_equal_to_the_bit_and_nothing_changes_it(seed: int) -> None:
    tensors = parts_of(seed)
    before = {name: [part.resolve().clone() for part in tensor.parts] for name, tensor in tensors.items()}
    copies = HostCopyBuffer(tensors).copy(tensors)
    for tensor in tensors.values():
        for part in tensor.parts:
            part.resolve().fill_(13)
    assert copies.keys() == tensors.keys()
    for name, copy in copies.items():
        assert [part.box for part in copy.parts] == [part.box for part in tensors[name].parts]
        assert all(same(part.resolve(), old) for part, old in zip(copy.parts, before[name], strict=True))


def test_the_memory_is_taken_once_and_is_as_large_as_the_parts() -> None:
    tensors = parts_of(3)
    staging = HostCopyBuffer(tensors)
    count = sum(len(tensor.parts) for tensor in tensors.values())
    assert local_bytes(tensors) <= staging.bytes < local_bytes(tensors) + ALIGNMENT * count
    places = [[p.resolve().data_ptr() for t in staging.copy(tensors).values() for p in t.parts] for _ in range(2)]
    assert places[0] == places[1]


def test_other_sizes_are_refused() -> None:
    small = {"a": GlobalTensor((4,), (4,), torch.float32, (TensorPart(whole_box((4,)), torch.zeros(4)),))}
    large = {"a": GlobalTensor((40,), (40,), torch.float32, (TensorPart(whole_box((40,)), torch.zeros(40)),))}
    with pytest.raises(ValueError, match="a does not fit into the host buffer"):
        HostCopyBuffer(small).copy(large)


def test_a_checkpoint_of_the_copy_has_the_same_bytes(tmp_path: Path) -> None:
    tensors = {name: sample.entry([whole_box(sample.view)]) for name, sample in samples(5).items()}
    save_sharded(tmp_path / "plain", tensors, {}, {}, ALONE)
    copies = HostCopyBuffer(tensors).copy(tensors)
    run_in_background(lambda: save_sharded(tmp_path / "copied", copies, {}, {}, ALONE), "save").result(60)
    plain, copied = (contents(attempt(tmp_path / name)) for name in ("plain", "copied"))
    assert len(plain) == 2
    assert plain == copied


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_the_memory_it_takes_is_bounded(tmp_path: Path) -> None:
    """That of the parts at the start, and less than a tenth more while it is written."""
    save_sharded(tmp_path / "first", parts_whole(1 << 10), {}, {}, ALONE)  # what is imported at the first save
    tensors = parts_whole(6 << 20)
    size, before = local_bytes(tensors), anonymous_bytes()
    staging = HostCopyBuffer(tensors)
    assert abs(anonymous_bytes() - before - size) < 0.05 * size
    for number in range(2):
        copies = staging.copy(tensors)
        future = run_in_background(partial(save_sharded, tmp_path / f"save-{number}", copies, {}, {}, ALONE), "save")
        seen = [anonymous_bytes()]
        while not wait([future], 0.005).done:
            seen.append(anonymous_bytes())
        future.result()
        assert max(seen) - before < 1.1 * size
    found = CheckpointReader(Manifest.open(tmp_path / "save-1")).read("t0")
    assert same(found, tensors["t0"].parts[0].resolve())


def parts_whole(rows: int) -> dict[str, GlobalTensor]:
    """Four tensors of so many elements, transposed in memory so that they cannot be written as they lie."""
    made = {f"t{i}": torch.rand(rows // 64, 64).mT.contiguous().mT for i in range(4)}
    return {
        name: GlobalTensor(tuple(t.shape), tuple(t.shape), t.dtype, (TensorPart(whole_box(tuple(t.shape)), t),))
        for name, t in made.items()
    }


def test_work_goes_on_in_a_daemon_thread_beside_the_caller() -> None:
    go = threading.Event()

    def work() -> threading.Thread:
        go.wait(10)
        return threading.current_thread()

    future = run_in_background(work, "save of step 3")
    time.sleep(0.05)
    assert not future.done()
    go.set()
    assert (future.result(10).name, future.result().daemon) == ("save of step 3", True)
    with pytest.raises(ZeroDivisionError):
        run_in_background(lambda: 1 // 0, "save").result(10)
