"""Resuming: a killed run ends like an undisturbed one; the choice of a checkpoint, its content, and changes of options.

What ``--check-config`` reports too is in ``test_resume_preview``.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.checkpoint.format import MANIFEST, MARKER
from megatron.config.run import RunConfig
from megatron.convert.huggingface.convert import convert_from_huggingface
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import SampleOrder, build_sample_order
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.training import checkpoint_contents, checkpointer, main
from megatron.training.build import build_trainer
from megatron.training.main import new_run_id, previous_run_id
from megatron.training.trainer import Trainer
from tests.kit.runs import (
    FLAGS,
    Outcome,
    before_step,
    checkpoint,
    column,
    differences,
    kill,
    misread,
    saved_steps,
    start,
    steps,
    tiny_run,
)
from tests.unit.checkpoint.samples import file_of, flip, forge
from tests.unit.convert.folders import opened, random_weights, write_folder

STEPS = 9
LENGTH = f"--train-iters {STEPS}"
"""Not a multiple of the save interval: the last checkpoint is of the end."""


def run_of(folder: Path, flags: str = "") -> RunConfig:
    """A run of 6 steps, unless ``flags`` have another length, that saves every 2."""
    return tiny_run(folder, f"--micro-batch-size 2 --save {folder}/saved --save-interval 2 {flags}")


def go_on(folder: Path, flags: str = "") -> Outcome:
    return start(run_of(folder, flags))


# ---- Exact to the bit


def check_twins(folder: Path, flags: str, *kills: int) -> Path:
    """Compare a run with the same run killed in the steps ``kills``; return the folder of the killed run."""
    whole, parts = folder / "whole", folder / "parts"
    uninterrupted = go_on(whole, f"{LENGTH} {flags}")
    assert (uninterrupted.status, uninterrupted.err) == (0, "")
    read: dict[int, Any] = {}
    for i, number in enumerate((*kills, 0)):
        printed = start(run_of(parts, f"{LENGTH} {flags}"), before_step(number, kill))
        assert (printed.status, printed.err) == (None if number else 0, "")
        assert ("resumed from" in printed.out) == (i > 0)
        read |= printed.samples
    assert read == uninterrupted.samples
    assert steps(parts) == steps(whole)
    assert sorted(read) == sorted(steps(whole)) == [*range(1, STEPS + 1)]
    for step in (*range(2, STEPS, 2), STEPS):
        path = f"saved/iter_{step:07d}"
        assert differences(parts / path, whole / path) == []
    return parts


def write_documents(prefix: Path, seed: int = 0) -> str:
    """Write a small dataset of random documents, which a run reads twice; return its flags."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for _ in range(40):
            writer.add_document(random.integers(0, 31, 5).tolist())
    return f"--no-mock-data --data-path {prefix} --split 30,10"


