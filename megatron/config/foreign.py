"""Flags that are not ours: Megatron-LM's, which are ignored or refused by name, and misspelt ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from megatron.config import megatron_absent as absent
from megatron.config import megatron_flags as table
from megatron.config import other_names
from megatron.config.problems import Problem, did_you_mean
from megatron.config.run import RunConfig
from megatron.config.settings import SPELLINGS
from megatron.config.sources import Layer

GENERAL = ("--preset", "--config", "--set", "--check-config", "--fake-world", "--fake-rank", "--world-size", "--help")
KEEP_SCHEDULE = ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler")
MOST_REASONS = 3


def judge(foreign: Iterable[Sequence[str]]) -> tuple[Layer, list[str]]:
    """What is wrong with flags the parser did not know, and notes on those that may be ignored.

    Args:
        foreign: each flag with the words after it; words that follow no flag by themselves.

    """
    layer, ignored = Layer(), dict[str, list[str]]()
    for spelling, words in map(_spelled, foreign):
        reason = _harmless(spelling, words)
        if reason:
            ignored.setdefault(reason, []).append(" ".join([spelling, *words]))
        else:
            layer.problems.append(_refusal(spelling, words, layer.doubtful))
    return layer, _told(ignored)


def _harmless(spelling: str, words: Sequence[str]) -> str | None:
    """Why a flag with its words may be ignored; None where it may not."""
    values, reason = other_names.HARMLESS.get(
        spelling, (table.HARMLESS_VALUES.get(spelling, words), table.IGNORED.get(spelling))
    )
    return reason if set(words) <= set(values) else None


def _told(ignored: Mapping[str, list[str]]) -> list[str]:
    """Notes on flags that are ignored, by reason; few enough to leave room for what matters."""
    if len(ignored) > MOST_REASONS:
        return [f"ignored, as docs/flags.md explains: {', '.join(chain(*ignored.values()))}"]
    return [f"ignored: {', '.join(flags)} because {reason}" for reason, flags in ignored.items()]


def _spelled(foreign: Sequence[str]) -> tuple[str, list[str]]:
    """A flag and its words; an empty flag, where there is none."""
    if not foreign[0].startswith("--"):
        return "", list(foreign)
    spelling, equals, value = foreign[0].partition("=")
    return spelling, [value, *foreign[1:]] if equals else list(foreign[1:])


def _refusal(spelling: str, words: list[str], doubtful: set[str]) -> Problem:
    if not spelling:
        return Problem("E001", f"{' '.join(words)}: belongs to no flag")
    plain = spelling.lower().replace("_", "-")
    if plain in other_names.OTHERWISE:
        why, ways = other_names.OTHERWISE[plain]
        fixes = tuple(way.replace("{}", " ".join(words) or "N") for way in ways)
        return Problem("E001", f"{spelling}: no such flag; {why}", fixes)
    meant = other_names.SAME.get(plain)
    reason = None if meant else why_not(spelling)
    if reason is None:
        return _misspelt(spelling, words, meant or _nearest(plain), doubtful)
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
    prefix = max((p for p in absent.FAMILIES if spelling.startswith(p)), key=len, default=None)
    if prefix is not None:
        return absent.FAMILIES[prefix], drop
    return ("nothing takes its place", drop) if spelling in absent.OTHERS.split() else None


def _nearest(spelling: str) -> str | None:
    """The flag of which this is most likely a misspelling."""
    return did_you_mean(spelling, [*SPELLINGS, *GENERAL, *table.IGNORED])


def _misspelt(spelling: str, words: list[str], meant: str | None, doubtful: set[str]) -> Problem:
    if meant is None:
        return Problem("E001", f"{spelling}: no such flag", ("--help",))
    if meant in SPELLINGS:
        doubtful.add(SPELLINGS[meant].name)
    return Problem("E001", f"{spelling}: no such flag; did you mean {meant}?", (" ".join([meant, *words]),))


def habits(spellings: Collection[str], config: RunConfig) -> list[Problem]:
    """Flags that are ignored only beside others, because what Megatron-LM assumes without these is not what we do."""
    found, model = [], config.model
    if "--group-query-attention" in spellings and model.num_query_groups is None:
        sentence = "--group-query-attention without --num-query-groups is one group in Megatron-LM, one per head here"
        fixes = ("--num-query-groups 1", f"--num-query-groups {model.num_attention_heads}")
        found.append(Problem("E004", sentence, fixes))
    if "--no-position-embedding" in spellings and model.position_embedding_type == "learned_absolute":
        sentence = "--no-position-embedding does not go with learned positions"
        fixes = ("--position-embedding-type none", "--position-embedding-type rope")
        found.append(Problem("E004", sentence, fixes))
    keep = next((flag for flag in KEEP_SCHEDULE if flag in spellings), None)
    if keep and config.checkpoint.resume_mode == "new-schedule":
        sentence = f"{keep} keeps the checkpoint's schedule, new-schedule replaces it"
        found.append(Problem("E004", sentence, ("--resume-mode exact", f"drop {keep}")))
    return found


def assumptions(spellings: Collection[str], said: Collection[str]) -> Iterator[str]:
    """Notes on what Megatron-LM would have done on its own account.

    Args:
        spellings: flags that were written.
        said: fields that something was said about.

    """
    if "--disable-bias-linear" in spellings and "activation" not in said:
        yield "activation is gelu_tanh; Megatron-LM without biases computes the exact form: --activation gelu"
    if {"--no-create-attention-mask-in-dataloader", "--reset-attention-mask"} <= set(spellings):
        yield "documents do not see each other; Megatron-LM, told to make no masks, would let them"
