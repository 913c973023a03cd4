"""Matrix products in FP8: quantisation with a scale per block, and products of quantised matrices.

The scale of a block maps its largest absolute value to the largest FP8 number (dynamic scaling: no history). A product
``A B^T`` sums over the columns of both operands, along which the blocks of every recipe but ``tensorwise`` extend. So a
matrix that enters products along both dimensions is quantised twice:

==========  ============================  ==========================  =========
recipe      block ``[M, K]`` of x and dy  block ``[N, K]`` of weights  scales
==========  ============================  ==========================  =========
tensorwise  the tensor                    the tensor                  fp32
rowwise     a row                         a row                       fp32
blockwise   1 x 128                       128 x 128                   fp32
mxfp8       1 x 32                        1 x 32                      powers of 2
==========  ============================  ==========================  =========

Sources: Micikevicius et al. 2022 (arXiv 2209.05433) for the formats, DeepSeek-V3 (arXiv 2412.19437, 3.3) for blockwise,
and the OCP Microscaling specification with the exponent rounded up (arXiv 2506.08027) for mxfp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.compile import compiled, compiler_missing
from megatron.kernels.operation import Candidate, KernelCheck, Operation

Block = tuple[int | None, int | None]
"""Rows and columns of a block; None for the whole dimension."""

BLOCKS: dict[str, tuple[Block, Block]] = {
    "tensorwise": ((None, None), (None, None)),
    "rowwise": ((1, None), (1, None)),
    "blockwise": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (1, 32)),
}
"""Blocks ``[rows, contraction]`` of activations and of weights by recipe."""

IN_BLOCKS = ("blockwise", "mxfp8")
"""Recipes with a scale for each block."""


@dataclass(frozen=True)
class Float8Recipe:
    """The values of ``--fp8-format``, ``--fp8-recipe`` and ``--fp8-wgrad``."""

    format: str
    name: str
    # Weight gradients too are products in FP8.
    wgrad: bool = True

    @property
    def forward_dtype(self) -> torch.dtype:
        """Of inputs and weights."""
        return torch.float8_e4m3fn

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of output gradients: ``hybrid`` has a wider range and fewer digits, which blocks with scales do not need."""
        return torch.float8_e5m2 if self.format == "hybrid" and self.name not in IN_BLOCKS else torch.float8_e4m3fn

    def block(self, along: int, weight: bool = False) -> Block:
        """Return the block of a matrix that enters a product which sums over dimension ``along``."""
        rows, contraction = BLOCKS[self.name][weight]
        return (rows, contraction) if along == 1 else (contraction, rows)


class Float8Tensor(NamedTuple):
    """A quantised matrix: the value of an element is ``data`` times the scale of its block."""

    # [R, C] in FP8; its strides are free.
    data: Tensor
    # One per block [r, c], fp32 (fp64 for matrices in fp64).
    scale: Tensor

    def t(self) -> Float8Tensor:
        """Return the transpose."""
        return Float8Tensor(self.data.t(), self.scale.t())

    def dequantize(self) -> Tensor:
        """Return the values in the dtype of the scale."""
        blocks = _blocks(self.data.to(self.scale.dtype), self.scale.shape)
        return (blocks * self.scale[:, None, :, None]).flatten(2).flatten(0, 1)


