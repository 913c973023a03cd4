"""A checkpoint of a pipeline reads like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.arguments.cli import parse
from megatron.convert.huggingface.config import read_config, read_model_values
from megatron.convert.huggingface.convert import convert_to_huggingface
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.pipeline.schedules import make_schedule
from tests.distributed.resume import run_rank
from tests.kit.pool import Pool
from tests.kit.runs import checkpoint, start, steps, tiny_run
from tests.parity.test_hf import BY_NAME
from tests.unit.convert.folders import ignore, random_weights, write_folder

FLAGS = "--num-layers 3 --params-dtype fp64 --micro-batch-size 1 --save-interval 2 --train-iters 4"
LAYOUT = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert start(tiny_run(folder, f"{FLAGS} --save {folder}/saved")).status == 0
    return folder


@pytest.fixture(scope="module")
def piped(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a pipeline; the file of its schedule is there no more."""
    folder = tmp_path_factory.mktemp("piped")
    make_schedule("interleaved", 2, 2, 4).save(folder / "schedule.csv")
    config = tiny_run(folder, f"{FLAGS} --save {folder}/saved {LAYOUT} {folder}/schedule.csv", 2)
    printed = pool.run(2, run_rank, config)
    assert [(rank.status, rank.err) for rank in printed] == [(0, "")] * 2
    (folder / "schedule.csv").unlink()
    return folder


def test_the_checkpoint_matches_one_process(alone: Path, piped: Path) -> None:
    (got, numbers), (wanted, expected) = (checkpoint(run / "saved/iter_0000004") for run in (piped, alone))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-12)
    digests, others = numbers.pop("digests"), expected.pop("digests")  # of bits, which rounding changes
    assert digests.keys() == others.keys()
    assert numbers == expected


def test_one_process_goes_on_with_it(alone: Path, piped: Path) -> None:
    other = piped / "other"
    printed = start(tiny_run(other, f"{FLAGS} --save {other}/saved --load {piped}/saved --ckpt-step 2"))
    assert (printed.status, printed.err) == (0, "")
    assert "--pipeline-model-parallel-size: checkpoint " in printed.out
    losses = [[steps(run)[step]["lm loss"] for step in (3, 4)] for run in (other, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


FAMILIES = ("gpt-neox", "olmo2", "olmo3", "gemma2", "gemma3", "phi3", "smollm3", "granite", "starcoder2")
SHORT = ("gpt-neox", "gemma3", "granite")
"""Families on ranks; test_hf_convert.py exports all on one process."""
STEP = (
    "--mock-data --seq-length 16 --global-batch-size 4 --train-iters 1 --lr 0 --min-lr 0 --weight-decay 0 --device cpu"
)
GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in FAMILIES])
def test_a_hugging_face_model_survives_a_round_trip_through_four_ranks(pool: Pool, name: str, tmp_path: Path) -> None:
    """A step of size 0 on a grid of TP and stages."""
    model = BY_NAME[name].config()
    weights = random_weights(model)
    folder = write_folder(tmp_path / "hf", model, weights)
    flags = f"{STEP} {GRID} --load hf:{folder} --save {tmp_path}/saved --run-dir {tmp_path}/run"
    config = parse(flags.split(), {"RANK": "0", "WORLD_SIZE": "4"}, read_model=read_model_values).config
    printed = pool.run(4, run_rank, config)
    assert [(rank.status, rank.err) for rank in printed] == [(0, "")] * 4
    manifest, _ = open_checkpoint(tmp_path / "saved")
    convert_to_huggingface(
        SavedModel(manifest), tmp_path / "back", ignore, dtype="fp32", shard_bytes=10**9, checked=False
    )
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], value) for key, value in weights.items())
    configs = [read_config(tmp_path / each) for each in ("hf", "back")]
    assert configs[0] == configs[1]
