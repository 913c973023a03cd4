"""An update of AdamW cut by ZeRO beside torch's fused AdamW on the whole model.

    python -m benchmarks.optimizer

The parameters are those of GPT-2 of width 768 in fp32. Every rank of ZeRO-1 updates its part; here one rank does, and
its time is taken as many times as there are ranks: what all would need one after the other. Nothing is sent; that is
counted by `benchmarks.wire`. `update` finds the norm, clips, moves the weights and publishes them; torch's side is
`clip_grad_norm_` and `AdamW(fused=True).step()`. The update rule alone is reported too. Contestants alternate, start
from the same weights and gradients, and must reach the same weights. `offloaded` is one rank with
`--optimizer-cpu-offload`: on a CPU, the same update with copies of gradients and weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.record import conditions, options, run, spread, table, timed
from megatron.arguments.cli import parse
from megatron.config.run import RunConfig
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.mesh import Mesh
from megatron.distributed.sharding import ShardSpec
from megatron.layers.parameters import gpt, num_parameters
from megatron.optimizer.build import build_grad_buffer, build_optimizer
from megatron.optimizer.distributed_optimizer import DistributedOptimizer
from megatron.optimizer.lr_scheduler import Rates
from megatron.optimizer.offload import OffloadedOptimizer
from megatron.optimizer.parameter_store import ParameterStore

RATES = Rates(1e-4, 0.01)
CLIP, GRADIENT = 1.0, 1e-5
"""The largest norm, and the size of gradients: a rank alone knows its part of the norm only, so none may be clipped."""
RANKS = 1, 2, 4, 8

WHOLE, RULE = "update", "rule alone"
OFFLOADED = "1, offloaded"
Contestant = Mapping[str, Callable[[], object]]
"""Timed work, by :data:`WHOLE` and :data:`RULE`."""


@dataclass(frozen=True)
class OneOf:
    """As much of the mesh of one of ``ranks`` replicas as an update takes, without the others."""

    ranks: int
    rank: int = 0
    world = embedding_group = tp = dp_cp = Group()

    def optimizer_shard_group(self, *axes: str) -> Group:
        """Return the group that shards the buckets."""
        return Group(tuple(range(self.ranks)), self.rank)

    def optimizer_replica_group(self, *axes: str) -> Group:
        """Return a group of this rank alone: no other rank has the same part."""
        return self.world

    weight_gather_group = group = optimizer_replica_group

    def tp_subgroup(self, tp_ranks: tuple[int, ...]) -> Group:
        """Nobody else has the same piece."""
        return self.world


def values_of(specs: Mapping[str, ShardSpec], seed: int, scale: float) -> dict[str, Tensor]:
    """Fill the tensors with the same numbers for every contestant."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(spec.local_shape, generator=generator).mul_(scale) for name, spec in specs.items()}


def ours(
    config: RunConfig, specs: Mapping[str, ShardSpec], ranks: int, offload: bool = False
) -> tuple[DistributedOptimizer, Contestant]:
    """One of ``ranks`` replicas."""
    mesh = cast("Mesh", OneOf(ranks))
    params = {name: nn.Parameter(value) for name, value in values_of(specs, 0, 0.02).items()}
    parallel = replace(config.parallel, data_parallel_sharding_strategy="optim")
    dtypes = {name: p.dtype for name, p in params.items()}
    buckets = build_grad_buffer(specs, dtypes, mesh, GradAccumulator(), torch.device("cpu"), parallel)
    weights = ParameterStore(params, buckets, parallel)
    optimizer = build_optimizer(weights, specs, buckets, mesh, replace(config.optimizer, optimizer_cpu_offload=offload))
    for name, gradient in values_of(specs, 1, GRADIENT).items():
        buckets.accumulated(name).copy_(gradient)
    one, go = torch.ones(()), torch.zeros(())

    def update() -> None:
        if isinstance(optimizer, OffloadedOptimizer):  # gradients are copied to the host
            for bucket in buckets.buckets:
                optimizer.memory.on_reduced(bucket)
        optimizer.update(RATES, one)

    return optimizer, {WHOLE: update, RULE: lambda: optimizer._update(RATES, go, one, ())}


