"""Handling of unknown flags: Megatron-LM flags are ignored or refused by name, misspelled flags get a suggestion.

megatron_flags.yaml holds the flags, with what happens to each and why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.sources import ConfigSource
from megatron.config.conditions import holds, paragraphs
from megatron.config.errors import Problem
from megatron.config.option import Need
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS, SPELLINGS
from megatron.config.text import did_you_mean

KEEP_SCHEDULE_FLAGS = ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler")
MAX_REASONS = 3  # in notes on ignored flags
HYBRID_FLAGS = ("--is-hybrid-model", "--hybrid-attention-ratio", "--hybrid-mlp-ratio")
"""Older flags of hybrid models, which do not name the layers; the last two give shares of them."""

HYBRID = re.compile("hybrid|mamba", re.IGNORECASE)
"""Parts of other values that mean a hybrid model."""

PER_LAYER = ("--cp-comm-type",)
"""Flags that may have a word for each layer in Megatron-LM, and have one here."""


@dataclass(frozen=True)
class ForeignFlag:
    """The handling of a flag that this program does not have."""

    kind: str  # "applied", "ignored", "setting" of a missing feature, or "refused"
    reason: str = ""
    instead: tuple[str, ...] = ()  # fixes to paste, which mean the same
    values: Sequence[str] | None = None  # patterns of those that are ignored; None: all
    words: str = ""  # what an applied flag stands for
    feature: str = ""  # the flags that switch on what this one is a setting of
    condition: str = ""  # without which the flag has no effect


@dataclass(frozen=True)
class ForeignFlags:
    """The sections of megatron_flags.yaml, which explains them, by flag; with the spellings of our options."""

    handled: Mapping[str, ForeignFlag]  # also by beginnings of names, which end with a hyphen
    renamed: Mapping[str, str]
    replaced: Mapping[str, ForeignFlag]
    gpt_neox: Mapping[str, str | Mapping[str, str]]  # settings of its YAML files

    def find(self, spelling: str) -> ForeignFlag | None:
        """Return the handling of a flag of Megatron-LM, by its name or else by the longest beginning of it."""
        beginnings = (name for name in self.handled if name.endswith("-") and spelling.startswith(name))
        return self.handled.get(spelling) or self.handled.get(max(beginnings, key=len, default=""))


@cache
def foreign_flags() -> ForeignFlags:
    """Read megatron_flags.yaml. Only unknown flags and the documentation need it."""
    import yaml  # slow to import, and seldom needed

    def flag(kind: str, entry: Any) -> ForeignFlag:
        if isinstance(entry, str):
            return ForeignFlag(kind, entry)
        instead = entry.get("instead", ())
        return ForeignFlag(kind, **entry | {"instead": (instead,) if isinstance(instead, str) else tuple(instead)})

    def condition(name: str) -> str:
        """Return the condition without which a flag has no effect, if it has one."""
        return next((key for key, names in tree["counts_with"].items() if name.startswith(tuple(names.split()))), "")

    text = resources.files(__package__).joinpath("megatron_flags.yaml").read_text(encoding="utf-8")
    tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    handled: dict[str, ForeignFlag] = {}
    for features, names in tree["settings_of"].items():
        feature = features.split()[0]
        setting = ForeignFlag("setting", f"it is a setting of {feature}", feature=features)
        if feature in SPELLINGS:  # the feature is here now, but perhaps not all of its settings
            reason = f"this setting of {feature} is not implemented"
            setting = ForeignFlag("refused", reason, condition=SPELLINGS[feature].name)
        handled |= dict.fromkeys(names.split(), setting)
    handled |= {name: flag("refused", reason) for name, reason in tree["refused_prefixes"].items()}
    handled |= {name: ForeignFlag("applied", words=words) for name, words in tree["applied"].items()}
    spelled = {name: setting.flag for setting in SETTINGS.values() for name in setting.option.spellings}
    handled |= {name: ForeignFlag("applied", words=f"{ours} {{}}") for name, ours in spelled.items()}
    for kind in ("ignored", "refused"):
        handled |= {name: flag(kind, entry) for names, entry in tree[kind].items() for name in names.split()}
    handled = {
        name: replace(each, condition=each.condition or condition(name)) if each.kind == "refused" else each
        for name, each in handled.items()
        if name not in SPELLINGS
    }
    replaced = {name: flag("refused", entry) for name, entry in tree["replaced"].items()}
    renamed = {theirs: ours for ours, names in tree["renamed"].items() for theirs in names.split()}
    return ForeignFlags(handled, renamed, replaced, tree["gpt_neox"])


def apply_foreign_values(spelling: str, words: Sequence[str]) -> list[str]:
    """Replace values of Megatron-LM by ours, and remove the brackets of a YAML list around them.

    The same word for every layer becomes one.
    """
    theirs = SPELLINGS[spelling].option.megatron.values
    plain = [word.strip("[],") for word in words]
    ours = [theirs.get(word, word) for word in plain]
    return ours[:1] if spelling in PER_LAYER and len(set(ours)) == 1 else ours


def apply_foreign_flags(
    foreign: Sequence[Sequence[str]], given: Collection[str] = ()
) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Replace unknown flags that have a counterpart here by it.

    Args:
        foreign: each unknown flag with its arguments.
        given: names of the fields that are set by flags, and not by a counterpart.

    Returns:
        The flags that stand for them, each with its arguments; the other unknown flags; and notes.
    """
    applied: list[list[str]] = []
    others: list[list[str]] = []
    done: dict[str, list[str]] = {}
    for words in foreign:
        spelling, arguments = _split(words)
        flag = foreign_flags().find(spelling)
        if flag is None or flag.kind != "applied" or ("{}" in flag.words and not arguments):
            others.append(list(words))
            continue
        here: list[list[str]] = []
        for each in re.split(r" (?=--)", flag.words):
            name, *values = each.split()
            if SPELLINGS[name].name not in given:
                here.append([name, *chain.from_iterable(arguments if word == "{}" else [word] for word in values)])
        applied += here
        text = " ".join(chain(*here)) or "nothing, because another flag sets the same"
        done.setdefault(text, []).append(" ".join([spelling, *arguments]))
    return applied, others, [f"applied: {' and '.join(flags)} as {text}" for text, flags in done.items()]


