"""DiLoCo against data parallelism and a simulation in one process; replicas that come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.training.build import build_trainer
from tests.distributed.diloco_runs import (
    FP64,
    largest_difference,
    replica_config,
    run_replicas,
    take_step,
    weights,
)
from tests.runs import tiny_run


def test_a_round_every_step_is_data_parallelism() -> None:
    sgd = f"{FP64} --optimizer sgd --sgd-momentum 0 --lr 0.5 --weight-decay 0.1"
    flags = f"{sgd} --diloco-sync-interval 1 --diloco-outer-lr 1 --diloco-outer-momentum 0"
    replicas = run_replicas(flags)
    one = build_trainer(tiny_run(Path("unused"), sgd.replace("--lr", "--global-batch-size 8 --lr")), 0, 1)
    for step in range(6):
        take_step(one)
        for replica in replicas:
            assert largest_difference(replica.history[step], weights(one)) < 1e-12


def simulate(flags: str, replicas: int, interval: int, fragments: int = 1, delay: int = 0, mix: float = 0.0,
             lr: float = 0.7, momentum: float = 0.9) -> list[list[dict[str, Tensor]]]:
    """The weights of every replica after every step, by the algorithms of the papers and torch's SGD."""
    every = f"{flags} --diloco-sync-interval {interval}"
    trainers = [build_trainer(replica_config(every, replicas), 0, 1) for _ in range(replicas)]
    for index, trainer in enumerate(trainers):
        trainer.data = replace(trainer.data, stream=(index, replicas))
    outer = {name: torch.nn.Parameter(value) for name, value in weights(trainers[0]).items()}
    optimizers = {
        name: torch.optim.SGD([value], lr, momentum, nesterov=momentum > 0) for name, value in outer.items()
    }

    def fragment(number: int) -> list[str]:
        names = []
        for name in outer:
            layer = int(name.split(".")[1]) if name.startswith("layers") else None
            place = layer % fragments if layer is not None else 0 if "embedding" in name else fragments - 1
            names += [name] if place == number % fragments else []
        return names

    pending: tuple[int, dict[str, Tensor]] | None = None
    history: list[list[dict[str, Tensor]]] = [[] for _ in trainers]
    rounds, last = 0, trainers[0].total_steps

    def merge(gradients: dict[str, Tensor], share: float) -> None:
        for name, gradient in gradients.items():
            outer[name].grad = gradient
            optimizers[name].step()
            for trainer in trainers:
                own = trainer.optimizer.main_params[name]
                own.copy_(share * own + (1 - share) * outer[name].detach())

    for step in range(1, last + 1):
        for trainer in trainers:
            take_step(trainer)
        with torch.no_grad():
            if pending is not None and (step == last or step >= pending[0]):
                merge(pending[1], mix)
                pending = None
            if step == last or step % (interval // fragments) == 0:
                names = list(outer) if step == last else fragment(rounds)
                own = [{n: outer[n].detach() - t.optimizer.main_params[n] for n in names} for t in trainers]
                gradients = {n: sum(each[n] for each in own) / replicas for n in names}
                rounds += 1
                if step == last or delay == 0:
                    merge(gradients, 0.0 if step == last else mix)
                else:
                    pending = step + delay, gradients
            for trainer, of_replica in zip(trainers, history):
                of_replica.append(weights(trainer))
    return history


CASES = {
    "two, AdamW": (2, {"interval": 3}),
    "three": (3, {"interval": 2, "lr": 0.4, "momentum": 0.5}),
    "fragments": (2, {"interval": 4, "fragments": 2}),
    "fragments, overlapped": (3, {"interval": 4, "fragments": 2, "delay": 1, "mix": 0.5}),
    "overlapped": (2, {"interval": 3, "delay": 2, "mix": 0.25}),
}


@pytest.mark.parametrize("case", CASES)
def test_replicas_follow_the_papers(case: str) -> None:
    count, options = CASES[case]
    flags = f"{FP64} --train-iters 9 --weight-decay 0.1"
    names = {"interval": "sync-interval", "lr": "outer-lr", "momentum": "outer-momentum"}
    own = " ".join(f"--diloco-{names.get(name, name)} {value}" for name, value in options.items())
    replicas = run_replicas(f"{flags} {own}", count)
    expected = simulate(flags, count, **options)
    for replica, history in zip(replicas, expected):
        assert len(replica.history) == len(history) == 9
        for step, (ours, theirs) in enumerate(zip(replica.history, history), 1):
            assert largest_difference(ours, theirs) < 1e-12, step
    first, *others = (replica.history[-1] for replica in replicas)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
