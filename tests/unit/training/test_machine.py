"""Runs that this machine cannot hold are refused before torch is imported; variables that a run sets for libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megatron.arguments.cli import parse
from megatron.arguments.validate import find_problems
from megatron.config import machine
from megatron.config.compute import KERNEL_CANDIDATES
from megatron.config.errors import UserError
from megatron.config.launch import end_refused_start, ranks_per_node
from megatron.kernels.fp8 import Float8Recipe, fp8_operation
from megatron.kernels.grouped_fp8 import grouped_fp8_operation
from megatron.kernels.registry import OPERATIONS
from megatron.planner.memory import max_peak_bytes, max_state_bytes
from megatron.training.machine import ALLOCATOR, CONNECTIONS, default_variables, fit_to_machine, set_variables
from tests.unit.arguments.command import run

TINY = "--preset tiny-llama --mock-data --vocab-size 512 --train-iters 5"
LARGE = "--preset llama3-8b --mock-data --vocab-size 128256 --train-iters 5"
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU, in 16 GiB of memory."""
    for name in (*LAUNCHED, "SLURM_STEP_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: 16 << 30)


def checked(capsys: pytest.CaptureFixture[str], flags: str) -> tuple[int, str]:
    status = pretrain_gpt.main(flags.split())
    return status, "".join(capsys.readouterr())


def with_gpu(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr("megatron.training.machine.has_no_gpu", lambda environ: False)
    monkeypatch.setattr("megatron.training.machine.gpu_memory_bytes", lambda: size)


def test_state_beyond_the_memory_is_refused_here_and_not_for_other_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, printed = checked(capsys, f"{LARGE} --check-config")
    assert status == 2
    assert "note: no GPU found: training on CPU\nE217 this machine has 16.00 GiB of memory, and its 1 rank" in printed
    assert "would need at least 119.66 GiB: weights " in printed
    assert printed.count("E217") == 1
    assert checked(capsys, f"{LARGE} --check-config --world-size 1")[0] == 0
    assert checked(capsys, f"{LARGE} --check-config --tensor-model-parallel-size 8")[0] == 0, "eight ranks are not here"
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: None)
    assert checked(capsys, f"{LARGE} --check-config")[0] == 0


def test_nothing_is_forecast_for_nccl_on_a_machine_without_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    flags = f"{TINY} --global-batch-size 8 --check-config"
    status, printed = checked(capsys, flags)
    assert (status, "no GPU found" in printed, "NCCL" in printed) == (0, True, False), printed
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: 1 << 30)
    assert "memory may not suffice" not in checked(capsys, flags)[1], "768 MiB of each rank were NCCL's"
    for name in LAUNCHED:
        monkeypatch.delenv(name)
    assert "NCCL estimate" in checked(capsys, f"{flags} --world-size 8")[1], "of other machines"


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (8, False)])
def test_all_ranks_of_a_machine_count(ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = LAUNCHED | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": str(ranks)}
    parsed = parse(f"{TINY} --global-batch-size 8".split(), environ)
    state = sum(max_state_bytes(parsed.config, 8).values())
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: 8 * state - 1)
    try:
        fit_to_machine(parsed.config, 8, environ)
        refused = []
    except UserError as error:
        refused = [problem.code for problem in error.problems]
    assert refused == ([] if fits else ["E217"])
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: 8 * state)
    notes = fit_to_machine(parsed.config, 8, environ)[1]
    assert any("memory may not suffice" in note for note in notes) == (not fits), "activations come on top"


def test_a_gpu_has_to_hold_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(f"{LARGE} --optimizer-cpu-offload --bf16".split(), {}).config
    state = sum(max_state_bytes(config, 1).values())
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: 1 << 40)
    with_gpu(monkeypatch, state - 1)
    with pytest.raises(UserError, match=r"E217 a GPU of this machine has .* and its fullest rank"):
        fit_to_machine(config, 1, {})
    for size in (state, None):
        with_gpu(monkeypatch, size)
        assert fit_to_machine(config, 1, {})[0] == config
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: 1 << 30)
    with pytest.raises(UserError, match="and its 1 rank would need"):  # what is offloaded
        fit_to_machine(config, 1, {})


