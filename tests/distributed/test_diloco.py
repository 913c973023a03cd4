"""DiLoCo against data parallelism and a simulation in one process; replicas that come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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


class Simulation:
    """Replicas in one process, by the algorithms of the papers, with torch's SGD as the outer optimizer."""

    def __init__(self, flags: str, replicas: int, options: dict[str, Any]) -> None:
        self.interval, self.fragments = options["interval"], options.get("fragments", 1)
        self.delay, self.mix = options.get("delay", 0), options.get("mix", 0.0)
        config = replica_config(f"{flags} --diloco-sync-interval 1", replicas)
        self.trainers = [build_trainer(config, 0, 1) for _ in range(replicas)]
        for index, trainer in enumerate(self.trainers):
            trainer.data = replace(trainer.data, stream=(index, replicas))
        self.outer = {name: torch.nn.Parameter(value) for name, value in weights(self.trainers[0]).items()}
        lr, momentum = options.get("lr", 0.7), options.get("momentum", 0.9)
        self.optimizers = {n: torch.optim.SGD([v], lr, momentum, nesterov=True) for n, v in self.outer.items()}

    def fragment(self, number: int) -> list[str]:
        first, last = number % self.fragments == 0, number % self.fragments == self.fragments - 1
        blocks = [f"layers.{layer}." for layer in range(number % self.fragments, 2, self.fragments)]
        named = {"layers": False, "embedding": first, "final_layernorm": last}
        return [n for n in self.outer if n.startswith(tuple(blocks)) or named[n.split(".")[0]]]

    def merge(self, gradients: dict[str, Tensor], share: float) -> None:
        for name, gradient in gradients.items():
            self.outer[name].grad = gradient
            self.optimizers[name].step()
            for trainer in self.trainers:
                own = trainer.optimizer.main_params[name]
                own.copy_(share * own + (1 - share) * self.outer[name].detach())

    def run(self) -> list[list[dict[str, Tensor]]]:
        """The weights after every step, of every replica."""
        history, pending, rounds = [], (0, dict[str, Tensor]()), 0
        last = self.trainers[0].total_steps
        for step in range(1, last + 1):
            for trainer in self.trainers:
                take_step(trainer)
            with torch.no_grad():
                if step == last or step == pending[0]:
                    self.merge(pending[1], self.mix)
                    pending = 0, {}
                if step == last or step % (self.interval // self.fragments) == 0:
                    names = [*self.outer] if step == last else self.fragment(rounds)
                    own = [{n: self.outer[n] - t.optimizer.main_params[n] for n in names} for t in self.trainers]
                    pending = step + self.delay, {n: sum(each[n] for each in own) / len(own) for n in names}
                    rounds += 1
                    if step == last or self.delay == 0:
                        self.merge(pending[1], 0.0 if step == last else self.mix)
                        pending = 0, {}
            history.append([weights(trainer) for trainer in self.trainers])
        return history


CASES: dict[str, tuple[int, dict[str, Any]]] = {
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
    expected = Simulation(flags, count, options).run()
    assert [len(replica.history) for replica in replicas] == [9] * count
    for step, theirs in enumerate(expected):
        for replica, each in zip(replicas, theirs):
            assert largest_difference(replica.history[step], each) < 1e-12, step
    first, *others = (replica.history[-1] for replica in replicas)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