def check_unknown_flags(
    foreign: Iterable[Sequence[str]], config: RunConfig, others: Iterable[str] = ()
) -> tuple[ConfigSource, list[str]]:
    """Return the problems of flags that the parser does not know, and notes on those that are ignored.

    Args:
        foreign: each unknown flag with its arguments, and arguments that follow no flag.
        config: that the other flags make.
        others: flags besides those of config fields, to suggest.
    """
    result = ConfigSource()
    ignored: dict[str, list[str]] = {}
    given = {_split(words)[0] for words in foreign}
    unnamed = _without_layers(foreign, config)
    result.problems += [] if unnamed is None else [unnamed]
    for words in foreign:
        if unnamed is not None and _asks_for_hybrid(words):
            continue
        if not words[0].startswith("--"):
            sentence = f"{' '.join(words)}: belongs to no flag; booleans take --x and --no-x"
            result.problems.append(Problem("E001", sentence))
            continue
        spelling, arguments = _split(words)
        flag = foreign_flags().find(spelling)
        if flag is not None and given.intersection(flag.feature.split()) - {spelling}:
            continue  # the feature is refused
        reason = ignore_reason(spelling, arguments, config)
        if reason:
            ignored.setdefault(reason, []).append(" ".join([spelling, *arguments]))
        else:
            result.problems.append(_problem(spelling, arguments, result.doubtful, others))
    if len(ignored) > MAX_REASONS:
        return result, [f"ignored, as docs/flags.md explains: {', '.join(chain(*ignored.values()))}"]
    return result, [f"ignored: {', '.join(flags)} because {reason}" for reason, flags in ignored.items()]


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return a flag and its arguments."""
    spelling, equals, value = words[0].partition("=")
    return spelling, [value, *words[1:]] if equals else list(words[1:])


def ignore_reason(spelling: str, arguments: Sequence[str], config: RunConfig) -> str | None:
    """Return the reason why a flag with these arguments is ignored, or None if it is not."""
    flag = foreign_flags().find(spelling) or foreign_flags().replaced.get(spelling)
    if flag is not None and flag.condition and not holds(flag.condition, config):
        return f"it has no effect without {Need(flag.condition)}"
    if flag is None or (flag.values is None and flag.kind not in ("ignored", "setting")):
        return None
    patterns = flag.values
    if patterns is None or all(any(re.fullmatch(p, word) for p in patterns) for word in arguments):
        missing = flag.kind == "refused" and spelling in foreign_flags().handled
        return "it changes nothing with this value" if missing else flag.reason
    return None


def _problem(spelling: str, arguments: list[str], doubtful: set[str], others: Iterable[str]) -> Problem:
    """Return the problem of an unknown flag, and add the option that was meant to ``doubtful``."""
    flags = foreign_flags()
    normalized = spelling.lower().replace("_", "-")
    if normalized in flags.replaced:
        flag = flags.replaced[normalized]
        fixes = tuple(fix.replace("{}", " ".join(arguments) or "NAME") for fix in flag.instead)
        doubtful |= _options_of(fixes)
        return Problem("E001", f"{spelling}: no such flag; {flag.reason}", fixes)
    meant = flags.renamed.get(normalized)
    known = [*SPELLINGS, *others, *(name for name, flag in flags.handled.items() if flag.kind == "ignored")]
    if meant is None and spelling not in flags.handled:
        guess = did_you_mean(normalized, known)
        meant = guess if guess and _takes(guess, arguments) else None
    refused = None if meant else flags.find(spelling)
    if refused:
        reason = f"{refused.reason}; other values are not supported" if refused.kind == "ignored" else refused.reason
        if refused.kind == "applied":
            reason = "it needs a value"
        doubtful |= _options_of(refused.instead)
        return Problem("E004", unsupported(spelling, arguments, reason), refused.instead)
    if meant is None:
        nearest = get_close_matches(normalized, [*SPELLINGS, *others], n=3)
        return Problem("E001", f"{spelling}: no such flag" + (f"; near are {', '.join(nearest)}" if nearest else ""))
    if meant in SPELLINGS:
        doubtful.add(SPELLINGS[meant].name)
    value = arguments if _takes(meant, arguments) else ["VALUE"]
    return Problem("E001", f"{spelling}: no such flag; did you mean {meant}?", (" ".join([meant, *value]),))


def _options_of(fixes: Iterable[str]) -> set[str]:
    """Return the fields that fixes set, which have the meaning of another flag."""
    return {SPELLINGS[word].name for fix in fixes for word in fix.split() if word in SPELLINGS}


def unsupported(spelling: str, arguments: Sequence[str], reason: str) -> str:
    """Return the sentence of the problem of a flag that asks for something missing."""
    return f"{' '.join([spelling, *arguments])} of Megatron-LM is not supported: {reason}"


def _takes(spelling: str, arguments: Sequence[str]) -> bool:
    """Return whether a flag may be followed by these arguments."""
    setting = SPELLINGS.get(spelling)
    if setting is None:
        return True
    if setting.scalar is bool or spelling in setting.constants:
        return not arguments
    try:
        setting.convert(list(arguments))
    except ValueError:
        return False
    return True


def implied_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults of Megatron-LM's pretrain_gpt.py that follow from the fields that are set."""
    implied: dict[str, Any] = {}
    if given.get("vocab_file") and given.get("merge_file"):
        implied["tokenizer_type"] = "GPT2BPETokenizer"
    if any(given.get("moe_aux_loss_coeff") or ()):
        implied["moe_router_load_balancing_type"] = ("aux_loss",)
    return {name: value for name, value in implied.items() if not given.get(name)}


