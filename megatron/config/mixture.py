"""The file of ``--data-mixture``: sources, and stages that each mix them in their own proportions.

`read_mixture` reads the file, `plan_stages` converts it to numbers of samples for a run of a given length. Both read
nothing but that file and the names in folders. The samples are in :mod:`megatron.data.mixture`.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_json, parse_yaml, read_small
from megatron.config.option import Need, Run, option
from megatron.config.text import counted, did_you_mean, listed

MIXTURE_CODE = "E520"
"""Code of all problems of the file, and of its sources."""

TOP_KEYS = ("sources", "stages", "valid")
STAGE_KEYS = ("name", "tokens", "share", "seq_length", "mix")
QUOTA_KEYS = ("share", "tokens", "epochs")
SOURCE_KEYS = ("path", "max_epochs", *QUOTA_KEYS)
NAME = re.compile(r"[^\s:/]+")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
FORM = "sources: {web: {path: PREFIX, share: 70%}, code: {path: PREFIX, share: 30%}}"


class Quota(NamedTuple):
    """Amount of a source in a stage."""

    kind: str  # share, of what tokens and epochs of others leave; tokens; epochs
    amount: Fraction


@dataclass(frozen=True)
class Source:
    """Token files that are read as one."""

    name: str
    paths: tuple[str, ...]  # prefixes of the files
    max_epochs: Fraction | None = None  # most passes over them in the whole run


@dataclass(frozen=True)
class MixtureStage:
    """A part of the run with its own proportions."""

    name: str
    mix: Mapping[str, Quota]  # by source
    tokens: int | None = None  # its length; without both, what the others leave
    share: Fraction | None = None  # its length as a share of the run's tokens
    seq_length: int | None = None  # tokens of its samples; None for that of the run

    @property
    def length(self) -> str:
        """The length as it was given."""
        if self.share is not None:
            return f"{float(100 * self.share):g}% of the run"
        return "what other stages leave" if self.tokens is None else f"{self.tokens:,} tokens"


@dataclass(frozen=True)
class Mixture:
    """The content of a mixture file."""

    path: str
    sources: Mapping[str, Source]
    stages: tuple[MixtureStage, ...]  # at least one
    valid: Mapping[str, Source] = field(default_factory=dict)  # validation sets by name

    @property
    def prefixes(self) -> dict[str, tuple[str, ...]]:
        """Prefixes of all files by split."""
        parts = {"train": self.sources, "valid": self.valid}
        return {split: tuple(path for source in of.values() for path in source.paths) for split, of in parts.items()}

    def select(self, names: Sequence[str]) -> Mixture:
        """Return the mixture with only the stages ``names``, or all for none; shares keep their proportions."""
        stages = tuple(stage for stage in self.stages if stage.name in names) if names else self.stages
        return Mixture(self.path, self.sources, stages, self.valid)

    def sections(self, tokens: int, seq_length: int) -> list[tuple[tuple[MixtureStage, ...], int, int]]:
        """Return the runs of stages of equal sequence length in a run of ``tokens``: stages, length, and tokens."""
        sized = zip(self.stages, stage_tokens(self, tokens, seq_length))
        by_length = groupby(sized, lambda pair: pair[0].seq_length or seq_length)
        runs = [(length, [*group]) for length, group in by_length]
        return [(tuple(stage for stage, _ in run), length, sum(size for _, size in run)) for length, run in runs]

    def summary(self) -> dict[str, Any]:
        """Return what decides the order of samples besides the files, in JSON types; a checkpoint records it."""
        return {
            "sources": [*self.sources],
            "stages": [
                {
                    "name": stage.name,
                    "length": stage.length,
                    "seq_length": stage.seq_length,
                    "mix": {name: f"{quota.kind} {quota.amount}" for name, quota in stage.mix.items()},
                }
                for stage in self.stages
            ],
        }


@dataclass(frozen=True, init=False, eq=False, repr=False)
class MixtureOptions:
    """Options of mixtures."""

    data_mixture: str | None = option(None, role="free")
    """YAML or JSON file with the sources of the training data, and stages with the proportions of these. Validation
    sets are those of the file, or valid_data_path."""
    data_mixture_stages: tuple[str, ...] = option((), role="free", needs="data_mixture")
    """Stages of data_mixture that the run consists of. Default: all."""

    log_loss_per_source: bool = option(
        False, role="free", needs=Need("not mock_data and not plugin_dataset and not chat_data_path", "files of tokens")
    )
    """Log the loss of each source of the training data, as source loss NAME."""

    refused: ClassVar = """
    log_loss_per_source and objective!=next_token
    E521 --log-loss-per-source is that of next-token prediction, not of --objective {objective}
      fix: drop --log-loss-per-source

    log_loss_per_source and cuda_graph=step
    E521 --log-loss-per-source observes the output layer, which --cuda-graph step replays
      fix: --cuda-graph optimizer | drop --log-loss-per-source
    """

    @property
    def mixture(self) -> Mixture:
        """The mixture of ``data_mixture``, with the stages of the run. Raises as :func:`read_mixture`."""
        return read_mixture(str(self.data_mixture)).select(self.data_mixture_stages)

    def check_mixture_stages(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the chosen stages exist, and have samples of one length."""
        if self.data_mixture is None:
            return
        try:
            mixture = read_mixture(self.data_mixture)
        except UserError:  # reported with the other sources of data
            return
        known, length = [stage.name for stage in mixture.stages], config.training.seq_length
        for name in (name for name in self.data_mixture_stages if name not in known):
            sentence = f"--data-mixture {mixture.path} has no stage {name!r}, only {listed(known)}"
            yield Problem(MIXTURE_CODE, sentence, (f"--data-mixture-stages {did_you_mean(name, known) or known[0]}",))
        stages = mixture.select(self.data_mixture_stages).stages
        same = [stage.name for stage in stages if stage.seq_length in (None, length)]
        other = [stage for stage in stages if stage.name not in same]
        if other:
            sentence = (
                f"stage {other[0].name} of --data-mixture {mixture.path} has samples of {other[0].seq_length:,} "
                f"tokens, but this run of {length:,}: another length is another phase of training"
            )
            fix = f"--data-mixture-stages {' '.join(same)}" if same else f"--seq-length {other[0].seq_length}"
            yield Problem(MIXTURE_CODE, sentence, (fix,))


