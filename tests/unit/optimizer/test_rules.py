"""Update rules against torch.optim, one tensor at a time and unfused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import plugins
from megatron.config.run import OptimizerConfig
from megatron.optimizer import rules
from megatron.optimizer.rules import RULES, UpdateRule, iterate_blocks
from megatron.planner.memory import _moment_bytes
from tests.solo import Allocations, Solo, random_batch, tiny

CONFIG = OptimizerConfig(
    adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3, sgd_momentum=0.7, lion_beta1=0.6, lion_beta2=0.9
)
SHAPES = [(3, 4), (5,), (), (17, 9)]
GO, SKIP = torch.zeros(()), torch.ones(())
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    betas = (CONFIG.adam_beta1, CONFIG.adam_beta2)
    return torch.optim.AdamW(params, betas=betas, eps=CONFIG.adam_eps, foreach=False, fused=False)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, momentum=CONFIG.sgd_momentum, foreach=False, fused=False)


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, line by line and number by number."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for param in group["params"]:
            state = self.state[param]
            m = state.setdefault("exp_avg", torch.zeros_like(param)).view(-1)
            w, g = param.data.view(-1), param.grad.view(-1)
            for i in range(w.numel()):
                c = CONFIG.lion_beta1 * m[i] + (1 - CONFIG.lion_beta1) * g[i]
                m[i] = CONFIG.lion_beta2 * m[i] + (1 - CONFIG.lion_beta2) * g[i]
                w[i] -= group["lr"] * (torch.sign(c) + group["weight_decay"] * w[i])


REFERENCES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {"adam": adamw, "sgd": sgd, "lion": Lion}


def tensors(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def everything(rule: UpdateRule, params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of parameters and all state."""
    held: list[Any] = [*params, *(t for kind in rule.state.values() for t in kind)]
    return [t.clone() for t in held]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", RULES)
