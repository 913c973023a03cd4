"""Kernels of other packages behind their doubles, norms and dropout against formulas."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import PLAIN, losses, peak
from megatron.distributed.random import stable_hash
from megatron.kernels.adam import ADAM, AdamSettings, AdamState, adam
from megatron.kernels.dropout import keep_mask
from megatron.kernels.linear import LINEAR, accumulate_wgrad
from megatron.kernels.norm import NORM, add_norm, norm
from megatron.kernels.operation import Operation, check_kernel
from tests.unit.kernels.doubles import ApexNorms, install

EPS = 1e-3


def by_formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    centred = x if bias is None else x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("with_bias", [False, True])
def test_formula_values_and_gradients(with_bias: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    weight, bias = torch.randn(2, 16, dtype=torch.float64)
    bias = bias if with_bias else None
    inputs = [t.requires_grad_() for t in (x, y, weight, bias) if t is not None]
    total, normed = add_norm(x, y, None, weight, bias, EPS)
    seeds = torch.randn_like(total), torch.randn_like(normed)
    ours = torch.autograd.grad((total, normed), inputs, seeds)
    exact = torch.autograd.grad((x + y, by_formula(x + y, weight, bias)), inputs, seeds)
    torch.testing.assert_close(normed, by_formula(x + y, weight, bias), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
    assert torch.equal(normed, norm(total, weight, bias, EPS))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_weights_are_rounded_once(dtype: torch.dtype, with_bias: bool) -> None:
    """Summed over rows in 16 bits they would be off by several percent."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 4096, 16, generator=generator).to(dtype)
    weight, bias = torch.randn(2, 16, generator=generator).to(dtype)
    inputs = [x, weight, bias] if with_bias else [x, weight]
    ours = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    norm(ours[0], ours[1], ours[2] if with_bias else None, EPS).backward(dy)
    by_formula(exact[0], exact[1], exact[2] if with_bias else None).backward(dy.double())
    for mine, right in zip(ours, exact):
        assert mine.grad is not None
        assert right.grad is not None
        error = (mine.grad.double() - right.grad).norm() / right.grad.norm()
        assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_apex_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    double = ApexNorms()
    install(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        fused_layer_norm_affine=double.fused_layer_norm_affine,
        fused_rms_norm_affine=double.fused_rms_norm_affine,
    )
    assert check_kernel(NORM, NORM.candidates["apex"].make(), torch.device("cpu"), dtype) is None
    assert set(double.calls) == {"layer", "rms"}


def mask(key: int, probability: float = 0.5, n: int = 128) -> Tensor:
    index = torch.arange(n)
    return keep_mask(probability, key, index.view(-1, 1, 1)[:4], index.view(-1, 1), index)


def test_keep_mask_is_elementwise_in_its_coordinates() -> None:
    whole = mask(stable_hash("x"))
    index = torch.arange(128)
    picked = torch.tensor([77, 3, 12])
    part = keep_mask(0.5, stable_hash("x"), torch.tensor([2]).view(1, 1, 1), picked.view(-1, 1), index[40:50])
    assert torch.equal(part, whole[2:3, picked, 40:50])


def test_keep_mask_has_no_structure() -> None:
    """The spectrum of every sample's mask is flat: no stripe, no period, along positions or channels."""
    signs = mask(stable_hash("y")).double() * 2 - 1
    power = torch.fft.fft2(signs).abs().square() / signs[0].numel()
    assert power.mean().item() == pytest.approx(1.0, abs=1e-9)
    assert power.max() < 25, "white noise of this size exceeds 25 once in a million"


@pytest.mark.parametrize("probability", [0.0, 1e-12])
def test_keep_mask_of_nothing_keeps_all(probability: float) -> None:
    assert mask(1, probability).all()


CPU = torch.device("cpu")


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """As in csrc/megatron/fused_weight_gradient_dense_cuda.cu: raw pointers, so everything must be contiguous."""
    assert all(t.is_contiguous() for t in (input, d_output, d_weight))
    assert (d_weight.dtype, d_output.dtype) == (torch.float32, input.dtype)
    d_weight += d_output.float().t() @ input.float()


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """As in csrc/multi_tensor_adam.cu, its AdamCapturableFunctor in decoupled mode."""
    formats = [t.dtype for t in (noop_flag, lr, step, inv_scale)]
    assert formats == [torch.int32, torch.float32, torch.int32, torch.float32]
    if noop_flag.item() == 1:
        return
    assert (mode, bias_correction) == (1, 1)
    corrections = [1 - beta ** step.item() for beta in (beta1, beta2)]
    for g, p, m, v in zip(*tensor_lists):
        g.mul_(inv_scale)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + epsilon) + weight_decay * p
        p.sub_(lr * update)


