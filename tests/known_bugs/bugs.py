"""All known bugs, by a name for tests; one file for each group of kinds."""

from __future__ import annotations

from tests.known_bugs import (
    chats,
    conversion,
    data,
    evaluation,
    experts,
    packing,
    parallel_gradients,
    parallel_losses,
    parallel_sequences,
    resume,
    steps,
    texts,
)
from tests.known_bugs.bug import KnownBug, UncoveredBug

BUGS: dict[str, KnownBug] = {
    **parallel_gradients.BUGS,
    **parallel_losses.BUGS,
    **parallel_sequences.BUGS,
    **packing.BUGS,
    **steps.BUGS,
    **experts.BUGS,
    **texts.BUGS,
    **chats.BUGS,
    **data.BUGS,
    **evaluation.BUGS,
    **conversion.BUGS,
    **resume.BUGS,
}
"""By name. ``python -m tests.known_bugs`` writes docs/known_bugs.md from it."""

UNCOVERED: list[UncoveredBug] = parallel_losses.UNCOVERED
"""Those that no test covers, with the reason."""
