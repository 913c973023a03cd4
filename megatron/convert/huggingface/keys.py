"""Records of which a model type of transformers consists: its ``config.json``, and the tensors in its files.

A `ModelFamily` is one record used in both directions. Its ``keys`` are rows that each read some keys of config.json
into fields of `ModelConfig` and write them back: a `ConfigKey` for a number, a `KeyGroup` for the rest. ``always`` and
``fixed`` are the fields and the keys with one supported value. Its ``weights`` are the places of our tensors. `config`
and `weights` apply the records, which are in `families`.

A row of the weights names one of our modules and the axes of its weight, and the Hugging Face modules that it consists
of. These are described by the same axes: commas separate the dimensions of the stored tensor, and brackets select a
part of an axis. So ``"h, x g d"`` is stored as ``[h, x * g * d]``, and ``"g x[-1:] d, h"`` is the last element of each
group's ``x``, stored as ``[g * d, h]``. A dimension may join parts: ``"p[:1] f + p[1:] f, h"``. A name with ``{e}``
stands for one tensor per expert, which ``e[{e}]`` selects. A bias has the same row, without the weight's last axis, its
inputs. Rows contain only views, permutations, slices and joins, so they are invertible, and a box of our tensor is a
set of slices of theirs.

Capital letters are numbers of the model, `ModelFamily.numbers`. A factor before parentheses interleaves what they
join: ``"G*(r[:K] + r[K:]), h"`` is the first of ``G`` equal pieces of each part, then the second of each; a factor that
is an axis of ours takes one of its elements after the other.

Axes: v vocabulary, t positions, h hidden, g key/value heads, x queries, key and value of a group, d channels of a head,
o outputs of all heads, p gate and up, f width of the MLP, e experts, u one gate, r latent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron.arguments.validate import is_met
from megatron.config.attention_pattern import CAUSAL, MAX_LAYERS, MAX_TOKENS, format_layers
from megatron.config.layer_pattern import without_pattern
from megatron.config.model import ModelConfig
from megatron.config.option import Option, Role
from megatron.config.run import RunConfig
from megatron.config.text import format_selected_layers

JsonObject = dict[str, Any]
FieldValues = dict[str, Any]

WeightRows = Mapping[str, tuple[str, Mapping[str, str]]]
"""Our module -> axes of its weight, Hugging Face module -> axes. ``{i}`` is the layer, ``{e}`` the expert, and
``{symbol}`` the residual layer, counted over all blocks. Layers for further tokens, ``mtp.layers.{i}``, have the rows
of a block, too; Hugging Face counts them after the last of the model. Names of tensors that are no module's ``weight``
or ``bias`` are given in full."""

Capabilities = Mapping[str, Callable[[ModelConfig], bool]]
"""Option -> whether a family can express a model's value of it."""

_RESOLVED = {
    "num_query_groups": "kv_groups",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "moe_ffn_hidden_size": "expert_ffn",
    "moe_router_group_score_topk": "group_score_topk",
    "add_qkv_bias": "qkv_bias",
    "rope_type": "latent_rope_type",
    "yarn_original_max_position_embeddings": "yarn_original_length",
    "mtp_num_layers": "prediction_depths",
    "mamba_num_heads": "mamba_heads",
    "mamba_norm_groups": "mamba_norm_group_count",
}
"""Fields of `ModelConfig` whose value may be implied by others -> the property with the value that applies."""


def resolved(model: ModelConfig, name: str) -> Any:
    """Return the value of a field that applies to a model."""
    return getattr(model, _RESOLVED.get(name, name))


def effective_options(model: ModelConfig) -> dict[str, Option]:
    """Return the options of a model that have an effect: another value than their default, or than it implies."""
    run = RunConfig(model=model)

    def has_effect(name: str, option: Option) -> bool:
        default: FieldValues = {name: getattr(type(model), name)}
        changed = resolved(model, name) != resolved(replace(model, **default), name)
        return changed and all(is_met(need, run) for need in option.needs)

    options = {each.name: each.metadata["option"] for each in fields(model) if "option" in each.metadata}
    return {name: option for name, option in options.items() if has_effect(name, option)}


