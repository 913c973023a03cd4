"""Checkpoints of every version, and docs/formats.md: its programs run, and read the same values as the library."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.durable_files import checksum
from megatron.checkpoint.format import ITEM_BYTES, MANIFEST, MARKER, VERSION, Manifest
from megatron.checkpoint.load import CheckpointReader
from megatron.checkpoint.tensor_file import DTYPES
from megatron.checkpoint.verify import list_damage
from megatron.data.indexed_writer import IndexedDatasetWriter
from tests.fixtures.checkpoints.write import DIGESTS, FIXTURES, MODEL, RUN, digest
from tests.unit.checkpoint.samples import ALONE, Sample, files_of, samples, save

DOCUMENT = (Path(__file__).parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
VERSIONS = sorted(path.name for path in FIXTURES.glob("v*"))


def documented(name: str) -> Callable[[Path], Any]:
    """A function that the document shows, with nothing of ours in reach."""
    (program,) = [text for text in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL) if f"def {name}" in text]
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) <= 20
    assert {line.split()[1] for line in lines if re.match("import|from", line)} <= {
        "json",
        "struct",
        "pathlib",
        "numpy",
    }
    scope: dict[str, Any] = {}
    with TemporaryDirectory() as folder, chdir(folder):
        Path("SAVE").mkdir()
        Path("SAVE/iter_0000100").symlink_to(FIXTURES / f"v{VERSION}")  # which the program's last line reads
        exec(program, scope)
    return scope[name]


def test_every_version_has_a_fixture() -> None:
    assert VERSIONS == [f"v{version}" for version in range(1, VERSION + 1)] == sorted(json.loads(DIGESTS.read_text()))
    assert sum(path.stat().st_size for path in FIXTURES.rglob("v1/*")) < 60_000


@pytest.mark.parametrize("name", VERSIONS)
def test_checkpoints_of_every_version_are_read_as_they_were_written(name: str) -> None:
    assert list(list_damage(Manifest.open(FIXTURES / name))) == []
    assert digest(FIXTURES / name) == json.loads(DIGESTS.read_text())[name]


@pytest.mark.parametrize("name", VERSIONS)
def test_a_run_goes_on_from_a_checkpoint_of_every_version(tmp_path: Path, name: str) -> None:
    """On one rank, where two tensor-parallel ones wrote it."""
    from megatron.arguments.cli import parse
    from megatron.training.build import build_trainer
    from megatron.training.checkpointer import Checkpointer, choose_resume_source
    from tests.distributed.resume import advance

    shutil.copytree(FIXTURES / name, tmp_path / "iter_0000003")
    alone = RUN.replace("--tensor-model-parallel-size 2", "").replace("--save SAVE", "")
    config = parse([*MODEL.split(), *alone.split(), "--load", str(tmp_path)], {}).config
    origin = choose_resume_source(config.checkpoint, ALONE)
    trainer = build_trainer(config, 0, 1, fresh=origin.fresh)
    Checkpointer(trainer).load(origin)
    assert (trainer.iteration, trainer.total_steps) == (3, 5)
    assert all(math.isfinite(loss) for loss in advance(trainer, 2))


def assert_equal(path: Path) -> None:
    """The document's program and our reader agree to the bit."""
    manifest = Manifest.open(path)
    reader = CheckpointReader(manifest)
    tensors, state, config = documented("load")(path)
    assert (state, config, set(tensors)) == (manifest.state, manifest.config, set(reader.names))
    for name, found in tensors.items():
        ours = reader.read(name).reshape(reader.shape(name))
        bits = ours.reshape(-1).view(torch.uint8).numpy()
        assert found.shape == tuple(ours.shape)
        assert np.array_equal(np.ascontiguousarray(found).reshape(-1).view(np.uint8), bits)


def test_the_documented_program_reads_the_fixture() -> None:
    assert_equal(FIXTURES / f"v{VERSION}")


def test_the_documented_program_reads_any(tmp_path: Path) -> None:
    save(tmp_path / "c", samples(2), iteration=2)
    assert_equal(tmp_path / "c")


def test_the_documented_program_supports_every_type(tmp_path: Path) -> None:
    noise = torch.Generator().manual_seed(1)
    tensors = {}
    for name, dtype in DTYPES.items():
        bits = torch.randint(0, 2 if name == "BOOL" else 256, (6 * dtype.itemsize,), dtype=torch.uint8, generator=noise)
        tensors[name] = Sample(bits.view(dtype).reshape(2, 3), (2, 3))
    save(tmp_path / "c", tensors)
    assert {record.dtype for record in Manifest.open(tmp_path / "c").tensors.values()} == set(DTYPES) == set(ITEM_BYTES)
    assert_equal(tmp_path / "c")


def test_the_documented_program_has_teeth(tmp_path: Path) -> None:
    """A changed element is seen: the comparison is not of nothing."""
    save(tmp_path / "c", samples(1))
    manifest = Manifest.open(tmp_path / "c")
    chunk = manifest.tensors["layers.0.weight"].chunks[0]
    before, _, _ = documented("load")(tmp_path / "c")
    with (files_of(tmp_path / "c") / chunk.file).open("r+b") as file:
        file.seek(chunk.offset)
        file.write(b"\x01")
    after, _, _ = documented("load")(tmp_path / "c")
    assert [n for n in before if before[n].tobytes() != after[n].tobytes()] == ["layers.0.weight"]


def test_the_documented_marker() -> None:
    folder = FIXTURES / f"v{VERSION}"
    assert (folder / MARKER).read_text() == checksum((folder / MANIFEST).read_bytes()) + "\n"


def test_state_is_documented() -> None:
    state = Manifest.open(FIXTURES / f"v{VERSION}").state
    for key, value in state.items():
        inner = [f"{key}.{name}" for name in value] if isinstance(value, dict) and key != "written_by" else []
        assert any(f"| `{name}` |" in DOCUMENT for name in [key, *inner])


def test_the_documented_program_reads_token_files(tmp_path: Path) -> None:
    documents = [[5, 6, 7], [], [8], list(range(300))]
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    assert [ids.tolist() for ids in documented("sequences")(tmp_path / "x")] == [d for d in documents if d]
    header = (tmp_path / "x.idx").read_bytes()[:34]
    assert struct.unpack("<9sQBQQ", header) == (b"MMIDIDX\x00\x00", 1, 8, 3, 5)
