"""The providers of the products of linears, beside that of plain weights."""

from __future__ import annotations

from megatron.layers.adapters import LowRankProduct, QuantizedProduct
from megatron.layers.context import ProductProvider
from megatron.layers.fp8 import Float8Product

PROVIDERS: tuple[ProductProvider, ...] = (Float8Product.of, LowRankProduct.of, QuantizedProduct.of)
"""In the order in which they are asked."""
