"""Every row of docs/operations.md: a symptom is planted, and the command of the row shows what the row promises."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch

from megatron.arguments.megatron_flags import foreign_flags
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.rewinds import record_corruption
from megatron.config.reliability import ReliabilityConfig
from megatron.distributed.launch import world_group
from megatron.training.elastic import ElasticReplica
from megatron.training.loggers.alerts import Alerts
from megatron.training.loggers.run_folder import JsonLinesLogger
from megatron.training.rank_log import rank_log
from megatron.training.replicas.members import Member
from megatron.training.stall_watch import save_stall
from megatron.training.stalls import explain_stall
from megatron.training.stop import StopRequest
from megatron.training.trainer import Trainer
from tests.kit.processes import ForkedProgram, free_port
from tests.kit.runs import before_step, spoil_step
from tests.unit import pages
from tests.unit.doctor.test_nodes import rank_of_job
from tests.unit.training.test_stalls import recorded
from tools.lib import disk_health

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    """A row of the page."""

    sees: str
    command: str
    shows: str


def table_rows(text: str) -> list[Row]:
    """Return the rows of all tables of a page, their commands without backticks."""
    found = re.findall(r"^\| ([^|\n]+) \| `([^`\n]+)` \| ([^\n]+) \|$", text, re.MULTILINE)
    return [Row(*cells) for cells in found]


ROWS = table_rows(pages.page("operations"))


class Shown(NamedTuple):
    """What a command has printed, and its exit status."""

    status: int
    text: str


@dataclass
class Case:
    """A row, and what its command runs on.

    Attributes:
        row: of the page.
        site: a finished run, its data and its tokenizer; not to be changed.
        folder: of this test.
        failed: a run whose third step is NaN; not to be changed.
        words: what the capital words of commands stand for.
        flags: what `...` stands for.
    """

    row: Row
    site: Path
    folder: Path
    failed: Path
    words: dict[str, str] = field(default_factory=dict)
    flags: str = ""

    def run(self, *around: AbstractContextManager[Any], **words: object) -> Shown:
        """Run the row's command as it is on the page, with ``words`` replaced; a Python program in this process."""
        command = self.row.command.replace(" ... ", f" {self.flags} ").replace(" ...", f" {self.flags}")
        for name, value in (self.words | words).items():
            command = re.sub(rf"\b{name.replace('_', '-')}\b(?!-)", str(value), command)
        if not (found := re.match(r"(?:srun )?python (\S+\.py|\S+/cluster_check)(.*)", command)):
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=self.folder)
            return Shown(done.returncode, done.stdout + done.stderr)
        return call(found[1], shlex.split(found[2]), *around)

    def copy(self) -> Path:
        """Return a copy of the run that may be changed; its name stands for RUN and SAVE from now on."""
        shutil.copytree(self.site / "run", self.folder / "run")
        self.words |= {"RUN": str(self.folder / "run"), "SAVE": str(self.folder / "run" / "saved")}
        return self.folder / "run"


def call(program: str, argv: Sequence[str], *around: AbstractContextManager[Any]) -> Shown:
    """Run a program of the repository in this process."""
    path = Path(program) / "__main__.py" if not program.endswith(".py") else Path(program)
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    out = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(out))
        for context in (patch("megatron.training.loggers.run_logger.draw_plots"), patch.dict(os.environ), *around):
            stack.enter_context(context)
        try:
            status = module.main([*argv])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Shown(status, out.getvalue())


MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --max-position-embeddings 32 "
    "--seq-length 16 --device cpu --global-batch-size 4 --lr 1e-2"
)
STEPS = 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a tokenizer, token files, and a run of four steps with two checkpoints."""
    root = tmp_path_factory.mktemp("site")
    lines = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 30
    (root / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {root}/bpe"
    made = [
        ("tools/train_tokenizer.py", f"--input {root}/text.jsonl --vocab-size 280 --output {root}/bpe"),
        ("tools/preprocess_data.py", f"--input {root}/text.jsonl --output-prefix {root}/data --append-eod {tokenizer}"),
        ("pretrain_gpt.py", f"{flags_of(root)} --run-dir {root}/run --save {root}/run/saved --save-interval 2"),
    ]
    for program, flags in made:
        shown = call(program, flags.split())
        assert shown.status == 0, shown.text
    return root


def flags_of(root: Path, steps: int = STEPS) -> str:
    """Flags of a run on the data of the site."""
    data = f"--data-path {root}/data_text_document --split 8,1,1 --eval-iters 1"
    return f"{MODEL} {data} --train-iters {steps} --log-interval 1"


@pytest.fixture(scope="module")
def failed(site: Path) -> Path:
    """A run whose third step is NaN."""
    folder = site / "failed"
    shown = call("pretrain_gpt.py", f"{flags_of(site)} --run-dir {folder}".split(), before_step(3, spoil_step))
    assert shown.status == 1, shown.text
    return folder


Exercise = Callable[[Case], None]
EXERCISES: dict[str, Exercise] = {}


def exercise(*sees: str) -> Callable[[Exercise], Exercise]:
    """Register the test of the rows that begin with these words."""

    def register(function: Exercise) -> Exercise:
        EXERCISES.update(dict.fromkeys(sees, function))
        return function

    return register


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.sees)
def test_the_command_shows_what_the_row_promises(
    row: Row, site: Path, failed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_health, "SECONDS", 0.02)
    words = {
        "RUN": f"{site}/run",
        "SAVE": f"{site}/run/saved",
        "CKPT": f"{site}/run/saved/iter_0000004",
        "CKPT-2": f"{site}/run/saved/iter_0000002",
        "PREFIX": f"{site}/data_text_document",
        "RUN-2": f"{tmp_path}/run-2",
        "SAVE-2": f"{tmp_path}/saved-2",
        "N": "2",
    }
    words = dict(sorted(words.items(), key=lambda word: -len(word[0])))
    EXERCISES[row.sees](Case(row, site, tmp_path, failed, words, flags_of(site)))


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    assert sorted(row.sees for row in ROWS) == sorted(EXERCISES)
    lines = [
        line
        for line in pages.page("operations").splitlines()
        if line.startswith("| ") and " run | it shows" not in line
    ]
    assert len(ROWS) == len(lines), "each row has three cells and one command"
    assert table_rows("| a | `b` | c |\n| d | e | f |\n") == [Row("a", "b", "c")]


# ---- It does not start


@exercise("codes such as E210 before the first step")
def _(case: Case) -> None:
    case.flags += " --tensor-model-parallel-size 3 --lr -1"
    shown = case.run(N=6)
    assert shown.status == 2
    assert len(set(re.findall(r"^E\d{3} ", shown.text, re.MULTILINE))) >= 2
    assert "fix: " in shown.text


@exercise("E004: an option of Megatron-LM is refused")
def _(case: Case) -> None:
    refused = next(name for name, flag in foreign_flags().handled.items() if flag.kind == "refused" and not flag.values)
    (case.folder / "train.sh").write_text(f"torchrun pretrain_gpt.py {refused} --num-layers 2\n")
    shown = case.run(SCRIPT=f"{case.folder / 'train'}")
    assert shown.status == 1
    assert refused in shown.text
    assert "missing" in shown.text


@exercise("one rank alone fails, or each start ends elsewhere")
def _(case: Case) -> None:
    case.flags += " --use-distributed-optimizer"
    shown = case.run(N=2, R=1)
    assert (shown.status, "fake world rank 1 of 2" in shown.text) == (0, True)


@exercise("the first step comes after minutes")
def _(case: Case) -> None:
    event = json.loads(case.run().text)
    assert event["seconds"] == pytest.approx(sum(event["phases"].values()), abs=0.1)


@exercise("a machine is new, or something is odd", "a GPU error, or the same node each time")
def _(case: Case) -> None:
    (case.folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (case.folder / "nvidia-smi").chmod(0o755)
    with patch("tools.lib.gpu_health.has_driver", lambda: True):
        shown = case.run(
            patch.dict(os.environ, {"PATH": f"{case.folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"})
        )
    assert shown.status == 1
    assert "nvidia-smi is missing, fails or does not answer" in shown.text


JOB = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
"""Variables of a job of two nodes."""


@exercise("ranks do not join", "`slow rN` in each log line")
def _(case: Case) -> None:
    """The first of two nodes, and the second does not come; tests/unit/doctor has three, one of which is slow."""
    environ = JOB | {"SLURM_PROCID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shown = case.run(patch.dict(os.environ, environ), patch("tools.cluster_check.nodes.JOIN_SECONDS", 0.2))
    assert (shown.status, "the ranks could not join" in shown.text) == (1, True), shown.text


@pytest.mark.slow
def test_the_doctor_joins_two_nodes(tmp_path: Path) -> None:
    """The long form of `srun python tools/doctor.py`."""
    environ = JOB | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                ForkedProgram(
                    rank_of_job,
                    [],
                    output=tmp_path / f"{rank}.log",
                    environment=environ | {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{rank}"},
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.wait(120.0)
    assert re.search(r"^node0 +0-0 .*\nnode1 +1-1 ", ranks[0].output, re.MULTILINE), ranks[0].output


@exercise("a new cluster")
def _(case: Case) -> None:
    """The checks themselves run in tests/distributed/test_acceptance.py."""
    shown = case.run(N=0)
    assert (shown.status, "--nproc 0 must be above 0" in shown.text) == (2, True)


# ---- Resuming


@exercise("which checkpoint would the next start use?")
def _(case: Case) -> None:
    case.flags += f" --save {case.words['SAVE']} --lr 2e-2 --train-iters 6"
    shown = case.run()
    assert "iter_0000004" in shown.text
    assert "--lr: checkpoint 0.01 -> now 0.02" in shown.text


def largest(folder: Path) -> Path:
    """Return the largest file in a folder."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def damage(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@exercise("E811 no usable checkpoint")
