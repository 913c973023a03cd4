"""Test ``slurm/lib.sh`` on all events of a job, against stand-ins for the commands of Slurm.

The real Slurm is in tests/slurm/. Here every case is one run of bash, in which ``srun`` does what is in the case.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.slurm.recipes import ROOT

STANDINS = {
    "srun": 'echo "srun $*" >>"$CALLS"\n[[ $* != *--check-config* ]] || exit "${REFUSED:-0}"\nsource "$CASE"',
    "scontrol": 'echo "scontrol $*" >>"$CALLS"\n[ "$1" = show ] || exit "${DENIED:-0}"\ntr " " "\\n" <<<"$3"',
    "squeue": """case $* in
    *%T) cat "$(dirname "$ALLOCATED")/state" 2>/dev/null || echo RUNNING ;;
    *%x) echo "${EXCLUDED:-}" ;;
    *%l) echo 1:00:00 ;;
    *) echo "squeue $*" >>"$CALLS" && cat "$ALLOCATED" ;;
    esac""",
    "sbatch": 'echo "sbatch $*" >>"$CALLS"\n[ -z "${SLURM_JOB_ID:-}" ] && echo 8',
    "scancel": 'echo "scancel $*" >>"$CALLS"',
    "sinfo": 'printf "%s\\n" ${CLUSTER:-n1 n2 n3}',
    "sleep": "exec /bin/sleep 0.02",
}
"""Commands, and what stands in for them; what the first tasks of a step do is in the file CASE."""

FINISH = 'touch "$RUN/finished.json"'
UNTIL_STOPPED = 'until ls "$RUN"/slurm/stop.7.*; do sleep 1; done'
IS_CANCELLED = 'echo COMPLETING >"$(dirname "$ALLOCATED")/state"'
SAVE = 'at=$RUN/checkpoints/iter_$(printf %07d $(wc -l <"$CALLS")); mkdir -p "$at"; touch "$at/COMPLETE"'


@dataclass
class Job:
    """A job as Slurm would start it, once or again and again.

    Attributes:
        root: of everything it leaves.
        environ: more of its environment.
    """

    root: Path
    environ: dict[str, str]

    @property
    def run(self) -> Path:
        return self.root / "run"

    def begin(
        self, case: str, restart: int = 0, flags: Sequence[str] = (), log: Path | None = None
    ) -> subprocess.Popen[str]:
        """One start, in which every srun of the ranks runs ``case``."""
        (self.root / "case").write_text(case)
        environ = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.root / "calls"),
            "CASE": str(self.root / "case"),
            "ALLOCATED": str(self.root / "allocated"),
            "RUN": str(self.run),
            "VENV": "none",
            "SMALL": "1",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_PARTITION": "batch",
            "SLURM_RESTART_COUNT": str(restart),
            **self.environ,
        }
        command = ["bash", "slurm/train_175b.sh", *flags]
        with log.open("w") if log else nullcontext(subprocess.PIPE) as out:
            return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT, text=True)

    def start(self, case: str, restart: int = 0) -> tuple[int, str]:
        """The status of one start, and its output."""
        started = self.begin(case, restart)
        message, _ = started.communicate(timeout=60)
        return started.returncode, message

    def signalled(self, case: str, number: signal.Signals, restart: int = 0) -> tuple[int, str]:
        """As :meth:`start`, of one that gets a signal while its ranks are at work."""
        started = self.begin(case, restart)
        wait_for(self.root / "calls", f"stop.7.{restart}")
        started.send_signal(number)
        message, _ = started.communicate(timeout=60)
        return started.returncode, message

    def allocate(self, *nodes: str) -> None:
        (self.root / "allocated").write_text(" ".join(nodes))

    def calls(self, command: str) -> list[str]:
        """Return the words that a command was given; of srun, only when it started ranks."""
        lines = (self.root / "calls").read_text().splitlines()
        printed = [line.removeprefix(command + " ") for line in lines if line.startswith(command + " ")]
        return [words for words in printed if "--check-config" not in words and not words.startswith("show ")]


def fail_device(node: str) -> str:
    """A case in which a rank on a node dies of its device, unless the node is left out."""
    failure = {"host": node, "kind": "device", "sentence": "CUDA error: an illegal memory access"}
    return f'[[ $* != *{node}* ]] || {{ echo {json.dumps(json.dumps(failure))} >>"$RUN/failures.jsonl"; exit 1; }}'


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of three nodes."""
    (tmp_path / "bin").mkdir()
    for name, text in STANDINS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    job = Job(tmp_path, {})
    job.allocate("n1", "n2", "n3")
    return job


