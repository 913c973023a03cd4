"""The comparison of a checkpoint's configuration with that of the run that loads it: what changed, and what may not.

Every config field has a role, such as the shape of tensors, the data or the schedule. The resume mode determines
which
roles may change; ``compare_configs`` reports changes, and refuses those that are not allowed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import isclose
from typing import Any

from megatron.arguments.resolve import resolve
from megatron.arguments.sources import (
    EXCLUSIVE_OPTIONS,
    LENGTH_OPTIONS,
    Values,
    build_config,
    flat_values,
    from_mapping,
)
from megatron.config.batch import schedule_lengths
from megatron.config.data_paths import DEFAULT_SPLIT, split_shares
from megatron.config.errors import Problem
from megatron.config.run import DOCUMENT_BOUNDARY_OPTIONS, CheckpointConfig, RunConfig
from megatron.config.settings import SETTINGS, Setting
from megatron.config.text import format_number


class Role(Enum):
    """What a field determines, and so what a change of it would affect in a resumed run."""

    SHAPE = "the shapes of the model's tensors"
    FUNCTION = "what the model computes from its weights"
    DATA = "the samples and their order"
    STATE = "the optimizer's state"
    SCHEDULE = "the batch, the length, and the update of a step"
    FREE = "how it is computed, and what is logged"
    START = "a single start of the run"


FIELDS_BY_ROLE = {
    Role.SHAPE: """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
        untie_embeddings_and_output_weights position_embedding_type max_position_embeddings
        normalization qk_layernorm activation add_bias_linear add_qkv_bias
        num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size""",
    Role.FUNCTION: """
        rotary_base rotary_percent rotary_interleaved
        use_rope_scaling rope_scaling_factor rope_original_max_position rope_low_freq_factor rope_high_freq_factor
        rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
        window_size norm_epsilon moe_router_topk moe_router_pre_softmax""",
    Role.DATA: """
        seq_length split mock_data seed
        reset_position_ids reset_attention_mask eod_mask_loss eod_id""",
    Role.STATE: "optimizer",
    Role.SCHEDULE: """
        global_batch_size rampup_batch_size train_iters train_samples
        lr min_lr lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters
        lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init
        weight_decay start_weight_decay end_weight_decay weight_decay_incr_style
        clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum lion_beta1 lion_beta2
        decoupled_lr decoupled_min_lr lr_factors weight_decay_factors ema_decay skip_spikes spike_window
        muon_momentum muon_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_split_qkv
        hidden_dropout attention_dropout z_loss_coeff
        moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff""",
    # Data are compared by a fingerprint of their contents, not by their paths. init_method_std has no effect after
    # the initialisation.
    Role.FREE: """
        tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size
        num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage pipeline_schedule
        microbatch_group_size_per_virtual_pipeline_stage pipeline_model_parallel_layout
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        expert_model_parallel_size expert_tensor_parallel_size make_vocab_size_divisible_by
        distributed_backend distributed_timeout_minutes overlap_grad_reduce ddp_bucket_size
        use_distributed_optimizer data_parallel_sharding_strategy num_distributed_optimizer_instances
        overlap_param_gather grad_reduce_in_bf16
        params_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis on_nonfinite
        micro_batch_size pad_global_batch recompute_granularity recompute_method recompute_num_layers recompute_modules
        cross_entropy_chunk_size plugin kernels deterministic cuda_graph
        exp_avg_dtype exp_avg_sq_dtype store_param_remainders
        device eval_interval eval_iters log_interval
        data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path
        multiple_validation_sets validation_set_names
        tokenizer_type tokenizer_model vocab_file merge_file tiktoken_pattern tiktoken_num_special_tokens
        init_method_std""",
    Role.START: """
        save save_interval keep_last keep_every async_save local_save local_save_interval load ckpt_step resume_mode
        data_cache_path run_dir exit_interval exit_duration_in_mins stop_file skip_train
        tensorboard_dir wandb_project wandb_exp_name wandb_save_dir wandb_entity timing_log_level timing_log_option
        log_health_interval check_weight_hash_across_dp_replicas_interval
        profile profile_memory profile_pipeline profile_step_start profile_step_end profile_ranks
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack""",
}
"""Every field, by role."""

ROLE_OF_FIELD = {name: role for role, names in FIELDS_BY_ROLE.items() for name in names.split()}

ALLOWED_ROLES = {
    "exact": {Role.START, Role.FREE},
    "new-schedule": {Role.START, Role.FREE, Role.SCHEDULE},
    "weights-only": set(Role) - {Role.SHAPE},
}
"""Resume mode -> roles whose fields may change."""

REPORTED_ROLES = {
    "exact": set(Role) - {Role.START},
    "new-schedule": set(Role) - {Role.START},
    "weights-only": {Role.SHAPE, Role.FUNCTION},
}
"""Resume mode -> roles whose changes are reported. For a new run only those of the model matter."""

CHANGE_ERRORS = {
    Role.SHAPE: ("E821", "the model is not the {}'s"),
    Role.FUNCTION: ("E822", "the model does not compute what the {}'s does"),
    Role.DATA: ("E823", "the samples, or their order, are not the {}'s"),
    Role.STATE: ("E824", "the optimizer is not the {}'s"),
    Role.SCHEDULE: ("E825", "the batch, the length or the schedule is not the {}'s"),
}
"""Error codes and messages of changes that are not allowed."""

SAME_SHAPES = {
    "position_embedding_type": ("rope", "yarn", "none"),
    "activation": ("gelu", "gelu_tanh", "relu2"),
}
"""Values of a SHAPE field with the same tensor shapes: a change between them is one of FUNCTION."""


@dataclass(frozen=True)
class ConfigComparison:
    """The differences between two configurations."""

    # one for each change worth reporting, and for what could not be compared
    lines: tuple[str, ...]
    problems: tuple[Problem, ...]  # changes that the resume mode does not allow
    changed: frozenset[str] = frozenset()  # names of all changed fields


def compare_configs(
    saved: Mapping[str, Any],
    now: RunConfig,
    mode: str,
    *,
    begin: tuple[int, int] = (0, 0),
    own: bool = False,
    name: str = "checkpoint",
) -> ConfigComparison:
    """Compare a run with the checkpoint that it is about to load.

    Args:
        saved: ``to_dict`` of the checkpoint's configuration. A field that it lacks, because an older version wrote it,
            counts as today's default. A field unknown to this version is reported, or refused if it is the model's.
        now: resolved, with ``vocab_size``.
        mode: resume mode.
        begin: steps and samples before the checkpoint's batch sizes began. If a run changed its batch, the lengths of
            its schedule follow from them.
        own: whether the checkpoint is in the run's own ``save`` folder.
        name: name of ``saved`` in messages.
    """
    then, unreadable, unknown = _read(saved, name)
    before = _values(then) | unreadable
    after = _values(now)

    def same(field: str) -> bool:
        if field == "split":
            return _same_split(before[field], after[field])
        return bool(before[field] == after[field])

    changed = [field for field in SETTINGS if field in unreadable or not same(field)]
    roles = {field: role_of(field, before, after) for field in changed}
    if _schedule(then, begin) == _schedule(now, begin):  # the same lengths, in other units or without effect
        same_lengths = {field for names in LENGTH_OPTIONS for field in names} - unreadable.keys()
        roles |= dict.fromkeys(same_lengths & roles.keys(), Role.FREE)
    changes = {}
    for field in changed:
        was, is_ = (_shown(SETTINGS[field], values[field]) for values in (before, after))
        changes[field] = f"{SETTINGS[field].flag}: {name} {was} -> now {is_}"
    problems = []
    unknown_model = [option for option in unknown if option.startswith("model.")]
    if unknown_model:  # they may change anything that the model computes
        sentence = f"the {name}'s model has options unknown to this version: {', '.join(unknown_model)}"
        problems.append(Problem("E822", sentence, ("update this program",)))
    for role, (code, sentence) in CHANGE_ERRORS.items():
        refused = [field for field in changed if roles[field] is role and role not in ALLOWED_ROLES[mode]]
        if refused:
            back = _flags_to_restore([field for field in refused if field not in unreadable], before, after)
            fixes = (*filter(None, [back]), *resume_mode_fixes(role, now.checkpoint, own))
            details = "; ".join(changes[field] for field in refused)
            problems.append(Problem(code, f"{sentence.format(name)}: {details}", fixes))
    lines = [f"the {name} has options unknown to this version: {', '.join(unknown)}"] if unknown else []
    lines += [changes[field] for field in changed if roles[field] in REPORTED_ROLES[mode]]
    return ConfigComparison(tuple(lines), tuple(problems), frozenset(changed))


def _shown(setting: Setting, value: Any) -> str:
    """Return a value as text."""
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return setting.spell(value).partition(" ")[2]


def _flags_to_restore(names: Iterable[str], before: Values, after: Values) -> str:
    """Return the flags that restore values; a length in the unit that it had."""
    words = []
    for name in names:
        groups = next((groups for groups in EXCLUSIVE_OPTIONS if (name,) in groups), ((name,),))
        group = next((group for group in groups if any(before[field] for field in group)), (name,))
        conflicts = any(after[field] for other in groups if other != group for field in other)
        for setting in (SETTINGS[field] for field in group if before[field] or group == (name,)):
            spell = _assigned if conflicts or setting.option.aliases else Setting.spell
            words.append(spell(setting, before[setting.name]))
    return " ".join(dict.fromkeys(words))


def _assigned(setting: Setting, value: Any) -> str:
    """Return a ``--set``, which unlike a flag overrides other flags of the same length."""
    items = value if isinstance(value, tuple) else (value,)
    words = (format_number(item) if isinstance(item, float) else str(item) for item in items)
    return f"--set {shlex.quote(setting.key + '=' + ','.join(words))}"


def resume_mode_fixes(role: Role, options: CheckpointConfig, own: bool) -> Iterator[str]:
    """Yield resume modes that allow a change.

    They apply to ``load``, so the fix names the folder of a run's ``own`` checkpoints in ``save``.
    """
    if role in ALLOWED_ROLES["new-schedule"]:
        named = f"--load {options.save} " if own and options.load not in (None, options.save) else ""
        yield f"{named}--resume-mode new-schedule"
    elif role in ALLOWED_ROLES["weights-only"]:
        named = f"--load {options.save} --save {options.save}-new " if own else ""
        yield f"{named}--resume-mode weights-only"


def role_of(name: str, before: Values, after: Values) -> Role:
    """Return the role of a field, which may depend on its values and on other fields."""
    if name == "max_position_embeddings" and after["position_embedding_type"] != "learned_absolute":
        return Role.FREE  # no tensor has that length, and no sample is longer
    if name == "add_qkv_bias" and after["add_bias_linear"]:
        return Role.FREE  # the bias exists either way
    if name == "split" and not (_cuts(before) and _cuts(after)):
        return Role.FREE  # one of them reads whole files; contents are compared
    if name == "eod_id" and not any(values[flag] for values in (before, after) for flag in DOCUMENT_BOUNDARY_OPTIONS):
        return Role.FREE  # ends of documents are not used
    if name.startswith("moe_") and before["num_experts"] is after["num_experts"] is None:
        return Role.FREE  # there are no experts
    alike = SAME_SHAPES.get(name, ())
    if before[name] in alike and after[name] in alike:
        return Role.FUNCTION
    return ROLE_OF_FIELD[name]


def _cuts(values: Values) -> bool:
    """Return True if the run's data are cut by ``split``."""
    return bool(values["data_path"] or values["data_args_path"])