def exported(model: ModelConfig) -> ModelConfig:
    """Return the model in the form that the families express.

    It has no adapters, no layer pattern if it is a GPT, a window of all layers as ``window_size``, and others as a
    pattern of attention.
    """
    model = without_pattern(model.base)
    patterns = [model.pattern(layer) for layer in range(model.num_layers)]
    plain = model.attention_pattern is None and model.window_attn_skip_freq is None
    if plain or not all(pattern.only_window for pattern in patterns):
        return model
    windows = [pattern.window for pattern in patterns]
    if len({*windows}) == 1:
        return replace(model, attention_pattern=None, window_attn_skip_freq=None, window_size=windows[0])
    texts = ["global" if window is None else f"local:{window}" for window in windows]
    pattern = model.attention_pattern or format_layers(texts)
    return replace(model, attention_pattern=pattern, window_attn_skip_freq=None, window_size=None)


class UnsupportedConfigError(ValueError):
    """A value in config.json that is not supported. Raised by all functions here that read one."""


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json, a number, boolean or text, with the same meaning as a field of `ModelConfig`."""

    ours: str  # field of ModelConfig
    theirs: str  # key in config.json
    default: Any  # value of a missing key, as in the transformers class
    optional: bool = False  # null is allowed although the default is not null
    can: Capabilities = field(default_factory=dict)  # limits of the family

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of config.json that `read` uses."""
        return (self.theirs,)

    @property
    def options(self) -> tuple[str, ...]:
        """Fields of `ModelConfig` that `write` uses."""
        return (self.ours,)

    def read(self, config: JsonObject) -> FieldValues:
        """Return our field from a config.json."""
        if isinstance(self.default, bool):
            return {self.ours: read_bool(config, self.theirs, self.default)}
        return {self.ours: (read_text if isinstance(self.default, str) else read_number)(self, config)}

    def write(self, model: ModelConfig) -> FieldValues:
        """Return the key for a model."""
        return {self.theirs: resolved(model, self.ours)}


@dataclass(frozen=True)
class KeyGroup:
    """Keys of config.json and fields of `ModelConfig` that are converted together."""

    # keys that `read` uses; others are unknown and refused
    names: tuple[str, ...] = ()
    # fields of ModelConfig from a config.json; raises UnsupportedConfigError
    read: Callable[[JsonObject], FieldValues] = lambda config: {}
    # keys of config.json for a model that the family can express
    write: Callable[[ModelConfig], FieldValues] = lambda model: {}
    # which values of our options the keys can express
    can: Capabilities = field(default_factory=dict)
    # options of which they can express every value
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFamily:
    """One model type of transformers."""

    # transformers' class with a language-modelling head
    architecture: str
    # how keys of config.json and fields of ModelConfig correspond; the last row with a name counts
    keys: tuple[ConfigKey | KeyGroup, ...]
    # keys with the only supported values; the first is the value of a missing key
    fixed: Mapping[str, tuple[Any, ...]]
    # fields of ModelConfig with the only supported value; those that no row names have their default
    always: FieldValues
    # where all tensors are stored that a model can have
    weights: WeightRows
    # of all names in the files except the head's; missing in files of a model without head
    prefix: str
    # rows of experts that newer versions of transformers may store as one tensor for all, in place of those in weights
    stacked: WeightRows = field(default_factory=dict)
    # numbers of a model that the rows name, by their letters
    numbers: Callable[[ModelConfig], Mapping[str, int]] = lambda model: {}
    # further places of our tensors -> ours; an export fills them, and an import may lack them
    copies: Mapping[str, str] = field(default_factory=dict)
    # patterns of names, without the prefix, that are not weights
    buffers: tuple[str, ...] = ()
    # the model type of transformers with the same code, if it has none of this name
    known_as: str | None = None
    # transformers' default of tie_word_embeddings
    tied_by_default: bool = False

    @property
    def head(self) -> str:
        """Name of the output layer's weight in the files."""
        return f"{next(iter(self.weights['output_layer'][1]))}.weight"

    @property
    def options(self) -> set[str]:
        """The fields of `ModelConfig` that the family names: an export expresses these, or refuses their values."""
        named = (name for row in self.keys for name in (*row.options, *row.can))
        return {*self.always, *named, "untie_embeddings_and_output_weights"}

    def lacks(self, model: ModelConfig, effective: Mapping[str, Option] | None = None) -> list[str]:
        """Return the options of a model that the family cannot express; ``effective`` are its `effective_options`."""
        lacking = [name for name, value in self.always.items() if resolved(model, name) != value]
        lacking += [name for row in self.keys for name, can in row.can.items() if not can(model)]
        named, roles = self.options, (Role.SHAPE, Role.FUNCTION)
        changed = (effective_options(model) if effective is None else effective).items()
        return lacking + [name for name, option in changed if option.role in roles and name not in named]


