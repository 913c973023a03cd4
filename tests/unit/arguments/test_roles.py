"""The roles of options against the objects that they make: shapes of tensors, and the losses of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments.compatibility import compare_configs
from megatron.arguments.sources import resolve, to_dict
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.option import Role
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.training import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.layers.context import BuildContext
from megatron.model.gpt import build_gpt
from megatron.training.build import build_trainer
from megatron.training.components.average import AverageWeights
from megatron.training.step import train_step
from tests.kit.runs import tiny_run
from tests.kit.solo import one_rank_mesh, tiny

BASES = {
    "learned": tiny(ffn_hidden_size=64),
    "rope": tiny(
        ffn_hidden_size=64,
        position_embedding_type="rope",
        add_bias_linear=False,
        normalization="RMSNorm",
        activation="swiglu",
    ),
    "adapters": tiny(hidden_size=64, ffn_hidden_size=128, lora_rank=2),
    "latent": tiny(
        ffn_hidden_size=64,
        multi_latent_attention=True,
        q_lora_rank=12,
        qk_layernorm=True,
        position_embedding_type="none",
        normalization="RMSNorm",
    ),
    "mamba": tiny(ffn_hidden_size=64, token_mixers=("mamba2", "attention"), mamba_head_dim=8, mamba_num_groups=4),
}
BASES["delta"] = tiny(ffn_hidden_size=64, token_mixers=("gated-delta-net", "attention"))
OTHER_VALUES: dict[str, Any] = {
    "hidden_size": 128,
    "num_query_groups": 2,
    "vocab_size": 110,
    "yarn_original_max_position_embeddings": 8,
    "attention_pattern": "local:4,global",
    "no_rope_freq": "2",
    "window_attn_skip_freq": "2",
    "moe_layer_freq": "2",
    "linear_attention_freq": "2",
    "hybrid_layer_pattern": "*-*-*",
    "mtp_hybrid_override_pattern": "*",
    "lora_target": ("linear_qkv",),
    "moe_aux_loss_coeff": (0.25,),
}


def other_values(name: str, value: Any) -> list[Any]:
    setting = SETTINGS[name]
    if setting.option.choices:
        choices = [(choice,) if setting.many else choice for choice in setting.option.choices]
        return [choice for choice in choices if choice != value]
    if setting.scalar is bool:
        return [not value]
    if name in OTHER_VALUES:
        return [OTHER_VALUES[name]]
    return [(value or 0.5) / 2 if setting.scalar is float else 2 * (value or 8)]


@cache
def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    context = BuildContext(one_rank_mesh(), GradAccumulator(), device=torch.device("meta"))
    specs = build_gpt(model, TrainingConfig(), context).specs
    return {name: (spec.dense or spec).view for name, spec in specs.items()}


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.group == "model"])
@pytest.mark.parametrize("base", BASES)
def test_a_change_of_shape_is_refused_for_any_use_of_the_weights(base: str, name: str) -> None:
    before = replace(BASES[base], yarn_original_max_position_embeddings=16)
    saved = to_dict(resolve(RunConfig(model=before), 1))
    for value in other_values(name, getattr(before, name)):
        if before.multi_latent_attention and value == ("latent-attention",):
            continue  # another name for the same
        if name == "mtp_num_layers" and before.position_embedding_type == "learned_absolute":
            continue  # refused
        if name == "experimental_attention_variant":
            continue  # refused without layers that have it
        after = replace(before, **{name: value})
        try:
            expected = shapes(before) != shapes(after)
        except (ValueError, AssertionError) as error:
            pytest.fail(f"{name}={value!r} is no model ({error}): add a row for it to OTHER_VALUES")
        refused = compare_configs(saved, resolve(RunConfig(model=after), 1), "weights-only").problems != ()
        assert refused == expected, f"role of {name}={value!r}, or its same_shapes, in {base}"


ROPE = "--position-embedding-type rope --rotary-base 10"  # waves of 6 to 35 tokens, in samples of 8
SCALED = f"{ROPE} --use-rope-scaling --rope-original-max-position 16"
YARN = "--position-embedding-type yarn --rotary-base 10 --yarn-original-max-position-embeddings 16 --yarn-beta-fast 2"
LATENT = (
    "--multi-latent-attention --rotary-base 10 --yarn-original-max-position-embeddings 16 --rotary-scaling-factor 4"
)
MAMBA = "--token-mixers mamba2 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4"
CONTEXT = {
    "mamba": MAMBA,
    "rotary_scaling": YARN,
    "rope_type": LATENT,
    "mscale": LATENT,
    "q_lora": LATENT,
    "kv_lora": LATENT,
    "qk_head": LATENT,
    "qk_pos": LATENT,
    "v_head": LATENT,
    "rotary_base_local": f"{ROPE} --window-size 3",
    "window_attn": "--window-size 3",
    "no_rope": ROPE,
    "rotary": ROPE,
    "use_rope": ROPE,
    "rope": SCALED,
    "yarn": f"{YARN} --rotary-scaling-factor 4",
    "activation_func": "--swiglu",
    "glu": "--swiglu",
    "lr_wsd": "--lr-decay-style WSD --lr-wsd-decay-iters 4",
    "lr_warmup_init": "--lr-warmup-iters 3",
    "lr_scaling": "--lr-base-batch-size 2",
    "lr_base": "--lr-scaling sqrt --lr-base-batch-size 2",
    "weight_decay_incr": "--start-weight-decay 0.5 --end-weight-decay 1 --weight-decay-incr-style linear",
    "start_weight": "--weight-decay-incr-style linear --start-weight-decay 0.5 --end-weight-decay 1",
    "end_weight": "--weight-decay-incr-style linear --start-weight-decay 0.5 --end-weight-decay 1",
    "sgd": "--optimizer sgd",
    "lion": "--optimizer lion",
    "muon": "--optimizer muon",
    "lora_alpha": "--lora-rank 2 --pretrained-checkpoint NOT_READ",
    "frozen": "--lora-rank 2 --pretrained-checkpoint NOT_READ --hidden-size 64 --ffn-hidden-size 64",
    "moe_router_bias": "--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1",
    "moe_router_group": "--num-experts 8 --disable-bias-linear --moe-router-num-groups 4 --moe-router-group-topk 1",
    "moe_token_drop": "--num-experts 4 --disable-bias-linear --moe-expert-capacity-factor 0.5",
    "mtp": f"{ROPE} --mtp-num-layers 1",
    "moe": "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.5",
    "decoupled_min": "--decoupled-lr 1e-3",
    "spike_window": "--skip-spikes 0.01 --spike-window 4",
    "recompute_method": "--recompute-granularity full",
    "recompute_num": "--recompute-granularity full",
    "recompute_modules": "--recompute-granularity selective",
    "eval": "--eval-iters 1 --eval-interval 2",
    "min_offloaded": "--cpu-offloading-num-layers 1",
    "optimizer_offload": "--optimizer-cpu-offload",
}
"""Flags that give effect to the options whose names start so."""

CHANGED = {
    "mamba_dt_max": "0.01",
    "on_spike": "log",
    "mamba_norm_groups": "1",
    "rope_type": "rope",
    "rotary_base_local": "5",
    "rotary_seq_len_interpolation_factor": "2",
    "use_rope_scaling": "--rope-original-max-position 16",
    "rotary_scaling_factor": "4",
    "yarn_beta_fast": "1.2",
    "window_size": "3",
    "softmax_type": "off-by-one",
    "seq_length": "4",
    "rampup_batch_size": "2 2 8",
    "schedule_tokens": "0 96 0 96",
    "step_batch_size_schedule": "0:2 16:4",
    "train_samples": "40 --set train_iters=null",
    "min_lr": "1e-3",
    "lr_wsd_decay_iters": "5",
    "lr_wsd_decay_samples": "20 --set lr_wsd_decay_iters=null",
    "lr_warmup_iters": "2",
    "lr_warmup_init": "1e-3",
    "weight_decay_incr_style": "cosine",
    "muon_fp32_matmul_prec": "high",
    "moe_router_load_balancing_type": "none",
    "decoupled_min_lr": "1e-4",
    "lr_factors": "layers.0.*=0.5",
    "weight_decay_factors": "*norm*=1",
    "skip_spikes": "0.01 --spike-window 2",
    "micro_batch_size": "2",
    "make_vocab_size_divisible_by": "7",
    "ddp_bucket_size": "1000",
    "on_nonfinite": "skip",
    "recompute_granularity": "full",
    "moe_router_num_groups": "2 --moe-router-group-topk 1",
    "moe_router_group_topk": "2",
    "moe_router_group_score_topk": "1",
    "recompute_method": "block",
    "recompute_num_layers": "2",
    "cpu_offloading_num_layers": "1",
    "min_offloaded_tensor_size": "1",
    "optimizer_offload_fraction": "0.5",
    "recompute_modules": "mlp core_attn",
    "cross_entropy_chunk_size": "5",
    "mlp_chunk_size": "3",
    "eval_interval": "3",
    "eval_iters": "2",
    "log_interval": "7",
}
"""Other values of options, where those of `other_values` do not do."""

LEFT_OUT = {
    "they need several ranks, as the tests of layouts have": """
        tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size cp_comm_type
        hierarchical_context_parallel_sizes
        num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage pipeline_schedule
        microbatch_group_size_per_virtual_pipeline_stage pipeline_model_parallel_layout
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        expert_model_parallel_size expert_tensor_parallel_size
        use_distributed_optimizer data_parallel_sharding_strategy num_distributed_optimizer_instances
        overlap_param_gather reshard_after_forward param_gather_prefetch grad_reduce_in_bf16 grad_compression
        tp_comm_overlap_method distributed_backend distributed_timeout_minutes device""",
    "rounding may change": """
        params_dtype exp_avg_dtype exp_avg_sq_dtype store_param_remainders kernels
        fp8_format fp8_recipe fp8_wgrad first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis""",
    "they need other replicas, as tests/distributed/test_diloco.py has": """
        diloco_sync_interval diloco_replicas diloco_outer_lr diloco_outer_momentum diloco_fragments diloco_delay
        diloco_mix diloco_int8""",
    "they need other replicas, as tests/distributed/test_elastic_replicas.py has": "elastic_replicas elastic_batch",
    "they need a GPU": "cuda_graph reduced_precision_reduction",
    "they need files": """
        data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path split mock_data
        data_mixture data_mixture_stages log_loss_per_source
        chat_data_path valid_chat_data_path chat_template bad_samples num_epochs
        multiple_validation_sets validation_set_names
        packing fim_data fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix
        fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token fim_eod_token
        reset_position_ids reset_attention_mask reset_attention_pattern eod_mask_loss eod_id
        tokenizer_type tokenizer_model vocab_file merge_file tiktoken_pattern tiktoken_num_special_tokens""",
    "they need pairs or a teacher, as tests/parity/test_preference.py has": """
        dpo_loss_type dpo_beta dpo_label_smoothing
        distillation_top_k distillation_temperature distillation_label_weight""",
    "it is over before the first checkpoint": "init_method_std",
    "others are plugins'": "objective plugin plugin_dataset",
}
UNTRIED = {name for names in LEFT_OUT.values() for name in names.split()}
TRIED = sorted(
    name
    for name, setting in SETTINGS.items()
    if setting.option.role not in (Role.SHAPE, Role.START) and name not in UNTRIED
)


@cache
def losses(flags: str) -> tuple[float, ...]:
    """Of the first four steps, and the sum of all weights after them, of their average where there is one."""
    config = tiny_run(Path("unused"), f"--fp64 {flags}")
    config = replace(config, checkpoint=replace(config.checkpoint, pretrained_checkpoint=None))  # all weights are drawn
    trainer = build_trainer(config, 0, 1)
    found = []
    for _ in range(4):
        schedule, consumed = trainer.schedule, trainer.consumed_samples
        size, batches = trainer.reader.next_batch_size, trainer.next_batches()
        found.append(train_step(trainer, batches, schedule.rates(consumed)).loss.item())
        trainer.progress.iteration, trainer.progress.consumed_samples = trainer.iteration + 1, consumed + size
    averages = (c.average for c in trainer.components if isinstance(c, AverageWeights))
    held = [p for p in trainer.params.values() if p.requires_grad] + [x for each in averages for x in each.values()]
    return (*found, sum(p.abs().sum().item() for p in held))


@pytest.mark.parametrize("name", TRIED)
def test_an_option_changes_the_losses_unless_it_is_free(name: str) -> None:
    setting = SETTINGS[name]
    context = next((flags for prefix, flags in CONTEXT.items() if name.startswith(prefix)), "")
    value = setting.spell(other_values(name, setting.default)[0])
    changed = f"{setting.flag} {CHANGED[name]}" if name in CHANGED else value
    try:
        before, after = losses(context), losses(f"{context} {changed}")
    except UserError as error:
        pytest.fail(f"CHANGED lacks another value for {name}, or LEFT_OUT the name: {error}")
    same = all(abs(a - b) <= 1e-10 * abs(a) for a, b in zip(before, after))
    found = "has the role"
    if same:
        found = "changes nothing: CHANGED lacks another value, CONTEXT the flags that give it effect, or its role is"
    assert same == (setting.option.role is Role.FREE), f"{changed} {found} {setting.option.role.value} {before, after}"
