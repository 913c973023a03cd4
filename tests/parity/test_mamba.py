"""Mamba-2 against that of Bamba and of Nemotron-H in transformers, in fp64: logits, every gradient, greedy text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.inference.generate import SamplingParams, generate
from tests.kit.solo import Solo, tiny
from tests.parity.families import assert_equal_to_twin, copy_into, everything_in_double

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, CHANNELS, STATE = 2, 8, 8, 6
MIXER = {
    "linear_in.weight": "in_proj.weight",
    "linear_in.bias": "in_proj.bias",
    "conv.weight": "conv1d.weight",
    "conv.bias": "conv1d.bias",
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "D": "D",
    "norm.weight": "norm.weight",
    "linear_out.weight": "out_proj.weight",
    "linear_out.bias": "out_proj.bias",
}


def ours(**changes: Any) -> ModelConfig:
    return tiny(
        **{
            "token_mixers": ("mamba2",),
            "num_layers": LAYERS,
            "ffn_hidden_size": 48,
            "mamba_state_dim": STATE,
            "mamba_head_dim": CHANNELS,
            "mamba_num_groups": 2,
            "mamba_chunk_size": 5,
            "position_embedding_type": "none",
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
        }
        | changes
    )


def bamba(config: ModelConfig) -> Any:
    """Its norm divides by the RMS of the whole width."""
    limits = (config.mamba_dt_min, config.mamba_dt_max or float("inf"))
    made = transformers.BambaConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=LAYERS,
        intermediate_size=config.ffn,
        vocab_size=config.vocab,
        num_attention_heads=4,
        num_key_value_heads=4,
        mamba_n_heads=HEADS,
        mamba_d_head=CHANNELS,
        mamba_n_groups=config.mamba_num_groups,
        mamba_d_state=STATE,
        mamba_d_conv=config.mamba_conv_kernel_dim,
        mamba_chunk_size=7,
        mamba_conv_bias=config.mamba_conv_bias,
        mamba_proj_bias=config.mamba_proj_bias,
        time_step_limit=limits,
        use_cache=False,
        pad_token_id=None,
    )
    return transformers.BambaForCausalLM(made)


def nemotron(config: ModelConfig) -> Any:
    """Its norm is by groups, and its layers are a mixer each."""
    made = transformers.NemotronHConfig(
        hidden_size=config.hidden_size,
        layers_block_type=["linear_attention", "mlp"] * LAYERS,
        intermediate_size=config.ffn,
        vocab_size=config.vocab,
        mamba_num_heads=HEADS,
        mamba_head_dim=CHANNELS,
        n_groups=config.mamba_num_groups,
        ssm_state_size=STATE,
        chunk_size=7,
        conv_kernel=config.mamba_conv_kernel_dim,
        time_step_min=config.mamba_dt_min,
        use_cache=False,
        pad_token_id=None,
    )
    return transformers.NemotronHForCausalLM(made)


def translate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of either model under our names."""
    split = any(".mixer." in name for name in tensors)
    of_model = {
        "embedding.word_embeddings.weight": "model.embeddings.weight" if split else "model.embed_tokens.weight",
        "final_layernorm.weight": "model.norm_f.weight" if split else "model.final_layernorm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    found = {name: tensors[theirs] for name, theirs in of_model.items()}
    for i in range(LAYERS):
        mamba, mlp = (f"model.layers.{2 * i + part}" if split else f"model.layers.{i}" for part in (0, 1))
        mixer = f"{mamba}.{'mixer' if split else 'mamba'}"
        for name, theirs in MIXER.items():
            if (tensor := tensors.get(f"{mixer}.{theirs}")) is not None:
                found[f"layers.{i}.mamba.{name}"] = tensor.squeeze(1) if name == "conv.weight" else tensor
        found[f"layers.{i}.pre_mamba_layernorm.weight"] = tensors[
            f"{mamba}.{'norm' if split else 'input_layernorm'}.weight"
        ]
        norm, inner = ("norm", "mixer") if split else ("pre_ff_layernorm", "feed_forward")
        found[f"layers.{i}.pre_mlp_layernorm.weight"] = tensors[f"{mlp}.{norm}.weight"]
        names = ("up_proj",) if split else ("gate_proj", "up_proj")
        found[f"layers.{i}.mlp.linear_fc1.weight"] = torch.cat([tensors[f"{mlp}.{inner}.{n}.weight"] for n in names])
        found[f"layers.{i}.mlp.linear_fc2.weight"] = tensors[f"{mlp}.{inner}.down_proj.weight"]
    return found


WHOLE: dict[str, Any] = {"mamba_norm_groups": 1}
CASES: dict[str, tuple[Any, ModelConfig]] = {
    "bamba": (bamba, ours(**WHOLE)),
    "bamba, biases, limits": (bamba, ours(**WHOLE, mamba_proj_bias=True, mamba_dt_min=0.5, mamba_dt_max=1.5)),
    "bamba, wide convolution without a bias": (bamba, ours(**WHOLE, mamba_conv_bias=False, mamba_conv_kernel_dim=6)),
    "nemotron-h": (nemotron, ours(activation="relu2", mamba_dt_min=0.001)),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name: str) -> None:
    theirs, config = CASES[name]
    assert_equal_to_twin(config, lambda: theirs(config), translate)


@pytest.mark.parametrize("name", ["bamba", "nemotron-h"])
def test_greedy_text(name: str) -> None:
    """From our states; theirs reads the text again for every token."""
    theirs, config = CASES[name]
    torch.manual_seed(0)
    solo = Solo.build(config)
    with everything_in_double():
        twin = theirs(config).double().eval()
        for parameter in twin.parameters():
            nn.init.normal_(parameter, std=0.2)
        copy_into(solo.params, translate(dict(twin.named_parameters())))
        expected = twin.generate(
            torch.tensor([[5, 6, 7, 8, 9]]), max_new_tokens=11, do_sample=False, use_cache=False, eos_token_id=None
        )
    assert generate(solo.chunk, [[5, 6, 7, 8, 9]], 11, SamplingParams(0.0)) == [expected[0, 5:].tolist()]