def mixture_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the differences of two :meth:`Mixture.summary`."""
    stages = [{stage["name"]: stage for stage in each["stages"]} for each in (before, after)]
    names = [", ".join(each) for each in stages]
    changes = [] if names[0] == names[1] else [f"stages: {names[0]} -> {names[1]}"]
    if before["sources"] != after["sources"]:
        changes.append(f"sources: {', '.join(before['sources'])} -> {', '.join(after['sources'])}")
    for name in stages[0].keys() & stages[1].keys():
        then, now = ({**stage[name], **stage[name]["mix"]} for stage in stages)
        for key in dict.fromkeys([*then, *now]):
            if key not in ("name", "mix") and then.get(key) != now.get(key):
                what = "" if key == "length" else f"{key} "
                changes.append(f"stage {name}: {what}{then.get(key, 'none')} -> {now.get(key, 'none')}")
    return changes


def read_mixture(path: str) -> Mixture:
    """Read a mixture file.

    Raises:
        UserError: with all problems.
    """
    try:
        status = os.stat(path)
        return _read_mixture(path, (status.st_mtime_ns, status.st_size))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is no YAML: {error}"
        fix = ("write it as JSON, which has no such limit",) if "more than" in reason else ()
        raise UserError([Problem(MIXTURE_CODE, f"--data-mixture {path} {reason}", fix)]) from None


@lru_cache(maxsize=8)
def _read_mixture(path: str, version: tuple[int, int]) -> Mixture:
    """Read a file in this ``version``; many checks read it."""
    content = read_small(path)
    return _Reader(path).read(parse_json(content) if content.lstrip().startswith(b"{") else parse_yaml(content))


class _Reader:
    """Reads the tree of a file and collects its problems."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._problems: list[Problem] = []

    def read(self, tree: Any) -> Mixture:
        """Return the mixture; raise UserError with all problems."""
        top = self._mapping("it", tree, TOP_KEYS, f"write in it: {FORM}")
        if not isinstance(tree, Mapping):
            raise UserError(self._problems)
        sources = self._sources("sources", top.get("sources"), SOURCE_KEYS)
        if not sources and not self._problems:
            self._wrong("there are no sources", f"write in it: {FORM}")
        valid = self._sources("valid", top.get("valid"), ("path",))
        stages = tuple(self._stages(top, sources)) if sources else ()
        users: dict[str, list[tuple[str, str]]] = {}
        for name, path in ((source.name, path) for source in sources.values() for path in source.paths):
            users.setdefault(path if "://" in path else os.path.realpath(f"{path}.bin"), []).append((name, path))
        for found in (found for found in users.values() if len(found) > 1):
            read = listed([f"{name} reads {path}" for name, path in found])
            name, path = found[-1]
            drop = f"drop {name}" if len(sources[name].paths) == 1 else f"drop {path} of {name}"
            self._wrong(f"{read}, the same file: it would be repeated", drop)
        if self._problems:
            raise UserError(self._problems)
        return Mixture(self._path, sources, stages, valid)

    def _wrong(self, sentence: str, *fixes: str) -> None:
        self._problems.append(Problem(MIXTURE_CODE, f"--data-mixture {self._path}: {sentence}", fixes))

    def _mapping(self, place: str, tree: Any, known: Sequence[str], form: str) -> dict[str, Any]:
        """Return the entries of ``tree`` whose keys are ``known``; any keys if none are."""
        if not isinstance(tree, Mapping):
            self._wrong(f"{place} must hold 'name: value' entries, not {tree!r:.40}", form)
            return {}
        entries = {}
        for key, value in tree.items():
            if isinstance(key, bool) or key is None:
                self._wrong(f"{place} has a name that YAML reads as {key}", 'quote the name, as in "no"')
            else:
                entries[str(key)] = value
        for key in [key for key in entries if known and key not in known]:
            meant = did_you_mean(key, known)
            fix = f"did you mean {meant}?" if meant else f"remove {key}; there are {', '.join(known)}"
            self._wrong(f"{place} has no key {key!r}", fix)
            del entries[key]
        return entries

    def _sources(self, place: str, tree: Any, keys: Sequence[str]) -> dict[str, Source]:
        sources = {}
        entries = {} if tree is None else self._mapping(place, tree, (), f"{place}: {{web: {{path: PREFIX}}}}")
        for name, entry in entries.items():
            where = f"{place}, {name}"
            if not NAME.fullmatch(name):
                self._wrong(f"{where}: a name is one word without ':' and '/'")
            plain = entry if isinstance(entry, Mapping) else {"path": entry}
            values = self._mapping(where, plain, keys, "")
            given = values.get("path")
            words: list[Any] = given if isinstance(given, list) else [given]
            if not words or not all(isinstance(word, str) and word for word in words):
                self._wrong(f"{where} needs a path", f"{name}: {{path: PREFIX}}")
                words = []
            limit = values.get("max_epochs")
            paths = tuple(prefix for word in words for prefix in self._prefixes(where, word))
            epochs = None if limit is None else self._amount(f"{where}, max_epochs", limit, "4")
            sources[name] = Source(name, paths, epochs)
        return sources

    def _prefixes(self, where: str, path: str) -> tuple[str, ...]:
        """Return a prefix, or all in a folder, by name."""
        if "://" in path or not os.path.isdir(path):
            return (path.removesuffix(".idx").removesuffix(".bin"),)
        found = tuple(sorted(str(file)[: -len(".idx")] for file in Path(path).glob("*.idx")))
        if not found:
            self._wrong(f"{where}: the folder {path} has no token files", "path: PREFIX")
        return found

    def _stages(self, top: Mapping[str, Any], sources: Mapping[str, Source]) -> Iterator[MixtureStage]:
        quotas = {
            str(name): {key: value for key, value in entry.items() if key in QUOTA_KEYS}
            for name, entry in top["sources"].items()
            if str(name) in sources and isinstance(entry, Mapping)
        }
        given = [name for name, quota in quotas.items() if quota]
        if "stages" not in top:
            if len(sources) == 1 and not given:
                quotas = {name: {"share": 1} for name in sources}
            yield MixtureStage("main", self._mix("sources", {name: quotas.get(name, {}) for name in sources}, sources))
            return
        if given:
            self._wrong(f"sources: {listed(given)} have shares, tokens or epochs, but stages give these", "drop them")
        entries = top["stages"]
        form = "stages: [{name: main, mix: {web: {share: 100%}}}]"
        if not isinstance(entries, list) or not entries:
            self._wrong(f"stages must be a list, not {entries!r:.40}", form)
            return
        stages = [self._stage(f"stages, {i + 1}", entry, sources, form) for i, entry in enumerate(entries)]
        twice = [name for name, count in Counter(stage.name for stage in stages).items() if count > 1]
        if twice:
            self._wrong(f"{counted(len(twice), 'name')} of stages occurs twice: {listed(twice)}", "rename one of them")
        rest = [stage.name for stage in stages if stage.tokens is None and stage.share is None]
        if len(rest) > 1:
            self._wrong(f"{listed(rest)} all have neither tokens nor share", f"give {rest[0]} a share: 10%")
        total = sum((stage.share or Fraction(0) for stage in stages), Fraction(0))
        others = rest or any(stage.tokens is not None for stage in stages)
        if total > 1 or (others and total == 1) or (not others and total != 1):
            rule = "less than 100%, as other stages have no share" if others else "100%"
            fix = f"drop share of {stages[-1].name}, which then takes the rest"
            self._wrong(f"the shares of the stages sum to {float(100 * total):g}%, not to {rule}", fix)
        yield from stages

    def _stage(self, where: str, tree: Any, sources: Mapping[str, Source], form: str) -> MixtureStage:
        values = self._mapping(where, tree, STAGE_KEYS, form)
        given = values.get("name", "")
        name = "" if isinstance(given, bool) else str(given)
        if isinstance(given, bool):
            self._wrong(f"{where} has a name that YAML reads as {given}", 'quote the name, as in name: "no"')
        elif not NAME.fullmatch(name):
            self._wrong(f"{where} needs a name of one word", "name: main")
        where = f"stage {name}" if name else where
        tokens, share, length = (values.get(key) for key in ("tokens", "share", "seq_length"))
        if tokens is not None and share is not None:
            self._wrong(f"{where} has both tokens and a share", "drop tokens", "drop share")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            self._wrong(f"{where}: seq_length must be a whole number above 0, not {length!r:.40}", "seq_length: 32768")
            length = None
        return MixtureStage(
            name,
            self._mix(f"{where}, mix", values.get("mix"), sources),
            None if tokens is None else int(self._tokens(f"{where}, tokens", tokens)),
            None if share is None else self._share(f"{where}, share", share),
            length,
        )

    def _mix(self, where: str, tree: Any, sources: Mapping[str, Source]) -> dict[str, Quota]:
        form = f"mix: {{{next(iter(sources), 'web')}: {{share: 100%}}}}"
        entries = self._mapping(where, tree, (), form)
        if not entries and isinstance(tree, Mapping):
            self._wrong(f"{where} names no source", form)
        mix = {}
        for name, entry in entries.items():
            if name not in sources:
                meant = did_you_mean(name, sources)
                self._wrong(
                    f"{where}: there is no source {name!r}", f"did you mean {meant}?" if meant else f"drop {name}"
                )
                continue
            plain = entry if isinstance(entry, Mapping) else {"share": entry}
            values = self._mapping(f"{where}, {name}", plain, QUOTA_KEYS, "")
            if len(values) != 1:
                self._wrong(f"{where}, {name} needs one of {', '.join(QUOTA_KEYS)}", f"{name}: {{share: 10%}}")
                continue
            ((kind, value),) = values.items()
            if kind == "share":
                mix[name] = Quota(kind, self._share(f"{where}, {name}, share", value, weight=True))
            else:
                place = f"{where}, {name}, {kind}"
                mix[name] = Quota(
                    kind, self._amount(place, value, "1") if kind == "epochs" else self._tokens(place, value)
                )
        return mix

    def _share(self, where: str, value: Any, weight: bool = False) -> Fraction:
        """Return a share given as a number or in percent; a weight may be above 1."""
        text = str(value).strip()
        percent = text.endswith("%")
        share = _number(text.removesuffix("%")) if not isinstance(value, bool) else None
        share = share / 100 if share is not None and percent else share
        if share is None or share <= 0 or (share > 1 and not weight):
            self._wrong(
                f"{where} must be a number above 0{'' if weight else ' and up to 100%'}, not {value!r:.40}",
                "share: 10%",
            )
            return Fraction(1)
        return share

    def _tokens(self, where: str, value: Any) -> Fraction:
        """Return a number of tokens."""
        tokens = self._amount(where, value, "2B")
        if tokens < 1:
            self._wrong(f"{where} must be at least 1, not {value!r:.40}", "tokens: 2B")
        return max(tokens, Fraction(1))

    def _amount(self, where: str, value: Any, example: str) -> Fraction:
        """Return a number above 0, which may have a unit, as 2B."""
        text = str(value).strip().replace(",", "").replace("_", "")
        unit = text[-1:].upper() if text[-1:].upper() in UNITS else ""
        number = _number(text[: len(text) - len(unit)]) if not isinstance(value, bool) else None
        if number is None or number <= 0:
            key = where.rpartition(" ")[2]
            self._wrong(f"{where} must be a number above 0, not {value!r:.40}", f"{key}: {example}")
            return Fraction(1)
        return number * UNITS[unit]


