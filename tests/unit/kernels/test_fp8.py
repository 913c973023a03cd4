"""Linears in FP8 against products of values that are rounded one by one."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.sharding import Init
from megatron.kernels import fp8
from megatron.kernels.fp8 import (
    Float8Kernel,
    Float8Layers,
    Float8Recipe,
    Float8Tensor,
    WeightCasts,
    fp8_operation,
    swizzled,
)
from megatron.kernels.grouped_fp8 import (
    TORCH_GROUPED_FP8,
    emulated_grouped_product,
    experts_recipe,
    grouped_fp8_operation,
)
from megatron.kernels.operation import check_kernel
from megatron.kernels.registry import Kernels
from megatron.layers.context import BuildContext
from megatron.layers.experts import GroupedLinear
from megatron.layers.linear import ColumnParallelLinear
from megatron.layers.providers import GROUPED_PROVIDERS, PROVIDERS
from tests.kit.solo import Gradients, one_rank_mesh

RECIPES = [
    Float8Recipe("hybrid", "tensorwise"),
    Float8Recipe("hybrid", "rowwise"),
    Float8Recipe("e4m3", "tensorwise"),
    Float8Recipe("e4m3", "blockwise"),
    Float8Recipe("e4m3", "mxfp8"),
]
SIZES = {"blockwise": (256, 384, 128)}
"""Tokens, inputs and outputs; otherwise 64, 96 and 32."""


def codes(dtype: torch.dtype) -> Tensor:
    """The finite non-negative numbers of a format, by code."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()]


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of a format; of two, the one with the even code."""
    values = codes(dtype)
    above = torch.searchsorted(values, x.abs().contiguous()).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    low, high = x.abs() - values[below], values[above] - x.abs()
    nearest = torch.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
    return values[nearest] * x.sign()


def rounded(x: Tensor, recipe: str, dtype: torch.dtype, along: int, weight: bool = False) -> Tensor:
    """``x`` with each block divided by its scale, rounded and multiplied again."""
    sizes = {"tensorwise": x.shape, "rowwise": (1, x.shape[along]), "blockwise": (128 if weight else 1, 128)}
    rows, columns = sizes.get(recipe, (1, 32))
    if along == 0 and recipe != "tensorwise":
        rows, columns = columns, rows
    out, largest = torch.empty_like(x), codes(dtype).max().item()
    for top, left in product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
        block = x[top : top + rows, left : left + columns]
        scale = block.abs().max().item() / largest
        if recipe == "mxfp8":
            scale = 2.0 ** math.ceil(math.log2(scale))
        out[top : top + rows, left : left + columns] = round_to(block / scale, dtype) * scale
    return out


def operands(recipe: Float8Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """``x``, ``W`` and ``dy`` whose rows and columns have different magnitudes."""
    generator = torch.Generator().manual_seed(0)
    tokens, inputs, outputs = SIZES.get(recipe.name, (64, 96, 32))
    shapes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    x, weight, dy = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for t in (x, weight, dy):
        t.mul_(torch.logspace(-2, 2, t.shape[0], 2.0).double()[:, None]).mul_(torch.logspace(-3, 3, t.shape[1], 2.0))
    return x, weight, dy


def outcome(recipe: Float8Recipe) -> list[Tensor]:
    """``y``, ``dx`` and ``dW`` of a layer."""
    x, weight, dy = operands(recipe)
    gradient = torch.zeros_like(weight)
    accumulator, kernels = GradAccumulator(), Kernels(fp8=Float8Kernel(recipe))
    accumulator.bind(Gradients({"layers.0.weight": gradient}))
    context = BuildContext(
        one_rank_mesh(),
        accumulator,
        torch.float64,
        kernels=kernels,
        fp8=Float8Layers(frozenset({0})),
        providers=PROVIDERS,
    ).block(0)
    layer = ColumnParallelLinear(context.declare({"weight": context.sharding.dense.split(weight.shape, 0, Init(0.0))}))
    layer.weight.data.copy_(weight)
    y = layer(x.requires_grad_())
    (dx,) = torch.autograd.grad(y, x, dy)
    return [y.detach(), dx, gradient]


def expected(recipe: Float8Recipe) -> list[Tensor]:
    x, weight, dy = operands(recipe)
    name, ahead, back = recipe.name, torch.float8_e4m3fn, torch.float8_e4m3fn
    if recipe.format == "hybrid":
        back = torch.float8_e5m2
    return [
        rounded(x, name, ahead, 1) @ rounded(weight, name, ahead, 1, True).t(),
        rounded(dy, name, back, 1) @ rounded(weight, name, ahead, 0, True),
        rounded(dy, name, back, 0).t() @ rounded(x, name, ahead, 0),
    ]


def distance(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


def agree(recipe: Float8Recipe) -> bool:
    return all(distance(found, right) < 1e-12 for found, right in zip(outcome(recipe), expected(recipe), strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.format}")
def test_products_of_rounded_values(recipe: Float8Recipe) -> None:
    assert agree(recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.format}")
def test_errors_match_the_formats(recipe: Float8Recipe) -> None:
    """3 bits of e4m3: 2^-4 at most, 2.6 % in the mean square; 2 bits of e5m2: twice that; the two factors add up.

    Numbers far below the largest of their block lose more, so rows and columns are of one magnitude here.
    """
    x, weight, dy = (t / t.abs().amax(1, keepdim=True) for t in operands(recipe))
    x, weight, dy = (t / t.abs().amax(0, keepdim=True) for t in (x, weight, dy))
    kernel, ahead, back = Float8Kernel(recipe), recipe.forward_dtype, recipe.gradient_dtype
    of = {t: kernel.quantize(t, recipe.block(along), dtype) for t, along, dtype in ((x, 1, ahead), (dy, 1, back))}
    w = {along: kernel.quantize(weight, recipe.block(along, True), ahead) for along in (0, 1)}
    one = 0.028
    assert distance(kernel.forward(of[x], w[1], x.dtype), x @ weight.t()) < math.hypot(one, one)
    gradient = math.hypot(one, one if back == ahead else 2 * one)
    assert distance(kernel.input_gradient(of[dy], w[0], dy.dtype), dy @ weight) < gradient
    target = torch.zeros_like(weight)
    kernel.weight_gradient(
        target, *(kernel.quantize(t, recipe.block(0), dtype, True) for t, dtype in ((x, ahead), (dy, back)))
    )
    assert distance(target, dy.t() @ x) < gradient
    kernel.weight_gradient(
        target, *(kernel.quantize(t, recipe.block(0), dtype, True) for t, dtype in ((x, ahead), (dy, back)))
    )
    assert distance(target, 2 * dy.t() @ x) < gradient


HYBRID, BLOCKS = Float8Recipe("hybrid", "rowwise"), Float8Recipe("e4m3", "blockwise")
true_scale = fp8.block_scale
FAULTS = {
    "gradients as e4m3": (HYBRID, Float8Recipe, "gradient_dtype", torch.float8_e4m3fn),
    "inputs as e5m2": (HYBRID, Float8Recipe, "forward_dtype", torch.float8_e5m2),
    "scales not transposed": (
        BLOCKS,
        Float8Tensor,
        "t",
        lambda q: Float8Tensor(q.data.t(), q.scale.reshape(*q.scale.shape[::-1])),
    ),
    "blocks of the other dimension": (HYBRID, Float8Recipe, "block", lambda r, along, weight=False: (None, 1)),
    "a scale for half of the values": (HYBRID, fp8, "block_scale", lambda *a: true_scale(*a) / 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, place, name, value = FAULTS[fault]
    assert agree(recipe)
    monkeypatch.setattr(place, name, value)
    assert not agree(recipe)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_numbers_that_are_not_finite_reach_the_product(name: str) -> None:
    recipe = Float8Recipe("e4m3", name)
    kernel, weight = Float8Kernel(recipe), torch.ones(128, 128)
    w = kernel.quantize(weight, recipe.block(1, True), recipe.forward_dtype)
    for value in (math.nan, math.inf):
        x = torch.ones(128, 128)
        x[5, 7] = value
        y = kernel.forward(kernel.quantize(x, recipe.block(1), recipe.forward_dtype), w, x.dtype)
        assert not y[5].isfinite().any()
    zeros = kernel.quantize(0 * weight, recipe.block(1), recipe.forward_dtype)
    assert kernel.forward(zeros, w, weight.dtype).eq(0).all()


def test_the_check_of_a_run_finds_a_wrong_product() -> None:
    """The reference passes in every dtype; a product with another scale does not."""
    for recipe in RECIPES:
        operation = fp8_operation(recipe)
        for dtype in (torch.float32, torch.bfloat16):
            assert check_kernel(operation, Float8Kernel(recipe), torch.device("cpu"), dtype) is None
        wrong = Float8Kernel(recipe, lambda a, b, dtype: 1.02 * fp8.emulated_product(a, b, dtype))
        assert check_kernel(operation, wrong, torch.device("cpu"), torch.bfloat16) is not None


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (200, 6)])
def test_swizzled_scales(rows: int, columns: int) -> None:
    """The offset of a scale in the cuBLAS documentation, 'Scaling factors layouts', for 1D block scaling."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randint(-20, 20, (rows, columns), generator=generator).float().exp2()
    flat, tiles = swizzled(scale).float(), -(-columns // 4)
    for row, column in product(range(rows), range(columns)):
        tile = row // 128 * tiles + column // 4
        offset = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert flat[offset] == scale[row, column]


def test_casts_are_kept_inside_only() -> None:
    casts, made = WeightCasts(), []

    def quantize() -> Float8Tensor:
        made.append(Float8Tensor(torch.zeros(1), torch.zeros(1)))
        return made[-1]

    for _ in range(2):
        with casts.kept():
            assert casts.get(("w", 0), quantize) is casts.get(("w", 0), quantize)
            assert casts.get(("w", 1), quantize) is made[-1]
    assert casts.get(("w", 0), quantize) is not casts.get(("w", 0), quantize)
    assert len(made) == 6


EXPERT_RECIPES = [recipe for recipe in RECIPES if recipe.name != "mxfp8"]
COUNTS = [0, 128, 1, 127]


def experts_outcome(recipe: Float8Recipe, operands: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """``y``, ``dx`` and ``dW`` of a grouped linear of four experts, whose last rows are padding."""
    x, weight, dy = operands
    gradient = torch.zeros_like(weight)
    accumulator = GradAccumulator()
    accumulator.bind(Gradients({"layers.0.weight": gradient}))
    context = BuildContext(
        one_rank_mesh(),
        accumulator,
        torch.float64,
        kernels=Kernels(fp8=Float8Kernel(recipe), grouped_fp8=TORCH_GROUPED_FP8),
        fp8=Float8Layers(frozenset({0})),
        grouped_providers=GROUPED_PROVIDERS,
    ).block(0)
    spec = context.sharding.expert.split((4, len(weight) // 4, weight.shape[1]), 1, Init(0.0))
    layer = GroupedLinear(context.declare({"weight": spec}))
    layer.weight.data.copy_(weight)
    padded = [torch.cat([t, torch.full_like(t[:3], torch.nan)]) for t in (x, dy)]
    rows = padded[0].requires_grad_()
    y = layer(rows, torch.tensor(COUNTS).cumsum(0, dtype=torch.int32))
    (dx,) = torch.autograd.grad(y, rows, padded[1])
    return [y.detach()[: len(x)], dx[: len(x)], gradient]


def expert_operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (256, 384), (4 * 128, 384), (256, 128)
    x, weight, dy = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, dy


def by_expert(x: Tensor, weight: Tensor, dy: Tensor) -> list[list[Tensor]]:
    split = zip(x.split(COUNTS), weight.chunk(4), dy.split(COUNTS), strict=True)
    return [[x_e, w_e, dy_e] for x_e, w_e, dy_e in split if len(x_e)]


@pytest.mark.parametrize("recipe", EXPERT_RECIPES, ids=lambda r: f"{r.name}-{r.format}")
def test_experts_multiply_rounded_values(recipe: Float8Recipe) -> None:
    """Of a row each; weight gradients of values that are not rounded."""
    name, ahead, back = experts_recipe(recipe).name, recipe.forward_dtype, recipe.gradient_dtype
    x, weight, dy = expert_operands()
    x *= torch.logspace(-2, 2, len(x), 2.0).double()[:, None]
    parts, zero = by_expert(x, weight, dy), torch.zeros(128, 384, dtype=torch.float64)
    expected = [
        torch.cat([rounded(x, name, ahead, 1) @ rounded(w, name, ahead, 1, True).t() for x, w, _ in parts]),
        torch.cat([rounded(dy, name, back, 1) @ rounded(w, name, ahead, 0, True) for _, w, dy in parts]),
        torch.cat([zero, *(dy.t() @ x for x, _, dy in parts)]),
    ]
    for found, right in zip(experts_outcome(recipe, (x, weight, dy)), expected, strict=True):
        assert distance(found, right) < 1e-12


@pytest.mark.parametrize("recipe", EXPERT_RECIPES, ids=lambda r: f"{r.name}-{r.format}")
def test_errors_of_experts_match_the_formats(recipe: Float8Recipe) -> None:
    """The bounds of dense linears, see above."""
    x, weight, dy = (t / t.abs().amax(1, keepdim=True) for t in expert_operands())
    y, dx, _ = experts_outcome(recipe, (x, weight, dy))
    parts, one = by_expert(x, weight, dy), 0.028
    back = one if recipe.gradient_dtype == recipe.forward_dtype else 2 * one
    assert distance(y, torch.cat([x @ w.t() for x, w, _ in parts])) < math.hypot(one, one)
    assert distance(dx, torch.cat([dy @ w for _, w, dy in parts])) < math.hypot(one, back)


@pytest.mark.parametrize("recipe", EXPERT_RECIPES, ids=lambda r: f"{r.name}-{r.format}")
def test_the_product_of_experts_passes_its_own_check(recipe: Float8Recipe) -> None:
    operation = grouped_fp8_operation(recipe)
    assert check_kernel(operation, TORCH_GROUPED_FP8, torch.device("cpu"), torch.float32) is None

    def unscaled(a: Float8Tensor, b: Float8Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        return emulated_grouped_product(a, b._replace(scale=b.scale.flip(0)), offsets, dtype)

    assert (
        check_kernel(operation, TORCH_GROUPED_FP8._replace(product=unscaled), torch.device("cpu"), torch.float32)
        is not None
    )
