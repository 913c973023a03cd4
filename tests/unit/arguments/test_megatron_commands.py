"""Command lines of real Megatron-LM runs: each starts, or is refused for the named features that are missing.

``python -m tests.unit.arguments.test_megatron_commands`` writes the verdicts; read what has changed before a commit.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import OWN_FLAGS, parse
from megatron.arguments.megatron_flags import foreign_flags
from megatron.config.errors import UserError
from megatron.config.settings import SETTINGS, SPELLINGS
from tests.unit.arguments.command import problems
from tools.from_megatron import Run, translate

COMMANDS = Path(__file__).parents[2] / "fixtures" / "megatron_commands.json.gz"
GOLDEN = Path(__file__).parents[2] / "golden" / "megatron_commands.txt"
MISSING_FEATURES = {"E001", "E002", "E004", "E210"}
"""Codes of refusals for something that is not here; E002 for a value of a flag that is."""


def verdict(command: dict[str, Any], folder: Path) -> str:
    """Return ``starts``, or the codes and flags that stop it, with the files it names in ``folder``."""
    for name in ("data.bin", "data.idx", "vocab.json", "merges.txt", "tokenizer.model"):
        (folder / name).touch()
    (folder / "tokenizer").mkdir(exist_ok=True)
    names = {"DATA": "data", "VOCAB": "vocab.json", "MERGES": "merges.txt", "SENTENCEPIECE": "tokenizer.model"}
    names |= {"TOKENIZER": "tokenizer", "DIR": "not_there"}
    stand_ins = re.compile("{(" + "|".join(names) + ")}")
    words = [stand_ins.sub(lambda match: str(folder / names[match[1]]), word) for word in command["args"]]
    check = ["--check-config", "--world-size", str(command["world_size"])]
    try:
        config = parse([*words, *check], {}).config
        _, translated, _ = translate(Run(words), ())
        assert parse([*translated, *check], {}).config == config, "its translation is the same run"
    except UserError as error:
        return "; ".join(sorted({f"{p.code} {p.sentence}".replace(str(folder), "FOLDER") for p in error.problems}))
    return "starts"


def verdicts(folder: Path) -> dict[str, str]:
    """Return the verdict of each command by its name."""
    with gzip.open(COMMANDS, "rt") as file:
        return {command["name"]: verdict(command, folder) for command in json.load(file)["commands"]}


def test_real_command_lines_start_or_name_missing_features(tmp_path: Path) -> None:
    found = verdicts(tmp_path)
    assert [f"{name}: {text}" for name, text in found.items()] == GOLDEN.read_text().splitlines()
    named = [set(re.findall(r"E\d{3}", text)) <= MISSING_FEATURES for text in found.values()]
    assert sum(named) >= 0.9 * len(named)
    assert not [text for text in found.values() if re.search(r"no such flag(?!;)|near are|did you mean", text)]


def test_every_kept_verdict_has_a_reason() -> None:
    for line in GOLDEN.read_text().splitlines():
        assert re.fullmatch(r"[\w.-]+: (starts|E\d{3} .{15,})", line), line


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def misspelt(flag: str, dice: random.Random) -> str:
    """Return a flag with one letter left out, doubled, replaced or put in another place."""
    at = dice.randrange(2, len(flag) - 1)
    letter, after = flag[at], flag[at + 1]
    changed = dice.choice([after, letter + letter + after, dice.choice(LETTERS) + after, after + letter])
    return flag[:at] + changed + flag[at + 2 :]


def kind(flag: str) -> Any:
    """Return what a flag takes, and whether it turns something off."""
    setting = SPELLINGS.get(flag)
    takes = None if setting is None or setting.scalar is bool or flag in setting.constants else setting.scalar
    return takes, re.match(r"--(no|disable)-", flag) is None, re.findall(r"\d+", flag)


def test_no_fix_of_300_misspellings_changes_the_type_or_sense_of_a_flag() -> None:
    dice, right = random.Random(7), 0
    values = {int: "3", float: "0.5", str: "x"}
    known = {*SPELLINGS, *OWN_FLAGS, *foreign_flags().handled, *foreign_flags().replaced, *foreign_flags().renamed}
    for _ in range(300):
        setting = dice.choice([*SETTINGS.values()])
        flag = dice.choice([name for name, each in SPELLINGS.items() if each is setting])
        typed = misspelt(flag, dice)
        if typed in known or foreign_flags().find(typed) is not None:
            continue
        value = "" if kind(flag)[0] is None else setting.choices[0] if setting.choices else values[setting.scalar]
        found = next(p for p in problems(f"{typed} {value}") if p.sentence.startswith(typed))
        assert found.code in ("E001", "E004"), found
        fixes = [fix.split()[0] for fix in found.fixes if fix.startswith("--")]
        assert all(kind(fix) == kind(flag) for fix in fixes), (typed, found)
        right += fixes == [flag]
    assert right > 200


def test_a_flag_with_an_argument_of_another_flag_gets_no_fix() -> None:
    dice, words = random.Random(8), sorted({part for flag in SPELLINGS for part in flag[2:].split("-")})
    known = {*SPELLINGS, *OWN_FLAGS, *foreign_flags().handled, *foreign_flags().replaced, *foreign_flags().renamed}
    swapped = set()
    for _ in range(300):
        parts = dice.choice(sorted(SPELLINGS))[2:].split("-")
        parts[dice.randrange(len(parts))] = dice.choice(words)
        swapped.add("--" + "-".join(parts))
    swapped = {flag for flag in swapped - known if foreign_flags().find(flag) is None}
    found = {p.sentence.partition(":")[0]: p.fixes for p in problems(" ".join(sorted(swapped))) if p.code == "E001"}
    assert found == dict.fromkeys(swapped, ())
    assert len(found) > 150


@pytest.mark.parametrize(
    "typed",
    [
        "--train-token 300000000000",
        "--embedding-layernorm",
        "--attention-head-kind multiquery",
        "--adam-beta3 0.9",
        "--num-layers-per-stage 4",
        "--max-lr-steps 5",
    ],
)
def test_a_different_name_gets_no_fix(typed: str) -> None:
    found = next(p for p in problems(typed) if p.code == "E001")
    assert not found.fixes, found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text("".join(f"{name}: {text}\n" for name, text in verdicts(Path(folder)).items()))
