"""The run folder: resolved config, command line, environment, data, metrics and plots."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.data.loader import DataSource

CONFIG, COMMAND, ENVIRONMENT, DIFF = "config.yaml", "command.sh", "environment.json", "uncommitted.diff"
METRICS, LOSS_CURVE, HEALTH, DATA = "metrics.jsonl", "loss.png", "health.png", "data.json"
PACKAGES = (
    *("megatron-pretrain", "torch", "numpy", "transformers", "tokenizers", "gigatoken", "wandb", "tensorboard"),
    *("triton", "apex", "flash-attn", "transformer-engine", "liger-kernel"),  # optional
)


def prepare(
    folder: Path,
    resolved_config: str,
    device_name: str,
    world_size: int,
    data: Mapping[str, object] | None = None,
) -> list[Path]:
    """Create the folder and write config, command, environment, uncommitted changes and a summary of the data.

    Returns:
        New paths of an earlier start's files that were renamed because their content changed.

    """
    folder.mkdir(parents=True, exist_ok=True)
    commit, diff = git_state(Path(__file__).parent)
    environment_facts = environment(device_name, world_size) | {
        "git_commit": commit,
        "git_uncommitted_changes": bool(diff),
    }
    texts = {
        CONFIG: resolved_config,
        COMMAND: command_line(os.environ, sys.argv, world_size),
        ENVIRONMENT: json.dumps(environment_facts, indent=2) + "\n",
        DIFF: diff,
        DATA: json.dumps(data, indent=2) + "\n" if data else "",
    }
    renamed = _rename_changed(folder, texts)
    for name, text in texts.items():
        if text:
            (folder / name).write_text(text)
    return renamed


def _rename_changed(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Rename files with different content to ``name.1.ext``; those of the next start to ``name.2.ext``..."""
    paths = [folder / name for name in texts]
    number = 1
    while any(path.with_stem(f"{path.stem}.{number}").exists() for path in paths):
        number += 1
    changed = [path for path in paths if path.exists() and path.read_bytes() != texts[path.name].encode()]
    return [path.rename(path.with_stem(f"{path.stem}.{number}")) for path in changed]


def command_line(variables: Mapping[str, str], argv: Sequence[str], world_size: int) -> str:
    """Return a shell script that starts this run again. The launcher is guessed from the environment ``variables``."""
    start = [Path(sys.executable).name]
    hint = ""
    if world_size > 1 and variables.get("LOCAL_WORLD_SIZE") == str(world_size):
        start = ["torchrun", "--standalone", "--nproc-per-node", str(world_size)]
    elif world_size > 1:
        hint = f"# on {world_size} processes, with the cluster's launcher (srun, or torchrun on every node)\n"
    if path := variables.get("PYTHONPATH"):
        start = ["env", f"PYTHONPATH={path}", *start]
    return f"#!/bin/sh\n{hint}cd {shlex.quote(os.getcwd())} && {shlex.join([*start, *argv])}\n"


def environment(device_name: str, world_size: int) -> dict[str, object]:
    """Return versions and hardware."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": device_name,
        "world_size": world_size,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def data_facts(data: DataSource) -> dict[str, object]:
    """Return the size, sources and fingerprint of the data of each split."""
    summary: dict[str, object] = {}
    for split, samples in data.used.items():
        dataset = data.datasets[split]
        tokens = samples * data.seq_length
        sources = [{"source": r.source, "tokens": r.tokens, "epochs": r.epochs} for r in dataset.readings(samples)]
        summary[split] = {
            "samples": samples,
            "tokens": tokens,
            "laid_out_for_samples": list(data.stretches[split]),
            "fingerprint": data.fingerprints[split],
            "sources": sources or [{"source": dataset.describe(tokens)}],  # generated samples are read from no source
        }
    return summary


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(source: Path) -> tuple[str | None, str]:
    """Return the commit and the uncommitted changes of the checkout around ``source``; (None, "") outside of one."""
    commit, diff = _git(source, "rev-parse", "HEAD"), _git(source, "diff", "HEAD")
    return (commit.strip(), diff or "") if commit else (None, "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
