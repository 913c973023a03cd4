"""Resumed runs: on any other layout, after signals, failures and changed flags, on several ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.run import RunConfig
from megatron.data.build import resolve_epochs
from megatron.data.indexed_writer import IndexedDatasetWriter
from tests.distributed.resume import run_rank
from tests.kit.pool import Pool
from tests.kit.runs import Outcome, differences, records, saved_steps, start, steps, tiny_run
from tests.unit.checkpoint.samples import files_of, flip

TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {"tp2-sp": TP2_SP, "dp2": "", "pp2": f"{PP2} --pipeline-schedule zb-v"}
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def run_of(folder: Path, flags: str = "", world_size: int = 2) -> RunConfig:
    """A run of 6 steps that saves every 2."""
    return tiny_run(folder, f"--save {folder}/saved --save-interval 2 {flags}", world_size)


def go_on(pool: Pool, config: RunConfig, *happening: Any, world_size: int = 2) -> list[Outcome]:
    return pool.run(world_size, run_rank, config, *happening)


def check_twins(pool: Pool, whole: RunConfig, parts: RunConfig, step: int, last: int = 6) -> None:
    """Compare a run with one that is killed at ``step`` and started again: samples, numbers, and the end to the bit."""
    reported = go_on(pool, whole)
    killed = go_on(pool, parts, "kill", step)
    again = go_on(pool, parts)
    assert [printed.status for printed in killed] == [None, None]
    for printed in [*reported, *again]:
        others = [line for line in printed.err.splitlines() if " is a spike: " not in line]
        assert (printed.status, others) == (0, [])
    for rank in (0, 1):
        assert killed[rank].samples | again[rank].samples == reported[rank].samples
    run, other = (Path(str(config.logging.run_dir)) for config in (parts, whole))
    assert steps(run) == steps(other)
    assert differences(*(folder / f"saved/iter_{last:07d}" for folder in (run, other))) == []


SPIKES = "--skip-spikes 0.3 --spike-window 4 --lr 5e-2"
WAYS = {
    "bf16": "--bf16",
    "fp32": "--params-dtype fp32",
    "adam": f"--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --ema-decay 0.9 --decoupled-lr 1e-2 {SPIKES}",
    "lion": f"--params-dtype fp32 --optimizer lion --exp-avg-dtype bf16 --lr-factors layers.0.*=0.5 {SPIKES}",
}


LONG = pytest.mark.slow
SHORT = {("adam", "pp2")}


@pytest.mark.parametrize(
    ("way", "layout"),
    [pytest.param(*case, marks=() if case in SHORT else LONG) for case in product(WAYS, LAYOUTS)],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(pool: Pool, tmp_path: Path, way: str, layout: str) -> None:
    flags = f"{LAYOUTS[layout]} {DROPOUT} {WAYS[way]} --eval-interval 3 --eval-iters 1"
    check_twins(pool, run_of(tmp_path / "whole", flags), run_of(tmp_path / "parts", flags), 4)
    skipped = sum(record["spikes-skipped"] for record in records(tmp_path / "whole"))
    assert (skipped > 0) == (SPIKES in flags)


def write_corpora(folder: Path) -> str:
    """Flags that blend two datasets of documents that end with id 0."""
    random = np.random.default_rng(2)
    for name in ("wiki", "code"):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for length in random.integers(1, 12, 40):
                writer.add_document([*random.integers(1, 31, length).tolist(), 0])
    blend = f"--data-path 0.7 {folder}/wiki 0.3 {folder}/code --split 8,1,1 --multiple-validation-sets"
    return f"--set data.mock_data=false {blend} --reset-position-ids --reset-attention-mask --eod-mask-loss --eod-id 0"


@pytest.mark.parametrize("layout", ["dp2", pytest.param("tp2-sp", marks=LONG), pytest.param("pp2", marks=LONG)])
def test_a_killed_run_on_a_blend_of_documents(pool: Pool, tmp_path: Path, layout: str) -> None:
    """With a cache that the ranks share; the whole run has none."""
    flags = f"{LAYOUTS[layout]} {write_corpora(tmp_path)} --eval-interval 3 --eval-iters 1"
    cached = f"{flags} --data-cache-path {tmp_path}/cache"
    check_twins(pool, run_of(tmp_path / "whole", flags), run_of(tmp_path / "parts", cached), 4)
    names = [record.get("validation-set") for record in records(tmp_path / "whole", "lm loss validation")]
    assert names == ["wiki", "code"] * 2
    assert len(records(tmp_path / "whole", "lm loss test")) == 1


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=LONG) for layout in ("dp2", "tp2-sp", "pp2")])
def test_a_killed_run_on_conversations(pool: Pool, tmp_path: Path, layout: str) -> None:
    """In its second epoch of three, with noise; all processes share a cache of the ids."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    for name, count in (("train", 9), ("valid", 3)):
        turns = (
            [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "x" * i}] for i in range(1, count)
        )
        (tmp_path / name).write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    data = (
        "--vocab-size 257 --neftune-alpha 5 --tokenizer-type ByteTokenizer "
        f"--chat-template {tmp_path}/t.jinja --eval-interval 2 --global-batch-size 2 --set training.num_epochs=3 "
        f"data.chat_data_path={tmp_path}/train data.valid_chat_data_path={tmp_path}/valid "
        f"data.data_cache_path={tmp_path}/cache"
    )
    flags = f"{LAYOUTS[layout]} {data}"
    whole = resolve_epochs(run_of(tmp_path / "whole", flags), 2)
    assert (whole.training.train_samples, whole.training.eval_iters) == (18, 1)
    parts = resolve_epochs(run_of(tmp_path / "parts", flags), 2)
    check_twins(pool, whole, parts, 6, last=9)
    assert len(records(tmp_path / "whole", "lm loss validation")) == 5
    changed = (tmp_path / "train").read_text().replace("x", "y")
    (tmp_path / "train").write_text(changed)
    refused = start(resolve_epochs(run_of(tmp_path / "parts", data), 1))
    assert refused.status == 2
    assert "E815 the training data are not those of the checkpoint" in refused.err


