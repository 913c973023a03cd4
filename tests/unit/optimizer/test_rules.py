"""Update rules against torch, main parameters, parameter groups, and rules of a plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.config import plugins
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunConfig
from megatron.convert.huggingface.weights import build_on_meta
from megatron.distributed.sharding import ShardSpec
from megatron.layers.parameters import num_parameters
from megatron.optimizer import rules
from megatron.optimizer.main_params import join_fp32, split_fp32
from megatron.optimizer.param_groups import param_groups
from megatron.optimizer.rules import RULES, ElementwiseRule, UpdateArgs, UpdateRule, iterate_blocks
from megatron.planner.memory import checkpoint_bytes
from tests.kit.solo import Allocations, Solo, random_batch, tiny

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
        rule.update(UpdateArgs(grads, lr, weight_decay, GO))
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
    """Neither then nor later: later steps match a run without it."""
    seen, spared = tensors(torch.float32), tensors(torch.float32)
    rule, reference = RULES[name](seen, CONFIG), RULES[name](spared, CONFIG)
    for step in range(4):
        for r in (rule, reference):
            r.update(UpdateArgs(tensors(torch.float32, seed=step + 1), 0.1, 0.01, GO))
        before = everything(rule, seen)
        rule.update(UpdateArgs([torch.full(shape, garbage) for shape in SHAPES], 0.1, 0.01, SKIP))
        assert all(map(torch.equal, before, everything(rule, seen)))
    assert all(map(torch.equal, everything(rule, seen), everything(reference, spared)))


@pytest.mark.parametrize("name", RULES)
def test_leaves_gradients_alone(name: str) -> None:
    grads = tensors(torch.float32, seed=1)
    RULES[name](tensors(torch.float32), CONFIG).update(UpdateArgs(grads, 0.1, 0.5, GO))
    assert all(map(torch.equal, grads, tensors(torch.float32, seed=1)))


@pytest.mark.parametrize("name", RULES)
def test_a_learning_rate_may_be_a_tensor(name: str) -> None:
    ours, theirs = tensors(torch.float64), tensors(torch.float64)
    for params, lr in ((ours, torch.tensor(0.125)), (theirs, 0.125)):
        RULES[name](params, CONFIG).update(UpdateArgs(tensors(torch.float64, seed=1), lr, 0.5, GO))
    assert all(map(torch.equal, ours, theirs))


class SignOfMomentum(ElementwiseRule):
    """A rule as a plugin would register it: it keeps what it declares under a name of its own."""

    state_kinds = ("direction",)
    counts_steps = True

    def step(self, args: UpdateArgs) -> None:
        for p, g, m, count in zip(self.params, args.grads, self.state["direction"], self.step_counts):
            count += 1
            m.lerp_(g, 1 - self.config.sgd_momentum)
            p.mul_(1 - args.lr * args.weight_decay).sub_(args.lr * m.sign() / count.sqrt())


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """Registers optimizers for the duration of a test."""
    monkeypatch.setitem(plugins._registered, "optimizer", {})
    return lambda rule: plugins.register("optimizer", "mine")(rule) and None


def test_memory_counts_what_a_registered_rule_declares(
    plugin: Callable[[type], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(SignOfMomentum)
    config = RunConfig(model=tiny(), optimizer=OptimizerConfig(optimizer="mine", exp_avg_dtype="bf16"))
    assert checkpoint_bytes(config) == num_parameters(tiny()) * (4 + 4)
    monkeypatch.setattr(SignOfMomentum, "state_kinds", ("exp_avg", "direction"))
    assert checkpoint_bytes(config) == num_parameters(tiny()) * (4 + 2 + 4)


class WithUndeclaredState(SignOfMomentum):
    def __init__(self, params: Sequence[Tensor], config: OptimizerConfig) -> None:
        super().__init__(params, config)
        self.state["velocity"] = [torch.zeros_like(p) for p in params]


@pytest.mark.parametrize(("rule", "error"), [(WithUndeclaredState, "state_kinds"), (Lion, "ElementwiseRule")])
def test_a_rule_without_the_interface_is_refused(plugin: Callable[[type], None], rule: type, error: str) -> None:
    """It keeps other state than it declares, or is an optimizer of torch."""
    plugin(type("Mine", (rule,), {"__init__": lambda self, params, config: None}) if rule is Lion else rule)
    with pytest.raises((ValueError, TypeError), match=error):
        Solo.build(tiny(), optimizer=OptimizerConfig(optimizer="mine"))


@pytest.mark.parametrize("garbage", [float("nan"), 1.0])
def test_a_skipped_step_of_a_registered_rule_is_undone(garbage: float) -> None:
    """Parameters, state and counts, in blocks, though the rule knows nothing of skipped steps."""
    params = tensors(torch.float32)
    rule = SignOfMomentum(params, CONFIG)
    for skip in (GO, SKIP, GO):
        before = [*everything(rule, params), *(count.clone() for count in rule.step_counts)]
        grads = [torch.full(shape, garbage) for shape in SHAPES] if skip is SKIP else tensors(torch.float32, seed=1)
        rule.update(UpdateArgs(grads, 0.1, 0.01, skip))
        after = [*everything(rule, params), *rule.step_counts]
        assert any(map(torch.equal, before, after)) == (skip is SKIP)
        assert all(map(torch.equal, before, after)) == (skip is SKIP)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 25))
def test_blocks_are_a_partition(sizes: list[int], elements: int) -> None:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    tensors = [torch.arange(a, b) for a, b in zip(ends, ends[1:])]
    found = [[cut.view_in(tensors) for cut in block] for block in iterate_blocks(tensors, elements)]
    lengths = [sum(map(len, block)) for block in found]
    assert [i for block in found for piece in block for i in piece.tolist()] == list(range(ends[-1]))
    assert all(length == elements for length in lengths[:-1])
    assert all(0 < n <= elements for n in lengths)


PARAM_CONFIG = tiny()
BATCHES = [random_batch(PARAM_CONFIG, seed=seed) for seed in (1, 2)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_number_survives_to_the_bit_and_its_weight_is_the_nearest(value: float) -> None:
    master = torch.tensor([value])
    weight, rest = split_fp32(master)
    assert torch.equal(join_fp32(weight, rest).view(torch.int32), master.view(torch.int32))
    nearest, exact = master.bfloat16(), master.double()
    if nearest.isfinite().all():
        assert (weight.double() - exact).abs().item() == (nearest.double() - exact).abs().item()


@pytest.mark.parametrize("optimizer", ["adam", "lion", "sgd"])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_run_matches_unsharded_main_params(optimizer: str, moments: str) -> None:
    """Weights may differ where a master is a tie; in these few steps none is before the last."""
    formats = {} if optimizer == "sgd" else {"exp_avg_dtype": moments}
    whole, lean = (
        Solo.build(
            PARAM_CONFIG,
            torch.bfloat16,
            optimizer=OptimizerConfig(optimizer=optimizer, ema_decay=0.9, store_param_remainders=remainders, **formats),
        )
        for remainders in (False, True)
    )
    assert len(lean.optimizer.main_params.remainders) == len(lean.params)
    for _ in range(3):
        assert whole.step(BATCHES)[0] == lean.step(BATCHES)[0]
        kept = (lean.optimizer.main_params, whole.optimizer.main_params), (lean.average, whole.average)
        for ours, theirs in kept:
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with lean.averaged(), whole.averaged():  # averages are ties here and there
        assert all(torch.equal(lean.optimizer.main_params[name], m) for name, m in whole.optimizer.main_params.items())
    for name, master in lean.optimizer.main_params.items():
        assert torch.equal(master, whole.optimizer.main_params[name])
        assert torch.equal(lean.params[name], split_fp32(master)[0])


SPECS: dict[str, ShardSpec] = dict(build_on_meta(tiny(untie_embeddings_and_output_weights=True)).specs)


def test_muon_leaves_other_parameters_than_matrices_of_blocks_to_adam() -> None:
    """Each with its own rate and decay under either rule."""
    config = OptimizerConfig(optimizer="muon", decoupled_lr=1e-3, lr_factors=("layers.1.*=0.5",))
    found = {name: (g.rule, g.decoupled, g.lr_factor) for g in param_groups(SPECS, config) for name in g.names}
    assert found.keys() == SPECS.keys()
    for name, (rule, decoupled, factor) in found.items():
        matrix = name.startswith("layers.") and len(SPECS[name].shape) == 2
        assert rule == ("muon" if matrix else "adam"), name
        assert decoupled == (name in ("embedding.word_embeddings.weight", "output_layer.weight"))
        assert factor == (0.5 if name.startswith("layers.1.") else 1.0)


def test_lion_needs_two_blocks_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """And cut into blocks it does what it does to whole tensors."""
    whole, cut = tensors(torch.float64), tensors(torch.float64)
    for params, elements in ((whole, 10**6), (cut, 7)):
        monkeypatch.setattr(rules, "iterate_blocks", partial(iterate_blocks, elements=elements))
        rule = RULES["lion"](params, CONFIG)
        for step in range(3):
            rule.update(UpdateArgs(tensors(torch.float64, seed=step + 1), 0.1, 0.5, GO))
    assert all(map(torch.equal, whole, cut))
    large, grads = ([torch.full((1000,), value) for _ in range(2)] for value in (0.0, 1.0))
    rule = RULES["lion"](large, CONFIG)
    monkeypatch.setattr(rules, "iterate_blocks", partial(iterate_blocks, elements=100))
    with Allocations() as seen:
        rule.update(UpdateArgs(grads, 0.1, 0.5, GO))
    assert seen.largest <= 100 * 4
