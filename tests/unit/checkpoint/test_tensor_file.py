"""Safetensors files against the safetensors library, both ways, and against nonsense."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron.checkpoint.durable_files import checksum
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.tensor_file import DTYPES, TensorFile, TensorFileWriter
from tests.kit.processes import anonymous_bytes
from tests.unit.checkpoint.samples import same

TENSORS = {
    f"x.{name}": torch.arange(7 * 3).reshape(7, 3).remainder(2).to(dtype)
    for name, dtype in DTYPES.items()
    if name not in ("U64", "U32", "U16")
} | {"empty": torch.empty(0, 3), "number": torch.tensor(2.5), "transposed": torch.randn(4, 6).T}


def written(path: Path) -> TensorFileWriter:
    entries = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in TENSORS.items()]
    with TensorFileWriter(path, entries, {"format": "pt"}) as file:
        for key, tensor in TENSORS.items():
            offset, size, digest = file.write(key, tensor)
            content = path.read_bytes()[offset : offset + size]
            assert checksum(content) == digest
    return file


def test_the_library_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    record = written(path).record
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(same(found[key], tensor) for key, tensor in TENSORS.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    content = path.read_bytes()
    assert (record.bytes, record.xxh3) == (len(content), checksum(content[: record.head]))
    assert record.head % 64 == 0


@pytest.mark.parametrize("by_library", [True, False])
def test_files_of_both_writers_are_read(tmp_path: Path, by_library: bool) -> None:
    path = tmp_path / "x.safetensors"
    if by_library:
        save_file({key: tensor.contiguous() for key, tensor in TENSORS.items()}, path, {"format": "pt"})
    else:
        written(path)
    file = TensorFile(path)
    assert set(file.keys) == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert (file.dtype(key), file.shape(key)) == (tensor.dtype, tuple(tensor.shape))
        assert same(file.tensor(key), tensor)
        assert file.tensor(key).data_ptr() % tensor.itemsize == 0  # as every kernel may expect


def test_a_tensor_is_the_file_s_pages(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(8 << 20)}, path)
    before = anonymous_bytes()
    tensor = TensorFile(path).tensor("a")
    assert tensor.sum() == 8 << 20
    assert anonymous_bytes() - before < 4 << 20  # of 32 MB
    tensor[0] = 5  # only this process sees it
    assert load_file(path)["a"][0] == 1


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    """A hole of a file, which takes no room on the disk."""
    count = 3 * bytes_of("MemTotal", "/proc/meminfo") // 8
    text = json.dumps({"a": {"dtype": "F64", "shape": [count], "data_offsets": [0, 8 * count]}}).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 8 * count)
    assert TensorFile(path).tensor("a")[-2:].tolist() == [0.0, 0.0]


def bytes_of(key: str, table: str) -> int:
    lines = Path(table).read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_tensors_arrive_as_announced(tmp_path: Path) -> None:
    entries = [("a", torch.float32, (2,)), ("b", torch.float32, (2,))]
    with pytest.raises(ValueError, match="is not the next entry"), TensorFileWriter(tmp_path / "1", entries) as file:
        file.write("b", torch.zeros(2))
    with pytest.raises(ValueError, match="is not the next entry"), TensorFileWriter(tmp_path / "2", entries) as file:
        file.write("a", torch.zeros(2, dtype=torch.float64))
    with (
        pytest.raises(ValueError, match="1 entries were not"),
        TensorFileWriter(tmp_path / "3", entries) as file,
    ):
        file.write("a", torch.zeros(2))
    with pytest.raises(ValueError, match="twice"):
        TensorFileWriter(tmp_path / "4", [entries[0], entries[0]])
    with pytest.raises(FileExistsError):
        TensorFileWriter(tmp_path / "3", entries)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    """Any truncation of the header, any of many random bytes in it: an error, or the same keys' plausible tensors."""
    path = tmp_path / "x.safetensors"
    head = written(path).record.head
    content = path.read_bytes()
    draw = random.Random(1)
    for length in [0, 1, 7, 8, 9, head // 2, head - 1, head, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError, match=r"x\.safetensors"):
            TensorFile(path)
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(head)] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            file = TensorFile(path)
        except DamagedCheckpointError:
            continue
        for key in file.keys:
            assert tuple(file.tensor(key).shape) == file.shape(key)
    for shape in ([0, 2**63], [2**62, 0, 2**62]):
        header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(DamagedCheckpointError, match="no tensor has the shape"):
            TensorFile(path)
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        TensorFile(tmp_path / "missing")
    with pytest.raises(DamagedCheckpointError, match="cannot be read"):
        TensorFile(tmp_path)
