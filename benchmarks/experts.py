"""Cost of the options of a mixture of experts on a CPU, and how evenly real routers load the ranks.

    python -m benchmarks.experts                   # steps with each option beside steps without, taking turns
    python -m benchmarks.experts --loads PREFIX    # trains small mixtures on the token files PREFIX
    python -m benchmarks.experts --loads runs/quickstart/data/corpus_text_document --routers "no balance"

Both print; --write keeps the result. A ratio of costs is the time of a step over that of the plain mixture, the median
over rounds of neighbouring steps.

A layer takes as long as the rank with the most rows. Ranks are not needed to count these: an expert has the same rows
wherever it is, so one process trains, and adds up the choices of neighbouring experts. The predicted speed is that of
`benchmarks.launches` at the same busiest rank, over that of random choices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import launches
from benchmarks.record import (
    CLOCKS,
    RESULTS,
    conditions,
    keep,
    options,
    ratios,
    rounds_of,
    run,
    spreads,
    table,
    take_turns,
)
from benchmarks.roofline import H200
from benchmarks.train_step import our_step
from megatron.arguments.cli import parse
from megatron.layers.router import Router, Routing
from megatron.training.build import build_trainer
from megatron.training.loggers.plots import RUN_COLORS, open_figure, running_mean
from megatron.training.step import train_step

TITLE = "# A step with options of experts over one without, CPU, fp32, one thread"
LLAMA = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-layers 4"
    " --num-attention-heads 4 --seq-length 512 --device cpu --moe-router-load-balancing-type none"
)
BASE = (
    f"{LLAMA} --hidden-size 256 --micro-batch-size 1 --vocab-size 2048 --mock-data --train-iters 1000"
    " --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 256"
)
SIGMOID = "--moe-router-score-function sigmoid"
SHARED = "--moe-shared-expert-intermediate-size 256"
OPTIONS = {
    "sequence loss": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "z-loss": "--moe-z-loss-coeff 0.001",
    "sigmoid, expert bias": f"{SIGMOID} --moe-router-enable-expert-bias",
    "sigmoid, expert bias, 2 of 8 groups": (
        f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-num-groups 8 --moe-router-group-topk 2"
    ),
    "capacity 1": "--moe-expert-capacity-factor 1",
    "shared expert": SHARED,
    "shared expert, gate": f"{SHARED} --moe-shared-expert-gate",
    "latent 128": "--moe-latent-size 128",
    "no experts, MLP of 1024": "--num-experts null --ffn-hidden-size 1024",
}
"""Flags by name; the MLP multiplies as often as the four experts of a token."""

STEPS, SEQUENCES, LENGTH = 120, 8, 512
TRAINED = (
    f"{LLAMA} --hidden-size 64 --micro-batch-size {SEQUENCES} --vocab-size 4096 --split 100,0,0"
    " --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 32 --hidden-dropout 0"
    " --attention-dropout 0 --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 20"
)
BIAS = f"{SIGMOID} --moe-router-enable-expert-bias"
ROUTERS = {
    "no balance": "",
    "aux_loss 0.01": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "seq_aux_loss 0.01": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "global_aux_loss 0.01": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
    "bias, rate 0.001": BIAS,
    "bias, rate 0.01": f"{BIAS} --moe-router-bias-update-rate 0.01",
    "bias, rate 0.01, 128 experts": f"{BIAS} --moe-router-bias-update-rate 0.01 --num-experts 128",
    "forced": "--moe-router-force-load-balancing",
}
"""Flags by name."""

RANKS, PASSES = (4, 8), 8
"""Ranks that share the experts, and passes with the trained weights, whose choices are added up, too."""


def kept() -> dict[str, Any]:
    """Return the committed figures."""
    found: dict[str, Any] = json.loads((RESULTS / "experts.json").read_text())
    return found


def measure_costs(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the ratios by option."""
    torch.set_num_threads(1)
    steps = {}
    for name, flags in {"plain": "", **OPTIONS}.items():
        config = parse([*BASE.split(), *flags.split()], {"RANK": "0", "WORLD_SIZE": "1"}).config
        steps[name] = our_step(build_trainer(config, 0, 1))
        steps[name]()  # warms up
    plain, *others = (seconds := take_turns(steps, args.repeats, CLOCKS[args.clock])).values()
    return {"ratios": {name: ratios(values, plain) for name, values in zip([*seconds][1:], others)}}


