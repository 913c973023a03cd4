"""Checkpoints that other programs wrote: their weights give the logits that those programs computed."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from megatron.checkpoint.errors import CheckpointError
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.convert.frameworks.dcp import read_dcp
from megatron.convert.frameworks.names import huggingface_names
from megatron.convert.frameworks.pieces import AssembledTensor, PartialTensors
from megatron.convert.huggingface.check import run_own_model
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.convert.sources import open_source

ARCHIVES = Path(__file__).parents[2] / "golden" / "other_frameworks"
WRITTEN = {
    "fsdp2": "dcp:",
    "torchtitan": "dcp:",
    "deepspeed1": "deepspeed:",
    "deepspeed2": "deepspeed:",
    "deepspeed3": "deepspeed:",
    "nanotron": "nanotron:",
}
"""Checkpoints that ``write.py`` made, and the schemes that read them."""

IN_BF16 = ("deepspeed1", "deepspeed2")
"""Those of runs that computed in bf16, of which ZeRO has the weights in fp32."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all recorded checkpoints."""
    folder = tmp_path_factory.mktemp("written")
    for name in WRITTEN:
        with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", WRITTEN)
def test_the_weights_give_the_logits_of_the_program_that_wrote_them(written: Path, name: str) -> None:
    source = open_source(f"{WRITTEN[name]}{written / name}")
    saved = torch.load(written / name / "logits.pt")
    tokens = saved["tokens"]
    logits = run_own_model(source.model, source, tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).logits
    error = (logits - saved["logits"]).abs().max() / saved["logits"].abs().max()
    assert error < (0.1 if name in IN_BF16 else 1e-5), error


@pytest.mark.parametrize("name", IN_BF16)
def test_partitions_of_zero_round_to_the_weights_in_bf16(written: Path, name: str) -> None:
    (path,) = (written / name).glob("*/mp_rank_00_model_states.pt")
    source = open_source(f"deepspeed:{path.parent}")
    assert isinstance(source, HuggingFaceWeights)
    weights = torch.load(path, weights_only=True)["module"]
    for ours, parts in source.mappings.items():
        spec = source.specs[ours]
        for part in parts:
            read = source.read(ours, spec.view, part.box)
            assert read.dtype == torch.float32
            assert torch.equal(read.bfloat16(), part.arrange(weights[part.name])), part.name


class Command:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def drop_one_file(pattern: str) -> Callable[[Path], None]:
    return lambda folder: sorted(folder.rglob(pattern))[-1].unlink()


def cut_one_file(pattern: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = sorted(folder.rglob(pattern))[-1]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return cut


def plant_code(pattern: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = sorted(folder.rglob(pattern))[-1]
        if path.suffix == ".pt":
            torch.save({"module": Command()}, path)
        else:
            path.write_bytes(pickle.dumps(Command()))

    return plant


def move_out(pattern: str) -> Callable[[Path], None]:
    def move(folder: Path) -> None:
        path, outside = sorted(folder.rglob(pattern))[0], folder.parent / "outside"
        outside.mkdir()
        shutil.move(path, outside / "file")
        path.symlink_to(outside / "file")

    return move


def link_tokenizer(folder: Path) -> None:
    (folder.parent / "secret").write_text("{}")
    (folder / "tokenizer.json").symlink_to(folder.parent / "secret")


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("fsdp2", drop_config, "E850"),
    ("fsdp2", drop_one_file("*.distcp"), "lacks __1_0.distcp"),
    ("fsdp2", cut_one_file("*.distcp"), "which has"),
    ("fsdp2", cut_one_file(".metadata"), "is damaged"),
    ("fsdp2", plant_code(".metadata"), "names posix.system"),
    ("deepspeed1", drop_one_file("*optim_states.pt"), "lacks zero_pp_rank_1"),
    ("deepspeed3", cut_one_file("*optim_states.pt"), "is truncated"),
    ("deepspeed3", plant_code("*model_states.pt"), "names posix.system"),
    ("nanotron", drop_one_file("*tp-rank-1*"), "does not hold all of"),
    ("nanotron", cut_one_file("*tp-rank-1*"), "is not a safetensors file"),
    ("nanotron", move_out("model_*.safetensors"), "E853"),
    ("nanotron", move_out("2"), "E853"),
    ("fsdp2", move_out(".metadata"), "E853"),
    ("deepspeed1", move_out("*optim_states.pt"), "E853"),
    ("deepspeed1", link_tokenizer, "E853"),
]
"""Checkpoints, what becomes of them, and words of the error."""


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_a_damaged_checkpoint_is_refused(
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path], None],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(written / name, tmp_path / name)
    damage(tmp_path / name)
    with pytest.raises((CheckpointError, UserError), match=re.escape(words)):
        open_source(f"{WRITTEN[name]}{tmp_path / name}")
    assert not (tmp_path / "executed").exists()


def test_a_rank_without_rows_of_a_tensor_writes_an_empty_box(tmp_path: Path) -> None:
    """As FSDP2 does for a tensor with fewer rows than ranks."""
    dcp.save({"a": torch.ones(2, 3), "b": torch.ones(0)}, checkpoint_id=tmp_path)
    table: dcp.Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    entry = table.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.append(ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((0, 3))))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    found = read_dcp(tmp_path)
    assert [*found] == ["a"]
    assert torch.equal(found["a"].tensor("a"), torch.ones(2, 3))


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ((EMBEDDING, f"ema.{EMBEDDING}"), 0),
        ((f"ema.{EMBEDDING}", f"app.model.{EMBEDDING}", f"app.model.draft.{EMBEDDING}"), 1),
        ((f"ema_model.{EMBEDDING}", f"model._orig_mod.{EMBEDDING}"), 1),
        ((f"net.{EMBEDDING}", f"ema.{EMBEDDING}"), "several models"),
        ((f"policy.{EMBEDDING}", f"ref.{EMBEDDING}"), "several models"),
        ((EMBEDDING, f"_orig_mod.{EMBEDDING}"), "names of wrappers"),
        ((f"net.{EMBEDDING}",), 0),
    ],
)
def test_the_model_that_is_trained_is_read(keys: Sequence[str], read: int | str) -> None:
    tensors = {key: AssembledTensor(torch.float32, (place,), ()) for place, key in enumerate(keys)}

    def names() -> PartialTensors:
        return huggingface_names(tensors, "llama", ModelConfig(), "model.", "DIR")

    if isinstance(read, str):
        with pytest.raises(CheckpointError, match=read):
            names()
    else:
        assert names()[EMBEDDING].shape("") == (read,)
