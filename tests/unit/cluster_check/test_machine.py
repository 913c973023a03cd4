"""Facts of machines and of a shared file system, and the page that reports them."""

from __future__ import annotations

import errno
import fcntl
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tools.cluster_check import checks, filesystem
from tools.cluster_check.filesystem import PAGE_BYTES, FileSystemProbe, check_file_system
from tools.cluster_check.report import (
    FAILED,
    JSON,
    MARKDOWN,
    OK,
    SKIPPED,
    WARNING,
    CheckResult,
    CheckSection,
    ClusterReport,
    section_summary,
)
from tools.lib import machine_health


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return checks.machine_facts("cpu", {})


def ranks(
    folder: Path, facts: dict[str, Any], change: Callable[[int, dict[str, Any]], object] | None = None
) -> CheckSection:
    """Return the findings on four ranks of two equal nodes, where ``change`` alters the facts of one."""
    for rank in range(4):
        files = {"missing": [], "visible_after": 0.5, "lock": "held", "torn": 0, "write_mb_per_s": 123.4}
        place = {"rank": rank, "size": 4, "host": f"n{rank // 2}", "local_rank": rank % 2, "files": files}
        printed = json.loads(json.dumps((facts if rank % 2 == 0 else {}) | place))
        if change is None or change(rank, printed) is not None:
            (folder / f"machine.{rank}.json").write_text(json.dumps(printed))
    part = CheckSection("machine")
    checks.check_machines(part, folder)
    return part


def test_equal_nodes_pass(tmp_path: Path, facts: dict[str, Any]) -> None:
    part = ranks(tmp_path, facts)
    assert part.verdict == OK
    assert [row[:2] for row in part.tables["Nodes"]] == [("node", "ranks"), ("n0", "2"), ("n1", "2")]
    assert any(torch.__version__ in cell for row in part.tables["Software"] for cell in row)
    assert [entry["rank"] for entry in part.facts["ranks"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "verdict"), [("torch", FAILED), ("nccl", FAILED), ("driver", WARNING), ("environment", WARNING)]
)
def test_a_node_that_differs_is_named(tmp_path: Path, facts: dict[str, Any], name: str, verdict: str) -> None:
    def change(rank: int, reported: dict[str, Any]) -> dict[str, Any]:
        return reported.update({name: "1.2.3"} if rank == 2 else {}) or reported

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
def test_the_rate_of_a_fabric(ports: list[str], environment: dict[str, str], rate: float) -> None:
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


def test_a_rank_without_a_report(tmp_path: Path, facts: dict[str, Any]) -> None:
    part = ranks(tmp_path, facts, lambda rank, reported: None if rank == 3 else reported)
    assert part.verdict == FAILED
    assert part.checks[-1].detail == "no report from ranks 3"


