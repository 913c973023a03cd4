"""A checkpoint's configuration beside that of the run which starts from it: what changed, and what must not."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import isclose
from typing import Any

from megatron.config.data_paths import DEFAULT_SPLIT, split_shares
from megatron.config.lengths import lengths
from megatron.config.numbers import text
from megatron.config.problems import Problem
from megatron.config.resolve import resolve
from megatron.config.run import AFTER_DOCUMENTS, RESUME_MODES, CheckpointConfig, RunConfig
from megatron.config.settings import SETTINGS, Setting
from megatron.config.sources import ALTERNATIVES, LENGTHS, Values, build, flat, from_tree


class Role(Enum):
    """What an option decides, and so what a change of it would do to a run that goes on."""

    SHAPE = "the shapes of the model's tensors"
    FUNCTION = "what the model computes from its weights"
    DATA = "the samples and their order"
    STATE = "the state that the optimizer keeps"
    SCHEDULE = "the batch, the length, and what a step makes of its samples"
    FREE = "how it is computed, and what is told of it"
    START = "one start of the run; the next may have another"


FIELDS = {
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
    # The content of the data is compared by its fingerprint, wherever it lies and however it was named. The weights
    # have long been drawn with init_method_std.
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
        cross_entropy_chunk_size kernels deterministic cuda_graph exp_avg_dtype exp_avg_sq_dtype store_param_remainders
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
"""Every option, under what it decides."""

ROLES = {name: role for role, names in FIELDS.items() for name in names.split()}

APPROVED = {
    "exact": {Role.START, Role.FREE},
    "new-schedule": {Role.START, Role.FREE, Role.SCHEDULE},
    "weights-only": set(Role) - {Role.SHAPE},
}
"""Resume mode -> what may change."""

TOLD = {mode: set(Role) - {Role.START} for mode in RESUME_MODES} | {"weights-only": {Role.SHAPE, Role.FUNCTION}}
"""Resume mode -> what is told when it changes: to a new run, only the model's old options are of interest."""

REFUSALS = {
    Role.SHAPE: ("E821", "the model is not the {}'s"),
    Role.FUNCTION: ("E822", "the model does not compute what the {}'s does"),
    Role.DATA: ("E823", "the samples, or their order, are not the {}'s"),
    Role.STATE: ("E824", "the optimizer is not the {}'s"),
    Role.SCHEDULE: ("E825", "the batch, the length or the schedule is not the {}'s"),
}
"""What is said of changes that are not approved."""

SAME_SHAPES = {
    "position_embedding_type": ("rope", "yarn", "none"),
    "activation": ("gelu", "gelu_tanh", "relu2"),
}
"""Words of an option of the shape between which the tensors' shapes do not change, only what is computed."""


@dataclass(frozen=True)
class Comparison:
    """What changed.

    Attributes:
        lines: one for each changed option that is worth telling; and what could not be compared.
        problems: changes that the resume mode does not approve.
        changed: names of all options that changed.
    """

    lines: tuple[str, ...]
    problems: tuple[Problem, ...]
    changed: frozenset[str] = frozenset()


def compare(
    saved: Mapping[str, Any],
    now: RunConfig,
    mode: str,
    *,
    begin: tuple[int, int] = (0, 0),
    own: bool = False,
    name: str = "checkpoint",
) -> Comparison:
    """Compare a run with the checkpoint that it is about to start from.

    Args:
        saved: ``to_dict`` of the checkpoint's configuration. What it lacks, because an older version wrote it, counts
            as today's default; what this version does not know is told, or refused where it is about the model.
        now: resolved, the vocabulary's size included.
        mode: resume mode.
        begin: steps and samples before the checkpoint's batches began; the lengths of a run that changed its batch
            follow from them.
        own: whether the checkpoint lies in the run's own ``save`` folder.
        name: what ``saved`` is called.

    """
    then, unreadable, unknown = _read(saved, name)
    before, after = _values(then) | unreadable, _values(now)
    changed = [field for field in SETTINGS if field in unreadable or not _same(field, before[field], after[field])]
    roles = {field: role_of(field, before, after) for field in changed}
    if _schedule(then, begin) == _schedule(now, begin):  # the same lengths, said in another way or of no effect
        same_lengths = {field for names in LENGTHS for field in names} - unreadable.keys()
        roles |= dict.fromkeys(same_lengths & roles.keys(), Role.FREE)
    told = {field: _change(SETTINGS[field], before, after, name) for field in changed}
    problems = [*_beyond_us([option for option in unknown if option.startswith("model.")], name)]
    for role, (code, sentence) in REFUSALS.items():
        refused = [field for field in changed if roles[field] is role and role not in APPROVED[mode]]
        if refused:
            back = _paste([field for field in refused if field not in unreadable], before, after)
            fixes = (*filter(None, [back]), *ways_out(role, now.checkpoint, own))
            changes = "; ".join(told[field] for field in refused)
            problems.append(Problem(code, f"{sentence.format(name)}: {changes}", fixes))
    lines = [f"the {name} has options that this version does not know: {', '.join(unknown)}"] if unknown else []
    lines += [told[field] for field in changed if roles[field] in TOLD[mode]]
    return Comparison(tuple(lines), tuple(problems), frozenset(changed))


def _beyond_us(unknown: list[str], name: str) -> Iterator[Problem]:
    """A model with an option that nobody here knows may compute anything."""
    if unknown:
        sentence = f"the {name}'s model has options that this version does not know: {', '.join(unknown)}"
        yield Problem("E822", sentence, ("update this program",))


