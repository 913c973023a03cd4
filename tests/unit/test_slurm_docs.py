"""docs/slurm.md against the scripts that it is about: their names, their words, their settings, what they start."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "slurm.md").read_text()
SCRIPTS = {path.name: path.read_text() for path in (ROOT / "slurm").glob("*.sh")}
SHARED = "".join(text for text in SCRIPTS.values() if "\n#SBATCH" not in text)
"""What the recipes source."""
FOREIGN = {"APEX", "WANDB_MODE"}
"""Of docker and of Weights & Biases."""


def table(heading: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    rows = TEXT[TEXT.index(f"\n| {heading} |") :].split("\n\n")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


def test_every_script_is_named() -> None:
    named = {name for row in table("script") for name in re.findall(r"`(\w+\.sh)`", row[0])}
    assert SCRIPTS.keys() <= named


def test_words_of_the_environment_are_those_that_the_scripts_read() -> None:
    message = set(re.findall(r"(?<![\w$-])([A-Z][A-Z_]{2,})=", TEXT)) | set(
        re.findall(r"`([A-Z]+_[A-Z]+)` \(\d+\)", TEXT)
    )
    assert len(message) > 12
    read = {name for script in SCRIPTS.values() for name in re.findall(r"\$\{?([A-Z][A-Z_]+)", script)}
    assert {name for name in message if not name.startswith(("NCCL_", "TORCH_"))} - read == FOREIGN


@pytest.mark.parametrize("name", ["MAX_RESTARTS", "STOP_SECONDS", "BAD_NODE_HOURS"])
def test_figures_are_the_defaults(name: str) -> None:
    (default,) = re.findall(rf"{name}=\$\{{{name}:-(\d+)\}}", SHARED)
    assert set(re.findall(rf"`{name}` \((\d+)\)", TEXT)) == {default}


@pytest.mark.parametrize(("column", "network"), [(1, "infiniband"), (2, "ethernet")])
def test_settings_of_the_network_are_those_of_a_job(column: int, network: str) -> None:
    printed: dict[str, str] = {}
    for row in table("variable"):
        names, values = (re.findall(r"`([^`]+)`", cell) for cell in (row[0], row[column]))
        printed |= zip(names, values * (len(names) // max(len(values), 1)), strict=bool(values))
    shown = "source slurm/lib.sh; env | grep -E '^(NCCL|GLOO|CUDA)_'"
    environ = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "NETWORK": network, "IFNAME": "IFNAME"}
    done = subprocess.run(["bash", "-c", shown], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert printed == dict(line.split("=") for line in done.stdout.split())


def test_files_of_a_run_are_those_that_the_script_keeps() -> None:
    named = {row[0].strip("`").split(".")[0] for row in table("in `$RUN`") if row[0].startswith("`slurm/")}
    kept = {f"slurm/{name}" for name in re.findall(r"\$STATE\"?/(\w+)", SHARED)}
    assert named == kept
