"""Efficiencies that are fitted to measured steps, against those with which the steps were made."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.arguments.sources import to_yaml
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.planner.calibrate import Calibration, MeasuredRun, calibrate
from megatron.planner.hardware import Cluster, Efficiency, PlacedGroup, accelerators, find_accelerator
from megatron.planner.memory import max_peak_bytes
from megatron.planner.step_time import AXES, step_time
from megatron.training.measured_run import read_measured_run
from tests.unit.arguments.command import run

CLUSTER = Cluster.of(accelerators()["h100-80g"])
MODEL = "--preset llama2-7b --mock-data --vocab-size 32000 --train-iters 10 --bf16"
LAYOUTS = (
    (8, "--tensor-model-parallel-size 8 --sequence-parallel --global-batch-size 16"),
    (16, "--tensor-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 16"),
    (16, "--pipeline-model-parallel-size 4 --use-distributed-optimizer --global-batch-size 64 --seq-length 2048"),
)


def measured(efficiency: Efficiency, noise: float = 0.0) -> list[MeasuredRun]:
    """Runs on a cluster of this efficiency."""
    cluster, rng = replace(CLUSTER, efficiency=efficiency), random.Random(1)
    runs = []
    for ranks, flags in LAYOUTS:
        config = run(f"{MODEL} {flags}", ranks, "").config
        time = step_time(config, ranks, cluster)
        waits = {part: time.parts[part] for part in ("bubble", *AXES)}
        runs.append(MeasuredRun(config, ranks, time.seconds * (1 + rng.gauss(0, noise)), waits, None, flags))
    return runs


def errors(calibration: Calibration, runs: list[MeasuredRun]) -> list[float]:
    return [abs(step_time(r.config, r.world_size, calibration.cluster).seconds / r.seconds - 1) for r in runs]


@pytest.mark.parametrize("matmul", [0.3, 0.62, 0.88])
def test_times_of_other_efficiencies_are_met(matmul: float) -> None:
    true = Efficiency(matmul=matmul, attention=0.3, memory=0.7, link=0.5, network=0.4)
    runs = measured(true)
    fitted = calibrate(CLUSTER, runs[:2])
    assert max(errors(fitted, runs[:2])) < 0.02
    assert max(errors(fitted, runs)) < 0.06  # of a layout that was not measured, too
    assert fitted.cluster.efficiency.matmul == pytest.approx(matmul, rel=0.2)
    assert max(abs(step_time(r.config, r.world_size, CLUSTER).seconds / r.seconds - 1) for r in runs) > 0.06


def test_what_is_as_assumed_stays_and_so_does_what_no_run_depends_on() -> None:
    fitted = calibrate(CLUSTER, measured(CLUSTER.efficiency))
    for name, value in vars(fitted.cluster.efficiency).items():
        assert value == pytest.approx(getattr(CLUSTER.efficiency, name), rel=1e-3)
    alone = run(f"{MODEL} --global-batch-size 2", 1, "").config
    time = step_time(alone, 1, CLUSTER)
    slow = calibrate(CLUSTER, [MeasuredRun(alone, 1, 2 * time.seconds)])
    assert slow.cluster.efficiency.network == pytest.approx(CLUSTER.efficiency.network, rel=1e-6)
    assert slow.uncertainty["network"] == pytest.approx(1.0)
    assert slow.cluster.efficiency.matmul < 0.6
    assert "network: 0.8 -> 0.8 (kept: these runs hardly depend on it)" in slow.report()
    assert any("(-50.0% -> " in line or "(-50.0%, -" in line or "(-50.0%, +" in line for line in slow.report())


def test_waits_longer_than_a_step_are_left_out() -> None:
    run = measured(CLUSTER.efficiency)[0]
    overlapping = replace(run, waits={"data": run.seconds, "tensor": run.seconds})
    assert errors(calibrate(CLUSTER, [overlapping]), [run])[0] < 0.01


def test_memory_beyond_the_prediction_leaves_less_for_plans() -> None:
    (first, *_) = measured(CLUSTER.efficiency)
    predicted = sum(max_peak_bytes(first.config, first.world_size).values())
    more = calibrate(CLUSTER, [replace(first, memory=round(1.25 * predicted))])
    assert more.cluster.accelerator.memory == pytest.approx(CLUSTER.accelerator.memory / 1.25)
    less = calibrate(CLUSTER, [replace(first, memory=predicted // 2)])
    assert less.cluster.accelerator.memory == CLUSTER.accelerator.memory


def test_the_file_of_a_calibration_describes_the_fitted_hardware(tmp_path: Path) -> None:
    runs = [replace(each, memory=10**12) for each in measured(Efficiency(matmul=0.4, link=0.3))]
    curve = ((1e3, 1e-5), (1e9, 0.5))
    calibration = calibrate(replace(CLUSTER, measured={("all-reduce", PlacedGroup(8, 8)): curve}), runs)
    (tmp_path / "own.yaml").write_text(calibration.to_yaml())
    read = Cluster.of(find_accelerator(str(tmp_path / "own.yaml")))
    fitted = calibration.cluster
    assert read.accelerator.name == "h100-80g-calibrated"
    assert read.accelerator.memory == pytest.approx(fitted.accelerator.memory)
    assert vars(read.efficiency) == pytest.approx(vars(fitted.efficiency))
    assert (*read.link, *read.network) == pytest.approx((*fitted.link, *fitted.network))
    ((key, points),) = read.measured.items()
    assert key == ("all-reduce", (8, 8))
    assert [*points[0], *points[1]] == pytest.approx([*curve[0], *curve[1]])
    for each in runs:
        times = [step_time(each.config, each.world_size, cluster).seconds for cluster in (read, fitted)]
        assert times[0] == pytest.approx(times[1])


def folder_of(folder: Path, config: RunConfig, lines: list[dict[str, object]], device: str = "NVIDIA H100") -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "environment.json").write_text(json.dumps({"world_size": 8, "device": device}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_folder_is_read_from_its_last_start(tmp_path: Path) -> None:
    config = run(f"{MODEL} {LAYOUTS[0][1]}", 8, "").config
    step = {"lm loss": 1.0, "batch-size": 16, "mem-max-allocated-bytes": 5, "bubble": 0.25}
    times: list[dict[str, object]] = [step | {"iteration-time": seconds} for seconds in (9.0, 4.0, 2.0, 3.0)]
    waits = {"communication-tp": 0.5, "communication-dp-cp": 0.25, "communication-world": 0.125}
    times[3] |= waits | {"communication-share": 0.9}
    start: dict[str, object] = {"event": "start", "iteration": 0}
    small = times[0] | {"batch-size": 8, "iteration-time": 0.1}
    lines = [start, *[step | {"iteration-time": 50.0}] * 5, start, times[0], small, *times[1:], {"text": "note"}]
    read = read_measured_run(folder_of(tmp_path / "a", config, lines))
    assert read.config == config
    assert (read.world_size, read.seconds, read.memory) == (8, 3.0, 5)
    assert read.waits == {"tensor": 0.5, "data": 0.25, "bubble": 0.125 + 0.25 * 3.0}
    assert read_measured_run(folder_of(tmp_path / "b", config, lines, "cpu")).memory is None
    for name, wrong in (("c", [start, small]), ("d", [])):
        with pytest.raises(UserError, match="E965"):
            read_measured_run(folder_of(tmp_path / name, config, wrong))
    with pytest.raises(UserError, match="E965"):
        read_measured_run(tmp_path / "absent")
