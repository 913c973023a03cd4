"""Rotary angles against complex arithmetic and the formulas of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.kernels.rotary import RotaryEmbedding, rotate
from tests.solo import tiny

HEAD_DIM, LENGTH = 16, 40
ROPE = {"position_embedding_type": "rope", "kv_channels": HEAD_DIM, "rotary_base": 100.0}


def rotary(config: ModelConfig, dtype: torch.dtype = torch.float64) -> RotaryEmbedding:
    return RotaryEmbedding(config, dtype, torch.device("cpu"))


def as_complex(x: Tensor, interleaved: bool) -> Tensor:
    """Pairs of channels as complex numbers."""
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.complex(real, imaginary)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_is_multiplication_by_a_complex_phase(interleaved: bool, percent: float) -> None:
    config = tiny(**ROPE, rotary_interleaved=interleaved, rotary_percent=percent)
    x = torch.randn(LENGTH, 2, 3, HEAD_DIM, dtype=torch.float64)
    width = int(HEAD_DIM * percent)
    turn = rotary(config)(LENGTH, None)
    y = rotate(x, turn.cos, turn.sin, interleaved)
    theta = torch.tensor([100.0 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    phase = torch.exp(1j * torch.arange(LENGTH).view(-1, 1, 1, 1) * theta)
    expected = as_complex(x[..., :width], interleaved) * phase
    torch.testing.assert_close(as_complex(y[..., :width], interleaved), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(y[..., width:], x[..., width:]), "channels beyond rotary_percent must not turn"


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_only(interleaved: bool) -> None:
    config = tiny(**ROPE, rotary_interleaved=interleaved)
    q, k = torch.randn(2, HEAD_DIM, dtype=torch.float64)
    turn = rotary(config)(LENGTH, None)
    turned = rotate(torch.stack((q, k)).expand(LENGTH, 1, 2, HEAD_DIM), turn.cos, turn.sin, interleaved)
    q_S, k_S = turned[:, 0].unbind(1)
    products = q_S @ k_S.t()
    for distance in range(LENGTH):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-10, atol=1e-10)


def test_explicit_positions_pick_rows() -> None:
    config = tiny(**ROPE)
    every = rotary(config)(LENGTH, None)
    positions = torch.tensor([[5, 0, 39], [1, 1, 7]])
    some = rotary(config)(3, positions)
    assert some.cos.shape == (3, 2, 1, HEAD_DIM)
    for sample in range(2):
        assert torch.equal(some.cos[:, sample], every.cos[positions[sample], 0])
        assert torch.equal(some.sin[:, sample], every.sin[positions[sample], 0])


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "rope_original_max_position": 256},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    ),
    "llama3-narrow": (
        {
            "use_rope_scaling": True,
            "rope_scaling_factor": 32.0,
            "rope_low_freq_factor": 2.0,
            "rope_high_freq_factor": 3.0,
            "rope_original_max_position": 64,
        },
        {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 64},
    ),
    "yarn": (
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 256},
        {"factor": 4.0, "original_max_position_embeddings": 256},
    ),
    "yarn-betas": (
        {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": 16.0,
            "yarn_original_max_position_embeddings": 512,
            "yarn_beta_fast": 8.0,
            "yarn_beta_slow": 2.0,
        },
        {"factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = SCALINGS[name]
    kind = name.split("-")[0]
    parameters = theirs | {"rope_type": kind, "rope_theta": 100.0}
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    plain = 100.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    assert not torch.allclose(frequencies, plain), "this scaling changes nothing: the case tests nothing"
    turn = rotary(tiny(**(ROPE | ours)))(LENGTH, None)
    angles = (torch.arange(LENGTH).view(-1, 1) * frequencies.double()).repeat(1, 2)
    torch.testing.assert_close(turn.cos[:, 0, 0], angles.cos() * magnitude, rtol=0, atol=1e-5)
    torch.testing.assert_close(turn.sin[:, 0, 0], angles.sin() * magnitude, rtol=0, atol=1e-5)


def test_angles_are_not_computed_in_bf16() -> None:
    """At position 4000 a bf16 angle would be off by whole turns."""
    config = tiny(**ROPE)
    positions = torch.tensor([[4000, 4001]])
    exact, rounded = (rotary(config, dtype)(2, positions).cos for dtype in (torch.float64, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert (exact - rounded.double()).abs().max() < 2**-8 + 1e-3


def test_yarn_needs_the_original_length() -> None:
    config = tiny(**(ROPE | {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}))
    with pytest.raises(ValueError, match="yarn_original_max_position_embeddings"):
        rotary(config)
