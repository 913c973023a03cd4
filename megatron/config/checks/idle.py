"""Options that were set, but that nothing will read because another option is not what they need.

Where the two together are a mistake about the model or the method it is a problem; where one merely leaves the other
without work, as evaluation turned off does with its interval, a remark is enough.
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
class Rule:
    """Fields that work only while something holds.

    Attributes:
        fields: their names.
        active: whether they work.
        needs: that condition in words.
        remedy: flags that make them work; of mistakes.
    """

    fields: tuple[str, ...]
    active: Callable[[RunConfig], bool]
    needs: str
    remedy: str = ""

    def idle(self, config: RunConfig) -> list[str]:
        """Fields that were set in vain."""
        if self.active(config):
            return []
        values = ((name, getattr(getattr(config, SETTINGS[name].group), name)) for name in self.fields)
        return [name for name, value in values if value != SETTINGS[name].default]


def _recomputes(granularity: str) -> Callable[[RunConfig], bool]:
    return lambda c: c.training.recompute_granularity == granularity


def _reads(*tokenizers: str) -> Callable[[RunConfig], bool]:
    return lambda c: c.data.tokenizer_type in tokenizers


FROM_A_MODEL = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
"""Tokenizers that are read from ``tokenizer_model``."""

DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def _takes_turns(config: RunConfig) -> bool:
    """Whether the stages of a rank take turns by groups of micro-batches; what cannot be told is told elsewhere."""
    try:
        stages = virtual_stages(config.model, config.parallel)
    except ScheduleError:
        return True
    return stages > 1 and schedule_name(config.parallel, stages) == SEVERAL_STAGES


MISTAKES = (
    Rule(
        ("microbatch_group_size_per_virtual_pipeline_stage",),
        _takes_turns,
        "the schedule interleaved on several stages",
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
    ),
    Rule(
        ("rotary_base", "rotary_percent", "rotary_interleaved"),
        lambda c: c.model.position_embedding_type in ("rope", "yarn"),
        "rotary positions",
        "--position-embedding-type rope",
    ),
    Rule(
        ("use_rope_scaling",),
        lambda c: c.model.position_embedding_type == "rope",
        "position_embedding_type rope",
        "--position-embedding-type rope",
    ),
    Rule(
        ("rope_scaling_factor", "rope_original_max_position", "rope_low_freq_factor", "rope_high_freq_factor"),
        lambda c: c.model.use_rope_scaling,
        "use_rope_scaling",
        "--use-rope-scaling",
    ),
    Rule(
        ("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        lambda c: c.model.position_embedding_type == "yarn",
        "position_embedding_type yarn",
        "--position-embedding-type yarn",
    ),
    Rule(("loss_scale", *DYNAMIC_SCALE), lambda c: c.precision.params_dtype == "fp16", "fp16", "--fp16"),
    Rule(
        DYNAMIC_SCALE,
        lambda c: c.precision.params_dtype != "fp16" or c.precision.loss_scale is None,
        "a dynamic loss scale",
        "--set precision.loss_scale=null",
    ),
    Rule(
        ("recompute_method", "recompute_num_layers"),
        _recomputes("full"),
        "recompute_granularity full",
        "--recompute-granularity full",
    ),
    Rule(
        ("recompute_modules",),
        _recomputes("selective"),
        "recompute_granularity selective",
        "--recompute-granularity selective",
    ),
    Rule(
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "lr_decay_style WSD",
        "--lr-decay-style WSD",
    ),
    Rule(
        ("save_interval", "keep_last", "keep_every", "async_save"),
        lambda c: c.checkpoint.save is not None,
        "a folder to save to",
        "--save checkpoints",
    ),
    Rule(
        ("keep_every",),
        lambda c: c.checkpoint.save is None or c.checkpoint.keep_last is not None,
        "keep_last, because all are kept,",
        "--keep-last 3",
    ),
    Rule(
        ("ckpt_step", "resume_mode"),
        lambda c: c.checkpoint.load is not None or c.checkpoint.save is not None,
        "a checkpoint to start from",
        "--load checkpoints",
    ),
    Rule(
        AFTER_DOCUMENTS,
        lambda c: not c.data.mock_data,
        "documents, which generated tokens do not have,",
        "--no-mock-data --data-path PREFIX",
    ),
    Rule(
        ("validation_set_names",),
        lambda c: c.data.multiple_validation_sets,
        "multiple_validation_sets",
        "--multiple-validation-sets",
    ),
    Rule(
        ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
        lambda c: c.logging.wandb_project is not None,
        "wandb_project",
        "--wandb-project mine",
    ),
    Rule(
        ("profile", "profile_memory", "profile_pipeline"),
        lambda c: c.logging.run_dir is not None,
        "a run_dir to keep it in",
        "--run-dir runs/mine",
    ),
    Rule(
        ("decoupled_min_lr",),
        lambda c: c.optimizer.decoupled_lr is not None,
        "decoupled_lr",
        "--decoupled-lr 1e-4",
    ),
    Rule(
        ("exp_avg_dtype",),
        lambda c: c.optimizer.optimizer in ("adam", "lion"),
        "optimizer adam or lion",
        "--optimizer adam",
    ),
    Rule(("exp_avg_sq_dtype",), lambda c: c.optimizer.optimizer == "adam", "optimizer adam", "--optimizer adam"),
    Rule(
        ("store_param_remainders",),
        lambda c: c.precision.params_dtype == "bf16" and c.optimizer.optimizer != "muon",
        "weights in bf16 that adam, lion or sgd moves",
        "--bf16",
    ),
    Rule(
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
    Rule(
        ("local_save_interval",),
        lambda c: c.checkpoint.local_save is not None,
        "local_save",
        "--local-save /dev/shm/checkpoints",
    ),
    Rule(
        ("spike_window",),
        lambda c: c.optimizer.skip_spikes is not None,
        "skip_spikes",
        "--skip-spikes 6",
    ),
    Rule(
        ("vocab_file", "merge_file"),
        _reads("GPT2BPETokenizer"),
        "tokenizer_type GPT2BPETokenizer",
        "--tokenizer-type GPT2BPETokenizer",
    ),
    Rule(
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
        _reads("TikTokenizer"),
        "tokenizer_type TikTokenizer",
        "--tokenizer-type TikTokenizer",
    ),
    Rule(
        ("tokenizer_model",),
        _reads(*FROM_A_MODEL),
        "a tokenizer_type that is read from it",
        "--tokenizer-type HuggingFaceTokenizer",
    ),
)

HARMLESS = (
    Rule(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        lambda c: c.parallel.pipeline_model_parallel_size > 1 or virtual_stages(c.model, c.parallel) > 1,
        "several stages",
    ),
    Rule(("sequence_parallel",), lambda c: c.parallel.tensor_model_parallel_size > 1, "TP above 1"),
    Rule(("eval_interval",), lambda c: c.training.eval_iters > 0, "eval_iters above 0"),
    Rule(
        (
            *("eval_interval", "exit_interval", "exit_duration_in_mins", "stop_file"),
            *("save_interval", "keep_last", "keep_every", "async_save", "local_save", "local_save_interval"),
        ),
        lambda c: not c.training.skip_train,
        "steps to take, of which skip_train takes none",
    ),
    Rule(("min_lr",), lambda c: c.optimizer.lr_decay_style != "constant", "a learning rate that decays"),
    Rule(
        ("lr_warmup_init",),
        lambda c: bool(c.optimizer.lr_warmup_fraction or c.optimizer.lr_warmup_iters or c.optimizer.lr_warmup_samples),
        "a warm-up",
    ),
    Rule(("weight_decay",), lambda c: c.optimizer.weight_decay_incr_style == "constant", "a constant weight decay"),
    Rule(
        ("adam_beta1", "adam_beta2", "adam_eps"),
        lambda c: c.optimizer.optimizer in ("adam", "muon"),
        "optimizer adam or muon",
    ),
    Rule(
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
    Rule(
        ("moe_router_topk", "moe_router_load_balancing_type"),
        lambda c: c.model.num_experts is not None,
        "num_experts",
    ),
    Rule(("lion_beta1", "lion_beta2"), lambda c: c.optimizer.optimizer == "lion", "optimizer lion"),
    Rule(
        ("profile_step_start", "profile_step_end"),
        lambda c: c.profiling.profile or c.profiling.profile_memory or c.profiling.profile_pipeline,
        "profile, profile_memory or profile_pipeline",
    ),
    Rule(
        ("profile_ranks", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
        lambda c: c.logging.run_dir is not None,
        "run_dir",
    ),
    Rule(("timing_log_option",), lambda c: c.logging.timing_log_level > 0, "timing_log_level above 0"),
    Rule(("sgd_momentum",), lambda c: c.optimizer.optimizer == "sgd", "optimizer sgd"),
    Rule(("split",), lambda c: bool(c.data.data_path or c.data.data_args_path), "data_path"),
    Rule(("data_cache_path", "multiple_validation_sets"), lambda c: not c.data.mock_data, "files of tokens"),
    Rule(
        ("eod_id",),
        lambda c: any(getattr(c.data, name) for name in AFTER_DOCUMENTS),
        "reset_position_ids, reset_attention_mask or eod_mask_loss",
    ),
)


def _check(rule: Rule) -> Callable[[RunConfig, int], Iterator[Problem]]:
    def check(config: RunConfig, world_size: int) -> Iterator[Problem]:
        idle = rule.idle(config)
        if idle:
            back = " ".join(SETTINGS[name].spell(SETTINGS[name].default) for name in idle)
            yield Problem("E601", f"{_list(idle)} without {rule.needs} would do nothing", (rule.remedy, back))

    return check


def remarks(config: RunConfig, said: Collection[str]) -> list[str]:
    """A line on every option that is set and has, harmlessly, no effect; of those in ``said``, not of a preset's."""
    found = (([name for name in rule.idle(config) if name in said], rule.needs) for rule in HARMLESS)
    return [
        f"{_list(idle)} {'has' if len(idle) == 1 else 'have'} no effect without {needs}"
        for idle, needs in found
        if idle
    ]


def _list(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


CHECKS = tuple(_check(rule) for rule in MISTAKES)
