"""``--check-config`` reports the same checkpoint and errors as the start itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pretrain_gpt
from megatron.arguments.cli import parse
from megatron.arguments.sources import to_dict
from megatron.checkpoint.format import MANIFEST, MARKER, TensorRecord, encode_manifest, marker_content
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.distributed.launch import world_group
from megatron.layers.parameters import gpt
from megatron.training.checkpointer import choose_resume_source
from megatron.training.resume_source import preview_start, stored_config

ROOT = Path(__file__).parents[3]
FLAGS = "--seq-length 1024 --num-layers 3 --hidden-size 48 --num-attention-heads 4 --norm-epsilon 1e-6 --vocab-size 300"
RUN = ["--mock-data", "--train-iters", "40", "--global-batch-size", "4", "--lr-decay-style", "constant"]
CONFIG = parse([*RUN, *FLAGS.split()], {}).config


def save(folder: Path, iteration: int = 4, config: RunConfig = CONFIG, **state: Any) -> Path:
    """Write a checkpoint ``iter_N`` whose tensors have no elements in any file."""
    counted = {"iteration": iteration, "consumed_samples": 4 * iteration, "optimizer": {"steps": iteration}}
    counted["batches_since"] = {"iteration": 0, "consumed_samples": 0}
    counted["data"] = {"stretches": {"train": [4]}, "fingerprints": {"train": "0"}, "digest": "0"}
    return write_manifest(folder / f"iter_{iteration:07d}", counted | state, config)


def write_manifest(path: Path, state: dict[str, Any], config: RunConfig, layers: int = 3) -> Path:
    model = replace(config.model, num_layers=layers)
    tensors = {name: TensorRecord("F32", spec.shape, spec.view, ()) for name, spec in gpt(model).items()}
    content = encode_manifest(tensors, {}, state, to_dict(config))
    path.mkdir(parents=True)
    (path / MANIFEST).write_bytes(content)
    (path / MARKER).write_bytes(marker_content(content))
    return path


def damage(path: Path) -> None:
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-1])


def outdate(path: Path) -> None:
    """Give it a newer format version."""
    content = (path / MANIFEST).read_bytes().replace(b'"version":1', b'"version":2')
    (path / MANIFEST).write_bytes(content)
    (path / MARKER).write_bytes(marker_content(content))


def unnamed(path: Path) -> None:
    path.rename(path.with_name(path.name + ".tmp"))


def cut_off(path: Path) -> None:
    (path / MARKER).unlink()
    unnamed(path)


FATES = {"whole": lambda path: None, "damaged": damage, "newer": outdate, "cut off": cut_off, "unnamed": unnamed}


def refusal(error: UserError) -> str:
    """Return its code; a missing step beside a checkpoint of a newer version has either of two."""
    code = error.problems[0].code
    return "none" if code in ("E811", "E812") else code


def notes_at_the_start(config: RunConfig) -> str:
    """Return what the run itself would start from, or its error."""
    try:
        origin = choose_resume_source(config.checkpoint, world_group(0, 1))
    except UserError as error:
        return refusal(error)
    return "nothing" if origin.fresh else str(origin.weights or origin.paths[0])


def previewed_notes(config: RunConfig) -> str:
    try:
        notes = preview_start(config, 1).notes
    except UserError as error:
        return refusal(error)
    return next((note.split()[1].rstrip(",") for note in notes if note.startswith("checkpoint: ")), "nothing")


def recalls(options: CheckpointConfig) -> bool:
    """Return True if a checkpoint defines the model."""
    try:
        return stored_config(options) is not None
    except UserError:
        return False


FOLDERS = st.dictionaries(st.sampled_from([2, 4, 6]), st.sampled_from(sorted(FATES)), max_size=3)
LOADS = st.sampled_from([None, "hf:model", "a", "b", "a/iter_0000004", "b/iter_0000004", "copy"])


@given(FOLDERS, FOLDERS, st.booleans(), LOADS, st.sampled_from([None, None, 2, 4]), st.booleans())
@example({4: "cut off"}, {}, True, None, None, False)
@example({4: "cut off"}, {4: "whole"}, True, "b", None, False)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_preview_names_the_checkpoint_of_the_start(
    own: dict[int, str], others: dict[int, str], saves: bool, load: str | None, step: int | None, weights_only: bool
) -> None:
    with TemporaryDirectory() as folder:
        here = Path(folder)
        save(here, 4).rename(here / "copy")
        for name, fates in (("a", own), ("b", others)):
            for iteration, fate in fates.items():
                FATES[fate](save(here / name, iteration))
        options = CheckpointConfig(
            save=f"{here}/a" if saves else None,
            load=load if load in (None, "hf:model") else f"{here}/{load}",
            ckpt_step=step,
            resume_mode="weights-only" if weights_only else "exact",
        )
        config = replace(CONFIG, checkpoint=options)
        start = notes_at_the_start(config)
        assert previewed_notes(config) == start
        assert recalls(options) == (str(here) in start)


def checked(capsys: pytest.CaptureFixture[str], flags: str) -> tuple[int, str, str]:
    """Return status and output of ``--check-config``."""
    status = pretrain_gpt.main([*RUN, "--check-config", *flags.split()])
    return (status, *capsys.readouterr())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_converted_checkpoint_needs_no_flags_of_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    save(Path("converted"))
    status, out, err = checked(capsys, "--load converted --resume-mode weights-only --save mine")
    assert (status, err) == (0, "")
    assert "note: checkpoint: converted/iter_0000004, its tensors not read\n" in out
    assert "\nmodel      3 layers, hidden 48, 4 heads of 12, " in out
    assert "norm_epsilon" not in out
    assert out.endswith("config ok\n")


def test_changes_are_reported_as_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    save(Path("mine"))
    status, out, _ = checked(capsys, "--save mine --micro-batch-size 2 --log-interval 3")
    assert status == 0
    assert "note: --log-interval: checkpoint 10 -> now 3\n" in out
    assert "note: --micro-batch-size: checkpoint 1 -> now 2\n" in out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            "--num-layers 5",
            "E821",
            "3 -> now 5 (the checkpoint is mine/iter_0000004)\n  fix: --num-layers 3",
        ),
        ("--seed 5", "E823", "--seed: checkpoint 1234 -> now 5"),
        ("--lr 5", "E825", "--lr: checkpoint 0.0001 -> now 5"),
        (
            "--resume-mode new-schedule --lr-decay-style linear --lr-warmup-iters 60 --set global_batch_size=8",
            "E403",
            "the warm-up of 464 samples does not end before the decay does, at 304",  # 4 steps of 4, the others of 8
        ),
        ("--ckpt-step 2", "E813", "mine holds newer checkpoints than step 2 (iter_0000004)"),
        ("--ckpt-step 3", "E812", "mine has no checkpoint of step 3; it has 4, 2\n  fix: --ckpt-step 4"),
    ],
)
def test_checkpoints_that_the_start_refuses_are_refused(
    capsys: pytest.CaptureFixture[str], flags: str, code: str, message: str
) -> None:
    save(Path("mine"))
    save(Path("mine"), 2)
    status, out, err = checked(capsys, f"--save mine {flags}")
    assert (status, out) == (2, "")
    assert f"{code} " in err
    assert message in err


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the missing options that a damaged checkpoint would have set."""
    path = save(Path("mine"))
    _, _, err = checked(capsys, "--save mine --num-layers 5 --lr 5")
    assert re.findall("^(E...) ", err, re.MULTILINE) == ["E821", "E825"]
    assert err.endswith("2 problems; docs/troubleshooting.md explains the codes\n")
    damage(path)
    _, _, err = checked(capsys, "--save mine")
    assert re.findall("^(E...) ", err, re.MULTILINE) == ["E811", "E104"]


