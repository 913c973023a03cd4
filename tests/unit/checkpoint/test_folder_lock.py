"""A folder is held by one process at a time, and by none that is dead."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import durable_files
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.lease import LEASE_FILE, Lease, acquire_lease, current_lease
from megatron.config.launch import JobStart

HOLDER = """
import sys
from pathlib import Path
from megatron.checkpoint.lease import acquire_lease
with acquire_lease(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_named_and_its_death_frees_the_folder(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        for _ in range(2):  # a refusal does not take the lock away
            with pytest.raises(CheckpointError) as caught, acquire_lease(tmp_path):
                pass
            seen = f"{tmp_path} is in use by process {other.pid} on {socket.gethostname()} since 20"
            assert str(caught.value).startswith(seen)
            assert str(caught.value).endswith(" UTC\n  fix: --save ANOTHER")
        with acquire_lease(tmp_path / "else"):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
    with acquire_lease(tmp_path) as lease:
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [".epoch-2", "else"]
        message = json.loads((tmp_path / ".epoch-2" / LEASE_FILE).read_text())
        assert (lease.epoch, message["epoch"], message["pid"], message["host"]) == (
            2,
            2,
            os.getpid(),
            socket.gethostname(),
        )


def test_held_until_the_end_of_the_block(tmp_path: Path) -> None:
    folder, link = tmp_path / "a" / "b", tmp_path / "link"
    link.symlink_to("a")
    for same in (folder, link / "b"):
        with acquire_lease(folder), pytest.raises(CheckpointError, match="is in use by process"), acquire_lease(same):
            pass
    with pytest.raises(ZeroDivisionError), acquire_lease(folder):
        raise ZeroDivisionError
    with acquire_lease(folder):
        assert CheckpointFolder(folder).candidates() == []


@pytest.mark.parametrize(
    ("module", "call", "code"), [(fcntl, "flock", errno.EIO), (os, "write", errno.ENOSPC), (os, "mkdir", errno.ENOTDIR)]
)
def test_a_folder_that_cannot_be_held_is_refused_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str, code: int
) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, call, fails)
    sentence = rf"no checkpoint can be written to .*{os.strerror(code)}\n  fix: --save"
    with pytest.raises(StorageError, match=sentence), acquire_lease(tmp_path / "runs"):
        pass
    monkeypatch.undo()
    with acquire_lease(tmp_path / "runs"):
        pass


def test_the_claim_is_quoted_with_caution_if_the_system_does_not_know_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "LOCKS", tmp_path / "none")
    with acquire_lease(tmp_path), pytest.raises(CheckpointError) as caught, acquire_lease(tmp_path):
        pass
    claim = tmp_path / ".epoch-1" / LEASE_FILE
    assert f"is in use by process {os.getpid()} on " in str(caught.value)
    assert f"as {claim} has it; this machine does not know which process has locked that file" in str(caught.value)


def test_a_lease_reaches_other_ranks_as_it_is(tmp_path: Path) -> None:
    """Also the lease of a job without a number, as outside of Slurm."""
    with acquire_lease(tmp_path, start=JobStart(job="abc", chain="x")) as lease:
        sent = json.loads(json.dumps(lease.to_json()))
        assert Lease.from_json(tmp_path, sent) == lease
        assert current_lease(tmp_path) == lease
        assert not JobStart(job="abd", chain="x").follows(lease.holder.start)
        assert JobStart(job="7", chain="x").follows(lease.holder.start)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("since", value) for value in (None, "x", [], 1e300, -1e300, float("nan"), float("inf"), 2**62, 10**400)),
        *(("epoch", value) for value in (None, "x", [], float("inf"))),
        *((name, value) for name in ("pid", "host", "token") for value in ([], {}, None, 1.5)),
        *(("start", value) for value in ([], None, 1.5, "x")),
        *((f"start.{name}", value) for name in ("restart", "step", "attempt") for value in (None, "x", [], 1.5)),
        *((f"start.{name}", value) for name in ("job", "cluster", "group", "chain") for value in ([], {}, 1.5)),
        *((name, "missing") for name in ("pid", "host", "token", "since", "start", "epoch")),
    ],
)  # fmt: skip
def test_an_invalid_claim_has_an_unknown_holder(tmp_path: Path, name: str, value: object) -> None:
    """A folder of unknown origin may have one, and it may be locked."""
    with acquire_lease(tmp_path, start=JobStart(job="5", group="g")) as lease:
        claim = json.loads(lease.text)
        group, _, field = name.rpartition(".")
        (claim["start"] if group else claim)[field] = value
        if value == "missing":
            del claim[field]
        (tmp_path / ".epoch-1" / LEASE_FILE).write_text(json.dumps(claim))
        found = current_lease(tmp_path)
        assert "unknown machine" in str(found.holder)
        with pytest.raises(CheckpointError, match=r"is (of|in use by) process 0 on an unknown machine since 1970"):
            acquire_lease(tmp_path, start=JobStart(job="5", restart=1)).__enter__()
