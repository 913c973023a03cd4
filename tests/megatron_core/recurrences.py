"""Stand-ins for mamba-ssm and flash-linear-attention, which need a GPU: what Megatron-LM calls of them, step by step.

The recurrences are written as in their papers, arXiv 2405.21060 and 2412.06464. `install` must run before Megatron-LM
is imported.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedRMSNorm(nn.Module):
    """RMSNorm of each group of channels, after the gate if there is one."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, norm_before_gate: bool, **options: Any) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight, self.eps, self.group = nn.Parameter(torch.ones(hidden_size)), eps, group_size

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalized values."""
        x = x if z is None else x * F.silu(z)
        return F.rms_norm(x.unflatten(-1, (-1, self.group)), (self.group,), eps=self.eps).flatten(-2) * self.weight


def convolved(x_BLC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return SiLU of the causal convolution of each channel."""
    width = weight_CW.shape[1]
    padded = F.pad(x_BLC, (0, 0, width - 1, 0))
    y = sum(padded[:, w : w + x_BLC.shape[1]] * weight_CW[:, w] for w in range(width))
    return F.silu(y if bias_C is None else y + bias_C)


def scan(
    x_BLNP: Tensor, dt_BLN: Tensor, A_N: Tensor, B_BLGS: Tensor, C_BLGS: Tensor, chunk: int, D: Tensor, **options: Any
) -> Tensor:
    """Return ``y_t = C_t h_t + D x_t`` of the state ``h_t = exp(dt_t A) h_t-1 + dt_t B_t x_t``."""
    assert (options.pop("dt_softplus"), options.pop("return_final_states"), options.pop("z")) == (True, False, None)
    dt = F.softplus(dt_BLN + options.pop("dt_bias"))
    B, C = (t.repeat_interleave(len(A_N) // t.shape[2], 2) for t in (B_BLGS, C_BLGS))
    state, outputs = x_BLNP.new_zeros(1), []
    for t in range(x_BLNP.shape[1]):
        added = dt[:, t, :, None, None] * x_BLNP[:, t].unsqueeze(3) * B[:, t].unsqueeze(2)
        state = (dt[:, t] * A_N).exp()[..., None, None] * state + added
        outputs.append((state * C[:, t].unsqueeze(2)).sum(3))
    return torch.stack(outputs, 1) + D[:, None] * x_BLNP


def split_scan(
    zxbcdt_BLR: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor,
    dt_bias: Tensor,
    A_N: Tensor,
    D: Tensor,
    chunk_size: int,
    **options: Any,
) -> Tensor:
    """Return the scan of what the convolution makes of x, B and C, times SiLU of z."""
    assert (options["activation"], options["norm_before_gate"], options["seq_idx"]) == ("silu", False, None)
    heads, channels, groups = len(A_N), options["headdim"], options["ngroups"]
    width = heads * channels
    z, xbc, dt = zxbcdt_BLR.split((width, len(weight_CW), heads), -1)
    size = (len(weight_CW) - width) // 2
    x, B, C = convolved(xbc, weight_CW, bias_C).split((width, size, size), -1)
    x, B, C = x.unflatten(-1, (heads, channels)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    rest: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": True, "return_final_states": False, "z": None}
    return scan(x, dt, A_N, B, C, chunk_size, D, **rest).flatten(-2) * F.silu(z)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Return ``q_t S_t`` of the state ``S_t = a_t S + b_t k_t (v_t - k_t a_t S)``, ``a = exp(g)``, of ``[B, L, N]``."""
    assert (options["use_qk_l2norm_in_kernel"], options["initial_state"]) == (False, None)
    state, outputs = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        wrong = v[:, t] - (k[:, t].unsqueeze(3) * state).sum(2)
        state = state + (beta[:, t].unsqueeze(2) * k[:, t]).unsqueeze(3) * wrong.unsqueeze(2)
        outputs.append((q[:, t].unsqueeze(3) * state).sum(2) * q.shape[3] ** -0.5)
    return torch.stack(outputs, 1), None


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Return the convolution in the form of flash-linear-attention."""
    return convolved(x, weight, bias), None


def unit(x: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


NAMES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"__version__": "2.2.4"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": scan,
        "mamba_split_conv1d_scan_combined": split_scan,
    },
    "fla": {},
    "fla.modules": {},
    "fla.modules.convolution": {"causal_conv1d": convolution},
    "fla.modules.l2norm": {"l2norm": unit},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule},
}


def install() -> None:
    """Make Megatron-LM import the stand-ins."""
    for name, content in NAMES.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content, __path__=[])
        sys.modules[name] = module
