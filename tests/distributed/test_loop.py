"""Whole runs on several ranks: agreed ends, evaluation over replicas, errors reported once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatron.config.run import RunConfig
from megatron.data.gpt_dataset import SampleOrder, build_sample_order
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.training import main
from megatron.training.stop import StopRequest
from megatron.training.trainer import Trainer
from tests.distributed.sites import ROOT
from tests.kit.pool import Pool
from tests.kit.runs import FLAGS, before_step, column, records, saved_steps, spoil_step, start, tiny_run

TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {"tp2-sp": TP2_SP, "dp2": "", "pp2": PP2}


def terminate(trainer: Trainer) -> None:
    signal.raise_signal(signal.SIGTERM)


def stop(trainer: Trainer) -> None:
    Path(str(trainer.config.training.stop_file)).touch()


def fail(trainer: Trainer) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def spoil_weight(trainer: Trainer) -> None:
    next(iter(trainer.optimizer.main_params.values())).view(-1)[0] = float("nan")


EVENTS = {
    "nothing": lambda: None,
    "SIGTERM in step 2": partial(before_step, 2, terminate),
    "a stop file in step 3": partial(before_step, 3, stop),
    "an error in step 3": partial(before_step, 3, fail),
    "NaN in step 3": partial(before_step, 3, spoil_step),
    "a NaN weight in step 3": partial(before_step, 3, spoil_weight),
}
"""Events on the last rank."""


def run_rank(rank: int, world_size: int, config: RunConfig, event: str = "nothing") -> tuple[int | None, str]:
    """The exit status of a rank, on a machine of its own, and what it wrote to stderr."""
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "SLURMD_NODENAME": f"node{rank}"}):
        outcome = start(config, EVENTS[event]() if rank == world_size - 1 else None, rank, world_size)
    return outcome.status, outcome.err


def run_two(pool: Pool, config: RunConfig, event: str = "nothing") -> list[tuple[int | None, str]]:
    return pool.run(2, run_rank, config, event)


def failures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]


WELL = [(0, ""), (0, "")]
EVALUATED = "--eval-interval 2 --eval-iters 2"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one process; its checkpoint is in ``saved``."""
    folder = tmp_path_factory.mktemp("alone")
    assert run_rank(0, 1, tiny_run(folder, f"{EVALUATED} --save {folder}/saved")) == (0, "")
    return folder


@pytest.mark.parametrize("layout", [pytest.param("tp2-sp", marks=pytest.mark.slow), "dp2", "pp2"])
def test_a_run_matches_one_process(pool: Pool, tmp_path: Path, alone: Path, layout: str) -> None:
    config = tiny_run(tmp_path, f"{EVALUATED} --exit-interval 5 {LAYOUTS[layout]}", 2)
    assert run_two(pool, config) == WELL
    for kind, steps in (("lm loss", [1, 2, 3, 4, 5]), ("lm loss validation", [2, 4])):
        assert column(tmp_path, "iteration", kind) == steps
        assert column(tmp_path, kind, kind) == pytest.approx(column(alone, kind, kind)[: len(steps)], rel=1e-4)


def test_evaluation_matches_in_any_layout(pool: Pool, tmp_path: Path, alone: Path) -> None:
    config = tiny_run(tmp_path, f"--load {alone}/saved {EVALUATED} --skip-train {PP2}", 2)
    assert run_two(pool, config) == WELL
    for kind in ("lm loss validation", "lm loss test"):
        assert column(tmp_path, kind, kind) == pytest.approx(column(alone, kind, kind)[-1:], rel=1e-5)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(pool: Pool, tmp_path: Path) -> None:
    ranks = run_two(pool, tiny_run(tmp_path, PP2, 2), "SIGTERM in step 2")
    assert ranks == [(143, ""), (143, "")]
    assert column(tmp_path, "iteration") == [1, 2]
    assert records(tmp_path, "text")[-1]["text"] == "stopped by signal 15 (SIGTERM) after step 2 of 6"