def _change(setting: Setting, before: Values, after: Values, name: str) -> str:
    was, is_ = (_shown(setting, values[setting.name]) for values in (before, after))
    return f"{setting.flag}: {name} {was} -> now {is_}"


def _shown(setting: Setting, value: Any) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return setting.spell(value).partition(" ")[2]


def _paste(names: Iterable[str], before: Values, after: Values) -> str:
    """Flags that give options the values they had; a length is said in the way it was said then."""
    words = []
    for name in names:
        ways = next((ways for ways in ALTERNATIVES if (name,) in ways), ((name,),))
        way = next((way for way in ways if any(before[field] for field in way)), (name,))
        in_the_way = any(after[field] for other in ways if other != way for field in other)
        for setting in (SETTINGS[field] for field in way if before[field] or way == (name,)):
            spell = _assigned if in_the_way or setting.option.aliases else Setting.spell
            words.append(spell(setting, before[setting.name]))
    return " ".join(dict.fromkeys(words))


def _assigned(setting: Setting, value: Any) -> str:
    """``--set``, which unlike a flag takes the place of other flags that say the same thing."""
    items = value if isinstance(value, tuple) else (value,)
    words = (text(item) if isinstance(item, float) else str(item) for item in items)
    return f"--set {shlex.quote(setting.key + '=' + ','.join(words))}"


def ways_out(role: Role, options: CheckpointConfig, own: bool) -> Iterator[str]:
    """Resume modes that approve of a change.

    They are about ``load``, so a run's ``own`` checkpoints, those in its ``save`` folder, have to be named.
    """
    if role in APPROVED["new-schedule"]:
        named = f"--load {options.save} " if own and options.load not in (None, options.save) else ""
        yield f"{named}--resume-mode new-schedule"
    elif role in APPROVED["weights-only"]:
        named = f"--load {options.save} --save {options.save}-new " if own else ""
        yield f"{named}--resume-mode weights-only"


def role_of(name: str, before: Values, after: Values) -> Role:
    """What a change of an option decides, which may depend on its values and on other options."""
    if name == "max_position_embeddings" and after["position_embedding_type"] != "learned_absolute":
        return Role.FREE  # no tensor has that length, and no sample of the data is longer
    if name == "add_qkv_bias" and after["add_bias_linear"]:
        return Role.FREE  # there is one either way
    if name == "split" and not (_cuts(before) and _cuts(after)):
        return Role.FREE  # where one of them reads whole files, what they read is compared by its content
    if name == "eod_id" and not any(values[flag] for values in (before, after) for flag in AFTER_DOCUMENTS):
        return Role.FREE  # nothing asks where documents end
    if name.startswith("moe_") and before["num_experts"] is after["num_experts"] is None:
        return Role.FREE  # there are no experts that it could be about
    alike = SAME_SHAPES.get(name, ())
    if before[name] in alike and after[name] in alike:
        return Role.FUNCTION
    return ROLES[name]


def _cuts(values: Values) -> bool:
    """Whether a run's data are cut by ``split``."""
    return bool(values["data_path"] or values["data_args_path"])


def _same(name: str, before: Any, after: Any) -> bool:
    return _same_cut(before, after) if name == "split" else before == after


def _same_cut(before: str | None, after: str | None) -> bool:
    """Whether two splits cut data in the same places, but for rounding: what they read has a fingerprint besides."""
    texts = [DEFAULT_SPLIT if split is None else split for split in (before, after)]
    try:
        return all(isclose(*shares, rel_tol=1e-9) for shares in zip(*map(split_shares, texts)))
    except ValueError:
        return texts[0] == texts[1]


def _values(config: RunConfig) -> Values:
    """Every value by name; experts that are cut as the dense layers are have no size of their own."""
    p, values = config.parallel, flat(config)
    if p.expert_tensor_parallel_size == p.tensor_model_parallel_size:
        values["expert_tensor_parallel_size"] = None
    return values


def _schedule(config: RunConfig, begin: tuple[int, int]) -> tuple[float | None, ...]:
    """Every length, in samples, that learning rate and weight decay depend on."""
    o, (warmup, decay, final, total) = config.optimizer, lengths(config, 1, *begin)  # the batch is written out
    return (
        warmup,
        decay if o.lr_decay_style != "constant" else None,
        final if o.lr_decay_style == "WSD" else None,
        total if o.weight_decay_incr_style != "constant" else None,
    )


def _read(saved: Mapping[str, Any], source: str) -> tuple[RunConfig, Values, list[str]]:
    """The configuration as far as this version can read it, values it cannot read, and options it does not know."""
    known: dict[str, Any] = {}
    unreadable: Values = {}
    for group, name, value in _entries(saved):
        if _is_known(group, name):
            layer = from_tree({name: value}, source)
            known |= layer.values
            unreadable |= {name: value} if layer.problems else {}
    config = build(known)
    return resolve(config, config.parallel.model_ranks), unreadable, unknown_options(saved)


def unknown_options(saved: Mapping[str, Any]) -> list[str]:
    """``group.name value`` of what a checkpoint's configuration has and this version does not know."""
    return [f"{group}.{name} {value}" for group, name, value in _entries(saved) if not _is_known(group, name)]


def _is_known(group: str, name: str) -> bool:
    return name in SETTINGS and SETTINGS[name].group == group


def _entries(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Group, name and value of everything in a nested mapping."""
    for group, values in saved.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            yield group, name, value
