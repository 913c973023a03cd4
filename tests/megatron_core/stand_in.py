"""Stand-in for Transformer Engine, which needs a GPU to be built: its modules in PyTorch, on one rank, without FP8.

Parameters, ``_extra_state`` and results match Transformer Engine; Megatron-LM's own classes for them, and its
specs, are used as they are. `install` must run before Megatron-LM is imported.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stateful(nn.Module):
    """A module with a state of its own, which is empty without FP8."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        """Return the empty state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept the empty state alone."""
        if state is not None and state.numel():
            raise ValueError("not empty")

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Have none."""


class Norm(Stateful):
    """A norm over the last dimension."""

    kind = ""

    def __init__(self, normalized_shape: int, eps: float, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized values."""
        return normalize(x, self.weight, getattr(self, "bias", None), self.eps, self.kind)


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """Compute a norm."""
    if kind == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class LayerNorm(Norm):
    """LayerNorm."""

    kind = "LayerNorm"


class RMSNorm(Norm):
    """RMSNorm."""

    kind = "RMSNorm"


class Linear(Stateful):
    """A linear layer; with ``return_bias`` the caller adds the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.return_bias, self.parallel_mode = return_bias, parallel_mode
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        init_method(self.weight)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Return the product, and the bias if the caller adds it."""
        if self.return_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias)


class LayerNormLinear(Linear):
    """A linear layer after a norm."""

    def __init__(self, in_features: int, *args: Any, eps: float, normalization: str, **options: Any) -> None:
        super().__init__(in_features, *args, **options)
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features)) if normalization == "LayerNorm" else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Return the product of the normalized values."""
        return super().forward(normalize(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.normalization))


class GroupedLinear(Stateful):
    """The linear layers of some experts."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, init_method: Callable[[Tensor], Any], **options: Any
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self.tp_size = num_gemms, False, 1
        self.in_features, self.out_features = in_features, out_features
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features))
            init_method(weight)
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
        """Return the product of each expert's rows."""
        parts = x.split(list(m_splits))
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])


class DotProductAttention(Stateful):
    """Causal attention of ``[length, batch, heads, channels]``, with a window of earlier tokens or without."""

    def __init__(
        self, softmax_scale: float | None = None, window_size: tuple[int, int] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.scale, self.qkv_format, self.num_splits = softmax_scale, "sbhd", None
        self.earlier = -1 if window_size is None else window_size[0]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the mixed values."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        if self.earlier >= 0:
            seen = seen.triu(-self.earlier)
        mixed = F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class NoFp8:
    """There is no FP8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False."""
        return False


def install() -> None:
    """Make ``import transformer_engine`` import the stand-in."""
    te, pytorch, rest = (types.ModuleType(f"transformer_engine{name}") for name in ("", ".pytorch", ".pytorch.rest"))
    modules = (Linear, LayerNormLinear, LayerNorm, RMSNorm, GroupedLinear, DotProductAttention)
    vars(pytorch).update({module.__name__: module for module in modules})
    pytorch.distributed = types.SimpleNamespace(CudaRNGStatesTracker=type("Tracker", (), {}))
    recipe = types.SimpleNamespace(DelayedScaling=type("DelayedScaling", (), {}))
    vars(te).update(__version__="1.12.0", __path__=[], pytorch=pytorch, common=types.SimpleNamespace(recipe=recipe))
    pytorch.__path__ = []
    rest.FP8GlobalStateManager, rest.Float8Tensor = NoFp8, type("Float8Tensor", (Tensor,), {})
    rest.fp8_autocast = rest.fp8_model_init = contextlib.nullcontext
    rest.cast_to_fp8 = None
    sys.modules |= {te.__name__: te, pytorch.__name__: pytorch}
    sys.modules |= {f"{pytorch.__name__}.{name}": rest for name in ("fp8", "float8_tensor", "cpp_extensions")}
