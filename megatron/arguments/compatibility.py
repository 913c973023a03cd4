"""The comparison of a checkpoint's configuration with that of the run that loads it: what changed, and what may not.

Every config field has a role, such as the shape of tensors, the data or the schedule. The resume mode determines
which roles may change; ``compare_configs`` reports changes, and refuses those that are not allowed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import isclose
from typing import Any, NamedTuple

from megatron.arguments.sources import (
    EXCLUSIVE_OPTIONS,
    LENGTH_OPTIONS,
    Values,
    build_config,
    flat_values,
    from_mapping,
    resolve,
)
from megatron.arguments.validate import find_problems, is_met
from megatron.checkpoint.errors import describe_findings
from megatron.config.attention_pattern import AttentionPattern
from megatron.config.batch import schedule_lengths
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data_paths import DEFAULT_SPLIT, split_shares
from megatron.config.errors import Problem
from megatron.config.model import ModelConfig
from megatron.config.option import Role
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.distributed.sharding import ShardSpec
from megatron.layers.parameters import gpt, in_checkpoints

ALLOWED_ROLES = {
    "exact": {Role.START, Role.FREE},
    "new-schedule": {Role.START, Role.FREE, Role.SCHEDULE},
    "new-phase": set(Role) - {Role.SHAPE, Role.STATE},
    "weights-only": set(Role) - {Role.SHAPE},
}
"""Resume mode -> roles whose fields may change."""

REPORTED_ROLES = {
    "exact": set(Role) - {Role.START},
    "new-schedule": set(Role) - {Role.START},
    "new-phase": set(Role) - {Role.START},
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


def _mixers(model: ModelConfig) -> list[tuple[str, ...]]:
    return [model.mixers(layer) for layer in (*range(model.num_layers), *model.head_blocks)]


def _attention_patterns(model: ModelConfig) -> list[AttentionPattern]:
    return [model.pattern(layer) for layer in range(model.num_layers)]


def _rotary_kinds(model: ModelConfig) -> list[str | None]:
    return [model.rotary_kind(layer) for layer in range(model.num_layers)]


MEANINGS: Sequence[tuple[Set[str], Callable[[ModelConfig], object]]] = (
    (
        {"hybrid_layer_pattern", "mtp_hybrid_override_pattern", "num_layers", "token_mixers", "moe_layer_freq"}
        | {"linear_attention_freq", "experimental_attention_variant", "multi_latent_attention"},
        _mixers,
    ),
    ({"attention_pattern", "window_size", "window_attn_skip_freq"}, _attention_patterns),
    ({"no_rope_freq"}, _rotary_kinds),
)
"""Fields that give every layer something, and what: if all layers have the same, they are equal, however written."""


class StoredLayout(NamedTuple):
    """The layout that a checkpoint was written in."""

    # The whole configuration, as :func:`megatron.arguments.sources.to_dict` returns it.
    config: Mapping[str, Any]
    world_size: int
    # Its checkpoint, for notes.
    checkpoint: str


StoredLayoutReader = Callable[[CheckpointConfig], StoredLayout | None]
"""Returns the layout of the run that options resume; None for a run that starts."""


@dataclass(frozen=True)
class ConfigComparison:
    """The differences between two configurations."""

    lines: tuple[str, ...]  # one for each change worth reporting, and for what could not be compared
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
    world_size: int | None = None,
) -> ConfigComparison:
    """Compare a run with the checkpoint that it is about to load.

    Args:
        saved: ``to_dict`` of the checkpoint's configuration. A field that it lacks, because an older version wrote it,
            counts as today's default. A field unknown to this version is reported, or refused if it is the model's.
        now: resolved, with ``vocab_size``.
        mode: resume mode.
        begin: steps and samples before the checkpoint's batch sizes began. If a run changed its batch, the lengths of
            its schedule follow from them.
        own: the checkpoint is in the run's own ``save`` folder.
        name: name of ``saved`` in messages.
        world_size: number of ranks of the run, with which a suggested fix has to be valid, too; None if it is unknown.
    """
    entries, unknown = _known_and_unknown(saved)
    readable = _readable(entries, name)
    unreadable = {field: value for field, value in entries.items() if field not in readable}
    then = build_config(readable)
    then = resolve(then, then.parallel.model_ranks)
    before = _values(then) | unreadable
    after = _values(now)
    changed = [field for field in SETTINGS if field in unreadable or not _same(field, before[field], after[field])]
    for fields, meaning in MEANINGS:
        if not fields & unreadable.keys() and fields & {*changed} and meaning(then.model) == meaning(now.model):
            changed = [field for field in changed if field not in fields]
    roles = {field: role_of(field, before, after, (then, now)) for field in changed}
    if _schedule(then, begin) == _schedule(now, begin):  # the same lengths, in other units or without effect
        same_lengths = {field for names in LENGTH_OPTIONS for field in names} - unreadable.keys()
        roles |= dict.fromkeys(same_lengths & roles.keys(), Role.FREE)
    changes = {}
    for field in changed:
        was, is_ = (SETTINGS[field].describe_value(values[field]) or "not set" for values in (before, after))
        changes[field] = f"{SETTINGS[field].flag}: {name} {was} -> now {is_}"
    forgotten = [plugin for plugin in entries.get("plugin") or () if plugin not in sys.modules]
    problems = []
    unknown_model = [option for option in unknown if option.startswith("model.")]
    if unknown_model:  # they may change anything that the model computes
        sentence = f"the {name}'s model has options unknown to this version: {', '.join(unknown_model)}"
        problems.append(Problem("E822", sentence, ("update this program",)))
    for role, (code, sentence) in CHANGE_ERRORS.items():
        refused = [field for field in changed if roles[field] is role and role not in ALLOWED_ROLES[mode]]
        if refused:
            back = _flags_to_restore([field for field in refused if field not in unreadable], before, after)
            if forgotten and unreadable.keys() & {*refused}:
                back = f"{back} --plugin {' '.join(dict.fromkeys((*(after['plugin'] or ()), *forgotten)))}".lstrip()
            elif back and role is Role.SCHEDULE and world_size is not None:  # a batch has to fit the ranks
                restored = build_config({**after, **{field: before[field] for field in refused}})
                back = _completed(back, resolve(restored, world_size), world_size)
            fixes = (*filter(None, [back]), *resume_mode_fixes(role, now.checkpoint, own))
            details = "; ".join(changes[field] for field in refused)
            problems.append(Problem(code, f"{sentence.format(name)}: {details}", fixes))
    lines = [f"the {name} has options unknown to this version: {', '.join(unknown)}"] if unknown else []
    lines += [changes[field] for field in changed if roles[field] in REPORTED_ROLES[mode]]
    return ConfigComparison(tuple(lines), tuple(problems), frozenset(changed))


def _flags_to_restore(names: Iterable[str], before: Values, after: Values) -> str:
    """Return the flags that restore values; a length in the unit that it had."""
    names, words = [*names], list[str]()
    if after["phases"] and "train_samples" in names:  # the file has the length
        names.remove("train_samples")
        tokens = before["train_samples"] * before["seq_length"] if before["train_samples"] else 0
        if tokens and after["phases"] != after["data_mixture"]:
            words.append(f"tokens: {tokens} in phase {after['phase_name']}{',' if names else ''}")
    for name in names:
        groups = next((groups for groups in EXCLUSIVE_OPTIONS if (name,) in groups), ((name,),))
        group = next((group for group in groups if any(before[field] for field in group)), (name,))
        conflicts = any(after[field] for other in groups if other != group for field in other)
        for setting in (SETTINGS[field] for field in group if before[field] or group == (name,)):
            value = before[setting.name]
            if conflicts or setting.option.aliases:  # unlike a flag, --set overrides other flags of the same length
                text = f"{setting.key}={setting.show(value, ',')}"
                words.append(f"--set {shlex.quote(text)}")
            else:
                words.append(setting.spell(value))
    return " ".join(dict.fromkeys(words))


def _completed(flags: str, config: RunConfig, world_size: int) -> str:
    """Return flags with those that ``config``, which they give, needs besides; empty if no others make it valid."""
    for problem in find_problems(config, world_size):
        others = (fix for fix in problem.fixes if fix.startswith("--") and fix.split()[0] not in flags.split())
        if not (more := next(others, "")):
            return ""
        flags = f"{flags} {more}"
    return flags


def resume_mode_fixes(role: Role, options: CheckpointConfig, own: bool) -> Iterator[str]:
    """Yield resume modes that allow a change.

    They apply to ``load``, so the fix names the folder of a run's ``own`` checkpoints in ``save``.
    """
    kept = next((mode for mode in ("new-schedule", "new-phase") if role in ALLOWED_ROLES[mode]), None)
    if own and options.resume_mode == "new-phase" and role in ALLOWED_ROLES["new-phase"] and options.load:
        yield "drop --load"  # to begin the next phase
    if kept is not None:
        named = f"--load {options.save} " if own and options.load not in (None, options.save) else ""
        yield f"{named}--resume-mode {kept}"
    if kept != "new-schedule" and role in ALLOWED_ROLES["weights-only"]:
        named = f"--load {options.save} --save {options.save}-new " if own else ""
        yield f"{named}--resume-mode weights-only"


def role_of(name: str, before: Values, after: Values, configs: tuple[RunConfig, RunConfig]) -> Role:
    """Return the role of a field, which may depend on its values and on other fields."""
    if name == "max_position_embeddings" and after["position_embedding_type"] != "learned_absolute":
        return Role.FREE  # no tensor has that length, and no sample is longer
    if name == "add_qkv_bias" and after["add_bias_linear"]:
        return Role.FREE  # the bias exists either way
    if name == "split" and not all(values["data_path"] or values["data_args_path"] for values in (before, after)):
        return Role.FREE  # one of them reads whole files; contents are compared
    option = SETTINGS[name].option
    if option.role is Role.START:
        return Role.START
    if not any(all(is_met(need, config) for need in option.needs) for config in configs):
        return Role.FREE  # it had no effect, and has none
    if option.droppable and not after[name]:
        return Role.FUNCTION
    if any(before[name] in alike and after[name] in alike for alike in option.same_shapes):
        return Role.FUNCTION
    return option.role


def _same(name: str, before: Any, after: Any) -> bool:
    """Return True if two values of a field are equal.

    Two splits are, if they cut data in the same places up to rounding: a fingerprint compares the data.
    """
    if name != "split":
        return bool(before == after)
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


def readable_config(saved: Mapping[str, Any]) -> RunConfig:
    """Return a checkpoint's configuration; what this version cannot read has its default."""
    return build_config(_readable(_known_and_unknown(saved)[0], "checkpoint"))


