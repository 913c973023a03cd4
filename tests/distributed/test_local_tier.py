"""Checkpoints on the nodes' disks: after any loss, a run resumes from the newest complete one or reports why not.

By default, two ranks are two nodes, each with its own folder.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.checkpoint.format import MANIFEST, Manifest
from megatron.checkpoint.save import save_sharded
from megatron.config.run import RunConfig
from megatron.distributed.launch import world_group
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import run_state, tensors_to_save
from megatron.training.checkpointer import Checkpointer, choose_resume_source
from megatron.training.local_checkpoints import NodeCheckpoints
from tests.distributed.resume import ACTIONS
from tests.kit.pool import Pool
from tests.kit.runs import Outcome, before_step, differences, start, steps, tiny_run
from tests.unit.checkpoint.samples import files_of

ZERO = "--use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LONG = pytest.mark.slow
LOCAL, DURABLE = 5, 4
"""Steps of the newest checkpoints of a run that was killed at step 6."""


def run_of(folder: Path, flags: str = ZERO, save_interval: int = 2, world_size: int = 2) -> RunConfig:
    """A run of 6 steps that writes to the nodes' folders after every step."""
    local = f"--local-save {folder}/node{{node}} --local-save-interval 1"
    return tiny_run(folder, f"--save {folder}/saved --save-interval {save_interval} {local} {flags}", world_size)


@contextmanager
def on_nodes(rank: int, per_node: int) -> Iterator[None]:
    """Place this rank on a machine of ``per_node`` ranks through the variables of torchrun."""
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(per_node), "LOCAL_RANK": str(rank % per_node)}):
        yield


def run_rank(rank: int, world_size: int, config: RunConfig, per_node: int, killed_at: int = 0) -> Outcome:
    """One rank of a run, which is killed before a step."""

    @contextmanager
    def around() -> Any:
        with ExitStack() as stack:
            stack.enter_context(on_nodes(rank, per_node))
            if killed_at:
                stack.enter_context(before_step(killed_at, ACTIONS["kill"]))
            yield

    return start(config, around(), rank, world_size)


def go_on(pool: Pool, config: RunConfig, per_node: int = 1, killed_at: int = 0, world_size: int = 2) -> Outcome:
    """Return the output of rank 0 of a run that ends well, or is killed."""
    printed = pool.run(world_size, run_rank, config, per_node, killed_at)
    assert {t.status for t in printed} == {None if killed_at else 0}, [t.err for t in printed]
    return printed[0]


@pytest.fixture(scope="module")
def killed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a run that was killed at step 6, a copy of it, and beside it the folder of one that was not."""
    base = tmp_path_factory.mktemp("tier")
    go_on(pool, run_of(base / "run"), killed_at=6)
    go_on(pool, run_of(base / "whole"))
    shutil.copytree(base / "run", base / "copy")
    return base / "run", base / "whole"


@pytest.fixture
def run(killed: tuple[Path, Path]) -> Path:
    """The folder of the killed run, as it was then; where it lies is written in its checkpoints."""
    shutil.rmtree(killed[0])
    shutil.copytree(killed[0].with_name("copy"), killed[0])
    return killed[0]


def of(run: Path, node: int, name: str = "") -> Path:
    """Return a node's parts of the newest local checkpoint."""
    return files_of(run / f"node{node}/iter_{LOCAL:07d}") / name


def tensors(rank: int) -> str:
    return f"tensors_{rank:05d}.safetensors"


