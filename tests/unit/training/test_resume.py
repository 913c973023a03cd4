"""Where a run starts: which checkpoint, how much of it, which options may change, and the notes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.format import marker_content
from megatron.config.run import RunConfig
from megatron.convert.huggingface.convert import import_huggingface
from megatron.data.errors import DataError
from megatron.training import checkpointer
from megatron.training.trainer import Trainer
from tests.runs import Told, before_step, checkpoint, differences, kill, saved_steps, start, steps, tiny_run
from tests.unit.convert.folders import random_weights, write_folder

STEPS = 6


def run_of(folder: Path, flags: str = "") -> RunConfig:
    """A run of 6 steps that saves every 2."""
    return tiny_run(folder, f"--save {folder}/saved --save-interval 2 {flags}")


def go_on(folder: Path, flags: str = "") -> Told:
    return start(run_of(folder, flags))


@pytest.fixture(scope="session")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its last step, after the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("killed")
    start(run_of(folder), before_step(STEPS, kill))
    return folder


@pytest.fixture
def killed(killed_run: Path, tmp_path: Path) -> Path:
    """A copy of the killed run."""
    shutil.copytree(killed_run, tmp_path / "run")
    return tmp_path / "run"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


TENSORS, MANIFEST, MARKER = "tensors_00000.safetensors", "manifest.json", "COMPLETE"
DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "truncated": (truncate, TENSORS, "tensors_00000.safetensors is truncated: "),
    "a bit flipped": (flip, TENSORS, "flipped"),
    "missing": (Path.unlink, TENSORS, "tensors_00000.safetensors is missing"),
    "manifest truncated": (truncate, MANIFEST, "flipped bytes or is truncated"),
    "manifest flipped": (flip, MANIFEST, "flipped bytes or is truncated"),
    "manifest missing": (Path.unlink, MANIFEST, "manifest.json is missing"),
    "marker missing": (Path.unlink, MARKER, "has no COMPLETE"),
    "marker flipped": (flip, MARKER, "flipped bytes or is truncated"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_replaced(killed: Path, how: str) -> None:
    damage, name, why = DAMAGE[how]
    damage(killed / "saved/iter_0000004" / name)
    printed = go_on(killed)
    assert (printed.status, printed.err, sorted(printed.samples)) == (0, "", [3, 4, 5, 6])
    (message,) = re.findall(r"^passed over (.*)$", printed.out, re.MULTILINE)
    assert message.startswith(f"{killed}/saved/iter_0000004: ")
    assert why in message
    assert f"resumed from {killed}/saved/iter_0000002: step 2, 8 samples" in printed.out
    assert saved_steps(killed / "saved") == [2, 4, 6]


@pytest.mark.parametrize("how", DAMAGE)
def test_when_all_are_damaged_nothing_is_begun(killed: Path, how: str) -> None:
    damage, name, why = DAMAGE[how]
    for step in (2, 4):
        damage(killed / f"saved/iter_000000{step}" / name)
    printed = go_on(killed)
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith("error: E811 no checkpoint ")
    assert printed.err.count(why) == 2


def test_a_damaged_checkpoint_newer_than_those_a_run_writes_costs_none_of_them(killed: Path) -> None:
    flip(killed / "saved/iter_0000004" / TENSORS)
    printed = start(run_of(killed, "--keep-last 1 --save-interval 1"), before_step(4, kill))
    assert sorted(printed.samples) == [3]
    again = go_on(killed, "--keep-last 1 --save-interval 1")
    assert (again.status, sorted(again.samples)) == (0, [4, 5, 6])
    assert saved_steps(killed / "saved") == [6]


def test_the_rest_of_a_first_save_is_no_checkpoint(tmp_path: Path) -> None:
    rest = tmp_path / "saved/iter_0000002.tmp"
    rest.mkdir(parents=True)
    (rest / TENSORS).write_bytes(b"half")
    printed = go_on(tmp_path)
    assert (printed.status, sorted(printed.samples)) == (0, [1, 2, 3, 4, 5, 6])
    assert "removed iter_0000002.tmp: its save was interrupted\n" in printed.out
    assert saved_steps(tmp_path / "saved") == [2, 4, 6]
    assert not rest.exists()


def test_a_save_that_lacked_nothing_but_its_name_counts(killed: Path) -> None:
    whole = killed / "saved/iter_0000004"
    whole.rename(whole.with_suffix(".tmp"))
    printed = go_on(killed)
    assert (printed.status, sorted(printed.samples)) == (0, [5, 6])
    assert "published iter_0000004.tmp: its save was complete except for the final rename\n" in printed.out
    assert saved_steps(killed / "saved") == [2, 4, 6]


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(killed: Path) -> None:
    """It is not damaged: resuming from the previous one would replace it."""
    path = killed / "saved/iter_0000004"
    content = (path / MANIFEST).read_bytes().replace(b'"version":1', b'"version":99')
    (path / MANIFEST).write_bytes(content)
    (path / MARKER).write_bytes(marker_content(content))
    printed = go_on(killed)
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith(f"error: E811 {path} was written by a newer version: ")
    assert "\n  fix: update this program\n" in printed.err


def test_a_complete_run_is_reported(killed: Path) -> None:
    go_on(killed)
    before = steps(killed)
    printed = go_on(killed)
    assert (printed.status, printed.samples, printed.err) == (0, {}, "")
    assert "nothing to do: this run ends with step 6, and 6 are taken" in printed.out
    assert steps(killed) == before


def test_load_from_another_folder(killed: Path, tmp_path: Path) -> None:
    """Into a new folder, from a chosen step; once it has checkpoints of its own, they come first."""
    go_on(killed)
    other = tmp_path / "other"
    flags = f"--load {killed}/saved --ckpt-step 2"
    printed = start(run_of(other, flags), before_step(STEPS, kill))
    assert sorted(printed.samples) == [3, 4, 5]
    assert f"resumed from {killed}/saved/iter_0000002: step 2, 8 samples" in printed.out
    again = go_on(other, flags)
    assert sorted(again.samples) == [5, 6]
    assert f"resumed from {other}/saved/iter_0000004: step 4, 16 samples" in again.out
    assert differences(other / "saved/iter_0000006", killed / "saved/iter_0000006") == []


def test_load_one_checkpoint_by_its_folder(killed: Path, tmp_path: Path) -> None:
    printed = go_on(tmp_path / "other", f"--load {killed}/saved/iter_0000002")
    assert sorted(printed.samples) == [3, 4, 5, 6]


def test_load_a_copy_of_a_checkpoint_under_a_name_of_its_own(killed: Path, tmp_path: Path) -> None:
    best = Path(shutil.copytree(killed / "saved/iter_0000002", killed / "best"))
    printed = go_on(tmp_path / "other", f"--load {best}")
    assert (printed.status, sorted(printed.samples)) == (0, [3, 4, 5, 6])
    assert f"resumed from {best}: step 2, 8 samples" in printed.out
    assert go_on(tmp_path / "another", f"--load {best} --ckpt-step 2").status == 0
    assert (
        f"E812 {best} has no checkpoint of step 4; it has 2\n"
        in go_on(tmp_path / "new", f"--load {best} --ckpt-step 4").err
    )
    truncate(best / TENSORS)
    printed = go_on(tmp_path / "last", f"--load {best}")
    assert f"E811 no checkpoint in {best} can be used:\n  best: " in printed.err
    assert "\n  fix: --load ANOTHER\n" in printed.err


def test_what_a_run_began_with_need_not_be_there_for_ever(killed: Path, tmp_path: Path) -> None:
    other, flags = tmp_path / "other", f"--load {killed}/saved --ckpt-step 2"
    start(run_of(other, flags), before_step(STEPS, kill))
    shutil.rmtree(killed / "saved")
    assert sorted(go_on(other, flags).samples) == [5, 6]


def test_a_start_from_scratch_is_noted(tmp_path: Path) -> None:
    assert f"starts from scratch: {tmp_path}/saved holds no checkpoint" in go_on(tmp_path).out
    assert "starts from scratch" not in go_on(tmp_path).out


@pytest.mark.parametrize("load", ["", "--load {}/saved"])
def test_a_new_schedule_of_nothing_is_refused(tmp_path: Path, load: str) -> None:
    printed = go_on(tmp_path, f"{load.format(tmp_path)} --resume-mode new-schedule")
    assert (printed.status, printed.samples) == (2, {})
    sentence = f"E812 --resume-mode new-schedule, but {tmp_path}/saved holds no checkpoint to resume from"
    assert f"{sentence}\n  fix: --load ANOTHER | --resume-mode exact\n" in printed.err


def test_going_on_without_saving(killed: Path, tmp_path: Path) -> None:
    printed = start(tiny_run(tmp_path / "other", f"--load {killed}/saved"))
    assert (printed.status, sorted(printed.samples)) == (0, [5, 6])
    assert saved_steps(killed / "saved") == [2, 4]


@pytest.mark.parametrize("flags", ["--ckpt-step 2", "--load {}/saved --ckpt-step 2", "--load {}/saved/iter_0000002"])
def test_going_back_among_newer_checkpoints_is_refused(killed: Path, flags: str) -> None:
    printed = go_on(killed, flags.format(killed))
    assert (printed.status, printed.samples) == (2, {})
    sentence = (
        f"E813 {killed}/saved holds newer checkpoints than step 2 (iter_0000004): the next start would resume from them"
    )
    assert f"{sentence}\n  fix: --load {killed}/saved --ckpt-step 2 --save ANOTHER" in printed.err
    assert go_on(killed, "--ckpt-step 4").status == 0


@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        ("--ckpt-step 3", "E812 {}/saved has no checkpoint of step 3; it has 4, 2\n  fix: --ckpt-step 4"),
        ("--load {}/run-dir", "E812 {}/run-dir has no checkpoint\n  fix: --load ANOTHER | drop --load"),
    ],
)
def test_a_checkpoint_that_is_not_there(killed: Path, flags: str, seen: str) -> None:
    (killed / "run-dir").mkdir()
    config = tiny_run(killed, f"--save {killed}/{'saved' if 'step' in flags else 'new'} {flags.format(killed)}")
    printed = start(config)
    assert (printed.status, printed.samples) == (2, {})
    assert seen.format(killed) in printed.err


def test_a_requested_step_in_an_empty_folder(tmp_path: Path) -> None:
    printed = go_on(tmp_path, "--ckpt-step 2")
    assert "E812 " in printed.err
    assert "has no checkpoint of step 2; it has none" in printed.err


def test_a_damaged_requested_step_is_not_replaced_by_another(killed: Path) -> None:
    truncate(killed / "saved/iter_0000004" / TENSORS)
    printed = go_on(killed, "--ckpt-step 4")
    assert (printed.status, printed.samples) == (2, {})
    assert "E811 no checkpoint of step 4 in " in printed.err
    assert "fix: --ckpt-step 2 | --save ANOTHER" in printed.err


CHANGES = {
    "--lr 2e-2": "--lr: checkpoint 0.01 -> now 0.02",
    "--global-batch-size 8": "--global-batch-size: checkpoint 4 -> now 8",
    "--train-iters 8": "--train-iters: checkpoint 6 -> now 8",
}


@pytest.mark.parametrize("change", CHANGES)
def test_options_that_must_not_change_silently(killed: Path, change: str) -> None:
    printed = go_on(killed, change)
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith("error: E825 the batch, the length or the schedule is not the checkpoint's: --")
    assert re.search(r"fix: .*--resume-mode new-schedule", printed.err)


def sizes(told: Told) -> list[int]:
    return [len(told.samples[step]) for step in sorted(told.samples)]


NEW_SCHEDULES = {
    "--lr 2e-2": ([4, 4], 24),
    "--global-batch-size 8 --train-iters 7": ([8, 8, 8], 40),
    "--global-batch-size 2": ([2, 2], 20),
    "--train-iters 8": ([4, 4, 4, 4], 32),
    "--train-iters 5": ([4], 20),
    "--train-iters null --train-samples 30 --global-batch-size 6": ([6, 6], 28),
}
"""Flags: batch sizes after step 4, and consumed samples at the end."""


@pytest.mark.parametrize("change", NEW_SCHEDULES)
def test_a_new_schedule(killed: Path, change: str) -> None:
    batches, consumed = NEW_SCHEDULES[change]
    printed = go_on(killed, f"{change} --resume-mode new-schedule")
    assert (printed.status, printed.err, sizes(printed)) == (0, "", batches)
    assert CHANGES.get(change, "-> now") in printed.out
    read = [number for step in sorted(printed.samples) for number, _ in printed.samples[step]]
    assert read == [*range(16, consumed)]  # where it was, with none left out
    _, state = checkpoint(sorted((killed / "saved").glob("iter_*"))[-1])
    assert state["consumed_samples"] == consumed
    (total,) = {len(batches) + 4}
    assert f"{total}/{total} " in printed.out
    again = go_on(killed, change)  # and from now on it is its own
    assert (again.status, again.samples) == (0, {})


def test_a_longer_run_reads_what_the_shorter_one_did_first(killed: Path, tmp_path: Path) -> None:
    go_on(killed)
    longer = go_on(killed, "--train-iters 9 --resume-mode new-schedule")
    assert [number for step in (7, 8, 9) for number, _ in longer.samples[step]] == [*range(24, 36)]
    first = start(run_of(tmp_path / "whole")).samples
    _, state = checkpoint(killed / "saved/iter_0000009")
    assert state["data"]["stretches"]["train"] == [24, 12]
    flags = f"--load {killed}/saved --ckpt-step 2 --train-iters 9 --resume-mode new-schedule"
    again = start(run_of(tmp_path / "again", flags)).samples
    assert {step: again[step] for step in (3, 4, 5, 6)} == {step: first[step] for step in (3, 4, 5, 6)}


def test_only_the_weights(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    begun: list[Trainer] = []
    flags = f"--load {killed}/saved --resume-mode weights-only --lr 5e-3 --optimizer sgd --seed 3"
    with before_step(1, lambda trainer: begun.append(_copied(trainer))):
        printed = go_on(other, flags)
    assert (printed.status, sorted(printed.samples)) == (0, [1, 2, 3, 4, 5, 6])
    assert f"weights from {killed}/saved/iter_0000004" in printed.out
    tensors, _ = checkpoint(killed / "saved/iter_0000004")
    ((weights, moments, consumed),) = begun
    assert all(torch.equal(value[: len(tensors[name])], tensors[name]) for name, value in weights.items())
    assert consumed == 0
    assert all(bool((value == 0).all()) for value in moments.values())
    assert go_on(other, flags).samples == {}


def _copied(trainer: Trainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    weights = {name: value.clone() for name, value in trainer.optimizer.main_params.items()}
    (moments,) = trainer.optimizer.state().values()
    return weights, {name: value.clone() for name, value in moments.items()}, trainer.consumed_samples


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A Hugging Face folder of the tiny runs' model, and its weights under transformers' names."""
    model = tiny_run(tmp_path).model
    weights = random_weights(model)
    return write_folder(tmp_path / "gpt2", model, weights), weights


