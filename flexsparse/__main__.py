"""``python -m flexsparse``."""

from flexsparse.cli import main

main()
