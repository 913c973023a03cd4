"""The start of a run: flags on several ranks, its device, its times, its identity, and prefetching."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import Store, TCPStore

import pretrain_gpt
from megatron.config.errors import UserError
from megatron.config.launch import Launch, threads_exceed_cores
from megatron.data.errors import DataError
from megatron.data.loader import build_data
from megatron.distributed.launch import FAILED_KEY, MissingRanksError, open_store
from megatron.training import main, startup
from megatron.training import start as start_module
from megatron.training.build import build_trainer
from megatron.training.build_model import choose_device, join_distributed
from megatron.training.startup import (
    MAX_NODE_LIST_CHARS,
    PHASES,
    StartupTimer,
    process_start_time,
    start_facts,
    start_phrase,
    startup_line,
)
from tests.kit.processes import free_port
from tests.kit.runs import FLAGS, records, start, tiny_run

ROOT = Path(__file__).parents[3]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local_rank: int | None = None) -> None:
    local = rank if local_rank is None else local_rank
    for name, value in zip(VARIABLES, (rank, world_size, local, world_size, "127.0.0.1")):
        monkeypatch.setenv(name, str(value))


def srun(monkeypatch: pytest.MonkeyPatch, local_rank: int, machines: int = 1) -> None:
    for name, value in zip(SLURM, (0, local_rank, 8, local_rank, machines)):
        monkeypatch.setenv(name, str(value))


# ---- The program


@pytest.mark.parametrize(
    ("rank", "local_rank", "flags", "data"), [(0, 0, True, True), (1, 1, False, False), (8, 0, False, True)]
)
def test_wrong_flags_are_reported_by_rank_0_and_unreadable_data_by_each_machine(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    local_rank: int,
    flags: bool,
    data: bool,
) -> None:
    def unreadable(*arguments: object) -> int:
        raise DataError("the tokenizer is torn")

    monkeypatch.setattr(start_module, "SILENCE_SECONDS", 0.0)
    torchrun(monkeypatch, rank, 16, local_rank)
    assert pretrain_gpt.main(["--hiden-size", "64"]) == 2
    assert ("E001" in capsys.readouterr().err) == flags
    monkeypatch.setattr(start_module, "with_vocabulary", unreadable)
    assert pretrain_gpt.main([*FLAGS.split(), "--global-batch-size", "16"]) == 2
    assert capsys.readouterr().err == ("the tokenizer is torn\n" if data else "")


def test_junk_of_a_launcher_and_a_closed_pipe_raise_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(sys, "stdout", ClosedPipe()):
        assert pretrain_gpt.main([*FLAGS.split(), "--check-config"]) == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert pretrain_gpt.main(FLAGS.split()) == 2
    assert capsys.readouterr().err.startswith("E013 WORLD_SIZE=abc")


class ClosedPipe(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


INTERRUPTED = """
import os, runpy, signal, sys
module, *sys.argv = sys.argv[1:]
class Interrupt:
    def find_spec(self, name, *rest):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["megatron.arguments.cli", "torch"])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module, "pretrain_gpt.py", *FLAGS.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_after_a_failure_the_process_ends_whatever_still_runs() -> None:
    program = (
        "import threading, time, pretrain_gpt\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print('last words', end='')\n"
        "pretrain_gpt.exit_process(3)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "last words")
    assert time.monotonic() - began < 200


def test_an_unwritable_run_folder_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    printed = start(tiny_run(tmp_path))
    assert (printed.status, printed.samples) == (2, {})
    assert printed.err.startswith(f"error: E701 the run folder {tmp_path} cannot be written: Is a directory")


@pytest.mark.parametrize(
    ("ranks", "threads", "exceed"),
    [(1, "", False), (1, "16", True), (2, "", True), (2, "4", False), (2, "5,2", True), (16, "1", True)],
)
def test_threads_wait_without_spinning_only_where_they_exceed_the_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: str, exceed: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    place = {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    assert threads_exceed_cores(place | {"OMP_NUM_THREADS": threads}) == exceed


@pytest.mark.parametrize(("tasks", "exceed"), [("4(x2),3", False), ("9(x3)", True), ("4,9", True)])
def test_tasks_of_srun_share_all_cores_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tasks: str, exceed: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # the cores that srun binds this task to
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    places = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "12", "SLURM_LOCALID": "0"}
    assert threads_exceed_cores(places | {"SLURM_STEP_TASKS_PER_NODE": tasks}) == exceed


# ---- The device


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Pretend that this machine has ``count`` GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize(("name", "count", "device"), [("auto", 0, "cpu"), ("cpu", 8, "cpu"), ("auto", 8, "cuda:3")])
def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch, name: str, count: int, device: str) -> None:
    gpus(monkeypatch, count)
    torchrun(monkeypatch, 3, 8)
    assert choose_device(name) == torch.device(device)


