"""The providers of the products of linears."""

from __future__ import annotations

from collections.abc import Callable

from megatron.layers.adapters import LowRankProduct
from megatron.layers.context import BuildContext
from megatron.layers.fp8 import Float8Product
from megatron.layers.products import LinearProduct, PlainProduct
from megatron.layers.quantized import QuantizedProduct

PROVIDERS: tuple[Callable[[BuildContext, bool], LinearProduct | None], ...] = (
    Float8Product.of,
    LowRankProduct.of,
    QuantizedProduct.of,
    PlainProduct,
)
"""In the order in which they are asked; each takes the context, and True for a column-parallel layer."""


def build_product(context: BuildContext, column: bool) -> LinearProduct:
    """Build the products of the linear under construction, and its parameters, by the first provider that has them."""
    return next(product for provider in PROVIDERS if (product := provider(context, column)) is not None)
