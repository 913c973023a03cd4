"""The examples: configuration files of the presets, the scripts that run them, and the notebook in a short form."""

from __future__ import annotations

import base64
import faulthandler
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

import pretrain_gpt
from megatron.arguments.cli import parse
from megatron.arguments.presets import PAPER_TOKENS_PER_STEP, PRESETS
from megatron.arguments.sources import flat_values
from megatron.config.run import RunConfig
from megatron.planner.memory import max_peak_bytes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RANKS = {"tiny-gpt2": 1, "tiny-llama": 1, "gpt3-175b": 1024, "llama2-7b": 64, "llama3-8b": 64}
RANKS |= {"llama3-70b": 512, "llama3-405b": 2016, "mixtral-8x7b": 256, "qwen3-30b-a3b": 128, "gpt-oss-20b": 64}
RANKS |= {"nemotron-h-8b": 64, "nemotron-3-nano-30b-a3b": 128, "granite-4.0-h-tiny": 64, "qwen3-next-80b-a3b": 256}
RANKS |= {"deepseek-v3": 2048, "tiny-moe": 1, "tiny-deepseek": 1, "tiny-hybrid": 1}


def config_of(words: list[str], ranks: int) -> RunConfig:
    parsed = parse([*words, "--check-config", "--world-size", str(ranks)], {})
    assert parsed.notes == ()
    return parsed.config


@pytest.mark.parametrize("preset", PRESETS)
def test_the_file_and_the_script_of_a_preset(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = EXAMPLES / f"train_{preset.replace('-', '_').replace('.', '_')}.sh"
    printed = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "GPUS": "8"}
    done = subprocess.run(["bash", script, "--seed", "7"], env=printed, capture_output=True, text=True, check=True)
    launch, words = done.stdout.split("pretrain_gpt.py")
    assert launch.startswith("torchrun --nnodes 1 --nproc-per-node 8 ")
    monkeypatch.chdir(ROOT)
    values = flat_values(config_of(shlex.split(words), RANKS.get(preset, 8)))
    meant = PRESETS[preset] | ({"moe_router_bias_update_rate": 0.01} if preset == "tiny-deepseek" else {})
    expected = {n: pytest.approx(x, 1e-5) if isinstance(x, float) else x for n, x in meant.items()}
    assert {name: values[name] for name in expected} == expected
    assert values["seed"] == 7
    paper = PAPER_TOKENS_PER_STEP.get(preset, 8192)
    assert paper / 2.2 < values["global_batch_size"] * values["seq_length"] < 2.2 * paper


def test_the_script_of_long_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "GPUS": "8"}
    command = ["bash", EXAMPLES / "train_llama3_8b_128k.sh", "--seed", "7"]
    done = subprocess.run(command, env=printed, capture_output=True, text=True, check=True)
    monkeypatch.chdir(ROOT)
    config = config_of(shlex.split(done.stdout.split("pretrain_gpt.py")[1]), 64)
    assert (config.training.seq_length, config.training.seed, config.parallel.context_parallel_size) == (131072, 7, 8)
    assert sum(max_peak_bytes(config, 64).values()) < 70 * 2**30
    loaded = subprocess.run(command, env=printed | {"LOAD": "hf:x"}, capture_output=True, text=True, check=True)
    assert " --load hf:x --resume-mode weights-only " in loaded.stdout


def test_without_gpus_one_process_computes() -> None:
    bare = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "GPUS": "0", "DATA": "a b"}
    script = EXAMPLES / "train_tiny_llama.sh"
    done = subprocess.run(["bash", script], env=bare, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("python pretrain_gpt.py --config examples/configs/tiny-llama.yaml --data-path a b ")


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With a few steps, and its programs in this process."""
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_gpt.py").touch()  # as in a checkout
    namespace: dict[str, object] = {}
    for cell in json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]:
        source = "".join(cell["source"]).replace("steps = 200", "steps = 4").replace("[:120]", "[:24]")
        if source.startswith("!"):
            python, program, *words = shlex.split(source[1:].replace("\\\n", "").format(**namespace))
            name = program.removesuffix(".py").replace("/", ".")
            main = pretrain_gpt.main if name == "pretrain_gpt" else importlib.import_module(name).main
            assert (python, main(words)) == ("python", 0)
        elif cell["cell_type"] == "code":
            exec(source, namespace)
    train = namespace["train"]
    assert isinstance(train, list)
    assert [line["iteration"] for line in train] == [2, 4]
    assert "def " in capfd.readouterr().out


def test_the_notebook_shows_its_pictures() -> None:
    """A web page shows what is stored: each cell was run, in order, and none has failed or names this machine."""
    file = EXAMPLES / "quickstart.ipynb"
    assert file.stat().st_size < 300_000
    cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    for picture in pictures:
        height, width, _ = plt.imread(io.BytesIO(base64.b64decode(picture)), format="png").shape
        assert 100 < height <= width < 1000
    text = "".join("".join(output.get("text", [])) for output in outputs)
    assert "200/200" in text
    assert not re.search(r"/(home|root|work|tmp|usr)/|Traceback|\x1b|\r", text)


@pytest.mark.slow  # installs torch
def test_the_notebook_installs_its_dependencies(tmp_path: Path) -> None:
    """In an environment that holds Jupyter's kernel alone, from a fresh clone."""
    faulthandler.cancel_dump_traceback_later()
    clone, environment = tmp_path / "a clone", tmp_path / "environment"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "nbclient", "ipykernel"], check=True)
    notebook = clone / "examples" / "quickstart.ipynb"
    notebook.write_text(notebook.read_text().replace("steps = 200", "steps = 4").replace("[:120]", "[:24]"))
    execute = "import sys, nbformat, nbclient; notebook = nbformat.read(sys.argv[1], 4)\n"
    execute += "nbclient.NotebookClient(notebook).execute(cwd='.')\nnbformat.write(notebook, sys.argv[1])"
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([python, "-c", execute, notebook], cwd=notebook.parent, env=environ, check=True)
    assert '"image/png"' in notebook.read_text()
    assert (clone / "runs" / "notebook" / "loss.png").exists()
