"""docs/slurm.md against its scripts: their names, arguments, settings and runs."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from tests.unit.pages import ROOT, page, rows
from tools import launch

TEXT = page("slurm")
SCRIPTS = {path.name: path.read_text() for path in (ROOT / "slurm").glob("*.sh")}
SHARED = "".join(text for text in SCRIPTS.values() if "\n#SBATCH" not in text)
"""The file that the recipes source."""
FOREIGN = {"APEX", "WANDB_MODE"}
"""Of docker and of Weights & Biases."""
NETWORKS = ("infiniband", "roce", "ethernet", "efa", "slingshot")


def test_every_script_is_named() -> None:
    named = {name for row in rows(TEXT, "script") for name in re.findall(r"`(\w+\.sh)`", row[0])}
    assert SCRIPTS.keys() <= named


def test_environment_variables_match_the_ones_that_the_scripts_read() -> None:
    message = set(re.findall(r"(?<![\w$-])([A-Z][A-Z_]{2,})=", TEXT)) | set(
        re.findall(r"`([A-Z]+_[A-Z]+)` \(\d+\)", TEXT)
    )
    assert len(message) > 12
    read = {name for script in SCRIPTS.values() for name in re.findall(r"\$\{?([A-Z][A-Z_]+)", script)}
    assert {name for name in message if not name.startswith(("NCCL_", "TORCH_", "FI_"))} - read == FOREIGN


def test_settings_match_the_variables_that_the_scripts_read() -> None:
    """One table has them all; recipes around training explain what only they read."""
    shown = {name for row in rows(TEXT, "setting") for name in re.findall(r"`([A-Z_]+)`", row[0])}
    asked = set(re.findall(r"\$\{([A-Z_]+)(?::-|:\+)", SHARED))
    foreign = {name for name in asked if name.startswith(("SLURM", "NCCL_", "CUDA_", "TORCH_", "OMP_", "PYTHONPATH"))}
    assert shown - {"DATA"} == asked - foreign - {"CHAIN_ID", "RANK", "LOGS", "STEPS", "SAVE_EVERY"}


@pytest.mark.parametrize("name", ["MAX_RESTARTS", "MAX_STALLED", "STOP_SECONDS", "BAD_NODE_HOURS", "SPARES"])
def test_figures_are_the_defaults(name: str) -> None:
    (default,) = re.findall(rf"{name}=\$\{{{name}:-(\d+)\}}", SHARED)
    in_table = {row[1] for row in rows(TEXT, "setting") if row[0] == f"`{name}`"}
    assert in_table | set(re.findall(rf"`{name}` \((\d+)\)", TEXT)) == {default}


def values(heading: str) -> dict[str, str]:
    """The variables of a table and their values, in backticks."""
    found: dict[str, str] = {}
    for names, value, *_ in rows(TEXT, heading):
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", names), value.strip("`"))
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_settings_of_the_network_match_a_dry_run(network: str) -> None:
    shown = exported("train_llama3_8b", NETWORK=network, IFNAME="IFNAME")
    assert shown == values(network) | values("variable")


def test_networks_match_the_scripts_and_the_launcher() -> None:
    assert set(launch.NETWORKS) == set(NETWORKS)
    (row,) = [row for row in rows(TEXT, "setting") if row[0] == "`NETWORK`"]
    assert set(re.findall(r"`(\w+)`", row[2])) == set(NETWORKS)


def test_caches() -> None:
    shown = exported("train_llama3_8b", CACHE="CACHE")
    expected = {"HF_HOME": "CACHE/huggingface", "WANDB_CACHE_DIR": "CACHE/wandb", "WANDB_DATA_DIR": "CACHE/wandb"}
    assert expected.items() <= shown.items()
    named = {name for row in rows(TEXT, "variable") for name in re.findall(r"`([A-Z_]+)`", row[0])}
    assert "NCCL_DEBUG" in named
    assert all(f"`{name}`" in TEXT for name in expected)


def exported(recipe: str, *flags: str, **environ: str) -> dict[str, str]:
    """Return the variables that a recipe exports, from DRY_RUN."""
    environ = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1"} | environ
    command = ["bash", f"slurm/{recipe}.sh", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    lines = [shlex.split(line) for line in done.stderr.splitlines() if line.startswith("export ")]
    return dict(word.split("=", 1) for _, word in lines)


def test_files_of_a_run_match_the_files_that_the_script_keeps() -> None:
    named = {row[0].strip("`").split(".")[0] for row in rows(TEXT, "in `$RUN`") if row[0].startswith("`slurm/")}
    kept = {f"slurm/{name}" for name in re.findall(r"\$STATE\"?/(\w+)", SHARED)}
    assert named == kept
