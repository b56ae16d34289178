"""``python -m requant``."""

from requant.cli import main

main()