def _(case: Case) -> None:
    file = largest(case.copy() / "saved" / "iter_0000004")
    file.write_bytes(file.read_bytes()[:-1])
    lines = case.run().text.splitlines()
    assert any("iter_0000002" in line and "complete" in line for line in lines)
    assert any("iter_0000004" in line and file.name in line for line in lines)


@exercise("E821 to E825: something differs")
def _(case: Case) -> None:
    shown = case.run()
    assert shown.status == 0
    assert "hidden_size" in shown.text
    assert "exp_avg" in shown.text


@exercise("E804 or another run holds the folder")
def _(case: Case) -> None:
    claim = json.loads(case.run().text)
    assert str(os.getpid()) in json.dumps(claim)


@exercise("E815 other data")
def _(case: Case) -> None:
    run = case.copy()
    copy_data(case)
    text = (run / "config.yaml").read_text().replace(f"{case.site}/data", f"{case.folder}/data")
    (run / "config.yaml").write_text(text)
    assert case.run().status == 0
    assert call("tools/preprocess_data.py", preprocess_again(case)).status == 0
    shown = case.run()
    assert (shown.status, "other data" in shown.text or "not those" in shown.text or "differ" in shown.text) == (
        1,
        True,
    )


def copy_data(case: Case) -> None:
    """Copy the token files into the folder of the test."""
    for path in case.site.glob("data_text_document.*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, case.folder / path.name)


def preprocess_again(case: Case) -> list[str]:
    """Flags that write other tokens into the place of the data."""
    (case.folder / "other.jsonl").write_text(json.dumps({"text": "jumps over the lazy dog"}) + "\n")
    (case.folder / "other.jsonl").write_text((case.folder / "other.jsonl").read_text() * 60)
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {case.site}/bpe"
    places = f"--input {case.folder}/other.jsonl --output-prefix {case.folder}/data --overwrite"
    return f"{places} --append-eod {tokenizer}".split()


# ---- Hangs


@exercise("`stalled for 10 minutes`", "and its place in the code")
def _(case: Case) -> None:
    """Rank 1 of two has called nothing, and rank 0 waits for it."""
    places = {0: recorded([("dp", (0, 1), "all-reduce", 7)], awaited=True), 1: recorded([], awaited=False)}
    for rank, place in places.items():
        place["stacks"] = f'Thread (most recent call first):\n  File "data.py", line {rank} in read\n'
    save_stall(str(case.copy()), explain_stall(places, 600.0))
    text = case.run().text
    if "rank_*" in case.row.command:
        assert 'File "data.py", line 1 in read' in text
    else:
        facts = json.loads(text)["facts"]
        assert (facts["culprits"], facts["places"]["0"]["groups"][0]["awaited"]["operation"]) == ([1], "all-reduce")


@exercise("nothing, for longer than a step takes")
def _(case: Case) -> None:
    with subprocess.Popen(["sleep", "60"]) as program:
        program.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED)
        assert re.search(r"^State:\s+T", case.run(PID=program.pid).text, re.MULTILINE)
        program.kill()


# ---- Crashes