def test_a_hugging_face_model_is_where_a_run_begins_and_only_there(
    tmp_path: Path, gpt2: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, weights = gpt2
    begun: list[torch.Tensor] = []

    def stop_first(trainer: Trainer) -> None:
        begun.append(trainer.optimizer.main_params["embedding.position_embeddings.weight"].clone())

    with before_step(1, stop_first):
        printed = start(run_of(tmp_path / "run", f"--load hf:{folder}"), before_step(4, kill))
    assert f"weights from {folder}" in printed.out
    assert torch.equal(begun[0], weights["transformer.wpe.weight"])
    again = go_on(tmp_path / "run", f"--load hf:{folder}")
    assert (again.status, sorted(again.samples)) == (0, [3, 4, 5, 6])
    assert len(begun) == 1


def test_converted_weights_cannot_be_resumed_from(tmp_path: Path, gpt2: tuple[Path, dict[str, torch.Tensor]]) -> None:
    import_huggingface(gpt2[0], tmp_path / "converted/iter_0000000", lambda name, done, total: None)
    flags = f"--load {tmp_path}/converted"
    printed = go_on(tmp_path / "run", flags)
    assert printed.err.startswith(
        f"error: E814 {tmp_path}/converted/iter_0000000 holds weights, but not the state of a run"
    )
    assert "\n  fix: --resume-mode weights-only\n" in printed.err
    assert sorted(go_on(tmp_path / "run", f"{flags} --resume-mode weights-only").samples) == [1, 2, 3, 4, 5, 6]
    own = start(tiny_run(tmp_path / "run", f"--save {tmp_path}/converted"))
    assert f"fix: --load {tmp_path}/converted --save {tmp_path}/converted-new --resume-mode weights-only" in own.err


OURS = {"tokenizer/tokenizer.json": b"ours"}


@pytest.mark.parametrize(
    ("theirs", "kept", "told"),
    [
        (OURS, {"eos_token_id": 299, "pad_token_id": 1, "top_k": 5}, False),
        ({"tokenizer/tokenizer.json": b"theirs", "tokenizer/merges.txt": b""}, {"top_k": 5}, True),
        ({}, {"top_k": 5}, False),
    ],
)
def test_ids_of_another_tokenizer_do_not_stay(
    tmp_path: Path, theirs: dict[str, Path | bytes], kept: dict[str, int], told: bool
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
    assert bool(checkpointer.tokenizer_notes(OURS, carried)) is told


@pytest.mark.parametrize(("content", "said"), [("{", "is not valid JSON: "), ("3", "is a JSON int, not an object")])
def test_ids_that_cannot_be_read(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=f"the generation_config.json of the loaded model {said}"):
        checkpointer.files_to_carry(OURS, {p.name: p for p in tmp_path.iterdir()})
