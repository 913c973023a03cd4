"""The report on a run that is out of memory: what it predicts, what it finds alive, and where."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import resource
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.arguments.cli import parse
from megatron.planner.activations import peak_activations
from megatron.planner.memory import STATE_KINDS, max_peak_bytes, rank_state_bytes
from megatron.training import out_of_memory
from megatron.training.live_tensors import KEPT, LiveTensor, ModuleNames, live_tensors
from megatron.training.out_of_memory import changes, explain_out_of_memory, largest, requested_bytes
from megatron.training.trainer import Trainer
from tests.kit.processes import ForkedProgram
from tests.kit.runs import Outcome, before_step, start, tiny_run

LONG = "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 2"
UNITS = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
TOO_MUCH = 1 << 52
"""Bytes that no allocator has."""


def fail_in(module: str, backward: bool = False) -> object:
    """Let a module of the second block request too much memory, in its forward or in its backward."""

    def act(trainer: Trainer) -> None:
        block = trainer.chunks[0].layers["1"].get_submodule(module)

        def fail(*arguments: object) -> None:
            torch.empty(TOO_MUCH)

        def fail_later(module: nn.Module, inputs: object, output: Tensor) -> None:
            output.register_hook(fail)

        block.register_forward_hook(fail_later if backward else fail)

    return before_step(2, act)


def run_out(folder: Path, flags: str = "", module: str = "mlp.linear_fc1", backward: bool = False) -> Outcome:
    """Start a run that fails in its second step."""
    return start(tiny_run(folder, f"{LONG} {flags}"), fail_in(module, backward))  # type: ignore[arg-type]


def column(report: str, number: int) -> dict[str, int]:
    """Return a column of the table in bytes, by part."""
    rows = re.findall(r"^  (\S.*?)  +([\d,.]+) (\w+)  +([\d,.]+) (\w+)$", report, flags=re.MULTILINE)
    return {row[0]: round(float(row[1 + 2 * number].replace(",", "")) * UNITS[row[2 + 2 * number]]) for row in rows}


def test_the_report_follows_the_error_and_compares_the_forecast(tmp_path: Path) -> None:
    outcome = run_out(tmp_path)
    assert outcome.status == 1
    error, report = outcome.err.split("memory of rank 0 on cpu")
    assert error.startswith("error: Traceback")
    assert "can't allocate memory" in error
    assert "16,777,216.00 GiB could not be allocated in layers.1.mlp.linear_fc1" in report
    (line,) = (json.loads(text) for text in (tmp_path / "failures.jsonl").read_text().splitlines())
    assert line["kind"] == "out-of-memory"
    assert "memory of rank" not in line["sentence"]
    predicted, found = column(report, 0), column(report, 1)
    state = rank_state_bytes(tiny_run(tmp_path, LONG), 1, 0)
    assert [part for part in found if part in STATE_KINDS] == [part for part in STATE_KINDS if state[part]]
    for part in STATE_KINDS:
        assert found.get(part, 0) == pytest.approx(predicted.get(part, 0)) == pytest.approx(state[part], rel=0.01)
    assert 0 < found[KEPT] < predicted[KEPT]  # the last layers have not been reached


@pytest.mark.parametrize("flags", ["", "--recompute-granularity selective", "--swiglu"])
def test_what_backward_keeps_is_what_is_forecast(tmp_path: Path, flags: str) -> None:
    """When the backward of the last layer begins, what the last norm and the loss had kept is gone."""
    config = tiny_run(tmp_path, f"{LONG} {flags}")
    gc.collect()
    others = sum(
        live.size for live in live_tensors(torch.device("cpu"), [], ModuleNames(None), {}) if live.part == KEPT
    )
    report = run_out(tmp_path, flags, module="mlp.linear_fc2", backward=True).err
    of_loss = 2 * 512 * 2 * 16 * 4
    assert column(report, 1)[KEPT] - others + of_loss == pytest.approx(
        peak_activations(config, 1)[0]["activations"], rel=0.02
    )


def test_large_tensors_have_the_names_of_their_modules(tmp_path: Path) -> None:
    report = run_out(tmp_path, module="mlp.linear_fc2", backward=True).err
    rows = re.findall(r"([\d.]+ KiB)  (\d) tensors? +float32 \[(.*)\]  (.*)$", report, flags=re.MULTILINE)
    assert ("256.00 KiB", "2", "512 x 2 x 32", f"{KEPT}: layers.*.mlp.linear_fc2 (RowParallel)") in rows
    assert ("256.00 KiB", "2", "512 x 2 x 32", f"{KEPT}: layers.*.mlp (Gelu)") in rows
    assert any("layers.*.self_attention" in owner and shape == "2 x 2 x 512 x 8" for _, _, shape, owner in rows)


def test_equal_tensors_of_several_layers_are_one_row() -> None:
    tensors = [LiveTensor(2**20, (4, 5), torch.bfloat16, KEPT, f"layers.{n}.mlp") for n in range(12)]
    tensors += [LiveTensor(2**23, (7,), torch.float32, "weights", "layers.3.mlp to layers.0.mlp")]
    assert [*largest(tensors)] == [
        "largest tensors:",
        "     12.00 MiB  12 tensors   bfloat16 [4 x 5]  kept for backward: layers.*.mlp",
        "      8.00 MiB  1 tensor     float32 [7]  weights: layers.*.mlp to layers.*.mlp",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB", 20 * 2**30),
        ("HIP out of memory. Tried to allocate 512.00 MiB.", 2**29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_request_is_read_from_the_error(text: str, size: int | None) -> None:
    assert requested_bytes(RuntimeError(text)) == size


def test_what_cannot_fit_is_planned_unless_it_was() -> None:
    """The planner is proposed to runs that do not use it."""
    flags = "--check-config --preset gpt2-124m --bf16 --mock-data --train-iters 1 --global-batch-size 8 --world-size 1"
    by_hand = parse(flags.split(), {}).config
    planned = replace(by_hand, planning=replace(by_hand.planning, plan="auto"))
    (first,), (second,) = (list(changes(config, 1, 1.0, 0)) for config in (by_hand, planned))
    assert first.endswith("--plan auto tries several at once")
    assert second.endswith("more ranks may")


def test_other_errors_have_no_report(tmp_path: Path) -> None:
    assert explain_out_of_memory(ValueError("shapes"), tiny_run(tmp_path)) == ""


def test_a_report_that_fails_hides_nothing(tmp_path: Path) -> None:
    with patch.object(out_of_memory, "live_tensors", side_effect=MemoryError("no room")):
        outcome = run_out(tmp_path)
    assert outcome.status == 1
    assert "can't allocate memory" in outcome.err
    assert outcome.err.endswith("there is no report on the memory: MemoryError: no room\n")


def test_memory_that_is_missing_while_the_run_is_built_is_reported_without_modules(tmp_path: Path) -> None:
    config = tiny_run(tmp_path)
    with patch("megatron.training.build.build_optimizer", lambda *arguments: torch.empty(TOO_MUCH)):
        report = start(config).err.split("memory of rank 0 on cpu")[1]
    assert column(report, 0)["moments"] == pytest.approx(rank_state_bytes(config, 1, 0)["moments"], rel=0.01)
    assert "moments" not in column(report, 1) or not column(report, 1)["moments"]
    assert "largest tensors:" in report


BATCH = "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 64 --global-batch-size 64 --train-iters 2"
WIDE = f"{BATCH} --hidden-size 64 --ffn-hidden-size 256"


def run_limited(folder: str, flags: str, size: int) -> int:
    """Start a run in a process that may allocate ``size`` bytes more."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # further ones take address space for nothing
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcome = start(tiny_run(Path(folder), f"{WIDE} {flags}"))
    print(outcome.err)
    return 3 if outcome.status is None else outcome.status


M_ARENA_MAX = -8


@pytest.mark.slow
def test_a_run_that_failed_under_a_limit_passes_with_what_the_report_proposes(tmp_path: Path) -> None:
    size = int(0.75 * sum(max_peak_bytes(tiny_run(tmp_path, WIDE), 1).values()))
    with ForkedProgram(run_limited, str(tmp_path / "a"), "", size, output=tmp_path / "out") as program:
        assert program.wait(60) == 1
        report = program.output.split("cheapest changes that would fit into ")[1]
    changes = re.findall(r"^  (--\S.*?)  \(saves ([\d.]+) MiB\)$", report, flags=re.MULTILINE)
    flags, _ = max(changes, key=lambda change: float(change[1]))  # the others may need all that the limit leaves
    with ForkedProgram(run_limited, str(tmp_path / "b"), flags, size, output=tmp_path / "out") as program:
        assert program.wait(60) == 0, (flags, program.output)