def flip(path: Path) -> None:
    """Another last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lose_both(run: Path) -> None:
    of(run, 0, tensors(1)).unlink()
    cut(of(run, 1, tensors(1)))


def lose_durable(run: Path) -> None:
    shutil.rmtree(run / "saved")
    shutil.rmtree(run / "node1")


def damage_durable(run: Path) -> None:
    for path in (run / "saved").glob("iter_*"):
        flip(files_of(path) / MANIFEST)


OTHER = "another copy is used"
FAULTS: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "node 0 lost": (
        lambda run: shutil.rmtree(run / "node0"),
        LOCAL,
        "the nodes have a checkpoint of step 5; the newest is of step 4 in --save",
    ),
    "a file and the copy of another": (
        lambda run: (of(run, 0, tensors(1)).unlink(), of(run, 1, tensors(0)).unlink()),
        LOCAL,
        "node0/iter_0000005",
    ),
    "a flipped byte": (
        lambda run: flip(of(run, 0, tensors(0))),
        LOCAL,
        f"node 0: {tensors(0)} has flipped bytes (tensor ",
    ),
    "a flipped manifest": (lambda run: flip(of(run, 1, MANIFEST)), LOCAL, "node 1: passed over"),
    "both copies lost": (
        lose_both,
        DURABLE,
        f"passed over ./node0/iter_0000005: no node has {tensors(1)}; 2 of 2 nodes have some of it",
    ),
    "no durable one": (lose_durable, LOCAL, "the nodes have a checkpoint of step 5; there is none in --save"),
    "all durable ones damaged": (damage_durable, LOCAL, "no checkpoint in ./saved can be used"),
}
SHORT = {"a flipped byte", "both copies lost", "no durable one"}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=() if name in SHORT else LONG) for name in FAULTS])
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    pool: Pool, killed: tuple[Path, Path], run: Path, fault: str
) -> None:
    act, step, message = FAULTS[fault]
    act(run)
    printed = go_on(pool, run_of(run))
    text = printed.out.replace(str(run), ".")
    assert message in text, text
    assert f"resumed from ./{'node0' if step == LOCAL else 'saved'}/iter_{step:07d}: step {step}," in text
    assert (OTHER in text) == (fault == "a flipped byte")
    assert steps(run) == steps(killed[1])
    assert differences(run / "saved/iter_0000006", killed[1] / "saved/iter_0000006") == []
    for node in (0, 1):  # both are whole again, and nothing else is left
        assert [path.name for path in (run / f"node{node}").glob("iter*")] == ["iter_0000006"]
        Manifest.open(run / f"node{node}/iter_0000006")


def resave(rank: int, world_size: int, config: RunConfig, per_node: int, folder: Path) -> list[str]:
    """Begin, and write what was loaded into a folder; returns the notes."""
    with on_nodes(rank, per_node), patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        world = world_group(rank, world_size)
        nodes = NodeCheckpoints.join(config.checkpoint, world)
        origin = choose_resume_source(config.checkpoint, world, nodes)
        trainer = build_trainer(config, rank, world_size, fresh=origin.fresh)
        notes = Checkpointer(trainer, nodes=nodes).load(origin)
        save_sharded(folder, tensors_to_save(trainer), run_state(trainer), {}, trainer.mesh.world)
    return notes


@pytest.mark.parametrize(
    ("flags", "world", "per_node"),
    [
        ("", 2, 1),
        pytest.param(TP2, 4, 1, marks=LONG),
        pytest.param("", 2, 2, marks=LONG),
        pytest.param(f"{TP2} {ZERO}", 4, 2, marks=LONG),
    ],
)
def test_on_any_other_layout_and_nodes(pool: Pool, tmp_path: Path, flags: str, world: int, per_node: int) -> None:
    """From two nodes of TP 2 x DP 2, whose second one is lost. Where nodes come to be, they have nothing at first."""
    go_on(pool, run_of(tmp_path, TP2, save_interval=LOCAL, world_size=4), 2, killed_at=6, world_size=4)
    durable = tmp_path / "saved/iter_0000005"
    durable.rename(tmp_path / "durable")
    shutil.rmtree(tmp_path / "node1")
    config = run_of(tmp_path, flags, save_interval=LOCAL, world_size=world)
    notes = pool.run(world, resave, config, per_node, tmp_path / "again")[0]
    assert any(f"resumed from {tmp_path}/node0/iter_0000005: step 5" in note for note in notes)
    assert differences(tmp_path / "again", tmp_path / "durable") == []


def test_a_durable_one_that_rots_unseen_has_its_like_on_the_nodes(pool: Pool, tmp_path: Path) -> None:
    """Both are of one step; that the durable one is damaged shows when its tensors are read."""
    config = run_of(tmp_path, save_interval=LOCAL)
    go_on(pool, config, killed_at=6)
    flip(files_of(tmp_path / "saved/iter_0000005") / tensors(0))
    message = go_on(pool, config).out.replace(str(tmp_path), ".")
    assert re.search(rf"passed over ./saved/iter_0000005: \S*{tensors(0)} has flipped bytes", message)
    assert "resumed from ./node0/iter_0000005: step 5," in message


def test_one_node_keeps_checkpoints_and_warns_that_there_is_no_copy(pool: Pool, tmp_path: Path) -> None:
    printed = go_on(pool, run_of(tmp_path), per_node=2, killed_at=4)
    assert "--local-save on one node: no other has a copy, so a lost node loses the checkpoints on it" in printed.out
    printed = go_on(pool, run_of(tmp_path), per_node=2)
    assert f"resumed from {tmp_path}/node0/iter_0000003: step 3" in printed.out


def refused(pool: Pool, config: RunConfig) -> str:
    printed = pool.run(2, run_rank, config, 1, 0)
    assert all(t.status for t in printed)
    return "".join(t.err for t in printed)


def test_nodes_that_share_a_folder_are_refused(pool: Pool, tmp_path: Path) -> None:
    local = f"--local-save {tmp_path}/local --local-save-interval 1"
    text = refused(pool, tiny_run(tmp_path, f"--save {tmp_path}/saved {local}", 2))
    assert f"{tmp_path}/local is in use by process" in text
    assert f"--local-save {tmp_path}/local/{{node}}" in text


def test_checkpoints_of_another_run_are_refused(pool: Pool, run: Path) -> None:
    config = tiny_run(run, f"--save {run}/other --local-save {run}/node{{node}} --local-save-interval 1 {ZERO}", 2)
    text = refused(pool, config)
    assert f"holds the checkpoint of step 5 of another run, which saves to {run}/saved" in text
    assert of(run, 0, MANIFEST).exists()


def test_the_same_flags_in_another_folder_are_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``--save`` folder is relative to the working directory of the start."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    flags = f"--save saved --local-save {tmp_path}/node --local-save-interval 1"
    config = tiny_run(tmp_path, f"{flags} --train-iters 1")
    monkeypatch.chdir(tmp_path / "a")
    assert start(config, nullcontext()).status == 0
    (tmp_path / "a/saved/iter_0000001").rename(tmp_path / "not-needed")
    monkeypatch.chdir(tmp_path / "b")
    printed = start(config, nullcontext())
    assert (printed.status, "of another run, which saves to " in printed.err) == (2, True), printed
    monkeypatch.chdir(tmp_path / "a")
    assert "resumed from " in start(config, nullcontext()).out


def test_a_step_older_than_the_local_checkpoints_is_refused(pool: Pool, run: Path) -> None:
    shutil.rmtree(run / "saved/iter_0000004")
    assert "E813" in refused(pool, run_of(run, f"{ZERO} --ckpt-step 2"))


def test_a_run_without_local_save_does_not_load_the_optional_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of the library do not import it at their top level either, which a rule of the repository checks."""
    name = NodeCheckpoints.__module__
    monkeypatch.delitem(sys.modules, name)
    assert start(tiny_run(tmp_path / "plain", f"--save {tmp_path}/saved --train-iters 1")).status == 0
    assert name not in sys.modules
    flags = f"--save {tmp_path}/other --local-save {tmp_path}/node --local-save-interval 1 --train-iters 1"
    assert start(tiny_run(tmp_path / "other", flags)).status == 0
    assert name in sys.modules