def test_missing_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, 0)
    printed = start(tiny_run(tmp_path, "--device cuda"))
    assert (printed.status, "E207 --device cuda" in printed.err) == (2, True)
    gpus(monkeypatch, 2)
    torchrun(monkeypatch, 0, 4)  # two ranks never share one
    with pytest.raises(UserError, match=r"E207 .* at least 4 ranks, but has 2 GPUs\n  fix: torchrun .*-node 2 \|"):
        choose_device("auto")


def test_a_rank_of_srun_may_see_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    srun(monkeypatch, 5)
    gpus(monkeypatch, 1)
    assert choose_device("cuda") == torch.device("cuda:0")
    gpus(monkeypatch, 8)
    assert choose_device("cuda") == torch.device("cuda:5")
    gpus(monkeypatch, 4)
    with pytest.raises(UserError, match="at least 6 ranks, but has 4 GPUs"):
        choose_device("cuda")


def test_ranks_that_cannot_join_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert join_distributed(tiny_run(tmp_path)) == (0, 1)  # a single process needs no address
    assert not torch.distributed.is_initialized()
    gpus(monkeypatch, 0)
    torchrun(monkeypatch, 1, 2)
    with pytest.raises(UserError, match="E206 the nccl backend cannot serve CPUs"):
        join_distributed(tiny_run(tmp_path, "--device auto --distributed-backend nccl", 2))
    for name in VARIABLES:
        monkeypatch.delenv(name)
    srun(monkeypatch, 1, machines=2)
    with pytest.raises(UserError, match="E009"):
        join_distributed(tiny_run(tmp_path, "--global-batch-size 8", world_size=8))


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megatron.distributed.launch.LATE_SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def join(rank: int, size: int, port: int, minutes: float) -> Store:
        return open_store(Launch("torchrun", rank, size, local_rank=rank, port=port), timedelta(minutes=minutes))

    for rank, absent in ((0, 1), (1, 0)):
        port = free_port()
        text = f"waiting for 1 of 2 ranks at 127.0.0.1:{port}: rank {absent}"
        with pytest.raises(MissingRanksError, match=text) as missed:
            join(rank, 2, port, 0.005)
        assert missed.value.ranks == [absent]
        assert f"{text}\n" in capsys.readouterr().err
    port = free_port()
    with ThreadPoolExecutor(3) as threads:
        stores = [threads.submit(join, rank, 3, port, 1) for rank in (2, 0, 1)]
        assert all(store.result().check(["joined/all"]) for store in stores)


