"""The planner computes the bytes and masks in docs/long_context.md, and its commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from math import lcm
from pathlib import Path

import pytest

from megatron.arguments.cli import parse
from megatron.config.attention_pattern import AttentionPattern
from megatron.config.parallel import CP_COMM_TYPES
from megatron.config.run import RunConfig
from megatron.planner.communication import attention_traffic
from megatron.planner.memory import max_peak_bytes
from tests.unit.pages import ROOT, page, rows

TEXT = page("long_context")
PLAIN = TEXT.replace("`", "")
MODEL = (
    "--preset llama3-8b --bf16 --mock-data --vocab-size 128256 --train-iters 1 --seq-length 131072 "
    "--max-position-embeddings 131072 --check-config"
)


def config_of(size: str, method: str, flags: str = "") -> RunConfig:
    name, _, sizes = method.partition(" ")
    sizes = f"--hierarchical-context-parallel-sizes {sizes}" if sizes else ""
    return parse(f"{MODEL} --context-parallel-size {size} --cp-comm-type {name} {sizes} {flags}".split(), {}).config


@pytest.mark.parametrize("flags", ["", "--num-query-groups 2 --tensor-model-parallel-size 2 --micro-batch-size 3"])
def test_formulas_match_the_planner(flags: str) -> None:
    formulas = {method: cells for method, *cells in rows(PLAIN, "method | bytes")}
    assert [*formulas] == [*CP_COMM_TYPES]
    for size, method, a in ((8, "p2p", 1), (16, "all_gather", 1), (16, "a2a", 16), (16, "a2a+p2p 4 4", 4)):
        config = config_of(str(size), method, flags)
        model, tp = config.model, config.parallel.tensor_model_parallel_size
        of_head = config.training.micro_batch_size * 131072 // size * model.head_dim * 2
        h = max(1, model.kv_groups // tp)
        known = {"R": size // a, "A": a, "C": lcm(h, a) // h}
        known |= {"k": 2 * of_head * h, "q": of_head * model.num_attention_heads // tp}
        sent, held = (eval(cell, {"__builtins__": {}}, known) for cell in formulas[method.split()[0]])
        traffic = attention_traffic(config)
        assert (traffic.sent, traffic.in_flight) == pytest.approx((sent, held)), method


def test_bytes_match_the_planner() -> None:
    header = re.findall(r"\n\| CP, method \| (.*) \|", TEXT)[0].split(" | ")
    assert len(header) == 3
    for case, *cells in rows(PLAIN, "CP, method"):
        size, _, method = case.partition(" ")
        configs = [config_of(size, method, f"--attention-pattern {pattern}") for pattern in header]
        assert cells == [str(round(attention_traffic(config).sent / 2**20)) for config in configs], case


def test_pictures_are_the_masks() -> None:
    (pictures,) = re.findall(r"```\n(global .*?)```", TEXT, re.DOTALL)
    drawn = {}
    for block in pictures.strip().split("\n\n"):
        names, *lines = block.splitlines()
        for number, name in enumerate(names.split()):
            drawn[name] = [line.split()[8 * number : 8 * (number + 1)] for line in lines]
    for name, picture in drawn.items():
        allows = AttentionPattern.parse(name).allows
        assert picture == [["#" if allows(query, key) else "." for key in range(8)] for query in range(8)], name
    described = [name.split(":")[0].strip("+") for name, _ in rows(PLAIN, "pattern")]
    assert described == ["global", "local", "chunked", "dilated", "first", "prefix", "a plugin's"]
    assert {part.split(":")[0] for name in drawn for part in name.split("+")} == {*described[:-1]}


def test_activations_match_the_planner() -> None:
    layout = "--tensor-model-parallel-size 4 --sequence-parallel"
    for flags, kept in rows(PLAIN, "further flags"):
        config = config_of("8", "p2p", f"{layout} {flags.replace('none', '')}")
        assert kept == f"{max_peak_bytes(config, 32)['activations'] / 2**30:.2f}", flags


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    for name in ("pretrain_gpt.py", "tools", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    assert sum(block.count("torchrun ") for block in blocks) == 3
    for block in blocks:
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.replace("torchrun ", "torchrun --standalone ")],
            cwd=tmp_path,
            env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.count("loss ") >= block.count("torchrun "), run.stdout
