"""All known bugs, by a name for tests; one file for each group of kinds."""

from __future__ import annotations

from tests.known_bugs import chats, conversion, experts, packing, parallelism, resume, steps, texts
from tests.known_bugs.bug import KnownBug

BUGS: dict[str, KnownBug] = {
    **parallelism.BUGS,
    **packing.BUGS,
    **resume.BUGS,
    **steps.BUGS,
    **experts.BUGS,
    **texts.BUGS,
    **chats.BUGS,
    **conversion.BUGS,
}
"""By name. ``python -m tests.known_bugs`` writes docs/known_bugs.md from it."""
