"""The training step of torchtitan's models: its layers, its loss and its way of compiling.

They need a folder in PYTHONPATH, so that PyTorch and `transformers` stay as they are::

    pip install --target FOLDER datasets tensorboard tyro
    pip install --target FOLDER --no-deps torchtitan==0.2.2 torchdata
    rm -r FOLDER/{numpy,huggingface_hub,packaging}*  # newer than those of the environment
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_contestants import BETAS, CLIP, EPS
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig


def titan_step(config: RunConfig, micro_batches: int, compiled: bool, fp32: bool) -> Callable[[], None]:
    """Build a step with fused AdamW; weights and moments are bf16, or fp32 under autocast as torchtitan has it."""
    attention = import_module("torchtitan.models.attention")
    backends = torch.nn.attention.SDPBackend  # the second for values narrower than keys
    attention.ScaledDotProductAttentionWrapper.sdpa_backends = [backends.FLASH_ATTENTION, backends.EFFICIENT_ATTENTION]
    length = config.training.seq_length
    with torch.device("cuda"):
        torch.set_default_dtype(torch.float32 if fp32 else torch.bfloat16)
        model: Any = _model(config.model, length)
        torch.set_default_dtype(torch.float32)
        ids = torch.randint(0, config.model.vocab, (micro_batches, config.training.micro_batch_size, length + 1))
    loss = import_module("torchtitan.components.loss").cross_entropy_loss
    if compiled:
        loss = torch.compile(loss)
        if config.model.num_experts is None:
            for block in model.layers.values():
                block.compile(fullgraph=True)
        else:
            settings = import_module("torchtitan.config.job_config").Compile(enable=True)
            import_module("torchtitan.models.llama4.infra.parallelize").apply_compile(model, settings, False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, BETAS, EPS, weight_decay=0.1, fused=True)
    inputs, labels = ids[..., :-1].contiguous(), ids[..., 1:].contiguous()

    def step() -> None:
        for x, y in zip(inputs, labels):
            with torch.autocast("cuda", torch.bfloat16, enabled=fp32):
                mean = loss(model(x), y) / labels.numel()
            mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _model(config: ModelConfig, length: int) -> nn.Module:
    """Return torchtitan's Llama 3, Qwen3-MoE (also for Mixtral, which it does not have) or DeepSeek-V3."""
    if config.num_experts is None:
        llama = import_module("torchtitan.models.llama3")
        return llama.Transformer(replace(llama.llama3_args["8B"], n_layers=config.num_layers, max_seq_len=length))
    sizes = {
        "dim": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_attention_heads,
        "vocab_size": config.vocab,
        "moe_inter_dim": config.expert_ffn,
        "max_seq_len": length,
    }
    experts = {"num_experts": config.num_experts, "top_k": config.moe_router_topk}
    if not config.multi_latent_attention:
        qwen = import_module("torchtitan.models.qwen3")
        plain = replace(qwen.qwen3_args["30B-A3B"].moe_args, **experts, load_balance_coeff=None)
        heads = {"n_kv_heads": config.kv_groups, "head_dim": config.head_dim, "qk_norm": config.qk_layernorm}
        return qwen.Qwen3Model(replace(qwen.qwen3_args["30B-A3B"], **sizes, **heads, moe_args=plain))
    deepseek = import_module("torchtitan.models.deepseek_v3")
    arguments = replace(
        deepseek.deepseekv3_args["671B"],
        **sizes,
        n_dense_layers=config.dense_layers,
        q_lora_rank=config.q_lora_rank,
        attn_type="sdpa",
        attn_mask_type="causal",
    )
    arguments.moe_args, arguments.moe_impl = replace(arguments.moe_args, **experts), "standard"
    return deepseek.DeepSeekV3Model(arguments)
