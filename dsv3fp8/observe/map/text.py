"""How wide a text comes out, so that boxes can be filled without a browser at hand.

Widths are those of DejaVu Sans, the widest font of the drawing's font list: what fits here fits in Helvetica or Arial.
"""

from __future__ import annotations

from collections.abc import Iterable

FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
# Advance widths in em, and how much wider a bold text comes out.
_CLASSES = {
    "'ijlIJ": 0.29, ",. ·/:;|f-": 0.36, "ᵀt()[]!r\"": 0.41, "*_`§sz?": 0.53, "cLkFvxyγP": 0.6, "aoTYebdhnpquESg": 0.63,
    "0123456789{}$K": 0.66, "AVBRXZC": 0.7, "UHNDGOQ&": 0.79, "w#+<=>^~×→←⇒≠≥": 0.84, "mwMW%": 0.99,
}  # fmt: skip
_OTHER = 1.0
_BOLD = 1.15
_WIDTHS = {letter: width for letters, width in _CLASSES.items() for letter in letters}


def text_width(text: str, size: float, bold: bool = False) -> float:
    """An upper estimate in pixels."""
    return size * sum(_WIDTHS.get(letter, _OTHER) for letter in text) * (_BOLD if bold else 1.0)


def longest_that_fits(texts: Iterable[str], size: float, width: float) -> str:
    """The first text that fits, "" if none does. texts: from the fullest to the shortest."""
    return next((text for text in texts if text_width(text, size) <= width), "")
