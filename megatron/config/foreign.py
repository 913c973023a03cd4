"""Flags that are not ours: Megatron-LM's, which are ignored or refused by name, and misspelt ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megatron.config import megatron_flags as table
from megatron.config.model import ModelConfig
from megatron.config.problems import Problem, did_you_mean
from megatron.config.settings import SETTINGS
from megatron.config.sources import Layer

GENERAL = ("--preset", "--config", "--set", "--check-config", "--world-size", "--help")


def judge(unknown: Sequence[str]) -> tuple[Layer, list[str]]:
    """What is wrong with the words the parser did not know, and notes on those that may be ignored."""
    layer, notes = Layer(), list[str]()
    for spelling, words in _grouped(unknown):
        reason = table.IGNORED.get(spelling)
        if reason and set(words) <= set(table.HARMLESS_VALUES.get(spelling, words)):
            notes.append(f"ignored: {' '.join([spelling, *words])} because {reason}")
        else:
            layer.problems.append(_refusal(spelling, words, layer.doubtful))
    return layer, notes


def _grouped(unknown: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with the words after them; words before any flag come under an empty one."""
    spelling, words = "", list[str]()
    for word in unknown:
        if not word.startswith("--"):
            words.append(word)
            continue
        if spelling or words:
            yield spelling, words
        spelling, equals, value = word.partition("=")
        words = [value] if equals else []
    if spelling or words:
        yield spelling, words


def _refusal(spelling: str, words: list[str], doubtful: set[str]) -> Problem:
    if not spelling:
        return Problem("E001", f"{' '.join(words)}: belongs to no flag")
    reason = why_not(spelling)
    if reason is None:
        return _misspelt(spelling, words, doubtful)
    why, fixes = reason
    return Problem("E004", f"{' '.join([spelling, *words])} of Megatron-LM is not here: {why}", fixes)


def why_not(spelling: str) -> tuple[str, tuple[str, ...]] | None:
    """Why a flag of Megatron-LM is not here and what to do instead; None for a flag Megatron-LM has not either."""
    drop = (f"drop {spelling}",)
    if spelling in table.REFUSED:
        why, fixes = table.REFUSED[spelling]
        return why, fixes or drop
    if spelling in table.IGNORED:
        return f"{table.IGNORED[spelling]}, whatever is asked for", drop
    prefix = max((p for p in table.FAMILIES if spelling.startswith(p)), key=len, default=None)
    if prefix is not None:
        return table.FAMILIES[prefix], drop
    return ("nothing takes its place", drop) if spelling in table.OTHERS.split() else None


def _misspelt(spelling: str, words: list[str], doubtful: set[str]) -> Problem:
    about = {ours: setting.name for setting in SETTINGS.values() for ours in setting.spellings}
    guess = did_you_mean(spelling, [*about, *GENERAL, *table.IGNORED])
    if guess is None:
        return Problem("E001", f"{spelling}: no such flag", ("--help",))
    if guess in about:
        doubtful.add(about[guess])
    return Problem("E001", f"{spelling}: no such flag; did you mean {guess}?", (" ".join([guess, *words]),))


def habits(unknown: Sequence[str], model: ModelConfig) -> list[Problem]:
    """Flags that are ignored only beside others, because what Megatron-LM assumes without these is not what we do."""
    found = []
    if "--group-query-attention" in unknown and model.num_query_groups is None:
        sentence = "--group-query-attention without --num-query-groups is one group in Megatron-LM, one per head here"
        fixes = ("--num-query-groups 1", f"--num-query-groups {model.num_attention_heads}")
        found.append(Problem("E004", sentence, fixes))
    if "--no-position-embedding" in unknown and model.position_embedding_type == "learned_absolute":
        sentence = "--no-position-embedding does not go with learned positions"
        fixes = ("--position-embedding-type none", "--position-embedding-type rope")
        found.append(Problem("E004", sentence, fixes))
    return found


def assumptions(spellings: Collection[str], said: Collection[str]) -> list[str]:
    """Notes on what Megatron-LM would have done on its own account.

    Args:
        spellings: flags that were written.
        said: fields that something was said about.

    """
    if "--disable-bias-linear" in spellings and "activation" not in said:
        return ["activation is gelu_tanh; Megatron-LM without biases computes the exact form: --activation gelu"]
    return []
