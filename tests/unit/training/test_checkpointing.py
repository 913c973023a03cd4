"""A killed run resumes to the bit; contents of checkpoints; full disks."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.config.run import RunConfig
from megatron.data.gpt_dataset import SampleOrder, build_sample_order
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.build import build_trainer
from megatron.training.trainer import Trainer
from tests.runs import (
    before_step,
    checkpoint,
    column,
    differences,
    full_disk,
    kill,
    misread,
    records,
    saved_steps,
    start,
    steps,
    tiny_run,
)

STEPS = 9
LENGTH = f"--train-iters {STEPS} --save-interval 2"
"""Not a multiple of the interval: the last checkpoint is that of the end."""

FP16 = "--fp16 --initial-loss-scale 1e13 --hysteresis 1 --loss-scale-window 2"
RUNS = {
    "fp32 adam": "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.6",
    "bf16 sgd": "--bf16 --optimizer sgd --lr-decay-style WSD --lr-wsd-decay-iters 3",
    "bf16 adam": "--bf16",
    "fp16, skipping": FP16,
    "fp64, rope": "--params-dtype fp64 --position-embedding-type rope --num-query-groups 1",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1 --lr-warmup-iters 3",
    "recompute": "--recompute-granularity full --hidden-dropout 0.1 --micro-batch-size 2",
    "ramp": "--rampup-batch-size 2 2 16 --micro-batch-size 1 --global-batch-size 6",
    "evaluation": "--eval-interval 3 --eval-iters 2 --hidden-dropout 0.1",
    "untied": "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear",
}


def run_of(folder: Path, flags: str = "") -> RunConfig:
    return tiny_run(folder, f"{LENGTH} {flags} --save {folder}/saved")


def check_twins(folder: Path, flags: str, *kills: int, again: str = "") -> Path:
    """Compare a run with the same run killed in the steps ``kills`` and restarted each time with the flags ``again``.

    Returns the folder of the killed run.
    """
    whole, parts = folder / "whole", folder / "parts"
    uninterrupted = start(run_of(whole, flags))
    assert (uninterrupted.status, uninterrupted.err) == (0, "")
    read: dict[int, Any] = {}
    for i, number in enumerate((*kills, 0)):
        printed = start(run_of(parts, f"{flags} {again if i else ''}"), before_step(number, kill))
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


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    check_twins(tmp_path, RUNS[name], random.Random(name).randrange(3, STEPS + 1))


def test_skipped_steps_before_and_after_the_kill(tmp_path: Path) -> None:
    parts = check_twins(tmp_path, FP16, 5)
    skipped = {step for step, numbers in steps(parts).items() if numbers["skipped-iterations"]}
    assert min(skipped) < 4 < max(skipped)
    _, numbers = checkpoint(parts / "saved/iter_0000004")
    assert numbers["optimizer"]["steps"] == 4 - len([step for step in skipped if step <= 4])
    assert numbers["loss_scaler"].keys() == {"scale", "good_steps", "lives"}


def test_killed_in_several_starts(tmp_path: Path) -> None:
    check_twins(tmp_path, "--hidden-dropout 0.1", 3, 4, 6, 9)


def test_killed_before_the_first_checkpoint_means_from_the_beginning(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    assert start(config, before_step(2, kill)).status is None
    assert start(config).samples.keys() == set(range(1, STEPS + 1))


def write_documents(prefix: Path, seed: int = 0) -> str:
    """Write a small dataset of random documents, which a run reads twice; return its flags."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for _ in range(40):
            writer.add_document(random.integers(0, 31, 5).tolist())
    return f"--no-mock-data --data-path {prefix} --split 30,10"


def test_into_another_epoch(tmp_path: Path) -> None:
    flags = write_documents(tmp_path / "documents")
    parts = check_twins(tmp_path, f"{flags} --eval-interval 4 --eval-iters 1", 6)
    (summary,) = {text for text in column(parts, "text", "text") if "epochs of" in text}
    assert "288 tokens = 1.9" in summary


