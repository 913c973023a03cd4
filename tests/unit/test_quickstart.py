"""The quickstart as a user runs it: its mistakes, its crash half-way, its output and the next commands."""

from __future__ import annotations

import importlib
import io
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from multiprocessing.connection import Client, Listener
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.arguments.cli import parse
from megatron.training.loggers.run_folder import read_history
from tests.kit.processes import free_port
from tools import generate, inspect_checkpoint

ROOT = Path(__file__).parents[2]


def quickstart(*arguments: str, cwd: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "examples" / "quickstart.sh"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def write_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This checkout with the environment of these tests in the place of the one that the set-up would make."""
    root = tmp_path / "checkout"
    tools = ("train_tokenizer", "preprocess_data", "convert_checkpoint", "generate", "inspect_checkpoint")
    for name in ("examples", "pretrain_gpt.py", "megatron", "tools/lib", *(f"tools/{tool}.py" for tool in tools)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(ROOT / name)
    binaries = shlex.quote(str(Path(sys.executable).parent))
    (root / "tools" / "setup_env.sh").write_text(f"export PATH={binaries}:$PATH PYTHONPATH=$PWD\n")
    return root


FORKED = """
import os, sys, torch
import megatron.training.main, pretrain_gpt

*launch, program = sys.argv[1:8]
assert (launch[-2:], program) == (["--nproc-per-node", "2"], "pretrain_gpt.py")
assert launch[:-2] == ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "%d"}
ranks = []
for rank in ("0", "1"):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        pretrain_gpt.exit_process(pretrain_gpt.main(sys.argv[8:]))
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))
"""
"""In the place of torchrun: the ranks are forked after one import of torch, the dearest part of a short run."""


ASKING = """
import sys
from multiprocessing.connection import Client

with Client(%r) as tests:
    tests.send(sys.argv[1:])
    status, out, err = tests.recv()
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(status)
"""
"""In the place of ``python``: the program runs in the process of these tests, which has imported everything."""


def quickstart_here(*arguments: str, cwd: Path, root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script in a checkout, and its programs in this process; ranks of a training run are forked."""
    shims = {"torchrun": FORKED % free_port()}
    with Listener() as listener, ThreadPoolExecutor(1) as threads, chdir(root):
        shims["python"] = ASKING % listener.address
        (root / "bin").mkdir(exist_ok=True)
        for name, program in shims.items():
            command = f'exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n'
            (root / "bin" / name).write_text("#!/bin/sh\n" + command)  # a path with a space is no interpreter
            (root / "bin" / name).chmod(0o755)
        with (root / "tools" / "setup_env.sh").open("a") as file:
            file.write("export PATH=$PWD/bin:$PATH\n")
        script = threads.submit(quickstart, *arguments, cwd=cwd, root=root)
        script.add_done_callback(lambda _: Client(listener.address).close())
        while True:
            with listener.accept() as caller:
                try:
                    caller.send(run_python(*caller.recv()))
                except EOFError:
                    return script.result()