def no_beta(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """A faulty double: forgets what was there."""
    d_weight.copy_(d_output.float().t() @ input.float())


def rounded(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """A faulty double: the product passes through the format of its operands."""
    d_weight += (d_output.float().t() @ input.float()).to(input.dtype)


def no_skip(chunk_size: int, noop_flag: Tensor, *others: object) -> None:
    """A faulty double: takes steps that are to be skipped."""
    multi_tensor_adam_capturable(chunk_size, torch.zeros_like(noop_flag), *others)


def no_decay(*arguments: object) -> None:
    """A faulty double."""
    multi_tensor_adam_capturable(*arguments[:10], 0.0, arguments[11])


APEX = {
    "linear": (LINEAR, "fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"),
    "adam": (ADAM, "amp_C", "multi_tensor_adam_capturable"),
}


@pytest.mark.parametrize(
    ("operation", "does", "right"),
    [
        ("linear", wgrad_gemm_accum_fp32, True),
        ("linear", no_beta, False),
        ("linear", rounded, False),
        ("adam", multi_tensor_adam_capturable, True),
        ("adam", no_skip, False),
        ("adam", no_decay, False),
    ],
)
def test_apex_is_called_as_it_wants_and_proven(
    operation: str, does: Callable[..., None], right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, module, function = APEX[operation]
    install(monkeypatch, module, **{function: does})
    for dtype in (torch.bfloat16, torch.float16):
        assert (check_kernel(table, table.candidates["apex"].make(), CPU, dtype) is None) is right


def test_the_product_accumulates_where_formats_are_equal() -> None:
    """The path on GPUs needs one; where nothing has to be widened, it is the same call."""
    assert check_kernel(LINEAR, LINEAR.candidates["addmm"].make(), CPU, torch.float32) is None


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_product_is_not_rounded_to_the_format_of_its_operands(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(4, 3, n, generator=generator).bfloat16() for n in (5, 6))
    target = torch.randn(6, 5, generator=generator)
    expected = torch.einsum("sbi,sbo->oi", x.double(), dy.double()) + beta * target.double()
    accumulate_wgrad(target, x, dy, beta)
    torch.testing.assert_close(target.double(), expected, rtol=1e-6, atol=1e-6)


def test_adam_is_its_formula() -> None:
    lr, decay, settings = 0.1, 0.01, AdamSettings(0.9, 0.99, 1e-8)
    w, m, v, grad = 2.0, 0.0, 0.0, 0.5
    one = [torch.full((1,), x, dtype=torch.float64) for x in (w, m, v)]
    count = torch.zeros(())
    for step in (1, 2, 3):
        adam(
            AdamState(*([t] for t in one), [count]),
            [torch.tensor([grad * step]).double()],
            settings,
            lr,
            decay,
            torch.zeros(()),
        )
        g = grad * step
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w -= lr * decay * w + lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)) ** 0.5 + 1e-8)
    assert one[0].item() == pytest.approx(w, rel=1e-12)


SMALL = argparse.Namespace(tokens=64, vocabulary=1000, hidden=8, chunk=16)


def test_the_contestants_compute_the_same_and_ours_without_full_logits() -> None:
    runs = losses(SMALL, torch.float32)
    plain, ours = runs[PLAIN], runs["in chunks, eager"]
    assert ours().item() == pytest.approx(plain().item(), rel=1e-5)
    logits = 64 * 1000 * 4
    assert peak(plain) >= 2 * logits
    assert peak(ours) < logits


@pytest.mark.parametrize("table", [LINEAR, ADAM])
def test_nothing_but_torch_and_its_libraries_serve_a_cpu(table: Operation) -> None:
    reasons = {name: candidate.missing(CPU, torch.bfloat16) for name, candidate in table.candidates.items()}
    assert {name for name, reason in reasons.items() if reason is None} - {"onednn"} == {"torch"}


@pytest.mark.parametrize("table", [LINEAR, ADAM])
def test_packages_that_are_not_installed_are_missing_on_gpus(table: Operation) -> None:
    reason = table.candidates["apex"].missing(torch.device("cuda"), torch.bfloat16)
    assert reason is not None
    assert "cannot be imported" in reason


def test_the_accumulating_product_takes_narrow_operands() -> None:
    """Only GPUs compute it; tensors without values know formats and shapes."""
    x, dy, target = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((4, 2, 5), (4, 2, 6), (6, 5)))
    LINEAR.candidates["addmm"].make().weight_gradient(target.float(), x, dy, beta=0.0)
    with pytest.raises(RuntimeError):
        LINEAR.candidates["addmm"].make().weight_gradient(target.float(), x, dy[..., :3])


def test_apex_is_missing_where_it_cannot_run() -> None:
    missing = NORM.candidates["apex"].missing
    assert "on a GPU" in str(missing(torch.device("cpu"), torch.bfloat16))
    assert "on a GPU" in str(missing(torch.device("cuda"), torch.float64))
    assert "cannot be imported" in str(missing(torch.device("cuda"), torch.bfloat16))
