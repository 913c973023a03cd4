"""One-process training equals `transformers` with torch's AdamW: loss, every gradient, twenty steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.training import TrainingConfig
from megatron.convert.huggingface.config import model_config_values
from megatron.convert.huggingface.families import MODEL_FAMILIES
from megatron.convert.huggingface.keys import ConfigKey
from megatron.distributed.micro_batch import MicroBatch
from tests.kit.solo import Solo, random_batch
from tests.parity.families import copy_into, everything_in_double, randomise, tensors_of, translate

transformers = pytest.importorskip("transformers")

EPSILON = 1e-3  # large enough for a norm that ignores it to be seen
ADAM_EPSILON = 1e-6  # a key bias has a gradient of rounding noise alone; a smaller epsilon would let Adam follow it
CLIP = 0.5
IGNORED = -100  # the label `transformers` leaves out


EXPERT_COUNTS = {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"}


@dataclass(frozen=True)
class Case:
    """One architecture of transformers. Ours is read from its config.json."""

    name: str
    family: str
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)  # options that the config.json does not have

    def config(self) -> ModelConfig:
        given = self.their_config().to_dict()
        if given["model_type"] not in MODEL_FAMILIES:
            known = {key.theirs for key in MODEL_FAMILIES["llama"].keys if isinstance(key, ConfigKey)}
            given = {name: value for name, value in given.items() if name in known} | {"model_type": "llama"}
        return ModelConfig(**model_config_values(given, self.name) | self.ours)

    def their_config(self) -> Any:
        if self.family == "GPT2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "layer_norm_epsilon": EPSILON}
            sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        else:
            sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
            sizes |= {"intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False}
            eps = {"StableLm": "layer_norm_eps", "GPTNeoX": "layer_norm_eps", "Starcoder2": "norm_epsilon"}
            sizes |= {eps.get(self.family, "rms_norm_eps"): EPSILON, "pad_token_id": None}
            if self.family in ("Qwen3", "Qwen3Moe", "GptOss", "Ministral"):
                sizes |= {"head_dim": 8}
            if self.family == "GPTNeoX":
                del sizes["num_key_value_heads"]
        if self.has_experts:
            sizes |= {"experts_implementation": "eager"}
        return getattr(transformers, f"{self.family}Config")(
            **({"vocab_size": 101, "attn_implementation": "sdpa", "use_cache": False} | sizes | self.theirs)
        )

    def reference(self) -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(self.their_config())
        return model.train()

    @property
    def has_experts(self) -> bool:
        return bool(EXPERT_COUNTS & self.theirs.keys())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 8.0, "beta_slow": 1.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
GROUPED = {"num_key_value_heads": 2}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
OF_KINDS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
}
ONE_BASE = OF_KINDS | {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
EAGER = {"attn_implementation": "eager"}
GEMMA = LAYERS | GROUPED | EAGER | {"hidden_size": 64, "head_dim": 8}  # whose square root is exact in all data types
GEMMA |= {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
FACTORS = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 1.5}
DEEPER = {"num_hidden_layers": 3}
SMALL_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 12}
SHARED = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED |= {"shared_expert_intermediate_size": 20}
WINDOWED = DEEPER | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
ROUTED = GROUPED | {"n_routed_experts": 6, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2}
ROUTED |= {"norm_topk_prob": True, "routed_scaling_factor": 1.7, "moe_intermediate_size": 12, "n_shared_experts": 2}
ROUTED |= {"first_k_dense_replace": 1}
UNGROUPED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
NO_HEADS = {"num_mtp_layers": 0}
LATENT = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "q_lora_rank": 20, "kv_lora_rank": 12}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
MSCALES = {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.6}, "max_position_embeddings": 256}
LIMITED = {"topk_method": "group_limited_greedy", "norm_topk_prob": False}
GREEDY = {"num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
ERNIE = GROUPED | {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 12, "moe_num_shared_experts": 2}

CASES = [
    Case("gpt2", "GPT2"),
    Case("gpt2-untied-gelu", "GPT2", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    Case("gpt2-relu2", "GPT2", {"activation_function": "relu2"}),
    Case("llama", "Llama"),
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case("llama-gqa", "Llama", GROUPED),
    Case("llama-mqa-wide", "Llama", {"num_key_value_heads": 1, "head_dim": 12}),
    Case("llama-interleaved", "Llama", GROUPED, {"rotary_interleaved": True}),
    Case("llama-biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama3-scaling", "Llama", {"rope_parameters": LLAMA3}),
    Case("llama-yarn", "Llama", {"rope_parameters": YARN, "max_position_embeddings": 256}),
    Case("qwen2-qkv-bias", "Qwen2"),
    Case("qwen3-qk-norm", "Qwen3", GROUPED),
    Case("mixtral", "Mixtral", GROUPED | {"num_local_experts": 4}),
    Case("mixtral-three-of-five", "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    Case(
        "qwen3-moe",
        "Qwen3Moe",
        GROUPED | SMALL_EXPERTS | {"num_local_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    Case("qwen3-moe-shares-of-all", "Qwen3Moe", SMALL_EXPERTS | {"norm_topk_prob": False}),
    Case("qwen3-moe-dense-layers", "Qwen3Moe", SMALL_EXPERTS | DEEPER | {"mlp_only_layers": [0, 2]}),
    Case("qwen2-moe", "Qwen2Moe", SHARED | {"qkv_bias": False}),
    Case("qwen2-moe-layers", "Qwen2Moe", SHARED | WINDOWED | {"mlp_only_layers": [0], "norm_topk_prob": True}),
    Case("olmoe", "Olmoe", GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    Case("glm4-moe", "Glm4Moe", ROUTED | NO_HEADS | {"use_qk_norm": True, "attention_bias": True}),
    Case(
        "glm4-moe-one-group", "Glm4Moe", ROUTED | NO_HEADS | UNGROUPED | {"head_dim": 12, "routed_scaling_factor": 1.0}
    ),
    Case("dots1", "Dots1", ROUTED | UNGROUPED | LAYERS),
    Case("ernie-moe", "Ernie4_5_Moe", ERNIE | {"moe_layer_interval": 2} | DEEPER),
    Case("ernie-moe-no-shared-expert", "Ernie4_5_Moe", ERNIE | {"moe_num_shared_experts": 0, "moe_k": 2}),
    Case("deepseek-v3", "DeepseekV3", ROUTED | NO_HEADS | LATENT | MSCALES),
    Case("deepseek-v3-whole-queries", "DeepseekV3", ROUTED | NO_HEADS | LATENT | UNGROUPED | {"q_lora_rank": None}),
    Case("deepseek-v2", "DeepseekV2", ROUTED | LATENT | MSCALES | GREEDY),
    Case("deepseek-v2-groups", "DeepseekV2", ROUTED | LATENT | LIMITED),
    Case("deepseek-v3-narrow-groups", "DeepseekV3", ROUTED | NO_HEADS | LATENT | {"num_experts_per_tok": 3}),
    Case("granite-moe", "GraniteMoe", GROUPED | FACTORS | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    Case(
        "gpt-oss",
        "GptOss",
        GROUPED
        | EAGER
        | LAYERS
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"truncate": False}, "max_position_embeddings": 256},
    ),
    Case("gpt-neox", "GPTNeoX", HALF),
    Case("olmo2", "Olmo2", GROUPED),
    Case("olmo3", "Olmo3", LAYERS | GROUPED | {"rope_parameters": ONE_BASE}),
    Case("gemma2", "Gemma2", GEMMA | {"attn_logit_softcapping": 2.0}),
    Case("gemma3", "Gemma3Text", GEMMA | {"rope_parameters": OF_KINDS}),
    Case("phi3", "Phi3", GROUPED | EAGER | HALF | {"sliding_window": 5}),
    Case("smollm3", "SmolLM3", {"no_rope_layers": [1, 0]}),
    Case("granite", "Granite", FACTORS),
    Case("starcoder2", "Starcoder2", GROUPED | {"sliding_window": 5}),
    Case("mistral-window", "Mistral", {"sliding_window": 5}),
    Case("qwen3-layers", "Qwen3", GROUPED | LAYERS | {"use_sliding_window": True}),
    Case(
        "ministral-layers", "Ministral", {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    Case(
        "stablelm-partial-rotary",
        "StableLm",
        HALF | {"use_qkv_bias": True},
        {"normalization": "LayerNorm", "norm_epsilon": EPSILON, "rotary_percent": 0.5, "add_qkv_bias": True},
    ),
]
BY_NAME = {case.name: case for case in CASES}


@dataclass
class Pair:
    """The same model twice, with the same weights."""

    case: Case
    config: ModelConfig
    ours: Solo
    theirs: nn.Module
    dtype: torch.dtype

    @classmethod
    def build(cls, case: Case, dtype: torch.dtype) -> Pair:
        torch.manual_seed(1)
        config = case.config()
        training = TrainingConfig(cross_entropy_chunk_size=7)
        optimizer = OptimizerConfig(clip_grad=CLIP, adam_eps=ADAM_EPSILON)
        ours = Solo.build(config, dtype, training, optimizer)
        with precision(dtype):
            theirs = case.reference().to(dtype)
        randomise(theirs)
        pair = cls(case, config, ours, theirs, dtype)
        copy_into(ours.params, pair.their_weights())
        return pair

    def their_weights(self) -> dict[str, Tensor]:
        return translate(self.case.family, tensors_of(self.theirs), self.config)

    def their_grads(self) -> dict[str, Tensor]:
        grads = {n: p.grad for n, p in self.theirs.named_parameters() if p.requires_grad}
        missing = [n for n, g in grads.items() if g is None]
        assert not missing, f"the reference has no gradient for {missing}"
        return translate(self.case.family, grads, self.config)  # type: ignore[arg-type]

    def their_backward(self, batches: list[MicroBatch]) -> Tensor:
        """The whole batch at once; the mean over its unmasked labels."""
        tokens, labels, mask = (torch.cat([getattr(b, k) for b in batches]) for k in ("tokens", "labels", "loss_mask"))
        labels = labels.where(mask > 0, IGNORED)
        self.theirs.zero_grad()
        with precision(self.dtype):
            loss = self.theirs(input_ids=tokens, labels=labels, shift_labels=labels).loss
            loss.backward()
        return loss.detach()


def precision(dtype: torch.dtype) -> AbstractContextManager[None]:
    """`transformers` computing in ``dtype`` throughout."""
    return everything_in_double() if dtype == torch.float64 else nullcontext()


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within ``tolerance`` of its reference, relative to its norm; padding of ours exactly zero."""
    assert set(ours) == set(theirs)
    errors = {n: relative(ours[n][: len(ref)], ref) for n, ref in theirs.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= tolerance, f"{worst} is off by {errors[worst]:.1e}"
    assert not any(ours[n][len(ref) :].any() for n, ref in theirs.items()), "vocabulary padding is not zero"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", BY_NAME)
def test_loss_and_every_gradient(name: str, dtype: torch.dtype, tolerance: float) -> None:
    pair = Pair.build(BY_NAME[name], dtype)
    batches = [random_batch(pair.config, seed=seed) for seed in (1, 2)]
    expected = pair.their_backward(batches)
    loss = pair.ours.backward(batches)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert_close(pair.ours.buckets.grads, pair.their_grads(), tolerance)


def torch_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Unfused, so that it shares no kernel with ours; weight decay for matrices only."""
    decays = {p: p.dim() > 1 and not name.endswith("bias") for name, p in model.named_parameters()}
    matrices, others = ([p for p, decayed in decays.items() if decayed == kind] for kind in (True, False))
    betas = (config.adam_beta1, config.adam_beta2)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_eps, foreach=False, fused=False)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *[(name, torch.float64, 1e-9) for name in BY_NAME],
        ("gpt2", torch.float32, 1e-4),
        ("llama-gqa", torch.float32, 1e-4),
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_steps_of_adamw(steps: int, name: str, dtype: torch.dtype, tolerance: float) -> None:
    pair = Pair.build(BY_NAME[name], dtype)
    reference = torch_adamw(pair.theirs, pair.ours.optimizer.config)
    for step in range(steps):
        batches = [random_batch(pair.config, seed=2 * step + i) for i in range(2)]
        lr = 1e-3 * (1 + step % 3)
        expected = pair.their_backward(batches)
        norm = nn.utils.clip_grad_norm_(pair.theirs.parameters(), CLIP)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        loss, outcome = pair.ours.step(batches, lr)
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
        assert outcome.grad_norm.item() == pytest.approx(norm.item(), rel=tolerance)
        assert norm > CLIP, "clipping had nothing to do"
    assert_close({n: p.detach() for n, p in pair.ours.params.items()}, pair.their_weights(), tolerance)