def test_a_rank_that_does_not_join_is_named_under_torchrun_too(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # hosts the store of its ranks
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(agent.port)), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(name if "MASTER" in name else f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launches = [Launch("torchrun", rank, 3, port=agent.port) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        joined = [threads.submit(open_store, launches[rank], timedelta(seconds=1)) for rank in (0, 2)]
        for each in joined:
            with pytest.raises(MissingRanksError, match=r"waiting for 1 of 3 ranks at .*: rank 1; "):
                each.result()
        joined = [threads.submit(open_store, launch, timedelta(minutes=1)) for launch in launches]
        assert [each.result().add(FAILED_KEY, 1) for each in joined] == [1, 2, 3]
        late = [threads.submit(open_store, launch, timedelta(seconds=1)) for launch in launches[1:]]
        for each in late:  # of the next start, in which rank 0 is missing
            with pytest.raises(MissingRanksError, match=r"waiting for 1 of 3 ranks at .*: rank 0; "):
                each.result()
        fewer = [replace(launch, world_size=2) for launch in launches[:2]]
        joined = [threads.submit(open_store, fewer[1], timedelta(minutes=1))]
        time.sleep(0.3)
        assert not joined[0].done()
        joined.append(threads.submit(open_store, fewer[0], timedelta(minutes=1)))
        assert [each.result().add(FAILED_KEY, 1) for each in joined] == [1, 2]


def test_a_rank_that_is_started_twice_and_a_port_in_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    port = free_port()
    launch, second = (Launch("torchrun", rank, 2, port=port) for rank in (0, 1))
    with ThreadPoolExecutor(2) as threads:
        stores = [threads.submit(open_store, each, timedelta(minutes=1)) for each in (launch, second)]
        kept = [store.result() for store in stores]
    with pytest.raises(UserError, match=f"E013 another process at 127.0.0.1:{port} is rank 1, too"):
        open_store(second, timedelta(minutes=1))
    del kept
    with (
        socket.create_server(("", port := free_port())),
        pytest.raises(UserError, match=f"cannot listen at port {port}"),
    ):
        open_store(replace(launch, port=port), timedelta(minutes=1))


@pytest.mark.parametrize(("address", "elsewhere"), [("127.0.0.1", False), ("localhost", True)])
def test_the_store_listens_on_the_address_it_is_given(
    monkeypatch: pytest.MonkeyPatch, address: str, elsewhere: bool
) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", address)
    with ThreadPoolExecutor(2) as threads:
        launches = [Launch("srun", rank, 2, port=port) for rank in (1, 0)]
        stores = [threads.submit(open_store, launch, timedelta(minutes=1)) for launch in launches]
        assert all(store.result().check(["joined/all"]) for store in stores)
        with socket.socket() as other:  # another address of this machine
            assert (other.connect_ex(("127.0.0.2", port)) == 0) == elsewhere


# ---- Reading ahead


def taken(folder: Path, ahead: bool, flags: str = "") -> list[object]:
    """Return what a run reads in each step: tokens, samples, the step that keys dropout, the digest."""
    trainer, found = build_trainer(tiny_run(folder, flags), 0, 1), list[object]()
    while trainer.iteration < trainer.total_steps:
        size, batches = trainer.reader.next_batch_size, trainer.next_batches()
        if ahead:
            trainer.reader.prefetch()
        found += [(b.tokens.tolist(), b.sample_ids.tolist(), b.step) for b in batches]
        found.append(trainer.reader.digest_read)
        trainer.progress.iteration += 1
        trainer.progress.consumed_samples += size
    assert trainer.reader._prefetched is None
    return found


@pytest.mark.parametrize("flags", ["", "--rampup-batch-size 2 1 6 --train-samples 20 --set training.train_iters=null"])
def test_reading_ahead_changes_nothing_that_is_read(flags: str, tmp_path: Path) -> None:
    assert taken(tmp_path, ahead=True, flags=flags) == taken(tmp_path, ahead=False, flags=flags)


def test_an_error_while_prefetching_is_raised_at_the_step_that_needs_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tiny_run(tmp_path), 0, 1)
    trainer.next_batches()
    before = trainer.reader.digest_read
    refuse = DataError("sample 4 cannot be read")
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.data), "micro_batch", lambda *arguments: (_ for _ in ()).throw(refuse))
        trainer.reader.prefetch()
        assert (trainer.reader._prefetched, trainer.reader.digest_read) == (None, before)
        with pytest.raises(DataError, match="sample 4"):
            trainer.next_batches()
    trainer.reader.prefetch()
    assert trainer.timers.read(1)["batch-generator"] > 0.0  # otherwise slow data would not show


# ---- Times


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time of the clock."""
    times = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: times[-1])
    return times


def test_each_phase_excludes_its_inner_phases(now: list[float]) -> None:
    watch = StartupTimer(90.0, "python")
    watch.enter("flags")
    now.append(101.0)
    watch.enter("other")
    with watch("checkpoint"):
        now.append(103.0)
        with suppress(ValueError), watch("data"):
            now.append(107.0)
            raise ValueError("a phase that raises ends")
        now.append(115.0)
    now.append(131.0)
    watch.enter("first step")
    now.append(163.0)
    watch.stop()
    now.append(999.0)
    assert {name: seconds for name, seconds in watch.seconds.items() if seconds} == {
        "python": 10.0, "flags": 1.0, "checkpoint": 10.0, "data": 4.0, "other": 16.0, "first step": 32.0
    }  # fmt: skip
    assert sum(watch.seconds.values()) == 163.0 - watch.began
    assert not watch.running


def test_the_clock_starts_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when torch is imported and the ranks have joined, nor at the first line of this program."""
    program = "from megatron.training.startup import process_start_time; print(process_start_time())"
    before = time.monotonic()
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    after = time.monotonic()
    assert before - 0.02 <= float(out) < after  # the kernel counts in hundredths
    assert float(out) - before < (after - before) / 2
    given: list[StartupTimer] = []
    monkeypatch.setattr(main, "run", lambda config, notes, startup, plan: given.append(startup) or 0)
    assert pretrain_gpt.main([*FLAGS.split(), "--run-dir", str(tmp_path)]) == 0
    assert given[0].began == pytest.approx(process_start_time(), abs=0.02)
    assert given[0].began < before
    assert {name for name, seconds in given[0].seconds.items() if seconds} == {"python", "flags", "imports"}