@exercise("many tracebacks, or none")
def _(case: Case) -> None:
    case.words["RUN"] = str(case.failed)
    line = json.loads(case.run().text)
    assert (line["rank"], line["kind"]) == (0, "nonfinite")


@exercise("it stopped at night")
def _(case: Case) -> None:
    case.words["RUN"] = str(case.failed)
    assert re.search(r"step 3.*(error|nonfinite|not finite)", case.run().text)


@exercise("the messages of one rank")
def _(case: Case) -> None:
    case.words["RUN"] = str(case.failed)
    shown = case.run()
    assert re.search(r"rank 0 of 1 on .*\n(.*\n)*error: .*not finite", shown.text)


def crash(run_dir: str) -> int:
    """Abort as a rank of a run."""
    with rank_log(run_dir, 3, 8, {}):
        os.abort()


@exercise("`lost contact`, and no traceback")
def _(case: Case) -> None:
    run = case.copy()
    with ForkedProgram(crash, str(run), output=case.folder / "printed") as program:
        assert program.wait(60.0) == -signal.SIGABRT
    assert case.run().text.split() == [f"{run}/ranks/rank_00003.log"]


@exercise("out of memory")
def _(case: Case) -> None:
    case.flags += " --vocab-size 280"
    shown = case.run()
    assert (shown.status, "ZeRO" in shown.text) == (0, True)


@exercise("another exit status than 0")
def _(case: Case) -> None:
    assert json.loads(case.run().text)["iteration"] == STEPS
    case.words["RUN"] = str(case.failed)
    assert case.run().status == 1


# ---- Spikes


@exercise("an incident in the log")
def _(case: Case) -> None:
    shown = case.run(N=3)
    assert shown.status == 0, shown.text
    assert re.search(r"equal|same", shown.text)


@exercise("the loss jumps", "a picture of it")
def _(case: Case) -> None:
    run = case.copy()
    assert case.run().status == 0
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


@exercise("one step was bad")
def _(case: Case) -> None:
    shown = case.run()
    assert shown.status == 0
    assert re.search(r"quick brown|liquor jugs", shown.text)


@exercise("single bad batches, to be skipped")
def _(case: Case) -> None:
    case.flags += f" --run-dir {case.folder}/run"
    shown = case.run(before_step(3, spoil_step))
    assert shown.status == 0
    assert "skipped the update of step 3" in shown.text + (case.folder / "run" / "incidents.md").read_text()


@exercise("and to be left out for ever")
def _(case: Case) -> None:
    def jump(trainer: Trainer) -> None:
        if not jumped:
            jumped.append(trainer.iteration)
            for parameter in trainer.chunks[next(iter(trainer.chunks))].parameters():
                parameter.data.mul_(50.0)

    jumped: list[int] = []
    case.flags += (
        f" --spike-window 4 --save-interval 1 --save {case.folder}/saved --run-dir {case.folder}/run --train-iters 6"
    )
    shown = case.run(before_step(5, jump))
    assert (shown.status, jumped) == (0, [4]), shown.text
    assert json.loads((case.folder / "saved" / "rewinds.json").read_text())


@exercise("it does not recover")
def _(case: Case) -> None:
    shown = case.run()
    assert shown.status == 0
    newest, _ = CheckpointFolder(Path(case.words["SAVE-2"])).newest()
    assert newest.path.name == "iter_0000004"
    assert "3/4" in shown.text
    assert "2/4 " not in shown.text


# ---- Wrong bits


@exercise("a GPU may compute wrong")
def _(case: Case) -> None:
    def flip(trainer: Trainer) -> None:
        """Change one output of step 2, once."""
        block = next(module for name, module in trainer.chunks[next(iter(trainer.chunks))].named_modules() if name)
        hook = block.register_forward_hook(lambda module, inputs, output: (hook.remove(), output * 1.5)[1])

    case.flags += f" --save {case.folder}/saved --run-dir {case.folder}/run"
    shown = case.run(before_step(2, flip), N=2)
    assert (shown.status, "E982" in shown.text) == (1, True), shown.text
    assert (case.folder / "saved" / "rewinds.json").exists()


