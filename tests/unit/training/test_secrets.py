"""No credential reaches a file, a tracker or the console of a run, wherever a user may have left one."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.runs import FLAGS

ROOT = Path(__file__).parents[3]
LEAK = "LEAKME"
TOKEN = f"ghp_{LEAK}{'x7' * 15}"
URL = f"https://me:{LEAK}@host.example/x"

ENVIRONMENT = {
    "SLURM_JWT": f"eyJhbGciOi.{LEAK}.abc",
    "SLURM_SPANK_PLUGIN": LEAK,
    "SLURM_SPANK__PYXIS_CONTAINER_IMAGE": LEAK,
    "_SLURM_SPANK_OPTION_pyxis_container_image": URL,
    "SPANK_MINE": LEAK,
    "SLURM_RESTD_TOKEN": LEAK,
    "SLURM_NOTIFY": URL,
    "WANDB_API_KEY": f"{LEAK}{'0' * 34}",
    "HF_TOKEN": f"hf_{LEAK}{'y' * 30}",
    "AWS_SECRET_ACCESS_KEY": LEAK,
    "NCCL_SECRET": LEAK,
    "HTTPS_PROXY": f"http://me:{LEAK}@proxy:3128",
    "https_proxy": f"http://me:{LEAK}@proxy:3128",
}
"""Variables that only the process may see."""

PLUGIN = f"""
from megatron.config.plugins import register
from megatron.training.callbacks.base import Callback


@register("callback", "leaky")
class Leaky(Callback):
    interval = 1

    def on_step_end(self, metrics):
        self.log.note("reading {URL}")
        if self.trainer.iteration == 3:
            self.log.warning("retrying {URL}?token={LEAK}{LEAK}{LEAK}")
        if self.trainer.iteration == 6:
            raise RuntimeError("403 for {URL} with {TOKEN}")
"""

UNCOMMITTED = f'api_key = "{LEAK}{"0" * 20}"\nclone = "{URL}"\nkey = "{TOKEN}"\n'


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of this project with a token in its remote's address, and secrets in uncommitted changes."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "megatron", copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pretrain_gpt.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "leaky.py").write_text("x = 1\n")
    git(copy, "init", "-q")
    git(copy, "add", ".")
    git(copy, "commit", "-qm", "all")
    git(copy, "remote", "add", "origin", f"https://{TOKEN}@host.example/us/it.git")
    (copy / "leaky.py").write_text(f"{PLUGIN}\n{UNCOMMITTED}")
    return copy


def files(*folders: Path) -> Iterator[Path]:
    """Every file below some folders, links followed."""
    for folder in folders:
        for inner, _, names in os.walk(folder, followlinks=True):
            yield from (Path(inner, name) for name in names)


def test_planted_secrets_are_in_no_file_of_a_run(tmp_path: Path, checkout: Path) -> None:
    run, home, shm = tmp_path / "run", tmp_path / "home", tmp_path / "shm"
    home.mkdir()
    flags = (
        f"{FLAGS} --run-dir {run} --save {run}/saved --save-interval 2 --async-save --local-save {shm} "
        f"--local-save-interval 1 --tensorboard-dir {run}/board --wandb-project tests --log-health-interval 2 "
        "--eval-interval 3 --eval-iters 1 --profile --profile-step-start 2 --profile-step-end 3 --profile-pipeline "
        "--plugin leaky"
    )
    environ = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE") if name in os.environ}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "WANDB_MODE": "offline", "RANK": "0", "WORLD_SIZE": "1"}
    job |= {"HOME": str(home), "TMPDIR": str(home), "TORCHELASTIC_ERROR_FILE": str(run / "error.json")}
    command = [sys.executable, "pretrain_gpt.py", *flags.split()]
    done = subprocess.run(
        command, cwd=checkout, env=environ | job | ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    written = [*files(run, home, shm)]
    names = {path.name for path in written}
    assert {"config.yaml", "command.sh", "uncommitted.diff", "metrics.jsonl", "incidents.md"} <= names
    assert {"failures.jsonl", "manifest.json", "claim.json", "error.json"} <= names
    assert {path.suffix for path in written} >= {".wandb", ".gz", ".txt", ".json", ".log"}
    assert any(name.startswith("events.out.tfevents") for name in names)
    packed = {path: path.read_bytes() for path in written}
    contents = {path: gzip.decompress(data) if path.suffix == ".gz" else data for path, data in packed.items()}
    assert b"n1" in b"".join(content for path, content in contents.items() if path.suffix == ".wandb")
    leaks = {str(path.relative_to(tmp_path)) for path, content in contents.items() if LEAK.encode() in content}
    assert leaks == set()
    assert LEAK not in done.stdout + done.stderr
    assert "uncommitted.diff" in done.stderr + done.stdout
