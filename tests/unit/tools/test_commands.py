"""The command ``megatron``: its list, its names, and the programs of a wheel outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from megatron import __main__ as commands
from megatron.config.text import package_version

ROOT = Path(__file__).parents[3]
ENTRIES = ("pretrain", "preprocess", "convert", "generate")


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron"])
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_every_program_is_a_command_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert {*ENTRIES, "train-tokenizer", "plot-run"} <= listed.keys()
    programs = [*(ROOT / "tools").glob("[!_]*.py"), *(ROOT / "tasks").glob("*/[!_]*.py")]
    assert len(listed) == 1 + len(programs) - len(commands.OF_DEVELOPERS)
    assert {"perplexity", "sft"} <= listed.keys()
    assert all(len(words) > 1 for words in listed.values())
    assert max(map(len, lines)) <= 120


def test_a_command_runs_its_program_under_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.run(["generate", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: megatron generate [-h]")
    assert commands.run(["--version"]) == 0
    assert capsys.readouterr().out == f"{package_version()}\n"
    assert commands.run(["generat"]) == 2
    assert capsys.readouterr().err == "megatron: no command generat; fix: megatron generate\n"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (BrokenPipeError, 1), (None, 0)])
def test_the_status_of_a_command(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None, status: int
) -> None:
    def run(arguments: list[str]) -> int:
        asked.append(arguments)
        if error is not None:
            raise error
        return 0

    asked: list[list[str]] = []
    ends: list[int] = []
    monkeypatch.setattr(commands, "run", run)
    monkeypatch.setattr(commands, "exit_process", ends.append)
    monkeypatch.setattr(sys, "argv", ["/bin/megatron-pretrain", "--lr", "1"])
    commands.main()
    monkeypatch.setattr(sys, "argv", ["/bin/megatron", "pretrain"])
    commands.main()
    assert (asked, ends) == ([["pretrain", "--lr", "1"], ["pretrain"]], [status, status])


def test_a_program_finds_the_package_of_a_checkout_that_is_not_installed() -> None:
    packages = str(Path(pytest.__file__).parents[1])  # whose .pth files, of an installation, -S leaves out
    program = "import runpy, sys; sys.path[0] = 'tools'; sys.path.append(sys.argv[1]); sys.argv[1:] = ['--help']; "
    program += "runpy.run_path('tools/diff_runs.py', run_name='__main__')"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", program, packages]
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("megatron gen", {"generate"}),
        ("megatron generate --max", {"--max-new-tokens"}),
        ("megatron pretrain --tensor-m", {"--tensor-model-parallel-size"}),
        ("megatron-pretrain --kv-ch", {"--kv-channels"}),
        ("megatron-pretrain --preset gpt2-1", {"gpt2-1.5b", "gpt2-124m"}),
        ("megatron-pretrain --lr-decay-style co", {"constant", "cosine"}),
    ],
)
def test_shells_complete_commands_and_flags(line: str, offered: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    child = os.fork()  # argcomplete ends the process
    if child == 0:
        try:
            os.environ |= asked
            sys.argv = [line.split()[0]]
            commands.main()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {word.strip() for word in (tmp_path / "found").read_text().split("\n")} == offered


@pytest.mark.slow  # builds a wheel
def test_the_commands_of_a_wheel_run_outside_of_the_checkout(tmp_path: Path) -> None:
    """In an environment that sees the packages of this one, but not this checkout."""
    built = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(tmp_path)]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in listed:  # setuptools leaves files where it builds
        if name.startswith(("megatron/", "tools/", "slurm/", "examples/configs/")) or (name and "/" not in name):
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    subprocess.run([*built, str(tmp_path / "source")], check=True)
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")  # without its own .pth files
    (wheel,) = tmp_path.glob("*.whl")
    python = ["--python", str(tmp_path / "venv"), "install", "--no-deps", "--no-index", "--quiet", "--ignore-installed"]
    subprocess.run([sys.executable, "-m", "pip", *python, str(wheel)], check=True)
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def call(command: str) -> str:
        program, *rest = command.split()
        words = [str(tmp_path / "venv" / "bin" / program), *rest]
        done = subprocess.run(words, cwd=tmp_path, env=bare, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert call("megatron --version") == f"{package_version()}\n"
    for entry in ENTRIES:
        assert "usage: " in call(f"megatron-{entry} --help")
    (tmp_path / "text.jsonl").write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n' * 200)
    call("megatron train-tokenizer --input text.jsonl --vocab-size 300 --output bpe")
    tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model bpe"
    call(f"megatron-preprocess --input text.jsonl --output-prefix text --append-eod {tokenizer}")
    shape = "--preset tiny-llama --num-layers 1 --seq-length 32 --device cpu"
    run = f"{shape} --data-path text_text_document --train-iters 2 --save saved --run-dir run"
    assert "2/2" in call(f"megatron-pretrain {run}")
    assert "pretrain_gpt.py" in (tmp_path / "run" / "command.sh").read_text()
    call("megatron-convert --load saved --save-hf model")
    call("megatron generate --load saved --prompt the --max-new-tokens 4 --device cpu")