def _number(text: str) -> Fraction | None:
    return Fraction(text) if re.fullmatch(r"\d{1,30}(\.\d{0,30})?(e[+-]?\d{1,2})?", text) else None


@dataclass(frozen=True)
class StagePlan:
    """A stage of a run in samples."""

    stage: MixtureStage
    seq_length: int
    counts: tuple[int, ...]  # samples of each source of the mixture, in its order
    begins: tuple[int, ...]  # tokens of each source that were read before the stage

    @property
    def samples(self) -> int:
        """Samples of the stage."""
        return sum(self.counts)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens of each source that are read by the end of the stage."""
        return tuple(begin + count * self.seq_length for begin, count in zip(self.begins, self.counts))


def stage_tokens(mixture: Mixture, tokens: int, seq_length: int, slack: int = 0) -> list[int]:
    """Return the length of each stage in a run of ``tokens`` in samples of ``seq_length``.

    Without a stage that takes the rest, the last one ends with the run if that moves its end by up to ``slack``.

    Raises:
        UserError: if the stages do not fit into the run, or do not fill it.
    """
    given = sum(stage.tokens or 0 for stage in mixture.stages)
    shares = sum((stage.share or Fraction(0) for stage in mixture.stages), Fraction(0))
    rest = next((stage for stage in mixture.stages if stage.tokens is None and stage.share is None), None)
    if rest is None and shares and not given:
        shares_of = Fraction(tokens) / shares  # of the selected stages
    else:
        shares_of = Fraction(tokens)
    sizes = [
        round(stage.share * shares_of) if stage.share is not None else stage.tokens or 0 for stage in mixture.stages
    ]
    left = tokens - sum(sizes)
    if rest is not None:
        sizes[mixture.stages.index(rest)] = left
    elif -slack <= left <= slack or (left and abs(left) <= len(sizes)):  # rounded
        sizes[-1] += left
        left = 0
    if left < 0 or (rest is None and left) or min(sizes) <= 0:
        text = ", ".join(f"{stage.name} {size:,}" for stage, size in zip(mixture.stages, sizes))
        held = f"the stages have {sum(sizes) if rest is None else tokens - left:,} tokens ({text})"
        sentence = f"--data-mixture {mixture.path}: {held}, but the run has {tokens:,}"
        needed = -(-(given + (rest is not None)) // ((1 - shares) or 1) // seq_length)
        fixes = [f"a run of {needed * seq_length:,} tokens, --train-samples {needed}"] if given else []
        last = mixture.stages[-1]
        if last is not rest and rest is None:
            fixes.append(f"drop the {'tokens' if last.share is None else 'share'} of {last.name}")
        raise UserError([Problem(MIXTURE_CODE, sentence, tuple(fixes) or ("a longer run",))])
    return sizes


def split_samples(stage: MixtureStage, samples: int, seq_length: int, sources: Mapping[str, int]) -> tuple[int, ...]:
    """Return the samples of each source in a stage; ``sources`` are the tokens of one epoch by name.

    ``tokens`` and ``epochs`` are rounded to samples. Shares divide what these leave, by largest remainders.

    Raises:
        ValueError: if tokens and epochs exceed the stage, or fall short of it and nothing has a share.
    """
    counts = dict.fromkeys(sources, 0)
    weights: dict[str, Fraction] = {}
    for name, (kind, amount) in stage.mix.items():
        if kind == "share":
            weights[name] = amount
        else:
            counts[name] = round(amount * (sources[name] if kind == "epochs" else 1) / seq_length)
    left = samples - sum(counts.values())
    if left < 0 or (left and not weights):
        wanted = ", ".join(f"{name} {count * seq_length:,}" for name, count in counts.items() if count)
        fix = "they leave nothing" if left < 0 else "nothing with a share fills it"
        raise ValueError(
            f"tokens and epochs of stage {stage.name} sum to {sum(counts.values()) * seq_length:,} tokens ({wanted}), "
            f"but it has {samples * seq_length:,}: {fix}"
        )
    total = sum(weights.values(), Fraction(0))
    exact = {name: left * weight / total for name, weight in weights.items()}
    for name, share in exact.items():
        counts[name] += math.floor(share)
    spare = samples - sum(counts.values())
    for name in sorted(exact, key=lambda name: math.floor(exact[name]) - exact[name])[:spare]:
        counts[name] += 1
    return tuple(counts.values())


def smaller_quota(stage: MixtureStage, samples: int, seq_length: int, sources: Mapping[str, int]) -> str:
    """Return a fix for a stage whose tokens and epochs exceed its samples; empty if they do not."""
    once = {name: sources[name] if kind == "epochs" else 1 for name, (kind, _) in stage.mix.items()}
    counts = {
        name: round(amount * once[name] / seq_length) for name, (kind, amount) in stage.mix.items() if kind != "share"
    }
    if sum(counts.values()) <= samples:
        return ""
    largest = max(counts, key=lambda name: counts[name])
    left, kind = counts[largest] - sum(counts.values()) + samples, stage.mix[largest].kind
    if left <= 0:
        return f"drop {largest} of {stage.name}"
    if kind == "tokens":
        return f"in {stage.name}, {largest}: {{tokens: {left * seq_length}}}"
    exact = Fraction(left * seq_length, once[largest])
    rounded = (round(exact, digits) for digits in range(1, 20))  # the shortest that gives as many samples
    amount = next(epochs for epochs in rounded if round(epochs * once[largest] / seq_length) == left)
    return f"in {stage.name}, {largest}: {{epochs: {float(amount):g}}}"


def plan_stages(
    mixture: Mixture,
    tokens: int,
    seq_length: int,
    sources: Mapping[str, int],
    consumed: Mapping[str, int] | None = None,
    slack: int = 0,
) -> list[StagePlan]:
    """Return the stages of a run in samples.

    Args:
        mixture: of the run.
        tokens: length of the run.
        seq_length: tokens of a sample, in stages without their own.
        sources: tokens of one epoch of each source by name, in the mixture's order.
        consumed: tokens of each source that were read before.
        slack: see `stage_tokens`.

    Raises:
        UserError: with all stages that cannot be filled, and all sources that would be read too often.
    """
    done, problems = 0, list[Problem]()
    begins = tuple((consumed or {}).get(name, 0) for name in sources)
    plans = []
    for stage, size in zip(mixture.stages, stage_tokens(mixture, tokens, seq_length, slack)):
        length = stage.seq_length or seq_length
        done += size
        samples = round(done / length) - round((done - size) / length)
        try:
            counts = split_samples(stage, samples, length, sources)
        except ValueError as error:
            fix = smaller_quota(stage, samples, length, sources) or "give one source a share"
            problems.append(Problem(MIXTURE_CODE, f"--data-mixture {mixture.path}: {error}", (fix,)))
            continue
        plans.append(StagePlan(stage, length, counts, begins))
        begins = plans[-1].ends
    problems += epoch_problems(mixture, sources, begins)
    if problems:
        raise UserError(problems)
    return plans


def plan_segments(
    mixture: Mixture,
    sizes: Sequence[int],
    seq_length: int,
    sources: Mapping[str, int],
    consumed: Mapping[str, int],
    slack: int,
) -> list[list[StagePlan]]:
    """Return the stages of each segment: those of the mixture, then one in the proportions of the last for each other.

    Args:
        mixture: of the run.
        sizes: samples of each segment.
        seq_length: see `plan_stages`, as the others.
        sources: see there.
        consumed: see there.
        slack: see there.

    Raises:
        UserError: see there; for the ends of all segments.
    """
    plans = [plan_stages(mixture, sizes[0] * seq_length, seq_length, sources, consumed, slack)]
    for size in sizes[1:]:
        last = [plan for plan in plans[-1] if plan.samples][-1]
        plans.append([extend_stage(mixture, last, size, sources)])
    return plans


def extend_stage(mixture: Mixture, last: StagePlan, samples: int, sources: Mapping[str, int]) -> StagePlan:
    """Return a stage of ``samples`` that continues ``last`` in its proportions; ``sources`` as in `plan_stages`.

    Raises:
        UserError: with all sources that would be read too often.
    """
    shares = {name: Quota("share", Fraction(count)) for name, count in zip(sources, last.counts) if count}
    stage = MixtureStage(last.stage.name, shares)
    plan = StagePlan(stage, last.seq_length, split_samples(stage, samples, last.seq_length, sources), last.ends)
    if problems := [*epoch_problems(mixture, sources, plan.ends)]:
        raise UserError(problems)
    return plan


def epoch_problems(mixture: Mixture, sources: Mapping[str, int], ends: Sequence[int]) -> Iterator[Problem]:
    """Yield a problem for each source of which more than ``max_epochs`` would be read by ``ends``."""
    for (name, once), end in zip(sources.items(), ends):
        limit = mixture.sources[name].max_epochs
        if limit is None or end <= limit * once:
            continue
        epochs = end / once
        sentence = (
            f"--data-mixture {mixture.path}: the run reads {name} {epochs:,.2f} times ({end:,} tokens of {once:,}), "
            f"but its max_epochs is {float(limit):g}"
        )
        yield Problem(
            MIXTURE_CODE, sentence, (f"max_epochs: {math.ceil(epochs * 100) / 100:g}", f"a smaller share of {name}")
        )