def test_another_micro_batch_size_is_the_same_run_up_to_rounding(tmp_path: Path) -> None:
    fp64 = "--params-dtype fp64 --hidden-dropout 0.1"
    start(run_of(tmp_path / "whole", fp64))
    start(run_of(tmp_path / "parts", fp64), before_step(6, kill))
    printed = start(run_of(tmp_path / "parts", f"{fp64} --micro-batch-size 4 --recompute-granularity full"))
    assert "--micro-batch-size: checkpoint 1 -> now 4" in printed.out
    losses = [[numbers["lm loss"] for numbers in steps(tmp_path / run).values()] for run in ("whole", "parts")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_fp16_after_bf16_begins_with_its_own_loss_scale(tmp_path: Path) -> None:
    start(run_of(tmp_path, "--bf16"), before_step(5, kill))
    printed = start(run_of(tmp_path, "--fp16 --initial-loss-scale 1024"))
    assert "--params-dtype: checkpoint bf16 -> now fp16" in printed.out
    assert (printed.status, steps(tmp_path)[5]["loss-scale"]) == (0, 1024.0)


def test_samples_that_are_not_the_stream_s_are_noticed_at_the_save(tmp_path: Path) -> None:
    printed = start(run_of(tmp_path), before_step(4, misread))
    assert printed.status == 1
    assert "RuntimeError: the samples read up to step 4 are not those of the sample stream" in printed.err
    assert saved_steps(tmp_path / "saved") == [2]


def test_a_sample_left_out_is_noticed_at_the_save(tmp_path: Path) -> None:
    original = Trainer._read

    def read(trainer: Trainer, split: str, first: int, size: int) -> list[MicroBatch]:
        return original(trainer, split, first, size - 1 if trainer.iteration == 4 else size)

    assert start(run_of(tmp_path), patch.object(Trainer, "_read", read)).status == 1
    assert saved_steps(tmp_path / "saved") == [2, 4]


@pytest.mark.parametrize("other", ["other documents", "another seed", "another split", "others of the same size"])
def test_other_samples_are_refused(tmp_path: Path, other: str) -> None:
    flags = write_documents(tmp_path / "documents")
    start(run_of(tmp_path, flags), before_step(6, kill))
    if other == "other documents":
        flags = write_documents(tmp_path / "others", seed=1)
    elif other == "others of the same size":
        write_documents(tmp_path / "documents", seed=1)
    else:
        flags += " --seed 5" if other == "another seed" else " --split 10,10"
    printed = start(run_of(tmp_path, flags))
    assert printed.status == 2
    if other.startswith("another"):
        assert "E823 the samples, or their order, are not the checkpoint's: " in printed.err
    else:
        assert "E815 the training data are not those of the checkpoint: other files, or another order\n" in printed.err
    assert saved_steps(tmp_path / "saved") == [2, 4]


def test_data_that_changed_in_their_validation_part_are_refused(tmp_path: Path) -> None:
    """Only the last document has changed, of which no sample was consumed; the training part might have changed too."""
    flags = f"{write_documents(tmp_path / 'documents')} --eval-iters 1"
    start(run_of(tmp_path, flags), before_step(6, kill))
    path = tmp_path / "documents.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    printed = start(run_of(tmp_path, flags))
    assert printed.status == 2
    sentence = "E815 the training and validation data are not those of the checkpoint: other files, or another order\n"
    saved = tmp_path / "saved"
    fixes = f"  fix: --data-path THE_SAME_DATA | --load {saved} --save {saved}-new --resume-mode weights-only\n"
    assert sentence + fixes in printed.err


def per_split(folder: Path, **files: str) -> str:
    """Write a file for each split, with content that depends on its name; return the flags."""
    for name in files.values():
        write_documents(folder / name, seed=ord(name))
    paths = " ".join(f"--{split}-data-path {folder / name}" for split, name in files.items())
    return f"--no-mock-data {paths} --eval-iters 1 --eval-interval 3"


def test_other_evaluation_data_are_noted(tmp_path: Path) -> None:
    """And training resumes unchanged."""
    before = per_split(tmp_path, train="a", valid="b", test="c")
    after = per_split(tmp_path, train="a", valid="c", test="b")
    start(run_of(tmp_path / "whole", before))
    start(run_of(tmp_path / "parts", before), before_step(6, kill))
    printed = start(run_of(tmp_path / "parts", after))
    assert (printed.status, printed.err) == (0, "")
    sentence = "the validation and test data are not those of the checkpoint: losses on them cannot be compared with"
    assert printed.out.count(sentence) == 1
    losses = [[numbers["lm loss"] for numbers in steps(tmp_path / run).values()] for run in ("parts", "whole")]
    assert losses[0] == losses[1]
    assert differences(*(tmp_path / run / f"saved/iter_{STEPS:07d}" for run in ("parts", "whole"))) == ["data"]
    again = start(run_of(tmp_path / "parts", after))
    assert (again.status, sentence in again.out) == (0, False), "the last checkpoint knows the files of now"


def test_the_flag_that_named_the_other_files_is_named(tmp_path: Path) -> None:
    start(run_of(tmp_path, per_split(tmp_path, train="a", valid="b")), before_step(6, kill))
    elsewhere = run_of(tmp_path, per_split(tmp_path, train="b", valid="b") + f" --load {tmp_path}/saved")
    printed = start(replace(elsewhere, checkpoint=replace(elsewhere.checkpoint, save=str(tmp_path / "new"))))
    assert printed.status == 2
    assert "  fix: --train-data-path THE_SAME_DATA | --resume-mode weights-only\n" in printed.err


def test_the_way_out_that_is_offered_is_one(tmp_path: Path) -> None:
    """Append the fix to the refused command: later flags win."""
    start(run_of(tmp_path, write_documents(tmp_path / "documents")), before_step(6, kill))
    other = write_documents(tmp_path / "others", seed=1)
    refused = start(run_of(tmp_path, other)).err
    offered = next(fix for fix in refused.split("fix: ")[1].splitlines()[0].split(" | ") if "weights-only" in fix)
    assert start(tiny_run(tmp_path, f"{LENGTH} {other} --save {tmp_path}/saved {offered}")).status == 0


def test_the_same_samples_in_another_order_are_refused(tmp_path: Path) -> None:
    """As from a version with another shuffle: no option and no file has changed."""
    flags = write_documents(tmp_path / "documents")
    start(run_of(tmp_path, flags), before_step(6, kill))

    def otherwise(lengths: Any, part: range, samples: int, seq_length: int, seed: int) -> SampleOrder:
        return build_sample_order(lengths, part, samples, seq_length, seed + 7)

    printed = start(run_of(tmp_path, flags), patch("megatron.data.build.build_sample_order", otherwise))
    assert printed.status == 2
    assert "E815 the training data are not those of the checkpoint: other files, or another order\n" in printed.err


def test_the_same_documents_elsewhere_are_the_same_samples(tmp_path: Path) -> None:
    flags = write_documents(tmp_path / "documents")
    start(run_of(tmp_path, flags), before_step(6, kill))
    printed = start(run_of(tmp_path, write_documents(tmp_path / "moved")))
    assert (printed.status, printed.err) == (0, "")
    assert f"--data-path: checkpoint {tmp_path}/documents -> now {tmp_path}/moved" in printed.out


def test_a_full_disk_does_not_end_a_run_that_can_continue(tmp_path: Path) -> None:
    printed = start(run_of(tmp_path), full_disk(4, 6))
    assert printed.status == 0
    assert saved_steps(tmp_path / "saved") == [2, 8, 9]
    first, second = (line for line in printed.err.splitlines() if line.startswith("warning: "))
    assert first.startswith("warning: step 4 is not saved: ")
    assert "the disk is full (rank 0); no checkpoint was written" in second
    assert [r["iteration"] for r in records(tmp_path, "event") if r["event"] == "warning"] == [4, 6]


def test_a_full_disk_at_the_end_is_an_error(tmp_path: Path) -> None:
    printed = start(run_of(tmp_path), full_disk(STEPS))
    assert (printed.status, sorted(steps(tmp_path))) == (1, [*range(1, STEPS + 1)])
    assert printed.err.startswith("error: ")
    assert "the disk is full (rank 0); no checkpoint was written\n  fix: free some space | --" in printed.err
    assert saved_steps(tmp_path / "saved") == [2, 4, 6, 8]
    assert start(run_of(tmp_path)).samples.keys() == {STEPS}
    assert saved_steps(tmp_path / "saved")[-1] == STEPS


def test_old_checkpoints_that_cannot_be_deleted_do_not_end_a_run(tmp_path: Path) -> None:
    def retain(*arguments: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "iter_0000002")

    refusing = patch("megatron.training.checkpointer.CheckpointFolder.retain", retain)
    printed = start(run_of(tmp_path, "--keep-last 1"), refusing)
    assert printed.status == 0
    assert "warning: older checkpoints are not deleted: [Errno 30] Read-only file system: 'iter_0000002'" in printed.err


@pytest.mark.parametrize(
    ("flags", "kept"),
    [("", [2, 4, 6, 8, 9]), ("--keep-last 2", [8, 9]), ("--keep-last 1 --keep-every 4", [4, 8, 9])],
)
def test_which_checkpoints_are_kept(tmp_path: Path, flags: str, kept: list[int]) -> None:
    start(run_of(tmp_path, flags), before_step(6, kill))
    start(run_of(tmp_path, flags))
    assert saved_steps(tmp_path / "saved") == kept


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """Compared with the trainer at the end of the same run, by parameter name."""
    start(run_of(tmp_path, "--bf16"))
    tensors, numbers = checkpoint(tmp_path / f"saved/iter_{STEPS:07d}")
    trainer = build_trainer(run_of(tmp_path, "--bf16"), 0, 1)
    names = set(dict(trainer.chunks[0].named_parameters()))
    assert tensors.keys() == names | {f"optim.{kind}.{n}" for kind in ("exp_avg", "exp_avg_sq") for n in names}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert tensors["embedding.word_embeddings.weight"].shape == (31, 16)  # and not the 128 rows of the padded one
    assert (numbers["iteration"], numbers["consumed_samples"], numbers["optimizer"]) == (9, 36, {"steps": 9})
    assert numbers["data"]["digest"] == f"{trainer.data.digest('train', 0, 36):016x}"
    assert numbers["loss_scaler"] == {}
