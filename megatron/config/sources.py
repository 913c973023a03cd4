"""Where values come from (presets, files, flags, ``--set``), how they are laid over one another, and back to text.

A layer is a flat mapping of field name to value. Reading one never stops at the first mistake: it returns what could
be read and the problems with the rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.config.data_paths import SOURCE_OPTIONS
from megatron.config.hf import model_values, read_config
from megatron.config.model import ModelConfig
from megatron.config.problems import Problem, UserError, did_you_mean
from megatron.config.run import HUGGING_FACE, RunConfig, TrainingConfig
from megatron.config.settings import GROUPS, SETTINGS, Setting

Values = dict[str, Any]

SEPARATED = {"split": ","}
"""What separates the parts of a text, where that is no blank."""

LENGTHS = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
)
"""Fields that say the same length."""

ALTERNATIVES = (*(tuple((name,) for name in names) for names in LENGTHS), SOURCE_OPTIONS)
"""Ways to say one thing, each of one or more fields: a layer that uses some of them takes the place of whatever an
earlier layer said with the others."""


@dataclass
class Layer:
    """What one source said.

    Attributes:
        values: by field name.
        problems: with what could not be read.
        doubtful: fields that something unreadable was said about.
    """

    values: Values = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)

    def refuse(self, setting: Setting, said: str, error: ValueError, words: Sequence[str] = ()) -> None:
        """Note that ``said``, with ``words`` as its value, is none for the setting."""
        self.doubtful.add(setting.name)
        self.problems.append(Problem("E002", f"{said}: {error}", example(setting, words)))


def example(setting: Setting, words: Sequence[str] = ()) -> tuple[str, ...]:
    """What a person might paste instead of a flag with ``words``."""
    if len(words) > 1 and not setting.kind.many and setting.kind.scalar is str and not setting.option.choices:
        text = SEPARATED.get(setting.name, " ").join(words)
        return (f"{setting.flag} {shlex.quote(text)}",)
    if setting.option.choices:
        return (f"{setting.flag} {'|'.join(setting.option.choices)}",)
    if setting.kind.length:
        return (f"{setting.flag} {' '.join(['N'] * setting.kind.length)}",)
    return (setting.flag, setting.negative) if setting.kind.scalar is bool else ()


def from_tree(tree: Mapping[str, Any], source: str) -> Layer:
    """A layer from nested groups (``model: {hidden_size: 64}``) or flat names, or both.

    Args:
        tree: as read from YAML or JSON.
        source: what to call it in problems.

    """
    layer = Layer()
    for key, value in tree.items():
        name = str(key).replace("-", "_")
        if name in GROUPS and isinstance(value, Mapping):
            for inner, v in value.items():
                _take(layer, source, f"{name}.{inner}", v)
        elif name in SETTINGS or name not in GROUPS:  # optimizer is a group and one of its options
            _take(layer, source, name, value)
        elif value is not None:
            layer.problems.append(Problem("E005", f"{source}: {name} is a group of options, not {value!r}"))
    return layer


def _take(layer: Layer, source: str, key: str, value: Any) -> None:
    setting = find(layer, key, source)
    if setting is None:
        return
    if setting.name in layer.values:
        layer.problems.append(Problem("E003", f"{source}: {setting.name} is there twice, by group and flat"))
    try:
        layer.values[setting.name] = setting.from_native(value)
    except ValueError as error:
        layer.refuse(setting, f"{source}: {setting.key}", error)


def from_assignments(assignments: Iterable[str]) -> Layer:
    """A layer from ``model.hidden_size=64`` texts; items of a tuple are separated by blanks or commas."""
    layer = Layer()
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals:
            layer.problems.append(Problem("E005", f"--set {text}: has no '='", ("--set model.hidden_size=64",)))
            continue
        setting = find(layer, key.strip(), "--set")
        if setting is None:
            continue
        try:
            layer.values[setting.name] = setting.from_words(
                value.replace(",", " ").split() if setting.kind.many else [value]
            )
        except ValueError as error:
            layer.refuse(setting, f"--set {text}", error)
    return layer


def find(layer: Layer, key: str, source: str) -> Setting | None:
    """The setting called ``key`` (``model.hidden_size`` or ``hidden_size``); None, with a problem, when none is."""
    group, _, name = key.replace("-", "_").rpartition(".")
    setting = SETTINGS.get(name)
    if setting is not None and group in ("", setting.group):
        return setting
    guess = setting.name if setting is not None else did_you_mean(name, SETTINGS)
    meant = (f"did you mean {SETTINGS[guess].key}?",) if guess else ()
    layer.doubtful |= {guess} if guess else set()
    layer.problems.append(Problem("E005", f"{source}: there is no option {key}", meant))
    return None


def from_file(path: str) -> Layer:
    """The layer of a YAML file."""
    import yaml  # only those who have a file pay for it

    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        return Layer(problems=[Problem("E006", f"--config {path} cannot be read: {reason}")])
    except yaml.YAMLError as error:
        return Layer(problems=[Problem("E006", f"--config {path} is not YAML: {' '.join(str(error).split())}")])
    if not isinstance(tree, Mapping):
        return Layer(problems=[Problem("E006", f"--config {path} must hold 'name: value' lines, not {tree!r:.40}")])
    return from_tree(tree, path)


def from_hugging_face(load: Any) -> Layer:
    """The layer of the model that ``--load hf:DIR`` names, and an empty one for any other ``--load``.

    A model that knows fewer positions than the default sample has tokens is trained on samples of that length.
    """
    if not isinstance(load, str) or not load.startswith(HUGGING_FACE):
        return Layer()
    folder = Path(load.removeprefix(HUGGING_FACE))
    try:
        values = model_values(read_config(folder), str(folder / "config.json"))
    except UserError as error:
        # Without its config.json nothing is known about the model: what it would say is not checked.
        return Layer(problems=list(error.problems), doubtful={f.name for f in fields(ModelConfig)})
    return Layer(_with_samples(values))


def from_checkpoint(saved: Mapping[str, Any]) -> Layer:
    """The layer of the model in a checkpoint's configuration, as far as this version can read it.

    What it cannot read is left to :func:`megatron.config.compare.compare`.
    """
    model = saved.get("model")
    values: Values = {}
    for name, value in model.items() if isinstance(model, Mapping) else ():
        if name in SETTINGS and SETTINGS[name].group == "model":
            values |= from_tree({name: value}, "checkpoint").values
    return Layer(_with_samples(values))


def _with_samples(model: Values) -> Values:
    """Values of a model, with samples no longer than what it knows where that is less than the default."""
    positions = model.get("max_position_embeddings") or TrainingConfig.seq_length
    return model | ({"seq_length": positions} if positions < TrainingConfig.seq_length else {})


def lay_over(layers: Iterable[Values]) -> Values:
    """All layers in one, later ones winning."""
    merged: Values = {}
    for values in layers:
        for ways in ALTERNATIVES:
            used = [way for way in ways if any(values.get(name) for name in way)]
            for name in (name for way in ways if used and way not in used for name in way):
                merged.pop(name, None)
        merged |= values
    return merged


def build(values: Values) -> RunConfig:
    """The configuration with ``values`` in place of the defaults."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in values.items():
        groups[SETTINGS[name].group][name] = value
    return RunConfig(**{group: cls(**groups[group]) for group, cls in GROUPS.items()})


def flat(config: RunConfig) -> Values:
    """Every value of a configuration by field name."""
    return {name: getattr(getattr(config, s.group), name) for name, s in SETTINGS.items()}


def from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """The configuration that ``to_dict``, or any nested or flat mapping, describes.

    Raises:
        UserError: for unknown names and unreadable values, all at once.

    """
    layer = from_tree(tree, "config")
    if layer.problems:
        raise UserError(layer.problems)
    return build(layer.values)


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Group -> field -> value, in plain YAML and JSON types."""

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    groups = ((f.name, getattr(config, f.name)) for f in fields(config))
    return {name: {f.name: plain(getattr(group, f.name)) for f in fields(group)} for name, group in groups}


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as a file for ``--config``; reading it back gives an equal one."""
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None)
