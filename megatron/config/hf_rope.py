"""Rotary positions in a Hugging Face ``config.json``: plain, Llama-3's scaling and YaRN."""

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
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # what transformers takes 0 and null for
_YARN_ODDITIES = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}
_THETA = Key("rotary_base", "rope_theta", 10000.0)
ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def read_rope(config: Json) -> Values:
    """Fields of `ModelConfig` that a config.json's rotary positions determine.

    Transformers 5 writes ``rope_parameters``; before, it was ``rope_theta`` and ``rope_scaling``.

    Raises:
        RefusedError: when they are of a kind that is not here.
    """
    said = _said(config)
    theta = value_of(_THETA, config | said)
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in tuple(_SCALINGS):  # it may be of any type
        raise RefusedError(f"rope_type {kind!r} is not here; these are: {', '.join(_SCALINGS)}")
    if kind == "yarn":
        _refuse_odd_yarn(said)
        said |= {name: said.get(name) or default for name, default in _YARN_BETAS.items()}
    missing = [key.theirs for key in _SCALINGS[kind] if said.get(key.theirs) is None]
    if missing:
        raise RefusedError(f"rope_type {kind!r} lacks {', '.join(missing)}")
    known = {*ROPE_KEYS, "rope_type", "type", *(key.theirs for key in _SCALINGS[kind])}
    strange = sorted(said.keys() - known - (_YARN_ODDITIES if kind == "yarn" else set()))
    if strange:
        raise RefusedError(f"rope_type {kind!r} with {', '.join(strange)} is not here")
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": theta,
        "use_rope_scaling": kind == "llama3",
        **{key.ours: value_of(key, said) for key in _SCALINGS[kind]},
    }


def _said(config: Json) -> Values:
    """All that is said of rotary positions, in one object."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise RefusedError(f"rope_parameters {new} and rope_scaling {old} contradict each other")
    said = new or old or {}
    if not isinstance(said, dict):
        raise RefusedError(f"rope_parameters are {said!r}, not an object")
    share = said.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (1, None):
        raise RefusedError(f"partial_rotary_factor {share} is not what this model type computes")
    outside = {_LENGTH: config[_LENGTH]} if _LENGTH in config else {}  # transformers lets it win
    return {_LENGTH: config.get("max_position_embeddings")} | said | outside


def _refuse_odd_yarn(said: Json) -> None:
    """Options of YaRN that have one value here, the paper's.

    Raises:
        RefusedError: when one has another.
    """
    factor, attention = said.get("factor"), said.get("attention_factor")
    if not isinstance(factor, int | float) or factor < 1:
        raise RefusedError(f"yarn's factor is {factor!r}, not a number from 1")
    usual = 0.1 * math.log(factor) + 1.0
    if attention is not None and not (isinstance(attention, float) and math.isclose(attention, usual, rel_tol=1e-6)):
        raise RefusedError(f"yarn's attention_factor {attention!r} is not 0.1 ln(factor) + 1, the only one here")
    if said.get("mscale") and said.get("mscale_all_dim"):
        raise RefusedError("yarn's mscale and mscale_all_dim are not here")
    if said.get("truncate", True) is not True:
        raise RefusedError("yarn with truncate false is not here")


def write_rope(model: ModelConfig) -> Values:
    """Keys of a config.json, in the spelling that transformers 4 and 5 both read."""
    kind = "yarn" if model.position_embedding_type == "yarn" else "llama3" if model.use_rope_scaling else "default"
    scaling = {key.theirs: getattr(model, key.ours) for key in _SCALINGS[kind]}
    return {"rope_theta": model.rotary_base, "rope_scaling": {"rope_type": kind, **scaling} if scaling else None}
