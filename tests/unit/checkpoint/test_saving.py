"""A checkpoint is published only if all its files are still there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint import publish
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.format import MANIFEST, Manifest
from megatron.checkpoint.verify import list_damage
from tests.unit.checkpoint.samples import save, small


def cut(path: Path) -> None:
    os.truncate(path, 1)


@pytest.mark.parametrize("name", ["tensors_00000.safetensors", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize(("change", "seen"), [(os.unlink, "is missing"), (cut, "has 1 bytes")])
def test_a_save_disturbed_by_another_process_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None], seen: str
) -> None:
    """Two processes save the same step: one recreates the folder while the other writes."""
    path, real = tmp_path / "iter_0000002", publish.write_file
    save(path, small(), iteration=2)

    def disturbed(file: Path, content: bytes) -> None:
        if file.name == MANIFEST:
            change(file.parent / name)
        real(file, content)

    monkeypatch.setattr(publish, "write_file", disturbed)
    with pytest.raises(StorageError, match=rf"{re.escape(name)} {seen} where \d+ bytes were written"):
        save(path, small(), iteration=3)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    manifest = Manifest.open(path)
    assert manifest.state == {"iteration": 2}
    assert list(list_damage(manifest)) == []