RUNS = {
    "bf16 sgd, untied, ramp": "--bf16 --optimizer sgd --lr-decay-style WSD --lr-wsd-decay-iters 3 --swiglu "
    "--untie-embeddings-and-output-weights --normalization RMSNorm --disable-bias-linear "
    "--rampup-batch-size 2 2 16 --global-batch-size 6",
    "fp64, rope, recompute": "--params-dtype fp64 --position-embedding-type rope --num-query-groups 1 "
    "--recompute-granularity full --hidden-dropout 0.1 --lr-warmup-iters 3",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    check_twins(tmp_path, RUNS[name], random.Random(name).randrange(3, STEPS + 1))


def test_killed_in_several_starts_with_skipped_steps(tmp_path: Path) -> None:
    fp16 = "--fp16 --initial-loss-scale 1e13 --hysteresis 1 --loss-scale-window 2 --hidden-dropout 0.1"
    parts = check_twins(tmp_path, fp16, 3, 4, 9)
    skipped = {step for step, numbers in steps(parts).items() if numbers["skipped-iterations"]}
    assert min(skipped) < 4 < max(skipped)
    _, numbers = checkpoint(parts / "saved/iter_0000004")
    assert numbers["optimizer"]["steps"] == 4 - len([step for step in skipped if step <= 4])
    assert numbers["loss_scaler"].keys() == {"scale", "good_steps", "lives"}


def test_into_another_epoch_with_evaluations(tmp_path: Path) -> None:
    decay = "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.6"
    flags = f"{decay} --hidden-dropout 0.1 --attention-dropout 0.1 --eval-interval 4 --eval-iters 1"
    parts = check_twins(tmp_path, f"{write_documents(tmp_path / 'documents')} {flags}", 6)
    (summary,) = {text for text in column(parts, "text", "text") if "epochs of" in text}
    assert "288 tokens = 1.9" in summary


def test_another_micro_batch_size_is_the_same_run_up_to_rounding(tmp_path: Path) -> None:
    fp64 = "--params-dtype fp64 --hidden-dropout 0.1"
    go_on(tmp_path / "whole", fp64)
    start(run_of(tmp_path / "parts", fp64), before_step(6, kill))
    printed = go_on(tmp_path / "parts", f"{fp64} --micro-batch-size 4 --recompute-granularity full")
    assert "--micro-batch-size: checkpoint 2 -> now 4" in printed.out
    losses = [[numbers["lm loss"] for numbers in steps(tmp_path / run).values()] for run in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_fp16_after_bf16_begins_with_its_own_loss_scale(tmp_path: Path) -> None:
    start(run_of(tmp_path, "--bf16"), before_step(5, kill))
    printed = go_on(tmp_path, "--fp16 --initial-loss-scale 1024")
    assert "--params-dtype: checkpoint bf16 -> now fp16" in printed.out
    assert (printed.status, steps(tmp_path)[5]["loss-scale"]) == (0, 1024.0)


# ---- The same samples


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its last step, after the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("killed")
    start(run_of(folder), before_step(6, kill))
    return folder


@pytest.fixture
def killed(killed_run: Path, tmp_path: Path) -> Path:
    """A copy of the killed run."""
    shutil.copytree(killed_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def reading_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``killed_run``, of a run that reads documents."""
    folder = tmp_path_factory.mktemp("reading")
    start(run_of(folder, write_documents(folder / "documents") + " --eval-iters 1"), before_step(6, kill))
    return folder


@pytest.fixture
def reading(reading_run: Path, tmp_path: Path) -> tuple[Path, str]:
    """A copy of that run, and its flags."""
    folder = Path(shutil.copytree(reading_run, tmp_path / "run"))
    return folder, write_documents(folder / "documents") + " --eval-iters 1"


def test_samples_that_are_not_the_stream_s_are_noticed_at_the_save(tmp_path: Path) -> None:
    printed = start(run_of(tmp_path), before_step(4, misread))
    assert printed.status == 1
    assert "RuntimeError: the samples read up to step 4 are not those of the sample stream" in printed.err
    assert saved_steps(tmp_path / "saved") == [2]


def test_other_documents_are_refused_and_the_offered_fix_works(
    reading: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, flags = reading
    other = write_documents(folder / "others", seed=1)
    refused = go_on(folder, other)
    assert refused.status == 2
    assert "E815 the training data are not those of the checkpoint: other files, or another order\n" in refused.err
    assert saved_steps(folder / "saved") == [2, 4]
    check = [*FLAGS.split(), *f"--micro-batch-size 2 --save {folder}/saved --save-interval 2".split(), "--check-config"]
    assert pretrain_gpt.main([*check, *other.split()]) == 2
    assert "E815 the training data are not those of the checkpoint" in capsys.readouterr().err
    assert pretrain_gpt.main([*check, *flags.split()]) == 0
    offered = next(fix for fix in refused.err.split("fix: ")[1].splitlines()[0].split(" | ") if "weights-only" in fix)
    assert go_on(folder, f"{other} {offered}").status == 0


def test_data_that_changed_in_their_validation_part_are_refused(reading: tuple[Path, str]) -> None:
    """Only the last document has changed, of which no sample was consumed; the training part might have changed too."""
    folder, flags = reading
    path = folder / "documents.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    printed = go_on(folder, flags)
    assert printed.status == 2
    saved = folder / "saved"
    assert "E815 the training and validation data are not those of the checkpoint" in printed.err
    anew = f"--load {saved} --save {saved}-new --resume-mode weights-only"
    assert re.search(rf"fix: --data-path THE_SAME_DATA \| .*--resume-mode new-phase \| {anew}\n", printed.err)


def test_the_same_samples_in_another_order_are_refused(reading: tuple[Path, str]) -> None:
    """As from a version with another shuffle: no option and no file has changed."""

    def otherwise(lengths: Any, part: range, samples: int, seq_length: int, seed: int) -> SampleOrder:
        return build_sample_order(lengths, part, samples, seq_length, seed + 7)

    folder, flags = reading
    printed = start(run_of(folder, flags), patch("megatron.data.build.build_sample_order", otherwise))
    assert (printed.status, "E815 the training data" in printed.err) == (2, True)


def test_the_same_documents_elsewhere_are_the_same_samples(reading: tuple[Path, str]) -> None:
    folder, _ = reading
    printed = go_on(folder, write_documents(folder / "moved") + " --eval-iters 1")
    assert (printed.status, printed.err) == (0, "")
    assert f" -> now {folder}/moved" in printed.out


def per_split(folder: Path, **files: str) -> str:
    """Write a file for each split, with content that depends on its name; return the flags."""
    for name in files.values():
        write_documents(folder / name, seed=ord(name))
    paths = " ".join(f"--{split}-data-path {folder / name}" for split, name in files.items())
    return f"--no-mock-data {paths} --eval-iters 1 --eval-interval 3"


def test_other_evaluation_data_are_noted_and_training_resumes_unchanged(tmp_path: Path) -> None:
    before = per_split(tmp_path, train="a", valid="b", test="c")
    after = per_split(tmp_path, train="a", valid="c", test="b")
    go_on(tmp_path / "whole", before)
    start(run_of(tmp_path / "parts", before), before_step(6, kill))
    printed = go_on(tmp_path / "parts", after)
    assert (printed.status, printed.err) == (0, "")
    sentence = "the validation and test data are not those of the checkpoint: losses on them cannot be compared with"
    assert printed.out.count(sentence) == 1
    assert differences(*(tmp_path / run / "saved/iter_0000006" for run in ("parts", "whole"))) == ["data", "losses"]
    again = go_on(tmp_path / "parts", after)
    assert (again.status, sentence in again.out) == (0, False), "the last checkpoint knows the files of now"


# ---- Damage


TENSORS = "tensors_00000.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a bit flipped": (flip, TENSORS, "flipped"),  # found when tensors are read
    "missing": (Path.unlink, TENSORS, "tensors_00000.safetensors is missing"),
    "manifest flipped": (flip, MANIFEST, "flipped bytes or is truncated"),
    "marker missing": (Path.unlink, MARKER, "has no COMPLETE"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_replaced(killed: Path, how: str) -> None:
    damage, name, why = DAMAGE[how]
    damage(file_of(killed / "saved/iter_0000004", name))
    printed = go_on(killed)
    assert (printed.status, printed.err, sorted(printed.samples)) == (0, "", [3, 4, 5, 6])
    (message,) = re.findall(r"^passed over (.*)$", printed.out, re.MULTILINE)
    assert message.startswith(f"{killed}/saved/iter_0000004: ")
    assert why in message
    assert f"resumed from {killed}/saved/iter_0000002: step 2, 8 samples" in printed.out
    assert saved_steps(killed / "saved") == [2, 4, 6]


def test_a_checkpoint_in_which_a_component_has_an_odd_state_is_passed_over(tmp_path: Path) -> None:
    odd: dict[str, tuple[Any, str]] = {
        "optimizer": ({}, "optimizer.steps"),
        "loss_scaler": ({"scale": True, "good_steps": 0, "lives": -1}, "loss_scaler.scale"),
        "spikes": ({"losses": [1, 2.5, "3"], "grad_norms": []}, "spikes.losses[]"),
        "goodput": (1, "goodput"),
    }
    flags = "--fp16 --skip-spikes 3 --save-interval 1"
    start(run_of(tmp_path, flags), before_step(6, kill))
    for step, (name, (state, _)) in enumerate(odd.items(), 2):
        forge(tmp_path / f"saved/iter_{step:07d}", partial(with_state, name, state))
    printed = go_on(tmp_path, flags)
    assert (printed.status, sorted(printed.samples)) == (0, [2, 3, 4, 5, 6])
    reasons = re.findall(r"^passed over .*: odd or missing in the state of its manifest: (.*)$", printed.out, re.M)
    assert reasons == [named for _, named in reversed(odd.values())]


def with_state(name: str, state: Any, content: bytes) -> bytes:
    """Replace the state of a component in a manifest."""
    manifest = json.loads(content)
    manifest["state"][name] = state
    return json.dumps(manifest).encode()


def test_when_all_are_damaged_nothing_is_begun(killed: Path) -> None:
    """One is found to be when its manifest is read, the other when its tensors are."""
    flip(file_of(killed / "saved/iter_0000002", TENSORS))
    flip(file_of(killed / "saved/iter_0000004", MANIFEST))
    printed = go_on(killed)
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith("error: E811 no checkpoint ")
    assert printed.err.count("flipped") == 2


def test_a_newer_damaged_checkpoint_removes_no_checkpoint_of_the_run(killed: Path) -> None:
    flip(file_of(killed / "saved/iter_0000004", TENSORS))
    printed = start(run_of(killed, "--keep-last 1 --save-interval 1"), before_step(4, kill))
    assert sorted(printed.samples) == [3]
    again = go_on(killed, "--keep-last 1 --save-interval 1")
    assert (again.status, sorted(again.samples)) == (0, [4, 5, 6])
    assert saved_steps(killed / "saved") == [6]


def test_a_damaged_requested_step_is_not_replaced_by_another(killed: Path) -> None:
    file_of(killed / "saved/iter_0000004", TENSORS).unlink()
    printed = go_on(killed, "--ckpt-step 4")
    assert (printed.status, printed.samples) == (2, {})
    assert "E811 no checkpoint of step 4 in " in printed.err
    assert "fix: --ckpt-step 2 | --save ANOTHER" in printed.err


def test_the_rest_of_a_first_save_is_no_checkpoint(tmp_path: Path) -> None:
    rest = tmp_path / "saved/iter_0000002.tmp"
    rest.mkdir(parents=True)
    (rest / TENSORS).write_bytes(b"half")
    printed = go_on(tmp_path)
    assert (printed.status, sorted(printed.samples)) == (0, [1, 2, 3, 4, 5, 6])
    assert "removed iter_0000002.tmp: its save was interrupted\n" in printed.out
    assert not rest.exists()


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(killed: Path) -> None:
    """It is not damaged: resuming from the previous one would replace it."""
    path = killed / "saved/iter_0000004"
    forge(path, lambda content: content.replace(b'"version":1', b'"version":99'))
    printed = go_on(killed)
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith(f"error: E811 {path} was written by a newer version: ")


# ---- From elsewhere


def test_load_from_another_folder(killed: Path, tmp_path: Path) -> None:
    """Into a new folder, from a chosen step; once it has checkpoints of its own, the others may be gone."""
    other = tmp_path / "other"
    flags = f"--load {killed}/saved --ckpt-step 2"
    printed = start(run_of(other, flags), before_step(6, kill))
    assert sorted(printed.samples) == [3, 4, 5]
    assert f"resumed from {killed}/saved/iter_0000002: step 2, 8 samples" in printed.out
    go_on(killed)
    whole = (killed / "saved/iter_0000006").rename(killed / "whole")
    shutil.rmtree(killed / "saved")
    again = go_on(other, flags)
    assert sorted(again.samples) == [5, 6]
    assert f"resumed from {other}/saved/iter_0000004: step 4, 16 samples" in again.out
    assert differences(other / "saved/iter_0000006", whole) == []


def test_load_a_copy_of_a_checkpoint_under_a_name_of_its_own(killed: Path, tmp_path: Path) -> None:
    best = Path(shutil.copytree(killed / "saved/iter_0000002", killed / "best"))
    printed = start(tiny_run(tmp_path / "other", f"--micro-batch-size 2 --load {best}"))  # without saving
    assert (printed.status, sorted(printed.samples)) == (0, [3, 4, 5, 6])
    assert f"resumed from {best}: step 2, 8 samples" in printed.out
    wrong_step = go_on(tmp_path / "new", f"--load {best} --ckpt-step 4").err
    assert f"E812 {best} has no checkpoint of step 4; it has 2\n" in wrong_step
    file_of(best, TENSORS).unlink()
    assert f"E811 no checkpoint in {best} can be used:\n  best: " in go_on(tmp_path / "last", f"--load {best}").err


def test_only_the_weights(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    begun: list[tuple[dict[str, Tensor], dict[str, Tensor], int]] = []

    def note(trainer: Trainer) -> None:
        weights = {name: value.clone() for name, value in trainer.optimizer.main_params.items()}
        (moments,) = trainer.optimizer.state().values()
        begun.append((weights, {name: value.clone() for name, value in moments.items()}, trainer.consumed_samples))

    flags = f"--load {killed}/saved --resume-mode weights-only --lr 5e-3 --optimizer sgd --seed 3"
    with before_step(1, note):
        printed = go_on(other, flags)
    assert (printed.status, sorted(printed.samples)) == (0, [1, 2, 3, 4, 5, 6])
    assert f"weights from {killed}/saved/iter_0000004" in printed.out
    tensors, _ = checkpoint(killed / "saved/iter_0000004")
    ((weights, moments, consumed),) = begun
    assert all(torch.equal(value[: len(tensors[name])], tensors[name]) for name, value in weights.items())
    assert consumed == 0
    assert all(bool((value == 0).all()) for value in moments.values())
    assert go_on(other, flags).samples == {}


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A Hugging Face folder of the tiny runs' model, and its weights under transformers' names."""
    model = tiny_run(tmp_path).model
    weights = random_weights(model)
    return write_folder(tmp_path / "gpt2", model, weights), weights


def test_a_hugging_face_model_is_where_a_run_begins_and_only_there(
    tmp_path: Path, gpt2: tuple[Path, dict[str, Tensor]]
) -> None:
    folder, weights = gpt2
    begun: list[Tensor] = []

    def note(trainer: Trainer) -> None:
        begun.append(trainer.optimizer.main_params["embedding.position_embeddings.weight"].clone())

    with before_step(1, note):
        printed = start(run_of(tmp_path / "run", f"--load hf:{folder}"), before_step(4, kill))
    assert f"weights from hf:{folder}" in printed.out
    assert torch.equal(begun[0], weights["transformer.wpe.weight"])
    again = go_on(tmp_path / "run", f"--load hf:{folder}")
    assert (again.status, sorted(again.samples), len(begun)) == (0, [3, 4, 5, 6], 1)


def test_sizes_of_a_hugging_face_model_are_compared_before_they_are_built(
    tmp_path: Path, gpt2: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run(tmp_path / "run", f"--load hf:{gpt2[0]}")
    large = replace(config, model=replace(config.model, hidden_size=10**6))
    monkeypatch.delattr(main, "build_trainer")
    refused = start(large)
    assert refused.status == 1
    assert "holds tensors of another shape than its configuration asks for" in refused.err


def test_converted_weights_cannot_be_resumed_from(tmp_path: Path, gpt2: tuple[Path, dict[str, Tensor]]) -> None:
    convert_from_huggingface(opened(gpt2[0]), tmp_path / "converted", lambda name, done, total: None, checked=False)
    flags = f"--load {tmp_path}/converted"
    assert go_on(tmp_path / "run", flags).err.startswith("error: E814 ")
    assert sorted(go_on(tmp_path / "run", f"{flags} --resume-mode weights-only").samples) == [1, 2, 3, 4, 5, 6]
    own = start(tiny_run(tmp_path / "run", f"--save {tmp_path}/converted"))
    assert f"fix: --load {tmp_path}/converted --save {tmp_path}/converted-new --resume-mode weights-only" in own.err


OURS = {"tokenizer/tokenizer.json": b"ours"}


@pytest.mark.parametrize(
    ("theirs", "kept", "noted"),
    [
        (OURS, {"eos_token_id": 299, "pad_token_id": 1, "top_k": 5}, False),
        ({"tokenizer/tokenizer.json": b"theirs", "tokenizer/merges.txt": b""}, {"top_k": 5}, True),
        ({}, {"top_k": 5}, False),
    ],
)
def test_ids_of_another_tokenizer_do_not_stay(
    tmp_path: Path, theirs: dict[str, Path | bytes], kept: dict[str, int], noted: bool
) -> None:
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 299, "pad_token_id": 1, "top_k": 5}))
    carried = {**theirs, generation.name: generation}
    assert checkpointer.files_to_carry({}, carried) == carried
    assert checkpointer.tokenizer_notes({}, carried) == []
    found = checkpointer.files_to_carry(OURS, carried)
    assert found.keys() == {"tokenizer/tokenizer.json", generation.name}
    content = found[generation.name]
    assert json.loads(content if isinstance(content, bytes) else content.read_bytes()) == kept
    assert bool(checkpointer.tokenizer_notes(OURS, carried)) is noted
    if not noted and theirs:
        template = {"tokenizer/chat_template.jinja": b"{{ x }}"}
        assert checkpointer.files_to_carry(OURS, carried | template).items() >= template.items()
    generation.write_text("3")
    if theirs != OURS:
        with pytest.raises(DataError, match=r"generation_config\.json of the loaded model is not a JSON object"):
            checkpointer.files_to_carry(OURS, carried)


# ---- Another schedule

NEW_SCHEDULES = {
    "--global-batch-size 8 --train-iters 7": ([8, 8, 8], 40),
    "--train-iters 5": ([4], 20),
    "--train-iters null --train-samples 30 --global-batch-size 6": ([6, 6], 28),
}
"""Flags: batch sizes after step 4, and consumed samples at the end."""


@pytest.mark.parametrize("change", NEW_SCHEDULES)
def test_a_new_schedule(killed: Path, change: str) -> None:
    batches, consumed = NEW_SCHEDULES[change]
    refused = go_on(killed, change)
    assert (refused.status, refused.samples) == (2, {})
    assert refused.err.startswith("error: E825 ")
    assert re.search(r"fix: .*--resume-mode new-schedule", refused.err)
    printed = go_on(killed, f"{change} --resume-mode new-schedule")
    sizes = [len(printed.samples[step]) for step in sorted(printed.samples)]
    assert (printed.status, printed.err, sizes) == (0, "", batches)
    assert "-> now" in printed.out
    read = [number for step in sorted(printed.samples) for number, _ in printed.samples[step]]
    assert read == [*range(16, consumed)]  # where it was, with none left out
    _, state = checkpoint(sorted((killed / "saved").glob("iter_*"))[-1])
    assert state["consumed_samples"] == consumed
    assert f"{len(batches) + 4}/{len(batches) + 4} " in printed.out
    again = go_on(killed, change)  # and from now on it is its own
    assert (again.status, again.samples) == (0, {})


def test_a_longer_run_begins_with_the_samples_of_the_shorter_one(killed: Path, tmp_path: Path) -> None:
    whole = go_on(killed).samples
    longer = go_on(killed, "--train-iters 9 --resume-mode new-schedule")
    assert [number for step in (7, 8, 9) for number, _ in longer.samples[step]] == [*range(24, 36)]
    _, state = checkpoint(killed / "saved/iter_0000009")
    assert state["data"]["stretches"]["train"] == [24, 12]
    flags = f"--load {killed}/saved --ckpt-step 4 --train-iters 9 --resume-mode new-schedule"
    again = go_on(tmp_path / "again", flags).samples
    assert {step: again[step] for step in (5, 6)} == whole


WARM_UP = "--lr-decay-style linear --train-iters 12 --lr-warmup-iters 3"


def rates(folder: Path) -> list[float]:
    """Learning rates of steps 5, 6, ..."""
    return [numbers["learning-rate"] for step, numbers in sorted(steps(folder).items()) if step > 4]


def test_after_a_change_of_batch_size_the_schedule_continues(tmp_path: Path) -> None:
    """Steps 1-4 of 4 samples, then 8 of 16: the warm-up took 12 samples, and the run takes 144."""
    start(run_of(tmp_path, WARM_UP), before_step(5, kill))
    larger = f"{WARM_UP} --global-batch-size 16 --micro-batch-size 16"
    start(run_of(tmp_path, f"{larger} --resume-mode new-schedule"), before_step(8, kill))
    shutil.copytree(tmp_path, tmp_path / "another")
    printed = go_on(tmp_path, larger)  # exactly so after another start
    assert (printed.status, printed.err, sorted(printed.samples)) == (0, "", [*range(7, 13)])
    assert rates(tmp_path) == pytest.approx([1e-2 * (144 - n) / (144 - 12) for n in range(16, 144, 16)])
    # another learning rate does not move where the batch changed
    another = tmp_path / "another"
    go_on(another, f"{larger} --lr 2e-2 --resume-mode new-schedule")
    assert rates(another)[2:] == pytest.approx([2e-2 * (144 - n) / (144 - 12) for n in range(48, 144, 16)])


def test_a_scaled_rate_follows_the_batch_of_a_resumed_run(tmp_path: Path) -> None:
    """Refused exactly; allowed with a new schedule, which scales the rate from the first resumed step on."""
    scaled = "--lr-decay-style constant --train-iters 8 --lr-scaling sqrt --lr-base-batch-size 4"
    start(run_of(tmp_path, scaled), before_step(7, kill))
    larger = f"{scaled} --global-batch-size 16 --micro-batch-size 16"
    assert "E825" in go_on(tmp_path, larger).err
    moved = go_on(tmp_path, f"{larger} --resume-mode new-schedule")
    assert (moved.status, "--global-batch-size: checkpoint 4 -> now 16" in moved.out) == (0, True)
    assert rates(tmp_path)[-2:] == pytest.approx([2 * 1e-2] * 2)


def test_a_schedule_is_checked_from_where_the_run_resumes(tmp_path: Path) -> None:
    """20 samples of warm-up are over; 12 steps of the new batch would not be as many."""
    flags = "--train-iters 12 --lr-warmup-samples 20 --micro-batch-size 1 --global-batch-size {}"
    start(run_of(tmp_path, flags.format(8)), before_step(7, kill))
    smaller = flags.format(1)
    assert start(run_of(tmp_path, f"{smaller} --resume-mode new-schedule"), before_step(10, kill)).err == ""
    assert sorted(go_on(tmp_path, smaller).samples) == [9, 10, 11, 12]


def test_a_schedule_that_does_not_fit_where_the_run_resumes(killed: Path) -> None:
    flags = "--lr-warmup-iters 6 --lr-decay-iters 5 --global-batch-size 8 --resume-mode new-schedule"
    refused = go_on(killed, flags)
    assert (refused.status, refused.samples) == (2, {})
    assert "E403 the warm-up of 32 samples does not end before the decay does, at 24 (the checkpoint is " in refused.err
    assert (fix := re.findall(r"fix: (--set \S+) ", refused.err)) == ["--set optimizer.lr_warmup_samples=2"]
    assert go_on(killed, f"{flags} {fix[0]}").err == ""


# ---- Identity of the run


def test_ids_differ_whatever_the_seed() -> None:
    state = random.getstate()
    first = new_run_id()
    random.setstate(state)
    assert first != new_run_id()
    assert re.fullmatch("[a-z0-9]{8}", first)


def test_a_run_keeps_its_id_and_one_that_begins_with_its_checkpoint_has_another(tmp_path: Path) -> None:
    own = f"--save {tmp_path}/own --exit-interval 2"
    for _ in range(2):
        assert start(tiny_run(tmp_path / "run", own)).status == 0
    other = f"--load {tmp_path}/own --save {tmp_path}/other"
    assert start(tiny_run(tmp_path / "another", other)).status == 0
    first, again = column(tmp_path / "run", "run-id", "run-id")
    (another,) = column(tmp_path / "another", "run-id", "run-id")
    assert first == again != another
    assert column(tmp_path / "another", "iteration") == [5, 6]


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"slurm-job": "17", "torchrun-run": "17", "slurm-restart": 2}, "second"),
        ({"slurm-job": "17"}, ""),  # not by torchrun
        ({"slurm-job": "18", "torchrun-run": "17"}, ""),
        ({}, ""),
    ],
)
def test_the_last_start_of_the_same_job_gives_its_id(tmp_path: Path, facts: dict[str, object], name: str) -> None:
    job = {"event": "start", "slurm-job": "17", "torchrun-run": "17"}
    lines = [job | {"run-id": "first"}, {"event": "note", "text": '"start"'}, job | {"run-id": "second"}]
    path = tmp_path / "metrics.jsonl"
    assert previous_run_id(path, facts) == ""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"event": "start", "run')
    assert previous_run_id(path, facts) == name


