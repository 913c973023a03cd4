"""Checkpoints that other programs wrote: their weights give the logits that those programs computed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

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
