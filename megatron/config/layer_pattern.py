"""Layer patterns of hybrid models: one symbol for each residual layer, as in Megatron-LM; their parser and checks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar, TypeAlias

from megatron.config.attention_pattern import format_layers, split_layers
from megatron.config.errors import Problem
from megatron.config.gated_delta_net import GATED_DELTA_NET
from megatron.config.latent_attention import LATENT_ATTENTION
from megatron.config.mamba import MAMBA_MIXER
from megatron.config.option import MAX_LAYERS, Run, option
from megatron.config.plugins import registered
from megatron.config.text import counted, flag, format_selected_layers

Model: TypeAlias = Any
"""The model, a :class:`megatron.config.model.ModelConfig`, which inherits the class of options."""

TOKEN_MIXERS = ("attention", LATENT_ATTENTION, MAMBA_MIXER, GATED_DELTA_NET)
"""Words of ``--token-mixers`` that are built in."""

FEED_FORWARD = ("mlp", "experts")
"""Mixers that may follow a mixer of the tokens in its block."""

LETTERS: Mapping[str, str] = {
    "*": "attention",
    "+": LATENT_ATTENTION,
    "M": MAMBA_MIXER,
    "G": GATED_DELTA_NET,
    "-": "mlp",
    "E": "experts",
}
"""Names of the mixers by their symbols; a plugin's mixer has a ``letter``."""

CUT, DEPTH = "|", "/"
"""Symbols between pipeline stages, and before the layers of a further predicted token."""

SPARSE = "D"
"""Megatron-LM's symbol of DeepSeek sparse attention."""

SPLIT_OPTIONS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
)
"""Options that split layers over stages, as cuts do."""


class PatternError(ValueError):
    """A text is no layer pattern."""

    def __init__(self, sentence: str, *fixes: str) -> None:
        """Store the sentence, and fixes to paste."""
        super().__init__(sentence)
        self.fixes = fixes


def spell(pattern: str, flag: str = "--hybrid-layer-pattern") -> str:
    """Return the flag with a pattern; after ``=`` if it begins as a flag does."""
    return f"{flag}{'=' if pattern.startswith('-') else ' '}{shlex.quote(pattern)}"


@dataclass(frozen=True)
class LayerPattern:
    """The blocks of a model, each a list of residual layers that the symbols name.

    A mixer of tokens starts a block. An MLP or experts join the block before them if that is one mixer of tokens alone;
    else they are a block of their own: ``M-M*E-`` has the blocks ``M-``, ``M``, ``*E`` and ``-``.
    """

    # The layers of the model without cuts, and those of each further predicted token.
    layers: str
    heads: tuple[str, ...]
    # Names of the mixers of each block.
    blocks: tuple[tuple[str, ...], ...]
    # Of each block, the index of its first symbol.
    starts: tuple[int, ...]
    # Numbers of blocks before each cut.
    cuts: tuple[int, ...]

    @property
    def text(self) -> str:
        """The pattern without cuts."""
        return DEPTH.join((self.layers, *self.heads))

    @property
    def layout(self) -> str | None:
        """The cuts as a pipeline layout; None without any."""
        if not self.cuts:
            return None
        bounds = (0, *self.cuts, len(self.blocks))
        stages = ["t" * (stop - start) for start, stop in pairwise(bounds)]
        return f"E{CUT.join(stages)}L"


def letters() -> dict[str, str]:
    """Return the names of the mixers by their symbols, those of plugins last."""
    return {**LETTERS, **{letter: name for name, letter in _plugin_letters() if letter not in LETTERS}}


def _plugin_letters() -> list[tuple[str, str]]:
    """Return the names of plugins' mixers that have a letter, each with it."""
    found = ((name, getattr(mixer, "letter", None)) for name, mixer in registered("mixer").items())
    return [(name, letter) for name, letter in found if letter is not None]


def parse_pattern(text: str) -> LayerPattern:
    """Parse a layer pattern.

    Raises:
        PatternError: for anything else; names the character and its position from 1.
    """
    return _parse(text, tuple(letters().items()))


@lru_cache(maxsize=64)
def _parse(text: str, known: tuple[tuple[str, str], ...]) -> LayerPattern:
    names = dict(known)
    _check_symbols(text, (*names, CUT, DEPTH), "--hybrid-layer-pattern")
    main, *heads = text.split(DEPTH)
    layers = main.replace(CUT, "")
    if not layers:
        raise PatternError(f"{text!r} has no layer")
    if len(layers) > MAX_LAYERS:
        raise PatternError(f"{len(layers):,} layers are more than {MAX_LAYERS:,}")
    heads = [] if heads == [""] else heads
    for part in (main, *heads):
        if "*" in part and "+" in part:
            sentence = f"{part}: * and + are attention without and with a latent, of which a model has one"
            raise PatternError(sentence, spell(text.replace("*", "+")), spell(text.replace("+", "*")))
    _check_heads(text, main, heads)
    blocks = _blocks(layers)
    starts = tuple(accumulate(map(len, blocks[:-1]), initial=0))
    mixers = tuple(tuple(names[symbol] for symbol in block) for block in blocks)
    return LayerPattern(layers, tuple(heads), mixers, starts, _cuts(text, main, starts, len(layers)))