def read_number(key: ConfigKey, config: JsonObject) -> Any:
    """Return the value of a key: a float if its default is one, else an int; or None where null is allowed."""
    value = config.get(key.theirs, key.default)
    fractional = isinstance(key.default, float)
    if value is None and (key.default is None or key.optional):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if fractional else int):
        raise UnsupportedConfigError(f"{key.theirs} is {value!r}, not {'a number' if fractional else 'a whole number'}")
    try:
        number = float(value)
        return number if fractional else value
    except OverflowError:
        raise UnsupportedConfigError(f"{key.theirs} is {value}, larger than any number of 64 bits") from None


def read_text(key: ConfigKey, config: JsonObject) -> Any:
    """Return the text of a key, or None where null is allowed."""
    value = config.get(key.theirs, key.default)
    if not isinstance(value, str) and not (value is None and key.optional):
        raise UnsupportedConfigError(f"{key.theirs} is {value!r}, not a text")
    return value


def read_bool(config: JsonObject, name: str, default: bool) -> bool:
    """Return the boolean value of a key."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise UnsupportedConfigError(f"{name} is {value!r}, not true or false")
    return value


def either_key(ours: str, default: int, *names: str, can: Capabilities | None = None) -> KeyGroup:
    """Return the key of a whole number that has several names, of which an export uses the first."""

    def read(config: JsonObject) -> FieldValues:
        given = {name: read_number(ConfigKey("", name, default), config) for name in names if name in config}
        if len({*given.values()}) > 1:
            sentence = " and ".join(f"{name} {value}" for name, value in given.items())
            raise UnsupportedConfigError(f"{sentence} contradict each other")
        return {ours: next(iter(given.values()), default)}

    return KeyGroup(names, read, lambda m: {names[0]: resolved(m, ours)}, can or {}, (ours,))


# ---- Rotary embeddings ----

_LENGTH = "original_max_position_embeddings"
_LLAMA3 = (
    ConfigKey("rope_scaling_factor", "factor", 8.0),
    ConfigKey("rope_low_freq_factor", "low_freq_factor", 1.0),
    ConfigKey("rope_high_freq_factor", "high_freq_factor", 4.0),
    ConfigKey("rope_original_max_position", _LENGTH, None),
)
_YARN = (
    ConfigKey("rotary_scaling_factor", "factor", 1.0),
    ConfigKey("yarn_original_max_position_embeddings", _LENGTH, None),
    ConfigKey("yarn_beta_fast", "beta_fast", 32.0),
    ConfigKey("yarn_beta_slow", "beta_slow", 1.0),
)
_LINEAR = (ConfigKey("rotary_seq_len_interpolation_factor", "factor", 1.0),)
_SCALINGS: dict[str, tuple[ConfigKey, ...]] = {"default": (), "linear": _LINEAR, "llama3": _LLAMA3, "yarn": _YARN}
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # transformers uses these in place of 0 and null
_MSCALES = {"mscale": 1.0, "mscale_all_dim": 0.0}  # our defaults, with which the factor is that of the paper
_YARN_OPTIONAL = {"attention_factor", "truncate", *_MSCALES}
_TRUNCATE = "truncate"
_THETA = ConfigKey("rotary_base", "rope_theta", 10000.0)
ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def read_rope(config: JsonObject, partial: bool = False) -> FieldValues:
    """Return the fields of `ModelConfig` for the rotary embedding of a config.json, some channels only if ``partial``.

    Transformers 5 writes ``rope_parameters``; earlier versions write ``rope_theta`` and ``rope_scaling``.
    """
    rope = _rope_parameters(config)
    fraction = rope.pop("partial_rotary_factor", None) or 1.0
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise UnsupportedConfigError(f"partial_rotary_factor is {fraction!r}, not a number above 0 and at most 1")
    if fraction != 1 and not partial:
        raise UnsupportedConfigError(f"partial_rotary_factor {fraction} is not supported for this model type")
    theta = read_number(_THETA, config | rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(_SCALINGS):  # a tuple, because kind may be unhashable
        raise UnsupportedConfigError(f"rope_type {kind!r} is not supported, only {', '.join(_SCALINGS)}")
    if kind == "yarn":
        _check_yarn(rope)
        rope |= {name: rope.get(name) or default for name, default in _YARN_BETAS.items()}
    missing = [key.theirs for key in _SCALINGS[kind] if rope.get(key.theirs) is None]
    if missing:
        raise UnsupportedConfigError(f"rope_type {kind!r} lacks {', '.join(missing)}")
    known = {*ROPE_KEYS, "rope_type", "type", *(key.theirs for key in _SCALINGS[kind])}
    unknown = sorted(rope.keys() - known - (_YARN_OPTIONAL if kind == "yarn" else set()))
    if unknown:
        raise UnsupportedConfigError(f"rope_type {kind!r} with {', '.join(unknown)} is not supported")
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": theta,
        "use_rope_scaling": kind == "llama3",
        **({"rotary_percent": float(fraction)} if partial else {}),
        **{key.ours: read_number(key, rope) for key in _SCALINGS[kind]},
        **(_read_yarn(rope) if kind == "yarn" else {}),
    }


def _rope_parameters(config: JsonObject) -> FieldValues:
    """Return the rope parameters of either version in one object."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    objects = isinstance(new, dict) and isinstance(old, dict)
    if new and old and new != (new | old if objects else old):
        raise UnsupportedConfigError(f"rope_parameters {new} and rope_scaling {old} contradict each other")
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise UnsupportedConfigError(f"rope_parameters are {rope!r}, not an object")
    top_level = {_LENGTH: config[_LENGTH]} if _LENGTH in config else {}  # takes precedence in transformers
    defaults = {_LENGTH: config.get("max_position_embeddings")}
    return defaults | {"partial_rotary_factor": config.get("partial_rotary_factor")} | rope | top_level


