"""The search of layouts against brute force, and its single changes against predictions of their flags."""

from __future__ import annotations

from megatron.arguments.cli import parse
from megatron.arguments.validate import find_problems
from megatron.config.run import RunConfig
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.memory import max_peak_bytes
from megatron.planner.search import cheapest_fits
from megatron.planner.step_time import step_time

CLUSTER = Cluster.of(accelerators()["h100-80g"])
SMALL = (
    "--mock-data --vocab-size 5120 --train-iters 1 --seq-length 1024 --num-layers 8 --hidden-size 2048"
    " --num-attention-heads 16 --bf16 --global-batch-size 16"
)


def config_of(flags: str = "", ranks: int = 4) -> RunConfig:
    return parse(f"{SMALL} --check-config --world-size {ranks} {flags}".split(), {}).config


def test_cheapest_fits_are_flags_that_make_the_run_fit() -> None:
    config = config_of("--micro-batch-size 4")
    takes, seconds = sum(max_peak_bytes(config, 4).values()), step_time(config, 4, CLUSTER).seconds
    found = cheapest_fits(config, 4, CLUSTER, find_problems, capacity=takes - 2**30)
    assert len(found) == 3
    for change in found:
        with_change = config_of(f"--micro-batch-size 4 {' '.join(change.flags)}")
        assert sum(max_peak_bytes(with_change, 4).values()) == takes - change.saved <= takes - 2**30
        assert step_time(with_change, 4, CLUSTER).seconds == seconds + change.slower
    assert [each.slower for each in found] == sorted(each.slower for each in found)
    assert len({each.axis for each in found}) == 3
