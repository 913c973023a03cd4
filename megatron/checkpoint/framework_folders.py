"""Find the checkpoint in a folder of torch.distributed.checkpoint, DeepSpeed or nanotron, and its configuration."""

from __future__ import annotations

import re
from os.path import isdir, isfile  # unlike pathlib's they do not raise for a very long name
from pathlib import Path

from megatron.config.errors import Problem, UserError
from megatron.config.files import read_small
from megatron.config.schemes import DCP_PREFIX, DEEPSPEED_PREFIX, FRAMEWORK_PREFIXES, NANOTRON_PREFIX, split_scheme
from megatron.config.text import shell_word

MARKS = {DCP_PREFIX: ".metadata", DEEPSPEED_PREFIX: "*mp_rank_*_model_states.pt", NANOTRON_PREFIX: "model/**/model_*"}
"""Patterns of files that a checkpoint holds, by scheme."""

NEWEST = {DEEPSPEED_PREFIX: "latest", NANOTRON_PREFIX: "latest.txt"}
"""Files beside checkpoints that name the newest."""

CONFIG_FILES = ("config.json", "model_config.json")
"""Configurations of transformers and of nanotron."""


def find_framework_checkpoint(scheme: str, place: str, flag: str = "--load") -> Path:
    """Return the folder of a checkpoint: ``place``, or the newest in it.

    Raises:
        UserError: if there is none.
    """
    folder, mark = Path(place), MARKS[scheme]
    if isdir(folder) and any(folder.glob(mark)):
        return folder
    numbers = {int(found[1]): each for each in _folders(folder) if (found := re.search(r"(\d+)$", each.name))}
    candidates = [numbers[number] for number in sorted(numbers, reverse=True)]
    marker = folder / NEWEST.get(scheme, "")
    if scheme in NEWEST and isfile(marker):
        name = read_small(marker).decode(errors="replace").strip()
        candidates = [each for each in _folders(folder) if each.name == name]
        if not candidates:
            raise UserError([Problem("E801", f"{marker} names the checkpoint {name!r:.99}, which is not beside it")])
    for candidate in candidates:
        if any(candidate.glob(mark)):
            return candidate
    missing = "" if isdir(folder) else ", because there is no such folder"
    below = [path for each in _folders(folder) for path in (each, *_folders(each)) if any(path.glob(mark))]
    fixes = tuple(f"{flag} {shell_word(f'{scheme}{path}')}" for path in below[:2]) or (f"{flag} {scheme}CHECKPOINT",)
    sentence = f"{flag} {scheme}{folder} holds no checkpoint of this kind, which has {mark}{missing}"
    raise UserError([Problem("E801", sentence, fixes)])


def find_config_folder(location: str) -> Path | None:
    """Return the folder of the configuration that belongs to a checkpoint; None if there is none.

    It is in the folder of the checkpoint, or in the one above.
    """
    scheme, place = split_scheme(location)
    if scheme not in FRAMEWORK_PREFIXES:
        return Path(place)
    folder = find_framework_checkpoint(scheme, place)
    places = (folder, folder.absolute().parent)
    return next((each for each in places if any(isfile(each / name) for name in CONFIG_FILES)), None)


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_dir())
    except OSError:
        return []
