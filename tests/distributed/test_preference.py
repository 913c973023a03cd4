"""Preference optimization and distillation, with frozen models, train in every layout like one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.run import RunConfig
from megatron.training.build_model import build_mesh
from megatron.training.frozen_models import frozen_location, open_frozen
from tasks.finetune.precompute import write_teacher
from tests.distributed.grid import FACTORS, case_of, label
from tests.distributed.pairwise import Choice
from tests.distributed.test_layout_matrix import TOLERANCE_FP64, check
from tests.kit.cases import MODEL, Case, compare_with_twin, run_on
from tests.kit.checkpoints import save_model
from tests.kit.pool import Pool
from tests.kit.runs import start, tiny_run
from tests.kit.solo import Solo

PLAIN = {name: values[0] for name, values in FACTORS.items()}
LAYOUTS: list[Choice] = [
    {"dp": 2, "zero": "1", "micro_batch": 2},
    {"tp": "2sp", "dp": 2, "zero": "2", "vocab": 13, "loss_chunk": 7},
    {"tp": "2", "pp": 2, "zero": "0", "recompute": "all modules"},
    {"pp": 2, "vpp": 2, "schedule": "interleaved", "dp": 2, "zero": "3 freed", "untied": True, "layers": 3},
    {"pp": 2, "schedule": "zb-h1", "tp": "2sp", "samples": 8},
    {"pp": 2, "vpp": 2, "schedule": "zb-v", "cp": 2, "layers": 3, "untied": False},
    {"cp": 2, "cp_type": "all_gather", "dp": 2, "zero": "3 kept"},
    {"cp": 4, "tp": "2sp", "dropout": "hidden"},
    {"cp": 3, "cp_type": "p2p", "dp": 2, "zero": "2", "positions": "rope"},
    {"cp": 2, "cp_type": "a2a", "tp": "2", "pp": 2, "positions": "rope", "loss_chunk": 7},
    {"dp": 2, "experts": "two of four", "ep": 2, "tp": "2sp", "biases": "no"},
]
DPO: dict[str, Any] = {"objective": "dpo", "dpo_beta": 0.5}
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP_CP = "--pipeline-model-parallel-size 2 --context-parallel-size 2"
DISTILLATION: dict[str, Any] = {"objective": "distillation", "distillation_label_weight": 0.3}


def in_layouts(choices: list[Choice], *short: int) -> pytest.MarkDecorator:
    """Run a test in these layouts; CI runs only the ones with these numbers."""
    layouts = [
        pytest.param(choice, marks=() if LAYOUTS.index(choice) in short else pytest.mark.slow) for choice in choices
    ]
    return pytest.mark.parametrize("choice", layouts, ids=lambda choice: label(PLAIN | choice))


def case(choice: Mapping[str, Any], options: Mapping[str, Any]) -> Case:
    found = case_of(PLAIN | choice)
    return replace(found, training=replace(found.training, **options))


def trains_like_one_process(pool: Pool, case: Case) -> None:
    steps = run_on(pool, case)
    check(steps, compare_with_twin(steps, case), TOLERANCE_FP64)
    assert steps[0].loss != steps[1].loss


@in_layouts(LAYOUTS, 1, 3, 5, 8, 10)
def test_preferences_in_every_layout(pool: Pool, choice: Choice) -> None:
    """The variants of the loss in turn."""
    kind = ("sigmoid", "ipo", "sigmoid_norm", "kto_pair")[LAYOUTS.index(choice) % 4]
    trains_like_one_process(pool, case(choice, DPO | {"dpo_loss_type": kind}))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of other sizes than the one in training, by their vocabulary."""
    folders = {}
    for vocab in (128, 13):
        model = replace(MODEL, num_layers=3, hidden_size=16, ffn_hidden_size=24, vocab_size=vocab)
        folders[f"{vocab}"] = tmp_path_factory.mktemp(f"frozen{vocab}")
        save_model(Solo.build(model).chunk, folders[f"{vocab}"], params_dtype="fp64")
    return folders


@in_layouts(LAYOUTS, 1, 3, 5)
def test_distillation_in_every_layout(pool: Pool, choice: Choice, frozen: dict[str, Path]) -> None:
    """The teacher has another size, and TP ranks that hold fewer tokens than are taken of each position."""
    vocab = (PLAIN | choice)["vocab"]
    options = DISTILLATION | {"teacher_model": str(frozen[str(vocab)]), "distillation_top_k": 8}
    options |= {"distillation_temperature": 1.0 + LAYOUTS.index(choice) % 2}
    trains_like_one_process(pool, case(choice, options))


@in_layouts(LAYOUTS[1::3], 1)
def test_a_reference_model_in_every_layout(pool: Pool, choice: Choice, frozen: dict[str, Path]) -> None:
    location = str(frozen[str((PLAIN | choice)["vocab"])])
    trains_like_one_process(pool, case(choice, DPO | {"reference_model": location}))


@in_layouts(LAYOUTS[:-1:2], 4, 6)
def test_the_model_without_its_adapters_is_the_reference(pool: Pool, choice: Choice) -> None:
    """At first the policy is the reference; then only the adapters differ."""
    found = case(choice, DPO)
    found = replace(found, model=replace(found.model, lora_rank=2), steps=3)
    steps = run_on(pool, found)
    check(steps, compare_with_twin(steps, found), TOLERANCE_FP64)
    assert steps[0].loss == pytest.approx(math.log(2.0), rel=1e-12)
    assert steps[2].loss != steps[1].loss != steps[0].loss


def write_in_advance(rank: int, world_size: int, config: RunConfig, output: Path) -> None:
    mesh = build_mesh(config, rank, world_size)
    write_teacher(config, open_frozen(config, mesh, torch.device("cpu"), frozen_location(config)), output)


@pytest.mark.parametrize("layout", [PP_CP, *(pytest.param(x, marks=pytest.mark.slow) for x in (TP_SP, ""))])
def test_logits_computed_in_advance_are_the_same_in_every_layout(pool: Pool, tmp_path: Path, layout: str) -> None:
    """On 4 ranks as on 1, of which each writes its own rows of one file."""
    model = "--vocab-size 257 --seq-length 16 --max-position-embeddings 16 --fp64 --global-batch-size 8"
    saved = tmp_path / "base"
    assert start(tiny_run(tmp_path / "run", f"{model} --train-iters 1 --save {saved}")).status == 0
    flags = f"{model} --objective distillation --teacher-model {saved} --eval-iters 1"
    one, four = tmp_path / "one", tmp_path / "four"
    write_in_advance(0, 1, tiny_run(tmp_path / "run", flags), one)
    pool.run(4, write_in_advance, tiny_run(tmp_path / "run", f"{flags} {layout}", 4), four)
    assert (one / "teacher.json").read_text() == (four / "teacher.json").read_text()
    for split, kind in itertools.product(("train", "valid"), ("logits", "ids")):
        ours, theirs = (np.load(folder / f"{split}.{kind}.npy") for folder in (one, four))
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
        assert ours.any(axis=-1).all(), "a row was not written"