def pattern_of_ratios(layers: int, attention: float, mlp: float) -> str:
    """Return the layer pattern that older flags of Megatron-LM mean: Mamba-2, with attention and MLPs spread evenly.

    Args:
        layers: number of residual layers.
        attention: share of the layers that are attention.
        mlp: share of the layers that are MLPs; they take the places of Mamba-2.
    """
    symbols = ["M"] * layers
    for symbol, share, more in (("*", attention, 1), ("-", mlp, 0)):
        free = [place for place, each in enumerate(symbols) if each == "M"]
        count = round(layers * share)
        left = between = (len(free) - count) / (count + more) if count else math.inf
        for place in free:
            if left < 0.5:
                symbols[place], left = symbol, left + between
            else:
                left -= 1
    return "".join(symbols)


def _asks_for_hybrid(words: Sequence[str]) -> bool:
    """Return True for a flag that means a hybrid model."""
    spelling, arguments = _split(words)
    other = spelling in ("--spec", "--export-model-type") and HYBRID.search(" ".join(arguments)) is not None
    return spelling in HYBRID_FLAGS or other


def _without_layers(foreign: Iterable[Sequence[str]], config: RunConfig) -> Problem | None:
    """Return the problem of flags of a hybrid model without its layers, with the pattern that older ones mean."""
    asked = [words for words in foreign if _asks_for_hybrid(words)]
    if not asked or config.model.hybrid_layer_pattern is not None:
        return None
    given = {spelling: arguments for spelling, arguments in map(_split, asked) if arguments}
    try:
        attention, mlp = (float(given.get(flag, ["0"])[0]) for flag in HYBRID_FLAGS[1:])
    except ValueError:
        attention = mlp = 0.0
    pattern = pattern_of_ratios(config.model.num_layers, attention, mlp)
    reason = "--hybrid-layer-pattern has to name the layers"
    sentence = f"{' '.join(chain(*asked))} of Megatron-LM is not supported: {reason}"
    return Problem("E004", sentence, (f"--hybrid-layer-pattern '{pattern}'",))