def test_equals_torch(name: str, dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = tensors(dtype), tensors(dtype)
    rule, reference = RULES[name](ours, CONFIG), REFERENCES[name](theirs)
    for step in range(10):
        lr, weight_decay = 0.1 / (step + 1), 0.02 * step
        grads = tensors(dtype, seed=step + 1)
        rule.update(grads, lr, weight_decay, GO)
        reference.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        for param, grad in zip(theirs, grads):
            param.grad = grad.clone()
        reference.step()
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b.detach(), rtol=tolerance, atol=tolerance)
    for kind, values in rule.state.items():
        for value, param in zip(values, theirs):
            torch.testing.assert_close(value, reference.state[param][kind], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("name", RULES)
def test_a_skipped_step_changes_no_bit(name: str, garbage: float) -> None:
    """Neither then nor later: the steps after it are those of a run that never saw it."""
    seen, spared = tensors(torch.float32), tensors(torch.float32)
    rule, reference = RULES[name](seen, CONFIG), RULES[name](spared, CONFIG)
    for step in range(4):
        for r in (rule, reference):
            r.update(tensors(torch.float32, seed=step + 1), 0.1, 0.01, GO)
        before = everything(rule, seen)
        rule.update([torch.full(shape, garbage) for shape in SHAPES], 0.1, 0.01, SKIP)
        assert all(map(torch.equal, before, everything(rule, seen)))
    assert all(map(torch.equal, everything(rule, seen), everything(reference, spared)))


@pytest.mark.parametrize("name", RULES)
def test_a_first_step_that_is_skipped(name: str) -> None:
    params = tensors(torch.float64)
    rule = RULES[name](params, CONFIG)
    rule.update([torch.full(shape, float("nan"), dtype=torch.float64) for shape in SHAPES], 0.1, 0.01, SKIP)
    assert all(map(torch.equal, params, tensors(torch.float64)))
    assert not any(t.any() for kind in rule.state.values() for t in kind)


@pytest.mark.parametrize("name", RULES)
def test_leaves_gradients_alone(name: str) -> None:
    grads = tensors(torch.float32, seed=1)
    RULES[name](tensors(torch.float32), CONFIG).update(grads, 0.1, 0.5, GO)
    assert all(map(torch.equal, grads, tensors(torch.float32, seed=1)))


@pytest.mark.parametrize("name", RULES)
def test_nothing_to_update(name: str) -> None:
    rule = RULES[name]([], CONFIG)
    rule.update([], 0.1, 0.01, GO)
    assert not any(rule.state.values())


@pytest.mark.parametrize("name", RULES)
def test_a_learning_rate_may_be_a_tensor(name: str) -> None:
    ours, theirs = tensors(torch.float64), tensors(torch.float64)
    for params, lr in ((ours, torch.tensor(0.125)), (theirs, 0.125)):
        RULES[name](params, CONFIG).update(tensors(torch.float64, seed=1), lr, 0.5, GO)
    assert all(map(torch.equal, ours, theirs))


def test_lion_needs_two_blocks_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """And cut into blocks it does what it does to whole tensors."""
    whole, cut = tensors(torch.float64), tensors(torch.float64)
    for params, elements in ((whole, 10**6), (cut, 7)):
        monkeypatch.setattr(rules, "iterate_blocks", partial(iterate_blocks, elements=elements))
        rule = RULES["lion"](params, CONFIG)
        for step in range(3):
            rule.update(tensors(torch.float64, seed=step + 1), 0.1, 0.5, GO)
    assert all(map(torch.equal, whole, cut))
    large, grads = ([torch.full((1000,), value) for _ in range(2)] for value in (0.0, 1.0))
    rule = RULES["lion"](large, CONFIG)
    monkeypatch.setattr(rules, "iterate_blocks", partial(iterate_blocks, elements=100))
    with Allocations() as seen:
        rule.update(grads, 0.1, 0.5, GO)
    assert seen.largest <= 100 * 4


class SignOfMomentum:
    """A rule as a plugin would register it: it keeps what it declares under a name of its own."""

    state_kinds: tuple[str, ...] = ("direction",)

    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.params, self.momentum = list(params), config.sgd_momentum
        self.state = {"direction": [torch.zeros_like(p) for p in self.params]}
        self.step_counts: list[Tensor] = []

    def update(self, grads: Sequence[Tensor], lr: Any, weight_decay: float, skip: Tensor) -> None:
        for p, g, m in zip(self.params, grads, self.state["direction"]):
            m.copy_(torch.where(skip > 0, m, m.lerp(g, 1 - self.momentum)))
            p.copy_(torch.where(skip > 0, p, p * (1 - lr * weight_decay) - lr * m.sign()))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """Registers optimizers for the duration of a test."""
    monkeypatch.setitem(plugins._registered, "optimizer", {})
    return lambda rule: plugins.register("optimizer", "mine")(rule) and None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_registered_rule_updates_and_its_state_is_kept(plugin: Callable[[type], None], dtype: torch.dtype) -> None:
    plugin(SignOfMomentum)
    model = tiny()
    config = OptimizerConfig(optimizer="mine", sgd_momentum=0.5, store_param_remainders=dtype == torch.bfloat16)
    solo = Solo.build(model, dtype, optimizer=config)
    before = {name: p.detach().clone() for name, p in solo.params.items()}
    solo.step([random_batch(model)])
    state = solo.optimizer.state()
    assert list(state) == ["direction"]
    assert state["direction"].keys() == before.keys()
    assert all(state["direction"][name].any() for name in before)
    assert any(not torch.equal(before[name], p) for name, p in solo.params.items())
    assert list(solo.optimizer.extra_state()) == ["direction"], "checkpoints hold it under its name"


def test_memory_counts_what_a_registered_rule_declares(
    plugin: Callable[[type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(SignOfMomentum)
    config = OptimizerConfig(optimizer="mine", exp_avg_dtype="bf16")
    assert _moment_bytes(config, muons=False, wide=4) == 4
    monkeypatch.setattr(SignOfMomentum, "state_kinds", ("exp_avg", "direction"))
    assert _moment_bytes(config, muons=False, wide=4) == 2 + 4


def test_a_rule_that_keeps_other_state_than_it_declares_is_refused(
    plugin: Callable[[type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(SignOfMomentum)
    monkeypatch.setattr(SignOfMomentum, "state_kinds", ("direction", "velocity"))
    model = tiny()
    with pytest.raises(ValueError, match="state_kinds"):
        Solo.build(model, optimizer=OptimizerConfig(optimizer="mine"))
