"""Quality filters of published corpora, as implemented by `datatrove <https://github.com/huggingface/datatrove>`_."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from inspect import signature
from typing import Any, NamedTuple

from megatron.config.text import clipped, did_you_mean
from megatron.data.errors import DataError

QUALITY_FIX = "pip install 'megatron-pretrain[quality]'"
FILTERS = {
    "gopher-repetition": "GopherRepetitionFilter",
    "gopher-quality": "GopherQualityFilter",
    "c4": "C4QualityFilter",
    "fineweb": "FineWebQualityFilter",
}
"""Classes of datatrove's filters. Rules of Gopher: arXiv 2112.11446, of C4: arXiv 1910.10683, of FineWeb: arXiv
2406.17557. That of C4 also removes lines."""

GROUPS = {"gopher": ("gopher-repetition", "gopher-quality")}
"""Names of several filters, in their order."""

PROSE = """The river is wide, and the boats that cross it with people are slow in the summer of every year.
They have to be there before the sun goes down, and it is a long way for those who walk.
In the morning the market opens near the bridge, where farmers sell bread, apples and cheese.
Children like to watch how their parents bargain with the merchants about each single price.
When it rains, nobody stays outside, but the old inn at the corner is warm and full of voices."""
"""Text that all filters keep, so that it meets all their options."""


class QualityFilter(NamedTuple):
    """A filter of texts, as the fields of a loaded step."""

    fingerprint: str
    takes_text: bool
    columns: None
    apply: Callable[[str], tuple[str | None, str]]


def expand_groups(name: str) -> tuple[str, ...]:
    """Return the filters that a value of ``--quality`` stands for.

    Raises:
        DataError: if there is none of this name, or what follows it are no options.
    """
    base, colon, options = name.partition(":")
    if base in GROUPS and colon:
        given, takes = {option.partition("=")[0] for option in options.split(",")}, GROUPS[base][-1]
        with suppress(ImportError):
            takes = next((each for each in GROUPS[base] if given <= {*_options_of(each)}), takes)
        parts = (f"{each}:{options or 'OPTION=VALUE'}" if each == takes else each for each in GROUPS[base])
        sentence = f"--quality {name}: {base} is a group of filters, and each has options of its own"
        raise DataError(sentence, f"--quality {' '.join(parts)}")
    if base not in FILTERS and base not in GROUPS:
        raise DataError(f"--quality {name}: there is no such filter", f"--quality {' | '.join((*GROUPS, *FILTERS))}")
    for option in options.split(",") if colon else ():
        key, _, value = option.partition("=")
        if not (key and value):
            raise DataError(f"--quality {name}: {option!r} is not OPTION=VALUE", f"--quality {base}:OPTION=VALUE")
    return GROUPS.get(name, (name,))


def load_quality_filter(name: str) -> QualityFilter:
    """Return the filter ``NAME[:OPTION=VALUE,...]`` with the options of its class, by default those of datatrove.

    Raises:
        DataError: if the library is missing, has no such options, or fails at a text with them.
    """
    try:
        import spacy  # noqa: F401  (of datatrove, which imports it at the first document)
        from datatrove.data import Document
        from datatrove.pipeline import filters
    except ImportError as error:
        raise DataError(f"--quality {name} needs datatrove and spaCy: {error}", QUALITY_FIX) from error
    base, _, options = name.partition(":")
    known = _options_of(base)
    given = dict(option.split("=", 1) for option in options.split(",") if option)
    if unknown := [key for key in given if key not in known]:
        raise DataError(
            f"--quality {name}: {base} has no option {unknown[0]}; it has {', '.join(known)}",
            f"--quality {base}:{did_you_mean(unknown[0], known) or 'OPTION'}={given[unknown[0]]}",
        )
    try:
        quality = getattr(filters, FILTERS[base])(**{key: _value(text) for key, text in given.items()})
        quality.filter(Document(PROSE, "0"))
    except Exception as error:  # values of a wrong type fail anywhere in the library
        seen = f"--quality {name}: {'wrong options' if options else type(error).__name__}: {clipped(error)}"
        raise DataError(seen, f"--quality {base}:OPTION=NUMBER") from error

    def apply(text: str) -> tuple[str | None, str]:
        document = Document(text, "0")
        result = quality.filter(document)
        kept, reason = result if isinstance(result, tuple) else (result, "")
        return (document.text, "") if kept else (None, f"--quality {base}{': ' * bool(reason)}{reason or ''}")

    return QualityFilter(f"datatrove {version('datatrove')}", True, None, apply)


def _options_of(name: str) -> list[str]:
    """Return the options of a filter's class that a text can set."""
    from datatrove.pipeline import filters

    parameters = signature(getattr(filters, FILTERS[name])).parameters
    return [option for option in parameters if option != "exclusion_writer"]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
