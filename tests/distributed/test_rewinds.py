"""Spikes and steps that are not finite in layouts of several ranks: all ranks act alike, and as one process does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.training.incidents import read_incidents, read_step_record
from tests.kit.pool import Pool
from tests.kit.runs import Outcome, column, spoiled_sample, start, steps, tiny_run
from tests.unit.training.test_rewinds import FLAGS, in_step

NAN, LARGE = float("nan"), 1e3

POLICIES = {
    "rewind a spike": ("--skip-spikes 12 --spike-window 4 --on-spike rewind:3", LARGE),
    "skip a spike": ("--skip-spikes 12 --spike-window 4 --on-spike skip", LARGE),
    "log a spike": ("--skip-spikes 12 --spike-window 4 --on-spike log", LARGE),
    "rewind NaN": ("--on-nonfinite rewind:3", NAN),
    "skip NaN": ("--on-nonfinite skip", NAN),
}

MOE = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
LAYOUTS = {
    "dp2": "",
    "zero-1": "--use-distributed-optimizer",
    "zero-2": "--data-parallel-sharding-strategy optim_grads",
    "zero-3": "--data-parallel-sharding-strategy optim_grads_params",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "ep2": f"{MOE} --expert-model-parallel-size 2",
    "pp2, mtp": f"{MTP} --pipeline-model-parallel-size 2",
}

FAST = {("rewind a spike", "pp2"), ("rewind NaN", "zero-3"), ("skip NaN", "dp2")}


def run_rank(rank: int, world_size: int, config: RunConfig, tokens: tuple[int, ...], factor: float) -> Outcome:
    with spoiled_sample(tokens, factor):
        return start(config, None, rank, world_size)


@cache
def spoiled_tokens(flags: str) -> tuple[int, ...]:
    """The tokens of a sample of step 7, as a run in which nothing happens reads them."""
    with TemporaryDirectory() as folder:
        return in_step(start(tiny_run(Path(folder), f"{FLAGS} {flags}")), 7)


def rewinds_in(folder: Path) -> list[dict[str, Any]]:
    file = folder / "saved/rewinds.json"
    return [each | {"id": ""} for each in json.loads(file.read_text())] if file.exists() else []


@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        pytest.param(policy, layout, marks=() if (policy, layout) in FAST else pytest.mark.slow)
        for policy in POLICIES
        for layout in LAYOUTS
    ],
)
def test_all_ranks_act_as_one_process(pool: Pool, tmp_path: Path, policy: str, layout: str) -> None:
    """The sample in step 7 is on one data-parallel rank, and the embedding on the first stage only."""
    chosen, factor = POLICIES[policy]
    of_model = " ".join(words for name, words in {"ep2": MOE, "pp2, mtp": MTP}.items() if name == layout)
    tokens = spoiled_tokens(of_model)
    runs = {}
    for name, flags, size in (("alone", of_model, 1), ("ranks", LAYOUTS[layout], 2)):
        folder = tmp_path / name
        runs[name] = tiny_run(folder, f"{FLAGS} {flags} {chosen} --save {folder}/saved", size)
    alone = run_rank(0, 1, runs["alone"], tokens, factor)
    ranks = pool.run(2, run_rank, runs["ranks"], tokens, factor)
    assert [alone.status, *(each.status for each in ranks)] == [0, 0, 0]
    one, two = tmp_path / "alone", tmp_path / "ranks"
    for name in ("lm loss", "grad-norm"):
        wanted = [value if value is not None else NAN for value in column(one, name)]
        found = [value if value is not None else NAN for value in column(two, name)]
        assert found == pytest.approx(wanted, rel=1e-10, nan_ok=True)
    for name in ("iteration", "consumed-samples", "samples-digest", "skipped-iterations", "learning-rate"):
        assert column(two, name) == column(one, name)
    assert sorted(steps(two)) == [*range(1, 11)]
    assert rewinds_in(two) == rewinds_in(one)
    assert len(rewinds_in(one)) == policy.startswith("rewind")
    sentences = [[incident.sentence for _, incident in read_incidents(folder)] for folder in (one, two)]
    assert len(sentences[0]) == len(sentences[1])
    if factor != factor:
        assert "output of layers.0.input_layernorm" in sentences[1][0]
    (_, first), (found, second) = (next(iter(read_incidents(folder))) for folder in (one, two))
    assert first.facts["places"] == second.facts["places"] == [24, 28]
    assert sorted(each["sample"] for each in read_step_record(found)["samples"]) == [24, 25, 26, 27]