def theirs(config: RunConfig, specs: Mapping[str, ShardSpec]) -> tuple[dict[str, nn.Parameter], Contestant]:
    """torch on the whole model; vectors have no weight decay, as with us."""
    params = {name: nn.Parameter(value) for name, value in values_of(specs, 0, 0.02).items()}
    for name, gradient in values_of(specs, 1, GRADIENT).items():
        params[name].grad = gradient
    groups = [
        {"params": [params[n] for n, s in specs.items() if s.decays == decays], "weight_decay": decay}
        for decays, decay in ((True, RATES.weight_decay), (False, 0.0))
    ]
    o = config.optimizer
    adam = torch.optim.AdamW(groups, RATES.lr, (o.adam_beta1, o.adam_beta2), o.adam_eps, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(params.values(), CLIP)
        adam.step()

    return params, {WHOLE: update, RULE: adam.step}


def check(optimizer: DistributedOptimizer, params: Mapping[str, nn.Parameter]) -> None:
    """Both sides have to have the same weights.

    Raises:
        RuntimeError: when they have not.
    """
    for name, share in optimizer.buckets.shards.items():
        expected = params[name].detach().view(-1)[share.start : share.stop]
        if not torch.allclose(optimizer.main_params[name].view(-1), expected, rtol=1e-5, atol=1e-7):
            raise RuntimeError(f"{name} is not moved as torch moves it")


def ratios_of(config: RunConfig, ranks: Sequence[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Ratios of every round by what is timed, and by the number of ranks: all our ranks' seconds over torch's."""
    specs = gpt(config.model)
    params, torchs = theirs(config, specs)
    sides = {str(n): (n, *ours(config, specs, n)) for n in ranks}
    sides[OFFLOADED] = 1, *ours(config, specs, 1, offload=True)
    ratios: dict[str, dict[str, list[float]]] = {what: {name: [] for name in sides} for what in (WHOLE, RULE)}
    for what in (WHOLE, RULE):
        torchs[what]()
        for _, optimizer, contestant in sides.values():
            contestant[what]()
            if what == WHOLE:
                check(optimizer, params)
        for _ in range(rounds):
            for name, (n, _, contestant) in sides.items():
                reference = timed(torchs[what], time.thread_time)  # the machine may have other work
                ratios[what][name].append(n * timed(contestant[what], time.thread_time) / reference)
    return ratios


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    heads = ("ranks", "update of all ranks / clip_grad_norm_ and step", "rule alone / step")
    rows = []
    for name in result["ratios"][WHOLE]:
        cells = (result["ratios"][what][name] for what in (WHOLE, RULE))
        rows.append([name, *(f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in cells)])
    text = ["# AdamW cut by ZeRO-1 beside torch's fused AdamW on the whole model, CPU, one thread"]
    text += table(heads, rows, "rll")
    text += [
        "",
        f"One rank's seconds x ranks; {result['parameters']:,} parameters of GPT-2's shapes in fp32, median and range "
        f"of {result['rounds']} alternating rounds, processor time of the thread; {conditions(result)}",
    ]
    return "\n".join(text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios."""
    torch.set_num_threads(1)
    flags = f"--preset gpt2-124m --num-layers {args.num_layers} --mock-data --train-iters 1 --clip-grad {CLIP}"
    config = parse(flags.split(), {}).config
    found = ratios_of(config, RANKS, args.repeats)
    return {
        "ratios": {what: {n: spread(v) for n, v in of_ranks.items()} for what, of_ranks in found.items()},
        "ranks": RANKS,
        "parameters": num_parameters(config.model),
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=7)
    parser.add_argument("--num-layers", type=int, default=6, help="less for a quick look")
    return run("optimizer", parser, argv, measure, page, fixed=("num_layers",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