def test_weights_alone_and_other_tensors_than_the_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_manifest(Path("converted/iter_0000004"), {}, CONFIG)
    write_manifest(Path("theirs/iter_0000004"), {"iteration": 4}, CONFIG, layers=2)
    status, _, err = checked(capsys, "--load converted")
    assert status == 2
    assert "E814 converted/iter_0000004 holds weights, but not the state" in err
    assert "fix: --resume-mode weights-only\n" in err
    status, _, err = checked(capsys, "--load theirs")
    assert status == 2
    assert "E811 no checkpoint in theirs can be used:\n  iter_0000004: lacks: layers.2.input_layernorm.bias, " in err


ODD_STATES: list[tuple[dict[str, Any], str]] = [
    ({"consumed_samples": [4]}, "consumed_samples"),
    ({"consumed_samples": -1}, "consumed_samples"),
    ({"batches_since": {"iteration": 0}}, "batches_since.consumed_samples"),
    ({"data": {}}, "data.stretches, data.fingerprints, data.digest"),
    ({"data": {"stretches": {"train": [1, 2**63]}, "fingerprints": [], "digest": 0}}, "data.stretches.train[], data."),
    ({"losses": {"train": True}}, "losses.train"),
    ({"written_by": {"layout": {"pp": None}}}, "written_by.layout.pp"),
]


@pytest.mark.parametrize(("state", "named"), ODD_STATES, ids=str)
def test_a_checkpoint_with_an_odd_state_is_damaged(
    state: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(Path("theirs"), **state)
    status, _, err = checked(capsys, "--load theirs")
    assert status == 2
    assert f"  iter_0000004: odd or missing in the state of its manifest: {named}" in err


def test_a_start_from_scratch_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = checked(capsys, f"{FLAGS} --save mine")
    assert status == 0
    assert "note: starts from scratch: mine holds no checkpoint\n" in out


def test_a_missing_load_folder_is_noted_but_not_if_its_weights_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    save(Path("runs/mine"))
    Path("empty").mkdir()
    for flags in (
        "--load none",
        "--load empty",
        "--load none --override-opt_param-scheduler --save none",
        "--load none --finetune",
        "--load empty --save empty --finetune --no-load-optim --no-load-rng",
    ):
        status, out, _ = checked(capsys, f"{FLAGS} {flags}")
        assert (status, out.count("note: starts from scratch: ")) == (0, 1), flags
    refused = {
        "--load none --exit-on-missing-checkpoint": "E801",
        "--load runs/mien": "E801",
        "--pretrained-checkpoint none": "E812",
    }
    for line, code in refused.items():
        status, _, err = checked(capsys, f"{FLAGS} {line}")
        assert (status, code in err) == (2, True), line


def test_the_tensors_of_a_hugging_face_model_are_not_read_either(capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs").mkdir()
    GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 301}
    Path("theirs/config.json").write_text(json.dumps(GPT2))
    status, out, _ = checked(capsys, "--load hf:theirs")
    assert status == 0
    assert "note: checkpoint: hf:theirs, its tensors not read\n" in out


def test_the_length_counts_the_steps_already_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """40 steps, 4 of them of 4 samples and 36 of 8."""
    save(Path("mine"))
    _, out, _ = checked(capsys, "--save mine --resume-mode new-schedule --set training.global_batch_size=8")
    assert "\nlength     40 steps, 304 samples, " in out


def test_looking_needs_no_torch(here: Path) -> None:
    save(here / "mine")
    argv = [*RUN, "--check-config", "--save", f"{here}/mine"]
    command = [sys.executable, "-X", "importtime", "pretrain_gpt.py", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "torch" not in {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
