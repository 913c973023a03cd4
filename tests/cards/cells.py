"""All cells of a card, in the order of the page."""

from __future__ import annotations

from tests.cards import layouts, llama_cpp, readers, training, twin
from tests.cards.cell import Cell

CELLS: dict[str, Cell] = twin.CELLS | training.CELLS | layouts.CELLS | readers.CELLS | llama_cpp.CELLS
"""By name."""