@pytest.mark.parametrize(
    ("case", "status", "expected", "reported"),
    [
        pytest.param(f"{FINISH}; exit 9", 0, "slurm: finished", [], id="the marker ends it whatever srun returns"),
        pytest.param(f"{SAVE}; exit 0", 0, "has not finished", ["requeue 7"], id="status 0 without it is no end"),
        pytest.param('echo n1 n3 >"$ALLOCATED"; exit 1', 0, "queued again", ["requeue 7"], id="a node is lost"),
        pytest.param(
            'echo 7.1 >"$RUN/slurm/attempt.7"; exit 1', 1, "a later start of this job", [], id="runs elsewhere"
        ),
        # Slurm would do it: its signal to the script may come after the end of srun on other nodes.
        pytest.param(f"{IS_CANCELLED}; exit 1", 143, "Slurm is ending it (COMPLETING)", [], id="is cancelled"),
    ],
)
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_outcome_of_a_start(
    job: Job, case: str, status: int, expected: str, reported: list[str], launcher: str
) -> None:
    job.environ |= {"LAUNCHER": launcher, "MAX_RESTARTS": "0" if launcher == "srun" else "3"}
    done, message = job.start(case)
    assert done == status
    assert expected in message
    assert job.calls("scontrol") == reported, "and the nodes of sbatch --exclude are left alone"
    assert len(job.calls("srun")) == 1, "agents start their ranks again themselves"
    assert ("--max-restarts=3" in job.calls("srun")[0]) == (launcher == "torchrun")


def test_a_denied_requeue_prints_instructions(job: Job) -> None:
    job.environ["DENIED"] = "1"
    status, message = job.start("exit 1")
    assert status == 1
    assert "sbatch it" in message


def test_the_marker_of_an_earlier_run_proves_nothing(job: Job) -> None:
    job.run.mkdir()
    (job.run / "finished.json").touch()
    assert "has not finished" in job.start("exit 1")[1]


def test_a_requested_stop_ends_the_job(job: Job) -> None:
    status, message = job.start('touch "$RUN/stopped.json"')
    assert status == 0
    assert f"stopped by a request in {job.run}/control" in message
    assert job.calls("scontrol") == []


def test_flags_that_are_refused_are_reported_once(job: Job) -> None:
    job.environ["REFUSED"] = "2"
    assert job.start(FINISH)[0] == 2
    assert job.calls("srun") == job.calls("scontrol") == []


def test_a_chain_without_progress_stops(job: Job) -> None:
    assert [job.start("exit 1", restart)[0] for restart in range(2)] == [0, 0]
    status, message = job.start("exit 1", 2)
    assert status == 1
    assert "3 starts have brought no new checkpoint (newest: none)" in message
    assert job.calls("scontrol").count("requeue 7") == 2
    assert job.start(FINISH, 3)[0] == 1, "it is not started when Slurm itself has requeued it"
    job.environ["SLURM_JOB_ID"] = "8"
    assert job.start(FINISH)[0] == 0, "who submits it again has done something about it"


def test_a_chain_with_progress_goes_on(job: Job) -> None:
    job.environ["MAX_RESTARTS"] = "0"
    assert [job.start(f"{SAVE}; exit 1", restart)[0] for restart in range(5)] == [0] * 5


@pytest.fixture
def chain(job: Job) -> Job:
    """A job that must not be queued again; the next one is job 8."""
    job.environ |= {"CHAIN": "1", "SLURM_JOB_NAME": "mine", "SLURM_JOB_ACCOUNT": "lab", "SLURM_GPUS_PER_NODE": "h100:8"}
    return job


def test_a_job_of_a_chain_queues_the_next_before_its_ranks_start_and_cancels_it_when_finished(chain: Job) -> None:
    assert chain.start(f'grep -q ^sbatch "$CALLS" && {FINISH}')[0] == 0
    (options,) = chain.calls("sbatch")
    expected = "--dependency=singleton --no-requeue --job-name=mine --nodes=3 --partition=batch --time=1:00:00"
    expected += " --account=lab --gpus-per-node=h100:8 slurm/train_175b.sh"
    assert {*expected.split()} <= {*options.split()}
    assert chain.calls("scancel") == ["8"]
    assert chain.calls("scontrol") == ["update JobId=7 Requeue=0"]


