"""The choice of implementations by availability, correctness, flags and determinism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.config import plugins
from megatron.config.compute import KERNEL_CANDIDATES, kernel_problems
from megatron.config.errors import UserError
from megatron.kernels import registry
from megatron.kernels.compile import make_deterministic
from megatron.kernels.linear import LinearKernel, accumulate_wgrad
from megatron.kernels.operation import Candidate, check_kernel
from megatron.kernels.registry import OPERATIONS, Kernels, select_kernels
from megatron.layers.mixers.registry import unused_operations
from tests.kit.solo import Solo, random_batch, tiny

CPU = torch.device("cpu")


PRODUCTS = ("linear", "grouped_linear")


@pytest.mark.parametrize("fast", [False, True])
def test_auto_on_a_cpu_is_stock_torch_except_for_faster_products(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    for operation in PRODUCTS:
        candidates = dict(OPERATIONS[operation].candidates)
        candidates["onednn"] = replace(candidates["onednn"], fast=lambda device: fast)
        monkeypatch.setitem(OPERATIONS, operation, replace(OPERATIONS[operation], candidates=candidates))
    assert select_kernels(("auto",), CPU, torch.float64) == (Kernels(), ["kernels: torch"])
    (line,) = select_kernels(("auto",), CPU, torch.float32)[1]
    assert line.endswith("; onednn (linear, grouped_linear)") if fast else line == "kernels: torch"
    assert select_kernels(("torch",), CPU, torch.float32)[0] == Kernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operation", PRODUCTS)
def test_products_by_onednn_pass_the_check(operation: str, dtype: torch.dtype) -> None:
    checked = OPERATIONS[operation]
    assert check_kernel(checked, checked.candidates["onednn"].make(), CPU, dtype) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch_proves_to_be_torch(operation: str, dtype: torch.dtype) -> None:
    if operation == "attention" and dtype == torch.float16:
        pytest.skip("half precision attention takes minutes on CPUs")
    own = OPERATIONS[operation].candidates["torch"].make()
    assert check_kernel(OPERATIONS[operation], own, CPU, dtype) is None


def norm_of(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, bias, eps: change(Kernels().norm(x, weight, bias, eps))


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 1.05


def broken_package() -> None:
    raise ImportError("libcudart.so.99: no such file\nand more")


def no_kernel(*_: object) -> Tensor:
    raise RuntimeError("no kernel image\nis available")


DOUBLES: dict[str, tuple[Callable[[], Any], str]] = {
    "value": (lambda: norm_of(lambda y: y * 1.05), "differs from torch by"),
    "one element": (lambda: norm_of(lambda y: y + torch.eye(*y.shape[-2:])), "differs from torch by"),
    "gradient": (lambda: norm_of(_WrongGradient.apply), "differs from torch by"),
    "nan": (lambda: norm_of(lambda y: y * float("nan")), "differs from torch by nan"),
    "eps": (lambda: lambda x, w, b, eps: Kernels().norm(x, w, b, 0.3), "differs from torch by"),
    "no bias": (lambda: lambda x, w, b, eps: F.layer_norm(x, w.shape, w, None, eps), "differs from torch by"),
    "shape": (lambda: norm_of(lambda y: y.flatten()), "gave shapes"),
    "raises": (lambda: no_kernel, "failed (RuntimeError: no kernel image)"),
    "import": (broken_package, "cannot be loaded (ImportError: libcudart.so.99: no such file)"),
}
"""Implementations of norm that must not be used, and the reason that is reported."""


OTHERS = [f"{operation}=torch" for operation in KERNEL_CANDIDATES if operation != "norm"]
"""Words that leave norm alone free; compiling takes seconds."""


def offer(monkeypatch: pytest.MonkeyPatch, candidate: Candidate, name: str = "apex") -> None:
    """Another implementation of norm."""
    candidates = OPERATIONS["norm"].candidates | {name: candidate}
    monkeypatch.setitem(registry.OPERATIONS, "norm", replace(OPERATIONS["norm"], candidates=candidates))


@pytest.mark.parametrize("double", DOUBLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_that_computes_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, double: str, dtype: torch.dtype
) -> None:
    make, reason = DOUBLES[double]
    offer(monkeypatch, Candidate(make))
    with pytest.raises(UserError) as caught:
        select_kernels(("torch", "norm=apex"), CPU, dtype)
    (problem,) = caught.value.problems
    assert problem.code == "E903"
    assert reason in problem.sentence
    assert "\n" not in problem.sentence


def test_one_that_computes_wrongly_is_left_out_where_the_choice_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Candidate(DOUBLES["value"][0]), "compiled")
    kernels, notes = select_kernels(("compiled", *OTHERS), CPU, torch.float32)
    assert kernels == Kernels()
    assert notes[0] == "kernels: torch"
    assert notes[1].startswith("kernels: norm=compiled is left out: it differs from torch by")


def test_a_kernel_with_another_order_of_sums_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide = x.float()
        wide = wide if bias is None else wide - wide.mean(-1, keepdim=True)
        y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()
        return (y if bias is None else y + bias.float()).to(x.dtype)

    offer(monkeypatch, Candidate(lambda: other_order))
    for dtype in (torch.float32, torch.bfloat16):
        kernels, notes = select_kernels(("torch", "norm=apex"), CPU, dtype)
        assert kernels == replace(Kernels(), norm=other_order)
        assert notes == [f"kernels: apex (norm); torch ({', '.join(o for o in OPERATIONS if o != 'norm')})"]


def test_operations_of_mixers_that_a_model_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of_experts, of_scans = {"grouped_linear", "grouped_fp8", "rows"}, {"causal_conv", "state_space", "gated_delta_rule"}
    assert unused_operations(tiny()) == {*of_experts, *of_scans, "latent_qkv"}
    assert unused_operations(tiny(num_experts=2, moe_layer_freq="[0,1]")) == {*of_scans, "latent_qkv"}
    assert unused_operations(tiny(multi_latent_attention=True)) == {*of_experts, *of_scans}
    assert unused_operations(tiny(token_mixers=("gated-delta-net",))) == {*of_experts, "state_space", "latent_qkv"}
    offer(monkeypatch, Candidate(lambda: Kernels().norm))
    for unused in (set(), unused_operations(tiny())):
        (line,) = select_kernels(("norm=apex",), CPU, torch.float32, unused=unused)[1]
        assert ("grouped_linear" in line) == (not unused)


def test_a_reference_that_fails_on_the_device_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor, *rest: Any) -> Tensor:
        return Kernels().norm(x, *rest) if x.dtype == torch.float64 else no_kernel()

    offer(monkeypatch, Candidate(lambda: Kernels().norm), "compiled")
    offer(monkeypatch, Candidate(lambda: broken), "torch")
    kernels, notes = select_kernels(("compiled", *OTHERS), CPU, torch.float32)
    assert kernels == replace(Kernels(), norm=broken)
    failure = "it cannot be compared with torch, which failed on cpu (RuntimeError: no kernel image)"
    assert notes == ["kernels: torch", f"kernels: norm=compiled is left out: {failure}"]


def test_unavailable_kernels_are_refused_by_name_and_skipped_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Candidate(lambda: None, lambda device, dtype: "there is no compiler"), "compiled")
    kernels, notes = select_kernels(("compiled", *OTHERS), CPU, torch.float32)
    assert kernels == Kernels()
    assert notes == ["kernels: torch", "kernels: norm=compiled is left out: there is no compiler"]
    with pytest.raises(UserError, match="E903 --kernels norm=compiled cannot be used: there is no compiler"):
        select_kernels(("norm=compiled", "attention=flash_attn"), CPU, torch.float32)


def test_deterministic_refuses_nondeterministic_features(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Candidate(lambda: Kernels().norm, deterministic=False))
    assert select_kernels(("torch", "norm=apex"), CPU, torch.float32)[0] == Kernels()
    with pytest.raises(UserError, match="E902 --deterministic does not go with --kernels norm=apex"):
        select_kernels(("norm=apex",), CPU, torch.float32, deterministic=True)
    assert select_kernels(("auto",), CPU, torch.float64, deterministic=True)[0] == Kernels()
    assert not OPERATIONS["attention"].candidates["cudnn"].deterministic


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins._registered, "kernel", {})


def scaled_linear(forward: float = 1.0, dx: float = 1.0, dw: float = 1.0) -> LinearKernel:
    """A linear whose three functions are off by factors."""

    def weight_gradient(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
        accumulate_wgrad(target, x, dy * dw, beta)

    return LinearKernel(
        lambda x, weight, bias: F.linear(x, weight, bias) * forward,
        lambda dy, weight: dy @ weight * dx,
        weight_gradient,
    )


@pytest.mark.parametrize("fault", ["none", "forward", "dx", "dw"])
def test_a_plugins_linear_is_checked_and_trains(fault: str, no_plugins: None) -> None:
    """Every one of its three functions is compared with PyTorch, and computes a part of the gradients."""
    made = scaled_linear(**{} if fault == "none" else {fault: 1.05})
    assert [problem.code for problem in kernel_problems(("linear=mine",))] == ["E901"]
    plugins.register("kernel", "linear=mine")(Candidate(lambda: made))
    for word in ("linear=mine", "weight_gradient=mine"):
        assert list(kernel_problems((word,))) == []
        if fault == "none":
            kernels, notes = select_kernels(("torch", word), CPU, torch.float32)
            assert kernels == replace(Kernels(), linear=made)
            assert notes[0].startswith("kernels: ")
            assert "mine (linear)" in notes[0]
        else:
            with pytest.raises(UserError, match="E903"):
                select_kernels(("torch", word), CPU, torch.float32)
    batch = random_batch(tiny())
    plain, other = Solo.build(tiny()), Solo.build(tiny(), kernels=Kernels(linear=made))
    for solo in (plain, other):
        solo.grad_accumulator.multiply = solo.chunk.context.kernels.linear.weight_gradient
        solo.backward([batch])
    same = [torch.allclose(other.buckets.grads[n], g, rtol=1e-9, atol=1e-12) for n, g in plain.buckets.grads.items()]
    assert all(same) if fault == "none" else not all(same)


def test_attention_dropout_is_computed_by_torch_whatever_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names what computes; an implementation chosen by name is refused with the configuration."""
    known = OPERATIONS["attention"]
    fast = Candidate(lambda: lambda *arguments: Kernels().attention(*arguments))
    monkeypatch.setitem(OPERATIONS, "attention", replace(known, candidates={**known.candidates, "cudnn": fast}))
    assert "cudnn (attention)" in select_kernels(("attention=cudnn",), CPU, torch.float32)[1][0]
    assert select_kernels(("attention=cudnn",), CPU, torch.float64, attention_dropout=True)[1] == ["kernels: torch"]
    run = ["--preset", "tiny-gpt2", "--mock-data", "--vocab-size", "257", "--train-iters", "1", "--kernels", "auto"]
    for name, codes in (("cudnn", ["E903"]), ("auto", []), ("torch", [])):
        try:
            parse([*run, f"attention={name}", "--attention-dropout", "0.1"], {})
            found = []
        except UserError as error:
            found = [problem.code for problem in error.problems]
        assert found == codes
    parse([*run, "attention=cudnn", "--attention-dropout", "0"], {})