def _check_yarn(rope: JsonObject) -> None:
    """Raise UnsupportedConfigError if an option of YaRN differs from the paper."""
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    if not isinstance(factor, int | float) or factor < 1:
        raise UnsupportedConfigError(f"yarn's factor is {factor!r}, not a number of at least 1")
    usual = 0.1 * math.log(factor) + 1.0
    if attention is not None and not (isinstance(attention, float) and math.isclose(attention, usual, rel_tol=1e-6)):
        raise UnsupportedConfigError(
            f"yarn's attention_factor {attention!r} is not 0.1 ln(factor) + 1, the only one supported"
        )
    if attention is not None and rope.get("mscale") and rope.get("mscale_all_dim"):
        raise UnsupportedConfigError("yarn's attention_factor beside mscale and mscale_all_dim is not supported")


def _read_yarn(rope: JsonObject) -> FieldValues:
    """Read the options of YaRN that have a default; transformers uses mscale only beside mscale_all_dim."""
    mscales = {name: read_number(ConfigKey(name, name, 0.0, optional=True), rope) or 0.0 for name in _MSCALES}
    return {
        "yarn_correction_range_round_to_int": read_bool(rope, _TRUNCATE, True),
        **(mscales if all(mscales.values()) else _MSCALES),
    }


def write_rope(model: ModelConfig) -> FieldValues:
    """Return the rotary keys of a config.json, in the form that transformers 4 and 5 both read."""
    return {"rope_theta": model.rotary_base, "rope_scaling": _scaling(model)}