class LateStopRequest(StopRequest):
    """Reads requests one call late, as on GPUs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._late = True


def run_rank_late(rank: int, world_size: int, config: RunConfig, event: str) -> tuple[int | None, str]:
    with patch.object(main, "StopRequest", LateStopRequest):
        return run_rank(rank, world_size, config, event)


@pytest.mark.parametrize(("flags", "last"), [("--log-interval 10", 3), ("--log-interval 2", 2)])
def test_a_signal_that_is_read_a_step_late_stops_all_ranks_one_step_later_unless_a_log_line_is_due(
    pool: Pool, tmp_path: Path, flags: str, last: int
) -> None:
    config = tiny_run(tmp_path, f"{PP2} {flags} --save {tmp_path}/saved", 2)
    ranks = pool.run(2, run_rank_late, config, "SIGTERM in step 2")
    assert ranks == [(143, ""), (143, "")]
    assert (column(tmp_path, "iteration"), saved_steps(tmp_path / "saved")) == ([last], [last])


@pytest.mark.parametrize(("layout", "layer", "samples"), [("tp2-sp", 0, "[8]"), ("dp2", 0, "[9]"), ("pp2", 1, "[8]")])
def test_a_bad_number_on_one_rank_is_reported_once(
    pool: Pool, tmp_path: Path, layout: str, layer: int, samples: str
) -> None:
    ranks = run_two(pool, tiny_run(tmp_path, LAYOUTS[layout], 2), "NaN in step 3")
    assert [status for status, _ in ranks] == [1, 1]
    where = f"step 3 is not finite; first on rank 1: output of layers.{layer}, micro-batch 0, samples {samples}"
    printed = [line for _, text in ranks for line in text.splitlines()]
    errors = [line for line in printed if line.startswith("error")]
    assert errors in [[f"error on rank {r} on node{r}: the loss or gradient of {where}"] for r in (0, 1)]
    others = [line for line in printed if line not in errors]
    assert [line.split(" python ")[0] for line in others] == ["  take the step again:"]  # by rank 0
    (line,) = failures(tmp_path)
    assert (line["kind"], line["host"]) in [("nonfinite", "node0"), ("nonfinite", "node1")]
    assert column(tmp_path, "iteration") == [1, 2]


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_a_bad_number_on_one_rank_is_skipped_by_all(pool: Pool, tmp_path: Path, layout: str) -> None:
    config = tiny_run(tmp_path, f"--on-nonfinite skip {LAYOUTS[layout]}", 2)
    (first, warning), other = run_two(pool, config, "NaN in step 3")
    assert (first, other) == (0, (0, ""))
    assert warning.startswith(
        "warning: the loss or gradient of step 3 is not finite; first on rank 1: output of layers."
    )
    assert warning.endswith("samples [8]; the update was skipped\n")
    assert column(tmp_path, "skipped-iterations") == [[], [], [3], [], [], []]
    assert column(tmp_path, "consumed-samples") == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize("layout", [pytest.param("tp2-sp", marks=pytest.mark.slow), "pp2"])
def test_a_bad_weight_on_one_rank_stops_all_that_skip(pool: Pool, tmp_path: Path, layout: str) -> None:
    ranks = run_two(pool, tiny_run(tmp_path, f"--on-nonfinite skip {LAYOUTS[layout]}", 2), "a NaN weight in step 3")
    assert [status for status, _ in ranks] == [1, 1]
    (line,) = failures(tmp_path)
    assert line["kind"] == "nonfinite"
    assert re.search(r"step 3 is not finite, and neither is the weight \S+ \(rank 1\), which", line["sentence"])


@pytest.mark.parametrize("flags", ["--async-save --save-interval 2", pytest.param(TP2_SP, marks=pytest.mark.slow)])
def test_a_file_stops_all_ranks_after_the_same_step_and_they_end_well(pool: Pool, tmp_path: Path, flags: str) -> None:
    flags += f" --save {tmp_path}/saved --stop-file {tmp_path}/stop"
    config = tiny_run(tmp_path / "run", flags, 2)
    assert run_two(pool, config, "a stop file in step 3") == WELL
    assert saved_steps(tmp_path / "saved")[-1] == 3
    assert not (tmp_path / "run/finished.json").exists()
    assert run_two(pool, config) == WELL
    assert column(tmp_path / "run", "iteration") == [1, 2, 3]  # the file is there still
    (tmp_path / "stop").unlink()
    assert run_two(pool, config) == WELL
    assert column(tmp_path / "run", "iteration") == [1, 2, 3, 4, 5, 6]
    proof = json.loads((tmp_path / "run/finished.json").read_text())
    assert proof["checkpoint"] == str(tmp_path / "saved/iter_0000006")


def test_the_first_cause_names_its_machine_once(pool: Pool, tmp_path: Path) -> None:
    """The other rank only loses contact, and prints nothing."""
    ranks = run_two(pool, tiny_run(tmp_path, f"{TP2_SP} --distributed-timeout-minutes 0.05", 2), "an error in step 3")
    assert [status for status, _ in ranks] == [1, 1]
    assert ranks[0][1] == ""
    assert ranks[1][1].startswith("error on rank 1 on node1: Traceback")
    (line,) = failures(tmp_path)
    assert (line["rank"], line["host"], line["kind"]) == (1, "node1", "device")
    (error,) = [record for record in records(tmp_path, "event") if record["event"] == "error"]
    assert error["text"] == "rank 1 on node1: RuntimeError: CUDA error: uncorrectable ECC error encountered"


SLOW, TIMEOUT = 8.0, 5.0
"""Seconds that one rank builds a table, and that a collective may wait."""


def run_with_a_slow_table(rank: int, world_size: int, config: RunConfig) -> tuple[int | None, str, int]:
    """As `run_rank`, and how many tables this rank built; the first takes longer than a collective may wait."""
    built: list[float] = []

    def slowly(*arguments: Any) -> SampleOrder:
        if not built:
            time.sleep(SLOW)
        built.append(time.monotonic())
        return build_sample_order(*arguments)

    with patch("megatron.data.build.build_sample_order", slowly):
        return *run_rank(rank, world_size, config, "nothing"), len(built)


@pytest.mark.slow
def test_ranks_wait_for_a_table_outside_of_collectives(pool: Pool, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for _ in range(20):
            writer.add_document([1, 2, 3, 4, 5, 6, 7])
    data = f"--set data.mock_data=false --data-path {tmp_path}/x --split 1 --data-cache-path {tmp_path}/cache"
    config = tiny_run(tmp_path, f"{data} --distributed-timeout-minutes {TIMEOUT / 60}", 2)
    ranks = pool.run(2, run_with_a_slow_table, config)
    assert [(status, printed) for status, printed, _ in ranks] == [(0, ""), (0, "")]
    assert sorted(built for _, _, built in ranks) == [0, 1], "one builds, the other reads"


def torchrun(folder: Path, program: Path, *flags: str) -> subprocess.Popen[str]:
    """Two ranks as a person starts them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(program), *FLAGS.split(), "--run-dir", str(folder), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)])
