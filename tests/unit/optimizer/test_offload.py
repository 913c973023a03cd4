"""Optimizer offload: shards and gradients on the host, and unchanged checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.offload import OffloadedOptimizer
from tests.kit.runs import differences, start, tiny_run
from tests.kit.short import one_in
from tests.kit.solo import Solo, random_batch, tiny

CONFIG = tiny(num_layers=3, num_query_groups=2)
BATCHES = [random_batch(CONFIG, seed=seed) for seed in (1, 2)]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.4, 0.77, 1.0])
def test_fraction_is_filled_in_the_order_of_backward(optimizer: str, fraction: float) -> None:
    config = OptimizerConfig(optimizer=optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    solo = Solo.build(CONFIG, torch.bfloat16, optimizer=config)
    moved = {name for group, _ in solo.optimizer.groups for name in group.names if group.offloaded}
    order = [name for bucket in solo.buckets.buckets for name in bucket.specs]
    if optimizer == "muon":
        order = [name for name in order if not (name.startswith("layers.") and solo.params[name].dim() == 2)]
    assert moved <= set(order)
    sizes = {name: solo.params[name].numel() for name in order}
    left = fraction * sum(sizes.values())
    for name, size in sizes.items():
        assert (name in moved) == (size <= left), name
        left -= size * (name in moved)
    assert isinstance(solo.optimizer, OffloadedOptimizer) == bool(moved)


def test_gradients_follow_while_backward_goes_on() -> None:
    config = OptimizerConfig(optimizer_cpu_offload=True, clip_grad=0.0)
    solo = Solo.build(CONFIG, torch.float32, optimizer=config, bucket_size=3000)
    assert isinstance(solo.optimizer, OffloadedOptimizer)
    memory = solo.optimizer.memory
    buckets, early = solo.buckets, []
    finish = buckets.finish

    def count_early() -> None:
        early.append(sum(bool(memory.grads[name].any()) for name in memory.on_host))
        finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "finish", count_early)
        solo.backward(BATCHES)
    assert len(buckets.buckets) > 4
    assert 0 < early[0] < len(memory.on_host), "all but the last buckets are copied before the end of backward"
    solo.optimizer.reduce_gradients()
    solo.optimizer.update(Rates(1e-2, 0.1), torch.ones(()))  # fetches those that are summed over stages
    assert all(torch.equal(grad, memory.grads[name]) for name, grad in buckets.grads.items())


FLAGS = {
    "adam": "--bf16 --ema-decay 0.9 --exp-avg-dtype bf16 --skip-spikes 6 --spike-window 4",
    "fp16, lion": "--fp16 --optimizer lion --initial-loss-scale 1024",
    "remainders, async": "--bf16 --store-param-remainders --async-save",
    "health": "--log-health-interval 1",
}


@pytest.mark.parametrize("name", one_in(2, FLAGS))
def test_checkpoints_are_the_same_with_and_without(tmp_path: Path, name: str) -> None:
    """Saved with offload and resumed without, and the reverse; evaluated with the average on the way."""
    offload = "--optimizer-cpu-offload --optimizer-offload-fraction 0.6"
    saving = f"{FLAGS[name]} --save-interval 3 --eval-iters 1 --eval-interval 2 --save"
    for folder, flags in (("plain", ""), ("moved", offload)):
        printed = start(tiny_run(tmp_path / folder, f"{saving} {tmp_path}/{folder}/saved {flags}"))
        assert printed.status == 0, printed.err
    assert differences(tmp_path / "plain/saved/iter_0000006", tmp_path / "moved/saved/iter_0000006") == []
    for source, flags in (("plain", offload), ("moved", "")):
        folder = tmp_path / f"after {source}"
        flags = f"{saving} '{folder}/saved' --load {tmp_path}/{source}/saved --ckpt-step 3 {flags}"
        printed = start(tiny_run(folder, flags.replace(f"'{folder}/saved'", f"{tmp_path}/after-{source}")))
        assert printed.status == 0, printed.err
        assert differences(tmp_path / "plain/saved/iter_0000006", tmp_path / f"after-{source}/iter_0000006") == []
