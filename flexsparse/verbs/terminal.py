"""What the terminal can: how wide it is, and which characters and colours it has."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexsparse.viz.terminal import Style


def width() -> int:
    """Columns; ``COLUMNS`` says it where nobody asks a terminal."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def style() -> Style:
    """Colours for a terminal, unless ``NO_COLOR`` is set; half blocks where the encoding has them."""
    try:
        "▀█░·".encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return "ascii"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return "half" if plain or not sys.stdout.isatty() else "colour"