def _scaling(model: ModelConfig) -> JsonObject | None:
    kind = "linear" if model.rotary_seq_len_interpolation_factor != 1.0 else "default"
    kind = "llama3" if model.use_rope_scaling else kind
    if "yarn" in (model.latent_rope_type if model.has_latent_attention else model.position_embedding_type):
        kind = "yarn"
    scaling = {key.theirs: resolved(model, key.ours) for key in _SCALINGS[kind]}
    if kind == "yarn" and not model.yarn_correction_range_round_to_int:
        scaling[_TRUNCATE] = False
    mscales = {name: getattr(model, name) for name in _MSCALES}
    if kind == "yarn" and mscales != _MSCALES:
        scaling |= mscales
    return {"rope_type": kind, **scaling} if scaling else None


ROPE_OPTIONS = (
    *("position_embedding_type", "rotary_base", "use_rope_scaling", "yarn_correction_range_round_to_int"),
    *(key.ours for keys in _SCALINGS.values() for key in keys),
)
"""Options that `read_rope` reads and `write_rope` writes."""


def _has_known_mscale(model: ModelConfig) -> bool:
    mscales = {name: getattr(model, name) for name in _MSCALES}
    return mscales == _MSCALES or all(mscales.values())


_MSCALE: Capabilities = dict.fromkeys(_MSCALES, _has_known_mscale)
ROTATES: Capabilities = {"position_embedding_type": lambda m: m.position_embedding_type in ("rope", "yarn"), **_MSCALE}


def rope(
    theta: float = 10000.0,
    scaling: JsonObject | None = None,
    fraction: float | None = None,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    scaled: bool = True,
) -> KeyGroup:
    """Return the keys of rotary embeddings.

    Args:
        theta: transformers' default of the base.
        scaling: its default of ``rope_scaling``.
        fraction: its default of the fraction of channels that are rotated; None if all are.
        names: the keys of base and fraction.
        scaled: the model type has scaling.
    """
    base, part = names

    def read(config: JsonObject) -> FieldValues:
        default = {} if config.get("rope_parameters") or config.get("rope_scaling") else {"rope_scaling": scaling}
        given = {"rope_theta": config.get(base, theta)}
        given |= {} if fraction is None else {"partial_rotary_factor": config.get(part, fraction)}
        values = read_rope(config | given | default, partial=fraction is not None)
        if scaled:
            return values
        if values.keys() & {key.ours for keys in _SCALINGS.values() for key in keys}:
            raise UnsupportedConfigError("rotary embeddings of this model type are not scaled, as in transformers")
        return {name: values[name] for name in options}

    def write(model: ModelConfig) -> FieldValues:
        own = {} if part == "partial_rotary_factor" else {part: model.rotary_percent}  # before the others
        scaling_of_model = _scaling(model) or (None if scaling is None else {"rope_type": "default"})
        keys = {base: model.rotary_base, **own, "rope_scaling": scaling_of_model}
        return keys if fraction is None else keys | {part: model.rotary_percent}

    kinds = ("rope", "yarn") if scaled else ("rope",)
    options = ROPE_OPTIONS if scaled else ("position_embedding_type", "rotary_base")
    options += () if fraction is None else ("rotary_percent",)
    can: Capabilities = {"position_embedding_type": lambda m: m.position_embedding_type in kinds}
    can = {**can, **(_MSCALE if scaled else {})}
    return KeyGroup((*names, "rope_parameters", "rope_scaling", _LENGTH), read, write, can, options)


def latent_rope() -> KeyGroup:
    """Return the keys of rotary embeddings of latent attention."""

    def read(config: JsonObject) -> FieldValues:
        values, scaling = read_rope(config), _rope_parameters(config)
        kind, scores = values["position_embedding_type"], scaling.get("mscale_all_dim")
        if kind == "yarn" and scores and not scaling.get("mscale"):
            raise UnsupportedConfigError(f"yarn's mscale_all_dim {scores} without mscale is not supported")
        return values | {"position_embedding_type": "rope", "rope_type": kind}

    can: Capabilities = {"position_embedding_type": lambda m: m.position_embedding_type != "learned_absolute"}
    return KeyGroup(ROPE_KEYS, read, write_rope, {**can, **_MSCALE}, (*ROPE_OPTIONS, "rope_type"))