def implied_default_problems(spellings: Collection[str], config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of flags that are ignored only where Megatron-LM's implied default is the same as ours."""
    if "--group-query-attention" in spellings and config.model.num_query_groups is None:
        meaning = "one group in Megatron-LM, one per head here"
        sentence = f"--group-query-attention without --num-query-groups means {meaning}"
        fixes = ("--num-query-groups 1", f"--num-query-groups {config.model.num_attention_heads}")
        yield Problem("E004", sentence, fixes)
    if "--no-position-embedding" in spellings and config.model.position_embedding_type == "learned_absolute":
        sentence = "--no-position-embedding contradicts --position-embedding-type learned_absolute"
        yield Problem("E004", sentence, ("--position-embedding-type none", "--position-embedding-type rope"))
    if {"--hybrid-layer-pattern", "--hybrid-override-pattern"} <= {*spellings}:
        sentence = "--hybrid-override-pattern is an older name of --hybrid-layer-pattern"
        yield Problem("E003", sentence, ("drop --hybrid-override-pattern",))
    load, save = config.checkpoint.load, config.checkpoint.save
    if "--no-load-optim" in spellings and load != save and holds_checkpoints(load) and not holds_checkpoints(save):
        sentence = f"--no-load-optim: a run starts from {load} with its optimizer state"
        yield Problem("E004", sentence, ("--resume-mode weights-only", "drop --no-load-optim"))
    keep = next((flag for flag in KEEP_SCHEDULE_FLAGS if flag in spellings), None)
    if keep and config.checkpoint.resume_mode == "new-schedule":
        sentence = f"{keep} keeps the checkpoint's schedule, but --resume-mode new-schedule replaces it"
        yield Problem("E004", sentence, ("--resume-mode exact", f"drop {keep}"))


def other_meanings() -> list[tuple[str, list[str], str]]:
    """Return the flags that have another meaning in Megatron-LM 0.20 under conditions, and notes on it.

    A condition is a flag on the command line (``--x``, ``not --x``) or a term of `holds`.
    """
    found = []
    for text in paragraphs("other_meanings"):
        condition, _, note = text.strip().partition("\n")
        flag, *terms = condition.split(" and ")
        found.append((flag, terms, " ".join(note.split())))
    return found


def meaning_notes(spellings: Collection[str], config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command line that have another meaning in Megatron-LM, with the notes; ours counts here.

    Args:
        spellings: flags on the command line.
        config: that they make.
    """

    def applies(term: str) -> bool:
        flag = term.removeprefix("not ")
        return (flag in spellings) == (flag == term) if flag.startswith("--") else holds(term, config)

    yield from ((flag, note) for flag, terms, note in other_meanings() if all(map(applies, (flag, *terms))))