def parse_head(text: str) -> tuple[str, ...]:
    """Parse the layers of the block of a further predicted token; return the names of their mixers.

    Raises:
        PatternError: for anything else.
    """
    return _parse_head(text, tuple(letters().items()))


@lru_cache(maxsize=64)
def _parse_head(text: str, known: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    names = dict(known)
    _check_symbols(text, names, "--mtp-hybrid-override-pattern")
    if (once := _each_kind_once(text)) != text or not text:
        raise PatternError(_REPEATS.format(text), spell(once, "--mtp-hybrid-override-pattern"))
    return tuple(names[symbol] for symbol in text)


def _blocks(symbols: str) -> list[str]:
    return re.findall(r"[^-E][-E]|.", symbols)


_REPEATS = "{}: the block of a further predicted token has each kind of layer once"

_MISTYPED = {"\u2010": "-", "\u2013": "-", "\u2014": "-", "\u2212": "-", "A": "*", "\\": DEPTH, ",": CUT}
"""Symbols that are written or pasted in place of others."""


def _check_symbols(text: str, known: Collection[str], flag: str) -> None:
    """Check that a text has no other symbols than the known ones."""
    for place, symbol in enumerate(text, start=1):
        if symbol in known:
            continue
        where = f"{symbol!r} at character {place} of {text!r}"
        if symbol == SPARSE:
            sentence = f"{where} is DeepSeek sparse attention, which is not implemented"
            raise PatternError(sentence, spell(text.replace(SPARSE, "*" if "*" in text else "+"), flag))
        meant = [each if each in (*known, SPARSE) else _alike(each, known) for each in text]
        others = f"the symbols are {' '.join(known)}, and the letters of mixers that a --plugin registers"
        fixes = [spell("".join(map(str, meant)), flag)] if any(meant) and None not in meant else []
        raise PatternError(f"{where} is no layer; {others}", *fixes)


def _alike(symbol: str, known: Collection[str]) -> str | None:
    """Return the known symbol in whose place another one is written, nothing for a space, None for any other."""
    alike = (each for each in (symbol.swapcase(), _MISTYPED.get(symbol)) if each in known)
    return next(alike, "" if symbol.isspace() else None)


def _each_kind_once(text: str) -> str:
    """Return the symbols without those that name a second layer of a kind; an MLP and experts are one kind."""
    kinds = text.replace("E", "-")
    return "".join(symbol for place, symbol in enumerate(text) if kinds.index(kinds[place]) == place)


def _check_heads(text: str, main: str, heads: Sequence[str]) -> None:
    """Check the layers of the further predicted tokens."""
    if not heads:
        return
    first = next(filter(None, heads), "").replace(CUT, "")

    def with_heads(layers: str) -> str:
        return spell(DEPTH.join((main, *([layers] * len(heads) if layers else ()))))

    if any(CUT in head for head in heads):
        sentence = f"{text}: {CUT} is a cut of the layers before {DEPTH}, not of those after it"
        raise PatternError(sentence, with_heads(first))
    if len({*heads}) > 1 or not first:
        raise PatternError(f"{text}: the layers after each {DEPTH} must be the same", with_heads(first))
    if (once := _each_kind_once(first)) != first:
        raise PatternError(_REPEATS.format(first), with_heads(once))


def _cuts(text: str, main: str, starts: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the number of blocks before each cut."""
    layers, rest = main.replace(CUT, ""), text[len(main) :]
    places, bounds = [*accumulate(map(len, main.split(CUT)[:-1]))], [*starts, count]

    def with_cuts(places: Iterable[int]) -> str:
        return spell(CUT.join(layers[a:b] for a, b in pairwise((0, *places, count))) + rest)

    for number, place in enumerate(places):
        if place not in bounds:
            sentence = f"{text}: the cut after layer {place} is inside of the block {layers[place - 1 : place + 1]}"
            ends = (0, count)  # a cut there leaves a stage without layers
            near = sorted((place - 1, place + 1), key=lambda at: at in ends)
            moved = ({*places[:number], at, *places[number + 1 :]} for at in near)
            raise PatternError(sentence, *(with_cuts(sorted(each)) for each in moved))
    for number, (place, after) in enumerate(pairwise(places), start=1):
        if place == after:
            sentence = f"{text}: stage {number} has no layers; only the first and the last may have none"
            raise PatternError(sentence, with_cuts(dict.fromkeys(places)))
    return tuple(bounds.index(place) for place in places)


REPLACED = (
    *("token_mixers", "linear_attention_freq", "moe_layer_freq", "multi_latent_attention"),
    *("mtp_num_layers", "mtp_hybrid_override_pattern"),
)
"""Options that a layer pattern replaces, if they come from an earlier source."""


def pattern_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options, with those that a layer pattern implies.

    Its cuts become a pipeline layout, unless another option splits the layers. Without layers of further tokens, or
    with null for their number, none is predicted. It has no position embedding unless one is asked for.
    """
    text = values.get("hybrid_layer_pattern")
    if text is None:
        return {**values}
    known = {"position_embedding_type": "none", **values}
    if values.get("mtp_num_layers", text) is None:  # asked for
        known["hybrid_layer_pattern"] = text = text.partition(DEPTH)[0]
    elif DEPTH not in text and not values.get("mtp_hybrid_override_pattern"):
        known["mtp_num_layers"] = None
    with suppress(PatternError):  # reported by the check of the option
        pattern = parse_pattern(text)
        if pattern.cuts and not any(values.get(name) for name in SPLIT_OPTIONS):
            known |= {"hybrid_layer_pattern": pattern.text, "pipeline_model_parallel_layout": pattern.layout}
    return known


def pattern_notes(given: Mapping[str, Any], model: Model) -> Iterator[str]:
    """Yield notes on numbers of this start that the layer pattern replaces.

    Args:
        given: values of options, without those of a checkpoint.
        model: of the run, before it is resolved.
    """
    pattern = model.layer_pattern
    if pattern is None:
        return
    layers, depths, predicted = given.get("num_layers"), given.get("mtp_num_layers"), model.prediction_depths
    if layers not in (None, len(pattern.layers), len(pattern.blocks)):
        yield f"--num-layers {layers} has no effect: --hybrid-layer-pattern has {counted(len(pattern.layers), 'layer')}"
    if depths not in (None, predicted):
        further = counted(predicted, "further token")
        yield f"--mtp-num-layers {depths} has no effect: --hybrid-layer-pattern predicts {further}"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class LayerPatternOptions:
    """Options of hybrid models, whose layers are given one by one."""

    hybrid_layer_pattern: str | None = option(
        None, role="shape", check=parse_pattern, spellings=("--hybrid-override-pattern",)
    )
    """Residual layers of the model, a symbol for each: * attention, - MLP, E experts, + latent attention, M Mamba-2, G
    gated DeltaNet, or the letter of a plugin's mixer. | cuts the pipeline into stages, and /LAYERS at the end is a
    further predicted token (--mtp-num-layers) with a block of these layers. It replaces --num-layers; positions are
    none unless --position-embedding-type is given. Example: 'M-M*-|M-ME/*E'."""
    mtp_hybrid_override_pattern: str | None = option(
        None, role="shape", check=parse_head, droppable=True, needs=("hybrid_layer_pattern", "mtp_num_layers")
    )
    """Layers of the block of each further predicted token, whose number is --mtp-num-layers: an older spelling of
    /LAYERS at the end of --hybrid-layer-pattern."""

    other_meanings: ClassVar = """
    --hybrid-layer-pattern and position_embedding_type=none and not --position-embedding-type
      position_embedding_type is none; Megatron-LM learns positions unless a flag asks for none or others:
      --position-embedding-type learned_absolute
    """

    refused: ClassVar = """
    has_two_heads
    E120 --mtp-hybrid-override-pattern and the / of --hybrid-layer-pattern both set the layers of further tokens
      fix: drop --mtp-hybrid-override-pattern

    hybrid_layer_pattern and token_mixers!=attention
    E120 --token-mixers and --hybrid-layer-pattern both name the mixers
      fix: drop --token-mixers | drop --hybrid-layer-pattern

    hybrid_layer_pattern and moe_layer_freq
    E120 --moe-layer-freq and --hybrid-layer-pattern, with its E, both choose the layers with experts
      fix: drop --moe-layer-freq | drop --hybrid-layer-pattern

    hybrid_layer_pattern and parallel_attention
    E120 --parallel-attention joins layers, which --hybrid-layer-pattern puts one after the other
      fix: drop --parallel-attention | drop --hybrid-layer-pattern
    """

    @property
    def layer_pattern(self: Model) -> LayerPattern | None:
        """The blocks of a hybrid model; None for one of equal blocks."""
        return None if self.hybrid_layer_pattern is None else parse_pattern(self.hybrid_layer_pattern)

    @property
    def has_two_heads(self: Model) -> bool:
        """True if both spellings of the layers of further predicted tokens are given, and differ."""
        pattern, heads = self.layer_pattern, self.mtp_hybrid_override_pattern
        return pattern is not None and heads is not None and any(head != heads for head in pattern.heads)

    @property
    def token_mixer_names(self: Model) -> tuple[str, ...]:
        """The different mixers of tokens, those of ``token_mixers`` that no layer has included."""
        if self.layer_pattern is not None:
            return tuple(name for kind in self.kinds_of_layers for name in kind if name not in FEED_FORWARD)
        words = dict.fromkeys(self.repeated_token_mixers or ("attention",))
        return tuple(LATENT_ATTENTION if w == "attention" and self.multi_latent_attention else w for w in words)

    def check_letters(self: Model, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the letters of plugins' mixers name one mixer each."""
        owners: dict[str, str] = {**LETTERS, CUT: "a cut", DEPTH: "further tokens", SPARSE: "sparse attention"}
        for name, letter in _plugin_letters():
            if len(letter) != 1 or not letter.isprintable() or letter.isspace():
                yield Problem(
                    "E914", f"the mixer {name} of a plugin has the letter {letter!r}: it must be one character"
                )
            elif owners.setdefault(letter, name) != name:
                sentence = f"the mixer {name} of a plugin has the letter {letter!r}, which is that of {owners[letter]}"
                yield Problem("E914", sentence)

    def check_pattern(self: Model, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that other options agree with the pattern."""
        pattern = self.layer_pattern
        if pattern is None:
            return
        heads, text = [self.mtp_hybrid_override_pattern or ""] * self.prediction_depths, self.hybrid_layer_pattern
        if any(heads) and DEPTH not in text:
            text = DEPTH.join((text, *heads))
        names = {name for symbol, name in letters().items() if symbol in text}
        if "experts" in names and self.num_experts is None:
            sentence = f"{text} has layers of experts, and their number is not given"
            yield Problem("E120", sentence, ("--num-experts 8", spell(text.replace("E", "-"))))
        if self.num_experts is not None and "experts" not in names:
            sentence = f"{text} leaves no layer for the {self.num_experts} experts"
            yield Problem("E120", sentence, ("drop --num-experts", spell(text.replace("-", "E"))))
        if self.multi_latent_attention and "attention" in names:
            sentence = f"{text}: * is attention without a latent, and --multi-latent-attention asks for one"
            yield Problem("E120", sentence, (spell(text.replace("*", "+")), "drop --multi-latent-attention"))
        for name in SPLIT_OPTIONS if pattern.cuts else ():
            if getattr(config.parallel, name):
                sentence = f"{flag(name)} and the cuts of --hybrid-layer-pattern both determine the split of layers"
                yield Problem("E210", sentence, (f"drop {flag(name)}", spell(pattern.text)))


def without_pattern(model: Model) -> Model:
    """Return a model in the form of a GPT, if its pattern is one: attention, then an MLP or experts, in every block.

    Lists of the layers, which count symbols beside a pattern, count blocks then.
    """
    pattern = model.layer_pattern
    if pattern is None or {*map(len, pattern.blocks)} != {2}:
        return model
    kinds = {token_mixer for token_mixer, _ in pattern.blocks}
    if kinds not in ({"attention"}, {LATENT_ATTENTION}) or {*map(model.mixers, model.head_layers)} - {
        pattern.blocks[-1]
    }:
        return model
    experts = [feed_forward == "experts" for _, feed_forward in pattern.blocks]
    patterns = None if model.attention_pattern is None else split_layers(model.attention_pattern)
    return replace(
        model,
        hybrid_layer_pattern=None,
        mtp_hybrid_override_pattern=None,
        moe_layer_freq=None if len({*experts}) == 1 else format_selected_layers(experts),
        attention_pattern=patterns and format_layers([patterns[at % len(patterns)] for at in pattern.starts]),
        window_attn_skip_freq=_of_blocks(model.window_layers, pattern.starts),
        no_rope_freq=_of_blocks(model.layers_without_rope, pattern.starts),
    )


def _of_blocks(layers: Sequence[int] | None, starts: Sequence[int]) -> str | None:
    """Return a list of 0 and 1, of which each symbol has an entry, as a text for the blocks."""
    if layers is None:
        return None
    runs = ((flag, len([*run])) for flag, run in groupby(layers[at % len(layers)] for at in starts))
    return "+".join(f"[{flag}]*{length}" for flag, length in runs)
