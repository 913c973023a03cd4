"""All known bugs, by a name for tests; one file for each group of kinds."""

from __future__ import annotations

from tests.known_bugs import chats, conversion, data, evaluation, experts, packing, parallelism, resume, steps, texts
from tests.known_bugs.bug import KnownBug

BUGS: dict[str, KnownBug] = {
    **parallelism.BUGS,
    **packing.BUGS,
    **resume.BUGS,
    **steps.BUGS,
    **experts.BUGS,
    **texts.BUGS,
    **chats.BUGS,
    **data.BUGS,
    **evaluation.BUGS,
    **conversion.BUGS,
}
"""By name. ``python -m tests.known_bugs`` writes docs/known_bugs.md from it."""
