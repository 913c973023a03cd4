"""Two users on one machine: neither can read the other's files, and planted files are not used."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.arguments.cli import parse
from megatron.checkpoint.lease import LEASE_FILE
from megatron.config.errors import UserError
from megatron.config.privacy import user_name
from megatron.data import index_cache
from megatron.data.index_cache import IndexCache
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.resume_source import preview_start, stored_config
from tests.kit.runs import FLAGS, start, tiny_run
from tests.kit.users import NOBODY, as_user, give, needs_root, public_folder
from tests.unit.data.pairs import write

pytestmark = needs_root

HIM = user_name(NOBODY)
DATA = "--set data.mock_data=false --data-path {0} --split 1,0,0 --train-iters 4"


@pytest.fixture
def scratch() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


def attempts(path: Path, is_folder: bool) -> list[Callable[[], object]]:
    """Return the attempts of another user on a file or folder."""
    if is_folder:
        return [partial(os.listdir, path), partial(os.mkdir, path / "mine"), partial(os.rename, path, f"{path}.mine")]
    return [partial(os.open, path, os.O_RDONLY), partial(os.open, path, os.O_WRONLY), partial(os.unlink, path)]


def useful(paths: list[Path]) -> list[str]:
    """Return the attempts in which another user succeeds."""
    tried = [(path, attempt) for path in paths for attempt in attempts(path, path.is_dir())]

    def succeed() -> list[str]:
        done = []
        for path, attempt in tried:
            try:
                attempt()
            except PermissionError:
                continue
            done.append(f"{path}: {attempt}")
        return done

    return as_user(NOBODY, succeed)


def test_every_file_of_a_run_is_closed_to_others(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    corpus = write(scratch / "corpus", [[1] * 9] * 40)
    flags = (
        f"{DATA.format(corpus)} --data-cache-path {scratch}/cache/here --save {scratch}/run/saved --save-interval 2 "
        f"--local-save {scratch}/local/{{node}} --local-save-interval 1 --tensorboard-dir {scratch}/board "
        f"--wandb-project tests --wandb-save-dir {scratch}/tracker --profile --profile-step-start 1 "
        "--profile-step-end 2"
    )
    assert start(tiny_run(scratch / "run", flags)).status == 0
    written = [path for path in scratch.rglob("*") if path.parent != scratch or path.is_dir()]
    assert {"claim.json", "metrics.jsonl", "manifest.json", "profiles", "wandb"} <= {path.name for path in written}
    assert any(path.suffix == ".lock" for path in written)
    assert useful(written) == []


@pytest.mark.parametrize("planted", [True, False])
def test_a_local_checkpoint_that_another_user_has_made_is_not_loaded(scratch: Path, planted: bool) -> None:
    flags = f"--save {scratch}/a/saved --save-interval 100 --local-save {scratch}/shm --local-save-interval 1"
    flags += " --lr-decay-style constant --train-iters"
    assert start(tiny_run(scratch / "a", f"{flags} 5")).status == 0
    shutil.rmtree(scratch / "a" / "saved")
    if planted:
        give(scratch / "shm", NOBODY, 0o777)
    printed = start(tiny_run(scratch / "a", f"{flags} 6"))
    if planted:
        assert printed.status == 1
        assert f"no checkpoint can be written to {scratch}/shm: it belongs to {HIM}" in printed.err
        assert "fix: --local-save ANOTHER" in printed.err
        (scratch / "shm").chmod(0o777)
        os.chown(scratch / "shm", 0, 0)
        printed = start(tiny_run(scratch / "a", f"{flags} 6"))
        assert f"other users can write to it (mode 0777); close it with chmod go-w {scratch}/shm" in printed.err
    else:
        assert "resumed from" in printed.out
        assert printed.status == 0


def test_checkpoints_and_a_run_folder_of_another_user_are_not_used(scratch: Path) -> None:
    flags = f"--save {scratch}/saved --save-interval 1 --train-iters 2"
    assert start(tiny_run(scratch / "run", flags)).status == 0
    give(scratch / "saved", NOBODY, 0o755)
    printed = start(tiny_run(scratch / "other", flags))
    assert (printed.status, f"{scratch}/saved: it belongs to {HIM}" in printed.err) == (1, True)
    give(scratch / "run", NOBODY, 0o777)
    (scratch / "run" / "failures.jsonl").symlink_to(scratch / "target")
    printed = start(tiny_run(scratch / "run", "--train-iters 2"))
    assert printed.status == 2
    assert f"E701 the run folder {scratch}/run cannot be written: it belongs to {HIM}" in printed.err
    assert not (scratch / "target").exists(), "no file is written through a link of the other user"


def take(path: Path) -> str:
    """Lock a file with read access only, and return the outcome."""
    try:
        file = os.open(path, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "locked"


def test_locks_in_folders_that_others_can_read_are_closed_to_them(scratch: Path) -> None:
    """As in a run folder that was made to be read by all."""
    corpus = write(scratch / "corpus", [[1] * 9] * 40)
    for name in ("run", "run/saved", "cache"):
        (scratch / name).mkdir()
        (scratch / name).chmod(0o755)
    flags = f"{DATA.format(corpus)} --save {scratch}/run/saved --data-cache-path {scratch}/cache"
    assert start(tiny_run(scratch / "run", flags)).status == 0
    locks = [*scratch.rglob(LEASE_FILE), *scratch.rglob("*.lock")]
    assert {path.suffix for path in locks} == {".json", ".lock"}
    assert {as_user(NOBODY, partial(take, path)) for path in locks} == {"EACCES"}


class Holder:
    """A process of another user that has locked a file, which anybody could read, until it is released."""

    def __init__(self, path: Path) -> None:
        path.chmod(0o644)
        receiver, sender = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(sender, take(path).encode())
            os.read(os.pipe()[0], 1)
        assert os.read(receiver, 10) == b"locked"

    def release(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


def test_the_lock_holder_of_a_run_is_named_and_can_be_removed(scratch: Path) -> None:
    """Another user has locked the claim of an earlier version of this program, whose process is dead."""
    flags = f"--save {scratch}/run/saved --save-interval 1 --lr-decay-style constant --train-iters"
    assert start(tiny_run(scratch / "run", f"{flags} 1")).status == 0
    for folder in (scratch / "run", scratch / "run" / "saved", claim := scratch / "run" / "saved" / ".epoch-1"):
        folder.chmod(0o755)
    claim = claim / LEASE_FILE
    claim.write_text(claim.read_text().replace(f'"pid": {os.getpid()}', '"pid": 4'))
    holder = Holder(claim)
    try:
        printed = start(tiny_run(scratch / "run", f"{flags} 2"))
        assert printed.status == 1
        assert f"is in use: process {holder.pid} of {HIM} has locked {claim}, which is of process 4 on" in printed.err
        assert f"fix: --save ANOTHER | rm {claim} # once no start of this run is alive" in printed.err
        claim.unlink()
        assert start(tiny_run(scratch / "run", f"{flags} 2")).status == 0
    finally:
        holder.release()


def test_a_lock_of_the_cache_that_is_never_released_costs_minutes(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index_cache, "WAIT_MESSAGE_SECONDS", 0.2)
    monkeypatch.setattr(index_cache, "LONGEST_WAIT_SECONDS", 0.5)
    tables = {"a": np.arange(3)}
    folder = scratch / "cache"
    IndexCache(folder).tables("order", {"x": 1}, lambda: tables)
    folder.chmod(0o755)
    (lock,) = folder.glob("*.lock")
    shutil.rmtree(lock.with_suffix(""))
    holder = Holder(lock)
    try:
        cache = IndexCache(folder)
        assert cache.tables("order", {"x": 1}, lambda: tables) is tables
        (note,) = cache.notes
        assert f"process {holder.pid} of {HIM} has locked {lock} for " in note
        assert note.endswith(" s): tables are built in memory")
        assert f"s for process {holder.pid} of {HIM} to build {lock.with_suffix('')}\n" in capsys.readouterr().err
        assert cache.tables("order", {"x": 2}, lambda: tables) is tables, "and nothing else is waited for"
    finally:
        holder.release()


@pytest.mark.parametrize(("owner", "mode"), [(NOBODY, 0o755), (0, 0o777)])
def test_a_cache_that_others_could_fill_is_not_used(scratch: Path, owner: int, mode: int) -> None:
    folder, ours = scratch / "cache", {"a": np.arange(3)}
    IndexCache(folder).tables("order", {"x": 1}, lambda: {"a": np.zeros(3)})
    before = sorted(folder.iterdir())
    give(folder, owner, mode)
    cache = IndexCache(folder)
    assert cache.tables("order", {"x": 1}, lambda: ours) is ours
    (note,) = cache.notes
    reason = (
        f"it belongs to {HIM}"
        if owner
        else f"other users can write to it (mode 0777); close it with chmod o-w {folder}"
    )
    assert note == f"{folder} cannot be used ({reason}): tables are built in memory"
    assert sorted(folder.iterdir()) == before


def test_a_group_can_share_a_run_and_a_cache(scratch: Path) -> None:
    """Folders made for a group, with its mask: its other members can read, lock and continue."""
    team, mate = 4321, 1502
    before = os.umask(0o002)
    try:
        for name in ("run", "cache"):
            (scratch / name).mkdir()
            os.chown(scratch / name, 1501, team)
            (scratch / name).chmod(0o2770)
        corpus = write(scratch / "corpus", [[1] * 9] * 40)
        flags = f"{DATA.format(corpus)} --save {scratch}/run/saved --data-cache-path {scratch}/cache"
        printed = start(tiny_run(scratch / "run", flags))
        assert (printed.status, "cannot be used" in printed.err + printed.out) == (2, False)
        assert f"{scratch}/run cannot be written: it belongs to user 1501" in printed.err, "root is not in the group"
        for name in ("run", "cache"):
            os.chown(scratch / name, 0, team)
        printed = start(tiny_run(scratch / "run", flags))
        assert (printed.status, "cannot be used" in printed.err + printed.out) == (0, False)
    finally:
        os.umask(before)
    written = [path for name in ("run", "cache") for path in (scratch / name).rglob("*")]
    assert {path.stat().st_gid for path in written} == {team}
    assert {path.stat().st_mode & stat.S_IRWXO for path in written if path.is_dir()} <= {0, stat.S_IROTH | stat.S_IXOTH}

    def usable() -> list[str]:
        return [str(path) for path in written if not os.access(path, os.R_OK | os.W_OK)]

    assert as_user(mate, usable, [team]) == []
    assert useful(written) == []


@pytest.mark.parametrize("flag", ["--load {0}", "--load {0}/saved", "--save {0}/saved"])
def test_files_without_permission_are_refused(scratch: Path, flag: str) -> None:
    run = scratch / "run"
    assert start(tiny_run(run, f"--save {run}/saved")).status == 0

    def refusal() -> str:
        with pytest.raises(UserError) as refused:
            preview_start(parse([*FLAGS.split(), *flag.format(run).split()], {}, recall=stored_config).config, 1)
        return str(refused.value)

    assert re.search("E802 .* is not writable|E811 .* Permission denied", as_user(NOBODY, refusal))
    with pytest.raises(UserError, match=r"E701 .* Permission denied"):
        as_user(NOBODY, partial(RunLogger, tiny_run(run), world_size=1, device=torch.device("cpu")))