def measure_loads(flags: str, prefix: str) -> dict[str, Any]:
    """Train with these flags; return the loss and the loads."""
    words = [*TRAINED.split(), *flags.split(), "--data-path", prefix, "--train-iters", str(STEPS)]
    trainer = build_trainer(parse(words, {"RANK": "0", "WORLD_SIZE": "1"}).config, 0, 1)
    trainer.start_at(0, 0)
    routers = [m for chunk in trainer.chunks.values() for m in chunk.modules() if isinstance(m, Router)]
    seen: list[Tensor] = []  # choices [B, E], of one layer after the other

    def count(experts: int, module: nn.Module, inputs: Any, output: Routing) -> None:
        of_sample = output.experts.view(-1, SEQUENCES, output.experts.shape[1]).transpose(0, 1).flatten(1)
        seen.append(torch.stack([row.bincount(minlength=experts) for row in of_sample]))

    for router in routers:
        router.register_forward_hook(partial(count, len(router.weight)))
    losses = []
    for _ in range(STEPS):
        metrics = train_step(trainer, trainer.next_batches(), trainer.schedule.rates(trainer.consumed_samples))
        trainer.progress.iteration += 1
        trainer.progress.consumed_samples += SEQUENCES
        losses.append(metrics.loss.item())
    for _ in range(PASSES):  # of other samples, without an update
        trainer.compute(trainer.next_batches(), None)
        trainer.progress.consumed_samples += SEQUENCES
    counts_NLBE = torch.stack(seen).unflatten(0, (STEPS + PASSES, len(routers))).double()
    steps_NLE, frozen_LBE = counts_NLBE[:STEPS].sum(2), counts_NLBE[STEPS:].transpose(0, 1).flatten(1, 2)
    last = slice(-STEPS // 10, None)
    found: dict[str, Any] = {"loss": digits(np.mean(losses[last])), "expert": digits(busiest(steps_NLE)[last].mean())}
    for ranks in RANKS:
        steps_NL = busiest(steps_NLE, ranks)
        found[f"of {ranks}"] = {
            "steps": [digits(x) for x in steps_NL.mean(1).tolist()],
            "layers": [digits(x) for x in steps_NL[last].mean(0).tolist()],
            "at once": {  # tokens, and the mean over layers
                LENGTH * n: digits(busiest(frozen_LBE.unflatten(1, (-1, n)).sum(2), ranks).mean())
                for n in (1, SEQUENCES, SEQUENCES * PASSES)
            },
        }
    # at the time of the measurement: launches.json may change later
    found["predicted"] = digits(predicted_ratio(float(np.mean(found[f"of {RANKS[0]}"]["steps"][last]))))
    return found


def busiest(counts_E: Tensor, ranks: int | None = None) -> Tensor:
    """Return the most choices over the mean, of an expert or of a rank with its share ``[..., E]``."""
    loads = counts_E if ranks is None else counts_E.unflatten(-1, (ranks, -1)).sum(-1)
    return loads.amax(-1) / loads.mean(-1)


def digits(value: Any) -> float:
    """Return a number to four digits."""
    return float(f"{float(value):.4g}")


CASE = "qwen3-moe-ep4-s4096"
"""The case of `benchmarks.launches` with an exchange."""


def predicted_ratio(load: float) -> float:
    """Return the predicted speed at this load of the busiest rank over that of forced balance."""
    rows = json.loads((RESULTS / "launches.json").read_text())["rows"][CASE]
    case = launches.CASES[CASE]
    even, half, twice, forced = (
        launches.prediction(case, rows[name]["whole"], H200)["ms"]
        for name in (launches.NO_GRAPH, "ours, busiest rank 1.5", "ours, busiest rank 2", launches.FORCED)
    )
    slope = 2 * (twice - half) if load > 1.5 else 2 * (half - even)
    return forced / (half + slope * (load - 1.5))


def page(result: dict[str, Any]) -> str:
    """Return the page of the costs, and that of the loads, which were measured at another time."""
    shape = "4 layers, hidden size 256, 32 experts of 256, top 4, 512 tokens a step."
    text = [TITLE, "", shape, *spreads("time over that of the plain mixture", result["ratios"])]
    text += ["", f"{rounds_of(result)}; {conditions(result, 'torch')}"]
    return "\n".join(text + page_of_loads(result.get("loads", {})))


def page_of_loads(loads: Mapping[str, Any]) -> list[str]:
    """Return the lines on routers that have learned."""
    if not loads:
        return []
    heads = ["", "loss", "busiest expert", *(f"busiest of {n} ranks" for n in RANKS)]
    heads += [f"the worst layer of {RANKS[-1]}", *(f"at {LENGTH * n:,} tokens" for n in (1, SEQUENCES * PASSES))]
    heads += ["predicted speed / forced balance"]
    rows = []
    for name in (name for name in ROUTERS if name in loads):
        found = loads[name]
        few, many = (found[f"of {ranks}"] for ranks in RANKS)
        last = [np.mean(each["steps"][-STEPS // 10 :]) for each in (few, many)]
        figures = [found["loss"], found["expert"], *last, max(many["layers"])]
        figures += [many["at once"][str(LENGTH * n)] for n in (1, SEQUENCES * PASSES)]
        rows.append([name, *(f"{x:.2f}" for x in (*figures, found["predicted"]))])
    shape = f"4 layers, hidden size 64, 64 experts of 32, top 8; {STEPS} steps of {SEQUENCES} sequences of {LENGTH}"
    return [
        "",
        "# The busiest rank with routers that have learned",
        "",
        f"{shape} tokens of Python's standard library, whose choices are added up. Loads are over the mean, of the last"
        " tenth of the steps, a mean over layers. Numbers of tokens are those whose choices are added up, with the"
        f" weights after the last step, over {RANKS[-1]} ranks. The prediction is for the busiest of {RANKS[0]}, and"
        f" interpolates the figures of `{CASE}` ([launches](launches.md)).",
        *table(heads, rows, "lrrrrrrrr"),
        "",
        "![busiest rank over steps](experts.png)",
    ]


def draw(loads: Mapping[str, Any]) -> None:
    """Draw the busiest rank over the steps."""
    with open_figure(RESULTS / "experts.png", 9, 4) as figure:
        axes = figure.subplots()
        for (name, found), color in zip(loads.items(), RUN_COLORS):
            values = np.array(found[f"of {RANKS[-1]}"]["steps"])
            axes.plot(np.arange(1, len(values) + 1), running_mean(values), color=color, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel(f"busiest of {RANKS[-1]} ranks / mean")
        axes.set_ylim(bottom=1)
        axes.legend(ncols=2, fontsize=9)


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = options(__doc__, rounds=9, clock=True)
    parser.add_argument("--loads", metavar="PREFIX", help="train on these token files, whose ids are below 4,096")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=[*ROUTERS], metavar="NAME", help="of --loads")
    args = parser.parse_args(argv)
    if args.loads is None:
        return run("experts", parser, argv, lambda args: {**measure_costs(args), "loads": kept()["loads"]}, page)
    torch.set_num_threads(1)
    for name in args.routers:
        found = {name: json.loads(json.dumps(measure_loads(ROUTERS[name], args.loads)))}
        print("\n".join(page_of_loads(found)[4:7]))
        if args.write:
            result = kept()
            measured = result.get("loads", {}) | found
            result["loads"] = {name: measured[name] for name in ROUTERS if name in measured}
            keep("experts", result, page(result))
            draw(result["loads"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