def run_python(first: str, *words: str) -> tuple[int, str, str]:
    """Return the exit status and the output of the arguments of ``python``."""
    status = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            if first == "-c":
                with patch.object(sys, "argv", words):
                    exec(words[0], {})
            elif first.startswith("examples/"):
                with patch.object(sys, "argv", [first, *words]):
                    runpy.run_path(first)
            else:
                status = importlib.import_module(first.removesuffix(".py").replace("/", ".")).main([*words])
        except Exception as error:
            print(repr(error), file=sys.stderr)
            status = 1
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps"], "--steps needs a value (see --help)"),
        (["--steps", "0"], "--steps must be a whole number above 0, not '0'"),
        (["--steps", "1e3"], "not '1e3'"),
        (["--input-dir", "missing"], "there is no folder 'missing'"),
        (["--out", "file/below"], "the folder 'file/below' cannot be made"),
        (["--size", "7"], "unknown argument: --size"),
        (["--", "--lr", "1e-4", "--save=mine"], "--save is set by the quickstart itself"),
    ],
)
def test_mistakes_are_reported_before_anything_is_installed(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    (tmp_path / "file").write_text("")
    done = quickstart(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == ""


def test_help(tmp_path: Path) -> None:
    done = quickstart("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--input-dir DIR" in done.stdout


def test_killed_half_way_on_one_layout_and_ended_on_another(tmp_path: Path, checkout: Path) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "text" / "sitecustomize.txt").symlink_to("/etc/hostname")  # as in Debian's library of Python
    flags = ["--", "--eval-interval", "5", "--eval-iters", "1", "--seq-length", "128"]
    flags = ["--input-dir", "text", "--steps", "10", "--out", "run", *flags]
    done = quickstart_here(*flags, cwd=tmp_path, root=checkout)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("== killed at step ")
    assert before.count(": 1 not read: ") == 2, "by the tokenizer's training and by preprocessing"
    assert "2 = DP 1 (copies of the model) x TP 2 (tensor and sequence parallel)" in before
    assert "resumed from" in after
    assert "2 = DP 2 (copies of the model) x TP 1" in after
    run = tmp_path / "run"
    history = read_history(run / "metrics.jsonl")
    assert [point.iteration for point in history.train] == list(range(1, 11))
    assert history.train[-1].loss < history.train[0].loss - 0.5
    assert [point.iteration for point in history.evaluations] == [5, 10]
    assert len(history.restarts) == 1
    undone, again = losses(before, 10), losses(after, 10)
    assert undone.keys() & again.keys(), "the crash undid steps"
    for step in undone.keys() & again.keys():
        assert again[step] == pytest.approx(undone[step], abs=2e-4)
    assert (run / "loss.png").stat().st_size > 0
    assert "transformers computes the same: logits by " in after
    text = after.split("in plain transformers\n")[1].split("\n== next")[0]
    assert len(text.split()) > 20
    assert set(text.split()) & {"quick", "brown", "jumps", "lazy"}
    next_commands_can_be_pasted(after.split("== next\n")[1])


def losses(output: str, steps: int) -> dict[str, float]:
    """Loss by step, as progress lines print them."""
    lines = [line.split() for line in output.splitlines() if f"/{steps} " in line]
    return {line[0]: float(line[line.index("loss") + 1]) for line in lines}


def next_commands_can_be_pasted(reported: str) -> None:
    """The programs take the flags that are printed."""
    reported = reported.replace("\\\n", "")
    commands = [shlex.split(line, comments=True) for line in reported.splitlines() if line and not line.startswith("#")]
    _, longer, write, look, again = commands
    flags = longer[longer.index("pretrain_gpt.py") + 1 :]
    parsed = parse([*flags, "--check-config", "--world-size", "2"], environ={})
    assert parsed.config.training.train_iters == 20
    assert generate.build_parser().parse_args(write[2:]).prompt == ["The"]
    assert inspect_checkpoint.main(look[2:]) == 0
    assert again == ["bash", "examples/quickstart.sh", "--input-dir", "DIR"]


def test_text_under_another_key_and_a_folder_that_is_in_use(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"body": "the quick brown fox"}\n' * 200)
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    flags = ["--input-dir", "text", "--out", "run/"]
    refused = quickstart_here(*flags, cwd=tmp_path, root=checkout)
    assert refused.returncode == 1
    assert "there is something in run already; this time, all goes to run-3\n" in refused.stdout
    assert "a.jsonl:1 has no key 'text'; its keys: body\n  fix: --json-keys KEY" in refused.stderr
    (tmp_path / "text" / "b.jsonl").write_text("no JSON\n")
    (tmp_path / "b.jsonl").write_text('{"body": "jumps over the lazy dog"}\n')
    (tmp_path / "text" / "c.jsonl").symlink_to("../b.jsonl")
    fixes = ["--json-keys", "body", "--on-bad-line", "skip", "--follow-links"]
    done = quickstart_here(*flags, *fixes, "--", "--num-layers", "0", cwd=tmp_path, root=checkout)
    assert "files: 3, documents: 201, empty texts: 0, passed over: 1" in done.stdout
    assert (tmp_path / "run-3" / "tokenizer" / "tokenizer.json").exists()
    assert (tmp_path / "run-3" / "data" / "corpus_body_document.idx").exists()
    assert done.returncode == 2
    assert done.stderr.count("--num-layers 0: must be") == 1, "a mistake in the flags is reported once"
    assert [path.name for name in ("run", "run-2") for path in (tmp_path / name).iterdir()] == ["mine"] * 2


def test_the_example_of_transformers_needs_nothing_of_this_project() -> None:
    assert "megatron" not in (ROOT / "examples" / "write_with_transformers.py").read_text()


@pytest.mark.slow  # two starts of two processes
@pytest.mark.parametrize("phase", ["== training", "DP 1 ", "DP 2 "])
def test_ctrl_c_leaves_no_process(tmp_path: Path, checkout: Path, phase: str) -> None:
    write_text(tmp_path / "text")
    steps = "30" if "DP 2" in phase else "900"
    script = [str(checkout / "examples" / "quickstart.sh"), "--input-dir", "text", "--steps", steps, "--out", "run"]
    started = subprocess.Popen(
        ["bash", *script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    for line in started.stdout:
        if phase in line:
            break
    time.sleep(0.5)  # the launcher is still importing torch, at its first line
    os.killpg(started.pid, signal.SIGINT)  # as the terminal does
    assert started.wait(timeout=60) == 130
    deadline = time.monotonic() + 30  # to end in good order; the run itself would take much longer
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert started.stdout.read().endswith(f"what is saved is in {tmp_path / 'run'}\n")
    started.stdout.close()
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == []


def processes_of(folder: Path) -> list[int]:
    """Those whose command lines name the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in file.read_text():
                found.append(int(file.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.slow  # makes the project's .venv where there is none
def test_text_becomes_a_falling_loss_and_a_picture(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    curves = []
    for folder in ("run", "run-2"):  # the second finds what the first one left, and does the same again elsewhere
        done = quickstart("--input-dir", "text", "--steps", "30", "--out", "run", "--", "--seed", "7", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"loss curve: {tmp_path / folder / 'loss.png'}" in done.stdout
        assert (tmp_path / folder / "loss.png").exists()
        history = read_history(tmp_path / folder / "metrics.jsonl")
        curves.append([point.loss for point in history.train])
        assert history.evaluations
    assert len(curves[0]) == 30
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert curves[0][-1] < curves[0][0] - 1