def test_variables_are_shown_and_secrets_are_not() -> None:
    good = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    good |= {"NVIDIA_TF32_OVERRIDE": "1", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    hidden = {"NCCL_SECRET": "x", "UCX_API_KEY": "x", "WANDB_API_KEY": "x", "AWS_PROFILE": "x", "SLURM_CONF": "x"}
    assert checks.reported_environment({**hidden, **good, "XNCCL_A": "x"}) == good


def test_infiniband_and_network(tmp_path: Path) -> None:
    port = tmp_path / "ib" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert machine_health.infiniband_ports(tmp_path / "ib") == ["mlx5_0:1 400 Gb/sec (4X NDR) ACTIVE"]
    assert machine_health.infiniband_ports(tmp_path / "none") == []
    for name, state, speed in (
        ("eth0", "up", "100000"),
        ("eth1", "down", "-1"),
        ("lo", "unknown", ""),
        ("ib0", "up", ""),
    ):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
        (tmp_path / "net" / name / "speed").write_text(speed)
    assert machine_health.network_interfaces(tmp_path / "net") == ["eth0 100000 Mb/s", "ib0"]


def test_this_machine(facts: dict[str, Any]) -> None:
    assert facts["torch"] == torch.__version__
    assert facts["gpus"] == []
    assert facts["kernels"][0].startswith("kernels: ")
    assert set(checks.COMPARED_FACTS) <= facts.keys()
    assert set(checks.REQUIRED_EQUAL) <= set(checks.COMPARED_FACTS)


NODES = 3
HOSTS = {rank: f"node{rank // 2}" for rank in range(2 * NODES)}


def probe(folder: Path, seconds: float = 20.0, lost: int = -1) -> dict[int, dict[str, Any]]:
    """Return the views of two ranks on each of ``NODES`` nodes; rank ``lost`` has a folder of its own."""

    def one(rank: int) -> dict[str, Any]:
        mine = folder / ("own" if rank == lost else "shared")
        mine.mkdir(exist_ok=True)
        return FileSystemProbe(mine, rank, len(HOSTS), HOSTS[rank], rank % 2 == 0, seconds).probe(1)

    with ThreadPoolExecutor(len(HOSTS)) as threads:
        return dict(enumerate(threads.map(one, HOSTS)))


def judged(reported: dict[int, dict[str, Any]]) -> dict[str, CheckResult]:
    part = CheckSection("machine")
    check_file_system(part, reported, HOSTS)
    return {check.what: check for check in part.checks}


def test_a_good_file_system(tmp_path: Path) -> None:
    printed = probe(tmp_path)
    assert [check.verdict for check in judged(printed).values()] == [OK, OK, OK]
    assert judged(printed)["locks"].detail == "a lock held by one node excludes the others"
    assert [rank for rank, entry in printed.items() if "write_mb_per_s" in entry] == [0, 2, 4]
    assert all(entry["write_mb_per_s"] > 0 for rank, entry in printed.items() if rank % 2 == 0)


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    (shared,) = judged(probe(tmp_path, seconds=0.5, lost=3)).values()
    assert (shared.what, shared.verdict) == ("folder shared by all ranks", FAILED)
    assert "node0 does not see files written by ranks 3" in shared.detail


def test_locks_that_end_at_the_machine(tmp_path: Path) -> None:
    with patch.object(fcntl, "flock", lambda file, how: None):
        printed = probe(tmp_path)
    assert {entry["lock"] for rank, entry in printed.items() if rank in (2, 4)} == {"free"}
    assert judged(printed)["locks"].verdict == WARNING
    assert "does not reach node1, node2" in judged(printed)["locks"].detail


def test_a_rename_that_is_not_atomic(tmp_path: Path) -> None:
    """Rank 0 leaves the second page empty until another rank has read it, however the threads are scheduled."""
    original_replace, original_is_torn, caught = Path.replace, filesystem.is_torn, threading.Event()

    def replace(self: Path, target: Path) -> Path:
        if target.name != "page":
            return original_replace(self, target)
        is_first = not target.exists()  # there is no reader before the first page is announced
        target.write_bytes(b"")
        if not is_first:
            caught.wait(60.0)
        target.write_bytes(self.read_bytes())
        return target

    def is_torn(path: Path) -> bool:
        torn = original_is_torn(path)
        if torn:
            caught.set()
        return torn

    patches = patch.object(Path, "replace", replace), patch.object(filesystem, "is_torn", is_torn)
    with patches[0], patches[1], patch.object(filesystem, "REPLACEMENTS", 2):
        printed = probe(tmp_path)
    rename = judged(printed)["rename replaces a file at once"]
    assert rename.verdict == FAILED
    assert "reads found a file torn or missing" in rename.detail


def test_torn_pages_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "page"
    assert filesystem.is_torn(path)
    for content, torn in ((b"x" * PAGE_BYTES, False), (b"x" * 10, True), (b"x" * (PAGE_BYTES - 1) + b"y", True)):
        path.write_bytes(content)
        assert filesystem.is_torn(path) == torn
    with patch.object(Path, "read_bytes", side_effect=OSError(errno.ESTALE, "stale")):
        assert not filesystem.is_torn(path)
    broken = patch.object(Path, "read_bytes", side_effect=OSError(errno.EIO, "broken"))
    with broken, pytest.raises(OSError, match="broken"):
        filesystem.is_torn(path)


def part(*verdicts: str) -> CheckSection:
    return CheckSection("x", [CheckResult(f"what {i}", verdict, f"detail {i}") for i, verdict in enumerate(verdicts)])


def test_the_headline_is_the_first_that_is_not_well() -> None:
    assert section_summary(part(OK, OK)) == "2 checks"
    assert section_summary(part(OK)) == "1 check"
    assert section_summary(part(OK, WARNING, FAILED, FAILED)) == "what 2: detail 2"
    assert section_summary(part()) == ""


def test_the_page_and_the_data(tmp_path: Path) -> None:
    bad = part(OK, FAILED)
    bad.tables["Numbers"] = [("a", "b"), ("1 | 2", "3")]
    bad.facts["seed"] = 7
    bad.log = "the end\nof it"
    ClusterReport("4 ranks", "tools/acceptance.py", [part(OK), bad]).write(tmp_path)
    page = (tmp_path / MARKDOWN).read_text()
    assert page.startswith("# Cluster acceptance: FAILED\n\n4 ranks\n\nStarted as `tools/acceptance.py`.\n")
    assert "\n| x | FAILED | 0 | what 1: detail 1 |\n" in page
    assert "\n- **FAILED** what 1: detail 1\n" in page
    assert "\nNumbers:\n\n| a | b |\n| --- | --- |\n| 1 \\| 2 | 3 |\n" in page
    assert page.endswith("```\nthe end\nof it\n```\n")
    printed = json.loads((tmp_path / JSON).read_text())
    assert printed["failed"] is True
    assert [entry["verdict"] for entry in printed["parts"]] == [OK, FAILED]
    assert printed["parts"][1]["facts"] == {"seed": 7}
    assert {path.name for path in tmp_path.iterdir()} == {MARKDOWN, JSON}


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (ClusterReport("", "", [part(OK), part(WARNING)]), "passed"),
        (ClusterReport("", "", [part(OK)], unasked=["layouts"]), "passed, without layouts"),
        (ClusterReport("", "", [part(OK), part(SKIPPED)]), "passed, without x"),
        (ClusterReport("", "", [part(FAILED), part(SKIPPED)]), "FAILED"),
        (
            ClusterReport("", "", [part(OK)], left=["layouts", "bandwidth"]),
            "unfinished, layouts, bandwidth still to come",
        ),
        (ClusterReport("", "", [part(FAILED)], left=["layouts"]), "unfinished, layouts still to come, FAILED already"),
    ],
)
def test_skipped_checks_do_not_pass(report: ClusterReport, verdict: str, tmp_path: Path) -> None:
    assert report.verdict == verdict
    assert report.markdown().startswith(f"# Cluster acceptance: {verdict}\n")
    report.write(tmp_path)
    printed = json.loads((tmp_path / JSON).read_text())
    assert (printed["version"], printed["verdict"], printed["over"]) == (1, verdict, not report.left)
