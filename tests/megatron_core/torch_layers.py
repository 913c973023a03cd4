"""Layers of PyTorch for the models that the local layers of megatron-core refuse: ``loop.py`` has them in its specs.

Each stands where a GPU has a class of Transformer Engine, or a kernel of grouped_gemm. All else of a model is
megatron-core's own. They run in its environment, and import nothing of this package.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import LNImpl
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import grouped_gemm_util, moe_layer, moe_utils
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn


class TorchNorm(nn.Module):
    """PyTorch's LayerNorm or RMSNorm, with weights around 1 or 0, also on a part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        self.eps, self.kind, self.around_one = eps, config.normalization, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.full((hidden_size,), 0.0 if self.around_one else 1.0))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if self.kind == "LayerNorm" else None
        mark_sequence_parallel(self, config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized values."""
        weight = self.weight + 1 if self.around_one else self.weight
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)


def mark_sequence_parallel(module: nn.Module, config: Any) -> None:
    """Let megatron-core sum the gradients of a layer over TP, whose ranks each have a part of the sequence."""
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel


class ReplicatedLinear(nn.Module):
    """A linear layer that each TP rank has whole."""

    def __init__(
        self, input_size: int, output_size: int, config: Any, init_method: Callable[[Tensor], Any], **options: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        init_method(self.weight)
        self.bias = nn.Parameter(torch.zeros(output_size)) if options["bias"] else None
        mark_sequence_parallel(self, config)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product, and no bias to add."""
        return F.linear(x, self.weight, self.bias), None


class LatentDotProduct(DotProductAttention):
    """Its attention, for values with other channels than the keys."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class SummedLatentDotProduct(LatentDotProduct):
    """The same, with the gradient of the rotary key of all heads, which release 0.16.1 does not sum over TP."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the mixed values."""
        own, rotary = key.split((self.config.qk_head_dim, self.config.qk_pos_emb_head_dim), -1)
        rotary = rotary * 1.0
        rotary.register_hook(summed_over_heads)
        return super().forward(query, torch.cat((own, rotary), -1), value, *args, **options)


def summed_over_heads(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient over the TP ranks."""
    whole = gradient.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
    return whole


class GatheredDotProduct(nn.Module):
    """PyTorch's attention to the keys and values of all context-parallel ranks, each with its two chunks."""

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **options: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the mixed values of ``[length, batch, heads, channels]`` as ``[length, batch, all channels]``."""
        group = parallel_state.get_context_parallel_group()
        chunks = torch.arange(len(query) * group.size()).chunk(2 * group.size())
        held = [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(group.size())]
        seen = held[group.rank()][:, None] >= torch.cat(held)
        key, value = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class CopiedRowParallelLinear(RowParallelLinear):
    """Its linear layer; the product is a copy, to which a bias can be added in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the product, and the bias to add."""
        product, bias = super().forward(x)
        return product.clone(), bias


class GroupedExperts(GroupedMLP):
    """Its experts in one product, which otherwise accept bf16 alone, as their kernel for GPUs does."""

    def __init__(self, num_local_experts: int, config: Any, **options: Any) -> None:
        super().__init__(num_local_experts, config, **options)
        self.config = copy.copy(config)
        self.config.bf16 = True  # which nothing but its check reads; the weights are those of the run


def grouped_product(x: Tensor, weights: Tensor, sizes: Tensor, trans_b: bool) -> Tensor:
    """Return the product of each expert's rows, one after the other."""
    return torch.cat([rows @ weight for rows, weight in zip(x.split(sizes.tolist()), weights, strict=True)])


def install() -> None:
    """Give megatron-core the layers that no spec has."""
    moe_utils.te_general_gemm = None  # release 0.16.1 names it, but defines it with Transformer Engine alone
    moe_layer.HAVE_TE, moe_layer.TELinear = True, ReplicatedLinear  # projections to the space of the experts
    # It is True there without Transformer Engine, whose classes are None.
    multi_latent_attention.HAVE_TE, multi_latent_attention.TELinear = False, ReplicatedLinear
    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = SimpleNamespace(gmm=grouped_product)


def replaced(spec: Any, config: Any) -> Any:
    """Return a spec with these layers where its own would refuse the configuration."""
    if spec is LNImpl and (config.layernorm_zero_centered_gamma or config.sequence_parallel):
        return TorchNorm
    if spec is DotProductAttention and config.context_parallel_size > 1:
        return GatheredDotProduct
    if spec is DotProductAttention and config.multi_latent_attention:
        return LatentDotProduct
    if spec is RowParallelLinear and config.num_moe_experts and config.add_bias_linear:
        return CopiedRowParallelLinear
    if spec is GroupedMLP:
        return GroupedExperts
    if isinstance(spec, ModuleSpec):
        parts = {name: replaced(getattr(spec, name), config) for name in ("module", "submodules")}
        return dataclasses.replace(spec, **parts)
    if isinstance(spec, list):
        return [replaced(each, config) for each in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {field.name: replaced(getattr(spec, field.name), config) for field in dataclasses.fields(spec)}
        if isinstance(spec, MLASelfAttentionSubmodules) and config.sequence_parallel:
            parts |= dict.fromkeys(("linear_q_down_proj", "linear_kv_down_proj"), ReplicatedLinear)
        return type(spec)(**parts)
    return spec