def rope_of_kinds(theta: float, local_theta: float, local_key: str | None = None) -> KeyGroup:
    """Return the keys of rotary embeddings that differ between layers with a window and others.

    Only the others are scaled. transformers 5 writes the parameters of both kinds in ``rope_parameters``; version 4
    writes those of the others, and the base of the first by a key of its own.

    Args:
        theta: transformers' default of ``rope_theta``.
        local_theta: that of layers with a window.
        local_key: the key of its own, if there is one.
    """
    locals_ = () if local_key is None else (local_key,)

    def read(config: JsonObject) -> FieldValues:
        kinds = config.get("rope_parameters") or {}
        if not isinstance(kinds, dict) or not all(isinstance(kinds.get(kind, {}), dict) for kind in (FULL, WINDOWED)):
            raise UnsupportedConfigError(f"rope_parameters are {kinds!r}, not one object for each of layer_types")
        unknown = sorted(kinds.keys() - {FULL, WINDOWED})
        if unknown:
            raise UnsupportedConfigError(f"rope_parameters with {', '.join(unknown)} are not supported")
        if local_key is None and not kinds and config.get("rope_theta", theta) != theta:
            sentence = f"rope_theta {config['rope_theta']} without rope_parameters is not supported, only {theta:g}"
            raise UnsupportedConfigError(f"{sentence}: versions of transformers differ on layers with a window")
        local = {"rope_theta": config.get(local_key or "", local_theta)} | kinds.get(WINDOWED, {})
        if local.keys() - {"rope_theta", "rope_type"} or local.get("rope_type", "default") != "default":
            raise UnsupportedConfigError(f"rope_parameters of {WINDOWED} {local} are not supported, only rope_theta")
        base = read_number(_THETA, local)
        values = read_rope({"rope_theta": theta} | config | {"rope_parameters": kinds.get(FULL)})
        return values | {"rotary_base_local": base}

    def write(model: ModelConfig) -> FieldValues:
        local = model.rotary_base_local or model.rotary_base
        usual = {"rope_type": "default"}
        full = {"rope_theta": model.rotary_base, **(_scaling(model) or usual)}
        both = {"rope_parameters": {FULL: full, WINDOWED: {"rope_theta": local, **usual}}}
        return write_rope(model) | both | dict.fromkeys(locals_, local)

    def can_write(model: ModelConfig) -> bool:
        windows = (model.pattern(n).window for n in range(model.num_layers) if model.rotary_kind(n) == "global")
        equal = model.rotary_base_local in (None, model.rotary_base)
        return (_scaling(model) is None or not any(windows)) and (equal or local_key is not None)

    return KeyGroup((*ROPE_KEYS, *locals_), read, write, {**ROTATES, "rotary_base_local": can_write}, ROPE_OPTIONS)


# ---- Layers with a window ----

WINDOW = ConfigKey("window_size", "sliding_window", 4096, optional=True)
WINDOWED, FULL = "sliding_attention", "full_attention"
"""Values of ``layer_types``."""


def read_layer_types(config: JsonObject, window: int | None, is_windowed: Callable[[int], bool]) -> FieldValues:
    """Read which layers have the window; without ``layer_types``, those for which ``is_windowed``."""
    layers = read_number(ConfigKey("num_layers", "num_hidden_layers", 32), config)
    kinds = config.get("layer_types")
    if kinds is None:
        windowed = (window is not None and is_windowed(layer) for layer in range(min(layers, MAX_LAYERS)))
        kinds = [WINDOWED if each else FULL for each in windowed]
    elif not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (WINDOWED, FULL) for kind in kinds):
        raise UnsupportedConfigError(f"layer_types {kinds} are not {layers} times {FULL} or {WINDOWED}")
    if WINDOWED not in kinds:
        return {"window_size": None, "attention_pattern": None}
    if window is None:
        raise UnsupportedConfigError(f"layer_types with {WINDOWED} need a sliding_window that is in use")
    if FULL not in kinds:
        return {"window_size": window, "attention_pattern": None}
    if not 0 < window <= MAX_TOKENS:
        raise UnsupportedConfigError(f"sliding_window is {window}, not 1 to {MAX_TOKENS:g}")
    patterns = {WINDOWED: f"local:{window}", FULL: "global"}
    return {"window_size": None, "attention_pattern": format_layers([patterns[kind] for kind in kinds])}