@exercise("E982 corruption was found", "E984: the next start is refused")
def _(case: Case) -> None:
    saved = case.copy() / "saved"
    record_corruption(saved, clean=2, found=4)
    if case.row.command.startswith("cat"):
        (found,) = json.loads(case.run().text)
        assert (found["kind"], found["step"], found["steps"]) == ("corruption", 4, 2)
        return
    case.flags += f" --save {saved}"
    assert "E984" in call("pretrain_gpt.py", case.flags.split()).text
    shown = case.run()
    assert (shown.status, "corruption was found in step 4" in shown.text, "3/4" in shown.text) == (0, True, True), (
        shown.text
    )


# ---- Replicas and alerts


@exercise("`elastic replica 1 left`")
def _(case: Case) -> None:
    """What a replica notes; tests/distributed/test_elastic_replicas.py kills some."""
    run = case.copy()
    log = JsonLinesLogger(run / "metrics.jsonl", warn=lambda text: None)
    replica = Mock(_members=[Member(0, "a", {}), Member(1, "b", {})], trainer=Mock(iteration=57))
    replica.log.warning = lambda text, kind, alert: log.write({"event": "warning", "text": text, "kind": kind})
    ElasticReplica._accept(replica, [Member(0, "a", {})])
    log.close()
    assert json.loads(case.run().text)["text"] == "elastic replica 1 left after step 57; the run has replica 0"


@exercise("an alert that did not arrive")
def _(case: Case) -> None:
    options = ReliabilityConfig(alert_command="true")
    Alerts(options, str(case.copy())).send("spike", "the loss of step 3 is 9 times as large", 3)
    line = json.loads(case.run().text)
    assert (line["event"], line["step"]) == ("spike", 3)


@exercise("a new alert command")
def _(case: Case) -> None:
    shown = case.run(PROGRAM="no-such-program")
    assert (shown.status, "E710" in shown.text) == (2, True)
    assert case.run(PROGRAM="true").status == 0


# ---- Speed


@exercise("less tokens/s than planned", "its state")
def _(case: Case) -> None:
    case.copy()
    path = Path(case.words["RUN"]) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"lm loss"' in line)
    path.write_text("".join(lines[: last + 1]))
    line = json.loads(case.run().text)
    assert {"iteration", "lm loss", "tokens-per-second", "data-wait", "goodput"} <= line.keys()


def request_of(case: Case) -> Callable[[Trainer], None]:
    """Return an act that runs the row's command on the run of this test."""
    case.words["RUN"] = str(case.folder / "run")

    def act(trainer: Trainer) -> None:
        case.run()

    return act


@exercise("and no wait explains it")
def _(case: Case) -> None:
    """The request is read; tests/unit/training/test_profiling.py records one."""
    stop = StopRequest(world_group(0, 1), torch.device("cpu"), None, None, None, str(case.copy()))
    assert case.run().status == 0
    assert (stop.poll(), stop.requests.profile) == (0, 2)
    stop.restore()


@exercise("a large `bubble`")
def _(case: Case) -> None:
    """A single rank has no timeline; tests/distributed/test_pipeline_profile.py draws one of four."""
    act = request_of(case)
    flags = f"{case.flags} --train-iters 5 --run-dir {case.folder}/run".split()
    shown = call("pretrain_gpt.py", flags, patch("megatron.training.stop.FILE_CHECK_SECONDS", 0.0), before_step(2, act))
    assert shown.status == 0, shown.text
    assert [path.name for path in (case.folder / "run" / "profiles").glob("step_*_pipeline.json")]


@exercise("a large `communication-share`")
def _(case: Case) -> None:
    shown = case.run(NAME="h100-80g")
    assert (shown.status, "measured in training" in shown.text) == (0, True)


# ---- Disks


@exercise("saves or the data are slow")
def _(case: Case) -> None:
    shown = case.run()
    assert re.search(r"--save +one process writes \d+ MB/s", shown.text)
    assert re.search(r"--data-path +data_text_document.bin .* MB/s", shown.text)


@exercise("E816 no space")
def _(case: Case) -> None:
    assert re.findall(r"^\d+\t.*iter_0000002\n\d+\t.*iter_0000004", case.run().text)


@exercise("a checkpoint may be damaged")
def _(case: Case) -> None:
    file = largest(case.copy() / "saved" / "iter_0000002")
    assert case.run().status == 0
    damage(file)
    shown = case.run()
    assert (shown.status, file.name in shown.text) == (1, True)


@exercise("E707 copies of weights differ")
def _(case: Case) -> None:
    shown = case.run()
    assert (shown.status, "exp_avg" in shown.text) == (1, True)


# ---- Data