def test_without_a_proc_file_system_the_process_begins_now(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "Path", lambda name: Path("/nowhere") / name.lstrip("/"))
    assert process_start_time() == 100.0


def test_the_line_names_slow_phases_and_slow_ranks() -> None:
    mine = dict.fromkeys(PHASES, 0.0) | {"imports": 3.06, "data": 0.04, "first step": 10.0}
    assert startup_line(mine, mine) == "start-up 13.1s: imports 3.1 first step 10.0"
    longest = mine | {"imports": 9.0, "first step": 10.9}
    assert startup_line(mine, longest).endswith("first step 10.0; longest on any rank: imports 9.0")


def test_startup_times_are_logged_once_after_the_first_step(tmp_path: Path) -> None:
    """Data are opened while a checkpoint is loaded: the times of reading overlap."""

    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.5)
        return build_data(*arguments, **named)

    flags = f"--save {tmp_path}/saved --save-interval 2 --log-interval 3"
    start(tiny_run(tmp_path, f"{flags} --exit-interval 2"))
    started = start(tiny_run(tmp_path, flags), patch("megatron.training.batch_reader.build_data", slowly))
    first, event = [record for record in records(tmp_path, "event") if record["event"] == "start-up"]
    assert (first["iteration"], event["iteration"]) == (1, 3)
    assert list(event["phases"]) == list(event["slowest"]) == [*PHASES]
    assert event["seconds"] == pytest.approx(sum(event["phases"].values()), abs=0.01)
    assert event["phases"] == event["slowest"]
    assert event["phases"]["data"] > 0.4
    assert all(event["phases"][name] > 0 for name in ("model", "checkpoint", "first step"))
    (line,) = [line for line in started.out.splitlines() if line.startswith("start-up ")]
    assert started.out.index(line) < started.out.index("3/6 ")
    assert "start-up" not in start(tiny_run(tmp_path, flags)).out, "there is no step"


def test_every_phase_is_documented() -> None:
    docs = (ROOT / "docs/running.md").read_text(encoding="utf-8")
    table = docs.split("## How long a start takes\n")[1].split("\n## ")[0].split("|---|---|\n")[1].split("\n\n")[0]
    assert table.splitlines() == [f"| `{name}` | {meaning} |" for name, meaning in PHASES.items()]


# ---- What identifies a start

JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_STEP_NODELIST": "node[1-3]",
}
ELASTIC = {"TORCHELASTIC_RUN_ID": "17", "TORCHELASTIC_RESTART_COUNT": "1"}


def test_facts_of_a_start() -> None:
    assert start_facts({}, None) == {}
    assert start_phrase({}) == ""
    facts = start_facts(JOB | ELASTIC, 7)
    assert facts == {
        "epoch": 7,
        "slurm-job": "17",
        "slurm-restart": 2,
        "torchrun-run": "17",
        "torchrun-restart": 1,
        "nodes": "node[1-3]",  # those that the step runs on
    }
    assert start_phrase(facts) == "Slurm job 17 restart 2, torchrun restart 1, on node[1-3]"
    assert start_phrase(start_facts({"SLURM_JOB_ID": "17"}, None)) == "Slurm job 17 restart 0"
    assert "torchrun-restart" not in start_facts(ELASTIC | {"TORCHELASTIC_RESTART_COUNT": "0"}, None)
    nodes = "node[" + ",".join(str(number) for number in range(1, 200, 2)) + "]"
    facts = start_facts(JOB | {"SLURM_STEP_NODELIST": nodes}, None)
    assert facts["nodes"] == nodes
    assert len(start_phrase(facts).partition(" on ")[2]) == MAX_NODE_LIST_CHARS


def test_the_first_line_and_the_records_name_the_job(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, f"--save {tmp_path}/saved")
    with patch.dict(os.environ, JOB):
        printed = start(config)
    assert printed.out.splitlines()[0] == "Slurm job 17 restart 2, on node[1-3]"
    (event,) = [record for record in records(tmp_path, "event") if record["event"] == "start"]
    assert (event["slurm-job"], event["epoch"]) == ("17", 1)
    assert "Slurm job 17 restart 2" in (tmp_path / "incidents.md").read_text().splitlines()[0]
