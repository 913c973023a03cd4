"""Products of frozen weights that are kept as bytes (:mod:`megatron.kernels.quantized`)."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from megatron.kernels.quantized import dequantize
from megatron.layers.context import BuildContext
from megatron.layers.products import PlainProduct


class QuantizedProduct(PlainProduct):
    """The products with a quantised weight, which each pass converts to the dtype of the activations."""

    def __init__(self, context: BuildContext, column: bool, precision: str) -> None:
        super().__init__(context, column)
        self.precision, self.dtype = precision, context.dtype

    @classmethod
    def of(cls, context: BuildContext, column: bool) -> Self | None:
        """Return the products of the layer under construction, or None if its weight is not declared as bytes."""
        precision = context.spec("weight").precision
        return None if precision is None else cls(context, column, precision)

    def dense(self, weight: Tensor) -> Tensor:
        """Return the weight ``[O, I]``."""
        return dequantize(weight, self.precision, self.dtype)