def _same_split(before: str | None, after: str | None) -> bool:
    """Return True if two splits cut data in the same places, up to rounding: a fingerprint compares the data."""
    texts = [DEFAULT_SPLIT if split is None else split for split in (before, after)]
    try:
        return all(isclose(*shares, rel_tol=1e-9) for shares in zip(*map(split_shares, texts)))
    except ValueError:
        return texts[0] == texts[1]


def _values(config: RunConfig) -> Values:
    """Return every value by name; expert tensor parallelism that equals that of the dense layers counts as unset."""
    parallel = config.parallel
    values = flat_values(config)
    if parallel.expert_tensor_parallel_size == parallel.tensor_model_parallel_size:
        values["expert_tensor_parallel_size"] = None
    return values


def _schedule(config: RunConfig, begin: tuple[int, int]) -> tuple[float | None, ...]:
    """Return every length, in samples, that learning rate and weight decay depend on."""
    optimizer = config.optimizer
    warmup, decay, final, total = schedule_lengths(config, 1, *begin)  # any DP: the global batch is resolved
    return (
        warmup,
        decay if optimizer.lr_decay_style != "constant" else None,
        final if optimizer.lr_decay_style == "WSD" else None,
        total if optimizer.weight_decay_incr_style != "constant" else None,
    )


def _read(saved: Mapping[str, Any], source: str) -> tuple[RunConfig, Values, list[str]]:
    """Return the configuration that this version can read, unreadable values, and unknown fields."""
    known: dict[str, Any] = {}
    unreadable: Values = {}
    for group, name, value in _entries(saved):
        if _is_known(group, name):
            result = from_mapping({name: value}, source)
            known |= result.values
            unreadable |= {name: value} if result.problems else {}
    config = build_config(known)
    return resolve(config, config.parallel.model_ranks), unreadable, unknown_options(saved)


def unknown_options(saved: Mapping[str, Any]) -> list[str]:
    """Return ``group.name value`` of every field in a checkpoint's configuration unknown to this version."""
    return [f"{group}.{name} {value}" for group, name, value in _entries(saved) if not _is_known(group, name)]


def _is_known(group: str, name: str) -> bool:
    return name in SETTINGS and SETTINGS[name].group == group


def _entries(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield group, name and value of every entry."""
    for group, values in saved.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            yield group, name, value