@pytest.mark.parametrize("job", ["17", "18"])
def test_a_job_that_has_saved_nothing_yet_begins_again_under_its_id(tmp_path: Path, job: str) -> None:
    config = tiny_run(tmp_path, f"--save {tmp_path}/saved")
    for number, event in (("17", before_step(3, kill)), (job, None)):
        with patch.dict(os.environ, {"SLURM_JOB_ID": number}):
            printed = start(config, event)
    assert sorted(printed.samples) == [1, 2, 3, 4, 5, 6]
    first, again = column(tmp_path, "run-id", "run-id")
    assert (first == again) == (job == "17")


def test_old_checkpoints_have_one_evaluation_only(tmp_path: Path) -> None:
    """They have one number for the validation data, and none for test data."""
    run_state = checkpoint_contents.run_state

    def older(trainer: Trainer) -> dict[str, Any]:
        now = run_state(trainer)
        del now["data"]["stretches"]["test"], now["data"]["fingerprints"]["test"]
        return now | {"evaluated": now["evaluated"]["valid"]}

    flags = "--eval-interval 2 --eval-iters 1"
    start(run_of(tmp_path, f"{flags} --exit-interval 4"), patch.object(checkpoint_contents, "run_state", older))
    assert go_on(tmp_path, flags).status == 0
    assert column(tmp_path, "iteration", "lm loss validation") == [2, 4, 6]
    assert column(tmp_path, "iteration", "lm loss test") == [6]


def test_tensors_and_numbers_of_a_checkpoint(tmp_path: Path) -> None:
    """Compared with the trainer at the end of the same run, by parameter name."""
    go_on(tmp_path, "--bf16")
    tensors, numbers = checkpoint(tmp_path / "saved/iter_0000006")
    trainer = build_trainer(run_of(tmp_path, "--bf16"), 0, 1)
    names = set(dict(trainer.chunks[0].named_parameters()))
    assert tensors.keys() == names | {f"optim.{kind}.{n}" for kind in ("exp_avg", "exp_avg_sq") for n in names}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert tensors["embedding.word_embeddings.weight"].shape == (31, 16)  # and not the 128 rows of the padded one
    assert (numbers["iteration"], numbers["consumed_samples"], numbers["optimizer"]) == (6, 24, {"steps": 6})
    assert numbers["data"]["digest"] == f"{trainer.data.digest('train', 0, 24):016x}"
    assert "loss_scaler" not in numbers
