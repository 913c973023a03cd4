from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.cluster_check import checks
from tools.cluster_check.report import FAILED, OK, WARNING, CheckSection


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return checks.machine_facts("cpu", {})


def ranks(
    folder: Path, facts: dict[str, Any], change: Callable[[int, dict[str, Any]], object] | None = None
) -> CheckSection:
    """What is said of four ranks on two nodes that are alike, but for what ``change`` does to one's facts."""
    for rank in range(4):
        files = {"missing": [], "visible_after": 0.5, "lock": "held", "torn": 0, "write_mb_per_s": 123.4}
        place = {"rank": rank, "size": 4, "host": f"n{rank // 2}", "local_rank": rank % 2, "files": files}
        printed = json.loads(json.dumps((facts if rank % 2 == 0 else {}) | place))
        if change is None or change(rank, printed) is not None:
            (folder / f"machine.{rank}.json").write_text(json.dumps(printed))
    part = CheckSection("machine")
    checks.check_machines(part, folder)
    return part


def test_nodes_that_are_alike(tmp_path: Path, facts: dict[str, Any]) -> None:
    part = ranks(tmp_path, facts)
    assert part.verdict == OK
    assert [row[:2] for row in part.tables["Nodes"]] == [("node", "ranks"), ("n0", "2"), ("n1", "2")]
    assert any(torch.__version__ in cell for row in part.tables["Software"] for cell in row)
    assert [entry["rank"] for entry in part.facts["ranks"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "verdict"), [("torch", FAILED), ("nccl", FAILED), ("driver", WARNING), ("environment", WARNING)]
)
def test_a_node_that_differs_is_named(tmp_path: Path, facts: dict[str, Any], name: str, verdict: str) -> None:
    def change(rank: int, told: dict[str, Any]) -> dict[str, Any]:
        return told.update({name: "1.2.3"} if rank == 2 else {}) or told

    part = ranks(tmp_path, facts, change)
    (check,) = [check for check in part.checks if check.verdict != OK]
    assert (check.what, check.verdict) == (f"{name} the same on all nodes", verdict)
    assert 'n1: "1.2.3"' in check.detail


@pytest.mark.parametrize(
    ("ports", "environment", "rate"),
    [
        ([], {}, 0.0),
        (["mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE", "mlx5_1:1 400 Gb/sec (4X NDR) ACTIVE"], {}, 100.0),
        (["mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE", "mlx5_1:1 10 Gb/sec (4X SDR) DOWN"], {}, 50.0),
        (["mlx5_0:1 2.5 Gb/sec (1X SDR) ACTIVE", "odd:1  ACTIVE"], {"NCCL_IB_DISABLE": "0"}, 0.3125),
        (["mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE"], {"NCCL_IB_DISABLE": "1"}, 0.0),
    ],
)
def test_what_a_fabric_carries(ports: list[str], environment: dict[str, str], rate: float) -> None:
    assert checks.fabric_rate({"infiniband": ports, "environment": environment}) == rate


@pytest.mark.parametrize(
    ("device", "driver", "gpus", "sentence"),
    [
        ("cpu", "550.1", (0, 0), ""),
        ("auto", None, (0, 0), ""),
        ("auto", "550.1", (8, 8), ""),
        ("auto", "550.1", (0, 0), "none found on n0, n1: torch 9.9 is built without CUDA, and there is driver 550.1"),
        ("auto", None, (8, 0), "none found on n1: torch 9.9 is built without CUDA, and there is no driver"),
        ("cuda", None, (0, 0), "none found on n0, n1: "),
    ],
)
def test_gpus_that_are_not_found(device: str, driver: str | None, gpus: tuple[int, int], sentence: str) -> None:
    part, same = CheckSection("machine"), {"torch": "9.9", "cuda": None, "driver": driver}
    checks.check_gpus(part, [same | {"host": f"n{i}", "gpus": count * ["H"]} for i, count in enumerate(gpus)], device)
    assert [check.verdict for check in part.checks] == [FAILED] * bool(sentence)
    assert all(check.detail.startswith(sentence) for check in part.checks)


def test_a_rank_of_which_nothing_is_heard(tmp_path: Path, facts: dict[str, Any]) -> None:
    part = ranks(tmp_path, facts, lambda rank, told: None if rank == 3 else told)
    assert part.verdict == FAILED
    assert part.checks[-1].detail == "no report from ranks 3"


def test_no_rank_at_all(tmp_path: Path) -> None:
    part = CheckSection("machine")
    assert checks.check_machines(part, tmp_path) == {}
    assert part.verdict == FAILED


def test_variables_are_shown_and_secrets_are_not() -> None:
    good = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    good |= {"NVIDIA_TF32_OVERRIDE": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    hidden = {"NCCL_SECRET": "x", "UCX_API_KEY": "x", "WANDB_API_KEY": "x", "AWS_PROFILE": "x", "SLURM_CONF": "x"}
    assert checks.reported_environment({**hidden, **good, "XNCCL_A": "x"}) == good


def test_the_driver() -> None:
    text = "NVRM version: NVIDIA UNIX {} Kernel Module{}  550.54.15  Release Build\nGCC version: 12\n"
    for words in (("x86_64", ""), ("Open", " for x86_64")):
        assert checks.nvidia_driver_version(lambda words=words: text.format(*words)) == "550.54.15"
    assert checks.nvidia_driver_version(Path("no-such-file").read_text) is None


def test_infiniband_and_network(tmp_path: Path) -> None:
    port = tmp_path / "ib" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert checks.infiniband_ports(tmp_path / "ib") == ["mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE"]
    assert checks.infiniband_ports(tmp_path / "none") == []
    for name, state, speed in (
        ("eth0", "up", "100000"),
        ("eth1", "down", "-1"),
        ("lo", "unknown", ""),
        ("ib0", "up", ""),
    ):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
        (tmp_path / "net" / name / "speed").write_text(speed)
    assert checks.network_interfaces(tmp_path / "net") == ["eth0 100000 Mb/s", "ib0"]


def test_this_machine(facts: dict[str, Any]) -> None:
    assert facts["torch"] == torch.__version__
    assert facts["gpus"] == []
    assert facts["kernels"][0].startswith("kernels: ")
    assert set(checks.COMPARED_FACTS) <= facts.keys()
    assert set(checks.REQUIRED_EQUAL) <= set(checks.COMPARED_FACTS)
