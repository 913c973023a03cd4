"""The planner on the command line: what it chooses, keeps and forecasts, and what is refused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import hardware, planning
from megatron.arguments.cli import ParsedArguments
from megatron.arguments.compatibility import StoredLayout
from megatron.arguments.planning import PLANNED
from megatron.arguments.sources import to_dict, to_yaml
from megatron.config.settings import SETTINGS
from megatron.planner.flops import FlopsPerToken
from megatron.planner.memory import max_peak_bytes, max_state_bytes
from tests.unit.arguments.command import codes, notes, problems, run

AUTO = "--plan auto --plan-gpu h100-80g --global-batch-size 32 --bf16"


def layout(parsed: ParsedArguments) -> dict[str, Any]:
    """The options that the planner may choose."""
    return {name: SETTINGS[name].value_in(parsed.config) for name in PLANNED}


def accelerator(folder: Path, megabytes: float, **more: Any) -> Path:
    """A file of hardware with little memory."""
    link = {"GB/s": 10, "latency_us": 5}
    row = {"flops": {"bf16": 10}, "memory": megabytes / 1000, "bandwidth": 100, "node_size": 8, "watts": 50}
    row |= {"link": link, "network": link, "host": link, "source": "made up"}
    (folder / "tiny.yaml").write_text(json.dumps({"tiny": row | more}))
    return folder / "tiny.yaml"


def test_the_chosen_layout_fits_where_one_rank_does_not(tmp_path: Path) -> None:
    large = f"{AUTO} --num-layers 4 --hidden-size 2048 --no-optimizer-cpu-offload --cpu-offloading-num-layers 0"
    state = sum(max_state_bytes(run(large).config, 1).values())
    gpu = accelerator(tmp_path, 0.9 * state / 1e6)
    flags = f"{large} --plan-gpu {gpu}"
    assert codes(flags) == ["E962"]
    planned = run(flags, 4)
    assert planned.config.parallel.model_ranks > 1 or planned.config.parallel.zero_stage
    needed = sum(max_peak_bytes(planned.config, 4).values())
    assert needed < 0.9 * state
    (note,) = [note for note in planned.notes if note.startswith("plan for 4 ranks on tiny: --")]
    chosen = re.split(r" on \w+: (.*?): ", note)[1]
    pasted = run(f"{large.replace(AUTO, '')} --global-batch-size 32 --bf16 {chosen}", 4)
    assert layout(pasted) == layout(planned)


def test_given_options_stay() -> None:
    planned = run(f"{AUTO} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2", 4)
    assert planned.config.parallel.tensor_model_parallel_size == 1
    assert planned.config.parallel.pipeline_model_parallel_size == 2
    assert run(f"{AUTO} --micro-batch-size 4", 4).config.training.micro_batch_size == 4


def test_the_file_of_a_planned_run_has_its_layout(tmp_path: Path) -> None:
    planned = run(f"{AUTO} --tensor-model-parallel-size 2", 4)
    (tmp_path / "config.yaml").write_text(to_yaml(planned.config))
    again = run(f"--config {tmp_path}/config.yaml", 4)
    assert layout(again) == layout(planned)
    assert not any(note.startswith("plan") for note in again.notes)


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert codes("--plan auto", 4) == ["E960"]
    assert codes(f"{AUTO} --micro-batch-size 0", 4) == ["E600"]  # nothing about a layout that was not planned
    assert codes("--plan auto --global-batch-size 13 --micro-batch-size 2", 4) == ["E962"]
    (problem,) = problems("--plan-gpu h100-80")
    assert (problem.code, problem.fixes[0]) == ("E961", "--plan-gpu h100-80g")
    assert codes(f"--plan-gpu {tmp_path}/absent.yaml") == ["E961"]
    (tmp_path / "odd.yaml").write_text("tiny: {memory: 3}")
    assert codes(f"--plan-gpu {tmp_path}/odd.yaml") == ["E961"]
    monkeypatch.setattr(hardware, "has_no_gpu", lambda environ: False)
    for module in (hardware, planning):
        monkeypatch.setattr(module, "gpu_name", lambda: "Voodoo 2")
    (problem,) = problems("--plan auto --global-batch-size 32", 4)
    assert problem.code == "E961"
    assert "Voodoo 2" in problem.sentence


def test_a_resumed_run_keeps_its_layout() -> None:
    first = run(f"{AUTO} --pipeline-model-parallel-size 2", 4)
    stored = StoredLayout(to_dict(first.config), 4, "runs/a/iter_0000010")

    def resumed(flags: str = AUTO, ranks: int = 4, stored: StoredLayout = stored) -> ParsedArguments:
        return run(flags, ranks, recall=lambda options: stored.config, stored_layout=lambda options: stored)

    assert layout(resumed()) == layout(first) != layout(run(AUTO, 4))
    (note,) = [note for note in resumed().notes if note.startswith("plan: kept from runs/a/iter_0000010: --")]
    assert "--pipeline-model-parallel-size 2" in note
    assert layout(resumed(f"{AUTO} --pipeline-model-parallel-size 1"))["pipeline_model_parallel_size"] == 1
    fewer = resumed(ranks=2)
    assert layout(fewer) == layout(run(AUTO, 2))
    assert "plan: runs/a/iter_0000010 was written by 4 ranks: planned again for 2" in fewer.notes
    by_hand = StoredLayout(to_dict(run("--global-batch-size 32 --bf16", 4).config), 4, "runs/a/iter_0000010")
    assert layout(resumed(stored=by_hand)) == layout(run(AUTO, 4))
    replicas = run(f"{AUTO} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1", 4).config
    smaller = resumed(AUTO.replace("32", "2"), stored=StoredLayout(to_dict(replicas), 4, "runs/a/iter_0000010"))
    assert any("planned again: global batch 2 is not" in note for note in smaller.notes)


def test_on_a_cpu_memory_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--plan auto --global-batch-size 32 --device cpu"
    peak = sum(max_peak_bytes(run(flags, 2).config, 2).values())
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 2 * peak * 3)
    (note,) = [note for note in notes(flags, 2).splitlines() if note.startswith("plan for 2 ranks on cpu")]
    assert " s a step" not in note  # its speed is unknown
    monkeypatch.setattr(hardware, "memory_bytes", lambda: 1 << 17)
    assert codes(flags, 2) == ["E962"]


def test_the_forecast_is_that_of_the_steps_that_are_left() -> None:
    flags = "--bf16 --global-batch-size 32 --plan-gpu h100-80g --check-config --train-iters 1000000"
    parsed = run(flags, 4)
    row = re.search(r"^forecast +(.*)$", parsed.summary(400_000, 400_000 * 32), re.M)
    assert row is not None
    words = re.fullmatch(
        r"(\S+) s a step on h100-80g, (\S+) tokens/s, MFU (\S+)%; the (\S+) steps take (\S+) (\w+), to (.*) UTC, .*",
        row[1],
    )
    assert words is not None
    step, rate, mfu, left, length, unit, end = words.groups()
    step, rate = float(step), float(rate.replace(",", ""))
    assert rate == pytest.approx(32 * 1024 / step, rel=0.01)
    flops = FlopsPerToken.from_config(parsed.config).full * rate / 4
    assert float(mfu) == pytest.approx(100 * flops / 989.4e12, abs=0.06)
    assert left == "600,000"
    seconds = float(length) * {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}[unit]
    assert seconds == pytest.approx(600_000 * step, rel=0.1)
    ends = time.mktime(time.strptime(end, "%Y-%m-%d %H:%M")) - time.timezone
    assert ends - time.time() == pytest.approx(seconds, abs=120 + 0.1 * seconds)
    assert "forecast" not in run(flags.replace("--plan-gpu h100-80g", "--device cpu")).summary()


def test_a_run_does_not_depend_on_its_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ZeroDivisionError

    parsed = run("--bf16 --global-batch-size 32 --plan-gpu h100-80g --check-config", 4)
    monkeypatch.setattr("megatron.arguments.planning.forecast", fail)
    assert "forecast   none: ZeroDivisionError()" in parsed.summary()
