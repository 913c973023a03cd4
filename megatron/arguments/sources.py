"""The sources of config values: presets, files, flags and ``--set``; merging and resolving them; configs as text.

A source is a flat mapping of field name to value. Reading one does not stop at the first mistake: it returns the
values that could be read and the problems of the others.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.framework_folders import find_config_folder
from megatron.config.batch import full_global_batch_size
from megatron.config.data_paths import SOURCE_OPTIONS
from megatron.config.errors import MOST_PROBLEMS, Problem, UserError
from megatron.config.files import parse_yaml, read_small
from megatron.config.layer_pattern import REPLACED, pattern_values, without_pattern
from megatron.config.plugins import option_groups
from megatron.config.run import RunConfig
from megatron.config.schemes import WEIGHTS_PREFIXES
from megatron.config.settings import GROUPS, SETTINGS, Setting
from megatron.config.text import did_you_mean
from megatron.config.training import TrainingConfig
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.plan import resolve_pipeline

Values = dict[str, Any]

LENGTH_OPTIONS = (
    ("train_iters", "train_samples", "num_epochs"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
)
"""Groups of fields that set the same length."""

EXCLUSIVE_OPTIONS = (
    *(tuple((name,) for name in names) for names in LENGTH_OPTIONS),
    SOURCE_OPTIONS,
    (("window_size", "window_attn_skip_freq"), ("attention_pattern",)),
)
"""Mutually exclusive groups of fields. Setting one in a later source clears the others."""


@dataclass
class ConfigSource:
    """The values that one source sets."""

    values: Values = field(default_factory=dict)  # by field name
    problems: list[Problem] = field(default_factory=list)  # of what could not be read
    doubtful: set[str] = field(default_factory=set)  # fields whose given value could not be read

    def read(self, setting: Setting, spelling: str, value: Any) -> bool:
        """Set a field to a text or native value; return False and record a problem if it is none of its values."""
        try:
            self.values[setting.name] = setting.convert(value)
        except ValueError as error:
            fixes = getattr(error, "fixes", ())
            self.refuse(setting, spelling, str(error), value if isinstance(value, list) else (), fixes)
            return False
        return True

    def refuse(
        self, setting: Setting, spelling: str, reason: str, words: Sequence[Any] = (), fixes: tuple[str, ...] = ()
    ) -> None:
        """Record that a value cannot be read; ``spelling`` is the flag or key, ``words`` are those after it."""
        if not fixes:
            fixes = self._fixes(setting, words)
        self.doubtful.add(setting.name)
        self.problems.append(Problem("E002", f"{spelling}: {reason}", fixes))

    @staticmethod
    def _fixes(setting: Setting, words: Sequence[Any]) -> tuple[str, ...]:
        """Return what may have been meant by a value that cannot be read."""
        if setting.choices:
            one = len(setting.choices) == 1 and setting.option.kind is not None  # of a plugin that was forgotten
            return ("--plugin MODULE",) if one else (f"{setting.flag} {'|'.join(setting.choices)}",)
        if setting.length:
            return (f"{setting.flag} {setting.metavar}",)
        if setting.scalar is bool:
            return setting.flag, setting.negative
        if len(words) > 1 and setting.scalar is str and not setting.many:
            text = ("," if setting.name == "split" else " ").join(map(str, words))
            return (f"{setting.flag} {shlex.quote(text)}",)
        return ()


def from_mapping(tree: Mapping[str, Any], source: str) -> ConfigSource:
    """Read nested groups (``model: {hidden_size: 64}``), flat names, or both.

    Args:
        tree: as read from YAML or JSON.
        source: its name in problems.
    """
    result = ConfigSource()
    for name, value in without_groups(tree):
        if name in GROUPS and name not in SETTINGS:  # optimizer is a group and one of its options
            if value is not None:
                result.problems.append(Problem("E005", f"{source}: {name} is a group of options, not {value!r}"))
            continue
        setting = find_setting(result, name, source)
        if setting is None:
            continue
        if setting.name in result.values:
            result.problems.append(Problem("E003", f"{source}: {setting.name} is set twice, by group and flat"))
        result.read(setting, f"{source}: {setting.key}", value)
    return result


def without_groups(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values, with those of nested groups as ``GROUP.NAME``."""
    for key, value in tree.items():
        name = str(key).replace("-", "_")
        if name in GROUPS and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}".replace("-", "_"), each) for inner, each in value.items())
        else:
            yield name, value


def from_assignments(assignments: Iterable[str]) -> ConfigSource:
    """Read ``model.hidden_size=64`` texts; items of a tuple are separated by blanks or commas."""
    result = ConfigSource()
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            result.problems.append(Problem("E005", f"--set {text}: has no '='", ("--set model.hidden_size=64",)))
        elif setting := find_setting(result, key.strip(), "--set"):
            words = value.replace(",", " ").split() if setting.many else [value]
            result.read(setting, f"--set {text}", None if words == ["null"] else words)
    return result


def find_setting(result: ConfigSource, key: str, source: str) -> Setting | None:
    """Return the setting ``key`` (``model.hidden_size`` or ``hidden_size``), or None after adding a problem."""
    group, _, name = key.replace("-", "_").rpartition(".")
    setting = SETTINGS.get(name)
    if setting and (not group or setting.is_in(group)):
        return setting
    guesses = len(result.problems) < MOST_PROBLEMS  # a guess takes a millisecond
    guess = setting.name if setting else did_you_mean(name, SETTINGS) if guesses else None
    meant = (f"did you mean {SETTINGS[guess].key}?",) if guess else ()
    result.doubtful |= {guess} if guess else set()
    result.problems.append(Problem("E005", f"{source}: there is no option {key}", meant))
    return None