def write_layer_types(model: ModelConfig, always: bool = False) -> FieldValues:
    """Return the window, and which layers have it, unless all are equal and not ``always``."""
    windows = [model.pattern(layer).window for layer in range(model.num_layers)]
    kinds = [FULL if window is None else WINDOWED for window in windows]
    size = next(filter(None, windows), None)
    return {"sliding_window": size} | ({"layer_types": kinds} if always or len({*kinds}) > 1 else {})


def _layers_have_one_window(model: ModelConfig) -> bool:
    """Return True if every layer has full attention or the same window."""
    patterns = {model.pattern(layer) for layer in range(model.num_layers)}
    return all(pattern.only_window for pattern in patterns) and len(patterns - {CAUSAL}) <= 1


HAS_LAYER_TYPES: Capabilities = {"attention_pattern": _layers_have_one_window}


def layer_types(period: int | None = None) -> KeyGroup:
    """Return the keys of windows in all layers but every ``period``-th, or those that ``layer_types`` names."""

    def write(model: ModelConfig) -> FieldValues:
        keys = write_layer_types(model, always=True)
        return keys | {"sliding_window": keys["sliding_window"] or WINDOW.default}  # required even if no layer has one

    return KeyGroup(
        ("sliding_window", "layer_types"),
        lambda c: read_layer_types(
            c, read_number(WINDOW, c), lambda layer: period is None or (layer + 1) % period != 0
        ),
        write,
        HAS_LAYER_TYPES,
        ("window_size",),
    )


def windows_by_limit(
    layers: int,
    limit: int,
    is_windowed: Callable[[int, int], bool],
    write: Callable[[ModelConfig], FieldValues],
    switched: bool = True,
) -> KeyGroup:
    """Return the keys of a window in layers that ``max_window_layers`` decides on, unless ``layer_types`` does.

    Args:
        layers: transformers' number of layers.
        limit: its ``max_window_layers``.
        is_windowed: returns True for a layer and a limit if the layer has the window.
        write: returns the keys for a model.
        switched: only ``use_sliding_window`` turns the window on.
    """

    def read(config: JsonObject) -> FieldValues:
        given = read_number(ConfigKey("", "max_window_layers", limit), config)
        used = not switched or read_bool(config, "use_sliding_window", False)
        window = read_number(WINDOW, config) if used else None
        return read_layer_types({"num_hidden_layers": layers} | config, window, lambda i: is_windowed(i, given))

    names = (*("use_sliding_window",) * switched, "max_window_layers", "sliding_window", "layer_types")
    return KeyGroup(names, read, write, HAS_LAYER_TYPES, ("window_size",))


def read_no_rope_layers(config: JsonObject) -> FieldValues:
    """Read which layers have rotary embeddings, and which have a window: by default those without."""
    layers = min(read_number(ConfigKey("", "num_hidden_layers", 36), config), MAX_LAYERS)
    rotated, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval", 4)
    if rotated is None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise UnsupportedConfigError(f"no_rope_layer_interval is {interval!r}, not a whole number above 0")
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(each not in (0, 1) for each in rotated):
        raise UnsupportedConfigError(f"no_rope_layers {rotated} are not {layers} times 0 or 1")
    without = [int(not each) for each in rotated[:layers]]
    period = without.index(1) + 1 if 1 in without else 0
    regular = period and without == [int((layer + 1) % period == 0) for layer in range(layers)]
    frequency = (str(period) if regular else str(without)) if period else None
    used = read_bool(config, "use_sliding_window", False)
    window = read_number(replace(WINDOW, default=None), config) if used else None
    return {"no_rope_freq": frequency} | read_layer_types(config, window, lambda layer: bool(without[layer]))


def write_no_rope_layers(model: ModelConfig) -> FieldValues:
    """Return which layers have rotary embeddings, and which a window."""
    rotated = [int(model.rotary_kind(layer) is not None) for layer in range(model.num_layers)]
    windows = write_layer_types(model, always=True)
    used = windows["sliding_window"] is not None
    return {"no_rope_layers": rotated, "use_sliding_window": used} | windows


# ---- Layers with experts ----


