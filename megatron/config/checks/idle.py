"""Options that are set but have no effect, because another option is not what they need.

If the two together are a mistake about the model or the method, it is a problem. If one merely leaves the other unused,
as ``--eval-iters 0`` does with ``--eval-interval``, it is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from megatron.config.problems import Problem
from megatron.config.run import AFTER_DOCUMENTS, RunConfig
from megatron.config.settings import SETTINGS
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import SEVERAL_STAGES, schedule_name, virtual_stages


@dataclass(frozen=True)
class OptionRule:
    """Fields that have an effect only under a condition."""

    fields: tuple[str, ...]
    active: Callable[[RunConfig], bool]  # the condition
    needs: str  # the condition in words
    remedy: str = ""  # flags that fulfil the condition; for mistakes

    def unused_fields(self, config: RunConfig) -> list[str]:
        """Return the fields that are set without effect."""
        if self.active(config):
            return []
        values = ((name, getattr(getattr(config, SETTINGS[name].group), name)) for name in self.fields)
        return [name for name, value in values if value != SETTINGS[name].default]


def _recomputes(granularity: str) -> Callable[[RunConfig], bool]:
    return lambda c: c.training.recompute_granularity == granularity


def _tokenizer_is(*tokenizers: str) -> Callable[[RunConfig], bool]:
    return lambda c: c.data.tokenizer_type in tokenizers


TOKENIZERS_WITH_A_MODEL = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
"""Tokenizers that read ``tokenizer_model``."""

DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def _is_interleaved(config: RunConfig) -> bool:
    """Return True for the interleaved schedule. Invalid schedules are reported by the pipeline checks."""
    try:
        stages = virtual_stages(config.model, config.parallel)
    except ScheduleError:
        return True
    return stages > 1 and schedule_name(config.parallel, stages) == SEVERAL_STAGES


MISPLACED_OPTIONS = (
    OptionRule(
        ("microbatch_group_size_per_virtual_pipeline_stage",),
        _is_interleaved,
        "the interleaved schedule and several stages per rank",
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
    ),
    OptionRule(
        ("rotary_base", "rotary_percent", "rotary_interleaved"),
        lambda c: c.model.position_embedding_type in ("rope", "yarn"),
        "rotary positions",
        "--position-embedding-type rope",
    ),
    OptionRule(
        ("use_rope_scaling",),
        lambda c: c.model.position_embedding_type == "rope",
        "position_embedding_type rope",
        "--position-embedding-type rope",
    ),
    OptionRule(
        ("rope_scaling_factor", "rope_original_max_position", "rope_low_freq_factor", "rope_high_freq_factor"),
        lambda c: c.model.use_rope_scaling,
        "use_rope_scaling",
        "--use-rope-scaling",
    ),
    OptionRule(
        ("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        lambda c: c.model.position_embedding_type == "yarn",
        "position_embedding_type yarn",
        "--position-embedding-type yarn",
    ),
    OptionRule(("loss_scale", *DYNAMIC_SCALE), lambda c: c.precision.params_dtype == "fp16", "fp16", "--fp16"),
    OptionRule(
        DYNAMIC_SCALE,
        lambda c: c.precision.params_dtype != "fp16" or c.precision.loss_scale is None,
        "a dynamic loss scale",
        "--set precision.loss_scale=null",
    ),
    OptionRule(
        ("recompute_method", "recompute_num_layers"),
        _recomputes("full"),
        "recompute_granularity full",
        "--recompute-granularity full",
    ),
    OptionRule(
        ("recompute_modules",),
        _recomputes("selective"),
        "recompute_granularity selective",
        "--recompute-granularity selective",
    ),
    OptionRule(
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "lr_decay_style WSD",
        "--lr-decay-style WSD",
    ),
    OptionRule(
        ("save_interval", "keep_last", "keep_every", "async_save"),
        lambda c: c.checkpoint.save is not None,
        "a folder to save to",
        "--save checkpoints",
    ),
    OptionRule(
        ("keep_every",),
        lambda c: c.checkpoint.save is None or c.checkpoint.keep_last is not None,
        "keep_last",
        "--keep-last 3",
    ),
    OptionRule(
        ("ckpt_step", "resume_mode"),
        lambda c: c.checkpoint.load is not None or c.checkpoint.save is not None,
        "a checkpoint to start from",
        "--load checkpoints",
    ),
    OptionRule(
        AFTER_DOCUMENTS,
        lambda c: not c.data.mock_data,
        "documents (generated tokens have none)",
        "--no-mock-data --data-path PREFIX",
    ),
    OptionRule(
        ("validation_set_names",),
        lambda c: c.data.multiple_validation_sets,
        "multiple_validation_sets",
        "--multiple-validation-sets",
    ),
    OptionRule(
        ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
        lambda c: c.logging.wandb_project is not None,
        "wandb_project",
        "--wandb-project mine",
    ),
    OptionRule(
        ("profile", "profile_memory", "profile_pipeline"),
        lambda c: c.logging.run_dir is not None,
        "run_dir",
        "--run-dir runs/mine",
    ),
    OptionRule(
        ("decoupled_min_lr",),
        lambda c: c.optimizer.decoupled_lr is not None,
        "decoupled_lr",
        "--decoupled-lr 1e-4",
    ),
    OptionRule(
        ("exp_avg_dtype",),
        lambda c: c.optimizer.optimizer in ("adam", "lion"),
        "optimizer adam or lion",
        "--optimizer adam",
    ),
    OptionRule(("exp_avg_sq_dtype",), lambda c: c.optimizer.optimizer == "adam", "optimizer adam", "--optimizer adam"),
    OptionRule(
        ("store_param_remainders",),
        lambda c: c.precision.params_dtype == "bf16" and c.optimizer.optimizer != "muon",
        "bf16 and optimizer adam, lion or sgd",
        "--bf16",
    ),
    OptionRule(
        (
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "moe_router_pre_softmax",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
        ),
        lambda c: c.model.num_experts is not None,
        "num_experts",
        "--num-experts 8",
    ),
    OptionRule(
        ("local_save_interval",),
        lambda c: c.checkpoint.local_save is not None,
        "local_save",
        "--local-save /dev/shm/checkpoints",
    ),
    OptionRule(
        ("spike_window",),
        lambda c: c.optimizer.skip_spikes is not None,
        "skip_spikes",
        "--skip-spikes 6",
    ),
    OptionRule(
        ("vocab_file", "merge_file"),
        _tokenizer_is("GPT2BPETokenizer"),
        "tokenizer_type GPT2BPETokenizer",
        "--tokenizer-type GPT2BPETokenizer",
    ),
    OptionRule(
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
        _tokenizer_is("TikTokenizer"),
        "tokenizer_type TikTokenizer",
        "--tokenizer-type TikTokenizer",
    ),
    OptionRule(
        ("tokenizer_model",),
        _tokenizer_is(*TOKENIZERS_WITH_A_MODEL),
        "a tokenizer_type that reads it",
        "--tokenizer-type HuggingFaceTokenizer",
    ),
)

UNUSED_OPTIONS = (
    OptionRule(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        lambda c: c.parallel.pipeline_model_parallel_size > 1 or virtual_stages(c.model, c.parallel) > 1,
        "several stages",
    ),
    OptionRule(("sequence_parallel",), lambda c: c.parallel.tensor_model_parallel_size > 1, "TP above 1"),
    OptionRule(("eval_interval",), lambda c: c.training.eval_iters > 0, "eval_iters above 0"),
    OptionRule(
        (
            *("eval_interval", "exit_interval", "exit_duration_in_mins", "stop_file"),
            *("save_interval", "keep_last", "keep_every", "async_save", "local_save", "local_save_interval"),
        ),
        lambda c: not c.training.skip_train,
        "training steps (skip_train takes none)",
    ),
    OptionRule(("min_lr",), lambda c: c.optimizer.lr_decay_style != "constant", "a learning rate that decays"),
    OptionRule(
        ("lr_warmup_init",),
        lambda c: bool(c.optimizer.lr_warmup_fraction or c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples),
        "a warm-up",
    ),
    OptionRule(
        ("weight_decay",),
        lambda c: c.optimizer.weight_decay_incr_style == "constant",
        "a constant weight decay",
    ),
    OptionRule(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda c: c.optimizer.optimizer in ("adam", "muon"),
        "optimizer adam or muon",
    ),
    OptionRule(
        (
            "muon_momentum",
            "muon_nesterov",
            "muon_num_ns_steps",
            "muon_scale_mode",
            "muon_extra_scale_factor",
            "muon_split_qkv",
        ),
        lambda c: c.optimizer.optimizer == "muon",
        "optimizer muon",
    ),
    OptionRule(
        ("moe_router_topk", "moe_router_load_balancing_type"),
        lambda c: c.model.num_experts is not None,
        "num_experts",
    ),
    OptionRule(("lion_beta1", "lion_beta2"), lambda c: c.optimizer.optimizer == "lion", "optimizer lion"),
    OptionRule(
        ("profile_step_start", "profile_step_end"),
        lambda c: c.profiling.profile or c.profiling.profile_memory or c.profiling.profile_pipeline,
        "profile, profile_memory or profile_pipeline",
    ),
    OptionRule(
        ("profile_ranks", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
        lambda c: c.logging.run_dir is not None,
        "run_dir",
    ),
    OptionRule(("timing_log_option",), lambda c: c.logging.timing_log_level > 0, "timing_log_level above 0"),
    OptionRule(("sgd_momentum",), lambda c: c.optimizer.optimizer == "sgd", "optimizer sgd"),
    OptionRule(("split",), lambda c: bool(c.data.data_path or c.data.data_args_path), "data_path"),
    OptionRule(("data_cache_path", "multiple_validation_sets"), lambda c: not c.data.mock_data, "files of tokens"),
    OptionRule(
        ("eod_id",),
        lambda c: any(getattr(c.data, name) for name in AFTER_DOCUMENTS),
        "reset_position_ids, reset_attention_mask or eod_mask_loss",
    ),
)


def _check_rule(rule: OptionRule) -> Callable[[RunConfig, int], Iterator[Problem]]:
    def check(config: RunConfig, world_size: int) -> Iterator[Problem]:
        unused = rule.unused_fields(config)
        if unused:
            defaults = " ".join(SETTINGS[name].spell(SETTINGS[name].default) for name in unused)
            yield Problem("E601", _no_effect(unused, rule.needs), (rule.remedy, defaults))

    return check


def unused_option_notes(config: RunConfig, given: Collection[str]) -> list[str]:
    """Return notes about options without effect; only those in ``given``, not those of a preset."""
    found = (([name for name in rule.unused_fields(config) if name in given], rule.needs) for rule in UNUSED_OPTIONS)
    return [_no_effect(unused, needs) for unused, needs in found if unused]


def _no_effect(names: list[str], needs: str) -> str:
    if len(names) == 1:
        return f"{names[0]} has no effect without {needs}"
    return f"{', '.join(names[:-1])} and {names[-1]} have no effect without {needs}"


UNUSED_OPTION_CHECKS = tuple(_check_rule(rule) for rule in MISPLACED_OPTIONS)
