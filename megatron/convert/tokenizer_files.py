"""Tokenizer files and generation settings: in a Hugging Face folder, in a checkpoint, and from one run to the next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import raise_if_any
from megatron.checkpoint.format import Manifest
from megatron.config.files import TABLE_FILE_BYTES, parse_json
from megatron.config.text import format_bytes
from megatron.convert.huggingface.config import SPECIAL_TOKEN_IDS
from megatron.data.errors import DataError

TOKENIZER_PREFIX = "tokenizer/"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Tokenizer files of a Hugging Face folder, and those ending in ``MODEL_SUFFIX``. A checkpoint stores them under
``TOKENIZER_PREFIX``."""

MODEL_SUFFIX = ".model"
"""Suffix of the models of sentencepiece and tiktoken."""

GENERATION_CONFIG_FILE = "generation_config.json"

SmallFiles = Mapping[str, Path | bytes]
"""Contents or paths of small files, by their names in a checkpoint."""


def find_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Return the small files of a Hugging Face folder that a checkpoint stores, by their names in the checkpoint.

    Raises:
        CheckpointError: when one is not small.
    """
    models = (path.name for path in sorted(folder.glob(f"*{MODEL_SUFFIX}")))
    files = {
        **{TOKENIZER_PREFIX + name: folder / name for name in (*TOKENIZER_FILES, *models)},
        GENERATION_CONFIG_FILE: folder / GENERATION_CONFIG_FILE,
    }
    found = {name: path for name, path in files.items() if path.is_file()}
    large = [str(path) for path in found.values() if path.stat().st_size > TABLE_FILE_BYTES]
    raise_if_any(folder, {f"holds files larger than {format_bytes(TABLE_FILE_BYTES)}": large})
    return found


def saved_tokenizer_files(manifest: Manifest) -> dict[str, bytes]:
    """Return the content of the same files in a checkpoint.

    Raises:
        DamagedCheckpointError: when one is missing or changed.
    """
    names = {name: name.removeprefix(TOKENIZER_PREFIX) for name in manifest.files if name.startswith(TOKENIZER_PREFIX)}
    known = {
        stored
        for stored, name in names.items()
        if name in TOKENIZER_FILES or (name.endswith(MODEL_SUFFIX) and "/" not in name)
    }
    return {name: manifest.read_file(name) for name in manifest.files if name in known | {GENERATION_CONFIG_FILE}}


def by_huggingface_names(carried: SmallFiles) -> dict[str, bytes]:
    """Return the content of these files by their names in a Hugging Face folder."""
    return {name.removeprefix(TOKENIZER_PREFIX): _bytes(file) for name, file in carried.items()}


TOKENIZER_JSON = TOKENIZER_PREFIX + "tokenizer.json"


def files_to_carry(recorded: SmallFiles, carried: SmallFiles) -> dict[str, Path | bytes]:
    """Return the small files for the run's checkpoints: the tokenizer of its data, and the other files it loaded.

    Args:
        recorded: tokenizer files of the run's data.
        carried: files of the checkpoint or model that the run starts from.

    Raises:
        DataError: if the generation_config.json in ``carried`` cannot be read.
    """
    if not recorded:
        return dict(carried)
    same = TOKENIZER_JSON in carried and not tokenizer_notes(recorded, carried)
    kept = {name: content for name, content in carried.items() if same or not name.startswith(TOKENIZER_PREFIX)}
    if GENERATION_CONFIG_FILE in kept and not same:  # its special token ids belong to another tokenizer
        settings = _generation_settings(_bytes(kept[GENERATION_CONFIG_FILE]))
        others = {name: value for name, value in settings.items() if name not in SPECIAL_TOKEN_IDS}
        kept[GENERATION_CONFIG_FILE] = json.dumps(others).encode()
    return kept | dict(recorded)


def with_end_ids(files: SmallFiles, ends: Sequence[int]) -> dict[str, Path | bytes]:
    """Return the files with a generation_config.json that stops at the ids ``ends`` too.

    Raises:
        DataError: if there is one, and it cannot be read.
    """
    settings = _generation_settings(_bytes(files.get(GENERATION_CONFIG_FILE, b"{}")))
    before = settings.get("eos_token_id")
    known = before if isinstance(before, list) else [] if before is None else [before]
    found = list(dict.fromkeys([*ends, *known]))
    if set(found) == set(known) or (not known and len(found) < 2):  # the end of a document is written in any case
        return dict(files)
    return {**files, GENERATION_CONFIG_FILE: json.dumps(settings | {"eos_token_id": found}).encode()}


def tokenizer_notes(recorded: SmallFiles, carried: SmallFiles) -> list[str]:
    """Return a note if the data's tokenizer is not the one that the weights were trained with."""
    if TOKENIZER_JSON not in recorded or TOKENIZER_JSON not in carried:
        return []
    if _bytes(recorded[TOKENIZER_JSON]) == _bytes(carried[TOKENIZER_JSON]):
        return []
    return [
        "the data's tokenizer is not that of the weights, so token ids may have other meanings: "
        "pass the folder of the right one to tools/preprocess_data.py --tokenizer-model"
    ]


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _generation_settings(generation: bytes) -> dict[str, Any]:
    """Parse a generation_config.json."""
    try:
        return dict(parse_json(generation))
    except (ValueError, TypeError) as error:
        raise DataError(f"the {GENERATION_CONFIG_FILE} of the loaded model is not a JSON object: {error}") from error