def test_a_signal_to_one_rank_makes_all_save(pool: Pool, tmp_path: Path) -> None:
    """And one process goes on with it, to the losses of a run that was not stopped."""
    flags = "--params-dtype fp64"
    stopped = go_on(pool, run_of(tmp_path / "run", f"{flags} {TP2_SP}"), "SIGUSR1", 3, 1)
    assert [(printed.status, printed.err) for printed in stopped] == [(128 + signal.SIGUSR1, "")] * 2
    assert saved_steps(tmp_path / "run/saved") == [2, 3]
    alone = start(run_of(tmp_path / "run", flags, 1))
    assert (alone.status, sorted(alone.samples)) == (0, [4, 5, 6])
    assert "--tensor-model-parallel-size: checkpoint 2 -> now 1" in alone.out
    start(run_of(tmp_path / "whole", flags, 1))
    got, wanted = ([s["lm loss"] for s in steps(tmp_path / run).values()] for run in ("run", "whole"))
    assert got == pytest.approx(wanted, rel=1e-10)


@pytest.fixture(scope="module")
def killed_run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was killed in its last step, after the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("killed")
    go_on(pool, run_of(folder), "kill", 6)
    return folder


@pytest.fixture
def killed(killed_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(killed_run, tmp_path / "run"))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (lambda path: os.truncate(path, 900), "tensors_00001.safetensors is truncated: 900 bytes, not "),
    "a bit flipped": (flip, "flipped"),
    "missing": (Path.unlink, "tensors_00001.safetensors is missing"),
}


@pytest.mark.parametrize(("how", "layout"), list(zip(DAMAGE, LAYOUTS)))
def test_all_ranks_pass_over_the_same_damaged_checkpoint(pool: Pool, killed: Path, how: str, layout: str) -> None:
    damage, why = DAMAGE[how]
    damage(files_of(killed / "saved/iter_0000004") / "tensors_00001.safetensors")
    ranks = go_on(pool, run_of(killed, LAYOUTS[layout]))
    assert [(printed.status, printed.err, sorted(printed.samples)) for printed in ranks] == [(0, "", [3, 4, 5, 6])] * 2
    (message,) = [line for line in ranks[0].out.splitlines() if line.startswith("passed over ")]
    assert message.startswith(f"passed over {killed}/saved/iter_0000004: ")
    assert why in message
    assert ranks[1].out == ""
    assert saved_steps(killed / "saved") == [2, 4, 6]


@pytest.mark.parametrize(("rank", "first"), [(0, 3), (1, 5)])
def test_files_unreadable_by_one_rank_give_one_decision(pool: Pool, killed: Path, rank: int, first: int) -> None:
    """Only the first rank reads the small files; what it finds holds for all."""
    ranks = go_on(pool, run_of(killed), "unreadable files", 4, rank)
    assert [(printed.status, printed.err, min(printed.samples)) for printed in ranks] == [(0, "", first)] * 2


@pytest.mark.parametrize(("step", "status", "saved"), [(4, 0, [2, 6]), (6, 1, [2, 4])])
def test_a_disk_that_is_full_on_one_rank(pool: Pool, tmp_path: Path, step: int, status: int, saved: list[int]) -> None:
    """A save is skipped; only the last one has to succeed."""
    ranks = go_on(pool, run_of(tmp_path), "full disk", step, 1)
    assert [printed.status for printed in ranks] == [status, status]
    (printed,) = [printed.err for printed in ranks if printed.err]
    assert "the disk is full (rank 1); no checkpoint was written" in printed
    assert printed.startswith("warning: step 4 is not saved: ") == (status == 0)
    assert saved_steps(tmp_path / "saved") == saved


def test_a_rank_that_reads_other_samples_is_noticed_at_the_save(pool: Pool, tmp_path: Path) -> None:
    ranks = go_on(pool, run_of(tmp_path), "misread", 3, 1)
    assert [printed.status for printed in ranks] == [1, 1]
    (printed,) = [printed.err for printed in ranks if printed.err]
    assert "the samples read up to step 4 are not those of the sample stream" in printed
    assert saved_steps(tmp_path / "saved") == [2]