DETERMINISM_CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    yield
    cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def test_nothing_happens_unless_it_is_wanted() -> None:
    environ: dict[str, str] = {}
    assert make_deterministic(False, CUDA, environ) == []
    assert environ == {}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_run_sets_the_variables_of_cublas_and_nccl() -> None:
    environ: dict[str, str] = {}
    assert len(make_deterministic(True, CUDA, environ)) == 1
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "a warning would not stop the run"
    assert torch.backends.cudnn.deterministic
    make_deterministic(True, CUDA, environ)  # what it has set itself is right


@pytest.mark.parametrize("algorithms", ["NVLS", "Ring,NVLSTree", "^Ring"])
def test_settings_that_do_not_are_all_refused(algorithms: str) -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NCCL_ALGO": algorithms}
    with pytest.raises(UserError) as caught:
        make_deterministic(True, CUDA, environ)
    assert [problem.code for problem in caught.value.problems] == ["E902", "E902"]
    assert not torch.are_deterministic_algorithms_enabled()
    make_deterministic(True, DETERMINISM_CPU, environ)  # which asks neither


def test_a_step_uses_no_operation_that_torch_would_refuse() -> None:
    """With all that a model can have: dropout, documents, a window, grouped heads, a z loss."""
    config = tiny(
        hidden_dropout=0.1,
        attention_dropout=0.1,
        num_query_groups=2,
        window_size=5,
        z_loss_coeff=1e-3,
        position_embedding_type="rope",
        qk_layernorm=True,
    )
    batch = random_batch(config, documents=torch.tensor([[0] * 7 + [1] * 9, [0] * 16]))

    def norms() -> list[float]:
        solo = Solo.build(config, torch.float32)
        return [solo.step([batch])[1].grad_norm.item() for _ in range(2)]

    before = norms()
    make_deterministic(True, DETERMINISM_CPU, {})
    assert norms() == before
