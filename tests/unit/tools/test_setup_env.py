"""The set-up of the Python environment, with a program in the place of Python that records its arguments."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = r"""#!/bin/bash
here=${0%/*}
echo "$*|user=${PIP_USER:-}|target=${PIP_TARGET:-}|path=${PYTHONPATH:-}" >>"$LOG"
case "$1 $2" in
    "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    --version*) echo Python 3.12.0 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "my clone"
    (root / "tools").mkdir(parents=True)
    (root / "my bin").mkdir()
    for name in ("tools/setup_env.sh", "pyproject.toml", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, root / name)
    (root / "my bin" / "python").write_text(PYTHON)
    (root / "my bin" / "python").chmod(0o755)
    return root


def set_up(root: Path, **environ: str) -> tuple[str, list[str]]:
    """Run a set-up; return its output, with the environment it ends in, and its requests to Python."""
    log = root / "log"
    log.write_text("")
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": str(root / "my bin" / "python"), "LOG": str(log), **environ}
    script = 'set -euo pipefail; source "$1/tools/setup_env.sh" dev; '
    script += 'echo "$VIRTUAL_ENV|${PYTHONPATH:-}|$(command -v python)"'
    words = ["bash", "-c", script, "bash", str(root)]
    done = subprocess.run(words, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, log.read_text().splitlines()


def test_it_installs_once(checkout: Path) -> None:
    printed, asked = set_up(checkout)
    assert printed.splitlines()[-1] == f"{checkout}/.venv||{checkout}/.venv/bin/python"
    assert sum(line.startswith("-m pip install ") for line in asked) == 5
    again, asked = set_up(checkout)
    assert (again.splitlines(), asked) == (printed.splitlines()[-1:], [])


def test_an_environment_of_the_users_own_is_left_alone(checkout: Path) -> None:
    """As the README's other way to install makes it."""
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "pyvenv.cfg").touch()
    printed, asked = set_up(checkout)
    assert printed.splitlines()[-1].startswith(f"{checkout}/.venv-setup|")
    assert "setup: creating .venv-setup with Python 3.12.0" in printed
    assert [path.name for path in (checkout / ".venv").iterdir()] == ["pyvenv.cfg"]
    assert all(f"{checkout}/.venv " not in line for line in asked)
    assert set_up(checkout)[1] == []


def test_packages_of_a_module_system_and_settings_of_pip_are_without_effect(checkout: Path) -> None:
    given = {"PYTHONPATH": "/apps/numpy", "PIP_USER": "1", "PIP_TARGET": "/apps/mine", "PIP_PREFIX": "/apps"}
    printed, asked = set_up(checkout, **given)
    assert "/apps" not in printed
    installs = [line for line in asked if line.startswith("-m pip install ")]
    assert {line.partition("|")[2] for line in installs} == {"user=0|target=|path="}


def test_torch_alone_comes_from_its_index(checkout: Path) -> None:
    printed, asked = set_up(checkout, TORCH_INDEX_URL="file:///cpu index")
    assert "TORCH_INDEX_URL" in printed
    assert "TORCH_INDEX_URL" in (ROOT / "README.md").read_text()
    found = [line.split("|")[0] for line in asked if "--index-url file:///cpu index" in line]
    assert len(found) == 2
    assert all(line.split()[-1].startswith("torch==") for line in found)
