"""Writes the page: ``python -m flexsparse.gallery [FILE]``, by default gallery.html."""

import sys
from pathlib import Path

from flexsparse.gallery.page import write_page

if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[-1].startswith("-"):
        sys.exit("usage: python -m flexsparse.gallery [FILE], by default gallery.html")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "gallery.html")
    write_page(path)
    print(path)
