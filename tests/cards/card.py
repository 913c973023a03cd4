"""What has a verification card: every family of `transformers` that is read and written, and kinds of long context."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.convert.huggingface.config import model_config_values
from tests.parity import hybrids, test_hf_convert
from tests.parity.families import EXPERT_BIAS, tensors_of, translate
from tests.parity.hybrids import HYBRIDS, from_hybrid
from tests.parity.test_hf import BY_NAME, GROUPED, LLAMA3, YARN, Case

FACTOR_OF_BIASES = 0.05
"""Larger biases make the same token the likeliest everywhere."""

WIDE = (EXPERT_BIAS, "A_log", "dt_bias", ".D")
"""Tensors that published models in bf16 have in fp32."""

LENGTH, WINDOW = 2048, 96
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
LONG = {"max_position_embeddings": LENGTH}
LONG_CASES = {
    case.name: case
    for case in (
        Case("llama-3.1-long", "Llama", GROUPED | LONG | {"rope_parameters": LLAMA3}),
        Case(
            "llama-yarn-long",
            "Llama",
            GROUPED | LONG | {"rope_parameters": YARN | {"original_max_position_embeddings": 512}},
        ),
        Case("qwen3-windows-long", "Qwen3", GROUPED | LONG | LAYERS | {"use_sliding_window": True}),
        Case("mistral-window-long", "Mistral", GROUPED | LONG | {"sliding_window": WINDOW}),
    )
}
"""Positions far beyond the first context length, and windows much shorter than the text."""


@dataclass(frozen=True)
class Card:
    """A small model of one architecture.

    Attributes:
        model_type: of its ``config.json``.
        kind: ``dense``, ``MoE``, ``MLA``, ``hybrid`` or ``long context``.
        case: its name in the tables of ``tests/parity``, or in `LONG_CASES`.
        presets: models of ``--preset`` that have this architecture.
        options: of the ``config.json``, in place of the case's.
    """

    model_type: str
    kind: str
    case: str
    presets: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_hybrid(self) -> bool:
        """True if the layers are those of a pattern."""
        return self.case in HYBRIDS

    @property
    def is_long(self) -> bool:
        """True if samples are longer than windows and the first context length."""
        return self.case in LONG_CASES

    @property
    def length(self) -> int:
        """Tokens of a sample that is compared with `transformers`."""
        return LENGTH if self.is_long else 16

    @cached_property
    def parity_case(self) -> Case:
        """The architecture, of a model that is no hybrid."""
        case = {**BY_NAME, **LONG_CASES}[self.case]
        return replace(case, theirs=case.theirs | dict(self.options))

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A model of `transformers` with random weights; what published models have in fp32 stays so."""
        if self.is_hybrid:
            model = hybrids.build(self.case, **self.options)
        else:
            model = test_hf_convert.build(self.parity_case, seed=1)
            with torch.no_grad():
                for name, value in model.named_parameters():
                    value.mul_(FACTOR_OF_BIASES if name.endswith("bias") else 1.0)
        wide = {name: value.clone() for name, value in tensors_of(model).items() if name.endswith(WIDE)}
        model.to(dtype)
        for name, kept in wide.items():
            module, _, last = name.rpartition(".")
            getattr(model.get_submodule(module), last).data = kept
        return model

    def save(self, folder: Path, model: nn.Module) -> Path:
        """Write a model as `transformers` does, as this card's ``model_type``."""
        model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
        set_model_type(folder, self.model_type)
        return folder

    @cached_property
    def config(self) -> ModelConfig:
        """Our options, as they are read from the ``config.json``."""
        config = hybrids.config_of(self.case, **self.options) if self.is_hybrid else self.parity_case.their_config()
        return ModelConfig(**model_config_values(config.to_dict() | {"model_type": self.model_type}, self.case))

    def translate(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Tensors of a model of `transformers` under our names, by the explicit mapping of the parity tests."""
        if self.is_hybrid:
            return from_hybrid(tensors, config)
        return translate(self.parity_case.family, tensors, config)


def set_model_type(folder: Path, model_type: str) -> None:
    """Give the ``config.json`` of a folder another ``model_type``."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}, indent=1))


def _of(kind: str, *cards: tuple[str, str, str] | tuple[str, str]) -> dict[str, Card]:
    """Cards by name; each is its ``model_type`` and case, and its presets if there are some."""
    return {name: Card(name, kind, case, tuple(" ".join(presets).split())) for name, case, *presets in cards}


CARDS = {
    **_of(
        "dense",
        ("gpt2", "gpt2", "gpt2-124m gpt2-355m gpt2-774m gpt2-1.5b gpt3-175b tiny-gpt2"),
        ("llama", "llama-gqa", "llama2-7b llama3-8b llama3-70b llama3-405b tiny-llama"),
        ("mistral", "mistral-window"),
        ("ministral", "ministral-layers"),
        ("qwen2", "qwen2-qkv-bias"),
        ("qwen3", "qwen3-qk-norm"),
        ("gpt_neox", "gpt-neox"),
        ("olmo2", "olmo2"),
        ("olmo3", "olmo3"),
        ("gemma2", "gemma2"),
        ("gemma3_text", "gemma3"),
        ("phi3", "phi3"),
        ("smollm3", "smollm3"),
        ("starcoder2", "starcoder2"),
        ("granite", "granite"),
    ),
    **_of(
        "MoE",
        ("mixtral", "mixtral", "mixtral-8x7b tiny-moe"),
        ("qwen2_moe", "qwen2-moe-layers"),
        ("qwen3_moe", "qwen3-moe", "qwen3-30b-a3b"),
        ("gpt_oss", "gpt-oss", "gpt-oss-20b"),
        ("olmoe", "olmoe"),
        ("granitemoe", "granite-moe"),
        ("glm4_moe", "glm4-moe"),
        ("dots1", "dots1"),
        ("ernie4_5_moe", "ernie-moe"),
    ),
    **_of(
        "MLA",
        ("deepseek_v2", "deepseek-v2-groups"),
        ("deepseek_v3", "deepseek-v3", "deepseek-v3 tiny-deepseek"),
        ("kimi_k2", "deepseek-v3"),
    ),
    **_of(
        "hybrid",
        ("mamba2", "mamba2"),
        ("nemotron_h", "nemotron-h", "nemotron-h-8b tiny-hybrid"),
        ("bamba", "bamba"),
        ("granitemoehybrid", "granite-4-experts", "granite-4.0-h-tiny"),
        ("qwen3_next", "qwen3-next", "qwen3-next-80b-a3b"),
        ("qwen3_5_text", "qwen3-5"),
        ("qwen3_5_moe_text", "qwen3-5-moe"),
    ),
    "nemotron-3": Card("nemotron_h", "hybrid", "nemotron-3", ("nemotron-3-nano-30b-a3b",)),
    **{case: Card(case.partition("-")[0].removesuffix("3.1"), "long context", case) for case in LONG_CASES},
}
"""By name: all families, and more for architectures that one of them does not show."""
