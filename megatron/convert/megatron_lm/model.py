"""Models of Megatron-LM: the arguments of a run as values of our options, the names of tensors as ours, and back."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron.arguments.megatron_flags import apply_foreign_values, pattern_of_ratios
from megatron.arguments.sources import LENGTH_OPTIONS, Values, build_config, to_dict
from megatron.config.attention_pattern import CAUSAL
from megatron.config.errors import Problem, UserError
from megatron.config.latent_attention import LATENT_ORIGINAL_LENGTH
from megatron.config.layer_pattern import CUT, DEPTH, LETTERS, without_pattern
from megatron.config.model import ModelConfig
from megatron.config.option import Role
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.convert.huggingface.config import check_model_config, words
from megatron.convert.huggingface.keys import effective_options, resolved
from megatron.convert.megatron_lm.names import GATED_DELTA_NET, HYBRID_MIXERS, has_mixer, is_hybrid
from megatron.convert.megatron_lm.pickles import Record

MOMENT_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
WRITTEN_GROUPS = ("model", "precision", "training", "optimizer", "data")

Arguments = Mapping[str, Any]
"""Attributes of the run's ``args``."""

MAMBA_NORM_EPSILON = 1e-5
"""Of the norm inside of Mamba-2 there, whatever the others have."""

HYBRID_SPECS = (
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
)
"""Specs of HybridModel's layers in Python, the present one and its older name: they say what a pattern says anyway."""

OFF = """qk_l2_norm use_mup apply_residual_connection_post_layernorm
layernorm_zero_centered_gamma moe_apply_probs_on_input enable_hyper_connections use_legacy_models
head_wise_attn_gate geglu reglu mtp_hsm"""
UNSET = """moe_input_jitter_eps moe_router_force_biased
rotary_base_per_layer heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
moe_expert_rank_capacity_factor moe_mlp_glu_interleave_size
moe_shared_expert_glu_interleave_size mrope_section"""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(OFF.split(), (False, None)),
    **dict.fromkeys(UNSET.split(), (None, 0)),
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "none"),
    "spec": (None, [], *map(list, HYBRID_SPECS)),
}
"""Arguments that change what a model computes, and the values that change nothing."""

ACTIVATIONS = {"swiglu": "swiglu", "quick_geglu": "quick_geglu", "squared_relu": "relu2"}
"""Arguments that select an activation -> the activation here."""

YARN = {
    "yarn_original_max_position_embeddings": LATENT_ORIGINAL_LENGTH,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
}
"""Arguments of YaRN, with the values that None means, and that latent attention has always."""

WRITTEN = {*YARN} | words(
    """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
    make_vocab_size_divisible_by untie_embeddings_and_output_weights position_embedding_type max_position_embeddings
    rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq use_rope_scaling
    rope_scaling_factor window_size softmax_type normalization apply_layernorm_1p norm_epsilon qk_layernorm activation
    activation_func_clamp_value glu_linear_offset add_bias_linear add_qkv_bias hidden_dropout attention_dropout
    init_method_std num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_latent_size moe_router_topk moe_router_score_function moe_router_pre_softmax
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_num_groups moe_router_group_topk
    moe_router_topk_scaling_factor moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype
    moe_router_force_load_balancing moe_expert_capacity_factor moe_token_drop_policy
    mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
    window_attn_skip_freq attention_output_gate
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
    rotary_scaling_factor mscale mscale_all_dim
    hybrid_layer_pattern mtp_hybrid_override_pattern token_mixers
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
    experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads"""
)
"""Options of a model that Megatron-LM has: the others must have no effect."""

REPLACED = words(
    "num_layers moe_layer_freq mtp_num_layers mtp_hybrid_override_pattern linear_attention_freq token_mixers"
)
"""Arguments that have no effect beside a pattern of layers, or are part of ours."""

BY_LAYER = ("no_rope_freq", "window_attn_skip_freq", "moe_layer_freq", "linear_attention_freq")
"""Options that select layers: a number or a list of 0 and 1 in arguments, and a text here."""

LISTS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
"""Options that are no list in arguments if they have one value."""

UNUSED = {"moe_layer_freq": "1", "mtp_num_layers": 0, "moe_expert_capacity_factor": -1.0}
"""Values of arguments that are as good as none."""

NOT_COMPARED = ("data_parallel_sharding_strategy", "recompute_modules", "vocab_size", "make_vocab_size_divisible_by")
"""Options of the same name as an argument that is unused in most runs, or has another meaning."""


