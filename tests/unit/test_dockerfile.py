"""The image's recipe: well-formed, made of the steps that set-up scripts take, and installing what a run needs.

No container engine is needed; test_debian.py takes the steps of the CPU image in a bare Debian. What only an engine can
show is not tested: that the base images are there, what they hold, and the build of apex.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def stages(text: str) -> dict[str, list[str]]:
    """Instructions by stage, each on one line; comments are left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    found: dict[str, list[str]] = {"": []}
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if match := re.fullmatch(r"FROM \S+ AS (\S+)", line):
            found[match[1]] = []
        if line:
            found[[*found][-1]].append(line)
    return found


def commands(stage: str) -> list[str]:
    """Return the commands of a stage."""
    return [line.removeprefix("RUN ") for line in stages(DOCKERFILE.read_text())[stage] if line.startswith("RUN ")]


def as_regex(pattern: str) -> str:
    """A line of .dockerignore, which also means everything below what it names."""
    return re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*") + "(/.*)?"


def lint(text: str) -> str:
    done = subprocess.run(["hadolint", "--no-color", "-"], input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_hadolint_finds_no_problem() -> None:
    assert lint(DOCKERFILE.read_text()) == ""


def test_hadolint_finds_a_planted_problem() -> None:
    assert "DL3002" in lint("FROM python:3.12-slim\nUSER root\n")


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_an_image_ends_as_an_ordinary_user(stage: str) -> None:
    user = stages(DOCKERFILE.read_text())[stage][-1]
    assert f"--uid {user.removeprefix('USER ')} " in " ".join(commands("base"))


def test_packages_are_installed_before_the_code_is_copied() -> None:
    found = stages(DOCKERFILE.read_text())
    copied = [line for line in found["packages"] if line.startswith("COPY")]
    assert copied == ["COPY requirements.txt ."]
    assert found["code"][:2] == ["FROM packages AS code", "COPY . ."]


def test_the_steps_match_the_setup_script() -> None:
    """Every test run from a fresh clone takes these steps."""
    script = (ROOT / "tools" / "setup_env.sh").read_text()
    script = script.partition("setup_install_run()")[2].replace('"$setup_root/requirements.txt"', "requirements.txt")
    steps = re.findall(r"^    setup_install (.*?)(?: #.*)?$", script, re.M)
    ours = re.findall(r"pip install (.*?)(?: && |$)", " && ".join([*commands("packages"), *commands("code")]))
    assert ours == [step.replace('"$setup_root"', ".") for step in steps[:4]]


def ignored_files(paths: Iterable[str]) -> set[str]:
    """Those of the paths that are not copied into an image."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    ignored = re.compile("|".join(as_regex(pattern) for pattern in patterns if pattern[0] != "!"))
    return {path for path in paths if ignored.fullmatch(path) and f"!{path}" not in patterns}


def test_no_tracked_file_is_ignored() -> None:
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert ignored_files(kept) == set()
    others = {"megatron/config/__pycache__/run.pyc", ".git/config"}
    assert ignored_files(others) == others


@pytest.mark.parametrize(
    "path", [".env", "examples/.env.local", "a/server.pem", "tls.key", "id_ed25519", "home/id_rsa.pub", ".netrc"]
)
def test_credentials_stay_out_of_an_image(path: str) -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#", "!")]
    assert any(re.fullmatch(as_regex(pattern), path) for pattern in patterns)


def test_images_and_compiled_sources_are_pinned() -> None:
    text = DOCKERFILE.read_text()
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.M)
    assert len(images) == 2
    assert all(re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image) for image in images)
    assert re.search(r"^ARG APEX_REVISION=[0-9a-f]{40}$", text, re.M)
    local = {"base", "packages", "code"}
    assert {*re.findall(r"^FROM (\S+)", text, re.M)} == local | {"${PYTHON_IMAGE}", "${CUDA_IMAGE}", "apex-${APEX}"}


@pytest.mark.slow
def test_its_install_steps_make_an_environment_in_which_the_program_runs(tmp_path: Path) -> None:
    """In an environment of the test's, instead of the image's own Python."""
    code, environment = tmp_path / "megatron", tmp_path / "environment"
    shutil.copytree(ROOT, code, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "wandb", "__pycache__"))
    subprocess.run(["python3", "-m", "venv", str(environment)], check=True)
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    variables["PATH"] = f"{environment / 'bin'}:{variables['PATH']}"
    for command in [*commands("packages"), *commands("code")]:
        subprocess.run(["sh", "-ec", command], cwd=code, env=variables, check=True, stdin=subprocess.DEVNULL)
    flags = "--preset tiny-llama --mock-data --vocab-size 64 --train-iters 2 --seq-length 32 --device cpu"
    run = ["python", str(code / "pretrain_gpt.py"), *flags.split()]
    done = subprocess.run(run, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/2" in done.stdout
