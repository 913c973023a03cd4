"""The tokenizer beside a model: as ``transformers`` loads it, and the tokens that end a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.config.files import parse_json
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.check import check_tokenizer
from megatron.convert.huggingface.config import CONFIG_FILE, build_config_json
from megatron.convert.huggingface.convert import special_token_ids
from megatron.convert.tokenizer_files import GENERATION_CONFIG_FILE, MODEL_SUFFIX, TOKENIZER_FILES
from megatron.data.tokenizers.huggingface import load_with_transformers
from megatron.inference.text import Codec, InferenceError


def stop_ids(files: Mapping[str, bytes], codec: Codec) -> frozenset[int]:
    """Return the tokens that end a text, from generation_config.json, else config.json, else the tokenizer."""
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        try:
            named = parse_json(files.get(name, b"{}")).get("eos_token_id")
            ids = named if isinstance(named, list) else [named]
            if named is not None:
                return frozenset(int(i) for i in ids)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise InferenceError(f"{name}: eos_token_id cannot be read: {error}") from error
    return frozenset() if codec.end is None else frozenset({codec.end})


def load_tokenizer(files: Mapping[str, bytes], model: ModelConfig) -> Any:
    """Return the tokenizer in these files, as ``transformers`` loads it from the model's Hugging Face folder.

    Raises:
        InferenceError: if there is none, or it cannot be read.
    """
    if not any(name in TOKENIZER_FILES or name.endswith(MODEL_SUFFIX) for name in files):
        raise InferenceError("the model has no tokenizer, which texts need", "--tokenizer-model DIR")
    try:
        if CONFIG_FILE not in files:  # of a checkpoint: what its export would hold
            config = build_config_json(model, special=special_token_ids(files, model.vocab))
            files = check_tokenizer(files, config) | {CONFIG_FILE: json.dumps(config).encode()}
        return load_with_transformers(files)
    except Exception as error:  # whatever the class that transformers chooses finds wrong with the files
        raise InferenceError(f"the tokenizer cannot be loaded: {error}", "--tokenizer-model DIR") from error