def test_a_chain_goes_on_after_a_crash_without_the_node_that_failed(chain: Job) -> None:
    chain.environ["CLUSTER"] = "n1 n2 n3 n4"
    status, message = chain.start(fail_device("n2"))
    assert status == 1
    assert "the next job is 8; newest checkpoint: none" in message
    assert 'first error: {"host": "n2"' in message
    assert chain.calls("scontrol")[1:] == ["update JobId=8 ExcNodeList=n2"]
    assert chain.calls("scancel") == []


def test_a_chain_of_jobs_without_progress_ends(chain: Job) -> None:
    for number, last in (("7", False), ("8", False), ("9", True)):
        chain.environ |= {"SLURM_JOB_ID": number, "CHAIN_ID": "7"}
        status, message = chain.start("exit 1")
        assert status == 1
        assert ("3 starts have brought no new checkpoint" in message) is last
        assert chain.calls("scancel") == (["8"] if last else [])
    chain.environ["SLURM_JOB_ID"] = "10"
    assert chain.start(FINISH)[0] == 1, "a job that was queued besides does not start"


def test_jobs_of_a_chain_that_slurm_ends_without_a_checkpoint_count(chain: Job) -> None:
    """Else those whose time is too short for the first checkpoint would go on for ever."""
    chain.environ["MAX_STALLED"] = "1"
    assert chain.signalled(f"{UNTIL_STOPPED}; exit 1", signal.SIGTERM)[0] == 143
    chain.environ |= {"SLURM_JOB_ID": "8", "CHAIN_ID": "7"}
    assert chain.start(FINISH)[0] == 1


def test_a_job_of_a_chain_that_has_finished_ends_at_once(chain: Job) -> None:
    chain.run.mkdir()
    (chain.run / "finished.json").touch()
    chain.environ["CHAIN_ID"] = "6"
    (chain.root / "calls").touch()
    assert chain.start("exit 1")[0] == 0
    assert chain.calls("srun") == chain.calls("sbatch") == []
    del chain.environ["CHAIN_ID"]
    assert chain.start(FINISH)[0] == 0, "one that a person submits trains further"
    assert len(chain.calls("srun")) == 1


def test_flags_that_are_refused_queue_nothing(chain: Job) -> None:
    chain.environ["REFUSED"] = "2"
    assert chain.start(FINISH)[0] == 2
    assert chain.calls("sbatch") == []


def test_data_that_do_not_fit_on_a_disk_end_the_job_and_its_chain(chain: Job) -> None:
    chain.environ["STAGE"] = "/nvme"
    started = chain.begin("[[ $* != *stage.sh* ]]", flags=("--data-path", "a"))
    assert started.wait(60) == 1
    assert [words.rpartition(" bash ")[2].split()[0] for words in chain.calls("srun")] == ["slurm/stage.sh"]
    assert chain.calls("scancel") == ["8"]
    assert (chain.run / "slurm" / "data_path").read_text() == "--data-path\na\n"
    chain.environ |= {"STAGE": "", "SLURM_JOB_ID": "8"}
    assert chain.start(FINISH)[0] == 0
    assert not (chain.run / "slurm" / "data_path").exists(), "evaluate.sh would take the data of an earlier start"


def test_a_signal_before_the_time_limit_makes_the_stop_file(job: Job) -> None:
    status, message = job.signalled(f"{UNTIL_STOPPED}; {SAVE}", signal.SIGUSR1)
    assert status == 0
    assert "the ranks are to save and stop" in message
    assert "requeue 7" in job.calls("scontrol")
    assert job.start("ls $RUN/slurm/stop.* && exit 1; " + FINISH, 1)[0] == 0
    assert not list((job.run / "slurm").glob("stop.*")), "the stop file of an earlier start is gone"


def test_ranks_that_do_not_stop_are_left_to_slurm(job: Job) -> None:
    job.environ["STOP_SECONDS"] = "0"
    _, message = job.signalled("exec /bin/sleep 90", signal.SIGUSR1)
    assert "have not stopped within 0 s" in message
    assert "requeue 7" in job.calls("scontrol")


