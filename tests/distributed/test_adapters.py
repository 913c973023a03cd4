"""Adapter checkpoints in other layouts than their run's; every rank reads its part of the frozen weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpoint.format import Manifest
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.pipeline.plan import resolve_pipeline
from tests.distributed.resume import load_and_go_on
from tests.kit.pool import Pool
from tests.kit.runs import start, steps, tiny_run

FLAGS = (
    "--fp64 --micro-batch-size 1 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2 "
    "--swiglu --save-interval 3 --save"
)
LAYOUTS = {
    "tp2-sp-zero1": ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True, ddp_bucket_size=4000
    ),
    "pp2-tp2": ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_schedule="zb-h1"),
    "zero3": ParallelConfig(data_parallel_sharding_strategy="optim_grads_params", ddp_bucket_size=4000),
}
ADAPTERS = {
    "lora": "--lora-rank 3 --lora-target layers.1.* linear_qkv.q",
    "dora": "--lora-rank 2 --lora-dora",
    "quantised": "--lora-rank 2 --frozen-weights-precision nf4",
}
SHORT = {"lora": ("pp2-tp2",), "dora": ("zero3",), "quantised": ("tp2-sp-zero1",)}
REST = {kind: tuple(name for name in LAYOUTS if name not in names) for kind, names in SHORT.items()}
REST["quantised"] = ("pp2-tp2",)  # ZeRO-3 is refused
CASES = [
    *(pytest.param(*case, id=case[0]) for case in SHORT.items()),
    *(pytest.param(*case, id=f"{case[0]}-rest", marks=pytest.mark.slow) for case in REST.items()),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    assert start(tiny_run(folder, f"{FLAGS} {folder}/saved --train-iters 2")).status == 0
    return folder / "saved"


def losses_in(pool: Pool, config: RunConfig, layout: ParallelConfig) -> list[float]:
    """Those of all steps left, on four ranks."""
    config = replace(config, parallel=resolve_pipeline(config.model, layout))
    legs = pool.run(4, load_and_go_on, config)
    assert all(leg.losses == legs[0].losses for leg in legs)
    return list(legs[0].losses)


@pytest.mark.parametrize(("adapters", "layouts"), CASES)
def test_they_are_loaded_in_every_layout(
    pool: Pool, tmp_path: Path, base: Path, adapters: str, layouts: tuple[str, ...]
) -> None:
    """From scratch, and from a checkpoint of one process."""
    flags = f"{FLAGS} {tmp_path}/saved --pretrained-checkpoint {base} {ADAPTERS[adapters]}"
    config = tiny_run(tmp_path, flags)
    assert start(config).status == 0
    expected = [step["lm loss"] for step in steps(tmp_path).values()]
    assert len(expected) == 6
    manifest = Manifest.open(tmp_path / "saved" / "iter_0000003")
    load = replace(config.checkpoint, save=None, load=str(manifest.path))
    fresh = replace(config, checkpoint=replace(config.checkpoint, save=None))
    for name in layouts:
        layout = LAYOUTS[name]
        assert losses_in(pool, fresh, layout) == pytest.approx(expected, rel=1e-10), name
        assert losses_in(pool, replace(config, checkpoint=load), layout) == pytest.approx(expected[3:], rel=1e-10), name
