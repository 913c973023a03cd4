"""Points of a sweep against predictions of the flags that make them."""

from __future__ import annotations

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.validate import find_problems
from megatron.planner.hardware import Cluster, accelerators
from megatron.planner.search import LayoutSearch
from megatron.planner.sensitivity import BATCH, GPUS, NETWORK, sweep
from megatron.planner.step_time import step_time

FLAGS = (
    "--check-config --mock-data --vocab-size 5120 --train-iters 1 --seq-length 1024 --num-layers 8 --hidden-size 2048"
    " --num-attention-heads 16 --bf16 --micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel"
)
H100 = accelerators()["h100-80g"]


def seconds(cluster: Cluster, ranks: int = 16, batch: int = 16) -> float:
    config = parse(f"{FLAGS} --global-batch-size {batch} --world-size {ranks}".split(), {}).config
    return step_time(config, ranks, cluster).seconds


def test_points_are_runs_with_other_flags() -> None:
    cluster = Cluster.of(H100, 8, 50e9)
    config = parse(f"{FLAGS} --global-batch-size 16 --world-size 16".split(), {}).config
    search = LayoutSearch(config, 16, cluster, find_problems, frozenset({"micro_batch_size"}))
    found = {(p.axis, p.value): p for p in sweep(search, search.plan_of(config), again=False)}
    assert len(found) == 15
    times = {key: None if point.kept is None else point.kept.seconds for key, point in found.items()}
    for network in (12.5e9, 25e9, 50e9, 100e9, 200e9):
        assert times.pop((NETWORK, network)) == pytest.approx(seconds(Cluster.of(H100, 8, network)))
    for batch in (8, 16, 32, 64):
        assert times.pop((BATCH, batch)) == pytest.approx(seconds(cluster, batch=batch))
    for ranks in (4, 8, 16, 32):
        assert times.pop((GPUS, ranks)) == pytest.approx(seconds(cluster, ranks))
    assert times == {(BATCH, 4): None, (GPUS, 64): None}  # fewer samples than data-parallel ranks
    reasons = {key: point.refused for key, point in found.items() if point.refused}
    assert reasons.keys() == {(BATCH, 4), (GPUS, 64)}
    assert all("global batch" in reason for reason in reasons.values()), reasons
    assert found[NETWORK, 12.5e9].kept.seconds > found[NETWORK, 200e9].kept.seconds  # type: ignore[union-attr]