def read_yaml(path: str) -> Mapping[str, Any] | Problem:
    """Return the contents of a YAML file of options, or the reason why it cannot be read."""
    try:
        tree = parse_yaml(read_small(path))
    except OSError as error:
        return Problem("E006", f"--config {path} cannot be read: {error.strerror}")
    except ValueError as error:
        return Problem("E006", f"--config {path} cannot be read as YAML: {error}")
    if not isinstance(tree, Mapping):
        return Problem("E006", f"--config {path} must hold 'name: value' lines, not {tree!r:.40}")
    return tree


ModelReader = Callable[[Path], Values]
"""Returns the fields of `ModelConfig` that the config.json in a folder determines. Raises UserError if it cannot."""


def from_hugging_face(load: Any, read_model: ModelReader | None) -> ConfigSource:
    """Read the model of ``--load hf:DIR``, or of a checkpoint with a config.json; empty for any other ``--load``."""
    if not isinstance(load, str) or not load.startswith(WEIGHTS_PREFIXES):
        return ConfigSource()
    try:
        folder = find_config_folder(load)
        if folder is None:  # the options describe the model
            return ConfigSource()
        if read_model is None:
            raise UserError([Problem("E850", f"this program does not read Hugging Face models, such as {folder}")])
        return ConfigSource(_limit_seq_length(read_model(folder)))
    except UserError as error:
        unknown = {
            name for name, setting in SETTINGS.items() if setting.section == "model"
        }  # fields that are not checked
        return ConfigSource(problems=list(error.problems), doubtful=unknown)


def from_checkpoint(saved: Mapping[str, Any]) -> ConfigSource:
    """Read the model in a checkpoint's configuration.

    Values that this version cannot read are left to :func:`megatron.arguments.compatibility.compare_configs`.
    """
    model = saved.get("model")
    found = from_mapping({"model": model}, "checkpoint") if isinstance(model, Mapping) else ConfigSource()
    return ConfigSource(_limit_seq_length(found.values))


def _limit_seq_length(model: Values) -> Values:
    """Lower the default sequence length to the number of positions of a model with fewer."""
    positions = model.get("max_position_embeddings") or TrainingConfig.seq_length
    return model | ({"seq_length": positions} if positions < TrainingConfig.seq_length else {})


def merge_values(sources: Iterable[Values]) -> Values:
    """Merge values; later ones override earlier ones."""
    merged: Values = {}
    for values in sources:
        for groups in EXCLUSIVE_OPTIONS:
            used = [group for group in groups if any(values.get(name) for name in group)]
            for name in (name for group in groups if used and group not in used for name in group):
                merged.pop(name, None)
        for name in REPLACED if values.get("hybrid_layer_pattern") else ():
            merged.pop(name, None)
        merged |= values
    return merged


def build_config(values: Values) -> RunConfig:
    """Return the configuration with ``values`` in place of the defaults."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in pattern_values(values).items():
        groups[SETTINGS[name].group][name] = value
    built = {group: cls(**groups[group]) for group, cls in GROUPS.items()}
    plugins = tuple(built.pop(group) for group in option_groups())
    return RunConfig(**built).with_plugin_options(plugins)


def resolve(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with derived defaults written out, so that a saved one has every number. Idempotent.

    ``vocab_size`` stays open until the tokenizer is known. An open ``lr_decay_iters`` stays open: it means the whole
    run, also when the run is extended later.
    """
    rank = config.model.lora_rank
    model = replace(
        config.model,
        num_query_groups=config.model.kv_groups,
        kv_channels=config.model.head_dim if config.model.has_attention else config.model.kv_channels,
        ffn_hidden_size=config.model.ffn,
        max_position_embeddings=config.model.max_position_embeddings or config.training.seq_length,
        lora_alpha=config.model.lora_alpha if rank is None else config.model.lora_scale * rank,
    )
    parallel = config.parallel
    with suppress(ScheduleError):  # reported by the pipeline checks
        parallel = resolve_pipeline(config.model, parallel)
    expert_tp = parallel.tensor_model_parallel_size if model.num_experts is None else parallel.expert_tp
    parallel = replace(parallel, expert_tensor_parallel_size=expert_tp)
    batch = full_global_batch_size(config.training, parallel.data_parallel_size(world_size))
    training = replace(config.training, global_batch_size=batch)
    if training.recompute_granularity == "full":
        method = training.recompute_method or "uniform"
        layers = training.recompute_num_layers or (1 if method == "uniform" else model.num_layers)
        training = replace(training, recompute_method=method, recompute_num_layers=layers)
    return replace(config, model=without_pattern(model), parallel=parallel, training=training)


def flat_values(config: RunConfig) -> Values:
    """Return every value of a configuration by field name."""
    return {name: setting.value_in(config) for name, setting in SETTINGS.items()}


def from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """Build a configuration from ``to_dict`` or any nested or flat mapping.

    Raises:
        UserError: with all unknown names and unreadable values, which plugins of the configuration may have named.
    """
    result = from_mapping(tree, "config")
    if result.problems:
        if missing := [name for name in result.values.get("plugin") or () if name not in sys.modules]:
            fixes = (f"--plugin {' '.join(missing)}",)
            raise UserError([replace(p, fixes=fixes) if p.code == "E002" else p for p in result.problems])
        raise UserError(result.problems)
    return build_config(result.values)


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return group -> field -> value, in plain YAML and JSON types."""
    tree: dict[str, dict[str, Any]] = {}
    for name, setting in SETTINGS.items():
        value = setting.value_in(config)
        tree.setdefault(setting.section, {})[name] = list(value) if isinstance(value, tuple) else value
    return tree


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration as a file for ``--config``."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(to_dict(config), Dumper=dumper, sort_keys=False, default_flow_style=None))