def layers_with_experts(
    default: int,
    names: tuple[str, ...],
    read: Callable[[JsonObject, int], Sequence[bool]],
    write: Callable[[Sequence[bool]], FieldValues],
) -> KeyGroup:
    """Return the keys that say which layers have experts.

    Args:
        default: transformers' number of layers.
        names: the keys.
        read: says of each layer whether it has experts, from a config.json and the number of layers.
        write: returns the keys for such a list, or none if they cannot express it.
    """

    def read_layers(config: JsonObject) -> FieldValues:
        layers = read_number(ConfigKey("num_layers", "num_hidden_layers", default), config)
        chosen = read(config, max(0, min(layers, MAX_LAYERS)))
        return {"moe_layer_freq": None if all(chosen) else format_selected_layers(chosen)}

    def chosen(model: ModelConfig) -> list[bool]:
        return [model.has_experts(layer) for layer in range(model.num_layers)]

    can: Capabilities = {"moe_layer_freq": lambda m: bool(write(chosen(m)))}
    return KeyGroup(names, read_layers, lambda m: write(chosen(m)), can)


# ---- Attention scores, activations and dropout ----


def softmax_scale(key: str, default: float, power: float) -> KeyGroup:
    """Return the key of the factor of attention scores, ``value ** power``; whole numbers if the power is negative."""

    def read(config: JsonObject) -> FieldValues:
        value = read_number(ConfigKey("softmax_scale", key, default), config)
        if not 0 < value < math.inf:
            raise UnsupportedConfigError(f"{key} is {value}, not above 0")
        return {"softmax_scale": value**power}

    def exported(model: ModelConfig) -> float:
        value = (model.softmax_scale or model.head_dim**-0.5) ** (1 / power)
        return value if power == 1 else max(1, round(value))

    def can(model: ModelConfig) -> bool:
        return model.softmax_scale is None or math.isclose(exported(model) ** power, model.softmax_scale, rel_tol=1e-12)

    return KeyGroup((key,), read, lambda m: {key: exported(m)}, {"softmax_scale": can})


def softcaps(attention: float | None, logits: float | None) -> KeyGroup:
    """Return the keys of capped attention scores and capped logits, which are null for none, and their defaults."""
    defaults = {"attn_logit_softcapping": attention, "final_logit_softcapping": logits}

    def read(config: JsonObject) -> FieldValues:
        return {n: read_number(ConfigKey(n, n, 0.0, optional=True), defaults | config) for n in defaults}

    names = tuple(defaults)
    return KeyGroup(names, read, lambda m: {name: getattr(m, name) for name in names}, options=names)


GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
"""transformers' names of activations that are not gated."""
GEGLUS = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "gelu_new": "geglu_tanh", "silu": "swiglu"}
"""Its names of activations that gate; an export writes the first name of a function."""


def activation(key: str, default: str, names: Mapping[str, str]) -> KeyGroup:
    """Return the key of the activation, with transformers' ``names`` of ours."""

    def read(config: JsonObject) -> FieldValues:
        name = config.get(key, default)
        if name not in tuple(names):  # a tuple, because the name may be unhashable
            raise UnsupportedConfigError(f"{key} {name!r} is not supported, only {', '.join(names)}")
        return {"activation": names[name]}

    def write(model: ModelConfig) -> FieldValues:
        fitting = [name for name, ours in names.items() if ours == model.activation]
        return {key: default if default in fitting else fitting[0]}

    return KeyGroup((key,), read, write, {"activation": lambda m: m.activation in names.values()})


def equal_dropout(residual: str, embedding: str, default: float) -> tuple[ConfigKey, KeyGroup]:
    """Return the keys of the dropout rates of residual branches and of embeddings, which must be equal here."""
    key = ConfigKey("hidden_dropout", residual, default)

    def read(config: JsonObject) -> FieldValues:
        rates = [config.get(name, default) for name in (residual, embedding)]
        if rates[0] != rates[1]:
            raise UnsupportedConfigError(f"{residual} {rates[0]} and {embedding} {rates[1]} must be equal")
        return {}

    return key, KeyGroup((embedding,), read, lambda m: {embedding: m.hidden_dropout})