@exercise("a token file may be damaged")
def _(case: Case) -> None:
    assert case.run().status == 0
    copy_data(case)
    with (case.folder / "data_text_document.bin").open("r+b") as file:
        file.write(b"\xff\xff")
    shown = case.run(PREFIX=f"{case.folder}/data_text_document")
    assert shown.status == 1, shown.text


@exercise("wrong shares of sources")
def _(case: Case) -> None:
    shown = case.run()
    assert (shown.status, "data_text_document" in shown.text) == (0, True)


@exercise("two runs differ")
def _(case: Case) -> None:
    other = case.words["RUN-2"]
    assert call("pretrain_gpt.py", f"{case.flags} --seed 7 --run-dir {other}".split()).status == 0
    shown = case.run()
    assert (shown.status, "--seed: 1234 | 7" in shown.text) == (1, True)


@exercise("two layouts differ")
def _(case: Case) -> None:
    """That differences are found is shown in tests/unit/tools/test_verify.py; here the flags are read."""
    shown = case.run(N=3)
    assert shown.status == 2, "4 samples cannot be divided over 3 ranks"


# ---- A running job


@exercise("all of it, while it runs", "a page of it")
def _(case: Case) -> None:
    run = case.copy()
    assert case.run().status == 0
    assert "<html" in (run / "report.html").read_text()


@exercise("the same from a batch script")
def _(case: Case) -> None:
    act = request_of(case)
    (case.folder / "run").mkdir()
    flags = f"{case.flags} --stop-file {case.folder}/run/stop --save {case.folder}/saved --run-dir {case.folder}/run"
    shown = call("pretrain_gpt.py", flags.split(), before_step(2, act))
    assert shown.status == 0, shown.text
    assert [path.name for path in (case.folder / "saved").glob("iter_*")] == ["iter_0000002"]


@exercise("the same by a signal")
def _(case: Case) -> None:
    case.words["PID"] = str(os.getpid())
    act = request_of(case)
    flags = f"{case.flags} --save {case.folder}/saved --run-dir {case.folder}/run".split()
    shown = call("pretrain_gpt.py", flags, before_step(2, act))
    assert shown.status == 143, shown.text
    assert [path.name for path in (case.folder / "saved").glob("iter_*")] == ["iter_0000002"]


@exercise("a checkpoint now", "to stop it after this step, with a save")
def _(case: Case) -> None:
    """The tool waits for the answer in a process of its own, while the run goes on."""
    case.words["RUN"] = str(case.folder / "run")
    tool = Path("tools/control.py")
    words = shlex.split(case.row.command.replace("RUN", case.words["RUN"]))[2:]
    asked: list[ForkedProgram] = []
    with ExitStack() as stack:

        def ask(trainer: Trainer) -> None:
            program = ForkedProgram(run_tool, str(tool), [*words], output=case.folder / "answer")
            asked.append(stack.enter_context(program))
            while not [*Path(case.words["RUN"]).glob("control*")] and program.poll() is None:
                pass

        flags = f"{case.flags} --save {case.folder}/saved --run-dir {case.folder}/run".split()
        quickly = patch("megatron.training.control.FILE_CHECK_SECONDS", 0.0)
        shown = call("pretrain_gpt.py", flags, quickly, before_step(2, ask))
        assert shown.status == 0, shown.text
        assert asked[0].wait(60.0) == 0, asked[0].output
    names = {path.name for path in (case.folder / "saved").glob("iter_*")}
    assert len(names) == (1 if words[-1] == "stop" else 2), asked[0].output


def run_tool(program: str, argv: list[str]) -> int:
    """Run a tool in a process of its own."""
    module = importlib.import_module(".".join(Path(program).with_suffix("").parts))
    return int(module.main(argv))


# ---- Was it good?


@exercise("its loss on held-out data")
def _(case: Case) -> None:
    case.flags += f" --load {case.words['SAVE']}"
    shown = case.run()
    assert shown.status == 0
    assert re.search(r"validation at 4: loss", shown.text)


@exercise("text")
def _(case: Case) -> None:
    shown = case.run()
    assert shown.status == 0, shown.text
    assert "Once upon a time" in shown.text


@exercise("the loss of a text")
def _(case: Case) -> None:
    (case.folder / "x.txt").write_text("the lazy dog jumps\n")
    shown = case.run(FILE=case.folder / "x.txt")
    assert (shown.status, "perplexity" in shown.text) == (0, True)
