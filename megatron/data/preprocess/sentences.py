"""Split texts into sentences: ``--split-sentences``.

A document becomes one sequence per sentence, as in Megatron-LM, which uses NLTK's Punkt. Here the rules are those of
sentencex, which has about 300 languages in its package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from megatron.data.errors import DataError

LANGUAGES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "malayalam": "ml",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}
"""Names of Punkt's models, which Megatron-LM's ``--lang`` takes, and the codes of these languages."""

LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[a-z]+)*")


@dataclass(frozen=True)
class SentenceSplitter:
    """The sentences of texts in a language."""

    language: str = "english"  # a name or a code
    keep_newlines: bool = False  # keep the white space between sentences, at the end of each

    def check(self) -> None:
        """Raise DataError if the language has no such form, or the library is missing."""
        if self.language not in LANGUAGES and not LANGUAGE_CODE.fullmatch(self.language):
            seen = f"--lang {self.language} is neither the code of a language nor one of {', '.join(LANGUAGES)}"
            raise DataError(seen, "--lang en")
        if find_spec("sentencex") is None:
            raise DataError("--split-sentences needs the package sentencex", "pip install sentencex")

    def __str__(self) -> str:
        return f"{self.language}{', white space kept' * self.keep_newlines}, sentencex {version('sentencex')}"

    def split(self, text: str) -> list[str]:
        """Return the sentences; none if there is only white space, unless that is kept."""
        import sentencex  # optional, and in workers only

        found: list[str] = sentencex.segment(LANGUAGES.get(self.language, self.language), text)
        if not self.keep_newlines:
            return [stripped for sentence in found if (stripped := sentence.strip())]
        kept: list[str] = []
        for sentence in found:
            if kept and not (sentence.strip() and kept[-1].strip()):
                kept[-1] += sentence
            else:
                kept.append(sentence)
        return kept