def test_torchrun_passes_a_signal_on(tmp_path: Path, number: int, send: Callable[[int, int], None]) -> None:
    """As ``kill`` sends it, to torchrun, and as Ctrl-C does, to the ranks as well, which then get it twice."""
    process = torchrun(tmp_path / "run", ROOT / "pretrain_gpt.py", "--train-iters", "1000000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and records(tmp_path / "run")):
        time.sleep(0.1)
    send(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == 1  # torchrun's own, whatever its ranks end with
    assert records(tmp_path / "run", "text")[-1]["text"].startswith(f"stopped by signal {number} (")


@pytest.mark.slow
def test_torchrun_starts_no_one_again_that_a_file_has_stopped(tmp_path: Path) -> None:
    program = tmp_path / "stopping.py"
    program.write_text(
        "import sys, pathlib, pretrain_gpt\n"
        "from tests.kit.runs import before_step\n"
        f"with before_step(3, lambda trainer: pathlib.Path({str(tmp_path / 'stop')!r}).touch()):\n"
        "    pretrain_gpt.exit_process(pretrain_gpt.main(sys.argv[1:]))\n"
    )
    with patch.dict(os.environ, {"PET_MAX_RESTARTS": "2"}):
        flags = "--save", str(tmp_path / "saved"), "--stop-file", str(tmp_path / "stop")
        process = torchrun(tmp_path / "run", program, *flags)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert [r["event"] for r in records(tmp_path / "run", "event")].count("start") == 1
    assert column(tmp_path / "run", "iteration") == [1, 2, 3]