def _readable(entries: Values, name: str) -> Values:
    return {f: value for f, value in from_mapping(entries, name).values.items() if SETTINGS[f].allows(value)}


def _known_and_unknown(saved: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Return the values of fields by name, and ``group.name value`` of every field unknown to this version."""
    known: Values = {}
    unknown = []
    for group, values in saved.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if name in SETTINGS and SETTINGS[name].is_in(group):
                known[name] = value
            else:
                unknown.append(f"{group}.{name} {value}")
    return known, unknown


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a tensor as stored, and the view that its chunks refer to."""


def tensor_differences(specs: Mapping[str, ShardSpec], stored: Mapping[str, Shapes]) -> dict[str, set[str]]:
    """Return the names of tensors that a model lacks, has in addition or in another shape, by what a checkpoint does.

    Args:
        specs: of the model that the configuration in the checkpoint describes.
        stored: its tensors without those of the optimizer.
    """
    shapes = {name: (spec.shape, spec.view) for name, spec in specs.items()}
    return {
        "lacks": shapes.keys() - stored.keys(),
        "holds tensors that its model does not have": stored.keys() - shapes.keys(),
        "holds tensors of another shape than its model's": {
            name for name in shapes.keys() & stored.keys() if shapes[name] != stored[name]
        },
    }


def stored_tensors_problem(saved: Mapping[str, Any], stored: Mapping[str, Shapes]) -> str:
    """Return how the tensors of a checkpoint contradict the model in its configuration; empty if they do not.

    It is empty too if this version cannot read all of that model, which `compare_configs` reports.
    """
    entries, unknown = _known_and_unknown({"model": saved.get("model")})
    found = from_mapping(entries, "checkpoint")
    model = build_config(found.values).model
    in_range = all(SETTINGS[name].allows(value) for name, value in found.values.items())
    if unknown or found.problems or not in_range or model.vocab_size is None:
        return ""
    return describe_findings(tensor_differences(in_checkpoints(gpt(model)), stored))


def unknown_options(saved: Mapping[str, Any]) -> list[str]:
    """Return ``group.name value`` of every field in a checkpoint's configuration unknown to this version."""
    return _known_and_unknown(saved)[1]