def test_a_job_ended_by_slurm_is_not_requeued(job: Job) -> None:
    assert job.signalled(f"{UNTIL_STOPPED}; exit 1", signal.SIGTERM)[0] == 143
    assert job.calls("scontrol") == []


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_spare_takes_the_place_of_a_node_whose_device_fails(job: Job, launcher: str) -> None:
    job.environ |= {"SPARES": "1", "LAUNCHER": launcher, "RANKS_PER_NODE": "2"}
    status, message = job.start(f'echo "$MASTER_ADDR" >>"$RUN/heads"; {fail_device("n1")}; {FINISH}')
    assert status == 0
    assert "a device of n1 has failed" in message
    first, second = job.calls("srun")
    assert "--nodelist=n1,n2" in first
    assert "--nodelist=n2,n3" in second
    assert "--nodes=2" in second
    assert (job.run / "heads").read_text() == "n1\nn2\n"
    node, until, _ = (job.run / "slurm" / "bad_nodes").read_text().split(maxsplit=2)
    assert node == "n1"
    assert int(until) == pytest.approx(time.time() + 24 * 3600, abs=60)


def test_without_a_spare_node_slurm_is_asked_for_another(job: Job) -> None:
    job.environ["CLUSTER"] = "n1 n2 n3 n4"
    assert job.start(fail_device("n2"))[0] == 0
    assert job.calls("scontrol") == ["requeue 7", "update JobId=7 ExcNodeList=n2"]


def test_a_node_is_not_excluded_where_no_other_is(job: Job) -> None:
    job.start(fail_device("n2"))
    assert job.calls("scontrol") == ["requeue 7", "update JobId=7 ExcNodeList="]
    assert job.start(FINISH, 1)[0] == 0
    assert "--nodes=3" in job.calls("srun")[-1]


def test_a_bad_node_is_forgotten_in_time(job: Job) -> None:
    job.environ["SPARES"] = "1"
    (job.run / "slurm").mkdir(parents=True)
    (job.run / "slurm" / "bad_nodes").write_text(f"n1 {int(time.time()) - 1} old\nn2 {int(time.time()) + 99} new\n")
    job.start(FINISH)
    assert "--nodelist=n1,n3" in job.calls("srun")[0]


def test_other_failures_blame_no_node(job: Job) -> None:
    failure = json.dumps({"host": "n1", "kind": "nonfinite", "sentence": "the kind of loss"})
    job.start(f'echo {json.dumps(failure)} >>"$RUN/failures.jsonl"; exit 1')
    assert not (job.run / "slurm" / "bad_nodes").exists()


def test_ranks_of_srun_are_started_again_in_the_job(job: Job) -> None:
    job.environ |= {"MAX_RESTARTS": "2"}
    job.start("exit 1")
    assert len(job.calls("srun")) == 3


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_rendezvous_is_random_and_only_this_user_can_read_it(job: Job, launcher: str) -> None:
    job.environ |= {"LAUNCHER": launcher, "MAX_RESTARTS": "0"}
    output = 'echo "$MASTER_PORT $PET_RDZV_ID" >>"$RUN/seen"; exit 1'
    for number in ("7", "7", "8"):
        job.environ["SLURM_JOB_ID"] = number
        job.start(output)
    first, again, other = (job.run / "seen").read_text().splitlines()
    assert first == again != other, "a job that is queued again is the same run of torchrun"
    kept = job.run / "slurm" / "rendezvous.7"
    assert (kept.read_text().strip(), kept.stat().st_mode & 0o777) == (first, 0o600)
    port, number = first.split()
    assert 10000 <= int(port) < 30000
    assert len(number) == 16
    arguments = " ".join(job.calls("srun"))
    assert port not in arguments
    assert number not in arguments, "ps shows them to every user of the node"


def test_ranks_meet_on_the_interface_of_the_job(job: Job) -> None:
    """The address of the head node on it is asked for there; one node needs none."""
    address = "2: ib0    inet 10.0.7.1/24 brd 10.0.7.255 scope global ib0\\       valid_lft forever"
    case = f'[[ $* != *" ip -oneline"* ]] || {{ echo "{address}"; exit; }}; echo "$MASTER_ADDR" >>"$RUN/seen"; {FINISH}'
    for interface, nodes in (("ib0", 3), ("", 3), ("", 1)):
        job.environ |= {"IFNAME": interface, "SLURM_JOB_NUM_NODES": str(nodes), "RANKS_PER_NODE": "4"}
        job.allocate(*(f"n{number + 1}" for number in range(nodes)))
        assert job.start(case)[0] == 0
    assert (job.run / "seen").read_text().split() == ["10.0.7.1", "n1", "127.0.0.1"]