def test_a_run_that_does_not_fit_passes_with_each_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 8 GPUs that the planner knows; the notes have the bytes and the seconds that each change costs."""
    monkeypatch.setattr("megatron.training.machine.memory_bytes", lambda: 1 << 42)
    monkeypatch.setattr("megatron.arguments.fitting.memory_bytes", lambda: 1 << 42)
    with_gpu(monkeypatch, 120 << 30)
    flags = f"{LARGE} --bf16 --global-batch-size 64 --plan-gpu h100-80g"
    with pytest.raises(UserError) as refused:
        fit_to_machine(parse(flags.split(), LAUNCHED).config, 8, LAUNCHED)
    (problem,) = refused.value.problems
    assert (problem.code, len(problem.fixes)) == ("E217", 3)
    for fix, note in zip(problem.fixes, refused.value.notes, strict=True):
        found = re.fullmatch(rf"would fit: {fix}  \(saves ([\d.]+) GiB, [+-][\d.]+ s a step \([+-][\d.]+%\)\)", note)
        assert found is not None, note
        config = parse([*flags.split(), *fix.split()], LAUNCHED).config
        peaks = [sum(max_peak_bytes(each, 8).values()) for each in (parse(flags.split(), LAUNCHED).config, config)]
        assert float(found[1]) == pytest.approx((peaks[0] - peaks[1]) / 2**30, abs=0.01)
        assert fit_to_machine(config, 8, LAUNCHED) == (config, [])


def test_megatron_lm_s_backend_is_left_to_a_machine_without_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, printed = checked(capsys, f"{TINY} --distributed-backend nccl --check-config")
    assert (status, "note: --distributed-backend nccl has no effect without GPUs" in printed) == (0, True)
    config = parse(f"{TINY} --distributed-backend nccl --global-batch-size 8".split(), LAUNCHED).config
    assert fit_to_machine(config, 8, LAUNCHED)[0].parallel.distributed_backend is None
    several = LAUNCHED | {"LOCAL_WORLD_SIZE": "4"}  # the other machine may have GPUs: this one has lost them
    assert fit_to_machine(config, 8, several)[0].parallel.distributed_backend == "nccl"
    with_gpu(monkeypatch, None)
    assert fit_to_machine(config, 8, LAUNCHED) == (config, [])


@pytest.mark.parametrize(
    ("flags", "codes"),
    [
        ("--device cuda", ["E207"]),
        ("--cuda-graph optimizer", ["E906"]),
        ("--kernels attention=flash_attn norm=triton", ["E903", "E903"]),
        ("--kernels norm=compiled", []),
        ("--device cpu", []),
        ("--run-dir /proc/1/run --cuda-graph step", ["E701", "E906"]),
    ],
)
def test_flags_that_need_a_gpu_are_refused_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, codes: list[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # only the run folder is asked about
    status, printed = checked(capsys, f"{TINY} --check-config {flags}")
    assert [word for word in printed.split() if word[0] == "E" and word[1:].isdecimal()] == codes
    assert status == (2 if codes else 0)
    assert checked(capsys, f"{TINY} --check-config --world-size 1 {flags}")[0] == 0


def test_kernels_that_need_a_gpu_match_the_refusals_of_the_registry() -> None:
    cpu, config = torch.device("cpu"), parse(f"{TINY} --device cpu".split(), {}).config
    recipe = Float8Recipe("e4m3", "tensorwise", False)
    operations = OPERATIONS | {"fp8": fp8_operation(recipe), "grouped_fp8": grouped_fp8_operation(recipe)}
    for operation, name in ((operation, name) for operation, names in KERNEL_CANDIDATES.items() for name in names):
        tried = replace(config, compute=replace(config.compute, kernels=(f"{operation}={name}",)))
        refused = "E903" in [problem.code for problem in find_problems(tried, 1)]
        missing = operations[operation].candidates[name].missing(cpu, torch.bfloat16)
        assert refused == (missing is not None), (operation, name)


def test_gpus_are_found_by_the_files_of_their_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda name: "2.13.0")
    monkeypatch.setattr(machine, "CUDA_DRIVER", "libnone.so.1")
    assert machine.has_no_gpu({}, tmp_path)
    for name in ("dev/nvidia0", "dev/nvidiactl", "dev/kfd", "dev/dxg", "proc/driver/nvidia/version"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        assert not machine.has_no_gpu({}, tmp_path), name
        assert machine.has_no_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
        assert not machine.has_no_gpu({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
        shutil.rmtree(tmp_path / name.split("/")[0])
    monkeypatch.setattr(machine, "CUDA_DRIVER", "libc.so.6")  # a driver that loads may find a GPU
    assert not machine.has_no_gpu({}, tmp_path)
    monkeypatch.setattr(machine, "version", lambda name: "2.13.0+cpu")
    assert machine.has_no_gpu({}, tmp_path)


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 12),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 12),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 << 30}\n"}, 6),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": f"{1 << 30}\n"}, 5),
        ({"proc/self/cgroup": "4:memory:/a\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 << 30}"}, 7),
        ({"proc/self/cgroup": "4:cpu:/a\n", "sys/fs/cgroup/cpu/memory.max": f"{3 << 30}"}, 12),
    ],
)
def test_memory_is_limited_by_the_control_group(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    assert machine.memory_bytes(tmp_path) is None
    files |= {"proc/meminfo": f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nSwapTotal: {4 << 20} kB\n"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert machine.memory_bytes(tmp_path) == gib << 30


NVML = """
typedef struct {{ unsigned long long total, free, used; }} memory;
int nvmlInit_v2(void) {{ return 0; }}
int nvmlDeviceGetCount_v2(unsigned *n) {{ *n = 2; return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) {{ *d = (void *)(long)(i + 1); return 0; }}
int nvmlDeviceGetMemoryInfo(void *d, memory *m) {{ m->total = (long)d * {size}ull; return {status}; }}
int nvmlDeviceGetName(void *d, char *name, unsigned size) {{
  __builtin_strncpy(name, (long)d == 1 ? "NVIDIA H100 80GB HBM3" : "another", size); return {status}; }}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(("status", "found"), [(0, 160 << 30), (3, None)])
def test_the_largest_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, found: Any) -> None:
    (tmp_path / "nvml.c").write_text(NVML.format(size=80 << 30, status=status))
    library = tmp_path / "libnvml.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    monkeypatch.setattr(machine, "NVML", str(library))
    assert machine.gpu_memory_bytes() == found
    assert machine.gpu_name(tmp_path) == (None if found is None else "NVIDIA H100 80GB HBM3")


