"""Handling of unknown flags: Megatron-LM flags are ignored or refused by name, misspelled flags get a suggestion."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from megatron.config.megatron_absent import FAMILIES, OTHERS
from megatron.config.megatron_flags import HARMLESS_VALUES, IGNORED, REFUSED
from megatron.config.other_names import HARMLESS, OTHERWISE, SAME
from megatron.config.problems import Problem, did_you_mean
from megatron.config.run import RunConfig
from megatron.config.settings import SPELLINGS
from megatron.config.sources import Layer

GENERAL = ("--preset", "--config", "--set", "--check-config", "--fake-world", "--fake-rank", "--world-size", "--help")
KEEP_SCHEDULE = ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler")
MOST_REASONS = 3


def judge(foreign: Iterable[Sequence[str]]) -> tuple[Layer, list[str]]:
    """Return the problems of flags that the parser does not know, and notes on those that are ignored.

    Args:
        foreign: each unknown flag with its arguments, and arguments that follow no flag.
    """
    layer = Layer()
    ignored: dict[str, list[str]] = {}
    for words in foreign:
        spelling, arguments = _split(words)
        reason = _ignore_reason(spelling, arguments)
        if reason:
            ignored.setdefault(reason, []).append(" ".join([spelling, *arguments]))
        else:
            layer.problems.append(_problem(spelling, arguments, layer.doubtful))
    if len(ignored) > MOST_REASONS:
        return layer, [f"ignored, as docs/flags.md explains: {', '.join(chain(*ignored.values()))}"]
    return layer, [f"ignored: {', '.join(flags)} because {reason}" for reason, flags in ignored.items()]


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split ``--flag=value ...`` into flag and arguments; the flag is empty if there is none."""
    if not words[0].startswith("--"):
        return "", list(words)
    spelling, equals, value = words[0].partition("=")
    return spelling, [value, *words[1:]] if equals else list(words[1:])


def _ignore_reason(spelling: str, arguments: Sequence[str]) -> str | None:
    """Return the reason why a flag with these arguments is ignored, or None if it is not."""
    values, reason = HARMLESS.get(spelling, (HARMLESS_VALUES.get(spelling, arguments), IGNORED.get(spelling)))
    return reason if set(arguments) <= set(values) else None


def _problem(spelling: str, arguments: list[str], doubtful: set[str]) -> Problem:
    """Return the problem of an unknown flag, and add the option that was meant to ``doubtful``."""
    if not spelling:
        return Problem("E001", f"{' '.join(arguments)}: belongs to no flag")
    normalized = spelling.lower().replace("_", "-")
    if normalized in OTHERWISE:
        why, templates = OTHERWISE[normalized]
        fixes = tuple(template.replace("{}", " ".join(arguments) or "N") for template in templates)
        return Problem("E001", f"{spelling}: no such flag; {why}", fixes)
    meant = SAME.get(normalized)
    reason = None if meant else why_not(spelling)
    if reason is not None:
        why, fixes = reason
        return Problem("E004", f"{' '.join([spelling, *arguments])} of Megatron-LM is not supported: {why}", fixes)
    meant = meant or did_you_mean(normalized, [*SPELLINGS, *GENERAL, *IGNORED])
    if meant is None:
        return Problem("E001", f"{spelling}: no such flag", ("--help",))
    if meant in SPELLINGS:
        doubtful.add(SPELLINGS[meant].name)
    return Problem("E001", f"{spelling}: no such flag; did you mean {meant}?", (" ".join([meant, *arguments]),))


def why_not(spelling: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the reason why a Megatron-LM flag is refused, and fixes; None if it is not a flag of Megatron-LM."""
    drop = (f"drop {spelling}",)
    if spelling in REFUSED:
        why, fixes = REFUSED[spelling]
        return why, fixes or drop
    if spelling in IGNORED:
        return f"{IGNORED[spelling]}; other values are not supported", drop
    prefix = max((p for p in FAMILIES if spelling.startswith(p)), key=len, default=None)
    if prefix is not None:
        return FAMILIES[prefix], drop
    return ("it has no counterpart", drop) if spelling in OTHERS.split() else None


def habits(spellings: Collection[str], config: RunConfig) -> list[Problem]:
    """Return the problems of flags that are ignored only where Megatron-LM's implied default is the same as ours."""
    found, model = [], config.model
    if "--group-query-attention" in spellings and model.num_query_groups is None:
        sentence = (
            "--group-query-attention without --num-query-groups means one group in Megatron-LM, one per head here"
        )
        fixes = ("--num-query-groups 1", f"--num-query-groups {model.num_attention_heads}")
        found.append(Problem("E004", sentence, fixes))
    if "--no-position-embedding" in spellings and model.position_embedding_type == "learned_absolute":
        sentence = "--no-position-embedding contradicts --position-embedding-type learned_absolute"
        fixes = ("--position-embedding-type none", "--position-embedding-type rope")
        found.append(Problem("E004", sentence, fixes))
    keep = next((flag for flag in KEEP_SCHEDULE if flag in spellings), None)
    if keep and config.checkpoint.resume_mode == "new-schedule":
        sentence = f"{keep} keeps the checkpoint's schedule, but --resume-mode new-schedule replaces it"
        found.append(Problem("E004", sentence, ("--resume-mode exact", f"drop {keep}")))
    return found


def assumptions(spellings: Collection[str], given: Collection[str]) -> Iterator[str]:
    """Yield notes on implied defaults that differ from Megatron-LM's.

    Args:
        spellings: flags on the command line.
        given: fields that were set.
    """
    if "--disable-bias-linear" in spellings and "activation" not in given:
        yield "activation is gelu_tanh; Megatron-LM without biases computes the exact form: --activation gelu"
    if {"--no-create-attention-mask-in-dataloader", "--reset-attention-mask"} <= set(spellings):
        yield "attention is restricted to documents; Megatron-LM would not restrict it without masks"
