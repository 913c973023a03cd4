"""Rotary embedding in a Hugging Face ``config.json``: plain, with Llama-3 scaling, and YaRN."""

from __future__ import annotations

import math

from megatron.config.hf_keys import Json, Key, RefusedError, Values, value_of
from megatron.config.model import ModelConfig

_LENGTH = "original_max_position_embeddings"
_LLAMA3 = (
    Key("rope_scaling_factor", "factor", 8.0),
    Key("rope_low_freq_factor", "low_freq_factor", 1.0),
    Key("rope_high_freq_factor", "high_freq_factor", 4.0),
    Key("rope_original_max_position", _LENGTH, None),
)
_YARN = (
    Key("rotary_scaling_factor", "factor", 1.0),
    Key("yarn_original_max_position_embeddings", _LENGTH, None),
    Key("yarn_beta_fast", "beta_fast", 32.0),
    Key("yarn_beta_slow", "beta_slow", 1.0),
)
_SCALINGS: dict[str, tuple[Key, ...]] = {"default": (), "llama3": _LLAMA3, "yarn": _YARN}
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # transformers uses these in place of 0 and null
_YARN_FIXED = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}  # supported with one value only
_THETA = Key("rotary_base", "rope_theta", 10000.0)
ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def read_rope(config: Json) -> Values:
    """Return the fields of `ModelConfig` for the rotary embedding of a config.json.

    Transformers 5 writes ``rope_parameters``; earlier versions write ``rope_theta`` and ``rope_scaling``.

    Raises:
        RefusedError: when the rope type or a value of it is not supported.
    """
    rope = _rope_parameters(config)
    theta = value_of(_THETA, config | rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(_SCALINGS):  # a tuple, because kind may be unhashable
        raise RefusedError(f"rope_type {kind!r} is not supported, only {', '.join(_SCALINGS)}")
    if kind == "yarn":
        _check_yarn(rope)
        rope |= {name: rope.get(name) or default for name, default in _YARN_BETAS.items()}
    missing = [key.theirs for key in _SCALINGS[kind] if rope.get(key.theirs) is None]
    if missing:
        raise RefusedError(f"rope_type {kind!r} lacks {', '.join(missing)}")
    known = {*ROPE_KEYS, "rope_type", "type", *(key.theirs for key in _SCALINGS[kind])}
    unknown = sorted(rope.keys() - known - (_YARN_FIXED if kind == "yarn" else set()))
    if unknown:
        raise RefusedError(f"rope_type {kind!r} with {', '.join(unknown)} is not supported")
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": theta,
        "use_rope_scaling": kind == "llama3",
        **{key.ours: value_of(key, rope) for key in _SCALINGS[kind]},
    }


def _rope_parameters(config: Json) -> Values:
    """Return the rope parameters of either version in one object."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise RefusedError(f"rope_parameters {new} and rope_scaling {old} contradict each other")
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise RefusedError(f"rope_parameters are {rope!r}, not an object")
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (1, None):
        raise RefusedError(f"partial_rotary_factor {fraction} is not supported for this model type")
    top_level = {_LENGTH: config[_LENGTH]} if _LENGTH in config else {}  # takes precedence in transformers
    return {_LENGTH: config.get("max_position_embeddings")} | rope | top_level


def _check_yarn(rope: Json) -> None:
    """Raise RefusedError if an option of YaRN differs from the paper."""
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    if not isinstance(factor, int | float) or factor < 1:
        raise RefusedError(f"yarn's factor is {factor!r}, not a number of at least 1")
    usual = 0.1 * math.log(factor) + 1.0
    if attention is not None and not (isinstance(attention, float) and math.isclose(attention, usual, rel_tol=1e-6)):
        raise RefusedError(f"yarn's attention_factor {attention!r} is not 0.1 ln(factor) + 1, the only one supported")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        raise RefusedError("yarn's mscale and mscale_all_dim are not supported")
    if rope.get("truncate", True) is not True:
        raise RefusedError("yarn with truncate false is not supported")


def write_rope(model: ModelConfig) -> Values:
    """Return the rotary keys of a config.json, in the form that transformers 4 and 5 both read."""
    kind = "yarn" if model.position_embedding_type == "yarn" else "llama3" if model.use_rope_scaling else "default"
    scaling = {key.theirs: getattr(model, key.ours) for key in _SCALINGS[kind]}
    return {"rope_theta": model.rotary_base, "rope_scaling": {"rope_type": kind, **scaling} if scaling else None}