def model_arguments(args: Arguments) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that the arguments of a run determine, except the vocabulary size.

    Raises:
        ValueError: naming the arguments that change what the model computes, and have no counterpart here.
    """
    if args.get("num_experts") is None:
        args = {name: value for name, value in args.items() if not name.startswith("moe_")}
    refused = [f"{name} {_text(args[name])}" for name, usual in NEUTRAL.items() if args.get(name) not in (*usual, None)]
    if args.get("position_embedding_type") == "yarn" and not {*YARN} <= args.keys():  # it had other settings
        refused.append("position_embedding_type 'yarn' of an earlier release")
    if refused:
        raise ValueError(f"{', '.join(refused)}: the model here has no such option")
    pattern = layer_pattern(args)
    if pattern is not None:
        args = {name: value for name, value in args.items() if name not in REPLACED}
        args["hybrid_layer_pattern"] = pattern
        if args.get("experimental_attention_variant") in ("gdn", "gated_delta_net"):  # G is that anyway
            del args["experimental_attention_variant"]
    found = {name: args[name] for name in SETTINGS if SETTINGS[name].group == "model" and args.get(name) is not None}
    found["norm_epsilon"] = args.get("layernorm_epsilon", args.get("norm_epsilon"))
    found["activation"] = _activation(args)
    found |= _positions(args)
    if not args.get("group_query_attention"):
        found["num_query_groups"] = None
    if args.get("add_bias_linear"):
        found.pop("add_qkv_bias", None)  # it has one anyway
    window = args.get("window_size")
    if window is not None:
        found["window_size"] = ",".join(map(str, window))
    found |= {name: _layers(args[name]) for name in BY_LAYER if args.get(name) is not None}
    found |= {name: None for name, usual in UNUSED.items() if found.get(name) == usual}
    return {name: value for name, value in found.items() if value is not None and name not in NOT_COMPARED}


def layer_pattern(args: Arguments) -> str | None:
    """Return the layers of a hybrid model, and those of its further tokens; None for a model of equal blocks."""
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if not pattern and args.get("is_hybrid_model"):
        ratios = (args.get(f"hybrid_{kind}_ratio") or 0.0 for kind in ("attention", "mlp"))
        pattern = pattern_of_ratios(args["num_layers"], *ratios)
    if not pattern:
        return None
    further, depths = args.get("mtp_hybrid_override_pattern"), args.get("mtp_num_layers")
    if further and depths and DEPTH not in pattern:
        pattern = DEPTH.join([pattern, *[further] * depths])
    return str(pattern).replace(CUT, "")


def _positions(args: Arguments) -> dict[str, Any]:
    """Return the kind of position embedding, and the settings of YaRN."""
    kind = args.get("position_embedding_type")
    if args.get("use_rotary_position_embeddings"):
        kind = "rope"
    elif args.get("add_position_embedding") is False and kind == "learned_absolute":
        kind = "none"
    yarn: Mapping[str, Any] = dict.fromkeys(YARN)
    if args.get("multi_latent_attention"):
        yarn = YARN
    elif kind == "yarn":
        yarn = {name: usual if args[name] is None else args[name] for name, usual in YARN.items()}
    return {"position_embedding_type": kind, **yarn}


def _layers(selected: Any) -> str:
    return str([int(each) for each in selected]) if isinstance(selected, list) else str(int(selected))


def _activation(args: Arguments) -> str:
    for name, ours in ACTIVATIONS.items():
        if args.get(name):
            return ours
    fused = args.get("bias_gelu_fusion") and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused or args.get("openai_gelu") else "gelu"


def _text(value: Any) -> str:
    return value.name if isinstance(value, Record) else reprlib.repr(value)


def read_arguments(args: Arguments, where: object) -> tuple[ModelConfig, dict[str, dict[str, Any]]]:
    """Return the model of a run, and its configuration by group, as in a checkpoint of ours.

    Options outside the model that the arguments lack are left out; they count as defaults.

    Args:
        args: of the run.
        where: file of the arguments, for errors.

    Raises:
        UserError: if the arguments do not describe a model of ours.
    """
    try:
        given = model_arguments(args)
        missing = [
            n for n in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size") if n not in args
        ]
        if missing:
            raise ValueError(f"args has no {', '.join(missing)}")
        model = {name: _convert(name, value) for name, value in given.items()}
        padded = _convert("vocab_size", args["padded_vocab_size"])
        vocab = _convert("vocab_size", args.get("vocab_size"))
        if not isinstance(padded, int) or not 1 <= (vocab or padded) <= padded:
            raise ValueError(f"vocab_size {vocab} and padded_vocab_size {padded} contradict each other")
        model |= {"vocab_size": vocab or padded}
        known = {**_run_values(args), **model}
        config = build_config(known)
        check_model_config(where, config.model)
        if differing := _other_inside(config.model):
            raise ValueError(f"{', '.join(differing)}: norms inside of mixers follow other options there")
    except ValueError as error:  # UserError is one
        found = [str(problem.sentence) for problem in getattr(error, "problems", ())] or [str(error)]
        sentence = "; ".join(text.removeprefix(f"{where}: ") for text in found)
        raise UserError([Problem("E854", f"{where}: {sentence}")]) from error
    tree = to_dict(replace(config, model=without_pattern(config.model)))
    return config.model, {
        group: {name: value for name, value in values.items() if group == "model" or name in known}
        for group, values in tree.items()
    }


def _convert(name: str, value: Any) -> Any:
    """Return an argument as a value of the option ``name``; ValueError if it is none."""
    setting = SETTINGS[name]
    items = value if isinstance(value, list | tuple) else [value]
    if setting.choices and value is not None:
        items = apply_foreign_values(setting.flag, [_dtype(str(item)) for item in items])
    try:
        converted = setting.convert(list(items) if setting.many or len(items) > 1 else items[0])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not setting.allows(converted):
        raise ValueError(f"{name} is {_text(value)}, which is out of range")
    return converted


def _dtype(name: str) -> str:
    return {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F64": "fp64"}.get(name, name)


def _run_values(args: Arguments) -> Values:
    """Return the other options of a run that its arguments have in common with ours."""
    defaults = {name for name, setting in SETTINGS.items() if setting.option.megatron.default}
    values: Values = {}
    for name, setting in SETTINGS.items():
        skipped = setting.group == "model" or setting.option.role is Role.START or name in (*NOT_COMPARED, *defaults)
        if not skipped and args.get(name) is not None:
            with suppress(ValueError):  # what cannot be read counts as the default, and is compared as such
                values[name] = _convert(name, args[name])
    for names in LENGTH_OPTIONS:  # Megatron-LM fills in the others with 0
        values |= dict.fromkeys((name for name in names if not values.get(name)), None)
    # Filled in with the length of the run. Steps count as full batches there, which is longer if the batch grows.
    growing = values.get("rampup_batch_size") or values.get("step_batch_size_schedule")
    for unit in ("samples",) if growing else ("iters", "samples"):
        if values.get(f"lr_decay_{unit}") == values.get(f"train_{unit}"):
            values[f"lr_decay_{unit}"] = None
    if values.get("weight_decay_incr_style", "constant") == "constant":
        values |= {"start_weight_decay": None, "end_weight_decay": None}
    if values.get("expert_tensor_parallel_size") == values.get("tensor_model_parallel_size"):
        values["expert_tensor_parallel_size"] = None
    return {name: value for name, value in values.items() if value is not None}


def write_arguments(config: RunConfig, state: Mapping[str, Any], padded_vocab_size: int) -> dict[str, Any]:
    """Return the attributes of ``args`` for a run of ours.

    Args:
        config: of the run; an option that is not set has the value that it implies.
        state: of the checkpoint.
        padded_vocab_size: rows of the embedding.
    """
    model = config.model
    args: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value = setting.value_in(config)
        if setting.group in WRITTEN_GROUPS and name not in ("activation", "params_dtype", *MOMENT_DTYPES):
            args[name] = list(value) if isinstance(value, tuple) else value
    activation = model.activation
    fused = activation == "gelu_tanh" and model.add_bias_linear
    interpolation = model.rotary_seq_len_interpolation_factor
    hybrid, layers = is_hybrid(model), [*range(model.num_layers)]
    if hybrid:  # whose lists have an entry for each residual layer
        layers = [layer for layer in layers for _ in model.mixers(layer)]
    windows = [model.pattern(layer).window for layer in layers]
    window = next((each for each in windows if each is not None), None)
    both = model.num_experts is not None and model.dense_layers > 0
    linear = [int(GATED_DELTA_NET in model.mixers(layer)) for layer in layers]
    by_layer = {
        "no_rope_freq": [int(model.rotary_kind(i) is None) for i in layers] if model.no_rope_freq else None,
        "window_attn_skip_freq": [int(each is not None) for each in windows] if len({*windows}) > 1 else None,
        "moe_layer_freq": [int(model.has_experts(i)) for i in layers] if both and not hybrid else 1,
        "linear_attention_freq": linear if any(linear) and not hybrid else None,
    }
    alone = {name: args[name][0] for name in LISTS if len(args[name]) == 1}
    return args | {
        **by_layer,
        **alone,
        "num_layers": len(layers),
        "hybrid_layer_pattern": written_pattern(model) if hybrid else None,
        "mtp_hybrid_override_pattern": None,
        "is_hybrid_model": hybrid,
        "spec": [*HYBRID_SPECS[0]] if hybrid else None,
        "experimental_attention_variant": "gdn" if by_layer["linear_attention_freq"] else None,
        "num_query_groups": model.kv_groups,
        "group_query_attention": model.kv_groups != model.num_attention_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "moe_ffn_hidden_size": model.expert_ffn if model.num_experts else None,
        "add_qkv_bias": model.qkv_bias,
        "max_position_embeddings": model.max_position_embeddings or config.training.seq_length,
        "layernorm_epsilon": model.norm_epsilon,
        **{name: activation == ours for name, ours in ACTIVATIONS.items()},
        "openai_gelu": activation == "gelu_tanh" and not fused,
        "bias_gelu_fusion": fused,
        "window_size": None if window is None else (window - 1, 0),
        "rotary_seq_len_interpolation_factor": None if interpolation == 1 else int(interpolation),
        "add_position_embedding": True,  # what deprecated flags set; the positions have a type
        "use_rotary_position_embeddings": False,
        "padded_vocab_size": padded_vocab_size,
        "bf16": config.precision.params_dtype == "bf16",
        "fp16": config.precision.params_dtype == "fp16",
        "iteration": state.get("iteration", 0),
        "consumed_train_samples": state.get("consumed_samples", 0),
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "no_save_rng": True,
        "no_save_optim": None if "optimizer" in state else True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "data_parallel_size": 1,
        "world_size": 1,
    }


def written_pattern(model: ModelConfig) -> str:
    """Return the layers of a model as a pattern, without cuts."""
    symbols = {name: symbol for symbol, name in LETTERS.items()}
    main, *further = (
        "".join(symbols[mixer] for layer in layers for mixer in model.mixers(layer))
        for layers in (range(model.num_layers), *((layer,) for layer in model.head_layers))
    )
    return DEPTH.join([main, *further])


def _other_inside(model: ModelConfig) -> list[str]:
    """Return the options of norms that those inside of mixers do not follow, here or there."""
    found = []
    if has_mixer(model, *HYBRID_MIXERS) and model.norm_epsilon != MAMBA_NORM_EPSILON:
        found.append(f"norm_epsilon {model.norm_epsilon:g} (inside of Mamba-2 there {MAMBA_NORM_EPSILON:g})")
    if has_mixer(model, GATED_DELTA_NET) and model.normalization != "RMSNorm":
        found.append(f"normalization {model.normalization} (inside of gated DeltaNet here RMSNorm)")
    if has_mixer(model, GATED_DELTA_NET) and model.apply_layernorm_1p:
        found.append("apply_layernorm_1p (not inside of gated DeltaNet here)")
    return found


def unwritable_options(model: ModelConfig) -> list[str]:
    """Return options of a model that Megatron-LM does not have."""
    patterns = {model.pattern(layer) for layer in range(model.num_layers)} - {CAUSAL}
    written = {*WRITTEN, "attention_pattern"} if len(patterns) < 2 and all(p.only_window for p in patterns) else WRITTEN
    found = [name for name in effective_options(model) if name not in written]
    found += [f"activation {model.activation}"] if model.activation in ("geglu", "geglu_tanh") else []
    found += [f"mixer {name}" for name in model.token_mixer_names if name not in LETTERS.values()]
    found += _other_inside(model)
    if model.has_latent_attention:
        fixed = {name: value for name, value in YARN.items() if resolved(model, name) not in (value, None)}
        found += [f"{name} other than {value}" for name, value in fixed.items()]
    return found + (["rotary_seq_len_interpolation_factor"] if model.rotary_seq_len_interpolation_factor % 1 else [])