class WeightCasts:
    """Quantised weights. They are kept only inside :meth:`kept`, where weights must not change."""

    def __init__(self) -> None:
        self._casts: dict[tuple[str, int], Float8Tensor] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Quantise every weight at most once inside."""
        self._casts = {}
        try:
            yield
        finally:
            self._casts = None

    def get(self, key: tuple[str, int], quantize: Callable[[], Float8Tensor]) -> Float8Tensor:
        """Return a weight, by its name and the dimension over which a product sums."""
        if self._casts is None:
            return quantize()
        if key not in self._casts:
            self._casts[key] = quantize()
        return self._casts[key]


@dataclass(frozen=True)
class Float8Layers:
    """The blocks of a model whose linears are in FP8."""

    # Global indices.
    layers: frozenset[int] = frozenset()
    # Their quantised weights.
    casts: WeightCasts = field(default_factory=WeightCasts)


def block_scale(x: Tensor, block: Block, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Return the scales of the blocks of ``x`` ``[R, C]``, which divide it. They grow with the largest values."""
    shape = [size // (block_size or size) for size, block_size in zip(x.shape, block)]
    largest = _blocks(x, shape).abs().amax((1, 3)).to(torch.promote_types(x.dtype, torch.float32))
    scale = (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:  # the next one, so that nothing overflows
        mantissa, exponent = torch.frexp(scale)
        scale = 0 * scale + torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())  # keeps nan and inf
    return scale


def quantize(
    x: Tensor, block: Block, dtype: torch.dtype, power_of_two: bool, transposed: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``x`` divided by its scales in FP8, with contiguous columns if ``transposed``, else rows; and the scales.

    Scales are passed if they are known.
    """
    scale = block_scale(x, block, dtype, power_of_two) if scale is None else scale
    largest = torch.finfo(dtype).max
    scaled = _blocks(x.to(scale.dtype), scale.shape) / scale[:, None, :, None]
    data = scaled.flatten(2).flatten(0, 1).clamp(-largest, largest).to(dtype)
    if block[0] == 1:  # as cuBLAS reads the scales of 1 x 128
        scale = scale.t().contiguous().t()
    return (data.t().contiguous().t() if transposed else data.contiguous()), scale


def emulated_product(a: Float8Tensor, b: Float8Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``A B^T`` of the dequantised operands, summed in the dtype of the scales."""
    return a.dequantize().matmul(b.dequantize().t()).to(dtype)


def _blocks(x: Tensor, shape: Sequence[int]) -> Tensor:
    """View ``[R, C]`` as ``[r, R / r, c, C / c]``."""
    return x.unflatten(1, (shape[1], -1)).unflatten(0, (shape[0], -1))


@dataclass(frozen=True)
class Float8Kernel:
    """Quantisation and the products of a linear layer. Weights are ``[O, I]``, ``x`` ``[T, I]``, ``dy`` ``[T, O]``."""

    recipe: Float8Recipe
    # (a [M, K], b [N, K], dtype) -> A B^T
    product: Callable[[Float8Tensor, Float8Tensor, torch.dtype], Tensor] = emulated_product
    block_scale: Callable[..., Tensor] = block_scale
    quantize_blocks: Callable[..., tuple[Tensor, Tensor]] = quantize

    def scale(self, x: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """Return the scales of the blocks of ``x``; those of a larger block are the maximum of those of its parts."""
        return self.block_scale(x, block, dtype, self.recipe.name == "mxfp8")

    def quantize(
        self, x: Tensor, block: Block, dtype: torch.dtype, transposed: bool = False, scale: Tensor | None = None
    ) -> Float8Tensor:
        """Quantise ``x`` ``[R, C]``, with its scales if they are known; ``transposed`` makes columns contiguous."""
        return Float8Tensor(*self.quantize_blocks(x, block, dtype, self.recipe.name == "mxfp8", transposed, scale))

    def forward(self, x: Float8Tensor, weight: Float8Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``x W^T``; both operands are quantised along I."""
        return self.product(x, weight, dtype)

    def input_gradient(self, dy: Float8Tensor, weight: Float8Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``dy W``; both operands are quantised along O."""
        return self.product(dy, weight.t(), dtype)

    def weight_gradient(self, target: Tensor, x: Float8Tensor, dy: Float8Tensor, beta: float = 1.0) -> None:
        """Compute ``target = beta * target + dy^T x``, with beta 0 or 1; both operands are quantised along T."""
        product = self.product(dy.t(), x.t(), target.dtype)
        target.add_(product) if beta else target.copy_(product)


def _scaled_mm(recipe: Float8Recipe) -> Callable[[Float8Tensor, Float8Tensor, torch.dtype], Tensor]:
    """Return the product of the tensor cores. The layouts of scales are those of the cuBLAS documentation."""
    kinds, swizzle = F.ScalingType, None
    types = {
        "tensorwise": (kinds.TensorWise, kinds.TensorWise),
        "rowwise": (kinds.RowWise, kinds.RowWise),
        "blockwise": (kinds.BlockWise1x128, kinds.BlockWise128x128),
        "mxfp8": (kinds.BlockWise1x32, kinds.BlockWise1x32),
    }[recipe.name]
    if recipe.name == "mxfp8":
        swizzle = F.SwizzleType.SWIZZLE_32_4_4

    def product(a: Float8Tensor, b: Float8Tensor, dtype: torch.dtype) -> Tensor:
        a_scale, b_scale, b_type = a.scale, b.scale, types[1]
        if recipe.name == "blockwise":
            a_scale = a_scale.t().contiguous().t()
            if len(b_scale) < len(b.data):  # 128 x 128: rows padded to 16 bytes, or the results are wrong
                missing = -b_scale.shape[1] % 4
                b_scale = (F.pad(b_scale, (0, missing)) if missing else b_scale.contiguous()).t()
            else:
                b_scale, b_type = b_scale.t().contiguous().t(), types[0]
        elif recipe.name == "mxfp8":
            a_scale, b_scale = swizzled(a_scale), swizzled(b_scale)
        else:
            a_scale, b_scale = (scale.flatten().unsqueeze(1) for scale in (a_scale, b_scale))
        left, right = a.data.contiguous(), b.data.contiguous().t()
        y: Tensor = F.scaled_mm(left, right, a_scale, types[0], b_scale, b_type, swizzle, swizzle, output_dtype=dtype)
        return y

    return product


def swizzled(scale: Tensor) -> Tensor:
    """Return powers of 2 ``[M, K / 32]`` as E8M0 in cuBLAS's order: tiles of 128 x 4, rows 32 apart side by side."""
    rows, cols = scale.shape
    padded = F.pad(scale, (0, -cols % 4, 0, -rows % 128), value=1.0).to(torch.float8_e8m0fnu)
    tiles = padded.view(torch.uint8).unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)


def _missing(recipe: Float8Recipe, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a device cannot multiply in FP8, or None."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "FP8 products need --bf16 on a GPU"
    if not hasattr(F, "scaled_mm"):
        return f"FP8 products need torch 2.10, and this is {torch.__version__}"
    capability = torch.cuda.get_device_capability(device)
    if recipe.name == "blockwise":
        cuda = tuple(map(int, str(torch.version.cuda).split(".")))
        suitable, needs = capability[0] == 9 and cuda >= (12, 9), "a Hopper GPU (9.0) and CUDA 12.9"
    elif recipe.name == "mxfp8":
        suitable, needs = capability >= (10, 0), "a Blackwell GPU (10.0)"
    else:
        suitable, needs = capability >= (8, 9), "a GPU of compute capability 8.9"
    version = ".".join(map(str, capability))
    return None if suitable else f"it needs {needs}; this is {version} with CUDA {torch.version.cuda}"


def _checks(recipe: Float8Recipe) -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(256, n, generator=generator, dtype=torch.float64) for n in (384, 128))
    weight = torch.randn(128, 384, generator=generator, dtype=torch.float64)

    def run(f: Float8Kernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        x, dy, weight = t

        def quantize(x: Tensor, along: int, dtype: torch.dtype, is_weight: bool = False) -> Float8Tensor:
            return f.quantize(x, recipe.block(along, is_weight), dtype, along == 0)

        ahead, back = recipe.forward_dtype, recipe.gradient_dtype
        target = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        f.weight_gradient(target, quantize(x, 0, ahead), quantize(dy, 0, back))
        return (
            f.forward(quantize(x, 1, ahead), quantize(weight, 1, ahead, True), x.dtype),
            f.input_gradient(quantize(dy, 1, back), quantize(weight, 0, ahead, True), x.dtype),
            target.to(x.dtype),  # tensor cores sum FP8 products with fewer digits than fp32 has
        )

    return [KernelCheck(run, (x, dy, weight), differentiated=False)]


def fp8_operation(recipe: Float8Recipe) -> Operation:
    """Return the implementations of a recipe: tensor cores, or products of the same quantised values in fp32."""

    def missing(device: torch.device, dtype: torch.dtype) -> str | None:
        return _missing(recipe, device, dtype)

    def compiled_missing(device: torch.device, dtype: torch.dtype) -> str | None:
        return _missing(recipe, device, dtype) or compiler_missing(device, dtype)

    def make_compiled() -> Float8Kernel:
        return Float8Kernel(recipe, _scaled_mm(recipe), compiled(block_scale)(), compiled(quantize)())

    candidates: dict[str, Candidate] = {
        "compiled": Candidate(make_compiled, compiled_missing),
        "scaled_mm": Candidate(lambda: Float8Kernel(recipe, _scaled_mm(recipe)), missing),
        "torch": Candidate(lambda: Float8Kernel(recipe)),
    }
    return Operation(candidates, partial(_checks, recipe))