def test_the_driver_of_amd_names_gpus_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NVML", str(tmp_path / "absent.so"))
    assert machine.gpu_name(tmp_path) is None
    for card, name in (("card0", ""), ("card1", "AMD Instinct MI300X OAM\n")):
        (tmp_path / f"sys/class/drm/{card}/device").mkdir(parents=True)
        (tmp_path / f"sys/class/drm/{card}/device/product_name").write_text(name)
    assert machine.gpu_name(tmp_path) == "AMD Instinct MI300X OAM"


SIBLING = "import sys; from megatron.config.launch import end_refused_start as end; sys.exit(end(10.0, None))"


def test_torchrun_gets_one_failure_with_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks of the machine end with status 0, before the rank that reports."""
    files = [tmp_path / str(rank) / "error.json" for rank in range(3)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    others = []
    for file in files:
        file.parent.mkdir()
        environ = os.environ | {"TORCHELASTIC_ERROR_FILE": str(file)}
        if file != files[0]:
            others.append(subprocess.Popen([sys.executable, "-c", SIBLING], env=environ))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(files[0]))
    assert end_refused_start(20.0, "E217 too large") == 2
    assert [other.poll() for other in others] == [0, 0]
    message = json.loads(files[0].read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == "E217 too large"


def test_a_rank_whose_refusal_no_other_reports_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    assert end_refused_start(0.1, None) == 2
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert (end_refused_start(0.1, None), end_refused_start(60.0, "E001")) == (2, 2)
    assert time.monotonic() - began < 30


@pytest.mark.slow  # torchrun imports torch
def test_a_refused_start_under_torchrun_is_short(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "pretrain_gpt.py"]
    done = subprocess.run(
        [*words, "--layers", "4"], cwd=Path(pretrain_gpt.__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("E001 ")
    assert "SIGTERM" not in done.stderr
    report = done.stderr.split("Root Cause")[1].splitlines()
    assert any(line.startswith("  traceback : E001 --layers") for line in report)
    assert done.stderr.count("E001 ") == 2  # from one rank, and in the report of torchrun
    assert done.stderr.count("Traceback (most recent call last)") == 1  # of torchrun itself


# ---- Environment variables for CUDA, NCCL, gloo and Inductor

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SHORT = "--hidden-dropout 0 --attention-dropout 0"


@pytest.mark.parametrize(
    ("flags", "ranks", "queues", "segments"),
    [
        (SHORT, 1, "32", False),
        (f"{SHORT} --cuda-graph none", 1, "32", True),
        ("--hidden-dropout 0.1", 1, "32", True),
        (TP2, 2, "1", True),
        (f"{TP2} {SHORT}", 2, "1", False),
        (PP2, 2, "32", True),
        (f"{TP2} {PP2}", 4, "32", True),
    ],
)
def test_defaults_follow_the_layout_and_the_graphs(flags: str, ranks: int, queues: str, segments: bool) -> None:
    found = default_variables(run(flags, ranks).config, ranks, {}, 16, cuda=True)
    assert found[CONNECTIONS] == queues
    assert (found.get(ALLOCATOR[0]) == "expandable_segments:True") is segments
    assert found["NCCL_GRAPH_REGISTER"] == "0"
    assert "TORCH_GLOO_LAZY_INIT" not in found


def test_a_config_file_counts_as_flags_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("config") / "pp.yaml"
    file.write_text("parallel:\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 2\n")
    assert default_variables(run(f"--config {file}", 4).config, 4, {}, 16, cuda=True)[CONNECTIONS] == "32"


def test_existing_variables_are_kept() -> None:
    config = run("").config
    environ = {CONNECTIONS: "8", "PYTORCH_CUDA_ALLOC_CONF": "", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=8" in set_variables(config, True, environ)
    assert environ == {**environ, CONNECTIONS: "8", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    assert ALLOCATOR[0] not in environ


def test_a_pipeline_with_one_queue_is_refused() -> None:
    config = run(PP2, 2).config
    with pytest.raises(UserError, match="E916 CUDA_DEVICE_MAX_CONNECTIONS=1 cannot"):
        set_variables(config, True, {CONNECTIONS: "1"})
    assert set_variables(config, False, {CONNECTIONS: "1"})
    assert set_variables(run(TP2, 2).config, True, {CONNECTIONS: "1"})


@pytest.mark.parametrize(("ranks", "lazy"), [(1, False), (64, False), (65, True), (1024, True)])
@pytest.mark.parametrize("cuda", [False, True])
def test_gloo_connects_every_pair_of_few_ranks_only(ranks: int, lazy: bool, cuda: bool) -> None:
    found = default_variables(run("").config, ranks, {}, 16, cuda)
    assert (found.get("TORCH_GLOO_LAZY_INIT") == "1") is lazy


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "9", "SLURM_NTASKS": "20", "SLURM_LOCALID": "1", "MASTER_ADDR": "n1"}


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 8),
        (SRUN, 2),
    ],
)
def test_cores_are_divided_among_the_ranks_of_a_node(environ: dict[str, str], ranks: int) -> None:
    assert ranks_per_node(environ) == ranks
    threads = default_variables(run("").config, 1, environ, 100, cuda=True)["TORCHINDUCTOR_COMPILE_THREADS"]
    assert threads == str(min(32, 100 // ranks))
