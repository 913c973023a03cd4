"""The providers of the products of linears and of grouped linears, beside those of plain weights."""

from __future__ import annotations

from megatron.layers.adapters import LowRankProduct, QuantizedProduct
from megatron.layers.context import GroupedProvider, ProductProvider
from megatron.layers.fp8 import Float8Product
from megatron.layers.fp8_experts import Float8Experts

PROVIDERS: tuple[ProductProvider, ...] = (Float8Product.of, LowRankProduct.of, QuantizedProduct.of)
"""In the order in which they are asked."""

GROUPED_PROVIDERS: tuple[GroupedProvider, ...] = (Float8Experts.of,)
"""The same, of grouped linears."""