def test_a_job_that_lost_a_node_goes_on_with_whole_copies_of_the_model(job: Job) -> None:
    job.environ |= {"MIN_NODES": "1", "RANKS_PER_NODE": "2"}  # a copy has TP2 x PP2, two nodes
    job.environ["SLURM_JOB_NUM_NODES"] = "5"
    job.allocate("n1", "n2", "n3", "n4", "n5")
    lost = 'echo n1 n3 n4 >"$ALLOCATED"; grep -q "nodelist=n1,n3 " "$CALLS" && ' + FINISH
    assert job.start(lost)[0] == 0
    assert "--nodelist=n1,n3 " in job.calls("srun")[1]
    assert "--pad-global-batch" in job.calls("srun")[1]


def test_starts_that_slurm_ends_do_not_count_as_stalled(job: Job) -> None:
    for restart in range(4):
        assert job.signalled(f"{UNTIL_STOPPED}; exit 1", signal.SIGTERM, restart)[0] == 143
    assert [job.start("exit 1", restart)[0] for restart in range(4, 7)] == [0, 0, 1]


def test_jobs_that_share_a_run_do_not_change_each_others_state(job: Job) -> None:
    stop = job.run / "slurm" / "stop.6.0"
    stop.parent.mkdir(parents=True)
    stop.touch()
    for restart, status in enumerate((0, 0, 1)):
        assert job.start(f'echo "6 none start 6.{restart}" >>"$RUN/slurm/starts"; exit 1', restart)[0] == status
    assert stop.exists(), "the other's ranks have not seen it yet"


def test_a_log_on_a_full_disk_ends_no_job(job: Job) -> None:
    started = job.begin("exit 1", log=Path("/dev/full"))
    started.wait(timeout=60)
    assert started.returncode == 0
    assert job.calls("scontrol") == ["requeue 7"]


def test_nodes_that_were_excluded_before_stay_excluded(job: Job) -> None:
    job.environ |= {"CLUSTER": "n1 n2 n3 n4 n5", "EXCLUDED": "n5"}
    job.start(fail_device("n2"))
    assert job.calls("scontrol")[-1] == "update JobId=7 ExcNodeList=n2,n5"
    job.environ |= {"EXCLUDED": "n2 n4 n5"}
    (job.run / "slurm" / "bad_nodes").write_text("n2 0 is over\n")
    job.start("exit 1", 1)
    assert job.calls("scontrol")[-1] == "update JobId=7 ExcNodeList=n4,n5"


def test_a_task_of_an_array_speaks_of_itself_alone(job: Job) -> None:
    job.environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    job.start("exit 1")
    assert job.calls("scontrol") == ["requeue 7_2"]
    assert all("--jobs=7_2 " in words for words in job.calls("squeue"))


@pytest.mark.parametrize("flags", [("--save", "elsewhere"), ("--run-dir=elsewhere",), ("--stop-file", "x")])
def test_flags_that_would_be_overridden_are_refused(job: Job, flags: tuple[str, ...]) -> None:
    started = job.begin(FINISH, flags=flags)
    message, _ = started.communicate(timeout=60)
    assert started.returncode == 2
    assert "fix: RUN=FOLDER sbatch" in message


def wait_for(path: Path, words: str) -> None:
    """Wait until a file has the arguments of a start, not of its check."""
    deadline = time.monotonic() + 30
    while not path.exists() or not [x for x in path.read_text().splitlines() if words in x and "--check" not in x]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_failure_leaves_out_only_nodes_of_the_start(job: Job) -> None:
    """Whoever can write to the run folder could otherwise name any node of the cluster, or of another job."""
    failures = [
        json.dumps({"host": host, "kind": "device", "sentence": "x"}) for host in ("n9", "n", "n2 n3", "n1|.*", "*")
    ]
    lines = " ".join(json.dumps(failure) for failure in failures)
    status, message = job.start(f'printf "%s\\n" {lines} >>"$RUN/failures.jsonl"; exit 1')
    assert status == 0
    assert "n9 is no node of this start: not left out" in message
    assert not (job.run / "slurm" / "bad_nodes").exists()
    assert job.calls("scontrol") == ["requeue 7"]


def test_a_new_run_folder_is_closed_to_others_and_an_old_one_stays_as_it_is(job: Job) -> None:
    job.start(FINISH)
    assert job.run.stat().st_mode & 0o777 == 0o700
    job.run.chmod(0o750)
    (job.run / "finished.json").unlink()
    job.start(FINISH)
    assert job.run.stat().st_mode & 0o777 == 0o750
